"""Recorded steps: on a CPU, a recorder that replays operations stands in for CUDA graphs."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import lade
from tests.lade.both import ONE, same_as_generate
from tests.lade.recorder import CpuRecorder
from tests.lade.tiny import tiny_model

RECORDED = lade.Config(execution="graphs", max_draft_tokens=7)
UNDRAFTED = lade.Config(execution="graphs", max_draft_tokens=0)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None}


def same(model: Any, config: lade.Config = RECORDED, prompt: Tensor = ONE, **options: Any) -> Any:
    """Compare the tokens of lade with those of `generate`; return lade's output."""
    return same_as_generate(model, prompt, config=config, **{**GREEDY, **options})[1]


# --- recorded and replayed ------------------------------------------------------------------


def test_a_shape_is_recorded_when_it_comes_again_and_once(recorder: CpuRecorder) -> None:
    model = tiny_model("llama")
    for num_replayed in (37 + 1, 37 + 1 + 39):  # the first is eager; a check is a replay
        same(model, UNDRAFTED)
        assert recorder.num_recorded == 1
        assert recorder.num_replayed == num_replayed


@pytest.mark.usefixtures("cramped")
def test_keys_and_values_that_move_are_recorded_anew(recorder: CpuRecorder) -> None:
    model = tiny_model("llama")
    same(model, UNDRAFTED, max_new_tokens=300)
    assert recorder.num_recorded > 1  # more slots are shown by and by, and then the memory moves


@pytest.mark.usefixtures("cramped", "roomy")
def test_a_conversation_that_grows_is_recorded_once(recorder: CpuRecorder) -> None:
    model = tiny_model("llama", max_position_embeddings=1024)
    answer = ONE[:, :0]
    for _ in range(4):
        answer = same(model, UNDRAFTED, torch.cat([answer, ONE], dim=1)).sequences
        assert recorder.num_recorded == 1


def test_weights_that_move_are_recorded_anew(recorder: CpuRecorder) -> None:
    model = tiny_model("llama")
    same(model)
    first = recorder.num_recorded
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.25
    same(model)
    assert recorder.num_recorded > first


class Counting(LlamaForCausalLM):  # type: ignore[misc]
    """Looks at the length of its cache, as some models do to count positions."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache: Any = kwargs.get("cache", kwargs.get("past_key_values"))
        length = cache.get_seq_length()
        self.length.copy_(torch.as_tensor(length))
        return super().forward(*args, **kwargs)


@pytest.mark.usefixtures("trusted")
def test_a_model_that_asks_for_the_length_of_its_cache_gets_it_at_every_replay(
    recorder: CpuRecorder,
) -> None:
    model = tiny_model("llama")
    model.__class__ = Counting
    model.length = torch.zeros((), dtype=torch.int64)
    seen: list[int] = []
    lade.generate(
        model, ONE, config=UNDRAFTED, on_step=lambda step: seen.append(int(model.length)), **GREEDY
    )
    first = ONE.shape[1]
    assert seen == [0, *range(first, first + len(seen) - 1)]
    assert recorder.num_replayed > 30


# --- what cannot be recorded ----------------------------------------------------------------


class Waiting(LlamaForCausalLM):  # type: ignore[misc]
    """Waits for its device in every forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        self.wait[0](output.logits[0, 0])
        return output


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: torch.equal(x, x),
    "to": lambda x: x.to("meta"),
    "unique": lambda x: torch.unique(x),
}


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("name", WAITS)
def test_a_model_that_waits_for_its_device_is_run_eagerly(name: str, recorder: CpuRecorder) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    model.__class__, model.wait = Waiting, [WAITS[name]]
    match = "cannot be recorded .*waits for the device"
    with pytest.warns(lade.EagerExecutionWarning, match=match):
        same(model, max_new_tokens=8)
    same(model, max_new_tokens=8)  # said once; another warning is an error
    assert recorder.num_replayed == 0


class Wrapper(torch.Tensor):
    """A weight as quantized formats keep it: without memory, around others that may have some."""

    whole: Tensor
    integers: Tensor | None
    scales: Tensor | None

    @staticmethod
    def __new__(cls, whole: Tensor, *inner: Tensor | None) -> "Wrapper":
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Wrapper = make(cls, whole.shape, dtype=whole.dtype)
        made.whole, (made.integers, made.scales) = whole, inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scales"], None

    __tensor_unflatten__ = staticmethod(lambda *_: None)  # torch asks whether there is one

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # all that a Parameter asks for
            return Wrapper(args[0].whole, args[0].integers, args[0].scales)
        plain = [each.whole if isinstance(each, Wrapper) else each for each in args]
        return func(*plain, **(kwargs or {}))


def wrapped(model: Any, *inner: Tensor | None) -> Any:
    weight = Wrapper(model.lm_head.weight.detach(), *inner)
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    return model


