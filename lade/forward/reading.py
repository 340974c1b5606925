"""Read from a model how its decoder computes, so that one compiled job can do the same.

Nothing is known of architectures: a short forward is watched, and each number that passes between
modules must be what the plan says it is. What does not fit raises `UnsupportedForwardError`.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from lade.compat import Model, attention_of, is_own_hook, placeholders_of
from lade.forward import words
from lade.forward.packed import PackedLinear
from lade.view import apart, with_attention

_POSITIONS = [0, 1, 2, 1_000_003, 1_000_004]  # of the forward that is watched
_WATCHED = "lade_watched"
_sdpa = AttentionInterface()["sdpa"]

# What a module tells attention that a plan has, or says nothing of the result.
_HONOURED = {
    *("dropout", "scaling", "softcap", "s_aux", "sliding_window", "is_causal", "position_ids"),
    *("use_cache", "output_attentions", "output_hidden_states", "cache_position", "return_dict"),
}
_LINEARS = (nn.Linear, PackedLinear)
_NOTHING = (nn.Dropout, nn.Identity)  # done by these when a text is generated
_OUTS = ("o_proj", "out_proj", "dense", "c_proj")
_FUNCTIONS: dict[int, Callable[[Tensor], Tensor]] = {
    words.SILU: functional.silu,
    words.GELU: functional.gelu,
    words.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    words.RELU: functional.relu,
    words.RELU_SQUARED: lambda x: functional.relu(x).square(),
}
# What makes logits of the head's results, by the setting that tells how much.
_FINISHES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "final_logit_softcapping": lambda results, most: torch.tanh(results / most) * most,
    "logit_scale": lambda results, scale: results * scale,
    "logits_scaling": lambda results, divisor: results / divisor,
}


class UnsupportedForwardError(Exception):
    """A model, or a forward of it, computes something that a plan has no place for."""


def require(holds: bool, reason: str) -> None:
    """Raise `UnsupportedForwardError` with a reason, unless something holds."""
    if not holds:
        raise UnsupportedForwardError(reason)


class NormPlan(NamedTuple):
    """A norm of states, or of queries or keys."""

    module: nn.Module
    flags: int
    eps: float


class AdditionPlan(NamedTuple):
    """What is added to the results of a linear layer: those of two others, times a number."""

    first: nn.Linear  # to few numbers
    second: nn.Linear
    times: float


class ProductPlan(NamedTuple):
    """Some columns of a linear layer, with what is added to them."""

    module: nn.Linear
    first: int
    num: int
    around: nn.Module  # that gives the sum; the layer itself if nothing is added
    added: tuple[AdditionPlan, ...]

    @property
    def num_inputs(self) -> int:
        """Numbers of a row of inputs."""
        return self.module.in_features


class RotaryPlan(NamedTuple):
    """A module that makes angles, and what it is called with besides states and positions."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class LayerPlan(NamedTuple):
    """A decoder layer."""

    norms: tuple[NormPlan | None, ...]  # before and after attention, MLP; of queries, keys
    products: tuple[ProductPlan | None, ...]  # query, key, value, out, gate, up, down
    activation: int
    rotary: RotaryPlan | None
    num_turned: int
    turn: int
    repeats_angles: bool  # whether neighbours have one angle, given once
    scaling: float
    softcap: float
    sinks: nn.Module | None
    factor: float  # of what comes to the states
    is_parallel: bool  # whether attention and MLP get the same states

    @property
    def inner(self) -> int:
        """Numbers of a token inside of the MLP."""
        return self.products[-1].num_inputs  # type: ignore[union-attr]


class DecoderSizes(NamedTuple):
    """What of a plan is no module."""

    num_layers: int
    hidden: int
    num_heads: int
    num_key_heads: int
    head_size: int
    vocab_size: int
    inner: int  # of the largest MLP
    between: int  # the factors of a layer's low-rank additions, at most
    scale: float  # of what the embedding gives
    has_windows: bool  # whether layers see but the last of the tokens before
    finish: Callable[[Tensor], Tensor]  # of the head's results, to logits


class DecoderPlan(NamedTuple):
    """How a decoder computes logits from token ids."""

    sizes: DecoderSizes
    kinds: tuple[str, ...]  # of masks, by layer
    embedding: nn.Module
    layers: tuple[LayerPlan, ...]
    norm: NormPlan | None
    head: nn.Linear
    modules: tuple[nn.Module, ...]  # of the layers


