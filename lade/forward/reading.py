"""Read from a model how its decoder computes, so that one compiled job can do the same.

No architecture is known by name. A short forward is watched, and every tensor that passes between
modules must be the one that the plan computes. A difference raises `UnsupportedForwardError`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from lade.attention.masks import AttentionSpan
from lade.compat import CACHE, Model, attention_of, placeholders_of
from lade.compat.attempts import Attempt
from lade.errors import UnsupportedModelError
from lade.forward import words
from lade.forward.comparing import (
    ACTIVATIONS,
    UnsupportedForwardError,
    convolved,
    difference,
    is_near,
    only,
    require,
    tolerance,
)
from lade.forward.experts import ExpertsPlan, experts_in, read_experts, router_of
from lade.forward.packed import PackedLinear
from lade.forward.recurrence import GatedNorm, RecurrencePlan, read_recurrence
from lade.forward.watching import PRODUCTS, SDPA, Attended, Called, Watched, size_of, watch
from lade.targets.layout import tree_layout

# Arguments of attention that a plan contains, or that do not change the result.
_HONOURED = {
    *("dropout", "scaling", "softcap", "s_aux", "sliding_window", "is_causal", "position_ids"),
    *("use_cache", "output_attentions", "output_hidden_states", "cache_position", "return_dict"),
    "logits_to_keep",
}
_LINEARS = (nn.Linear, PackedLinear)
_FEW = 1e-5  # mean square of states that norms are asked about
_OTHER_SUM = "a layer adds something else to its states"
_NOTHING = (nn.Dropout, nn.Identity)  # these change nothing when a text is generated
_MIXING = ("q_proj", "k_proj", "v_proj"), ("query", "key", "value")
# Forms of a rotary module's output: sines first, or negated; only the first half used; the same
# number for two neighbours, or in both halves.
_SINES_FIRST, _BACK, _HALVED, _SHARED, _TWICE = 1, 2, 4, 8, 16
_ARRANGEMENTS = [
    how | sines
    for how in (0, _HALVED | _SHARED, _SHARED, _TWICE)
    for sines in (0, _SINES_FIRST, _BACK, _SINES_FIRST | _BACK)
]
# Last operations on logits, by the name of the setting that has their factor.
_FINISHES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "final_logit_softcapping": lambda results, most: torch.tanh(results / most) * most,
    "logit_scale": lambda results, scale: results * scale,
    "logits_scaling": lambda results, divisor: results / divisor,
}


class NormPlan(NamedTuple):
    """A norm of states, or of queries or keys."""

    module: nn.Module
    flags: int
    eps: float


class AdditionPlan(NamedTuple):
    """A low-rank addition to a linear layer: the product of two others, times a factor."""

    first: nn.Linear  # from inputs to the rank
    second: nn.Linear
    times: float


class ProductPlan(NamedTuple):
    """Some columns of a linear layer, with their low-rank additions."""

    module: nn.Linear | Conv1D
    first: int
    num: int
    around: nn.Module  # the module that returns the sum; the layer itself without additions
    added: tuple[AdditionPlan, ...]

    @property
    def num_inputs(self) -> int:
        """Size of a row of inputs."""
        return size_of(self.module)[1]


class CallPlan(NamedTuple):
    """A module and the arguments of its call, with placeholders for tensors."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class EmbeddingPlan(NamedTuple):
    """The embedding: the first layer's input states, from tokens and positions."""

    calls: tuple[CallPlan, ...]  # their results are added; the one of tokens comes first
    scale: float  # factor of the sum
    norm: nn.Module | None  # of the sum
    #: Placeholders of images, videos and audio, each with the token that is embedded instead.
    replaced: tuple[tuple[int, int], ...] = ()


