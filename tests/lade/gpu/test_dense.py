"""Dense views: fewer and larger operations, the same numbers, and the model as it was."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

import lade
from lade.attention import tree as tree_attention
from lade.closeness import distance, limit_of
from lade.gpu import dense, ops
from lade.gpu.dense import dense_view
from lade.probing.profile import profile_of
from tests.grids import thinned
from tests.lade.both import ONE, THREE, both
from tests.lade.gpu.test_graphs import GREEDY, LONG, RECORDED, graphs_of, same
from tests.lade.recorder import CpuRecorder, RecordingPolicy
from tests.lade.tiny import FAMILIES, tiny_model
from tests.support.tiny import VARIANTS, CannotBuild, causal_lm_types
from tests.support.tiny import tiny_model as tiny_architecture


def kinds_of(view: Any) -> Counter[str]:
    """Return how many modules of a view were replaced, by what takes their place."""
    made = [vars(module).get("forward") for module in view.modules()]
    names = [each.__name__.strip("_") for each in made if each is not None]
    return Counter(names)


# --- what is recognised -------------------------------------------------------------------------

# Of three layers: norms, gated MLPs, layers whose sums are fused with norms, and rotations, which
# are in the forward of an attention.
EXPECTED: dict[str, dict[str, int]] = {
    "llama": {"normed": 7, "gated": 3, "layer": 3, "forward": 3},
    "qwen2": {"normed": 7, "gated": 3, "layer": 3, "forward": 3},
    "qwen3": {"normed": 13, "gated": 3, "layer": 3, "forward": 3},
    "mistral": {"normed": 7, "gated": 3, "layer": 3, "forward": 3},
    "phi3": {"normed": 7, "layer": 3},
    "olmo2": {"normed": 13, "gated": 3, "forward": 3},
    "gemma3_text": {"normed": 19, "gated": 3, "forward": 3},
    "deepseek_v3": {"normed": 13, "gated": 3, "layer": 3},
    "llama4_text": {"normed": 9},
}


@pytest.mark.parametrize("family", EXPECTED)
def test_modules_are_recognised_by_what_they_do(family: str) -> None:
    view = dense_view(tiny_model(family))
    assert view is not None
    assert kinds_of(view).items() >= EXPECTED[family].items()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", thinned(FAMILIES, "llama", "qwen3", "gemma3_text"))
def test_a_dense_view_computes_what_the_model_computes(family: str, dtype: torch.dtype) -> None:
    """`test_of_every_architecture…` has float32."""
    if family == "llama4_text" and dtype == torch.float16:
        pytest.skip("its experts have no float16 on a CPU")
    model = tiny_model(family, dtype=dtype)
    view = dense_view(model) or model
    for ids in (ONE, THREE):
        with torch.no_grad():
            assert torch.equal(view(ids).logits, model(ids).logits)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*causal_lm_types(), *VARIANTS])
def test_of_every_architecture_a_dense_view_computes_the_same(name: str) -> None:
    try:
        model = tiny_architecture(name, dtype=torch.float32)
    except CannotBuild as reason:
        pytest.skip(str(reason))
    view = dense_view(model)
    if view is None:
        return
    logits = []
    for each in (view, model):
        with torch.random.fork_rng([]), torch.no_grad():
            torch.manual_seed(0)
            logits.append(each(ONE).logits)
    torch.testing.assert_close(*logits, rtol=0.0, atol=0.0, equal_nan=True)


def test_the_model_and_what_it_is_made_of_stay_as_they_are() -> None:
    model = tiny_model("llama")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    rotate, state = modeling_llama.apply_rotary_pos_emb, torch.get_rng_state()
    view = dense_view(model)
    assert view is not None
    view(ONE)
    assert modeling_llama.apply_rotary_pos_emb is rotate
    assert torch.equal(torch.get_rng_state(), state)
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert all(vars(module)[key] is value for key, value in before[name].items())
    for mine, theirs in zip(view.parameters(), model.parameters(), strict=True):
        assert mine is theirs


def _clamped(model: Any) -> None:
    class Clamped(modeling_llama.LlamaMLP):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            gate = self.gate_proj(x).clamp(max=7.0)
            return self.down_proj(self.act_fn(gate) * self.up_proj(x))

    for layer in model.model.layers:
        layer.mlp.__class__ = Clamped


def _squared(model: Any) -> None:
    class Squared(modeling_llama.LlamaRMSNorm):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Any:
            return super().forward(hidden_states) * (1 + 1e-12)

    for layer in model.model.layers:
        layer.input_layernorm.__class__ = layer.post_attention_layernorm.__class__ = Squared


def _scaled(model: Any) -> None:
    class Scaled(modeling_llama.LlamaDecoderLayer):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            return 0.5 * super().forward(hidden_states, **kwargs)

    for layer in model.model.layers:
        layer.__class__ = Scaled


def _forwards(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.forward = lambda x, mlp=layer.mlp: type(mlp).forward(mlp, 2 * x)


def _hooks(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: 2 * output)


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (_clamped, "gated"),
        (_squared, "layer"),
        (_scaled, "layer"),
        (_forwards, "gated"),
        (_hooks, "gated"),
    ],
)
def test_what_does_something_else_is_left_alone(change: Any, missing: str) -> None:
    model = tiny_model("llama")
    change(model)
    view = dense_view(model)
    assert view is not None
    assert missing not in kinds_of(view)
    assert torch.equal(view(ONE).logits, model(ONE).logits)


def test_other_rotations_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q * cos[:, None] - q * sin[:, None], k

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)
    view = dense_view(tiny_model("llama"))
    assert view is not None
    assert "forward" not in kinds_of(view)


def test_a_model_in_training_and_one_of_other_modules_have_none() -> None:
    assert dense_view(tiny_model("llama").train()) is None
    assert dense_view(tiny_model("gpt2")) is None


def test_arguments_that_were_not_tried_take_the_modules_own_way() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    view = dense_view(model)
    assert view is not None
    norm, own = view.model.norm, model.model.norm
    wide = torch.randn(1, 2, 32)  # float32, of a bfloat16 weight
    assert torch.equal(norm(wide), own(wide))
    assert torch.equal(norm(hidden_states=wide), own(wide))
    layer, own_layer = view.model.layers[0], model.model.layers[0]
    states, positions = torch.randn(1, 2, 32, dtype=torch.bfloat16), torch.arange(2)[None]
    angles = model.model.rotary_emb(states, positions)
    named: dict[str, Any] = {"position_embeddings": angles}
    expected = own_layer(states, **named)
    assert torch.equal(layer(states, **named), expected)
    assert torch.equal(layer(states, None, **named), expected)


def test_norms_of_heads_keep_their_strides() -> None:
    model = tiny_model("qwen3")
    view = dense_view(model)
    assert view is not None
    norm, own = (each.model.layers[0].self_attn.q_norm for each in (view, model))
    states = torch.randn(2, 5, 4, 8, dtype=torch.float64)
    for given in (states, states.transpose(1, 2), states.transpose(0, 1), states[:, ::2]):
        assert torch.equal(norm(given), own(given))
        assert norm(given).stride() == own(given).stride()


def test_a_norm_ahead_of_its_layer_serves_only_what_it_was_made_of() -> None:
    model = tiny_model("llama")
    view = dense_view(model)
    assert view is not None
    states = torch.randn(1, 2, 32, dtype=torch.float64)
    angles = model.model.rotary_emb(states, torch.arange(2)[None])
    summed = view.model.layers[0](states, position_embeddings=angles)
    norm, own = view.model.layers[1].input_layernorm, model.model.layers[1].input_layernorm
    assert torch.equal(norm(2 * summed), own(2 * summed))
    assert norm._lade_ahead is None
    assert torch.equal(norm(summed), own(summed))


# --- recorded steps -----------------------------------------------------------------------------

# What no kernel is launched for.
_FREE = {
    *("view", "_unsafe_view", "transpose", "unsqueeze", "expand", "slice", "select", "t", "alias"),
    *("detach", "permute", "split", "split_with_sizes", "empty_like"),
}


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make lade take the CPU for a device with kernels; their operators are plain torch there."""
    monkeypatch.setattr(tree_attention, "_has_kernels", lambda device: True)


