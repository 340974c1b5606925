"""Read from a model how its decoder computes, so that one compiled job can do the same.

No architecture is known by name. A short forward is traced: between its products, attention and
experts, the operators that ran become programs of a token's row (`programs.py`). What is no such
program, or does not fit into a layer of a job, raises `UnsupportedForwardError`.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lade.compat import CACHE, Model, attention_of, placeholders_of
from lade.compat.attempts import Attempt
from lade.errors import UnsupportedModelError
from lade.forward import words
from lade.forward.comparing import UnsupportedForwardError, convolved, is_near, require
from lade.forward.experts import StacksPlan, experts_in, read_experts
from lade.forward.packed import PackedLinear
from lade.forward.programs import Columns, TokenRows, Writer, slice_of
from lade.forward.recurrence import RecurrencePlan, read_recurrence
from lade.forward.trace import Value
from lade.forward.watching import (
    PRODUCTS,
    SDPA,
    Attended,
    Called,
    Watched,
    size_of,
    tensors_of,
    watch,
)
from lade.targets.layout import tree_layout
from lade.targets.masks import AttentionSpan

# Arguments of attention that a plan contains, or that do not change the result.
_HONOURED = {
    *("dropout", "scaling", "softcap", "s_aux", "sliding_window", "is_causal", "position_ids"),
    *("use_cache", "output_attentions", "output_hidden_states", "cache_position", "return_dict"),
    "logits_to_keep",
}
_LINEARS = (nn.Linear, PackedLinear)
_NOTHING = (nn.Dropout, nn.Identity)  # these change nothing when a text is generated
# What becomes of columns to which others are added.
_ADDED = re.compile(r"\((.+) \+ \(a(\d+)\[i\] \* F\(([-+.e\d]+)\)\)\)")


class AdditionPlan(NamedTuple):
    """A low-rank addition to a linear layer: the product of two others, times a factor."""

    first: nn.Linear  # from inputs to the rank
    second: nn.Linear
    times: float


class ProductPlan(NamedTuple):
    """Some columns of a linear layer, with their low-rank additions."""

    module: nn.Module
    first: int
    num: int
    num_inputs: int
    around: nn.Module  # the module that returns the sum; the layer itself without additions
    added: tuple[AdditionPlan, ...] = ()


class CallPlan(NamedTuple):
    """A module and the arguments of its call, with placeholders for tensors."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Place(NamedTuple):
    """Where a token's numbers lie that a program reads or writes."""

    word: int  # of the job: the address of all tokens' rows
    first: int = 0  # number in a token's row
    step: int = 0  # numbers from one token's row to the next; 0 if these are all of a row
    made: CallPlan | None = None  # what gives them; then `first` counts its results


class Constant(NamedTuple):
    """Numbers that all tokens share."""

    module: nn.Module
    name: str


class RowsPlan(NamedTuple):
    """A program of a token's row, and where its numbers lie."""

    text: str
    tables: tuple[tuple[int, ...], ...]
    num_scratch: int
    places: tuple[tuple[Place, int], ...]  # of inputs and results, with their sizes
    num_inputs: int
    constants: tuple[Constant, ...]
    sizes: tuple[int, ...]  # of these

    @property
    def is_copy(self) -> bool:
        """Whether the result is the only input."""
        is_one = self.num_inputs == 1 and len({size for _, size in self.places}) == 1
        return is_one and "        o0[i0] = a0[i0]\n    return" in self.text


class ColumnsPlan(NamedTuple):
    """What becomes of columns of products one by one."""

    text: str
    num_inputs: int
    constants: tuple[tuple[Constant, int, int], ...]  # with the first number, and the step


class RowsStep(NamedTuple):
    """A phase of a job: programs of rows."""

    before: RowsPlan | None  # what the next phase gets
    at_end: RowsPlan | None = None  # before that; of a layer's first phase, it is the last layer's
    tokens: int = words.EVERY_TOKEN


class ProductsPlan(NamedTuple):
    """A phase of a job: products of the same numbers."""

    products: tuple[ProductPlan, ...]
    given: int  # word of the job, as the next
    target: int  # of the columns side by side, or of what becomes of them
    columns: ColumnsPlan | None = None  # of the columns of each product, and of what is beside
    beside: Place | None = None
    tokens: int = words.EVERY_TOKEN

    @property
    def num_made(self) -> int:
        """Numbers that it makes of a token."""
        return self.products[0].num if self.columns else sum(x.num for x in self.products)


class HeadsPlan(NamedTuple):
    """The heads of a layer's attention."""

    num: int
    num_keys: int
    size: int  # of queries and keys
    size_of_value: int
    more: int = 0  # further numbers of keys, in the place of values, which then are the keys


class ExpertsPlan(NamedTuple):
    """The experts of a layer, once each token has chosen some."""

    stacks: StacksPlan
    num: int
    num_chosen: int  # of a token


class LatentsPlan(NamedTuple):
    """How keys and values of all heads are made of a token's latent, and queries."""

    query: ProductPlan | None  # from normed columns of the layer's first product
    expand: ProductPlan
    straight: int  # numbers of a head's key that have no angles; all others are of all heads
    turned: int  # the others
    value: int  # numbers of a value
    turn: RowsPlan  # of a key, and of the end of each query
    of_row: int  # number of the place of what is turned
    mixed: int  # columns of the layer's first products

    def num_scratch(self) -> int:
        """Return how many numbers a thread needs for a token."""
        inputs = 0 if self.query is None else self.query.num_inputs
        return max(inputs, self.straight + self.turned, self.expand.num_inputs + self.value)


class MixingPlan(NamedTuple):
    """Phases of a job that mix tokens: attention, or a layer's convolution or recurrence."""

    attended: int  # numbers of a token behind it
    rows: RowsPlan | None = None  # makes heads, and what is cached
    heads: HeadsPlan | None = None  # of attention
    settings: tuple[float, float, nn.Module | None] = (1.0, 0.0, None)  # scaling, softcap, sinks
    keys_of: int | None = None  # number of the layer whose keys and values it reads
    latents: LatentsPlan | None = None
    convolution: nn.Conv1d | None = None  # alone, or before a recurrence
    recurrence: RecurrencePlan | None = None

    @property
    def row_of_queries(self) -> int:
        """Numbers of a token's queries, then of its new keys and values."""
        of, of_state = self.heads, self.recurrence
        if of is None:
            num, _, size, _ = (1, 1, self.attended, 1) if of_state is None else of_state.heads
            return num * size
        own = 0 if self.keys_of is not None or self.latents is not None else of.num_keys
        return of.num * (of.size + of.more) + own * (of.size + of.size_of_value)


