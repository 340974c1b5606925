"""Recorded steps: on a CPU, a recorder that replays operations stands in for CUDA graphs."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import lade
from lade.compat import CACHE
from lade.gpu.capture import NoWaiting, WaitError
from lade.gpu.graphs import Graphs, Recording, dependencies_of, why_not_recorded
from lade.gpu.policy import DevicePolicy
from lade.probing import factory
from lade.probing.profile import profile_of
from tests.grids import thinned
from tests.lade.both import ONE, THREE, both, same_as_generate
from tests.lade.recorder import CpuRecorder
from tests.lade.tiny import FAMILIES, tiny_model

RECORDED = lade.Config(execution="graphs", max_draft_tokens=7)
UNDRAFTED = lade.Config(execution="graphs", max_draft_tokens=0)
LONG: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None}
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, **LONG}


def same(model: Any, config: lade.Config = RECORDED, prompt: Tensor = ONE, **options: Any) -> Any:
    """Compare the tokens of lade with those of `generate`; return lade's output."""
    options = {**GREEDY, "return_dict_in_generate": False, **options}
    return same_as_generate(model, prompt, config=config, **options)[1]


def generate(model: Any, prompt: Tensor = ONE, **options: Any) -> Any:
    return lade.generate(model, prompt, config=RECORDED, **{**GREEDY, **options})


def graphs_of(model: Any) -> Graphs:
    graphs = profile_of(model).workspace_store._kept[-1].graphs
    assert graphs is not None
    return graphs


# --- recorded and replayed ------------------------------------------------------------------


@pytest.mark.parametrize("family", thinned(FAMILIES, "llama", "gemma3_text"))
def test_the_text_is_that_of_generate(family: str, recorder: CpuRecorder) -> None:
    """Replays know nothing of Python: what they need to know of a step has to be in its inputs."""
    model = tiny_model(family)
    for prompt in (ONE, THREE):
        for do_sample in (False, True):
            both(model, prompt, config=RECORDED, do_sample=do_sample, **LONG)
    assert recorder.num_recorded > 4
    assert recorder.num_replayed > 4 * recorder.num_recorded


def test_experts_are_recorded_where_the_device_chooses_them(recorder: CpuRecorder) -> None:
    sizes: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
    model = tiny_model("qwen3_moe", head_dim=8, moe_intermediate_size=16, **sizes)
    model.set_experts_implementation("eager")
    with pytest.warns(lade.EagerExecutionWarning, match="experts"):
        both(model, ONE, config=RECORDED, do_sample=False, **LONG)
    assert recorder.num_recorded == 0
    model.set_experts_implementation("batched_mm")
    both(model, ONE, config=RECORDED, do_sample=False, **LONG)
    assert recorder.num_replayed > 0


def test_a_shape_is_recorded_when_it_comes_again_and_once(recorder: CpuRecorder) -> None:
    model = tiny_model("llama")
    for num_replayed in (37 + 1, 37 + 1 + 39):  # the first is eager; a check is a replay
        same(model, UNDRAFTED)
        assert recorder.num_recorded == 1
        assert recorder.num_replayed == num_replayed
    assert len(graphs_of(model)) == 1


@pytest.mark.exhaustive
def test_recordings_outlive_longer_texts_and_other_lengths(recorder: CpuRecorder) -> None:
    model = tiny_model("gemma3_text")
    for length in (3, 30, 11, 60):
        prompt = torch.arange(2, 2 + length)[None]
        same(model, UNDRAFTED, prompt)
    assert recorder.num_recorded == 1
    assert recorder.num_replayed > 140


