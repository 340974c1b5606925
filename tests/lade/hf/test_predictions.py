from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import lade
from lade.hf.predictions import beside_prediction
from ngram_pool import NGramPool
from tests.grids import thinned
from tests.lade.both import EIGHT, ONE, THREE, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import BatchDrafter, tiny_model

FAMILY = "llama"
PRICED = lade.Config(step_costs={1: 10, 8: 12, 16: 14, 32: 20})


def answer_of(model: Any, num_tokens: int = 48, seed: int = 0, **options: Any) -> list[int]:
    torch.manual_seed(seed)
    given = {"do_sample": False, "max_new_tokens": num_tokens, "pad_token_id": 0} | options
    tokens: list[int] = model.generate(ONE, **given)[0, ONE.shape[1] :].tolist()
    return tokens


def edited(answer: list[int], how: str) -> list[int]:
    middle = len(answer) // 2
    return {
        "right": answer,
        "wrong": [3 + (7 * place) % 50 for place in range(len(answer))],
        "shifted": answer[5:],
        "inserted": [*answer[:middle], 9, 9, 8, *answer[middle:]],
        "deleted": [*answer[:middle], *answer[middle + 4 :]],
        "replaced": [*answer[:middle], 9, *answer[middle + 1 :]],
        "outside": [*answer[:middle], 10**6, *answer[middle + 1 :]],
        "empty": [],
    }[how]


HOWS = ("right", "wrong", "shifted", "inserted", "deleted", "replaced", "outside", "empty")
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.3}


@pytest.mark.parametrize("options", thinned([{}, SAMPLED], SAMPLED), ids=["greedy", "sampled"])
@pytest.mark.parametrize("how", thinned(HOWS, "right", "replaced"))
def test_text_is_that_of_generate(how: str, options: dict[str, Any]) -> None:
    model = shared_model(FAMILY)
    prediction = edited(answer_of(model, **options), how)
    by = partial(lade.generate, prediction=prediction)
    for config in (None, PRICED, EIGHT):
        same_as_generate(model, ONE, by=by, config=config, max_new_tokens=48, **options)


def test_a_right_prediction_saves_steps() -> None:
    model = shared_model(FAMILY)
    answer = answer_of(model, **SAMPLED)
    run = partial(same_as_generate, model, ONE, config=PRICED, max_new_tokens=48, **SAMPLED)
    _, without = run()
    _, right = run(by=partial(lade.generate, prediction=torch.tensor(answer)))
    assert right.stats.num_steps <= 8 < without.stats.num_steps
    assert right.stats.sources["prediction"].num_accepted_tokens >= 40


def test_an_answer_after_hard_ones_takes_the_steps_of_a_fresh_one() -> None:
    """Nothing but costs outlives a call, neither that drafts were refused nor that none paid."""
    model = tiny_model(FAMILY, seed=5)
    answer = answer_of(model, 64, **SAMPLED)

    def taken(how: str, seed: int) -> tuple[int, int, int]:
        by = partial(lade.generate, prediction=edited(answer, how))
        options = {**SAMPLED, "max_new_tokens": 64, "seed": seed}
        stats = same_as_generate(model, ONE, by=by, config=PRICED, **options)[1].stats
        return stats.num_steps, stats.num_draft_tokens, stats.num_accepted_tokens

    fresh = taken("right", 0)
    for seed in range(1, 4):
        hard = taken("wrong", seed)
        assert hard[0] > 3 * fresh[0]
    assert taken("right", 0) == fresh


@pytest.mark.parametrize("verification", ["chain", "snapshot"])
def test_paths_are_verified_where_trees_are_not(verification: Any) -> None:
    model = shared_model(FAMILY)
    by = partial(lade.generate, prediction=edited(answer_of(model), "inserted"))
    config = lade.Config(verification=verification)
    same_as_generate(model, ONE, by=by, config=config, max_new_tokens=48)


def test_rows_of_a_batch_draft_from_the_same_prediction() -> None:
    model = shared_model(FAMILY)
    by = partial(lade.generate, prediction=answer_of(model))
    same_as_generate(model, THREE, by=by, config=EIGHT)
    same_as_generate(
        model, ONE, by=by, config=EIGHT, do_sample=True, num_return_sequences=3, temperature=0.7
    )