class LayerPlan(NamedTuple):
    """A decoder layer."""

    phases: tuple[Any, ...]  # RowsStep, ProductsPlan, MixingPlan, ExpertsPlan
    at_end: RowsPlan | None

    @property
    def mixing(self) -> MixingPlan:
        """Return what mixes tokens."""
        return next(each for each in self.phases if type(each) is MixingPlan)

    @property
    def experts(self) -> ExpertsPlan | None:
        """Return the experts, if it has some."""
        return next((each for each in self.phases if type(each) is ExpertsPlan), None)


class DecoderSizes(NamedTuple):
    """Sizes of a plan, the largest of all layers."""

    num_layers: int
    hidden: int
    vocab_size: int
    reach: float  # tokens of the longest text that every layer sees whole
    memory: tuple[tuple[int, int], ...]  # words of the job, and numbers of a token that lie there
    num_experts: int
    num_chosen: int  # of a token
    head_size: int
    between: int  # the factors of a phase's low-rank additions
    taps: int  # tokens that a convolution sees
    of_recurrence: int  # numbers that a thread needs for a recurrence
    of_latents: int  # the same of attention to latents, for each token
    of_rows: int  # the same of a program


class DecoderPlan(NamedTuple):
    """How a decoder computes logits from token ids."""

    sizes: DecoderSizes
    kinds: tuple[str, ...]  # of masks, by layer
    spans: tuple[AttentionSpan | None, ...]  # by layer; None if it attends to nothing
    ahead: tuple[Any, ...]  # phases: the embedding, then what layers get besides states
    layers: tuple[LayerPlan, ...]
    last: tuple[Any, ...]  # phases from the last states to logits
    head: nn.Linear
    modules: tuple[nn.Module, ...]  # of the layers
    #: Placeholders of images, videos and audio, each with the token that is embedded instead.
    replaced: tuple[tuple[int, int], ...] = ()

    @property
    def embeddings(self) -> list[nn.Module]:
        """Return the modules that the embedding calls."""
        places = (place for place, _ in self.ahead[0].before.places)
        return [place.made.module for place in places if place.made is not None]


class _Firsts(NamedTuple):
    """The first products of a layer."""

    given: Value
    products: tuple[ProductPlan, ...]
    places: dict[Value, Place]  # of what they give


class _Part(NamedTuple):
    """A part of a layer, between two programs of rows."""

    given: Value
    outs: dict[Value, Place]
    phases: tuple[Any, ...]