def operations(
    family: str, is_dense: bool, recorder: CpuRecorder, patch: pytest.MonkeyPatch, **options: Any
) -> tuple[Counter[str], int]:
    """Return the operations of a recorded step for every layer, and how many others it has."""
    patch.setattr(RecordingPolicy, "fuses", lambda *_: is_dense)
    counts = []
    for num_layers in (2, 3):
        types = {name: values[:num_layers] for name, values in options.items()}
        model = tiny_model(family, dtype=torch.bfloat16, num_hidden_layers=num_layers, **types)
        lade.generate(model, ONE, config=RECORDED, **GREEDY)
        names = recorder.operations[-1]
        counts.append(Counter(name for name in names if name not in _FREE))
    of_layer = counts[1] - counts[0]
    return of_layer, counts[0].total() - 2 * of_layer.total()


LAYERS = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
FUSED = {"mm": 7, "attend": 1, "rotate": 1, "write_slots": 1, "gated": 1}


@pytest.mark.parametrize(
    ("family", "options", "before", "after", "saved"),
    [
        ("llama", {}, 40, {**FUSED, "add_rms_norm": 2}, 7),
        pytest.param(
            "qwen3",
            {},
            56,
            {**FUSED, "add_rms_norm": 2, "rms_norm": 2},
            7,
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "gemma3_text",
            LAYERS,
            84,
            {**FUSED, "rms_norm": 6, "add": 2},
            9,
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_recorded_layer_has_few_operations(
    family: str,
    options: dict[str, Any],
    before: int,
    after: dict[str, int],
    saved: int,
    recorder: CpuRecorder,
    with_kernels: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is one kernel on a GPU, and attention two: of a layer of Llama, 41 before, 14 after.

    How many there are before and after the layers differs with transformers.
    """
    own, num_own = operations(family, False, recorder, monkeypatch, **options)
    fused, num_fused = operations(family, True, recorder, monkeypatch, **options)
    assert own.total() == before
    assert fused == after
    assert num_own - num_fused == saved
    assert num_own <= 65


@pytest.mark.parametrize("family", thinned(EXPECTED, "gemma3_text"))
def test_without_a_dense_mask_the_text_is_that_of_generate(
    family: str, recorder: CpuRecorder, with_kernels: None
) -> None:
    model = tiny_model(family, dtype=torch.float32)
    for prompt in (ONE, THREE):
        both(model, prompt, config=RECORDED, do_sample=False, **LONG)
    assert any("attend" in names for names in recorder.operations)


@pytest.mark.usefixtures("trusted")
def test_a_model_that_loses_what_nodes_see_is_given_a_dense_mask(
    recorder: CpuRecorder, with_kernels: None
) -> None:
    class Copying(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            mask = kwargs.pop("attention_mask", None)
            mask = mask.clone() if isinstance(mask, Tensor) else mask
            return super().forward(*args, attention_mask=mask, **kwargs)

    model = tiny_model("llama", dtype=torch.float32)
    model.__class__ = Copying
    both(model, ONE, config=RECORDED, do_sample=False, **LONG)
    assert recorder.num_replayed > 0
    assert not any("attend" in names for names in recorder.operations)


def test_what_is_fused_wrongly_is_not_used_and_that_is_said_once(
    recorder: CpuRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "gated", lambda gate, up, activation: 1.1 * gate * up)
    monkeypatch.setattr(
        dense, "_activation_of", lambda module: "silu" if hasattr(module, "gate_proj") else None
    )
    model = tiny_model("llama")
    with pytest.warns(lade.EagerExecutionWarning, match="not with fused ones: a recorded step dif"):
        same(model)
    same(model)
    assert recorder.num_replayed > 20
    assert "rotate" not in recorder.operations[-1]


def test_a_kernel_that_fails_is_not_used(
    recorder: CpuRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any) -> Tensor:
        raise OSError("no compiler")

    model = tiny_model("llama")
    monkeypatch.setattr(ops, "rotate", failing)
    monkeypatch.setattr(dense, "_rotates", lambda rotate: True)
    with pytest.warns(lade.EagerExecutionWarning, match=r"fused ones: .*OSError: no compiler"):
        same(model)
    assert recorder.num_replayed > 20


def test_text_that_must_not_depend_on_drafts_does_not_on_fusing_or_recording(
    recorder: CpuRecorder,
) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    config = lade.Config(execution="graphs", stable_text=True)
    lade.generate(model, ONE, config=config, **GREEDY)
    assert recorder.num_replayed > 0
    assert not any("rotate" in names for names in recorder.operations)
    assert graphs_of(model)._limit == 0.0


def test_the_text_of_fused_steps_is_that_of_generate(recorder: CpuRecorder) -> None:
    """In inference mode, too; `test_graphs.py` has it without."""
    model = tiny_model("llama")
    with torch.inference_mode():
        for prompt in (ONE, THREE):
            both(model, prompt, config=RECORDED, do_sample=True, **LONG)
    assert any("write_slots" in names for names in recorder.operations)
    for workspace in profile_of(model).workspace_store._kept:
        assert workspace.graphs is not None
        assert workspace.graphs.is_dense


def test_operators_are_sound() -> None:
    """Their schemas and their shapes without data, which compilers rely on."""
    x, weight = torch.randn(2, 3, 8), torch.randn(8)
    query = torch.randn(2, 5, 4, 8).transpose(1, 2)
    angles = torch.randn(2, 2, 5, 8).unbind()
    slots = torch.tensor([[3, 4, 5, 6, 7], [1, 2, 3, 4, 5]])
    new = torch.randn(2, 2, 5, 8)
    checks: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.rms_norm, (x, weight, 1e-6, "rounded")),
        (ops.add_rms_norm, (x, x + 1, weight, 1e-6, "offset")),
        (ops.gated, (x, x + 1, "gelu_tanh")),
        (ops.rotate, (query, query[:, :2] + 1, *angles)),
        (ops.write_slots, (torch.zeros(2, 2, 9, 8), torch.zeros(2, 2, 9, 8), new, new + 1, slots)),
    ]
    for operator, args in checks:
        torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text", "olmo2"])
def test_cuda_graphs_are_recorded_of_fused_operations(family: str, dtype: torch.dtype) -> None:
    """In float32 with the text of `generate`; tiny models have heads too small for some kernels."""
    model = tiny_model(family, dtype=dtype).to("cuda")
    view = dense_view(model)
    assert view is not None
    with torch.no_grad():
        ids = THREE.cuda()
        assert distance(view(ids).logits, model(ids).logits) <= limit_of(model)
    config = lade.Config(execution="graphs", max_draft_tokens=8)
    for prompt in (ONE, THREE):
        ids = prompt.cuda()
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids != 0).long(), **GREEDY}
        got = lade.generate(model, **inputs, config=config)
        if dtype == torch.float32:
            assert torch.equal(got, model.generate(**inputs))
    for workspace in profile_of(model).workspace_store._kept:
        assert workspace.graphs is not None
        assert len(workspace.graphs) > 0
        assert workspace.graphs.why_not_dense is None
