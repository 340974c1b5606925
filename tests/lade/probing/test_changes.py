"""Whatever of a model is changed between two calls, the text is `generate`'s at that time."""

import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lade
from tests.grids import thinned
from tests.lade import states
from tests.lade.both import ONE, THREE, same_as_generate
from tests.lade.states import KINDS, SIZE, STEERING, Set, mlp_of
from tests.lade.tiny import tiny_model

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None}
#: What is set one after the other: nothing at first, as steering code mostly begins.
ALPHAS = (0.0, 2.0, 0.0)
SIX = lade.Config(max_draft_tokens=6)
KEPT = lade.Config(max_draft_tokens=6, reuses_prefix=True)
# One of each sort; `python -m tests.fuzz.states` takes all of them in every way.
QUICK = [
    *(states.closures, states.hook_attribute, states.patched_method, states.adapter_switch),
    *(states.registered_attention, states.global_hook, states.remote_closure),
]
# In a batch, user code may see its rows; `lade` runs them as parts of one row.
IN_ROWS = [
    *(states.wrapped_forward, states.wrapped_for_a_row, states.rows_together),
    *(states.first_position, states.global_value, states.gate_by_data_in_place),
]


def name_of(value: Any) -> str:
    return str(getattr(value, "__name__", value))


def model_of(**options: Any) -> Any:
    model = tiny_model("llama", seed=3, hidden_size=SIZE, **options)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    hooks: Any = nn.modules.module._global_forward_hooks
    before = {**hooks}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.PlainDecodingWarning)
        warnings.filterwarnings("ignore", "lade('s compiled forward| reuses) no ", RuntimeWarning)
        yield
    hooks.clear()
    hooks.update(before)
    states.put_back()


@pytest.mark.parametrize("kind", thinned(KINDS, *QUICK), ids=name_of)
def test_state_that_is_set_anew_is_heeded(kind: Callable[[Any], Set]) -> None:
    model = model_of()
    put = kind(model)
    for alpha in ALPHAS:
        put(alpha)
        lade.release(model)  # a number among attributes tells nobody that it changed
        same_as_generate(model, ONE, knows=True, config=KEPT, **OPTIONS)


@pytest.mark.parametrize("do_sample", thinned([False, True], False))
@pytest.mark.parametrize("family", thinned(["llama", "mistral", "qwen2"], "llama"))
@pytest.mark.parametrize("kind", thinned(KINDS, *IN_ROWS), ids=name_of)
def test_user_code_in_a_batch_is_proved(
    kind: Callable[[Any], Set], family: str, do_sample: bool
) -> None:
    """Rows end one after the other; their prompts have padding."""
    model = tiny_model(family, seed=3, dtype=torch.float32, hidden_size=SIZE, head_dim=16)
    put, given = kind(model), OPTIONS | {"eos_token_id": [11, 13, 58], "do_sample": do_sample}
    for alpha in (0.0, 1.0):
        put(alpha)
        _, got = same_as_generate(model, THREE, knows=True, config=SIX, **given)
        if kind is states.wrapped_forward and family != "mistral":  # has windows
            assert got.stats.num_accepted_tokens > 0


FAMILIES = ["llama", "mistral", "gpt2", "mamba", "recurrent_gemma", "gemma3_text"]
CASES = [(family, ids) for family in FAMILIES for ids in ("ONE", "THREE")]


@pytest.mark.parametrize("case", thinned(CASES, ("llama", "ONE"), ("mamba", "THREE")))
@pytest.mark.parametrize("verification", thinned(["tree", "chain", "snapshot", None], None))
def test_every_way_to_verify_is_looked_at_before_it_is_believed(
    case: tuple[str, str], verification: Any
) -> None:
    family, prompt = case
    attention = "eager" if family in ("mamba", "recurrent_gemma") else "sdpa"
    model = tiny_model(family, attention=attention, seed=1)
    put = states.exchanged("", states.logits, lambda model: model.get_output_embeddings())(model)
    config = lade.Config(max_draft_tokens=6, verification=verification)
    for alpha in (0.0, 1.0, 0.0):
        put(alpha)
        try:
            ids = ONE if prompt == "ONE" else THREE
            same_as_generate(model, ids, knows=True, config=config, eos_token_id=11)
        except lade.UnsupportedModelError:
            assert verification is not None  # it was asked for, and found wrong


