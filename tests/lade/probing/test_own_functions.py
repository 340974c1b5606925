"""Functions that somebody has put in place of others: lade calls what `generate` calls then."""

import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import GPT2LMHeadModel, LlamaForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import lade
from tests.grids import thinned, thinned_rows
from tests.lade.both import EIGHT, answered, same_as_generate
from tests.lade.tiny import tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:lade falls back:lade.PlainDecodingWarning"),
    pytest.mark.filterwarnings("ignore:lade reuses no prefix:RuntimeWarning"),
]

PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 9, 11, 13, 5, 6, 7, 8, 20, 21, 22, 23]])
STATES: list[Any] = []  # what a hook may remember
OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None, "do_sample": False}


def num_drafted(model: Any, **options: Any) -> int:
    """Hold lade against `generate`; return how many tokens were drafted with a good pool."""
    _, got = same_as_generate(model, PROMPT, knows=True, config=EIGHT, **OPTIONS | options)
    num: int = got.stats.num_draft_tokens
    return num


def in_batcher(model: Any, **options: Any) -> None:
    """Hold calls that run beside each other against `generate`."""
    given, asked, expected = OPTIONS | options, [PROMPT, PROMPT[:, :7]], []
    pool = lade.NGramPool()
    for seed, ids in enumerate(asked):
        torch.manual_seed(seed)
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
        expected.append(tokens.tolist())
        pool.observe(expected[-1][0])
    with lade.Batcher(model, pool=pool, config=EIGHT) as batcher:
        requests = [batcher.submit(asked[n % 2], seed=n % 2, **given) for n in range(4)]
        assert [each.result().tolist() for each in requests] == expected * 2


# --- functions of torch ---------------------------------------------------------------------------

_attend, _linear = functional.scaled_dot_product_attention, functional.linear
_softmax, _multinomial = functional.softmax, torch.multinomial


