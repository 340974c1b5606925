"""The real embedded model, fetched once from the package index: real weights, real prompts."""

import re
from pathlib import Path
from typing import Any

import pytest

import lade
from lade.models import LoadedModel, encode, load
from tests.lade.both import same_as_generate

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("real_model")]
ROOT = Path(__file__).parents[3]
PROMPTS = [
    "What should I look at first when I visit a city I have never been to before?",
    "Write a Python class Stack with the methods push, pop, peek, is_empty and size.",
    "Rename d to prices in this code, and return it:\n\ndef total(d):\n    return sum(d.values())",
]


def both(loaded: LoadedModel, prompt: str, pool: lade.NGramPool) -> tuple[list[int], Any]:
    inputs = encode(loaded.tokenizer, prompt, loaded.model.device)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 32}
    expected = loaded.model.generate(**inputs, **options)[0].tolist()
    # A fixed number of nodes: the tests must not depend on how fast this machine is just now.
    config = lade.Config(max_draft_tokens=8)
    got = lade.generate(
        loaded.model, **inputs, pool=pool, config=config, return_dict_in_generate=True, **options
    )
    return expected, got


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_float32_text_and_samples_are_those_of_plain_generate(device: str) -> None:
    loaded = load(dtype="float32", device=device)
    pool = lade.NGramPool()
    for prompt in PROMPTS:
        expected, got = both(loaded, prompt, pool)
        assert got.sequences[0].tolist() == expected
        ids = encode(loaded.tokenizer, prompt, device)["input_ids"]
        same_as_generate(loaded.model, ids, do_sample=True, temperature=0.7, top_p=0.9, seed=5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_question_that_is_shown_first_is_answered_rightly_and_drafted_for(page: str) -> None:
    question = re.search(r'^question = "(.*)"$', (ROOT / page).read_text(), re.MULTILINE)
    assert question is not None
    loaded = load(dtype="float32", device="cpu")
    expected, got = both(loaded, question[1], lade.NGramPool())
    assert got.sequences[0].tolist() == expected
    answer = loaded.tokenizer.decode(expected).split("assistant\n")[-1]
    assert {"1871", "164"} <= {*re.findall(r"\d+", answer)}
    assert got.stats.mean_accepted_tokens > 2
