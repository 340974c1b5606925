"""Many calls at once: each has the text that it has alone."""

import random
from concurrent.futures import CancelledError
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

import lade
from tests.grids import thinned_rows
from tests.lade.batches import num_wrong, random_call
from tests.lade.both import ONE
from tests.lade.tiny import BLOOM, CACHE, MAMBA2, tiny_model

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 30}
TOGETHER = [*("llama", "qwen3", "gpt2", "gpt_neox", "opt", "mistral", "gemma3_text", "phi3")]


@pytest.mark.parametrize(
    ("family", "stall_sec"),
    thinned_rows(product(TOGETHER, (0.5, 1e-4)), ("gemma3_text", 1e-4)),
)
def test_calls_that_come_and_go_have_their_own_texts(family: str, stall_sec: float) -> None:
    wrong, batcher = num_wrong(tiny_model(family), 16, seed=7, stall_sec=stall_sec)
    assert wrong == 0
    assert batcher.is_joint


ALONE: list[tuple[str, dict[str, Any]]] = [
    ("bloom", {**BLOOM, "attention": "eager"}),
    ("mamba2", {**MAMBA2, "attention": "eager"}),
    ("llama4_text", {}),
    ("deepseek_v3", {}),
]


@pytest.mark.filterwarnings("ignore:lade falls back:lade.PlainDecodingWarning")  # batches are plain
@pytest.mark.parametrize(("family", "options"), thinned_rows(ALONE, ALONE[2]))
def test_models_that_go_alone_take_turns(family: str, options: dict[str, Any]) -> None:
    wrong, batcher = num_wrong(tiny_model(family, **options), 8, seed=3)
    assert wrong == 0
    assert not batcher.is_joint


@pytest.mark.exhaustive  # test_arithmetic.py has such calls, and test_job.py their numbers
def test_float32_has_the_same_texts() -> None:
    """Of all calls at once by one job, whose heads are of whole vectors."""
    wrong, batcher = num_wrong(tiny_model("qwen3", dtype=torch.float32, head_dim=32), 8, seed=1)
    assert wrong == 0
    assert batcher.is_joint


@pytest.mark.filterwarnings("ignore:lade falls back:lade.PlainDecodingWarning")
def test_code_of_ones_own_in_the_forward_sees_its_call_alone() -> None:
    model = tiny_model()

    def steer(module: Any, args: Any, output: Tensor) -> Tensor:
        return torch.cat([output[:, :-1], output[:, -1:] + 0.5], dim=1)

    with model.model.layers[0].mlp.register_forward_hook(steer):
        wrong, _ = num_wrong(model, 6, seed=2)
    assert wrong == 0


def test_a_new_call_begins_while_a_long_prompt_runs() -> None:
    order: list[str] = []
    with lade.Batcher(tiny_model(max_position_embeddings=8192), stall_sec=1e-4) as batcher:
        for name, length in (("long", 6000), ("short", 4)):
            ids = torch.full((1, length), 5)
            note = partial(lambda name, _: order.append(name), name)
            given = {**GREEDY, "attention_mask": torch.ones_like(ids), "max_new_tokens": 2}
            batcher.submit(ids, on_step=note, **given)
    assert order[0] == "short"


def test_tokens_come_one_by_one_and_cancelling_ends_them() -> None:
    asked = random_call(random.Random(0))
    asked.options.update(GREEDY, max_new_tokens=400)
    with lade.Batcher(tiny_model()) as batcher:
        request = asked.submitted(batcher)
        tokens = iter(request)
        first = [next(tokens) for _ in range(5)]
        assert request.running()
        assert request.cancel()
        with pytest.raises(CancelledError):
            list(tokens)
        with pytest.raises(CancelledError):
            request.result(timeout=30)
        assert request.cancelled()
        assert request.done()
        assert not request.cancel()
        whole = asked.submitted(batcher, return_dict_in_generate=True)
        streamed = [*whole]
    assert streamed[:5] == first
    output = whole.result()
    assert output.sequences[0, asked.input_ids.shape[1] :].tolist() == streamed
    assert output.stats.num_tokens == 400
    assert not whole.cancelled()


