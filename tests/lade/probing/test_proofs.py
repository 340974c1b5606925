"""Each call proves itself: code of the user's own in forwards costs a step, and no text."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import lade
from lade.probing.proof import DISTANCE
from tests.lade import states
from tests.lade.both import EIGHT, ONE, answered, same_as_generate
from tests.lade.states import SIZE
from tests.lade.tiny import tiny_model

LONG: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None}


def model_of() -> Any:
    return tiny_model("llama", seed=3, hidden_size=SIZE)


def widths_of(model: Any, **options: Any) -> tuple[Any, list[int]]:
    """Return a call's answer, and how many tokens each of its forwards had, as a hook saw them."""
    widths: list[int] = []
    note = model.model.layers[1].register_forward_hook(
        lambda module, args, output: widths.append(args[0].shape[1])
    )
    lade.generate(model, ONE, max_new_tokens=2)  # the model is checked with the hook
    widths.clear()
    answer = answered(model, ONE, **options)
    note.remove()
    return answer, widths


def test_a_call_runs_one_token_alone_and_two_before_its_first_draft() -> None:
    model = model_of()
    pool = lade.NGramPool()
    pool.observe(answered(model, ONE, **LONG).sequences[0].tolist())
    config = lade.Config(max_draft_tokens=4, max_candidates=1)
    answer, widths = widths_of(model, pool=pool, config=config, **LONG)
    assert widths[:3] == [ONE.shape[1], 1, 2 + 1 + 4]
    assert max(widths[3:]) == 1 + 4
    assert answer.stats.num_accepted_tokens > 10


def test_calls_without_code_of_ones_own_are_proved_in_turn() -> None:
    model, pool = model_of(), lade.NGramPool()
    pool.observe(model.generate(ONE, do_sample=False, **LONG)[0].tolist())
    config = lade.Config(max_draft_tokens=4, max_candidates=1)
    call: dict[str, Any] = {"pool": pool, "config": config, **LONG}
    usual = answered(model, ONE, **call).stats.num_steps
    num = 2 * DISTANCE // usual  # calls with drafts in every step
    steps = [answered(model, ONE, **call).stats.num_steps for _ in range(num)]
    assert sorted(steps) == [*[usual] * (num - 2), usual + 1, usual + 1]  # a token runs alone


def test_a_prompt_whose_end_is_masked_is_not_run_once_more() -> None:
    """Its last token would see itself, and be seen by those after it."""
    model, mask = model_of(), torch.ones_like(ONE)
    mask[0, -1] = 0
    options = {"attention_mask": mask, **LONG}
    pool, plain = lade.NGramPool(), model.generate(ONE, do_sample=False, **options)
    pool.observe(plain[0].tolist())
    # What fails is a warning, and so an error.
    answer, widths = widths_of(model, pool=pool, config=lade.Config(max_draft_tokens=4), **options)
    assert torch.equal(answer.sequences, plain)
    assert 2 + 1 + 4 in widths[3:]


@pytest.mark.parametrize("alpha", [1.0, 3.0])
def test_what_changes_in_a_call_holds_at_the_next_at_last(alpha: float) -> None:
    """As docs/exactness.md says: until the next proof, a change in mid-call can be missed."""
    model, at = model_of(), 10
    put = states.hook_attribute(model)
    put(0.0)
    unchanged = answered(model, ONE, **LONG).sequences
    lengths: list[int] = []

    def change(step: lade.Step) -> None:
        lengths.append(len(step.token_ids))
        if sum(lengths) >= at > sum(lengths[:-1]):
            put(alpha)

    pool = lade.NGramPool()
    pool.observe(unchanged[0].tolist())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.VerificationWarning)
        got = lade.generate(model, ONE, pool=pool, config=EIGHT, on_step=change, **LONG)
    steps = iter(lengths)
    num_before = 0
    while num_before < at:
        num_before += next(steps)
    assert got[0, : ONE.shape[1] + num_before].tolist() == (
        unchanged[0, : ONE.shape[1] + num_before].tolist()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.VerificationWarning)
        same_as_generate(model, ONE, knows=True, config=EIGHT, **LONG)


def test_a_hook_that_treats_drafts_apart_leaves_the_text_alone() -> None:
    model = model_of()
    alpha = [0.0]

    def hook(module: Any, args: Any, output: Tensor) -> Tensor:
        return states.steered(output, alpha[0])

    states.mlp_of(model).register_forward_hook(hook)
    same_as_generate(model, ONE, knows=True, config=EIGHT, **LONG)
    alpha[0] = 2.0
    with pytest.warns(lade.VerificationWarning, match="logits for a draft differ"):
        same_as_generate(model, ONE, knows=True, config=EIGHT, **LONG)
