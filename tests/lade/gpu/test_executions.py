"""However forwards over trees are executed, the text is that of `generate`."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lade
from tests.grids import thinned
from tests.lade.both import ONE, THREE, both, same_as_generate
from tests.lade.devices import CPU_AND_CUDA
from tests.lade.tiny import FAMILIES, BatchDrafter, tiny_model

FIXED = lade.Config(execution="fixed", max_draft_tokens=8)
LONG: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


def same(model: Any, config: lade.Config = FIXED, **options: Any) -> Any:
    """Compare the tokens of lade with those of `generate`; return lade's output."""
    return same_as_generate(model, ONE, config=config, **{**GREEDY, **options})[1]


def generate(model: Any, prompt: Tensor = ONE, **options: Any) -> Any:
    return lade.generate(model, prompt, config=FIXED, **{**GREEDY, **options})


@pytest.mark.parametrize("family", thinned(FAMILIES, "llama", "gemma3_text"))
@pytest.mark.parametrize("device", CPU_AND_CUDA)
@pytest.mark.parametrize("execution", ["fixed", "graphs"])
def test_the_text_is_that_of_generate(
    family: str, execution: Any, device: str, request: pytest.FixtureRequest
) -> None:
    """A replay knows nothing of Python: what it needs to know of a step is in its inputs."""
    recorder = None if device == "cuda" else request.getfixturevalue("recorder")
    dtype = torch.float32 if device == "cuda" else torch.float64
    model = tiny_model(family, dtype=dtype).to(device)
    config = lade.Config(execution=execution, max_draft_tokens=8)
    for prompt in (ONE, THREE[:1]):
        for do_sample in (False, True):
            for _ in range(1 if recorder else 2):
                _, got = both(model, prompt, config=config, do_sample=do_sample, **LONG)
            assert got.stats.mean_accepted_tokens > 1.3
    if recorder is not None and execution == "graphs":
        assert recorder.num_replayed > 4 * recorder.num_recorded >= 16


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("execution", thinned(["eager", "fixed"], "fixed"))
def test_what_is_learned_while_a_device_computes_is_learned_in_order(execution: Any) -> None:
    model, told = tiny_model("llama"), list[Any]()
    config = lade.Config(execution=execution, max_draft_tokens=7)
    for prompt in (ONE, THREE):
        for seed in range(2):
            both(model, prompt, config=config, seed=seed)
    both(model, THREE, config=config, num_return_sequences=2, temperature=1.5)
    both(model, ONE, config=config, do_sample=False, output_logits=True, output_scores=True)
    got = lade.generate(model, ONE, config=config, on_step=told.append, **GREEDY)
    assert [token for step in told for token in step.token_ids] == got[0, ONE.shape[1] :].tolist()


def test_rows_leave_and_come_back() -> None:
    model = tiny_model("gemma3_text")
    for seed in range(3):
        both(model, THREE, config=FIXED, seed=seed, num_return_sequences=2, max_new_tokens=30)


def test_rejection_sampling_runs_in_fixed_shapes() -> None:
    model = tiny_model("llama")
    options = {**GREEDY, "do_sample": True, "temperature": 0.2}
    texts = []
    for execution in ("eager", "fixed"):
        torch.manual_seed(0)
        config: Any = {"execution": execution, "acceptance": "rejection", "max_draft_tokens": 7}
        texts.append(lade.generate(model, ONE, config=lade.Config(**config), **options))
    assert torch.equal(*texts)


@pytest.mark.usefixtures("trusted")
def test_forwards_have_few_widths_and_are_filled_with_nodes() -> None:
    model = tiny_model("llama")
    widths: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    options = {**GREEDY, "max_new_tokens": 100, "eos_token_id": None}
    answer = model.generate(ONE, **options)
    drafter = BatchDrafter(answer.tolist(), np.random.default_rng(0), 0.8)
    config = lade.Config(execution="fixed", max_draft_tokens=7)
    got = lade.generate(
        model, ONE, drafter=drafter, config=config, return_dict_in_generate=True, **options
    )
    assert torch.equal(got.sequences, answer)
    assert {*widths[-got.stats.num_steps :]} <= {1, 2, 4, 8, 16, 32}
    assert got.stats.draft_tokens_per_step > 4


# --- memory that is kept between calls ----------------------------------------------------------