class HeadOrder(NamedTuple):
    """The order of query, key and value heads in the output of a product."""

    num_groups: int  # groups with equal numbers of heads of each kind
    firsts: tuple[int, ...]  # heads in a group before those of each kind
    query_step: int = 1  # heads from one query to the next, and from one gate
    gate: int = -1  # first of the heads that gate the result of attention; -1 without such heads

    def heads(self, kind: int, num: int, num_all: int) -> list[int]:
        """Return the indices of a kind's heads among all, given their number."""
        share = num // self.num_groups
        if self.query_step > 1 and kind == 0:
            return [self.query_step * each for each in range(num)]
        starts = [num_all // self.num_groups * group for group in range(self.num_groups)]
        return [start + self.firsts[kind] + each for start in starts for each in range(share)]


class InputsPlan(NamedTuple):
    """What each layer gets of a token besides its states.

    It is a part of a second embedding, plus the norm of a part of a product of the first layer's
    states, times `scale`.
    """

    embedding: CallPlan  # of tokens
    product: nn.Linear
    times: float  # factor of the product's results
    norm: nn.Module
    scale: float


class HeadsPlan(NamedTuple):
    """The heads of a layer's attention."""

    num: int
    num_keys: int
    size: int  # of queries and keys
    size_of_value: int
    more: int = 0  # further numbers of keys, in the place of values, which then are the keys
    times: float = 1.0  # factor of values


class LatentsPlan(NamedTuple):
    """How keys and values of all heads are made of a token's latent, and queries."""

    query: ProductPlan | None  # from normed columns of the layer's first product
    expand: ProductPlan
    straight: int  # numbers of a head's key that have no angles; all others are of all heads
    turned: int  # the others
    value: int  # numbers of a value

    def num_scratch(self) -> int:
        """Return how many numbers a thread needs for a token."""
        inputs = 0 if self.query is None else self.query.num_inputs
        return max(inputs, self.straight + self.turned, self.expand.num_inputs + self.value)


class LayerPlan(NamedTuple):
    """A decoder layer."""

    # Before and after attention and MLP; of queries and keys; of the states after each addition; of
    # values; after the layer's inputs besides states.
    norms: tuple[NormPlan | None, ...]
    # Query, or all three, key, value, or what a recurrent layer has; more; out, gate, up, down;
    # gate and out of the inputs besides states.
    products: tuple[ProductPlan | None, ...]
    order: HeadOrder
    activation: int
    rotary: CallPlan | None
    num_turned: int
    turn: int
    arrangement: int  # form of the angles, see `arranged`
    is_scaled: bool  # whether queries are multiplied by a number for each position
    scaling: float
    softcap: float
    sinks: nn.Module | None
    factor: float  # of the results that are added to the states
    is_parallel: bool  # whether attention and MLP get the same states
    experts: ExpertsPlan | None  # with experts, the MLP is the shared expert, if there is one
    # Instead of attention, between two gates or before a recurrence.
    convolution: nn.Conv1d | None
    recurrence: RecurrencePlan | None
    heads: HeadsPlan | None  # of attention
    latents: LatentsPlan | None
    keys_of: int | None  # number of the layer whose keys and values it reads; None for its own
    scalar: str | None  # name of the number by which states are multiplied at the end

    @property
    def mixed(self) -> int:
        """Columns of the products before attention, or before what is in its place."""
        return sum(each.num for each in self.products[:4] if each is not None)

    @property
    def queries(self) -> int:
        """Numbers of a token's queries, at most."""
        of = self.heads
        return self.mixed if of is None else max(self.mixed, of.num * (of.size + of.more))

    @property
    def attended(self) -> int:
        """Numbers of a token behind attention, or behind what is in its place."""
        assert self.products[4] is not None
        return self.products[4].num_inputs

    @property
    def inner(self) -> int:
        """Inner size of the MLP."""
        return 0 if self.products[7] is None else self.products[7].num_inputs

    @property
    def of_inputs(self) -> int:
        """Numbers of a token that the layer gets besides states."""
        return 0 if self.products[9] is None else self.products[9].num_inputs


class TransformPlan(NamedTuple):
    """The layers between the last states and the head, if there is more than a norm."""

    first: nn.Module | None  # a norm
    linear: nn.Linear
    activation: int
    last: nn.Module  # a norm


class DecoderSizes(NamedTuple):
    """Sizes and functions of a plan."""

    num_layers: int
    hidden: int
    num_heads: int  # maximum over layers, as the following
    head_size: int
    vocab_size: int
    inner: int  # inner size of the largest MLP, or of a layer's inputs
    between: int  # the factors of a layer's low-rank additions, at most
    mixed: int  # columns of a layer's first products, at most, as the following
    queries: int
    normed: int  # inputs of products after a norm
    attended: int  # numbers of a token behind attention
    taps: int  # tokens that a convolution sees
    of_recurrence: int  # numbers that a thread needs for a recurrence
    of_latents: int  # the same of attention to latents, for each token
    num_experts: int  # maximum over layers, as the following
    num_chosen: int  # of a token
    expert_inner: int
    reach: float  # tokens of the longest text that every layer sees whole
    factors: Callable[[Tensor], Tensor] | None  # of queries, by positions
    finish: Callable[[Tensor], Tensor]  # from the head's results to logits


class DecoderPlan(NamedTuple):
    """How a decoder computes logits from token ids."""

    sizes: DecoderSizes
    kinds: tuple[str, ...]  # of masks, by layer
    spans: tuple[AttentionSpan | None, ...]  # by layer; None if it attends to nothing
    embedding: EmbeddingPlan
    inputs: InputsPlan | None
    layers: tuple[LayerPlan, ...]
    norm: NormPlan | None
    transform: "TransformPlan | None"
    head: nn.Linear
    modules: tuple[nn.Module, ...]  # of the layers


class _Way(NamedTuple):
    """The states at the stages of a layer, in the watched forward."""

    states: Tensor
    given: Tensor  # to attention
    attention_out: Tensor
    mlp_given: Tensor
    mlp_out: Tensor
    result: Tensor


class _Turned(NamedTuple):
    """The operations on queries or keys: norm, rotation, angles, factor."""

    norm: NormPlan | None
    turn: int
    arrangement: int
    scale: float
    is_scaled: bool  # by position


_STRAIGHT = _Turned(None, 0, 0, 1.0, False)


class _Mlp(NamedTuple):
    given: Tensor
    out: Tensor
    products: tuple[ProductPlan | None, ...]  # gate, up, down
    activation: int
    experts: ExpertsPlan | None
    done: set[nn.Module]  # the modules that it covers


class _Mixing(NamedTuple):
    """Attention, a short convolution or a recurrence of a layer, which mix tokens."""

    products: tuple[ProductPlan | None, ...]  # query, or all three, key, value, more, out
    given: Tensor
    out: Tensor
    order: HeadOrder
    turned: tuple[_Turned, _Turned]  # queries, keys
    rotary: CallPlan | None
    num_turned: int
    settings: tuple[float, float, nn.Module | None]  # scaling, softcap, sinks
    convolution: nn.Conv1d | None
    done: set[nn.Module]
    recurrence: RecurrencePlan | None = None
    heads: HeadsPlan | None = None
    latents: LatentsPlan | None = None
    norm: NormPlan | None = None  # of values
    keys_of: int | None = None


class _Caching:
    """Notes what an attention caches, in place of a cache."""

    def __init__(self) -> None:
        self.cached: tuple[Tensor, ...] = ()

    def update(self, *cached: Any, **_: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values as they are given."""
        self.cached = cached[:2]
        return cached[0], cached[1]


@torch.no_grad()
def read(model: Model) -> DecoderPlan:
    """Return the plan of a model.

    Raises:
        UnsupportedForwardError: no plan describes the model, or user code takes part.
    """
    watched = watch(model)
    view, text = watched.view, model.config.get_text_config(decoder=True)
    plan = _Reader(watched, attention_of(model)).plan()
    placeholders = [each for each in placeholders_of(model) if each < text.vocab_size]
    if placeholders:
        replaced = _replaced(view, plan.embedding.calls[0].module, placeholders)
        plan = plan._replace(embedding=plan.embedding._replace(replaced=replaced))
    # A job calls the embedding, too.
    called = {plan.embedding.norm, *plan.modules, *(call.module for call in plan.embedding.calls)}
    inside = [name for name, each in view.named_modules() if each in watched.hooked - called]
    require(not inside, f"its modules have hooks ({', '.join(inside)})")
    gives_states = all(isinstance(watched.calls[each][0].out, Tensor) for each in plan.modules)
    is_free = watched.hooked.isdisjoint(plan.modules)
    require(is_free or gives_states, "its layers have hooks, and give more than states")
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(plan.layers)
    _require_spans(model, kinds, plan.spans)
    originals = dict(zip(view.modules(), model.modules(), strict=True))
    of_model: DecoderPlan = _with_originals(plan._replace(kinds=tuple(kinds)), originals)
    return of_model


def _require_spans(
    model: Model, kinds: Sequence[str], spans: Sequence[AttentionSpan | None]
) -> None:
    """Refuse a model whose own masks show other tokens than the masks made for trees."""
    try:
        made = tree_layout(model).spans
    except UnsupportedModelError as error:
        raise UnsupportedForwardError(str(error)) from None
    require(len(kinds) == len(spans), "its config has kinds of other layers")
    is_one = len({*made.values()}) == 1
    for kind, span in zip(kinds, spans, strict=True):
        of_trees = next(iter(made.values())) if is_one else made.get(kind)
        require(span in (None, of_trees), f"its masks show {span}, its config says {of_trees}")


def _replaced(
    view: Model, embedding: nn.Module, placeholders: list[int]
) -> tuple[tuple[int, int], ...]:
    """Return the placeholders for which a model embeds other tokens, and these tokens."""
    given: list[Tensor] = []
    embedding.register_forward_pre_hook(
        lambda _, args, kwargs: given.extend([*args, *kwargs.values()][:1]), with_kwargs=True
    )
    with Attempt():  # without their images, some models raise an error
        view(
            input_ids=torch.tensor([placeholders], dtype=torch.int64, device="cpu"), use_cache=False
        )
    embedded = given[-1].flatten().tolist() if given else placeholders
    pairs = zip(placeholders, embedded, strict=False)
    return tuple(pair for pair in pairs if pair[0] != pair[1])


def _with_originals(value: Any, originals: dict[Any, Any]) -> Any:
    """Return a plan with the model's modules instead of those of a view."""
    if isinstance(value, nn.Module):
        return originals[value]
    if not isinstance(value, tuple):
        return value
    if id(value) not in originals:  # one object stays one
        parts = [_with_originals(each, originals) for each in value]
        originals[id(value)] = tuple(parts) if type(value) is tuple else type(value)(*parts)
    return originals[id(value)]


def products_of(plan: DecoderPlan) -> list[ProductPlan]:
    """Return the products of all layers."""
    return [each for layer in plan.layers for each in layer.products if each is not None]


def adapters_of(plan: DecoderPlan) -> Iterator[nn.Module]:
    """Yield the modules that may be an adapter of a linear layer."""
    for product in products_of(plan):
        if product.around is not product.module:
            yield product.around


class _Reader:
    """Finds the plan that explains the tensors between modules in one forward."""

    def __init__(self, watched: Watched, implementation: str | None) -> None:
        view, self._calls, self._input_ids, self._positions, self._attended, *_ = watched
        self._spans = watched.spans
        self._view, self._logits, self._implementation = view, watched.logits, implementation
        self._parents = {
            child: module for module in view.modules() for child in module._modules.values()
        }
        # Norms of the layer that are not explained yet.
        self._norms: list[tuple[nn.Module, Tensor, Tensor]] = []
        self._rotaries: dict[int, CallPlan] = {}
        self._last_recurrence: RecurrencePlan | None = None  # most layers have equal plans
        self._passed: dict[nn.Module, list[tuple[Tensor, Any]]] = {}
        self._number = 0  # of the layer that is being read
        self._keys: dict[int, int] = {}  # the layer that made keys, by their address
        self._given: dict[nn.Module, Tensor] = {}  # what layers get besides states
        # Linear layers inside of adapters.
        self._adapted: dict[nn.Module, tuple[nn.Linear, tuple[AdditionPlan, ...]]] = {}
        for module in view.modules():
            found = self._additions(module) if module._modules else None
            if found is not None:
                self._adapted[module] = found

    def plan(self) -> DecoderPlan:
        attended, logits = self._attended, self._logits
        require(bool(attended), "its attention is not transformers'")
        by_layer = {self._layer_of(each.module): each for each in attended}
        require(len(by_layer) == len(attended), "a layer attends several times")
        modules = self._layers_with(by_layer)
        states, _ = self._io(modules[0])
        embedding, inputs = self._embedding(states), self._inputs(modules, states)
        names = {module: name for name, module in self._view.named_modules()}
        layers = []
        for self._number, module in enumerate(modules):
            try:
                layer, states = self._layer(module, by_layer.get(module), states)
            except UnsupportedForwardError as error:
                raise UnsupportedForwardError(f"{names[module]}: {error}") from None
            layers.append(layer)
        head = self._view.get_output_embeddings()
        require(type(head) in _LINEARS and head in self._calls, "its head is not a linear layer")
        given, results = self._io(head)
        self._norms = self._norms_of(self._calls)
        transform = self._transform(states, given)
        norm = None if transform is not None else self._norm_between(states, given)
        is_whole = transform is not None or head.in_features == states.shape[-1]
        require(is_whole, "its head gets other states than its layers give")
        finish = _finish_of(results, logits, self._view)
        inner = max(max(layer.inner, layer.of_inputs) for layer in layers)
        spans = self._spans
        span_of = {
            self._layer_of(each.module): span for each, span in zip(attended, spans, strict=True)
        }
        reach = min(each.num_slots or math.inf for each in spans)
        between = max(
            sum(added.first.out_features for each in layer.products if each for added in each.added)
            for layer in layers
        )
        heads = [layer.heads for layer in layers if layer.heads is not None]
        of_head = max(max(each.size + each.more, each.size_of_value) for each in heads)
        num_heads = max(each.num for each in heads)
        of_heads = (len(layers), states.shape[-1], num_heads, of_head, head.out_features)
        taps = max(
            (each.convolution.kernel_size[0] for each in layers if each.convolution), default=0
        )
        experts = [layer.experts for layer in layers if layer.experts is not None]
        of_experts = (
            max((len(each.router.weight) for each in experts), default=0),
            max((each.num_chosen for each in experts), default=0),
            max((each.inner for each in experts), default=0),
        )
        factors = _factors_of(self._view)
        recurrences = [layer.recurrence for layer in layers if layer.recurrence is not None]
        of_recurrence = max((each.num_scratch(taps) for each in recurrences), default=0)
        latents = [layer.latents for layer in layers if layer.latents is not None]
        asked = (each.query.num_inputs for each in latents if each.query is not None)
        of_mixing = (
            max(layer.mixed for layer in layers),
            max(layer.queries for layer in layers),
            max(states.shape[-1], *asked, 0),
            max(layer.attended for layer in layers),
        )
        of_latents = max((each.num_scratch() for each in latents), default=0)
        of_scratch = taps, of_recurrence, of_latents
        of_layers = *of_heads, inner, between, *of_mixing, *of_scratch, *of_experts
        decoder = DecoderSizes(*of_layers, reach, factors, finish)
        plans = embedding, inputs, tuple(layers), norm, transform
        spans_seen = tuple(map(span_of.get, modules))
        return DecoderPlan(decoder, (), spans_seen, *plans, head, modules)

    def _transform(self, states: Tensor, given: Tensor) -> TransformPlan | None:
        """Return what is between the last states and those that the head gets, besides a norm."""
        for last, mine, out in [*self._norms]:
            if not torch.equal(out, given) or is_near(mine, states):
                continue
            linears: Any = [each for each in self._calls if type(each) in _LINEARS]
            for module in linears:
                if self._io(module)[1].shape != mine.shape:
                    continue
                got, results = self._io(module)
                activation = self._activation(results, 1.0, mine)
                if activation is not None:
                    first = self._norm_between(states, got)
                    return TransformPlan(first and first.module, module, activation, last)
        return None

    def _layer_of(self, module: nn.Module) -> nn.Module:
        """Return the layer, a module of a module list, that contains an attention."""
        layer: nn.Module = self._parents[module]
        while layer in self._parents and not isinstance(self._parents[layer], nn.ModuleList):
            layer = self._parents[layer]
        return layer

    def _layers_with(self, found: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
        """Return all layers of the module list that has the attending layers."""
        lists = {self._parents[layer] for layer in found if layer in self._parents}
        if len(lists) != 1:
            return (*found,)
        return tuple(each for each in lists.pop().children() if each in self._calls)

    def _embedding(self, states: Tensor) -> EmbeddingPlan:
        """Return the plan of the embedding."""
        made: list[tuple[CallPlan, Tensor]] = []
        for module, (call, *_) in self._calls.items():
            if isinstance(call.out, Tensor) and call.out.shape == states.shape:
                with Attempt():  # some modules take more than tokens and positions
                    made.append((self._call_of(module, call), call.out))
        for called, out in made:
            if words.TOKENS_GIVEN not in (*called.args, *called.kwargs.values()):
                continue
            ratio = float((states.double() / out.double()).nanmedian())
            sums: list[tuple[tuple[CallPlan, ...], float, Tensor]] = [
                *(((called,), scale, out * scale) for scale in (1.0, ratio, round(ratio, 6))),
                *(((called, other), 1.0, out + of_other) for other, of_other in made),
            ]
            for calls, scale, total in sums:
                if torch.equal(total, states):
                    return EmbeddingPlan(calls, scale, None)
                for norm, given, normed in self._norms_of(self._calls):
                    if torch.equal(given, total) and torch.equal(normed, states):
                        return EmbeddingPlan(calls, scale, norm)
        raise UnsupportedForwardError("its first layer does not get what an embedding gives")

    def _inputs(self, modules: Sequence[nn.Module], states: Tensor) -> InputsPlan | None:
        """Return the plan of what layers get besides states; None if it is not known."""
        given = []
        for module in modules:
            (call, *_), shape = self._calls[module], states.shape[:-1]
            tensors = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
            given.append([x for x in tensors if x.shape[:-1] == shape and x.is_floating_point()])
        if any(len(each) != 2 for each in given):  # states come first
            return None
        whole = torch.stack([each[1] for each in given], dim=2)
        products: list[tuple[Any, Tensor]] = [
            (module, out)
            for module in self._calls
            if type(module) in _LINEARS
            for mine, out in self._ios(module)
            if out.numel() == whole.numel() and torch.equal(mine, states)
        ]
        looked: list[tuple[CallPlan, Tensor]] = []
        for module, (call, *_) in self._calls.items():
            if isinstance(call.out, Tensor) and call.out.numel() == whole.numel():
                with Attempt():  # some modules take more than tokens
                    looked.append((self._call_of(module, call), call.out.view_as(whole)))
        norms = [each for each in self._norms_of(self._calls) if each[2].shape == whole.shape]
        for norm, mine, normed in norms:
            for product, made in products:
                for times in (1.0, states.shape[-1] ** -0.5):
                    if not torch.equal((made * times).view_as(mine), mine):
                        continue
                    for called, out in looked:
                        for scale in (1.0, 2.0**-0.5):
                            if torch.equal((normed + out) * scale, whole):
                                self._given = {
                                    x: y for x, (_, y) in zip(modules, given, strict=True)
                                }
                                return InputsPlan(called, product, times, norm, scale)
        return None

    def _call_of(self, module: nn.Module, call: Called) -> CallPlan:
        """Return a call as a plan has it, if it gives the same for other states."""
        plan = self._planned(module, call)
        given = (*plan.args, *plan.kwargs.values())
        is_of_tokens = words.TOKENS_GIVEN in given or words.POSITIONS_GIVEN in given
        require(is_of_tokens, "it looks at neither tokens nor positions")
        has_products = any(isinstance(each, _LINEARS) for each in module.modules())
        require(not has_products, "torch's products of several tokens depend on how many")
        tokens = {words.TOKENS_GIVEN: self._input_ids, words.POSITIONS_GIVEN: self._positions}
        args, kwargs = given_to(plan, {**tokens, words.STATES_GIVEN: None})
        require(torch.equal(module(*args, **kwargs), call.out), "it looks at more than tokens")
        return plan

    def _planned(self, module: nn.Module, call: Called) -> CallPlan:
        """Return a call with placeholders for its tensors."""

        def kept(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dtype == torch.int64:
                if value.shape == self._input_ids.shape and bool((value == 1).all()):
                    return None  # the mask, of a text without padding
                if torch.equal(value, self._input_ids):
                    return words.TOKENS_GIVEN
                if value.shape == (3, *self._positions.shape) and is_alike(value):
                    return words.AXES_GIVEN
                require(torch.equal(value, self._positions), "its positions have several axes")
                return words.POSITIONS_GIVEN
            return words.STATES_GIVEN if isinstance(value, Tensor) else value

        kwargs = {name: kept(value) for name, value in call.kwargs.items()}
        return CallPlan(module, tuple(map(kept, call.args)), kwargs)

    def _ios(self, module: nn.Module) -> list[tuple[Tensor, Any]]:
        """Return inputs and outputs of a module's calls; rows of tokens as of one text."""
        num = self._positions.shape[1]

        def of_text(value: Any) -> Any:
            is_flat = isinstance(value, Tensor) and value.dim() == 2 and len(value) == num
            return value[None] if is_flat else value

        if module not in self._passed:  # return the same tensors each time
            self._passed[module] = [
                (of_text(next(iter((*call.args, *call.kwargs.values())), None)), of_text(call.out))
                for call in self._calls.get(module, ())
            ]
        return self._passed[module]

    def _io(self, module: nn.Module) -> tuple[Tensor, Any]:
        """Return input and output of a module that was called once."""
        calls = self._ios(module)
        require(len(calls) == 1, f"{type(module).__name__} is called {len(calls)} times")
        return calls[0]

    def _norms_of(self, modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Tensor, Tensor]]:
        """Return the norms among modules, with input and output of each call."""
        return [(each, *io) for each in modules if _is_norm(each) for io in self._ios(each)]

    def _results(self, product: ProductPlan) -> Tensor:
        """Return the output of some columns of a linear layer, additions included."""
        out: Tensor = self._io(product.around)[1]
        return out[..., product.first : product.first + product.num]

    def _layer(
        self,
        layer: nn.Module,
        attended: Attended | None,
        states: Tensor,
    ) -> tuple[LayerPlan, Tensor]:
        """Return the plan of a layer, and its output states."""
        got, out = self._io(layer)
        require(torch.equal(got, states), "a layer does not get what the one before it gives")
        result = out[0] if isinstance(out, tuple) else out
        leaves = [*dict.fromkeys(self._leaves(layer))]
        self._norms = self._norms_of(leaves)
        if attended is not None:
            mixing = self._latent(layer, attended, leaves)
            mixing = mixing or self._attending(layer, attended, leaves)
        else:
            mixing = self._convolved(layer)
        before = self._norm_between(states, mixing.given)
        of_query, of_key = mixing.turned
        linears = [each for each in leaves if self._is_product(each) and each not in mixing.done]
        given = self._given.get(layer)
        gate, out_of_inputs, activation = None, None, None
        if given is not None:
            gate, out_of_inputs, activation = self._by_inputs(linears, given)
        mlp = self._mlp(layer, linears)
        require(activation in (None, mlp.activation), "its layers have two activations")
        names = "residual_multiplier", "residual_scale"
        factor = float(next((vars(layer)[each] for each in names if each in vars(layer)), 1.0))
        summed = result if gate is None else self._io(gate.around)[0]
        way = _Way(states, mixing.given, mixing.out, mlp.given, mlp.out, summed)
        (after, before_mlp, after_mlp, *last), is_parallel, total = self._residuals(way, factor)
        after_inputs = None
        if out_of_inputs is not None:
            require(is_near(summed, total) and factor == 1.0, _OTHER_SUM)
            after_inputs, added = self._after(self._results(out_of_inputs))
            total = summed + added
        scalar = _scalar_of(layer, total, result)
        before_mlp = before if mlp.given is mixing.given else before_mlp
        gated = [self._results(each) for each in (mlp.products[0], gate) if each is not None]
        done = {each.around for each in (gate, out_of_inputs) if each is not None}
        self._require_all_used(leaves, {*mixing.done, *linears, *mlp.done, *done}, gated)
        scaling, softcap, sinks = mixing.settings
        plan = LayerPlan(
            (
                *(before, after, before_mlp, after_mlp, of_query.norm, of_key.norm, *last),
                *(mixing.norm, after_inputs),
            ),
            (*mixing.products, *mlp.products, gate, out_of_inputs),
            mixing.order,
            mlp.activation,
            mixing.rotary,
            mixing.num_turned,
            of_query.turn,
            of_query.arrangement,
            of_query.is_scaled,
            *(scaling * of_query.scale, softcap, sinks, factor, is_parallel, mlp.experts),
            *(mixing.convolution, mixing.recurrence, mixing.heads, mixing.latents),
            *(mixing.keys_of, scalar),
        )
        return plan, result

    def _by_inputs(
        self, linears: list[nn.Module], given: Tensor
    ) -> tuple[ProductPlan, ProductPlan, int]:
        """Take the products around a layer's inputs besides states from a list of products.

        Also return the activation between them.
        """
        for gate, out in permutations(linears, 2):
            rows, inner = self._io(gate)[1], self._io(out)[0]
            if rows.shape == inner.shape == given.shape:
                activation = self._activation(rows, given, inner)
                if activation is not None:
                    for each in (gate, out):
                        linears.remove(each)
                    return self._product(gate), self._product(out), activation
        raise UnsupportedForwardError("its layers get more than states")

    def _attending(
        self,
        layer: nn.Module,
        attended: Attended,
        leaves: list[nn.Module],
    ) -> _Mixing:
        """Return the attention of a layer."""
        (_, num, _, size), (_, num_keys, _, of_value) = attended.query.shape, attended.value.shape
        keys_of = self._keys.setdefault(attended.key.data_ptr(), self._number)
        is_shared = keys_of < self._number
        sizes = num, 0 if is_shared else num_keys, size, size if is_shared else of_value
        mixing, out_linear, heads, gate = self._projections(attended, leaves, sizes)
        rotary, angles = self._rotary(layer)
        if is_shared:
            order, of_key, of_values, times = HeadOrder(1, (0, 0, 0)), _STRAIGHT, None, 1.0
            of_query = self._turned(heads, attended.query, angles)
        else:
            order, (of_query, of_key), of_values, times = self._ordered(
                attended, heads, angles, gate
            )
        num_turned = arranged(angles, of_query.arrangement)[0].shape[-1] if of_query.turn else 0
        return _Mixing(
            (*mixing, *[None] * (4 - len(mixing)), out_linear),
            self._io(mixing[0].around)[0],
            self._results(out_linear),
            order,
            (of_query, of_key),
            rotary if of_query.turn else None,
            num_turned,
            _settings_of(attended, self._implementation),
            None,
            {each.around for each in (*mixing, out_linear)},
            heads=HeadsPlan(num, num_keys, size, of_value, times=times),
            norm=of_values,
            keys_of=keys_of if is_shared else None,
        )

    def _latent(
        self, layer: nn.Module, attended: Attended, leaves: list[nn.Module]
    ) -> _Mixing | None:
        """Return attention to latents; None for another attention."""
        query, key, value = (
            each[0].transpose(0, 1) for each in (attended.query, attended.key, attended.value)
        )
        rows = {
            each: self._io(each)[1].reshape(len(value), -1)
            for each in attended.module.children()
            if self._is_product(each) and len(self._ios(each)) == 1
        }
        expand, straight = _expanding(rows, key, value)
        if expand is None:
            return None
        latent, turned = self._io(expand)[0].reshape(len(value), -1), key.shape[2] - straight
        rank, shared = latent.shape[1], key[:, :1, straight:]
        of_latent, mine, _ = self._take_norm(lambda _, out: torch.equal(out.flatten(0, -2), latent))
        mine = latent if of_latent is None else mine.flatten(0, -2)
        into = _making(rows, mine, rank + turned)
        asking = _making(rows, query[..., :straight], query[0].numel())
        out = self._taking(attended.out.flatten(2), leaves)
        is_known = torch.equal(key[..., straight:], shared.expand(*key.shape[:2], -1))
        is_known = is_known and len(into) == len(asking) == len(out) == 1
        require(is_known, "its latents and queries are not what projections give")
        given, (rotary, angles) = self._io(into[0])[0], self._rotary(layer)
        first, second, of_asked = self._asked(asking[0], given, rows)
        of_query, of_key = (
            self._turned(heads[..., -turned:].transpose(0, 1)[None], to, angles)
            for heads, to in (
                (rows[asking[0]].view_as(query), attended.query[..., straight:]),
                (rows[into[0]][:, None], attended.key[:, :1, :, straight:]),
            )
        )
        is_same = of_key[1:] == of_query[1:] == (of_query.turn, of_query.arrangement, 1.0, False)
        require(is_same and of_query.turn > 0, "queries and keys are turned in different ways")
        self._require_cached(attended.module, latent, shared[:, 0])
        apart = {expand, asking[0]} - {first}
        require({*map(type, apart)} <= {*_LINEARS}, "its latents have adapters")
        made = self._product(out[0])
        return _Mixing(
            (self._product(first), self._product(into[0]), None, None, made),
            given,
            self._results(made),
            HeadOrder(1, (0, 0, 0)),
            (of_query._replace(norm=of_asked), of_key._replace(norm=of_latent)),
            rotary,
            turned,
            _settings_of(attended, self._implementation),
            None,
            {first, into[0], *apart, out[0]},
            heads=HeadsPlan(value.shape[1], 1, rank, rank, turned),
            latents=LatentsPlan(second, self._product(expand), straight, turned, value.shape[2]),
        )

    def _asked(
        self, asking: nn.Module, given: Tensor, rows: Mapping[nn.Module, Tensor]
    ) -> tuple[nn.Module, ProductPlan | None, NormPlan | None]:
        """Return the product that gets a layer's states, the one that makes queries of its result.

        The second is None if the first makes queries; and the norm between both.
        """
        taken = self._io(asking)[0]
        if taken is given:
            return asking, None, None
        norm, mine, _ = self._take_norm(lambda _, out: out is taken)
        found = [each for each in rows if self._io(each)[1] is (taken if norm is None else mine)]
        is_known = len(found) == 1 and self._io(found[0])[0] is given
        require(is_known, "its queries are of other states than its latents")
        return found[0], self._product(asking), norm

    def _require_cached(self, module: Any, *cached: Tensor) -> None:
        """Refuse an attention that does not cache these rows of tokens."""
        (call, *_), caching = self._calls[module], _Caching()
        with Attempt():  # some cache more
            module(*call.args, **{**call.kwargs, CACHE: caching})
        pairs = zip(caching.cached, cached, strict=False)
        is_cached = [torch.equal(each.reshape(rows.shape), rows) for each, rows in pairs]
        require(is_cached == [True] * len(cached), "its cache has something else than latents")

    def _convolved(self, layer: nn.Module) -> _Mixing:
        """Return the short convolution of a layer, between two gates.

        One linear layer gives three numbers for each channel: the product of two is the input of
        the convolution, and the third multiplies its result.
        """
        found = [each for each in layer.modules() if type(each) is nn.Conv1d]
        require(len(found) == 1, "it attends to nothing, and is no short convolution")
        (convolution,) = found
        inside = {*self._parents[convolution].modules()}
        called = [each for each in self._calls if each in inside and self._is_product(each)]
        channels = convolution.out_channels
        reason = "its convolution is not one between two gates"
        require(convolution.groups == channels and len(called) > 1, reason)
        if len(called) > 2 or self._parents[convolution]._parameters:
            return self._recurrent(convolution, called)
        into, out = map(self._product, called)
        given, rows = self._io(into.around)
        is_one = rows.shape[-1] == 3 * channels == 3 * out.num == 3 * given.shape[-1]
        require(is_one, reason)
        parts = rows.chunk(3, dim=-1)
        taken = self._io(out.around)[0]
        # The convolution of a single token without a bias is one more factor.
        is_factor = convolution.kernel_size == (1,) and convolution.bias is None
        errors = {}
        for which in range(1 if is_factor else 3):
            first, second = (parts[each] for each in range(3) if each != which)
            made = convolved(convolution, (first * second)[0])
            errors[which] = difference(parts[which] * made, taken)
        last = only(errors, tolerance(taken))
        if last is None:
            raise UnsupportedForwardError(reason)
        order = HeadOrder(1, (last, *(each for each in range(3) if each != last)))
        products = into, None, None, None, out
        done = {into.around, out.around, convolution}
        turned, settings = (_STRAIGHT, _STRAIGHT), (1.0, 0.0, None)
        made = self._results(out)
        return _Mixing(products, given, made, order, turned, None, 0, settings, convolution, done)

    def _recurrent(self, convolution: nn.Conv1d, called: list[nn.Module]) -> _Mixing:
        """Return the recurrence of a layer: products, a convolution, a state, a gated norm."""
        module: Any = self._parents[convolution]
        *mixing, out = map(self._product, called)
        given = self._io(mixing[0].around)[0]
        is_same = all(self._io(each.around)[0] is given for each in mixing) and len(mixing) <= 4
        require(is_same, "its recurrence has products of different states")
        rows = torch.cat([*map(self._results, mixing)], dim=-1)[0]
        norms = [each for each in self._norms if self._parents[each[0]] is module]
        require(len(norms) == 1, "its recurrence has no norm")
        norm, mine, normed = norms[0]
        weight: Any = norm.weight
        gate, *others = [*self._calls[norm][0].args, None][1:]
        taken = self._io(out.around)[0]
        is_known = isinstance(gate, Tensor) and others == [None]
        is_known = is_known and torch.equal(normed.flatten(), taken.flatten())
        require(is_known, "its recurrence has another norm")
        watched = GatedNorm(weight, _eps_of(norm), mine, gate, normed)
        plan = read_recurrence(module, convolution, rows, watched, self._last_recurrence)
        self._last_recurrence = plan
        flags = words.IS_NORM
        of_norm = NormPlan(norm, flags, watched.eps)
        self._norms.remove(norms[0])
        return _Mixing(
            (*mixing, *[None] * (4 - len(mixing)), out),
            given,
            self._results(out),
            HeadOrder(1, (0, 0, 0)),
            (_STRAIGHT._replace(norm=of_norm), _STRAIGHT),
            *(None, 0, (1.0, 0.0, None), convolution),
            {*(each.around for each in (*mixing, out)), convolution},
            plan,
        )

    def _residuals(self, way: "_Way", factor: float) -> tuple[list[NormPlan | None], bool, Tensor]:
        """Return norms after attention, around the MLP and of sums; if it is parallel; the sum.

        A layer is parallel if attention and MLP both get the layer's input states.
        """

        def times(added: Tensor) -> Tensor:
            return added if factor == 1.0 else added * factor

        # Some norm the states themselves, with what attention, and the MLP, have added to them.
        of_mlp, summed, _ = self._take_norm(lambda _, out: torch.equal(out, way.result))
        after, added = self._after(way.attention_out)
        between, given = way.states + times(added), way.mlp_given
        of_attention = None if of_mlp is None else self._norm_between(between, given)
        between = between if of_attention is None else given
        is_parallel = given is way.given or any(
            mine is way.states and each is given for _, mine, each in self._norms
        )
        before_mlp = None
        if given is not way.given:
            before_mlp = self._norm_between(way.states if is_parallel else between, given)
        after_mlp, added = self._after(way.mlp_out)
        total = between + times(added)
        if of_mlp is not None:
            require(is_near(summed, total), _OTHER_SUM)
            total = way.result
        return [after, before_mlp, after_mlp, of_attention, of_mlp], is_parallel, total

    def _require_all_used(
        self, leaves: list[nn.Module], done: set[nn.Module], gated: list[Tensor]
    ) -> None:
        """Refuse a layer with modules that the plan does not cover."""
        rest = [
            each
            for each in leaves
            if each not in done and not isinstance(each, _NOTHING) and not _is_norm(each)
            # Activations belong to the MLP, or to inputs besides states.
            if each._parameters or not any(torch.equal(self._io(each)[0], x) for x in gated)
        ]
        rest += [module for module, _, _ in self._norms]
        require(not rest, f"{[type(each).__name__ for each in rest]} take part in a layer")

    def _projections(
        self, attended: Attended, leaves: list[nn.Module], sizes: tuple[int, int, int, int]
    ) -> tuple[list[ProductPlan], ProductPlan, Tensor, tuple[int, int]]:
        """Return the linear layers before attention and the one behind it.

        Also the output of the first ones, as heads [1, num, num_tokens, head_size], and the heads
        that gate the result: `HeadOrder.query_step` and `HeadOrder.gate`.
        """
        num_heads, num_key_heads, head_size, of_value = sizes
        children = dict(attended.module.named_children())
        num = num_heads + 2 * num_key_heads
        # Values may be made of keys before their norm; a layer without keys reads another layer's.
        least = 2 if num_key_heads else 1
        named = next((names for names in _MIXING if {*names[:least]} <= children.keys()), None)
        if named is not None:
            names = named if num_key_heads else named[:1]
            found = [children[each if each in children else named[1]] for each in names]
            mixing = [*map(self._product, found)]
        else:
            products = map(self._product, filter(self._is_product, children.values()))
            mixing = [each for each in products if each.num == num * head_size]
            require(len(mixing) == 1, "its attention has no projections of known names")
        given = self._io(mixing[0].around)[0]
        attended_rows, gate = attended.out.flatten(2), (1, -1)
        outs = self._taking(attended_rows, leaves)
        if not outs:  # a gate may be between
            made = {each.around for each in mixing}
            mixing += [
                self._product(each)
                for each in children.values()
                if self._is_product(each) and each not in made and self._io(each)[0] is given
            ]
        rows = torch.cat([*map(self._results, mixing)], dim=-1)
        is_same = all(self._io(each.around)[0] is given for each in mixing)
        if (missing := head_size - of_value) > 0:  # each head of values gets zeros behind it
            *others, values = map(self._results, mixing)
            is_apart = bool(outs) and values.shape[-1] == num_key_heads * of_value
            require(is_apart, "values of smaller heads come not from a projection of their own")
            values = values.view(*values.shape[:2], num_key_heads, of_value)
            rows = torch.cat([*others, functional.pad(values, (0, missing)).flatten(2)], dim=-1)
        is_same = is_same and rows.shape[-1] == (num + num_heads * (not outs)) * head_size
        require(is_same, "its projections are of different states, or of other sizes")
        heads = rows.view(*rows.shape[:2], -1, head_size).transpose(1, 2)
        for step, first in () if outs else ((2, 1), (1, num)):
            gates = heads[:, first : first + step * num_heads : step].transpose(1, 2).flatten(2)
            if gates.shape == attended_rows.shape:
                outs, gate = self._taking(attended_rows * gates.sigmoid(), leaves), (step, first)
            if outs:
                break
        require(len(outs) == 1, "something is between attention and its projection")
        return mixing, self._product(outs[0]), heads, gate

    def _taking(self, rows: Tensor, leaves: list[nn.Module]) -> list[nn.Module]:
        """Return the products that get some rows."""
        return [
            each
            for each in leaves
            if self._is_product(each)
            and any(torch.equal(mine, rows) for mine, _ in self._ios(each))
        ]

    def _ordered(
        self,
        attended: Attended,
        heads: Tensor,
        angles: tuple[Tensor, ...],
        gate: tuple[int, int],
    ) -> tuple[HeadOrder, tuple[_Turned, _Turned], NormPlan | None, float]:
        """Return the order of heads, the operations on queries and keys, and those on values."""
        wanted, of_value = (attended.query, attended.key, attended.value), attended.value.shape[3]
        factors = [1.0, *(each for each in vars(attended.module).values() if type(each) is float)]
        norms, reason = self._norms, "values are not what their projection gives"
        num, num_keys = (each.shape[1] for each in wanted[:2])
        orders: Iterable[HeadOrder] = _orders(num, num_keys)
        if gate[0] > 1:
            orders = [HeadOrder(1, (0, 2 * num, 2 * num + num_keys))]
        for order in (each._replace(query_step=gate[0], gate=gate[1]) for each in orders):
            query, key, value = (
                heads[:, order.heads(kind, each.shape[1], num + 2 * num_keys)]
                for kind, each in enumerate(wanted)
            )
            value = value[..., :of_value]
            times = next((x for x in factors if torch.equal(value * x, attended.value)), None)
            self._norms = [*norms]
            rows = (each.transpose(1, 2).flatten() for each in (value, attended.value))
            of_values, *_ = self._take_norm(partial(_is_between, *rows))
            if times is None and of_values is None:
                continue
            try:
                of_query = self._turned(query, attended.query, angles)
                of_key = self._turned(key, attended.key, angles)
                is_same = of_key[1:] == (of_query.turn, of_query.arrangement, 1.0, False)
                require(is_same, "queries and keys are turned in different ways")
                is_whole = any(
                    each.norm and each.norm.flags & words.IS_WHOLE for each in (of_query, of_key)
                )
                is_apart = order.num_groups > 1 or order.query_step > 1
                require(not is_apart or not is_whole, "a norm is of several groups")
                return order, (of_query, of_key), of_values, 1.0 if times is None else times
            except UnsupportedForwardError as error:
                reason = str(error)
        raise UnsupportedForwardError(reason)

    def _leaves(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield called modules that call no others; a layer with adapters counts as one."""
        if module in self._adapted or not module._modules:
            if module in self._calls:
                yield module
            return
        for child in module.children():
            yield from self._leaves(child)

    def _is_product(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear | Conv1D) or module in self._adapted

    def _product(self, module: Any, first: int = 0, num: int | None = None) -> ProductPlan:
        """Return the plan of some columns of a linear layer, by default all."""
        linear, added = self._adapted.get(module, (module, ()))
        name = type(module).__name__
        require(type(linear) in PRODUCTS, f"{name} is not a plain linear layer")
        return ProductPlan(linear, first, num or size_of(linear)[0], module, added)

    def _additions(self, module: nn.Module) -> tuple[nn.Linear, tuple[AdditionPlan, ...]] | None:
        """Return the linear layer in a module, and its additions; None for other modules."""
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
            mine.shape != given.shape or not torch.equal(mine, given)
            for mine, _ in map(self._io, (*linears, *firsts))
        ):
            return None
        times = _factors(module, linears[0], seconds, given)
        if times is None:
            return None
        for second, number in zip(seconds, times, strict=True):
            total = total + self._io(second)[1] * number
        is_sum = is_near(total, result) if seconds else torch.equal(total, result)
        if not is_sum:
            return None
        added = zip(firsts, seconds, times, strict=True)
        return linears[0], tuple(AdditionPlan(*each) for each in added)

    def _take_norm(
        self, fits: Callable[[Tensor, Tensor], bool]
    ) -> tuple[NormPlan | None, Any, Any]:
        """Return the norm whose input and output fit, with both; all None if none fits."""
        for index, (module, mine, out) in enumerate(self._norms):
            if fits(mine, out):
                del self._norms[index]
                return _norm_of(module, mine, out), mine, out
        return None, None, None

    def _norm_between(self, given: Tensor, normed: Tensor) -> NormPlan | None:
        """Return the norm that made a result of states; None if the result is the states."""
        if normed is given:
            return None
        norm, *_ = self._take_norm(
            lambda mine, out: torch.equal(out, normed) and is_near(mine, given)
        )
        is_known = norm is not None or torch.equal(normed, given)
        require(is_known, "states change on their way in another way than by a norm")
        return norm

    def _after(self, given: Tensor) -> tuple[NormPlan | None, Tensor]:
        """Return the norm of attention's or the MLP's result, if any, and the normed result."""
        norm, _, out = self._take_norm(lambda mine, _: torch.equal(mine, given))
        return norm, given if norm is None else out

    def _rotary(self, layer: nn.Module) -> tuple[CallPlan | None, tuple[Tensor, ...]]:
        """Return the module that made a layer's angles, and its cosines and sines."""
        call = self._calls[layer][0]
        pairs = [
            _first_of(each)
            for each in (*call.args, *call.kwargs.values())
            if _first_of(each) is not None
        ]
        for module, calls in self._calls.items():
            for made in calls:
                first = _first_of(made.out)
                if first is not None and any(_is_same(first, each) for each in pairs):
                    if id(made) not in self._rotaries:  # one for all layers that use it
                        self._rotaries[id(made)] = self._rotary_of(module, made)
                    return self._rotaries[id(made)], _parts_of(made.out)
        return None, ()

    def _rotary_of(self, module: nn.Module, made: Called) -> CallPlan:
        plan = self._planned(module, made)
        given = [*plan.args, *plan.kwargs.values()]
        num = given.count(words.POSITIONS_GIVEN) + given.count(words.AXES_GIVEN)
        is_of_positions = num == 1 and words.TOKENS_GIVEN not in given
        require(is_of_positions, "its angles are not of positions")
        return plan

    def _turned(self, heads: Tensor, turned: Tensor, angles: tuple[Tensor, ...]) -> _Turned:
        """Return the operations on heads [1, num, num_tokens, head_size] of queries or keys."""
        size, flat = heads.shape[-1], heads.transpose(1, 2).flatten()
        norm, mine, out = self._take_norm(
            lambda mine, _: any(
                torch.equal(mine.flatten(), each) for each in (flat, heads.flatten())
            )
        )
        if norm is not None:
            is_by_token = torch.equal(mine.flatten(), flat)
            if mine.shape[-1] != size:
                norm = norm._replace(flags=norm.flags | words.IS_WHOLE)
            shape = (1, heads.shape[2], -1, size)
            heads = out.reshape(shape).transpose(1, 2) if is_by_token else out
        else:
            norm, mine, _ = self._take_norm(lambda _, out: torch.equal(out, turned))
            if norm is not None:
                norm, turned = norm._replace(flags=norm.flags | words.AFTER_TURN), mine
        for scale in (1.0, size**-0.5):
            if torch.equal(heads * scale, turned):
                return _Turned(norm, 0, 0, scale, False)
        is_by_angles = len(angles) == 2 and angles[0].dim() == 3
        require(is_by_angles, "queries change in another way than by angles")
        find_factors = _factors_of(self._view)
        for factors in (None, find_factors and find_factors(self._positions)):
            by = heads.new_ones(1) if factors is None else factors[:, None, :, None]
            errors = {
                (how, arrangement): difference(
                    _turned_by(heads, arranged(angles, arrangement), how) * by.to(heads.dtype),
                    turned,
                )
                for how in (words.HALVES, words.NEIGHBOURS, words.HALVES | words.SORTS)
                for arrangement in _ARRANGEMENTS
            }
            found = only(errors, tolerance(turned))
            if found is not None:
                return _Turned(norm, *found, 1.0, factors is not None)
        raise UnsupportedForwardError("queries change in another way than by angles")

    def _mlp(self, layer: nn.Module, linears: list[nn.Module]) -> _Mlp:
        """Return the MLP of a layer, or its experts and the shared expert."""
        module = experts_in(layer, self._calls)
        if module is None:
            gate, up, down, activation = self._dense(layer, linears)
            given, out = self._io(gate.around)[0], self._results(down)
            return _Mlp(given, out, (gate, up, down), activation, None, set())
        block, router = self._parents[module], router_of(module, self._calls)
        inside = {*module.modules(), *router.modules()}
        shared = [each for each in linears if each not in inside]
        gates: list[Any] = [each for each in shared if getattr(each, "out_features", 0) == 1]
        experts = read_experts(block, module, router, gates, self._calls)
        given, out = self._io(block)[0], self._io(module)[1]
        products: Any = (None, None, None)
        activation, beside = words.SILU, [module, router, *gates]
        if shared:
            *products, activation = self._dense(
                layer, [each for each in shared if each not in gates]
            )
            beside += [products[0].around]
            more = self._results(products[2]).flatten(0, -2)
            for gate in gates:
                more = self._io(gate)[1].sigmoid().view(-1, 1) * more
            out = out + more
        rows = given.flatten(0, -2)
        is_same = all(torch.equal(self._io(each)[0].flatten(0, -2), rows) for each in beside)
        require(is_same, "experts, their router and what is shared get different states")
        return _Mlp(given, out.view_as(given), (*products,), activation, experts, inside)

    def _activation(self, given: Tensor, times: Any, result: Tensor) -> int | None:
        """Return the activation that turns numbers into a result, times others, or None."""
        ways = ACTIVATIONS.items()
        errors = {which: difference(make(given) * times, result) for which, make in ways}
        return only(errors, tolerance(result))

    def _dense(
        self, layer: nn.Module, linears: list[nn.Module]
    ) -> tuple[ProductPlan, ProductPlan | None, ProductPlan, int]:
        """Return gate, up and down, and the activation; without a gate, up counts as the gate."""
        up: ProductPlan | None = None
        linears.sort(key=[*self._calls].index)
        if len(linears) == 3:
            gate, up, down = map(self._product, linears)
            is_same = torch.equal(self._io(gate.around)[0], self._io(up.around)[0])
            require(is_same, "gate and up get different states")
            # Only the result shows which of the two is activated.
            inner = self._io(down.around)[0]
            if self._activation(self._results(gate), self._results(up), inner) is None:
                gate, up = up, gate
        else:
            require(len(linears) == 2, f"a layer has {len(linears)} linear layers for its MLP")
            gate, down = map(self._product, linears)
            if gate.num == 2 * down.num_inputs:  # one layer has gate and up
                gate, up = (
                    self._product(gate.around, first, down.num_inputs)
                    for first in (0, down.num_inputs)
                )
        gated, upped = self._results(gate), 1.0 if up is None else self._results(up)
        activation = self._activation(gated, upped, self._io(down.around)[0])
        if activation is None:
            raise UnsupportedForwardError("its MLP has another activation")
        return gate, up, down, activation


def _scalar_of(layer: nn.Module, total: Tensor, result: Tensor) -> str | None:
    """Return the name of the buffer by which a layer multiplies its result; None for none."""
    errors: dict[str | None, float] = {None: difference(total, result)}
    for name, each in layer._buffers.items():
        if each is not None and each.numel() == 1 and each.dtype is result.dtype:
            errors[name] = difference(total * each.to(total), result)
    require(min(errors.values()) <= tolerance(result), _OTHER_SUM)
    return only(errors, tolerance(result))


def _settings_of(
    attended: Attended, implementation: str | None
) -> tuple[float, float, nn.Module | None]:
    """Return scaling and softcap of attention, and the module with its sinks, if any."""
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
    # Attributes of the module hold for arguments that are not passed.
    is_causal = settings.get("is_causal", getattr(attended.module, "is_causal", True))
    require(is_causal is True, "its tokens see those behind them")
    require(not unknown, f"its attention gets {unknown}")
    sinks = settings.get("s_aux")
    is_own = sinks is None or attended.module._parameters.get("sinks") is sinks
    require(is_own, "sinks are no parameter of its attention")
    scaling = settings.get("scaling", attended.query.shape[3] ** -0.5)
    softcap = float(settings.get("softcap", 0.0))
    return float(scaling), softcap, None if sinks is None else attended.module


def _factors(
    module: nn.Module, linear: nn.Linear, seconds: list[nn.Linear], given: Tensor
) -> list[float] | None:
    """Return the factor by which an adapter multiplies its low-rank results; None if there is none.

    It is found by made-up results, as a new adapter has weights of zero.
    """
    if not seconds:
        return []
    angles = torch.arange(linear.out_features, dtype=torch.float64, device="cpu")
    put = {each: (angles * (index + 1.3)).sin() for index, each in enumerate((linear, *seconds))}
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


def _is_ignored(attended: Attended, name: str) -> bool:
    """Return whether transformers' `sdpa`, as it is installed, ignores a setting."""
    large = (attended.module, 100 * attended.query, attended.key, attended.value, None)
    setting = {name: attended.kwargs[name]}
    return torch.equal(SDPA(*large, **setting)[0], SDPA(*large)[0])


def _is_norm(module: nn.Module) -> bool:
    return not module._modules and "norm" in type(module).__name__.lower()


def _turned_by(heads: Tensor, angles: Sequence[Tensor], how: int) -> Tensor:
    """Return heads [1, num_heads, num_tokens, head_dim] turned by angles [1, num_tokens, …]."""
    cos, sin = (each[:, None] for each in angles)
    size = cos.shape[-1]
    if size > heads.shape[-1]:
        return torch.full_like(heads, math.inf)
    turning, rest = heads[..., :size], heads[..., size:]
    if how & words.SORTS:
        turning = torch.cat((turning[..., ::2], turning[..., 1::2]), dim=-1)
    if how & words.HALVES:
        across = torch.cat((-turning[..., size // 2 :], turning[..., : size // 2]), dim=-1)
    else:
        across = torch.stack((-turning[..., 1::2], turning[..., ::2]), dim=-1).flatten(-2)
    return torch.cat((turning * cos + across * sin, rest), dim=-1)


def _first_of(angles: Any) -> Any:
    """Return the first tensor of what may be a layer's angles: a pair, or complex; else None."""
    is_complex = isinstance(angles, Tensor) and angles.is_complex()
    is_pair = isinstance(angles, tuple) and len(angles) == 2
    return angles if is_complex else angles[0] if is_pair else None


def _is_between(given: Tensor, wanted: Tensor, mine: Tensor, out: Tensor) -> bool:
    """Return whether a norm has made some numbers of others."""
    return torch.equal(mine.flatten(), given) and torch.equal(out.flatten(), wanted)


def _is_same(mine: Any, other: Any) -> bool:
    """Return whether two tensors are views of the same memory."""
    are_tensors = isinstance(mine, Tensor) and isinstance(other, Tensor)
    return are_tensors and mine.data_ptr() == other.data_ptr() and mine.shape == other.shape


def _parts_of(angles: Sequence[Tensor] | Tensor) -> tuple[Tensor, ...]:
    return (angles.real, angles.imag) if isinstance(angles, Tensor) else tuple(angles)


def _expanding(
    rows: Mapping[nn.Module, Tensor], key: Tensor, value: Tensor
) -> tuple[nn.Module | None, int]:
    """Return the product that makes values and the first numbers of keys, head by head.

    Args:
        rows: results of products, [num_tokens, …].
        key, value: [num_tokens, num_heads, …].

    Returns:
        The product, or None; and how many numbers of a head's key it makes.
    """
    for module, made in rows.items():
        straight = made.shape[1] // value.shape[1] - value.shape[2]
        if 0 < straight < key.shape[2]:
            parts = torch.cat((key[..., :straight], value), dim=2)
            if torch.equal(parts.flatten(1), made):
                return module, straight
    return None, 0


def _making(rows: Mapping[nn.Module, Tensor], first: Tensor, num: int) -> list[nn.Module]:
    """Return the products that make `num` numbers of a token, of each head these first ones."""
    return [
        each
        for each, made in rows.items()
        if made.shape[1] == num
        and torch.equal(made.view(*first.shape[:-1], -1)[..., : first.shape[-1]], first)
    ]


def arranged(angles: Sequence[Tensor] | Tensor, how: int) -> list[Tensor]:
    """Return cosines and sines, one for each rotated number of a head."""
    cos, sin = _parts_of(angles)[:: -1 if how & _SINES_FIRST else 1]
    found = [cos, -sin if how & _BACK else sin]
    if how & _HALVED:
        found = [each[..., : each.shape[-1] // 2] for each in found]
    if how & _TWICE:
        found = [torch.cat((each, each), dim=-1) for each in found]
    return [each.repeat_interleave(2, dim=-1) if how & _SHARED else each for each in found]


def is_alike(positions: Tensor) -> bool:
    """Return whether all axes of positions count the same."""
    return bool((positions == positions[:1]).all())


def given_to(
    plan: CallPlan, tensors: Mapping[Any, Tensor | None]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call, with tensors instead of placeholders."""

    def put(value: Any) -> Any:
        return next((each for name, each in tensors.items() if name is value), value)

    return [*map(put, plan.args)], {name: put(value) for name, value in plan.kwargs.items()}


def _orders(num_heads: int, num_key_heads: int) -> Iterator[HeadOrder]:
    """Yield possible orders of query, key and value heads; first one kind after another."""
    for num_groups in range(1, num_key_heads + 1):
        if num_heads % num_groups == num_key_heads % num_groups == 0:
            nums = [each // num_groups for each in (num_heads, num_key_heads, num_key_heads)]
            for kinds in permutations(range(3)):
                before = [kinds[: kinds.index(kind)] for kind in range(3)]
                firsts = (sum(nums[each] for each in kinds) for kinds in before)
                yield HeadOrder(num_groups, tuple(firsts))


def _eps_of(module: nn.Module) -> Any:
    names = ("variance_epsilon", "eps", "epsilon")
    return next((getattr(module, each) for each in names if hasattr(module, each)), 1e-5)


def _norm_of(module: nn.Module, given: Tensor, out: Tensor) -> NormPlan:
    """Return the kind of norm that a module is, by its output."""
    name, eps = type(module).__name__, _eps_of(module)
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if {*module._parameters} - {"weight", "bias"} or not isinstance(eps, float):
        raise UnsupportedForwardError(f"{name} has other parameters than norms have")
    sizes = {each.numel() for each in (weight, bias) if each is not None}
    require(sizes <= {given.shape[-1]}, f"{name} has weights for each head")
    # Small states show what is added to their squares.
    small = given * (_FEW / float(given.square().mean())) ** 0.5
    given, out = torch.cat((given, small)), torch.cat((out, module(small)))
    errors = {}
    for flags in (0, words.CENTERS, words.ADDS_ONE, words.CENTERS | words.ADDS_ONE):
        if flags & words.ADDS_ONE and weight is None:
            continue
        wide = given
        if flags & words.CENTERS:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if weight is not None:
            wide = wide * (weight + (1.0 if flags & words.ADDS_ONE else 0.0))
        if bias is not None:
            wide = wide + bias
        errors[flags] = difference(wide, out)
    found = only(errors, tolerance(out))
    if found is None:
        raise UnsupportedForwardError(f"{name} is no norm that is known")
    return NormPlan(module, found | words.IS_NORM, eps)


def _factors_of(view: Model) -> Callable[[Tensor], Tensor] | None:
    """Return the function from positions to factors of queries, if the config asks for one."""
    settings = getattr(view.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    times, step = (
        settings.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings")
    )
    if not times or not step:
        return None
    return lambda positions: 1 + times * torch.log(1 + torch.floor(positions / step))


def _finish_of(results: Tensor, logits: Tensor, view: Model) -> Callable[[Tensor], Tensor]:
    """Return the function from the head's results to logits."""
    if torch.equal(results, logits):
        return lambda each: each
    text = view.config.get_text_config(decoder=True)
    for name, finish in _FINISHES.items():
        setting = getattr(text, name, None)
        if setting and torch.equal(finish(results, setting), logits):
            return lambda each: finish(each, setting)
    raise UnsupportedForwardError("its logits are not what its head gives")