def test_calls_that_fit_pass_one_that_does_not_and_those_that_wait_can_be_cancelled() -> None:
    num_tokens, model = ONE.shape[1] + 300, tiny_model()
    model.generation_config.update(max_new_tokens=300, eos_token_id=None)
    with lade.Batcher(model, max_batch_tokens=num_tokens + 20) as batcher:
        config = GenerationConfig(do_sample=False)
        submit = partial(batcher.submit, inputs=ONE, generation_config=config)
        holding, waiting, cancelled = (submit() for _ in range(3))
        next(iter(holding))
        assert cancelled.cancel()
        with pytest.raises(CancelledError):
            cancelled.result(timeout=30)
        small = submit(max_new_tokens=5)
        assert small.result().shape[1] == ONE.shape[1] + 5
        assert batcher.engine.num_running == 1
        assert not waiting.done()
        assert torch.equal(waiting.result(), holding.result())


@pytest.mark.parametrize("options", [{"max_batch_size": 0}, {"max_batch_tokens": 0}])
def test_limits_below_one_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"expected {next(iter(options))} to be positive, got 0"):
        lade.Batcher(tiny_model(), **options)


def test_a_closed_batcher_refuses_calls_and_still_runs_functions() -> None:
    model = tiny_model()
    batcher = lade.Batcher(model)
    batcher.close()
    with pytest.raises(RuntimeError, match="closed"):
        batcher.submit(ONE)
    tokens = batcher.run(lambda: lade.generate(model, ONE, **GREEDY))
    assert torch.equal(tokens, model.generate(ONE, **GREEDY))


def test_calls_with_other_inputs_or_of_another_model_run_apart() -> None:
    model, other = tiny_model("gpt2"), tiny_model("gpt2", seed=1)
    types = torch.full_like(ONE, 9)
    expected = [
        model.generate(ONE, **GREEDY),
        model.generate(ONE, token_type_ids=types, **GREEDY),
        other.generate(ONE, **GREEDY),
    ]
    with lade.Batcher(model) as batcher:
        requests = [batcher.submit(ONE, **GREEDY) for _ in range(3)]
        typed = batcher.submit(ONE, token_type_ids=types, **GREEDY)
        of_other = batcher.run(lambda: lade.generate(other, ONE, **GREEDY))
        for request in requests:
            assert torch.equal(request.result(), expected[0])
        assert torch.equal(typed.result(), expected[1])
        assert torch.equal(of_other, expected[2])
    assert batcher.why_not_joint is None


def test_a_call_runs_in_the_modes_of_the_thread_that_submits_it() -> None:
    model = tiny_model(dtype=torch.float32, hidden_size=64)
    seen: set[tuple[bool, bool]] = set()
    model.register_forward_hook(
        lambda *_: seen.add((torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()))
    )
    modes = torch.autocast("cpu", torch.bfloat16), torch.inference_mode()
    with modes[0], modes[1], lade.Batcher(model) as batcher:
        batcher.submit(ONE, **GREEDY).result()
    assert seen == {(True, True)}


@pytest.mark.parametrize(("family", "has_positions"), [("llama", False), ("mistral", True)])
def test_a_call_may_go_on_from_a_cache_beside_others(family: str, has_positions: bool) -> None:
    model = tiny_model(family, seed=1)
    past, new = torch.tensor([[5, 6, 7, 8, 5, 6, 7]]), torch.tensor([[31, 5, 6, 7, 8, 40, 5, 6, 7]])
    num_past, num_new = past.shape[1], new.shape[1]
    options = {**GREEDY, "attention_mask": torch.ones(1, num_past + num_new, dtype=torch.long)}
    if has_positions:
        options["position_ids"] = torch.arange(num_past, num_past + num_new)[None]

    def filled() -> DynamicCache:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(past, **{CACHE: cache})
        return cache

    expected = model.generate(new, **{CACHE: filled()}, **options).tolist()
    with lade.Batcher(model) as batcher:
        other = batcher.submit(past, do_sample=True, max_new_tokens=200, eos_token_id=None)
        requests = [batcher.submit(new, **{CACHE: filled()}, **options) for _ in range(3)]
        assert [request.result().tolist() for request in requests] == [expected] * 3
        other.result()
    assert batcher.why_not_joint is None