def test_candidates_are_limited_as_the_config_says() -> None:
    model = shared_model(FAMILY)
    by = partial(lade.generate, prediction=edited(answer_of(model), "replaced"))
    same_as_generate(model, ONE, by=by, config=lade.Config(max_candidates=1, max_draft_tokens=8))


def test_rejection_sampling_drafts_from_it() -> None:
    model = shared_model(FAMILY)
    config = lade.Config(acceptance="rejection", step_costs=PRICED.step_costs)
    # So low that what is drawn is nearly always the likeliest.
    options: dict[str, Any] = {"do_sample": True, "temperature": 1e-4, "max_new_tokens": 48}
    prediction = answer_of(model)
    output = lade.generate(
        model, ONE, config=config, prediction=prediction, return_dict_in_generate=True, **options
    )
    assert output.stats.num_steps <= 20
    assert output.stats.sources["prediction"].num_accepted_tokens > 20


def test_a_drafter_drafts_besides() -> None:
    model = shared_model(FAMILY)
    answer = answer_of(model)
    drafter = BatchDrafter([[*ONE[0].tolist(), *answer]], np.random.default_rng(0), 0.5)
    output = lade.generate(
        model,
        ONE,
        drafter=drafter,
        prediction=answer,
        max_new_tokens=48,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert output.sequences[0, 7:].tolist() == answer
    assert output.stats.sources.keys() == {"BatchDrafter", "prediction"}


def test_nothing_of_it_is_learned_or_kept() -> None:
    model, pool = shared_model(FAMILY), NGramPool(seed=1)
    answer = answer_of(model)
    prediction = [*answer[:20], 41, 42, 43, 44, 45, *answer[20:]]
    options: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False, "pool": pool}
    lade.generate(model, ONE, prediction=prediction, **options)
    assert [text.tolist() for text in pool.texts()] == [[*ONE[0].tolist(), *answer]]
    options |= {"return_dict_in_generate": True, "pool": None}
    lade.generate(model, ONE, prediction=answer, **options)
    after = lade.generate(model, ONE, config=PRICED, **options)
    fresh = lade.generate(tiny_model(FAMILY), ONE, config=PRICED, **options)
    assert after.stats.num_steps == fresh.stats.num_steps
    assert "prediction" not in after.stats.sources


@pytest.mark.parametrize("door", ["wrap", "decode", "wrapped decode"])
def test_every_entry_point_takes_it(door: str) -> None:
    model = tiny_model(FAMILY)
    answer = answer_of(model)
    if "wrap" in door:
        lade.wrap(model)
    options: dict[str, Any] = {"custom_generate": lade.decode} if "decode" in door else {}
    output = model.generate(
        ONE,
        prediction=answer,
        config=PRICED,
        max_new_tokens=48,
        do_sample=False,
        return_dict_in_generate=True,
        **options,
    )
    assert output.sequences[0, 7:].tolist() == answer
    assert output.stats.num_steps <= 8


class Words:
    """A tokenizer of numbers in words of their own."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [int(word) for word in text.split()]}


def test_text_takes_a_tokenizer() -> None:
    model = shared_model(FAMILY)
    text = " ".join(map(str, answer_of(model)))
    options: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False, "config": PRICED}
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
        (3, TypeError, "to be text or token ids, got 3"),
        (b"a", TypeError, "to be text or token ids"),
        ([0.5], TypeError, "got values of float64"),
        ([[1, 2], [3, 4]], ValueError, r"the same for all rows, got the shape \[2, 2\]"),
        ([-1], ValueError, "from 0 to"),
        ([2**31], ValueError, "from 0 to"),
        (SimpleNamespace(), TypeError, "to be text or token ids"),
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


def test_what_drafters_cost_is_kept_beside_predictions() -> None:
    merged = lade.drafters.Merged([lade.drafters.CallPool(), NGramPool()])
    beside = beside_prediction(merged, [5, 6])
    assert isinstance(beside, lade.drafters.Merged)
    assert beside._costs[:2] == merged._costs
    assistant = lade.drafters.AssistantModel(tiny_model(FAMILY, seed=1))
    beside = beside_prediction(assistant, [5, 6])
    assert isinstance(beside, lade.drafters.Merged)
    assert beside._costs[0] is assistant._costs