def sharper(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _attend(query * 1.4, *args, **kwargs)


def sharper_alone(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Sharpen the attention of a token that is in a forward of its own."""
    return _attend(query * (2.0 if query.shape[2] == 1 else 1.0), *args, **kwargs)


def rounded(inputs: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    return _linear(inputs, (weight * 16).round() / 16, bias)


def rounded_together(inputs: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    """Round inputs as the largest of all tokens demands."""
    step = inputs.abs().max() / 8 + 1e-9
    return _linear((inputs / step).round() * step, weight, bias)


def hot(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _softmax(scores * 0.5, *args, **kwargs)


def squared(probs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _multinomial(probs * probs, *args, **kwargs)


SDPA = "scaled_dot_product_attention"
PATCHES: list[tuple[Any, str, Any, bool]] = [
    (functional, SDPA, sharper, False),
    (functional, SDPA, sharper_alone, True),
    (functional, SDPA, partial(_attend, scale=0.7), False),
    (functional, "linear", rounded, False),
    (functional, "linear", rounded_together, True),
    (functional, "softmax", hot, True),
    (torch, "multinomial", squared, True),
    (torch, "argmax", torch.argmin, False),
]


def wide() -> Any:
    """Return a model with layers for which lade has products of its own."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 400}
    return tiny_model("llama", seed=1, dtype=torch.float32, **sizes)


@pytest.mark.parametrize(
    ("make", "module", "name", "patch", "do_sample"),
    thinned_rows(
        [*((tiny_model, *each) for each in PATCHES), *((wide, *each) for each in PATCHES[1:6:2])],
        *((tiny_model, *PATCHES[6]), (wide, *PATCHES[3])),
    ),
)
def test_functions_of_torch_are_the_patched_ones(
    make: Any, module: Any, name: str, patch: Any, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a model that was used before, with prefixes kept of it."""
    model, options = make(), {"do_sample": do_sample}
    kept = {**options, "config": lade.Config(reuses_prefix=True, max_draft_tokens=8)}
    assert num_drafted(model, **options) > 0
    same_as_generate(model, PROMPT, **OPTIONS | kept)
    with monkeypatch.context() as patching:
        patching.setattr(module, name, patch)
        num_drafted(model, **options)
        same_as_generate(model, PROMPT, **OPTIONS | kept)
        if make is tiny_model:
            in_batcher(model, **options)
    assert num_drafted(model, **options) > 0
    same_as_generate(model, PROMPT, **OPTIONS | kept)


# --- methods of the model -------------------------------------------------------------------------

KNOWN: dict[str, type] = {"llama": LlamaForCausalLM, "gpt2": GPT2LMHeadModel}
PREPARE = "prepare_inputs_for_generation"
UPDATE = "_update_model_kwargs_for_generation"
SAMPLE = "_sample"


def passing(self: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(KNOWN[self.config.model_type], PREPARE)(self, *args, **kwargs)


def window_of(num_tokens: int) -> Tensor:
    """Return a mask of the first token and the last 4, from 32 on."""
    mask = torch.ones(1, num_tokens, dtype=torch.long)
    if num_tokens > 32:
        mask[:, 1 : num_tokens - 4] = 0
    return mask


def windowed(self: Any, *args: Any, **kwargs: Any) -> Any:
    inputs = passing(self, *args, **kwargs)
    return {**inputs, "attention_mask": window_of(int(inputs["position_ids"].max() + 1))}


def updated(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Window by a mask that is kept for the next forward."""
    kept = getattr(KNOWN[self.config.model_type], UPDATE)(self, *args, **kwargs)
    return {**kept, "attention_mask": window_of(kept["position_ids"].shape[1])}


def sampled(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Decode as usual, and turn two tokens of the answer round."""
    found = getattr(KNOWN[self.config.model_type], SAMPLE)(self, *args, **kwargs)
    tokens = found if torch.is_tensor(found) else found.sequences
    tokens[:, [-1, -2]] = tokens[:, [-2, -1]]
    return found


METHODS = [
    *((PREPARE, each) for each in (passing, windowed)),
    *((UPDATE, updated), (SAMPLE, sampled)),
]


@pytest.mark.parametrize(("name", "function"), thinned_rows(METHODS, *METHODS[1:]))
@pytest.mark.parametrize("where", thinned(["class", "object"], "class"))
@pytest.mark.parametrize("family", thinned(KNOWN, "llama"))
def test_own_methods_do_what_they_do_in_generate(
    family: str, where: str, name: str, function: Any
) -> None:
    model = tiny_model(family, seed=2)
    if where == "class":
        members = {name: function, "__module__": __name__}
        model.__class__ = type("Own", (KNOWN[family],), members)
    else:
        setattr(model, name, MethodType(function, model))
    assert num_drafted(model) == num_drafted(model, do_sample=True) == 0
    expected = model.generate(PROMPT, **OPTIONS)
    got = model.generate(PROMPT, custom_generate=lade.decode, config=EIGHT, **OPTIONS)
    assert got.tolist() == expected.tolist()
    in_batcher(model)


# --- whose code it is -----------------------------------------------------------------------------


def of_a_checkpoint(model: Any) -> None:
    """Give a model the class of a file that came with a checkpoint (`trust_remote_code`)."""
    name = "transformers_modules.of_a_test.modeling"
    file = sys.modules[name] = ModuleType(name)
    code = """
from transformers import LlamaForCausalLM
class RemoteForCausalLM(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)
"""
    exec(code, vars(file))
    model.__class__ = vars(file)["RemoteForCausalLM"]


def bound(model: Any) -> None:
    """Leave the model's own forward on it, as accelerate does behind a training."""
    model.forward = MethodType(type(model).forward, model)


def for_checkpointing(model: Any) -> None:
    """Register transformers' own hook of the embedding."""
    model.enable_input_require_grads()


def for_adapters(model: Any) -> None:
    """Register the hook that PEFT and TRL leave on the embedding: it is known by its code."""

    def make_inputs_require_grad(module: Any, args: Any, output: Any) -> None:
        output.requires_grad_(True)

    model.model.embed_tokens.register_forward_hook(make_inputs_require_grad)


def doubled(model: Any) -> None:
    """Register a user's hook on the embedding, which a job calls."""
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: 2 * output)


def trained(model: Any) -> None:
    """Leave a model in training mode, where nothing in it is random."""
    model.train()


@pytest.mark.parametrize("change", [of_a_checkpoint, bound, for_checkpointing])
def test_code_that_is_nobodys_costs_nothing(
    change: Callable[[Any], None], recwarn: pytest.WarningsRecorder
) -> None:
    """No warning tells of plain decoding; batches draft, and what is kept is used."""
    model, rows = tiny_model(seed=1), PROMPT[:, :9].repeat(3, 1)
    change(model)
    _, got = same_as_generate(model, rows, knows=True, config=EIGHT, **OPTIONS)
    assert got.stats.num_accepted_tokens > 0
    kept = lade.Config(reuses_prefix=True, max_draft_tokens=8)
    for _ in range(2):
        _, got = same_as_generate(model, PROMPT, accept=1.0, config=kept, **OPTIONS)
    assert got.stats.num_accepted_tokens > 0
    assert [str(each.message) for each in recwarn if "lade" in str(each.message)] == []


def writes(module: Any, args: Any, output: Any) -> None:
    output.requires_grad_(False)
    output *= 2


def returns(module: Any, args: Any, output: Any) -> Any:
    return output.requires_grad_(False)[:, :1]


def remembers(module: Any, args: Any, output: Any, seen: Any = STATES) -> None:
    output.requires_grad_(not seen)


@pytest.mark.parametrize("hook", [writes, returns, remembers])
def test_a_hook_that_may_do_more_than_ask_for_gradients_is_the_users(hook: Any) -> None:
    model = tiny_model(seed=1)
    model.model.layers[0].mlp.register_forward_hook(hook)
    with pytest.warns(RuntimeWarning, match="lade reuses no prefix"):
        lade.generate(model, PROMPT, config=lade.Config(reuses_prefix=True), max_new_tokens=3)


def compiled() -> Any:
    """Return a model whose forwards run by a job."""
    model = tiny_model(seed=1, dtype=torch.float32, head_dim=16)
    if lade.probe(model).why_by_torch is not None:
        pytest.skip("no job runs here")
    return model


@pytest.mark.parametrize("change", [for_adapters, doubled, trained])
def test_what_trainers_leave_keeps_the_compiled_forward(change: Callable[[Any], None]) -> None:
    model = compiled()
    change(model)
    assert lade.probe(model).why_by_torch is None
    for ids in (PROMPT, PROMPT[:, :9].repeat(3, 1)):
        _, got = same_as_generate(model, ids, knows=True, config=EIGHT, **OPTIONS)
        assert got.stats.num_accepted_tokens > 0


def test_a_compiled_forward_that_is_lost_is_told_of_once() -> None:
    model = compiled()
    same_as_generate(model, PROMPT, knows=True, config=EIGHT, **OPTIONS)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: None)
    with pytest.warns(RuntimeWarning, match=r"its modules have hooks \(model\.layers\.1\.mlp\)"):
        same_as_generate(model, PROMPT, knows=True, config=EIGHT, **OPTIONS)
    same_as_generate(model, PROMPT, knows=True, config=EIGHT, **OPTIONS)
    handle.remove()
    assert lade.probe(model).why_by_torch is None


class Passing:
    """An object around a forward, as accelerate's that convert results."""

    def __init__(self, own: Any) -> None:
        self.own, self.num = own, 0

    def __call__(self, *args: Any, **given: Any) -> Any:
        self.num += 1
        return self.own(*args, **given)


def by_trainer(model: Any, autocast: bool = True) -> None:
    """Wrap the forward as GRPO and mixed precision do."""
    own: Any = type(model).forward

    @wraps(own)
    def fused(self: Any, *args: Any, fused_head: bool = False, **given: Any) -> Any:
        return bound(*args, **given)

    bound, inner = model.forward, Passing(torch.autocast("cpu", torch.bfloat16)(fused))
    outer = inner if autocast else Passing(fused)
    model.forward = MethodType(lambda *args, **given: outer(*args, **given), model)


@pytest.mark.parametrize("autocast", [False, True])
def test_batches_draft_inside_a_trainers_forward(autocast: bool) -> None:
    """Also in training mode; under autocast by the rules of 16 bits."""
    model = tiny_model(seed=1, dtype=torch.float32, head_dim=16) if autocast else compiled()
    by_trainer(model.train(), autocast)
    rows, pool = PROMPT[:, :9].repeat(4, 1), lade.NGramPool()
    for row in model.generate(rows, **OPTIONS).tolist():
        pool.observe(row)
    for do_sample in (False, True):
        options = OPTIONS | {"do_sample": do_sample}
        if autocast:  # a near-tie may fall the other way
            got = answered(model, rows, pool=pool, config=EIGHT, **options)
        else:
            _, got = same_as_generate(model, rows, pool=pool, config=EIGHT, **options)
        assert got.stats.num_accepted_tokens > 20 * (not do_sample)
    why = lade.probe(model).why_by_torch
    assert why == ("its forward runs under autocast (torch.bfloat16)" if autocast else None)


# --- experts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "capacity"), [("of_a_test", 6), ("eager", None)])
def test_an_experts_function_of_the_users_runs(name: str, capacity: int | None) -> None:
    """It is registered under a name of its own, or in the place of transformers'."""
    family: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    model = tiny_model("qwen3_moe", dtype=torch.float32, moe_intermediate_size=16, **family)
    steering, before = torch.zeros(32), {**ALL_EXPERTS_FUNCTIONS._global_mapping}

    def mine(self: Any, states: Tensor, index: Tensor, shares: Tensor) -> Tensor:
        made = torch.zeros_like(states)
        for expert in range(len(self.gate_up_proj)):
            tokens, which = (each[:capacity] for each in torch.where(index == expert))
            gate, up = functional.linear(states[tokens], self.gate_up_proj[expert]).chunk(2, -1)
            out = functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            made.index_add_(0, tokens, out * shares[tokens, which, None])
        return made + steering

    ALL_EXPERTS_FUNCTIONS.register(name, mine)
    try:
        model.set_experts_implementation(name)
        for value in (0.0, 1.0):
            steering[:16] = value
            same_as_generate(model, PROMPT, knows=True, config=EIGHT, **OPTIONS)
        assert "your own code" in lade.probe(model).reasons["tree"]
    finally:
        ALL_EXPERTS_FUNCTIONS._global_mapping.clear()
        ALL_EXPERTS_FUNCTIONS._global_mapping.update(before)


# --- torch.compile --------------------------------------------------------------------------------


class Backend:
    """Runs graphs as they are; counts how many there are, and how often they run."""

    def __init__(self) -> None:
        self.num_compiled = self.num_run = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.num_compiled += 1

        def run(*args: Any) -> Any:
            self.num_run += 1
            return graph.forward(*args)

        return run


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layer(model: Any, **options: Any) -> None:
    model.model.layers[0] = torch.compile(model.model.layers[0], **options)


@pytest.mark.usefixtures("nothing_compiled")
def test_nothing_is_compiled_but_what_generate_compiles() -> None:
    found = []
    for call in (LlamaForCausalLM.generate, lade.generate):
        torch._dynamo.reset()
        backend, model = Backend(), tiny_model(seed=1)
        layer(model, backend=backend, dynamic=True)
        texts = [
            call(model, PROMPT[:, :length], **OPTIONS | {"max_new_tokens": 12}).tolist()
            for length in (5, 12)
        ]
        found.append((texts, backend.num_compiled, backend.num_run))
    assert found[0] == found[1]
    assert found[0][1] > 0


@pytest.mark.usefixtures("nothing_compiled")
def test_a_probe_says_which_part_is_compiled_until_it_is_put_back() -> None:
    model = tiny_model(seed=1)
    part = model.model.layers[0]
    layer(model, backend=Backend())
    found = lade.probe(model)
    assert found.verification == "plain"
    why = "model.layers.0 is compiled by torch.compile, and drafts would compile it again"
    assert all(reason.startswith(why) for reason in found.reasons.values())
    with pytest.raises(lade.UnsupportedModelError, match=r"is compiled by torch\.compile"):
        lade.generate(model, PROMPT, config=lade.Config(verification="chain"), **OPTIONS)
    model.model.layers[0] = part
    assert lade.probe(model).verification == "tree"
    assert lade.probe(torch.compile(model, backend=Backend())).verification == "tree"