def test_keys_and_values_that_move_are_recorded_anew(
    recorder: CpuRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lade.gpu.fixed._FIRST_NEW", 0)
    model = tiny_model("llama")
    same(model, UNDRAFTED, max_new_tokens=300)
    assert recorder.num_recorded > 1  # more slots are shown by and by, and then the memory moves


@pytest.mark.parametrize("num_masked", thinned([0, 2], 0))
def test_a_conversation_that_grows_is_recorded_once(
    num_masked: int, recorder: CpuRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lade.gpu.fixed._FIRST_NEW", 0)
    monkeypatch.setattr("lade.gpu.fixed.spare_bytes", lambda device: 10**9)
    for module in ("lade.gpu.fixed", "lade.probing.selfcheck"):  # our own attention, as on a GPU
        monkeypatch.setattr(f"{module}.runs_in_triton", lambda *_: True)
    model = tiny_model("llama", max_position_embeddings=1024)
    answer, counts = ONE[:, :0], []
    for _ in range(7):
        prompt = torch.cat([answer, ONE], dim=1)
        mask = torch.ones_like(prompt)
        mask[:, 1 : 1 + num_masked] = 0
        inputs = {"inputs": prompt, "attention_mask": mask, **GREEDY}
        answer = lade.generate(model, config=UNDRAFTED, **inputs)
        counts.append(recorder.num_recorded)
    assert torch.equal(answer, model.generate(**inputs))
    assert counts == [1] * 7


@pytest.mark.exhaustive
def test_long_and_short_prompts_in_turn_use_the_same_memory(recorder: CpuRecorder) -> None:
    model = tiny_model("llama", max_position_embeddings=2048)
    for length in (600, 20, 600, 20, 600):
        same(model, UNDRAFTED, torch.arange(length)[None] % 80 + 2)
    assert recorder.num_recorded <= 3  # of two numbers of slots, and not in every call


def test_weights_that_move_are_recorded_anew(recorder: CpuRecorder) -> None:
    model = tiny_model("llama")
    generate(model)
    first = recorder.num_recorded
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.25
    same(model)
    assert recorder.num_recorded > first


class Counting(LlamaForCausalLM):  # type: ignore[misc]
    """Looks at the length of its cache, as some models do to count positions."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        length = kwargs[CACHE].get_seq_length()
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
        if not output.logits[0, 0, 0].item() < float("inf"):
            raise ArithmeticError
        return output


@pytest.mark.usefixtures("trusted")
def test_a_model_that_waits_for_its_device_is_run_eagerly(recorder: CpuRecorder) -> None:
    model = tiny_model("llama")
    model.__class__ = Waiting
    with pytest.warns(
        lade.EagerExecutionWarning, match="cannot be recorded .*waits for the device"
    ):
        same(model)
    same(model)  # said once; another warning is an error
    assert recorder.num_replayed == 0


def _hook(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, output: None)


def _adapters(model: Any) -> None:
    model.peft_config = {}


def _spread(model: Any) -> None:
    model.model.layers[1]._hf_hook = SimpleNamespace()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_hook, r"model\.layers\.1 has a hook"),
        (_spread, r"model\.layers\.1 has a hook"),
        (_adapters, "adapters"),
    ],
)
@pytest.mark.usefixtures("trusted")
def test_models_that_must_not_be_recorded_say_why(
    change: Callable[[Any], None], reason: str, recorder: CpuRecorder
) -> None:
    model = tiny_model("llama")
    assert why_not_recorded(model) is None
    change(model)
    with pytest.warns(lade.EagerExecutionWarning, match=f"not recorded: .*{reason}"):
        same(model)
    assert recorder.num_recorded == 0


@pytest.mark.usefixtures("trusted")
def test_a_hook_that_comes_later_is_called(recorder: CpuRecorder) -> None:
    model = tiny_model("llama")
    generate(model)
    assert len(graphs_of(model)) > 0
    num_calls = 0

    def count(module: Any, args: Any, output: Any) -> None:
        nonlocal num_calls
        num_calls += 1

    handle = model.model.layers[1].register_forward_hook(count)
    with pytest.warns(lade.EagerExecutionWarning, match="has a hook"):
        generate(model)  # it is checked anew
    num_calls = 0
    got = generate(model, return_dict_in_generate=True)
    assert num_calls == 1 + got.stats.num_steps
    handle.remove()
    before = recorder.num_replayed
    generate(model)
    assert recorder.num_replayed > before


def test_hooks_that_transformers_leaves_behind_are_none(recorder: CpuRecorder) -> None:
    model = tiny_model("llama")
    model(ONE, output_hidden_states=True)
    assert why_not_recorded(model) is None
    options = {**GREEDY, "return_dict_in_generate": True, "output_hidden_states": True}
    with pytest.warns(lade.EagerExecutionWarning, match="hidden states were asked for"):
        lade.generate(model, ONE, config=RECORDED, **options)
    generate(model)
    assert recorder.num_replayed > 0


def test_weights_that_do_not_tell_where_they_lie_are_not_recorded() -> None:
    model = tiny_model("llama")
    model.lm_head.weight = torch.nn.Parameter(torch.empty(97, 32, device="meta"))
    assert "do not tell where they lie" in str(why_not_recorded(model))


class Wrapper(torch.Tensor):
    """A weight as quantized formats keep it: without memory, around integers and their scales."""

    integers: Tensor | None
    scales: Tensor | None
    zeros: Tensor | None

    @staticmethod
    def __new__(cls, whole: Tensor, *inner: Tensor | None) -> "Wrapper":
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Wrapper = make(cls, whole.shape, dtype=whole.dtype)
        made.integers, made.scales, made.zeros = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scales", "zeros"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> "Wrapper":
        return Wrapper(torch.empty(size), *inner.values())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        (weight,) = args
        assert func is torch.ops.aten.detach.default, func  # all that a Parameter asks for
        return Wrapper(weight, weight.integers, weight.scales, weight.zeros)


def wrapped(model: Any, *inner: Tensor | None) -> Any:
    whole = model.lm_head.weight.detach()
    model.lm_head.weight = torch.nn.Parameter(Wrapper(whole, *inner), requires_grad=False)
    return model


def test_a_wrapped_weight_lies_where_its_inner_tensors_lie() -> None:
    integers, scale = torch.zeros(97, 32), torch.ones(97)
    model = wrapped(tiny_model("llama"), integers, scale, None)
    assert model.lm_head.weight.data_ptr() == 0
    assert why_not_recorded(model) is None
    before = dependencies_of(model)
    assert dependencies_of(model) == before
    model.lm_head.weight.scales = scale.clone()
    moved = dependencies_of(model)
    assert moved != before
    nested = Wrapper(integers, integers.clone(), scale, None)
    model = wrapped(model, nested, scale, torch.empty(0))
    assert why_not_recorded(model) is None
    assert dependencies_of(model) not in (before, moved)


def test_a_wrapper_around_nothing_or_around_no_memory_does_not_tell() -> None:
    for inner in ((None, None, None), (torch.empty(97, 32, device="meta"), torch.ones(97), None)):
        model = wrapped(tiny_model("llama"), *inner)
        assert "do not tell where they lie" in str(why_not_recorded(model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_weights_of_torchao_are_recorded(kind: str, recorder: CpuRecorder) -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="needs torchao")
    model = tiny_model("llama", dtype=torch.float32)
    torchao.quantize_(model, getattr(torchao, kind)())
    assert why_not_recorded(model) is None
    same(model)
    assert recorder.num_replayed > 0
    before = dependencies_of(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.scale = weight.scale.clone()
    assert dependencies_of(model) != before


def test_what_is_compiled_is_recorded_apart(
    recorder: CpuRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    calls = 0

    def compiled(**inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        return model(**inputs)

    monkeypatch.setattr(factory, "_compiled", lambda *_: compiled)
    expected = generate(model)
    config = lade.Config(execution="compiled", max_draft_tokens=7)
    assert torch.equal(lade.generate(model, ONE, config=config, **GREEDY), expected)
    assert calls > 0
    calls = 0
    assert torch.equal(generate(model), expected)
    assert calls == 0


def test_what_is_compiled_wrongly_is_not_used(
    recorder: CpuRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")

    def compiled(**inputs: Any) -> Any:
        return SimpleNamespace(logits=-model(**inputs).logits)

    monkeypatch.setattr(factory, "_compiled", lambda *_: compiled)
    config = lade.Config(execution="compiled", max_draft_tokens=7)
    with pytest.warns(lade.EagerExecutionWarning, match="a recorded step differs"):
        same(model, config)
    same(model, config)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: x.to("meta"),
        lambda x: torch.unique(x),
    ],
)
def test_what_waits_for_a_device_is_refused_before_anything_is_recorded(
    wait: Callable[[Tensor], Any],
) -> None:
    with NoWaiting(), pytest.raises(WaitError):
        wait(torch.randn(4))


def test_what_does_not_wait_is_done() -> None:
    x, y = torch.randn(4), torch.zeros(4)
    with NoWaiting():
        y.copy_(x.double())
        y[torch.tensor([0, 2])] = 7.0
        z = torch.where(y > 0, y, x)[torch.tensor([3, 1])]
    assert y.tolist() == [7.0, x[1].item(), 7.0, x[3].item()]
    assert z.tolist() == [x[3].item(), x[1].item()]


def test_rotary_embeddings_that_the_host_changes_are_not_recorded(recorder: CpuRecorder) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny_model("llama", rope_parameters=rope)
    assert "rotary" in str(why_not_recorded(model))


def test_a_recording_that_is_wrong_is_not_used(
    recorder: CpuRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = CpuRecorder.record

    def record(self: CpuRecorder, run: Any) -> Recording:
        recording = right(self, run)

        def replay() -> None:
            recording.replay()
            recording.output.neg_()

        return Recording(replay, recording.output)

    monkeypatch.setattr(CpuRecorder, "record", record)
    model = tiny_model("llama")
    with pytest.warns(lade.EagerExecutionWarning, match="a recorded step differs"):
        same(model)
    assert len(graphs_of(model)) == 0


def test_without_memory_for_a_recording_steps_are_run_eagerly(recorder: CpuRecorder) -> None:
    model = tiny_model("llama")
    expected = model.generate(ONE, **GREEDY)
    assert torch.equal(generate(model, max_new_tokens=2), expected[:, : ONE.shape[1] + 2])
    recorder.failures[:] = [torch.OutOfMemoryError("CUDA out of memory.")]
    with pytest.warns(lade.EagerExecutionWarning, match="no memory was left to record a step"):
        assert torch.equal(generate(model), expected)
    assert len(graphs_of(model)) == 0  # what they held is free again
    assert torch.equal(generate(model), expected)
    assert torch.equal(model.generate(ONE, **GREEDY), expected)
    lade.release(model)  # and after that, it is tried again
    assert torch.equal(generate(model), expected)
    assert len(graphs_of(model)) > 0


@pytest.mark.exhaustive
def test_recordings_go_where_keys_and_values_need_their_memory(
    recorder: CpuRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lade.gpu.fixed._FIRST_NEW", 0)
    model = tiny_model("llama")
    made: list[Graphs] = []

    class Noted(Graphs):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(factory, "Graphs", Noted)
    real, refused = torch.Tensor.new_zeros, []

    def new_zeros(self: Tensor, shape: Any, **more: Any) -> Tensor:
        if len(shape) == 5 and shape[3] > 256 and any(map(len, made)):
            refused.append(shape[3])
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(self, shape, **more)

    monkeypatch.setattr(torch.Tensor, "new_zeros", new_zeros)
    same(model, UNDRAFTED, max_new_tokens=300)
    assert refused


def test_recordings_take_so_much_memory_and_no_more(recorder: CpuRecorder) -> None:
    recorder.max_bytes = 1  # each takes one
    model = tiny_model("llama")
    lade.generate(model, ONE, config=UNDRAFTED, **GREEDY)  # steps of another width
    same(model)
    graphs = graphs_of(model)
    assert recorder.num_recorded > 1
    assert len(graphs) == 1
    recorder.max_bytes = 0
    lade.release(model)
    with pytest.warns(lade.EagerExecutionWarning, match="a recorded step takes 0 MiB"):
        same(model)
    assert len(graphs_of(model)) == 0


def test_the_recording_not_used_for_longest_makes_room(recorder: CpuRecorder) -> None:
    recorder.max_bytes = 2
    graphs, eager = Graphs(recorder, limit=0.0), []

    def use(key: str, times: int = 1) -> None:
        def run(is_recorded: bool) -> Tensor:
            if not is_recorded:
                eager.append(key)
            return torch.arange(5.0) + 1.0

        for _ in range(times):
            graphs.run(key, run)

    use("a", 2)
    use("b", 2)
    use("a")
    use("c", 2)
    assert [*graphs._kept] == ["a", "c"]
    assert recorder.num_recorded == 3
    use("b", 8)  # not recorded again at once
    assert recorder.num_recorded == 3
    use("b")
    assert [*graphs._kept] == ["c", "b"]
    for _ in range(40):  # shapes that take turns are not recorded in turns
        use("a")
        use("b")
        use("c")
    assert recorder.num_recorded < 10


class _BrokenOff(CpuRecorder):
    """A recorder whose captures after the first are interrupted."""

    def record(self, run: Any) -> Recording:
        recording = super().record(run)
        if self.num_recorded > 1:
            raise KeyboardInterrupt
        return recording


def test_what_a_capture_that_failed_may_have_spoiled_is_dropped(recorder: CpuRecorder) -> None:
    for made, kind in (
        (_BrokenOff(), KeyboardInterrupt),
        (CpuRecorder(failures=[None, RuntimeError("no capture")]), None),
    ):
        graphs = Graphs(made, limit=0.0)
        for key in "aabb":
            with nullcontext() if kind is None or key == "a" else suppress(kind):
                graphs.run(key, lambda is_recorded: torch.arange(5.0))
        assert len(graphs) == 0
        assert made.num_forgotten > 0
        assert (graphs.reason is None) == (kind is not None)


def test_memory_that_cannot_be_counted_is_a_reason_like_any_other(recorder: CpuRecorder) -> None:
    def num_bytes() -> int:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    recorder.num_bytes = num_bytes  # type: ignore[method-assign]
    model = tiny_model("llama")
    with pytest.warns(lade.EagerExecutionWarning, match="cannot be recorded .*captures_underway"):
        same(model)


def test_a_step_that_is_prepared_does_not_teach_the_budget(recorder: CpuRecorder) -> None:
    model = tiny_model("llama")
    generate(model)
    graphs = graphs_of(model)
    calls: list[bool] = []

    def run(is_recorded: bool) -> Tensor:
        calls.append(is_recorded)
        return torch.arange(5.0)

    typical = []
    for _ in range(4):
        graphs.run("some shape", run)
        typical.append(graphs.is_timing_valid)
    assert typical == [False, False, True, True]
    assert calls == [
        False,
        False,
        True,
        True,
    ]  # once eagerly; then eagerly, in rehearsal, and recorded


def test_grouped_products_that_copy_to_the_host_are_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
    model = tiny_model("qwen3_moe", head_dim=8, moe_intermediate_size=16, **sizes)
    model.set_experts_implementation("grouped_mm")
    assert why_not_recorded(model) is None  # on a CPU nothing is copied
    monkeypatch.setattr("lade.gpu.graphs.device_of_inputs", lambda model: torch.device("cuda"))
    for dtype, capability, is_recorded in (
        (torch.bfloat16, (9, 0), True),
        (torch.bfloat16, (10, 0), True),
        (torch.float16, (9, 0), False),
        (torch.bfloat16, (8, 6), False),
        (torch.bfloat16, (12, 0), False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, at=capability: at)
        assert (why_not_recorded(model.to(dtype)) is None) == is_recorded
    model.set_experts_implementation("batched_mm")
    assert why_not_recorded(model) is None


def test_graphs_are_to_be_asked_for_and_only_cuda_devices_record_them() -> None:
    for kind in ("cpu", "cuda"):
        assert DevicePolicy().execution(torch.device(kind)) == "eager"
        assert DevicePolicy().can_record(torch.device(kind)) == (kind == "cuda")
