"""What an answer will probably be: fewer steps where it is right, and the same text."""

from functools import partial
from typing import Any

import pytest
import torch

import lade
from ngram_pool import NGramPool
from tests.lade.both import ONE, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import tiny_model

FAMILY = "llama"
# What is drawn differs between CPUs: a text must not end where one of them draws the end.
ENDLESS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}
SIXTEEN = lade.Config(max_draft_tokens=16)


def answer_of(model: Any, num_tokens: int = 48, seed: int = 0, **options: Any) -> list[int]:
    torch.manual_seed(seed)
    given = {"do_sample": False, "max_new_tokens": num_tokens, **ENDLESS, **options}
    tokens: list[int] = model.generate(ONE, **given)[0, ONE.shape[1] :].tolist()
    return tokens


SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.3, **ENDLESS}


def test_a_right_prediction_saves_steps() -> None:
    model = shared_model(FAMILY)
    answer = answer_of(model, **SAMPLED)
    run = partial(same_as_generate, model, ONE, config=SIXTEEN, max_new_tokens=48, **SAMPLED)
    _, without = run()
    _, right = run(by=partial(lade.generate, prediction=torch.tensor(answer)))
    assert right.stats.num_steps <= 8 < without.stats.num_steps
    assert right.stats.sources["prediction"].num_accepted_tokens >= 40


def test_an_answer_after_hard_ones_takes_the_steps_of_a_fresh_one() -> None:
    """Nothing but costs outlives a call, neither that drafts were refused nor that none paid."""
    model = tiny_model(FAMILY, seed=5)
    answer = answer_of(model, 64, **SAMPLED)

    def taken(prediction: list[int], seed: int) -> tuple[int, int, int]:
        by = partial(lade.generate, prediction=prediction)
        options = {**SAMPLED, "max_new_tokens": 64, "seed": seed}
        stats = same_as_generate(model, ONE, by=by, config=SIXTEEN, **options)[1].stats
        return stats.num_steps, stats.num_draft_tokens, stats.num_accepted_tokens

    fresh = taken(answer, 0)
    for seed in range(1, 4):
        hard = taken([3 + (7 * place) % 50 for place in range(64)], seed)
        assert hard[0] > 3 * fresh[0]
    assert taken(answer, 0) == fresh


def test_nothing_of_it_is_learned_or_kept() -> None:
    model, pool = shared_model(FAMILY), NGramPool(seed=1)
    answer = answer_of(model)
    prediction = [*answer[:20], 41, 42, 43, 44, 45, *answer[20:]]
    options: dict[str, Any] = {**ENDLESS, "max_new_tokens": 48, "do_sample": False, "pool": pool}
    lade.generate(model, ONE, prediction=prediction, **options)
    assert [text.tolist() for text in pool.texts()] == [[*ONE[0].tolist(), *answer]]
    options |= {"return_dict_in_generate": True, "pool": None}
    lade.generate(model, ONE, prediction=answer, **options)
    after = lade.generate(model, ONE, config=SIXTEEN, **options)
    fresh = lade.generate(tiny_model(FAMILY), ONE, config=SIXTEEN, **options)
    assert after.stats.num_steps == fresh.stats.num_steps
    assert "prediction" not in after.stats.sources


class Words:
    """A tokenizer of numbers in words of their own."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [int(word) for word in text.split()]}


def test_text_takes_a_tokenizer() -> None:
    model = shared_model(FAMILY)
    text = " ".join(map(str, answer_of(model)))
    options: dict[str, Any] = {
        **ENDLESS,
        "max_new_tokens": 48,
        "do_sample": False,
        "config": SIXTEEN,
    }
    options["return_dict_in_generate"] = True
    output = lade.generate(model, ONE, prediction=text, tokenizer=Words(), **options)
    assert output.stats.num_steps <= 8
    with pytest.raises(ValueError, match="expected tokenizer= beside a prediction of text, got no"):
        lade.generate(model, ONE, prediction=text, **options)
    with pytest.raises(ValueError, match="pass token ids"):
        model.generate(ONE, prediction=text, custom_generate=lade.decode, **options)


@pytest.mark.parametrize(
    ("prediction", "error", "message"),
    [
        (3, ValueError, r"text or token ids, of shape \[num_tokens\], got shape \[\]"),
        (b"a", ValueError, r"of shape \[num_tokens\]"),
        ([0.5], TypeError, "to be integers, got dtype float64"),
        ([[1, 2], [3, 4]], ValueError, r"got shape \[2, 2\]"),
        ([-1], ValueError, "from 0 to"),
        ([2**31], ValueError, "from 0 to"),
    ],
)
def test_what_is_no_prediction_is_refused(
    prediction: Any, error: type[Exception], message: str
) -> None:
    model = shared_model(FAMILY)
    with pytest.raises(error, match=message):
        lade.generate(model, ONE, prediction=prediction, max_new_tokens=4)


def test_a_tensor_is_refused_where_transformers_would_repeat_it() -> None:
    options: dict[str, Any] = {"custom_generate": lade.decode, "max_new_tokens": 4}
    with pytest.raises(TypeError, match="got a tensor"):
        shared_model(FAMILY).generate(ONE, prediction=torch.tensor([1, 2]), **options)