class _Call(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


class _Attention(NamedTuple):
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    kwargs: dict[str, Any]


def _watched(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as `sdpa`, and note what of, in the module of the view that is watched."""
    kept = {name: each for name, each in kwargs.items() if name in ("scaling", "is_causal")}
    out, _ = _sdpa(module, query, key, value, mask, **kept)
    noted = vars(module).setdefault(_WATCHED, [])
    noted.append(_Attention(module, query, key, value, out, kwargs))
    return out, None


AttentionInterface.register(_WATCHED, _watched)
AttentionMaskInterface.register(_WATCHED, AttentionMaskInterface()["sdpa"])


@torch.no_grad()
def read(model: Model) -> DecoderPlan:
    """Return how a model computes.

    Raises:
        UnsupportedForwardError: in a way that no plan tells, or code of others' own takes part.
    """
    require(not any(module.training for module in model.modules()), "it is in training mode")
    view = apart(with_attention(model, _WATCHED))
    # Those of the whole model and of its layers are called around what a job runs.
    hooked: set[nn.Module] = set()
    calls: dict[nn.Module, list[_Call]] = {}
    for module in view.modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if module is not view and not all(map(is_own_hook, hooks)):
            hooked.add(module)
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        forward = vars(module).get("forward", module.forward)
        is_usual = getattr(forward, "__func__", None) is type(module).forward
        require(is_usual, "a module has a forward of its own")
        module.register_forward_hook(
            lambda module, args, kwargs, out: calls.setdefault(module, []).append(
                _Call(args, kwargs, out)
            ),
            with_kwargs=True,
        )
    text = model.config.get_text_config(decoder=True)
    taken = {*placeholders_of(model), getattr(text, "pad_token_id", None)}
    ids = [each for each in range(text.vocab_size // 2, text.vocab_size) if each not in taken]
    input_ids = torch.tensor([ids[: len(_POSITIONS)]])
    # Some scale queries by their position, from thousands of tokens on.
    positions = torch.tensor([_POSITIONS])
    output = view(input_ids=input_ids, position_ids=positions, use_cache=False)
    attended = [each for module in view.modules() for each in vars(module).get(_WATCHED, ())]
    for module in view.modules():
        module._forward_hooks.clear()
    reader = _Reader(view, calls, input_ids, positions, attention_of(model))
    plan = reader.plan(attended, output.logits)
    require(hooked <= {*plan.modules}, "its modules have hooks")
    gives_states = all(isinstance(calls[each][0].out, Tensor) for each in plan.modules)
    require(not hooked or gives_states, "its layers have hooks, and give more than states")
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(plan.layers)
    originals = dict(zip(view.modules(), model.modules(), strict=True))
    of_model: DecoderPlan = _with_originals(plan._replace(kinds=tuple(kinds)), originals)
    return of_model


def _with_originals(value: Any, originals: dict[Any, Any]) -> Any:
    """Return a plan with the model's modules instead of those of a view."""
    if isinstance(value, nn.Module):
        return originals[value]
    if not isinstance(value, tuple):
        return value
    if id(value) not in originals:  # what is one object stays one
        parts = [_with_originals(each, originals) for each in value]
        originals[id(value)] = tuple(parts) if type(value) is tuple else type(value)(*parts)
    return originals[id(value)]


def adapters_of(plan: DecoderPlan) -> Iterator[nn.Module]:
    """Yield the modules that may add something to the results of a linear layer."""
    for layer in plan.layers:
        for product in layer.products:
            if product is not None and product.around is not product.module:
                yield product.around


class _Reader:
    """Holds what passed between modules in one forward against what a plan can tell."""

    def __init__(
        self,
        view: Model,
        calls: dict[nn.Module, list[_Call]],
        input_ids: Tensor,
        positions: Tensor,
        implementation: str | None,
    ) -> None:
        self._view, self._calls, self._implementation = view, calls, implementation
        self._input_ids, self._positions = input_ids, positions
        self._parents = {
            child: module for module in view.modules() for child in module._modules.values()
        }
        self._norms: list[tuple[nn.Module, Tensor, Tensor]] = []  # of the layer, not yet used
        self._rotaries: dict[int, RotaryPlan] = {}
        # Linear layers inside of others, which may add something to their results.
        self._adapted: dict[nn.Module, tuple[nn.Linear, tuple[AdditionPlan, ...]]] = {}
        for module in view.modules():
            found = self._additions(module) if module._modules else None
            if found is not None:
                self._adapted[module] = found

    def plan(self, attended: list[_Attention], logits: Tensor) -> DecoderPlan:
        require(bool(attended), "its attention is not transformers'")
        sizes, *others = dict.fromkeys(
            (each.query.shape[1], each.key.shape[1], each.query.shape[3]) for each in attended
        )
        is_alike = all(each.value.shape[3] == sizes[2] for each in attended)
        require(is_alike and not others, "its layers have heads of different sizes")
        embedding, scale, states = self._embedded(attended[0])
        layers = []
        for each in attended:
            layer, states = self._layer(each, states, sizes)
            layers.append(layer)
        head = self._view.get_output_embeddings()
        require(type(head) in _LINEARS and head in self._calls, "its head is not a linear layer")
        given, results = self._io(head)
        self._norms = [(each, *self._io(each)) for each in self._calls if _is_norm(each)]
        norm = self._norm_between(states, given)
        finish = _finish_of(results, logits, self._view)
        inner = max(layer.inner for layer in layers)
        has_windows = any(each.kwargs.get("sliding_window") for each in attended)
        between = max(
            sum(added.first.out_features for each in layer.products if each for added in each.added)
            for layer in layers
        )
        of_heads = (len(layers), head.in_features, *sizes, head.out_features)
        decoder = DecoderSizes(*of_heads, inner, between, scale, has_windows, finish)
        modules = tuple(self._parents[each.module] for each in attended)
        return DecoderPlan(decoder, (), embedding, tuple(layers), norm, head, modules)

    def _embedded(self, first: _Attention) -> tuple[nn.Module, float, Tensor]:
        """Return the embedding, the factor of what it gives, and states of the first layer."""
        states = self._io(self._parents[first.module])[0]
        for module, (call, *_) in self._calls.items():
            if not isinstance(module, nn.Embedding) or call.out.shape != states.shape:
                continue
            ratio = float((states.double() / call.out.double()).nanmedian())
            for scale in (1.0, ratio, round(ratio, 6)):
                if torch.equal(call.out * scale, states):
                    return module, scale, states
        raise UnsupportedForwardError("its first layer does not get what an embedding gives")

    def _io(self, module: nn.Module) -> tuple[Tensor, Any]:
        """Return what a module got and gave, which was called once."""
        calls = self._calls.get(module, [])
        require(len(calls) == 1, f"{type(module).__name__} is called {len(calls)} times")
        given = calls[0].args[0] if calls[0].args else next(iter(calls[0].kwargs.values()))
        return given, calls[0].out

    def _results(self, product: ProductPlan) -> Tensor:
        """Return what some columns of a linear layer gave, with what is added to them."""
        out: Tensor = self._io(product.around)[1]
        return out[..., product.first : product.first + product.num]

    def _layer(
        self, attended: _Attention, states: Tensor, sizes: tuple[int, int, int]
    ) -> tuple[LayerPlan, Tensor]:
        """Return a layer, and the states that it gives."""
        attention, head_size = attended.module, sizes[2]
        layer = self._parents[attention]
        got, out = self._io(layer)
        require(torch.equal(got, states), "a layer does not get what the one before it gives")
        result = out[0] if isinstance(out, tuple) else out
        leaves = [*dict.fromkeys(self._leaves(layer))]
        self._norms = [(each, *self._io(each)) for each in leaves if _is_norm(each)]
        mixing, out_linear = self._projections(attended, sizes)
        given, attention_out = self._io(mixing[0].around)[0], self._results(out_linear)
        before = self._norm_between(states, given)
        rotary, angles = self._rotary(layer)
        query, key = map(self._results, mixing[:2])
        query_norm, turn, repeats = self._turned(query, attended.query, angles, head_size)
        key_norm, *others = self._turned(key, attended.key, angles, head_size)
        require(others == [turn, repeats], "queries and keys are turned in different ways")
        used: set[nn.Module] = {each.around for each in (*mixing, out_linear)}
        linears = [
            each
            for each in leaves
            if (isinstance(each, nn.Linear) or each in self._adapted) and each not in used
        ]
        gate, up, down, activation = self._mlp(layer, linears)
        mlp_given, mlp_out = self._io(gate.around)[0], self._results(down)
        factor = float(getattr(layer, "residual_multiplier", 1.0))
        after, added = self._after(attention_out)
        between = states + (added if factor == 1.0 else added * factor)
        is_parallel = mlp_given is given or any(
            mine is states and each is mlp_given for _, mine, each in self._norms
        )
        before_mlp = before
        if mlp_given is not given:
            before_mlp = self._norm_between(states if is_parallel else between, mlp_given)
        after_mlp, added = self._after(mlp_out)
        total = between + (added if factor == 1.0 else added * factor)
        require(_is_near(result, total), "a layer adds something else to its states")
        gated, done = self._results(gate), {*used, *linears}
        rest = [
            each
            for each in leaves
            if each not in done and not isinstance(each, _NOTHING) and not _is_norm(each)
            # An activation is part of the MLP.
            if each._parameters or not torch.equal(self._io(each)[0], gated)
        ]
        rest += [module for module, _, _ in self._norms]
        require(not rest, f"{[type(each).__name__ for each in rest]} take part in a layer")
        scaling, softcap, sinks = _settings_of(attended, self._implementation)
        plan = LayerPlan(
            (before, after, before_mlp, after_mlp, query_norm, key_norm),
            (*mixing, out_linear, gate, up, down),
            activation,
            rotary if turn else None,
            angles[0].shape[-1] if turn else 0,
            *(turn, repeats, scaling, softcap, sinks, factor, is_parallel),
        )
        return plan, result

    def _projections(
        self, attended: _Attention, sizes: tuple[int, int, int]
    ) -> tuple[list[ProductPlan], ProductPlan]:
        """Return what makes queries, keys and values, and what takes the result of attention."""
        num_heads, num_key_heads, head_size = sizes
        children = dict(attended.module.named_children())
        widths = [head_size * num for num in (num_heads, num_key_heads, num_key_heads)]
        if {"q_proj", "k_proj", "v_proj"} <= children.keys():
            linears = [children[f"{name}_proj"] for name in "qkv"]
            starts = [0, 0, 0]
        elif "qkv_proj" in children:
            linears = [children["qkv_proj"]] * 3
            starts = [0, widths[0], widths[0] + widths[1]]
        else:
            raise UnsupportedForwardError("its attention has no projections of known names")
        mixing = [*map(self._product, linears, starts, widths)]
        rows, given = attended.value.transpose(1, 2).flatten(2), self._io(linears[2])[0]
        is_same = torch.equal(rows, self._results(mixing[2]))
        is_same = is_same and all(self._io(each)[0] is given for each in linears)
        require(is_same, "values are not what their projection gives")
        outs = [children[name] for name in _OUTS if name in children]
        require(len(outs) == 1, "its attention has no projection of a known name, or several")
        of_heads = self._io(outs[0])[0]
        is_same = torch.equal(of_heads, attended.out.flatten(2))
        require(is_same, "something is between attention and its projection")
        return mixing, self._product(outs[0])

    def _leaves(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield modules that were called and call no others; an adapted layer is one of them."""
        if module in self._adapted or not module._modules:
            if module in self._calls:
                yield module
            return
        for child in module.children():
            yield from self._leaves(child)

    def _product(self, module: Any, first: int = 0, num: int | None = None) -> ProductPlan:
        """Return some columns of a linear layer, by default all."""
        linear, added = self._adapted.get(module, (module, ()))
        name = type(module).__name__
        require(type(linear) in _LINEARS, f"{name} is not a plain linear layer")
        return ProductPlan(linear, first, num or linear.out_features, module, added)

    def _additions(self, module: nn.Module) -> tuple[nn.Linear, tuple[AdditionPlan, ...]] | None:
        """Return the linear layer in a module, and what is added; None for other modules."""
        inside = {*module.modules()} - {module}
        called = [
            each
            for each in self._calls
            if each in inside and not each._modules and not isinstance(each, _NOTHING)
        ]
        if not called or any(type(each) not in _LINEARS for each in called):
            return None
        if any(len(self._calls.get(each, ())) != 1 for each in (module, *called)):
            return None
        made = {id(self._io(each)[1]): each for each in called}
        pairs = {each: made.get(id(self._io(each)[0])) for each in called}
        firsts: list[Any] = [each for each in pairs.values() if each is not None]
        linears: Any = [each for each in called if pairs[each] is None and each not in firsts]
        seconds: Any = [each for each in called if pairs[each]]
        given, result = self._io(module)
        if len(linears) != 1 or not isinstance(result, Tensor):
            return None
        total = self._io(linears[0])[1]
        if any(
            mine.shape != given.shape or not torch.equal(mine.to(given.dtype), given)
            for mine, _ in map(self._io, (*linears, *firsts))
        ):
            return None
        times = _factors(module, linears[0], seconds, given)
        if times is None:
            return None
        for second, number in zip(seconds, times, strict=True):
            total = total + self._io(second)[1] * number
        if not _is_near(total.to(result.dtype), result):
            return None
        added = zip(firsts, seconds, times, strict=True)
        return linears[0], tuple(AdditionPlan(*each) for each in added)

    def _take_norm(
        self, fits: Callable[[Tensor, Tensor], bool]
    ) -> tuple[NormPlan | None, Any, Any]:
        """Return the norm whose input and result fit, and these; None of all if none does."""
        for place, (module, mine, out) in enumerate(self._norms):
            if fits(mine, out):
                del self._norms[place]
                return _norm_of(module, mine, out), mine, out
        return None, None, None

    def _norm_between(self, given: Tensor, normed: Tensor) -> NormPlan | None:
        """Return the norm whose result this is, of these states; None if it is these states."""
        if normed is given or torch.equal(normed, given):
            return None
        norm, *_ = self._take_norm(
            lambda mine, out: torch.equal(out, normed) and _is_near(mine, given)
        )
        require(norm is not None, "states change on their way in another way than by a norm")
        return norm

    def _after(self, given: Tensor) -> tuple[NormPlan | None, Tensor]:
        """Return the norm of what attention or MLP gave, if it has one, and what is added."""
        norm, _, out = self._take_norm(lambda mine, _: torch.equal(mine, given))
        return norm, given if norm is None else out

    def _rotary(self, layer: nn.Module) -> tuple[RotaryPlan | None, tuple[Tensor, ...]]:
        """Return what made the angles of a layer, and these: cosines and sines."""
        call = self._calls[layer][0]
        pairs = [
            each[0]
            for each in (*call.args, *call.kwargs.values())
            if isinstance(each, tuple) and len(each) == 2
        ]
        for module, calls in self._calls.items():
            for made in calls:
                is_pair = isinstance(made.out, tuple) and len(made.out) == 2
                if is_pair and any(made.out[0] is each for each in pairs):
                    if id(made) not in self._rotaries:  # one for all layers that it is made for
                        self._rotaries[id(made)] = self._rotary_of(module, made)
                    return self._rotaries[id(made)], made.out
        return None, ()

    def _rotary_of(self, module: nn.Module, made: _Call) -> RotaryPlan:
        def kept(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dtype == torch.int64:
                require(torch.equal(value, self._positions), "its positions have several axes")
                return words.POSITIONS_GIVEN
            return words.STATES_GIVEN if isinstance(value, Tensor) else value

        args = tuple(map(kept, made.args))
        kwargs = {name: kept(value) for name, value in made.kwargs.items()}
        num = [*args, *kwargs.values()].count(words.POSITIONS_GIVEN)
        require(num == 1, "its angles are not of positions")
        return RotaryPlan(module, args, kwargs)

    def _turned(
        self, given: Tensor, turned: Tensor, angles: tuple[Tensor, ...], head_size: int
    ) -> tuple[NormPlan | None, int, bool]:
        """Return the norm of queries or keys, how they are turned, and whether angles repeat."""

        def by_head(rows: Tensor) -> Tensor:
            return rows.view(*given.shape[:2], -1, head_size).transpose(1, 2)

        heads, flat = by_head(given), given.flatten()
        norm, mine, out = self._take_norm(
            lambda mine, _: any(
                torch.equal(mine.flatten(), each) for each in (flat, heads.flatten())
            )
        )
        if norm is not None:
            heads = by_head(out) if torch.equal(mine.flatten(), flat) else out
            if mine.shape[-1] != head_size:
                norm = norm._replace(flags=norm.flags | words.IS_WHOLE)
        if torch.equal(heads, turned):
            return norm, 0, False
        is_by_angles = len(angles) == 2 and angles[0].dim() == 3
        require(is_by_angles, "queries change in another way than by angles")
        best = min(
            (_apart(_turned_by(heads, angles, how, repeats), turned), how, repeats)
            for how in (words.HALVES, words.NEIGHBOURS)
            for how in (how, how | words.WIDE)
            for repeats in (False, True)
        )
        is_by_angles = best[0] <= _tolerance(turned)
        require(is_by_angles, "queries change in another way than by angles")
        return norm, best[1], best[2]

    def _mlp(
        self, layer: nn.Module, linears: list[nn.Module]
    ) -> tuple[ProductPlan, ProductPlan | None, ProductPlan, int]:
        """Return gate, up and down, and the activation; without a gate, up stands in its place."""
        named = {name.rpartition(".")[2]: each for name, each in layer.named_modules()}
        up: ProductPlan | None = None
        if len(linears) == 3 and {"gate_proj", "up_proj", "down_proj"} <= named.keys():
            gate, up, down = (
                self._product(named[f"{name}_proj"]) for name in ("gate", "up", "down")
            )
            is_same = self._io(gate.around)[0] is self._io(up.around)[0]
            require(is_same, "gate and up get different states")
        elif len(linears) == 2 and "gate_up_proj" in named:
            whole, down = self._product(named["gate_up_proj"]), self._product(named["down_proj"])
            half = whole.num // 2
            gate, up = (self._product(whole.around, first, half) for first in (0, half))
        else:
            require(len(linears) == 2, f"a layer has {len(linears)} linear layers for its MLP")
            gate, down = sorted(map(self._product, linears), key=lambda each: -each.num)
        gated, upped = self._results(gate), 1.0 if up is None else self._results(up)
        inner = self._io(down.around)[0]

        def error(which: int) -> float:
            return _apart(_FUNCTIONS[which](gated) * upped, inner)

        activation = min(_FUNCTIONS, key=error)
        require(error(activation) <= _tolerance(inner), "its MLP has another activation")
        return gate, up, down, activation


def _settings_of(
    attended: _Attention, implementation: str | None
) -> tuple[float, float, nn.Module | None]:
    """Return scaling and softcap of attention, and the module that has its sinks, if any."""
    settings = {name: each for name, each in attended.kwargs.items() if each is not None}
    for name in ("softcap", "s_aux"):
        if name in settings and implementation == "sdpa" and _is_ignored(attended, name):
            del settings[name]
    unknown = [
        name
        for name, each in settings.items()
        if name not in _HONOURED and each is not False and not isinstance(each, dict)
    ]
    unknown += ["dropout"] * bool(settings.get("dropout"))
    # What a module says of itself holds where nothing is passed.
    is_causal = settings.get("is_causal", getattr(attended.module, "is_causal", True))
    require(is_causal is True, "its tokens see those behind them")
    require(not unknown, f"its attention is told of {unknown}")
    sinks = settings.get("s_aux")
    is_own = sinks is None or attended.module._parameters.get("sinks") is sinks
    require(is_own, "sinks are no parameter of its attention")
    scaling = settings.get("scaling", attended.query.shape[3] ** -0.5)
    softcap = float(settings.get("softcap", 0.0))
    return float(scaling), softcap, None if sinks is None else attended.module


def _factors(
    module: nn.Module, linear: nn.Linear, seconds: list[nn.Linear], given: Tensor
) -> list[float] | None:
    """Return what a module multiplies results of some layers by before it adds them to another's.

    Asked of numbers put in place of these results, which tell nothing where a weight is still zero.
    None if it does something else with them.
    """
    if not seconds:
        return []
    angles = torch.arange(linear.out_features, dtype=torch.float64)
    put = {each: (angles * (place + 1.3)).sin() for place, each in enumerate((linear, *seconds))}
    for each, numbers in put.items():
        each.register_forward_hook(lambda _, __, out, numbers=numbers: numbers.expand(out.shape))
    out = module(given)
    if not isinstance(out, Tensor) or out.dtype is not torch.float64:
        return None
    parts = torch.stack([put[each] for each in seconds], dim=1)
    rest = out.reshape(-1, linear.out_features)[0] - put[linear]
    times = torch.linalg.lstsq(parts, rest[:, None]).solution
    if not torch.allclose(parts @ times, rest[:, None], rtol=1e-9, atol=1e-9):
        return None
    return [float(each) for each in times[:, 0]]


def _is_ignored(attended: _Attention, name: str) -> bool:
    """Return whether transformers' `sdpa`, as it is installed, ignores a setting."""
    large = (attended.module, 100 * attended.query, attended.key, attended.value, None)
    setting = {name: attended.kwargs[name]}
    return torch.equal(_sdpa(*large, **setting)[0], _sdpa(*large)[0])


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _apart(mine: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, infinite between different shapes."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return math.inf
    return float((mine - theirs).abs().max())


def _tolerance(values: Tensor) -> float:
    """Return how far results may be apart that are rounded at other places."""
    return 16 * torch.finfo(values.dtype).eps * float(values.abs().max())


def _is_near(mine: Tensor, theirs: Tensor) -> bool:
    return _apart(mine, theirs) <= _tolerance(theirs)


def _turned_by(heads: Tensor, angles: tuple[Tensor, ...], how: int, repeats: bool) -> Tensor:
    """Return heads [1, num_heads, num_tokens, head_dim] turned by angles [1, num_tokens, …]."""
    cos, sin = (repeated(each, repeats)[:, None] for each in angles)
    size, dtype = cos.shape[-1], heads.dtype
    if size > heads.shape[-1]:
        return torch.full_like(heads, math.inf)
    if how & words.WIDE:
        heads, cos, sin = heads.float(), cos.float(), sin.float()
    turning, rest = heads[..., :size], heads[..., size:]
    if how & words.HALVES:
        across = torch.cat((-turning[..., size // 2 :], turning[..., : size // 2]), dim=-1)
    else:
        across = torch.stack((-turning[..., 1::2], turning[..., ::2]), dim=-1).flatten(-2)
    return torch.cat((turning * cos + across * sin, rest), dim=-1).to(dtype)


def repeated(angles: Tensor, repeats: bool) -> Tensor:
    """Return angles, the first half of them twice in a row where neighbours share one."""
    if not repeats:
        return angles
    return angles[..., : angles.shape[-1] // 2].repeat_interleave(2, dim=-1)


def _norm_of(module: nn.Module, given: Tensor, out: Tensor) -> NormPlan:
    """Return what kind of norm a module is, by what it gave."""
    name, names = type(module).__name__, ("variance_epsilon", "eps", "epsilon")
    eps = next((getattr(module, each) for each in names if hasattr(module, each)), None)
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if {*module._parameters} - {"weight", "bias"} or not isinstance(eps, float):
        raise UnsupportedForwardError(f"{name} has other parameters than norms have")
    sizes = {each.numel() for each in (weight, bias) if each is not None}
    require(sizes <= {given.shape[-1]}, f"{name} has weights for each head")
    errors = {}
    for flags in range(0, 16, 2):
        wide = given.float()
        if flags & words.CENTERS:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if flags & words.ROUNDS:
            wide = wide.to(given.dtype).float()
        if weight is not None:
            wide = wide * (weight.float() + (1.0 if flags & words.ADDS_ONE else 0.0))
        if bias is not None:
            wide = wide + bias.float()
        errors[flags] = float((wide.to(given.dtype) - out).abs().max())
    flags = min(errors, key=errors.__getitem__)
    require(errors[flags] <= _tolerance(out), f"{name} is no norm that is known")
    return NormPlan(module, flags | words.IS_NORM, eps)


def _finish_of(results: Tensor, logits: Tensor, view: Model) -> Callable[[Tensor], Tensor]:
    """Return what makes logits of the results of the head."""
    if torch.equal(results, logits):
        return lambda each: each
    text = view.config.get_text_config(decoder=True)
    for name, finish in _FINISHES.items():
        setting = getattr(text, name, None)
        if setting and torch.equal(finish(results, setting), logits):
            return lambda each: finish(each, setting)
    raise UnsupportedForwardError("its logits are not what its head gives")