class _Caching:
    """Notes what an attention caches, in place of a cache."""

    def __init__(self) -> None:
        self.cached: tuple[Tensor, ...] = ()

    def update(self, *cached: Any, **_: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values as they are given."""
        self.cached = cached[:2]
        return cached[0], cached[1]


@torch.inference_mode(mode=False)
@torch.no_grad()
def read(model: Model) -> DecoderPlan:
    """Return the plan of a model.

    Raises:
        UnsupportedForwardError: no plan describes the model, or user code takes part.
    """
    text = model.config.get_text_config(decoder=True)
    watched = watch(model)
    plan = _of_model(watched, model)
    # What is read must hold for every text: of another length, at other positions.
    is_same = plan == _of_model(watch(model, is_other=True), model)
    require(is_same, "its forward depends on the text in another way than by rows")
    placeholders = [each for each in placeholders_of(model) if each < text.vocab_size]
    if placeholders:
        names = {module: name for name, module in model.named_modules()}
        embedding = watched.view.get_submodule(names[plan.embeddings[0]])
        plan = plan._replace(replaced=_replaced(watched.view, embedding, placeholders))
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(plan.layers)
    _require_spans(model, kinds, plan.spans)
    return plan._replace(kinds=tuple(kinds))


def _of_model(watched: Watched, model: Model) -> DecoderPlan:
    """Return the plan of a watched forward, with the model's own modules."""
    plan = _Reader(watched, attention_of(model)).plan()
    # A job calls the embedding, too.
    called = {*plan.modules, *plan.embeddings}
    view = watched.view
    inside = [name for name, each in view.named_modules() if each in watched.hooked - called]
    require(not inside, f"its modules have hooks ({', '.join(inside)})")
    gives_states = all(isinstance(watched.calls[each][0].out, Tensor) for each in plan.modules)
    is_free = watched.hooked.isdisjoint(plan.modules)
    require(is_free or gives_states, "its layers have hooks, and give more than states")
    originals = dict(zip(view.modules(), model.modules(), strict=True))
    of_model: DecoderPlan = _with_originals(plan, originals)
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
    lists = plan.ahead, *(layer.phases for layer in plan.layers), plan.last[:-1]
    return [each for phases in lists for each in _products_in(phases)]


def _products_in(phases: Iterable[Any]) -> Iterator[ProductPlan]:
    for phase in phases:
        yield from phase.products if type(phase) is ProductsPlan else ()


def adapters_of(plan: DecoderPlan) -> Iterator[nn.Module]:
    """Yield the modules that may be an adapter of a linear layer."""
    for product in products_of(plan):
        if product.around is not product.module:
            yield product.around


class _Reader:
    """Finds the plan of one forward that was traced."""

    def __init__(self, watched: Watched, implementation: str | None) -> None:
        view, self._calls, self._input_ids, self._positions, self._attended, *_ = watched
        self._spans = watched.spans
        self._view, self._logits, self._implementation = view, watched.logits, implementation
        self._trace, self._rows = watched.trace, TokenRows(self._positions.shape[1], self._call_for)
        self._parents = {
            child: module for module in view.modules() for child in module._modules.values()
        }
        self._held = {
            id(each): Constant(module, name)
            for module in view.modules()
            for held in (module._parameters, module._buffers)
            for name, each in held.items()
            if each is not None
        }
        self._number = 0  # of the layer that is being read
        self._keys: dict[Value, int] = {}  # the layer that made keys
        # What layers get besides states, and where it lies.
        self._given: dict[nn.Module, tuple[Value, Place]] = {}
        # Linear layers inside of adapters.
        self._adapted: dict[nn.Module, tuple[nn.Linear, tuple[AdditionPlan, ...]]] = {}
        for module in view.modules():
            found = self._additions(module) if module._modules else None
            if found is not None:
                self._adapted[module] = found
        inside = {each for module in self._adapted for each in module.modules()} - {*self._adapted}
        # What gives a value of positions, and its number among all that is given.
        self._called: dict[Value, tuple[CallPlan, int] | None] = {}
        self._now: dict[Value, Place] = {}  # what may be read of the layer now
        # What products give, and what modules give of tokens and positions alone.
        self._products: dict[Value, nn.Module] = {}
        self._makers: dict[Value, list[tuple[nn.Module, Called, int]]] = {}
        for module, calls in self._calls.items():
            for call in calls:
                for place, made in enumerate(call.made):
                    self._makers.setdefault(made, []).append((module, call, place))
            is_one = len(calls) == 1 and isinstance(calls[0].out, Tensor)
            if self._is_product(module) and module not in inside and is_one:
                (made,) = calls[0].made
                self._products[made] = module
                self._rows.follow(made, calls[0].given[0])

    # --- programs ---------------------------------------------------------------------------------

    def _is_given(self, value: Value) -> bool:
        """Return whether a value ends programs: it lies somewhere before they run."""
        is_known = value in self._now or value in self._products
        return is_known or value.tensor is self._positions or self._call_for(value) is not None

    def _call_for(self, value: Value) -> tuple[CallPlan, int] | None:
        """Return the call of a module that gives a value of tokens or positions alone; or None."""
        if value not in self._called:
            self._called[value] = None
            for module, call, place in self._makers.get(value, ()):
                with Attempt():
                    self._called[value] = self._call_of(module, call), place
        found = self._called[value]
        if found is not None:
            self._rows.give(value, value.tensor.dim() - 2)
        return found

    def _call_of(self, module: nn.Module, call: Called) -> CallPlan:
        """Return a call as a plan has it, if it gives the same for other states."""
        plan = self._planned(module, call)
        given = [*plan.args, *plan.kwargs.values()]
        tensors = {words.TOKENS_GIVEN: self._input_ids, words.POSITIONS_GIVEN: self._positions}
        tensors[words.AXES_GIVEN] = self._positions.expand(3, -1, -1)
        require(any(x is each for x in tensors for each in given), "it looks at no token")
        has_products = any(isinstance(each, _LINEARS) for each in module.modules())
        require(not has_products, "torch's products of several tokens depend on how many")
        for other in (0.0, 1.0):
            tensors[words.STATES_GIVEN] = torch.full_like(self._states.tensor, other)
            args, kwargs = given_to(plan, tensors)
            pairs = zip(tensors_of(module(*args, **kwargs)), tensors_of(call.out), strict=True)
            is_same = all(torch.equal(*pair) or is_near(*pair) for pair in pairs)
            require(is_same, "it looks at more than tokens")
        return plan

    def _program(
        self,
        results: Sequence[tuple[Value, Place]],
        given: Mapping[Value, Place],
    ) -> RowsPlan:
        """Return the program of some results.

        Args:
            results: where each is written.
            given: where other values lie that the program may read.
        """
        with self._knowing(given):
            outputs = [value for value, _ in results]
            source = Writer(self._rows, outputs, self._is_given).source()
            places = [
                (self._place_of(value), self._rows.layout(value).size) for value in source.inputs
            ]
        places += [(place, self._rows.layout(value).size) for value, place in results]
        constants = tuple(map(self._constant_of, source.constants))
        of_source = source.text, source.tables, source.num_scratch
        sizes = tuple(each.tensor.numel() for each in source.constants)
        return RowsPlan(*of_source, tuple(places), len(source.inputs), constants, sizes)

    def _place_of(self, value: Value) -> Place:
        if value in self._now:
            return self._now[value]
        if value.tensor is self._positions:
            return Place(words.POSITIONS)
        found = self._call_for(value)
        if found is None:
            raise UnsupportedForwardError("it reads what another part of the model gives")
        return Place(words.NOTHING, found[1], made=found[0])

    def _constant_of(self, value: Value) -> Constant:
        found = self._held.get(id(value.tensor))
        if found is None:
            raise UnsupportedForwardError("it computes with numbers that are no parameters")
        return found

    @contextmanager
    def _knowing(self, places: Mapping[Value, Place]) -> Iterator[None]:
        """Let programs read some values of the layer besides others."""
        before, self._now = self._now, {**self._now, **places}
        try:
            yield
        finally:
            self._now = before

    def _columns(self, result: Value) -> Columns:
        """Return what becomes of columns that products give."""
        return Writer(self._rows, [result], self._is_given).columns()

    def _columns_plan(self, columns: Columns) -> ColumnsPlan:
        return ColumnsPlan(
            columns.text,
            len(columns.inputs),
            tuple(
                (self._constant_of(each), first, step) for each, first, step in columns.constants
            ),
        )

    # --- the whole --------------------------------------------------------------------------------

    def plan(self) -> DecoderPlan:
        attended = self._attended
        require(bool(attended), "its attention is not transformers'")
        by_layer = {self._layer_of(each.module): each for each in attended}
        require(len(by_layer) == len(attended), "a layer attends several times")
        modules = self._layers_with(by_layer)
        self._states = states = self._value_given(modules[0])
        self._rows.give(states, 1)
        for each in (self._positions, self._input_ids):
            self._rows.give(self._trace.value(each), 1)
        fixed = set[Value]()  # what is made of parameters and buffers alone
        for value in self._trace.seen:
            ins = value.node.ins if value.node is not None else []
            if fixed.issuperset(ins) if ins else id(value.tensor) in self._held:
                fixed.add(value)
        is_free = fixed.isdisjoint(self._trace.asked)
        require(is_free, "its code depends on numbers of its parameters")
        ahead = self._embedding(states), *self._inputs(modules, states)
        names = {module: name for name, module in self._view.named_modules()}
        layers = []
        for self._number, module in enumerate(modules):
            try:
                layer, states = self._layer(module, by_layer.get(module), states)
            except UnsupportedForwardError as error:
                raise UnsupportedForwardError(f"{names[module]}: {error}") from None
            layers.append(layer)
        head: Any = self._view.get_output_embeddings()
        require(type(head) in _LINEARS and head in self._calls, "its head is not a linear layer")
        last = *self._before_head(head, states), self._of_head(head)
        spans, kinds = self._spans, self._span_by(modules)
        reach = min(each.num_slots or math.inf for each in spans)
        sizes = _sizes_of(layers, [*ahead, *last], states.shape[-1], head.out_features, reach)
        return DecoderPlan(sizes, (), kinds, ahead, tuple(layers), last, head, modules)

    def _span_by(self, modules: Sequence[nn.Module]) -> tuple[AttentionSpan | None, ...]:
        pairs = zip(self._attended, self._spans, strict=True)
        span_of = {self._layer_of(each.module): span for each, span in pairs}
        return tuple(map(span_of.get, modules))

    def _require_in_order(self, value: Value) -> None:
        """Refuse a value that has its tokens elsewhere than along its second axis."""
        is_in_order = self._rows.layout(value) is self._rows.of_tokens(value.shape, 1)
        require(is_in_order, "tokens are in another order than in the text")

    def _before_head(self, head: nn.Module, states: Value) -> tuple[Any, ...]:
        """Return the phases between the last states and the head: rows, maybe a product."""
        given, of_states = self._value_given(head), {states: Place(words.STATES)}
        self._now = of_states
        _, found = slice_of(self._rows, [given], self._is_given)
        self._require_in_order(given)
        made = [each for each in found if each in self._products]
        if not made:
            is_whole = self._rows.layout(given).size == states.shape[-1]
            require(is_whole, "its head gets other states than its layers give")
            program = self._program([(given, Place(words.NORMED))], of_states)
            return (RowsStep(program, tokens=words.KEPT_TOKENS),)
        linear: Any = self._products[made[0]]
        is_one = len(made) == 1 and type(linear) in _LINEARS
        require(is_one, "several products precede its head")
        before = self._program([(self._value_given(linear), Place(words.NORMED))], of_states)
        self._now = {}
        places = {made[0]: Place(words.ADDED)}
        after = self._program([(given, Place(words.NORMED))], places)
        of_linear = (self._product(linear),), words.NORMED, words.ADDED
        return (
            RowsStep(before, tokens=words.KEPT_TOKENS),
            ProductsPlan(*of_linear, tokens=words.KEPT_TOKENS),
            RowsStep(after, tokens=words.KEPT_ROWS),
        )

    def _of_head(self, head: nn.Module) -> ProductsPlan:
        made, logits = self._value_made(head), self._trace.value(self._logits)
        self._now = {}
        columns = self._columns(logits)
        is_of_head = [(each, first) for each, first, _ in columns.inputs] == [(made, 0)]
        require(is_of_head, "its logits are not what its head gives")
        finish = None if columns.is_copy else self._columns_plan(columns)
        of_head = (self._product(head),), words.NORMED, words.LOGITS, finish
        return ProductsPlan(*of_head, tokens=words.KEPT_TOKENS)

    def _embedding(self, states: Value) -> RowsStep:
        """Return what makes the first states of tokens and positions."""
        self._now = {}
        program = self._program([(states, Place(words.STATES))], {})
        calls = [place.made for place, _ in program.places if place.made is not None]
        is_known = any(words.TOKENS_GIVEN in (*x.args, *x.kwargs.values()) for x in calls)
        require(is_known, "its first layer does not get what an embedding gives")
        return RowsStep(program)

    def _inputs(self, modules: Sequence[nn.Module], states: Value) -> tuple[Any, ...]:
        """Return the phases that make what layers get besides states; none if it is not known."""
        given = []
        for module in modules:
            call = self._calls[module][0]
            alone = {id(each) for each in (*call.args, *call.kwargs.values())}
            tensors = [each for each in call.given if id(each.tensor) in alone]
            tensors = [each for each in tensors if each.shape[:-1] == states.shape[:-1]]
            given.append([each for each in tensors if each.tensor.is_floating_point()])
        if any(len(each) != 2 for each in given):  # states come first
            return ()
        results = [each[1] for each in given]
        self._now = {states: Place(0)}
        _, found = slice_of(self._rows, results, self._is_given)
        made = [each for each in found if each in self._products]
        is_known = len(made) == 1 and all(x in made or self._call_for(x) for x in found)
        if not is_known or self._value_given(self._products[made[0]]) is not states:
            return ()
        product, size = self._product(self._products[made[0]]), self._rows.layout(results[0]).size
        of_all = size * len(results)
        ends = [Place(words.INPUTS, size * each, of_all) for each in range(len(results))]
        pairs = [*zip(results, ends, strict=True)]
        rows = self._program(pairs, {made[0]: Place(words.MIXED)})
        self._given = dict(zip(modules, pairs, strict=True))
        return ProductsPlan((product,), words.STATES, words.MIXED), RowsStep(None, rows)

    # --- a layer ----------------------------------------------------------------------------------

    def _layer(
        self, layer: nn.Module, attended: Attended | None, states: Value
    ) -> tuple[LayerPlan, Value]:
        """Return the plan of a layer, and its output states."""
        got = self._value_given(layer)
        is_same = got is states or torch.equal(got.tensor, states.tensor)
        require(is_same, "a layer does not get what the one before it gives")
        self._rows.give(got, 1)
        result = self._value_made(layer)
        self._now = {got: Place(words.STATES)}
        modules = {*layer.modules()}
        self._inside = [each for each in self._products.values() if each in modules]
        if attended is not None:
            mixing = self._latent(attended) or self._attending(attended)
        else:
            mixing = self._convolved(layer)
        taken = {each.around for each in _products_in(mixing.phases)}
        for each in (phase.latents for phase in mixing.phases if type(phase) is MixingPlan):
            taken |= {x.module for x in (each.expand, each.query) if x} if each else set()
        rest: list[Any] = [each for each in self._inside if each not in taken]
        num = len(rest) - 2 * (layer in self._given)
        parts = [mixing, self._mlp(layer, rest[:num])]
        if layer in self._given:
            parts.append(self._dense(rest[num:], *self._given[layer]))
        *rows, at_end = self._chained(parts, got, result)
        phases = [
            phase
            for number, (program, part) in enumerate(zip(rows, parts, strict=True))
            for phase in (*[RowsStep(program)] * (number == 0 or bool(program)), *part.phases)
        ]
        self._require_in_order(result)
        self._rows.give(result, 1)
        return LayerPlan(tuple(phases), at_end), result

    def _chained(
        self, parts: Sequence[_Part], states: Value, result: Value
    ) -> list[RowsPlan | None]:
        """Return the programs before each part of a layer and at its end.

        A part gets what its program gives, and adds nothing; its results lie where the part says
        until the next program has run. What later programs need as well is kept.
        """
        ends = [*(part.given for part in parts), result]
        made: dict[Value, int] = {}  # by which program each value is known
        needs: list[list[Value]] = []  # what each program reads
        known = {states: Place(words.STATES)}
        for number, end in enumerate(ends):
            with self._knowing(known):
                order, found = slice_of(self._rows, [end], self._is_given)
            needs.append(found)
            for value in order:
                if value.tensor.dtype is torch.float32 and not self._rows.layout(value).is_shared:
                    known[value] = Place(0)
                    made.setdefault(value, number)
            for out in parts[number].outs if number < len(parts) else ():
                known[out] = Place(0)
                made[out] = number + 1
        kept = [
            value
            for value, number in made.items()
            if any(value in need for need in needs[number + 1 :])
        ]
        places = self._side_by_side(words.SAVED, kept)
        programs: list[RowsPlan | None] = []
        for number, end in enumerate(ends):
            readable = {states: Place(words.STATES)}
            readable |= {x: place for x, place in places.items() if made[x] < number}
            if number > 0:
                readable |= parts[number - 1].outs
            is_last = number == len(parts)
            results = [(x, place) for x, place in places.items() if made[x] == number]
            if is_last or number == 0 or end is not ends[number - 1]:
                results.append((end, Place(words.STATES if is_last else words.NORMED)))
            programs.append(self._program(results, readable) if results else None)
        return programs

    def _side_by_side(self, word: int, values: Iterable[Value]) -> dict[Value, Place]:
        """Return the places of values in one row."""
        sizes = {each: self._rows.layout(each).size for each in values}
        firsts = accumulate(sizes.values(), initial=0)
        step = sum(sizes.values())
        return {each: Place(word, first, step) for each, first in zip(sizes, firsts, strict=False)}

    def _attending(self, attended: Attended) -> _Part:
        """Return the attention of a layer."""
        (_, num, _, size), (_, num_keys, _, of_value) = attended.query.shape, attended.value.shape
        query, key, value, result = attended[1:5]
        self._rows.give(result, 1)
        keys_of = self._keys.setdefault(key, self._number)
        is_shared = keys_of < self._number
        wanted = [query] if is_shared else [query, key, value]
        _, found = slice_of(self._rows, wanted, self._is_given)
        mixing = [each for each in found if each in self._products]
        is_of_heads = all(
            self._rows.layout(each) is self._rows.of_tokens(each.shape, 2) for each in wanted
        )
        require(is_of_heads, "attention gets tokens in another order")
        out, beside = self._behind(result)
        mixing += [each for each in beside if each in self._products and each not in mixing]
        mixing.sort(key=[*self._products].index)
        firsts = self._firsts(mixing)
        if not is_shared:
            self._require_cached(attended.module, key.tensor, value.tensor)
        plan = MixingPlan(
            num * of_value,
            self._program([*self._side_by_side(words.QUERIES, wanted).items()], firsts.places),
            HeadsPlan(num, num_keys, size, of_value),
            *(_settings_of(attended, self._implementation), keys_of if is_shared else None),
        )
        return self._mixed(firsts, plan, result, out)

    def _firsts(self, values: Sequence[Value]) -> _Firsts:
        """Return the products that give some values, of the same states."""
        modules = [self._products[each] for each in values]
        givens = {*map(self._value_given, modules)}
        is_known = len(givens) == 1 and len(modules) <= 4
        require(is_known, "its projections are of different states, or of other sizes")
        places = self._side_by_side(words.MIXED, values)
        return _Firsts(givens.pop(), tuple(map(self._product, modules)), places)

    def _mixed(
        self,
        firsts: _Firsts,
        plan: MixingPlan,
        result: Value,
        out: nn.Module,
        before: RowsPlan | None = None,
    ) -> _Part:
        """Return the part of a layer that mixes tokens, between products; see `_behind`."""
        taken, word, between = self._value_given(out), words.ATTENDED, tuple[RowsStep, ...]()
        with_result = {**firsts.places, result: Place(words.ATTENDED)}
        program = self._program([(taken, Place(words.QUERIES))], with_result)
        if not program.is_copy:
            word, between = words.QUERIES, (RowsStep(program),)
        asking = ProductsPlan(firsts.products, words.NORMED, words.MIXED)
        rows = [RowsStep(None, before)] if before else []
        last = ProductsPlan((self._product(out),), word, words.ADDED)
        phases = asking, *rows, plan, *between, last
        return _Part(firsts.given, _added(self._value_made(out)), phases)

    def _behind(self, result: Value) -> tuple[nn.Module, list[Value]]:
        """Return the product that gets attention's result, and what else comes before it."""
        with self._knowing({result: Place(words.ATTENDED)}):
            for module in self._inside:
                with suppress(UnsupportedForwardError):
                    _, found = slice_of(self._rows, [self._value_given(module)], self._is_given)
                    if result in found:
                        return module, [each for each in found if each is not result]
        raise UnsupportedForwardError("no product gets the result of attention")

    def _dense(
        self, products: Sequence[nn.Module], beside: Value | None = None, place: Place | None = None
    ) -> _Part:
        """Return an MLP: gate and up, and what becomes of their columns, and down.

        Instead of up there may be what layers get besides states, and where it lies.
        """
        require(len(products) in (2, 3), f"a layer has {len(products)} linear layers for its MLP")
        *firsts, down = products
        if beside is not None and place is not None:
            self._now[beside] = place
            self._rows.give(beside, 1)
        columns = self._columns(self._value_given(down))
        made = {self._value_made(each): each for each in firsts}
        inputs = tuple(
            self._product(made[each], first, columns.size)
            for each, first, _ in columns.inputs
            if each in made
        )
        givens = {self._value_given(each) for each in firsts}
        others = [each for each, *_ in columns.inputs if each not in made]
        is_known = (
            len(givens) == 1
            and len(columns.inputs) in (1, 2)
            and columns.inputs[0][0] in made
            and others == ([] if beside is None else [beside])
            and {x.module for x in inputs} >= {self._product(x).module for x in firsts}
        )
        require(is_known, "its MLP is not made of products of the same states")
        of_firsts = inputs, words.NORMED, words.INNER, self._columns_plan(columns), place
        last = ProductsPlan((self._product(down),), words.INNER, words.ADDED)
        outs = _added(self._value_made(down))
        return _Part(givens.pop(), outs, (ProductsPlan(*of_firsts), last))

    def _mlp(self, layer: nn.Module, products: list[nn.Module]) -> _Part:
        """Return the MLP of a layer, or its experts and the shared expert."""
        module = experts_in(layer, self._calls)
        if module is None:
            return self._dense(products)
        given, out = self._value_given(self._parents[module]), self._value_made(module)
        call, *others = self._calls[module]
        chosen = [each for each in call.given if each.tensor.dtype is torch.int64]
        is_known = not others and (len(call.given), len(chosen)) == (3, 1)
        require(is_known, f"{type(module).__name__} is called otherwise")
        states, shares = (each for each in call.given if each not in chosen)
        self._rows.follow(out, states)
        scores, router, taken = self._scores([*chosen, shares])
        results = [(chosen[0], Place(words.CHOSEN)), (shares, Place(words.SHARES))]
        inside = {*module.modules(), router}
        shared = [each for each in products if each not in inside]
        gates: list[Any] = [each for each in shared if getattr(each, "out_features", 0) == 1]
        require(len(gates) < 2, "a layer has several gates of shared experts")
        num = scores.shape[-1]
        places = [Place(words.SCORES, first, num + len(gates)) for first in (0, num)]
        choose = self._program(results, {scores: places[0]})
        outs, phases = {out: Place(words.RESULT)}, list[Any]()
        beside = [states, taken, *map(self._value_given, gates)]
        if shared:
            dense = self._dense([x for x in shared if x not in gates])
            outs |= dense.outs
            beside.append(dense.given)
            phases += dense.phases
        asked = [ProductPlan(router, 0, num, taken.shape[-1], router), *map(self._product, gates)]
        outs |= {self._value_made(gate): places[1] for gate in gates}
        rows = given.tensor.flatten(0, -2)
        is_same = all(torch.equal(each.tensor.flatten(0, -2), rows) for each in beside)
        require(is_same, "experts, their router and what is shared get different states")
        routed = [each.tensor for each in (states, *chosen, shares)]
        experts = ExpertsPlan(read_experts(module, call, *routed), num, shares.shape[-1])
        scoring = ProductsPlan(tuple(asked), words.NORMED, words.SCORES)
        return _Part(given, outs, (*phases, scoring, RowsStep(None, choose), experts))

    def _scores(self, chosen: Sequence[Value]) -> tuple[Value, nn.Module, Value]:
        """Return the product that scores experts, its module, and the input of that module."""
        made = dict[Value, tuple[nn.Module, Value]]()
        for value in self._trace.made_by("mm", "addmm"):
            *_, taken, weight = value.node.ins  # type: ignore[union-attr]
            held = self._held.get(id(_root(weight)))
            if held is not None and held.name == "weight":
                made[value] = held.module, taken
                self._rows.follow(value, taken)
        made |= {x: (module, self._value_given(module)) for x, module in self._products.items()}
        _, found = slice_of(self._rows, chosen, made.__contains__)
        require(len(found) == 1, "experts are chosen by more than a product")
        router, taken = made[found[0]]
        weights = [router._parameters.get(name) for name in ("weight", "bias")]
        wanted = nn.functional.linear(taken.tensor, *weights)  # type: ignore[arg-type]
        require(is_near(found[0].tensor, wanted), "its router is no linear layer")
        return found[0], router, taken

    def _latent(self, attended: Attended) -> _Part | None:
        """Return attention to latents; None for another attention.

        One product makes values and the first numbers of keys, head by head.
        """
        query, key, value, result = attended[1:5]
        (_, num_heads, _, size), num_value = key.shape, value.shape[-1]
        made, of_values = self._rows.narrowed(value, np.arange(num_heads * num_value))
        straight, heads = int(of_values[0]), np.arange(num_heads)[:, None]
        if not 0 < straight < size or made not in self._products:
            return None
        whole = heads * (straight + num_value) + np.arange(straight + num_value)
        places_of_keys = (heads * size + np.arange(straight)).reshape(-1)
        with_keys, of_keys = self._rows.narrowed(key, places_of_keys)
        is_one = with_keys is made and np.array_equal(whole[:, straight:].reshape(-1), of_values)
        if not is_one or not np.array_equal(whole[:, :straight].reshape(-1), of_keys):
            return None
        expand: Any = self._products[made]
        latent = self._value_given(expand)
        turned, rank = size - straight, latent.shape[-1]
        self._rows.give(result, 1)
        _, found = slice_of(self._rows, [latent, query, key], self._is_given)
        mixing = {each for each in found if each in self._products} - {made}
        (out, beside), reason = self._behind(result), "its latents and queries are not known"
        require(len(mixing) == 2 and not beside, reason)
        is_of_latent = slice_of(self._rows, [latent], self._is_given)[1]
        into = next(each for each in mixing if each in is_of_latent)
        (asking,) = mixing - {into}
        # What makes queries may get a norm of what another product gives of the states.
        first, second, taken = asking, None, self._value_given(self._products[asking])
        given = self._value_given(self._products[into])
        if taken is not given:
            before = [
                x for x in slice_of(self._rows, [taken], self._is_given)[1] if x in self._products
            ]
            require(len(before) == 1, reason)
            second, first = self._product(self._products[asking]), before[0]
        firsts = self._firsts((first, into))
        row = num_heads * (rank + turned)
        results = [(latent, Place(words.QUERIES, 0, row))]
        if second is not None:
            results.append((taken, Place(words.NORMED)))
        program = self._program(results, firsts.places)
        # The end of a key, and of each query, are turned alike; the rest is what products give.
        writer = Writer(self._rows, [key, query], self._is_given)
        end = np.arange(straight, size)
        shared, of_shared = self._rows.narrowed(key, end)
        require(np.array_equal(of_shared, np.arange(turned)), reason)
        for head in {0, num_heads - 1}:
            mine = writer.elements(query, end + size * head)
            theirs = writer.elements(key, end + size * head)
            pairs = zip(mine, theirs, strict=True)
            is_alike = all(
                each.text == other.text
                and each.indices.get(asking, -1) - size * head - straight
                == other.indices.get(into, -1) - rank
                for each, other in pairs
            )
            require(is_alike, "queries and keys are turned in different ways")
            kept = writer.elements(query, np.arange(straight) + size * head)
            is_kept = all(
                each == ("[0]", {asking: size * head + place}) for place, each in enumerate(kept)
            )
            require(is_kept, reason)
        turn = self._program([(shared, Place(words.QUERIES, rank, row))], firsts.places)
        of_row = [place.word for place, _ in turn.places].index(words.MIXED)
        self._require_cached(attended.module, latent.tensor, key.tensor[0, 0, :, straight:])
        apart = {expand, *(() if second is None else (self._products[asking],))}
        require({*map(type, apart)} <= {*_LINEARS}, "its latents have adapters")
        expanded = self._product(expand)
        plan = MixingPlan(
            *(num_heads * num_value, program),
            HeadsPlan(num_heads, 1, rank, rank, turned),
            settings=_settings_of(attended, self._implementation),
            latents=LatentsPlan(
                *(second, expanded, straight, turned, num_value, turn, of_row),
                sum(each.num for each in firsts.products),
            ),
        )
        return self._mixed(firsts, plan, result, out)

    def _require_cached(self, module: Any, *cached: Tensor) -> None:
        """Refuse an attention that does not cache these rows of tokens."""
        (call, *_), caching = self._calls[module], _Caching()
        names = [CACHE, *(name for name in call.kwargs if name.endswith("_past"))]
        with Attempt():  # some cache more
            module(*call.args, **{**call.kwargs, names[-1]: caching})
        pairs = zip(caching.cached, cached, strict=False)
        is_cached = [
            each.numel() == rows.numel() and is_near(each.reshape(rows.shape), rows)
            for each, rows in pairs
        ]
        require(is_cached == [True] * len(cached), "its cache has other numbers than it attends to")

    def _convolved(self, layer: nn.Module) -> _Part:
        """Return the short convolution of a layer, or its recurrence behind one."""
        found = [each for each in layer.modules() if type(each) is nn.Conv1d]
        require(len(found) == 1, "it attends to nothing, and is no short convolution")
        (convolution,) = found
        inside = {*self._parents[convolution].modules()}
        called = [each for each in self._calls if each in inside and self._is_product(each)]
        channels, reason = convolution.out_channels, "its convolution is not one of channels"
        require(convolution.groups == channels and len(called) > 1, reason)
        made = [
            each
            for each in self._trace.made_by("convolution")
            if _root(each.node.ins[1]) is convolution.weight  # type: ignore[union-attr]
        ]
        require(len(made) == 1, reason)
        given: Value = made[0].node.ins[0]  # type: ignore[union-attr]
        if len(called) > 2 or self._parents[convolution]._parameters:
            return self._recurrent(convolution, given, called)
        made += [x for x in self._trace.made_by("slice") if x.node.ins[0] is made[0]]  # type: ignore[union-attr]
        result = next((each for each in made if each.shape == given.shape), made[0])
        wanted = convolved(convolution, given.tensor[0].T)
        require(is_near(result.tensor[0].T.contiguous(), wanted), reason)
        self._rows.give(result, 2)
        firsts = self._firsts([self._value_made(called[0])])
        before = self._program([(given, Place(words.QUERIES))], firsts.places)
        plan = MixingPlan(channels, convolution=convolution)
        return self._mixed(firsts, plan, result, called[1], before)

    def _recurrent(
        self, convolution: nn.Conv1d, given: Value, called: Sequence[nn.Module]
    ) -> _Part:
        """Return the recurrence of a layer: products, a convolution, a state, a gated norm."""
        module: Any = self._parents[convolution]
        firsts = self._firsts([*map(self._value_made, called[:-1])])
        norms = [
            each
            for each in module.children()
            if [*each._parameters] == ["weight"]
            and len(self._calls.get(each, ())) == 1
            and not isinstance(each, (*PRODUCTS, nn.Conv1d))
        ]
        require(len(norms) == 1, "its recurrence has no norm")
        result = self._value_given(norms[0])
        self._rows.give_in_order(result)

        def of_layer(value: Value) -> bool:
            """Return whether a value is made of what the layer's products give."""
            with suppress(UnsupportedForwardError):
                found = slice_of(self._rows, [value], self._is_given)[1]
                return firsts.places.keys() >= {*found}
            return False

        decays = [x for x in self._trace.made_by("mul") if _is_decay(x) and of_layer(x)]
        require(len(decays) == 1, "its recurrence has no decay")
        shape, with_decays = decays[0].shape, decays[0].node.ins[1]  # type: ignore[union-attr]
        sigmoids = [x for x in self._trace.made_by("sigmoid") if x.shape == shape and of_layer(x)]
        pairs = self._side_by_side(words.INNER, [given, decays[0], [*sigmoids, with_decays][0]])
        before = self._program([*pairs.items()], firsts.places)
        used = {each.name for each in before.constants}
        own = [name for name, each in module._parameters.items() if each is not None]
        names = [name for name in own if name not in used]
        numbers = [x.tensor[0].T if x is given else x.tensor[0] for x in pairs]
        found = read_recurrence(module, convolution, numbers, result.tensor, names)
        size = result.tensor.numel() // len(numbers[1])
        plan = MixingPlan(size, convolution=convolution, recurrence=found)
        return self._mixed(firsts, plan, result, called[-1], before)

    # --- modules ----------------------------------------------------------------------------------

    def _value_given(self, module: nn.Module) -> Value:
        """Return the first tensor that a module got, which was called once."""
        calls = self._calls.get(module, [])
        require(len(calls) == 1, f"{type(module).__name__} is called {len(calls)} times")
        return calls[0].given[0]

    def _value_made(self, module: nn.Module) -> Value:
        """Return what a module gave, which was called once."""
        return self._calls[module][0].made[0]

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

    def _is_product(self, module: nn.Module) -> bool:
        return isinstance(module, (*PRODUCTS,)) or module in self._adapted

    def _product(self, module: Any, first: int = 0, num: int | None = None) -> ProductPlan:
        """Return the plan of some columns of a linear layer, by default all."""
        linear, added = self._adapted.get(module, (module, ()))
        name = type(module).__name__
        require(type(linear) in PRODUCTS, f"{name} is not a plain linear layer")
        num_columns, num_inputs = size_of(linear)
        return ProductPlan(linear, first, num or num_columns, num_inputs, module, added)

    def _additions(self, module: nn.Module) -> tuple[nn.Linear, tuple[AdditionPlan, ...]] | None:
        """Return the linear layer in a module, and its additions; None for other modules."""
        inside = {*module.modules()} - {module}
        called: list[Any] = [
            each
            for each in self._calls
            if each in inside and not each._modules and not isinstance(each, _NOTHING)
        ]
        is_known = bool(called) and all(type(each) in _LINEARS for each in called)
        if not is_known or any(len(self._calls.get(x, ())) != 1 for x in (module, *called)):
            return None
        made, given = {self._value_made(x): x for x in called}, self._value_given(module).tensor
        firsts = {x: made[y] for x in called if (y := self._value_given(x)) in made}
        outer = [each for each in called if each not in firsts]
        linears = [each for each in outer if each not in firsts.values()]
        if len(linears) != 1 or not isinstance(self._calls[module][0].out, Tensor):
            return None
        if any(not torch.equal(self._value_given(x).tensor, given) for x in outer):
            return None
        ends = [self._value_made(each) for each in (*linears, *firsts)]
        rows = TokenRows(self._positions.shape[1], lambda _: None)
        with suppress(UnsupportedForwardError):
            for value in ends:
                rows.give(value, len(value.shape) - 2)
            writer = Writer(rows, [self._value_made(module)], ends.__contains__)
            times = _factors(writer.columns(), ends)
            added = zip(firsts.values(), firsts, times, strict=True)
            return linears[0], tuple(AdditionPlan(*each) for each in added)
        return None


def _factors(columns: Columns, values: Sequence[Value]) -> list[float]:
    """Return the factors of all values but the first, of whose sum some columns are."""
    text, times = columns.text.rpartition(" = ")[2].strip(), list[tuple[Value, float]]()
    inputs = [value for value, *_ in columns.inputs]
    while found := _ADDED.fullmatch(text):
        text = found[1]
        times.append((inputs[int(found[2])], float(found[3])))
    is_whole = not any(first for _, first, _ in columns.inputs)
    is_sum = text == "a0[i]" and inputs[0] is values[0] and len(times) == len(values) - 1
    require(is_whole and is_sum and {*dict(times)} == {*values[1:]}, "it is no sum")
    return [*map(dict(times).__getitem__, values[1:])]


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


def _is_ignored(attended: Attended, name: str) -> bool:
    """Return whether transformers' `sdpa`, as it is installed, ignores a setting."""
    query, *others = (each.tensor for each in attended[1:4])
    large = (attended.module, 100 * query, *others, None)
    setting = {name: attended.kwargs[name]}
    return torch.equal(SDPA(*large, **setting)[0], SDPA(*large)[0])


def is_alike(positions: Tensor) -> bool:
    """Return whether all axes of positions count the same."""
    return bool((positions == positions[:1]).all())


def given_to(plan: CallPlan, tensors: Mapping[Any, Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call, with tensors instead of placeholders."""

    def put(value: Any) -> Any:  # which may have no hash
        return next((each for name, each in tensors.items() if name is value), value)

    return [*map(put, plan.args)], {name: put(value) for name, value in plan.kwargs.items()}


def _is_decay(value: Value) -> bool:
    """Return whether a value is minus powers of e, one for each head, times numbers of tokens."""
    ins = value.node.ins if value.node is not None else []
    is_pair = len(ins) == 2 and ins[0].node is not None and ins[0].node.name == "neg"
    return is_pair and ins[0].shape == value.shape[-1:] and ins[1].shape == value.shape


def _root(value: Value) -> Tensor:
    """Return what a value is a view of."""
    while value.node is not None and value.node.ins:
        value = value.node.ins[0]
    return value.tensor


def _added(value: Value) -> dict[Value, Place]:
    return {value: Place(words.ADDED)}


def _sizes_of(
    layers: Sequence[LayerPlan], others: Sequence[Any], hidden: int, num_columns: int, reach: float
) -> DecoderSizes:
    phases = [*others, *(phase for layer in layers for phase in layer.phases)]
    mixing, experts = [layer.mixing for layer in layers], [x.experts for x in layers if x.experts]
    kinds: Any = RowsStep, ProductsPlan
    steps, products = ([x for x in phases if type(x) is kind] for kind in kinds)
    latents = [each.latents for each in mixing if each.latents is not None]
    programs = [each for step in steps for each in step[:2]] + [layer.at_end for layer in layers]
    programs += [each.rows for each in mixing] + [each.turn for each in latents]
    rows = [each for each in programs if each is not None]
    lying = [(place.word, place.step or size) for each in rows for place, size in each.places]
    lying += [(each.target, each.num_made) for each in products]
    lying += [(words.ATTENDED, each.attended) for each in mixing]
    lying += [(words.QUERIES, each.row_of_queries) for each in mixing]
    for each in experts:
        of_experts = words.OF_EXPERTS, each.num_chosen * each.stacks.inner
        lying += [of_experts, (words.RESULT, hidden)]
    memory: dict[int, int] = {}
    for word, size in lying:
        memory[word] = max(memory.get(word, 0), size)
    heads = [each.heads for each in mixing if each.heads is not None]
    taps = max((each.convolution.kernel_size[0] for each in mixing if each.convolution), default=0)
    recurrences = [each.recurrence for each in mixing if each.recurrence is not None]
    return DecoderSizes(
        *(len(layers), hidden, num_columns, reach, tuple(sorted(memory.items()))),
        max((each.num for each in experts), default=0),
        max((each.num_chosen for each in experts), default=0),
        max(max(each.size + each.more, each.size_of_value) for each in heads),
        max(sum(y.first.out_features for x in each.products for y in x.added) for each in products),
        taps,
        max((each.num_scratch(taps) for each in recurrences), default=0),
        max((each.num_scratch() for each in latents), default=0),
        max((each.num_scratch for each in rows), default=0),
    )