# --- changes that a model goes through ------------------------------------------------------------


def on_the_last_position(module: Any, args: Any, output: Tensor) -> Tensor:
    changed = output.clone()
    changed[:, -1] *= 1.5
    return changed


def hooked(model: Any) -> Any:
    mlp_of(model).register_forward_hook(on_the_last_position)
    return model


def quantized(model: Any) -> Any:
    quantize: Any = torch.ao.quantization.quantize_dynamic
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantize(model, {nn.Linear}, torch.qint8)


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@torch.no_grad()
def written_in_place(model: Any) -> Any:
    model.model.layers[1].mlp.up_proj.weight[3] += 0.5
    return model


def replaced(model: Any) -> Any:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach() * 0.9)
    return model


def exchanged(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(0)
    return model


def trained(model: Any) -> Any:
    model(ONE, labels=ONE).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return model


def in_other_format(model: Any) -> Any:
    return model.double() if model.dtype == torch.float32 else model.float()


def by_eager_attention(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


CHANGES: list[Callable[[Any], Any]] = [
    *(hooked, quantized, pickled, written_in_place, replaced, exchanged, trained),
    *(in_other_format, by_eager_attention),
]


@pytest.mark.parametrize(
    "change", thinned(CHANGES, hooked, quantized, pickled, written_in_place, trained), ids=name_of
)
def test_a_model_that_was_changed_answers_as_it_is_now(change: Callable[[Any], Any]) -> None:
    dtype = torch.float64 if change in (pickled, in_other_format, trained) else torch.float32
    model = model_of(dtype=dtype)
    given: dict[str, Any] = {"knows": True, "config": KEPT, **OPTIONS}
    _, before = same_as_generate(model, ONE, **given)
    assert before.stats.num_accepted_tokens > 0
    model = change(model)
    _, got = same_as_generate(model, ONE, **given)
    is_same = change in (pickled, in_other_format, by_eager_attention)
    assert torch.equal(got.sequences, before.sequences) is is_same


def test_a_hook_that_was_removed_costs_nothing_any_more() -> None:
    def fail(*_: Any) -> None:
        if failing:
            raise RuntimeError("busy")

    model, failing = model_of(), False
    for hook in (on_the_last_position, fail):
        handle = mlp_of(model).register_forward_hook(hook)
        failing = True
        assert lade.probe(model).verification == "plain"
        failing = False
        same_as_generate(model, ONE, knows=True, config=SIX, **OPTIONS)
        handle.remove()
        assert lade.probe(model).verification == "tree"
        _, got = same_as_generate(model, ONE, knows=True, config=SIX, **OPTIONS)
        assert got.stats.num_accepted_tokens > 12


def test_a_hook_that_treats_all_tokens_alike_costs_few_steps() -> None:
    model = model_of()
    mlp_of(model).register_forward_hook(lambda module, args, output: output + 0.5 * STEERING)
    given = OPTIONS | {"max_new_tokens": 64}
    _, got = same_as_generate(model, ONE, knows=True, config=SIX, **given)
    assert got.stats.num_steps < 40  # 64 without drafts, some 12 without checks


def test_a_model_that_was_used_goes_when_it_is_let_go() -> None:
    model = model_of()
    lade.generate(model, ONE, config=KEPT, max_new_tokens=9, pad_token_id=0)
    there = weakref.ref(mlp_of(model).up_proj.weight)
    gc.collect()
    gc.disable()  # no cycle holds it
    try:
        del model
        assert there() is None
    finally:
        gc.enable()