def with_experts() -> Any:
    sizes: Any = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = tiny_model("qwen3_moe", head_dim=8, **sizes)
    model.set_experts_implementation("eager")
    return model


def changed(**values: Any) -> Any:
    model = tiny_model("llama")
    vars(model if "peft_config" in values else model.model.layers[1]).update(values)
    return model


UNRECORDED: dict[str, tuple[Callable[[], Any], str]] = {
    "spread": (lambda: changed(_hf_hook=SimpleNamespace()), r"model\.layers\.1 has a hook"),
    "adapters": (lambda: changed(peft_config={}), "adapters"),
    "weights": (lambda: wrapped(tiny_model("llama"), None, None), "its weights have no address"),
    "experts": (with_experts, "experts"),
    "angles": (
        lambda: tiny_model(
            "llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        ),
        "rotary",
    ),
}


@pytest.mark.parametrize("name", UNRECORDED)
@pytest.mark.usefixtures("trusted")
def test_models_that_must_not_be_recorded_say_why(name: str, recorder: CpuRecorder) -> None:
    make, reason = UNRECORDED[name]
    model = make()
    with pytest.warns(lade.EagerExecutionWarning, match=f"not recorded: .*{reason}"):
        same(model)
    assert recorder.num_recorded == 0
    if name == "experts":
        model.set_experts_implementation("batched_mm")  # chosen on the device
        same(model)
        assert recorder.num_replayed > 0


@pytest.mark.usefixtures("trusted")
def test_a_wrapped_weight_lies_where_its_inner_tensors_lie(recorder: CpuRecorder) -> None:
    model = wrapped(tiny_model("llama"), torch.zeros(97, 32), torch.ones(97))
    for _ in range(2):
        same(model)
        first = recorder.num_recorded
    model.lm_head.weight.scales = torch.ones(97)  # elsewhere
    same(model)
    assert recorder.num_recorded > first > 0


@pytest.mark.usefixtures("trusted")
def test_a_hook_that_comes_later_is_called(recorder: CpuRecorder) -> None:
    model, calls = tiny_model("llama"), []
    same(model)
    handle = model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    with pytest.warns(lade.EagerExecutionWarning, match="has a hook"):
        same(model)  # it is checked anew
    calls.clear()
    got = lade.generate(model, ONE, config=RECORDED, return_dict_in_generate=True, **GREEDY)
    assert len(calls) == 1 + got.stats.num_steps
    handle.remove()
    before = recorder.num_replayed
    same(model)
    assert recorder.num_replayed > before > 0


# --- recordings that fail -------------------------------------------------------------------


def test_a_recording_that_is_wrong_is_not_used(recorder: CpuRecorder) -> None:
    recorder.bends = True
    model = tiny_model("llama")
    with pytest.warns(lade.EagerExecutionWarning, match="a recorded step differs"):
        same(model)
    before = recorder.num_replayed
    same(model)
    assert recorder.num_replayed == before


def test_without_memory_for_a_recording_steps_are_run_eagerly(recorder: CpuRecorder) -> None:
    model = tiny_model("llama")
    same(model, max_new_tokens=2)
    recorder.failures[:] = [torch.OutOfMemoryError("CUDA out of memory.")]
    with pytest.warns(lade.EagerExecutionWarning, match="no memory was left to record a step"):
        same(model)
    assert recorder.num_forgotten > 0  # what they held is free again
    same(model)
    assert recorder.num_recorded == 0
    lade.release(model)  # and after that, it is tried again
    same(model)
    assert recorder.num_recorded > 0


def test_recordings_take_so_much_memory_and_no_more(recorder: CpuRecorder) -> None:
    recorder.max_bytes = 1  # each takes one
    model = tiny_model("llama")
    for _ in range(2):  # the other one has made room each time
        for config in (UNDRAFTED, lade.Config(execution="graphs", max_draft_tokens=20)):
            before = recorder.num_recorded
            same(model, config)
            assert recorder.num_recorded > before
    recorder.max_bytes = 0
    lade.release(model)
    with pytest.warns(lade.EagerExecutionWarning, match="a recorded step takes 0 MiB"):
        same(model)


@pytest.mark.parametrize("place", ["record", "num_bytes"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no capture")])
def test_what_a_capture_that_failed_may_have_spoiled_is_dropped(
    error: BaseException, place: str, recorder: CpuRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    model = tiny_model("llama")
    same(model, UNDRAFTED)
    before = recorder.num_forgotten
    with monkeypatch.context() as patch:
        patch.setattr(recorder, place, fail)
        if isinstance(error, RuntimeError):
            with pytest.warns(lade.EagerExecutionWarning, match="cannot be recorded .*no capture"):
                same(model)
        else:
            with pytest.raises(KeyboardInterrupt):
                same(model)
    assert recorder.num_forgotten > before
    same(model)