@pytest.mark.usefixtures("cramped")
def test_a_text_that_outgrows_its_memory_goes_on_in_more() -> None:
    model = tiny_model("mistral")
    both(model, THREE, config=FIXED, max_new_tokens=300, do_sample=False, eos_token_id=None)


def test_it_goes_with_the_model_and_is_given_back_on_demand() -> None:
    model = tiny_model("llama")
    same(model)
    lade.release(model)
    lade.release(model)  # nothing is left
    same(model)
    known = weakref.ref(model)
    del model
    gc.collect()
    assert known() is None


def test_calls_inside_of_others_and_calls_that_are_broken_off_leave_the_next_one_whole() -> None:
    model = tiny_model("llama")
    expected = model.generate(ONE, **GREEDY)
    inner: list[Tensor] = []

    def fail(step: Any) -> None:
        inner.append(generate(model))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, on_step=fail)
    got = generate(model, on_step=lambda step: inner.append(generate(model)))
    assert all(torch.equal(each, expected) for each in [got, *inner])


def test_a_cache_that_is_returned_is_the_callers() -> None:
    model = tiny_model("gemma3_text")
    options: dict[str, Any] = {"return_dict_in_generate": True, "eos_token_id": None}
    plain = model.generate(ONE, **GREEDY, **options)
    got = generate(model, **options)
    generate(model, ONE + 3, max_new_tokens=20)  # writes where the first call wrote
    longer = torch.cat([plain.sequences, torch.tensor([[3, 4]])], dim=1)
    turn = {**GREEDY, "attention_mask": torch.ones_like(longer)}  # which may hold what pads
    expected = model.generate(longer, past_key_values=plain.past_key_values, **turn)
    answer = generate(model, longer, past_key_values=got.past_key_values, **turn)
    assert torch.equal(answer, expected)


def test_batches_inference_mode_and_precisions_may_take_turns() -> None:
    model = tiny_model("mistral", dtype=torch.float32)
    expected = [generate(model, prompt) for prompt in (ONE, THREE)]
    for _ in range(2):
        with torch.inference_mode():
            same(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            generate(model)
        for prompt, text in zip((ONE, THREE), expected, strict=True):
            assert torch.equal(generate(model, prompt), text)


def test_less_memory_is_taken_and_what_cannot_be_held_is_said(
    little_memory: dict[str, int],
) -> None:
    model = tiny_model("llama")
    options = {**GREEDY, "max_new_tokens": 60, "eos_token_id": None}
    expected = model.generate(ONE, **options)
    same(model)  # which checks it
    message = r"not enough memory for the keys or values of \d+ tokens in 3 layers"
    for most in (80, 40, 10**9):
        lade.release(model)
        little_memory["most"] = most
        said = pytest.warns(lade.VerificationWarning, match=message)
        with said if most == 40 else nullcontext():
            assert torch.equal(generate(model, **options), expected)
    assert little_memory["refused"] > 2


# --- where it is not possible -------------------------------------------------------------------


def test_steps_are_held_against_the_models_own_attention(bend: Callable[[Any], None]) -> None:
    """What both sides of a check had would be noticed by none."""
    model = tiny_model("llama", seed=1)
    both(model, ONE, config=FIXED, accept=0.9, **LONG)  # which checks it
    bend(model)
    with pytest.warns(lade.VerificationWarning, match="differ from those for the same token alone"):
        both(model, ONE, config=FIXED, accept=0.9, may_fail=True, **LONG)


@pytest.mark.usefixtures("wrong_slots")
def test_a_check_that_fails_leaves_trees_as_they_were() -> None:
    model = tiny_model("llama")
    with pytest.warns(lade.EagerExecutionWarning, match="not of fixed shape: its logits differ"):
        _, got = both(model, ONE, config=FIXED, **LONG)
    assert got.stats.num_accepted_tokens > 0
    same(model)  # said once; another warning would be an error


def test_what_has_no_fixed_shape_is_run_eagerly_and_said_once() -> None:
    model = tiny_model("llama", attention="eager")
    chain = lade.Config(execution="fixed", verification="chain")
    with pytest.warns(lade.EagerExecutionWarning, match="it verifies drafts by 'chain'"):
        same(model, chain)


def test_graphs_are_to_be_asked_for_and_refused_where_there_are_none() -> None:
    with pytest.raises(lade.UnsupportedOptionError, match="CUDA graphs need a CUDA device"):
        same(tiny_model("llama"), lade.Config(execution="graphs"))
