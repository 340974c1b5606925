"""Read from a model how its decoder computes, so that one compiled job can do the same.

No architecture is known by name. A short forward is traced: between its products, attention and
experts, the operators that ran become programs of a token's row (`programs.py`). What is no such
program, or does not fit into a layer of a job, raises `UnsupportedForwardError`.
"""

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from lade.compat import CACHE, Model, attention_of, placeholders_of
from lade.compat.attempts import Attempt
from lade.errors import UnsupportedModelError
from lade.forward import words
from lade.forward.comparing import UnsupportedForwardError, convolved, is_near, require
from lade.forward.experts import experts_in, read_experts
from lade.forward.packed import PackedLinear
from lade.forward.programs import Columns, TokenRows, Writer, slice_of
from lade.forward.recurrence import RecurrencePlan, read_recurrence
from lade.forward.trace import Value
from lade.forward.watching import (
    PRODUCTS,
    SDPA,
    Called,
    Watched,
    size_of,
    tensors_of,
    watch,
)
from lade.forward.written import Attended
from lade.targets.layout import tree_layout
from lade.targets.masks import AttentionSpan

# Arguments of attention that a plan contains, or that do not change the result.
_HONOURED = {
    *("dropout", "scaling", "softcap", "s_aux", "sliding_window", "is_causal", "position_ids"),
    *("use_cache", "output_attentions", "output_hidden_states", "cache_position", "return_dict"),
    "logits_to_keep",
}
_LINEARS = (nn.Linear, PackedLinear)
_TOLD = {bool, int, float, str, type(None), torch.dtype, torch.device}  # compared as they print
_LOOKUPS = "embedding", "index", "index_select"


class ProductPlan(NamedTuple):
    """Some columns of a linear layer."""

    module: nn.Module
    first: int
    num: int
    num_inputs: int
    start: int = 0  # of its inputs in a token's row


class CallPlan(NamedTuple):
    """A module and the arguments of its call, with placeholders for tensors."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    table: str = ""  # if not empty, rows of this tensor of the module are looked up instead
    offset: int = 0  # that is added to the argument then


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
    first: int = 0
    step: int = 0  # numbers from one column to the next, in a program of columns


class ProgramPlan(NamedTuple):
    """A program of a token's row, or of columns of products, and where its numbers lie."""

    text: str
    given: tuple[str, ...]  # source of its arguments, as `_rows.address_of` takes it
    places: tuple[tuple[Any, int], ...]  # of inputs, constants and results, with their sizes
    tables: tuple[tuple[int, ...], ...] = ()
    num_scratch: int = 0


class RowsStep(NamedTuple):
    """A phase of a job: programs of rows."""

    before: ProgramPlan | None  # what the next phase gets
    at_end: ProgramPlan | None = None  # before that; a layer's first phase has the last layer's
    tokens: int = words.EVERY_TOKEN


class ProductsPlan(NamedTuple):
    """A phase of a job: products of the same numbers, or of parts of one row."""

    products: tuple[ProductPlan, ...]
    row: int  # numbers of a token's row of inputs
    given: int  # word of the job, as the next
    target: int  # of the columns side by side, or of what becomes of them
    columns: ProgramPlan | None = None  # of the columns of each product
    tokens: int = words.EVERY_TOKEN

    @property
    def num_made(self) -> int:
        """Numbers that it makes of a token."""
        return self.products[0].num if self.columns else sum(x.num for x in self.products)


class MixingPlan(NamedTuple):
    """Phases of a job that mix tokens: attention, or a layer's convolution or recurrence."""

    runs: tuple[tuple[str, int], ...]  # of each phase: what runs it, and its number there
    numbers: tuple[tuple[int, ...], ...]  # a word of its row, and the numbers from there on
    weights: tuple[tuple[int, Constant], ...]  # a word of its row, and what has its address there
    sizes: tuple[tuple[str, int], ...]  # arguments of `scratch_size`
    added: tuple[tuple[int, ...], ...]  # shapes of what a token adds to the cache
    at_once: int = 1  # numbers of results that are written together, maybe with digits
    rows: ProgramPlan | None = None  # of attention: makes heads, and what is cached
    keys_of: int | None = None  # number of the layer whose keys and values it reads
    expand: ProductPlan | None = None  # what makes keys and values of latents
    recurrence: RecurrencePlan | None = None


class LayerPlan(NamedTuple):
    """A decoder layer."""

    phases: tuple[Any, ...]  # RowsStep, ProductsPlan, MixingPlan, `experts.ExpertsPlan`
    at_end: ProgramPlan | None

    @property
    def mixing(self) -> MixingPlan:
        """Return what mixes tokens."""
        return next(each for each in self.phases if type(each) is MixingPlan)


class DecoderPlan(NamedTuple):
    """How a decoder computes logits from token ids."""

    hidden: int  # numbers of a token's states
    reach: float  # tokens of the longest text that every layer sees whole
    kinds: tuple[str, ...]  # of masks, by layer
    spans: tuple[AttentionSpan | None, ...]  # by layer; None if it attends to nothing
    ahead: tuple[Any, ...]  # phases: the embedding, then what layers get besides states
    layers: tuple[LayerPlan, ...]
    last: tuple[Any, ...]  # phases from the last states to logits
    head: nn.Linear
    modules: tuple[nn.Module, ...]  # of the layers
    counts: bool  # whether the model counts positions by itself, as places behind a cache
    #: Placeholders of images, videos and audio, each with the token that is embedded instead.
    replaced: tuple[tuple[int, int], ...] = ()

    @property
    def embeddings(self) -> list[nn.Module]:
        """Return the modules that the embedding calls."""
        return [each.module for each in _calls_of(self.ahead) if not each.table]


class _Part(NamedTuple):
    """A large operation."""

    given: dict[Value, Place]  # what it reads, and where a program writes that
    outs: dict[Value, Place]  # what it gives, and where
    plan: Any  # ProductsPlan, MixingPlan, ExpertsPlan


@torch.inference_mode(mode=False)
@torch.no_grad()
def read(model: Model) -> DecoderPlan:
    """Return the plan of a model.

    Raises:
        UnsupportedForwardError: no plan describes the model, or user code takes part.
    """
    text = model.config.get_text_config(decoder=True)
    placeholders = [each for each in placeholders_of(model) if each < text.vocab_size]
    with closing(watch(model)) as watched:
        plan, replaced = _of_model(watched, model), tuple[tuple[int, int], ...]()
        later: dict[str, Any] = {"is_later": plan.counts, "attention": attention_of(watched.view)}
        if placeholders:
            names = {module: name for name, module in model.named_modules()}
            embedding = watched.view.get_submodule(names[plan.embeddings[0]])
            replaced = _replaced(watched.view, embedding, placeholders)
    # What is read must hold for every text: of another length, at other positions.
    with closing(watch(model, is_other=True, **later)) as watched:
        is_same = plan == _of_model(watched, model)
    require(is_same, "its forward depends on the text in another way than by rows")
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(plan.layers)
    _require_spans(model, kinds, plan.spans)
    return plan._replace(kinds=tuple(kinds), replaced=replaced)


def _of_model(watched: Watched, model: Model) -> DecoderPlan:
    """Return the plan of a watched forward, with the model's own modules."""
    reader = _Reader(watched, attention_of(model))
    plan = reader.plan()
    vars(reader).clear()  # it and its rows refer to each other
    # A job calls the embedding, too.
    called = {*plan.modules, *plan.embeddings}
    view = watched.view
    inside = [name for name, each in view.named_modules() if each in watched.hooked - called]
    require(not inside, f"its modules have hooks ({', '.join(inside)})")
    gives_states = all(isinstance(watched.calls[each][0].out, Tensor) for each in plan.modules)
    is_free = watched.hooked.isdisjoint(plan.modules)
    require(is_free or gives_states, "its layers have hooks, and give more than states")
    originals = dict(zip(view.modules(), model.modules(), strict=True))
    of_model: DecoderPlan = _with_others(plan, originals)
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


def _with_others(value: Any, others: dict[Any, Any]) -> Any:
    """Return a plan with other modules: the model's own, or those of a layer that is alike."""
    if isinstance(value, nn.Module):
        return others.get(value, value)
    if not isinstance(value, tuple):
        return value
    if id(value) not in others:  # one object stays one
        parts = [_with_others(each, others) for each in value]
        others[id(value)] = tuple(parts) if type(value) is tuple else type(value)(*parts)
    return others[id(value)]


class _Reader:
    """Finds the plan of one forward that was traced."""

    def __init__(self, watched: Watched, implementation: str | None) -> None:
        view, self._calls, self._input_ids, self._positions, self._places, *_ = watched
        self._attended, self._spans, self._counts = watched.attended, watched.spans, False
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
        # What gives a value of positions, and its number among all that is given.
        self._called: dict[Value, tuple[CallPlan, int] | None] = {}
        self._now: dict[Value, Place] = {}  # what may be read of the layer now
        self._left: dict[Value, nn.Module] = {}  # products of the layer that no part has
        # What products give, and what modules give of tokens and positions alone.
        self._products: dict[Value, nn.Module] = {}
        self._makers: dict[Value, list[tuple[nn.Module, Called, int]]] = {}
        for module, calls in self._calls.items():
            for call in calls:
                for place, made in enumerate(call.made):
                    self._makers.setdefault(made, []).append((module, call, place))
            is_one = len(calls) == 1 and isinstance(calls[0].out, Tensor)
            if isinstance(module, PRODUCTS) and is_one:
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
            self._called[value] = self._called[value] or self._look_up(value)
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
        tensors[words.ZEROS_GIVEN] = torch.zeros_like(self._positions)
        require(any(x is each for x in tensors for each in given), "it looks at no token")
        # Such as of tokens in the cache, from which a module counts positions.
        require(int not in map(type, given), "it gets a number")
        has_products = any(isinstance(each, _LINEARS) for each in module.modules())
        require(not has_products, "torch's products of several tokens depend on how many")
        out = module(*call.args, **call.kwargs)  # what it gave may have been written to
        for other in (0.0, 1.0):
            tensors[words.STATES_GIVEN] = torch.full_like(self._states.tensor, other)
            pairs = zip(made_by(plan, module, tensors), tensors_of(out), strict=True)
            is_same = all(torch.equal(*pair) or is_near(*pair) for pair in pairs)
            require(is_same, "it looks at more than tokens")
        return plan

    def _look_up(self, value: Value) -> tuple[CallPlan, int] | None:
        """Return the lookup in a module's tensor, by positions alone, that gives a value; or None.

        If these are made of nothing that a forward gets, the model counts places in the text.
        """
        node = value.node
        if node is None or node.name not in _LOOKUPS or len(node.ins) != 2:
            return None
        table, rows = node.ins
        held, counts = self._held.get(id(table.tensor)), self._rows.is_fixed(rows)
        base = self._places if counts else self._positions
        is_known = node.args[1] in (rows, [rows], 0) and rows.tensor.numel() == base.numel()
        if held is None or not is_known:
            return None
        offset, *others = {*(rows.tensor.long() - base).flatten().tolist()}
        self._counts |= counts and not others
        given = words.PLACES_GIVEN if counts else words.POSITIONS_GIVEN
        return None if others else (CallPlan(held.module, (given,), {}, held.name, offset), 0)

    def _program(
        self,
        results: Sequence[tuple[Value, Place]],
        given: Mapping[Value, Place],
    ) -> ProgramPlan:
        """Return the program of some results.

        Args:
            results: where each is written.
            given: where other values lie that the program may read.
        """
        with self._knowing(given):
            source = Writer(self._rows, [x for x, _ in results], self._is_given).source()
            places: list[tuple[Value, Any]] = [(x, self._place_of(x)) for x in source.inputs]
        places += [(value, self._constant_of(value)) for value in source.constants]
        sized = [(place, self._rows.layout(value).size) for value, place in [*places, *results]]
        taken = [f"row(given[0], {source.num_scratch})"]
        for number, (place, size) in enumerate(sized, 1):
            is_whole = type(place) is Place and place.word == words.POSITIONS
            taken.append(f"{'integers' if is_whole else 'row'}(given[{number}], {size})")
        of_program = source.tables, source.num_scratch
        return ProgramPlan(source.text, tuple(taken), tuple(sized), *of_program)

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

    def _columns_plan(self, columns: Columns) -> ProgramPlan:
        constants = (
            self._constant_of(each)._replace(first=first, step=step)
            for each, first, step in columns.constants
        )
        return of_columns(columns.text, len(columns.inputs), constants)

    # --- the whole --------------------------------------------------------------------------------

    def plan(self) -> DecoderPlan:
        attended = self._attended
        require(bool(attended), "no attention is found, transformers' or written out")
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
        ahead = *self._embedding(states), *self._inputs(modules, states)
        names = {module: name for name, module in self._view.named_modules()}
        layers, alike = list[LayerPlan](), list[Any]()
        for self._number, module in enumerate(modules):
            alike.append(self._likeness(module, by_layer.get(module)))
            first = alike.index(alike[-1])
            try:
                states = self._begun(module, states)
                if first < self._number:
                    pairs = zip(modules[first].modules(), module.modules(), strict=True)
                    layers.append(_with_others(layers[first], dict(pairs)))
                    self._keys.setdefault(by_layer[module].key, self._number)
                else:
                    layers.append(self._layer(module, by_layer.get(module), states))
            except UnsupportedForwardError as error:
                raise UnsupportedForwardError(f"{names[module]}: {error}") from None
            states = self._value_made(module)
            self._rows.give(states, 1)
        head: Any = self._view.get_output_embeddings()
        require(type(head) in _LINEARS and head in self._calls, "its head is not a linear layer")
        last = *self._before_head(head, states), self._of_head(head)
        span_of = dict(zip(by_layer, self._spans, strict=True))
        reach = min(each.num_slots or math.inf for each in self._spans)
        kinds = tuple(map(span_of.get, modules))
        of_layers = kinds, ahead, tuple(layers), last, head, modules, self._counts
        return DecoderPlan(states.shape[-1], reach, (), *of_layers)

    def _require_in_order(self, value: Value) -> None:
        """Refuse a value that has its tokens elsewhere than along its second axis."""
        is_in_order = self._rows.layout(value) is self._rows.of_tokens(value.shape, 1)
        require(is_in_order, "tokens are in another order than in the text")

    def _phases_to(
        self, results: dict[Value, Place], known: dict[Value, Place]
    ) -> tuple[tuple[Any, ...], ProgramPlan | None]:
        """Return phases outside layers that make some values; see `_chained`."""
        self._now, self._left = known, self._products
        return self._chained([*self._in_products(self._needed(results))], known, results)

    def _before_head(self, head: nn.Module, states: Value) -> Iterator[Any]:
        """Yield the phases between the last states and the head: rows, maybe products."""
        given = self._value_given(head)
        self._require_in_order(given)
        ends = {given: Place(words.NORMED)}
        phases, program = self._phases_to(ends, {states: Place(words.STATES)})
        for number, phase in enumerate((*phases, RowsStep(program))):
            is_later = number > 0 and type(phase) is RowsStep
            yield phase._replace(tokens=words.KEPT_ROWS if is_later else words.KEPT_TOKENS)

    def _of_head(self, head: nn.Module) -> ProductsPlan:
        made, logits = self._value_made(head), self._trace.value(self._logits)
        self._now = {}
        columns = self._columns(logits)
        is_of_head = [(each, first) for each, first, _ in columns.inputs] == [(made, 0)]
        require(is_of_head, "its logits are not what its head gives")
        finish = None if columns.is_copy else self._columns_plan(columns)
        product = self._product(head)
        of_head = (product,), product.num_inputs, words.NORMED, words.LOGITS, finish
        return ProductsPlan(*of_head, tokens=words.KEPT_TOKENS)

    def _embedding(self, states: Value) -> tuple[Any, ...]:
        """Return the phases that make the first states of tokens and positions."""
        phases, program = self._phases_to({states: Place(words.STATES)}, {})
        phases = *phases, RowsStep(program)
        given = [(*each.args, *each.kwargs.values()) for each in _calls_of(phases)]
        is_known = any(words.TOKENS_GIVEN in each for each in given)
        require(is_known, "its first layer does not get what an embedding gives")
        return phases

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
        with suppress(UnsupportedForwardError):
            size = self._rows.layout(results[0]).size
            ends = [Place(words.INPUTS, size * i, size * len(results)) for i in range(len(results))]
            pairs = [*zip(results, ends, strict=True)]
            phases, rows = self._phases_to(dict(pairs), {states: Place(words.STATES)})
            self._given = dict(zip(modules, pairs, strict=True)) if phases else {}
            return (*phases, RowsStep(None, rows)) if phases else ()
        return ()

    # --- a layer ----------------------------------------------------------------------------------

    def _likeness(self, layer: nn.Module, attended: Attended | None) -> Any:
        """Return what is equal for layers of which one plan holds, each with its own parameters.

        These are the operators that ran in a layer outside its products, with all their arguments,
        and its modules. A layer without attention, or with experts, is like no other.
        """
        if attended is None or experts_in(layer, self._calls) is not None:
            return object()
        modules = {each: number for number, each in enumerate(layer.modules())}
        products = {made: each for made, each in self._products.items() if each in modules}
        call, seen = self._calls[layer][0], self._trace.seen
        inside = {value for each in products.values() for value in seen[self._calls[each][0].seen]}
        known: dict[Value, Any] = {each: modules[module] for each, module in products.items()}
        known[call.given[0]] = "states"

        def told(each: Any) -> Any:
            if type(each) is Value:
                held = self._held.get(id(each.tensor))
                if each in known or held is None or held.module not in modules:
                    return known.get(each, id(each))
                return modules[held.module], held.name
            if isinstance(each, (list, tuple)):
                return [*map(told, each)]
            return repr(each) if type(each) in _TOLD else id(each)

        made = list[Any]()
        for value in seen[call.seen]:
            if value.node is not None and value not in inside:
                given = told(value.node.args), told([*value.node.kwargs.items()])
                kind = value.place, value.shape, value.tensor.dtype, told(value.number)
                made.append((value.node.func, given, kind))
                known[value] = "made", len(made)
        sizes = [size_of(each) for each in products.values()]
        calls = [
            (type(each), [told([x.given, x.made]) for x in self._calls.get(each, ())])
            for each in modules
        ]
        is_causal = getattr(attended.module, "is_causal", None)
        settings = modules[attended.module], told([*attended.kwargs.items(), is_causal])
        place = self._given[layer][1] if layer in self._given else None
        return made, sizes, calls, told(attended[1:5]), settings, place

    def _begun(self, layer: nn.Module, states: Value) -> Value:
        """Return the states that a layer gets; they must be those that the one before it gives."""
        got = self._value_given(layer)
        is_same = got is states or torch.equal(got.tensor, states.tensor)
        require(is_same, "a layer does not get what the one before it gives")
        self._rows.give(got, 1)
        return got

    def _layer(self, layer: nn.Module, attended: Attended | None, got: Value) -> LayerPlan:
        """Return the plan of a layer, which gets some states."""
        result, modules = self._value_made(layer), {*layer.modules()}
        known = {got: Place(words.STATES)}
        if layer in self._given:
            value, known[value] = self._given[layer]
            self._rows.give(value, 1)
        self._now = known
        self._left = {made: each for made, each in self._products.items() if each in modules}
        if attended is None:
            parts = self._convolved(layer)
        else:
            parts = self._latent(attended) or self._attending(attended)
        experts = self._experts(layer)
        with self._knowing({x: y for part in (*parts, *experts) for x, y in part.outs.items()}):
            needed = self._needed([result])
        parts += [*self._in_products(needed, fuses=True), *experts]
        phases, at_end = self._chained(parts, known, {result: Place(words.STATES)})
        self._require_in_order(result)
        return LayerPlan(phases, at_end)

    def _chained(
        self,
        parts: Sequence[_Part],
        known: dict[Value, Place],
        ends: dict[Value, Place],
    ) -> tuple[tuple[Any, ...], ProgramPlan | None]:
        """Return the phases of parts, with a program before each, and the program behind them.

        What a part gives is read where it lies, until another part writes there. Then, and if a
        program has made it, it is kept for later programs.

        Args:
            parts: in their order.
            known: what lies there all the time.
            ends: what the last program writes.
        """
        wanted, reads, lying = list[dict[Value, Place]](), list[int](), dict[int, Value]()
        for given, outs, plan in parts:
            word, places = words.NORMED, given
            if type(plan) is ProductsPlan and not given:
                word = plan.given
            elif type(plan) is ProductsPlan:
                (value,) = given
                there = [each for each, other in lying.items() if other is value]
                word, places = (there[0], {}) if there else (words.NORMED, given)
                lying[word] = value
            whole = words.ATTENDED, words.INNER
            lying |= {place.word: out for out, place in outs.items() if place.word in whole}
            wanted.append(places)
            reads.append(word)
        wanted.append(ends)
        # The first program that knows a value, and the last one that reads it where it is made.
        made, last = dict[Value, int](), dict[Value, int]()
        needs = list[list[Value]]()  # what each program reads
        for number, places in enumerate(wanted):
            with self._knowing(dict.fromkeys(made, Place(0))):
                order, found = slice_of(self._rows, [*places], self._is_given)
            needs.append(found)
            for value in order:
                is_float, meaning = value.tensor.dtype is torch.float32, self._rows.meaning(value)
                if is_float and not (meaning.layout.is_shared or meaning.is_copied):
                    made[value] = last[value] = number
            for out, place in parts[number].outs.items() if number < len(parts) else ():
                later = range(number + 1, len(parts))
                over = (x for x in later if place.word in {y.word for y in parts[x].outs.values()})
                made[out], last[out] = number + 1, next(over, len(parts))
        kept = [x for x, end in last.items() if any(x in need for need in needs[end + 1 :])]
        saved, readable = self._side_by_side(words.SAVED, kept), {**known}
        phases, program = list[Any](), None
        for number, places in enumerate(wanted):
            now = {x: place for x, place in saved.items() if made[x] < number}
            now |= {x: place for x, place in readable.items() if last.get(x, number) >= number}
            results = [(x, place) for x, place in saved.items() if made[x] == number]
            results += places.items()
            program = self._program(results, now) if results else None
            if number < len(parts):
                phases += _with_program(program, parts[number].plan, reads[number])
                readable |= parts[number].outs
        return tuple(phases), program

    def _side_by_side(self, word: int, values: Iterable[Value]) -> dict[Value, Place]:
        """Return the places of values in one row."""
        sizes = {each: self._rows.layout(each).size for each in values}
        firsts = accumulate(sizes.values(), initial=0)
        step = sum(sizes.values())
        return {each: Place(word, first, step) for each, first in zip(sizes, firsts, strict=False)}

    def _needed(self, values: Iterable[Value]) -> list[Value]:
        """Return the products behind values, and behind other products, in the order of calls."""
        found, todo = set[Value](), [*values]
        while todo:
            _, ends = slice_of(self._rows, [todo.pop()], self._is_given)
            new = {each for each in ends if each in self._left} - found
            found |= new
            todo += [self._value_given(self._left[each]) for each in new]
        return [each for each in self._left if each in found]

    def _origin(self, value: Value) -> Value:
        """Return what a value has all numbers of, in the same order; itself if of nothing."""
        every = np.arange(self._rows.layout(value).size)
        origin, places = self._rows.narrowed(value, every)
        is_whole = self._rows.layout(origin).size == len(every) and np.array_equal(places, every)
        return origin if is_whole else value

    def _in_products(self, values: Sequence[Value], *, fuses: bool = False) -> Iterator[_Part]:
        """Yield the parts that give products, in the order of calls, those of equal inputs as one.

        Products of what lies among these, as in low-rank adapters, read it there and are one.

        Args:
            values: the products, which are taken from those that are left.
            fuses: whether what becomes of their columns one by one is made with them.
        """
        self._left = {each: module for each, module in self._left.items() if each not in values}
        modules = {each: self._products[each] for each in values}
        givens = {each: self._origin(self._value_given(x)) for each, x in modules.items()}
        outs = dict[Value, Place]()
        while givens:
            lying, outs = outs if len(outs) > 1 else {}, {}
            within, first = [x for x in givens if givens[x] in lying], next(iter(givens.values()))
            alike = within or [each for each, given in givens.items() if given is first]
            alike = alike[: words.MOST_PRODUCTS]
            given = givens[alike[0]]
            wide = Place(words.NORMED, 0, self._rows.layout(given).size)
            places = [lying.get(givens[each], wide) for each in alike]
            made = tuple(
                self._product(modules[each])._replace(start=place.first)
                for each, place in zip(alike, places, strict=True)
            )
            word, _, row, _ = places[0]
            target = words.SECONDS if within else words.MIXED
            plan = ProductsPlan(made, row, word, target)
            givens = {each: other for each, other in givens.items() if each not in alike}
            for taken in [*givens.values()][:1] if fuses and not within else ():
                with suppress(UnsupportedForwardError):
                    plan, outs = self._fused(alike, taken), {taken: Place(words.INNER)}
            outs = outs or self._side_by_side(target, alike)
            yield _Part({} if within else {given: wide}, outs, plan)

    def _fused(self, made: Sequence[Value], taken: Value) -> ProductsPlan:
        """Return products whose columns, one by one, make the numbers of a value."""
        columns = self._columns(taken)
        inputs = [each for each, *_ in columns.inputs]
        is_known = {*inputs} == {*made} and len(inputs) <= 2 and not columns.is_copy
        require(is_known, "it is not made column by column")
        products = tuple(
            self._product(self._products[each], first, columns.size)
            for each, first, _ in columns.inputs
        )
        of_plan = words.NORMED, words.INNER, self._columns_plan(columns)
        return ProductsPlan(products, products[0].num_inputs, *of_plan)

    def _attending(self, attended: Attended) -> list[_Part]:
        """Return the attention of a layer."""
        (_, num, _, size), (_, num_keys, _, of_value) = attended.query.shape, attended.value.shape
        query, key, value, result = attended[1:5]
        self._rows.give(result, 1)
        keys_of = self._keys.setdefault(key, self._number)
        is_shared = keys_of < self._number
        wanted = [query] if is_shared else [query, key, value]
        is_of_heads = all(
            self._rows.layout(each) is self._rows.of_tokens(each.shape, 2) for each in wanted
        )
        require(is_of_heads, "attention gets tokens in another order")
        if not is_shared:
            self._require_cached(attended.module, key.tensor, value.tensor)
        given = self._side_by_side(words.QUERIES, wanted)
        plan = self._attention(attended, given, num * of_value, num, num_keys, size, of_value)
        if is_shared:
            plan = plan._replace(keys_of=keys_of, numbers=(*plan.numbers, (words.READS, 1)))
        return self._mixing(given, result, plan)

    def _attention(
        self, attended: Attended, given: dict[Value, Place], size: int, *heads: int
    ) -> MixingPlan:
        """Return the plan of an attention.

        Args:
            attended: its settings.
            given: where queries lie, then what is cached.
            size: numbers of a token behind it.
            heads: how many there are, of queries and of keys; numbers of a key and of a value;
                further numbers of keys, in the place of values, which then are the keys.
        """
        _, num_keys, of_key, of_value, more = (*heads, 0)[:5]
        scaling, softcap, sinks = _settings_of(attended, self._implementation)
        first, second, *_ = [*given.values()] * 2
        of_scores = (np.float32(x).view(np.int32).item() for x in (scaling, softcap))
        of_rows = words.NUM_QUERIES, second.first, size, first.step, *of_scores
        return MixingPlan(
            (("attention", 0), ("attention", 1)),
            (of_rows, (words.NUM_HEADS, *heads)),
            () if sinks is None else ((words.SINKS, Constant(sinks, "sinks")),),
            (("head_size", max(of_key + more, of_value)),),
            tuple((1, num_keys, 1, each) for each in (of_key, more or of_value)),
            of_value,
        )

    def _mixing(self, given: dict[Value, Place], result: Value, plan: MixingPlan) -> list[_Part]:
        """Return what mixes tokens, behind the products that it needs, or that join its result."""

        def found(module: nn.Module) -> list[Value]:
            with suppress(UnsupportedForwardError):
                return slice_of(self._rows, [self._value_given(module)], self._is_given)[1]
            return []

        with self._knowing({result: Place(words.ATTENDED)}):
            behind = next((x for x in map(found, self._left.values()) if result in x), [])
            require(bool(behind), "no product gets the result of attention")
            values = self._needed([*given, *behind])
        outs = {result: Place(words.ATTENDED)}
        return [*self._in_products(values), _Part(given, outs, plan)]

    def _experts(self, layer: nn.Module) -> list[_Part]:
        """Return the experts of a layer, behind what chooses them; nothing if it has none."""
        module = experts_in(layer, self._calls)
        if module is None:
            return []
        out = self._value_made(module)
        call, *others = self._calls[module]
        chosen = [each for each in call.given if each.tensor.dtype is torch.int64]
        is_known = not others and (len(call.given), len(chosen)) == (3, 1)
        require(is_known, f"{type(module).__name__} is called otherwise")
        states, shares = (each for each in call.given if each not in chosen)
        self._rows.follow(out, states)
        scores, router, taken = self._scores([*chosen, shares])
        inside = {*module.modules(), router}
        left: dict[Value, Any] = {x: y for x, y in self._left.items() if y not in inside}
        given, num, hidden = self._origin(states), scores.shape[-1], taken.shape[-1]
        require(self._origin(taken) is given, "experts and their router get different states")
        gates = {
            x: each
            for x, each in left.items()
            if getattr(each, "out_features", 0) == 1
            and self._origin(self._value_given(each)) is given
        }
        self._left = {x: each for x, each in left.items() if x not in gates}
        asked = ProductPlan(router, 0, num, hidden), *map(self._product, gates.values())
        scoring = ProductsPlan(asked, hidden, words.NORMED, words.SCORES)
        routed = [each.tensor for each in (states, *chosen, shares)]
        experts = read_experts(module, call, *routed, num=num)
        results = {chosen[0]: Place(words.CHOSEN), shares: Place(words.SHARES)}
        outs = self._side_by_side(words.SCORES, [scores, *gates])
        return [
            _Part({given: Place(words.NORMED)}, outs, scoring),
            _Part(results, {out: Place(words.RESULT)}, experts),
        ]

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

    def _latent(self, attended: Attended) -> list[_Part]:
        """Return attention to latents; nothing for another attention.

        One product makes values and the first numbers of keys, head by head.
        """
        query, key, value, result = attended[1:5]
        (_, num_heads, _, size), num_value = key.shape, value.shape[-1]
        made, of_values = self._rows.narrowed(value, np.arange(num_heads * num_value))
        straight, heads = int(of_values[0]), np.arange(num_heads)[:, None]
        if not 0 < straight < size or made not in self._products:
            return []
        whole = heads * (straight + num_value) + np.arange(straight + num_value)
        places_of_keys = (heads * size + np.arange(straight)).reshape(-1)
        with_keys, of_keys = self._rows.narrowed(key, places_of_keys)
        is_one = with_keys is made and np.array_equal(whole[:, straight:].reshape(-1), of_values)
        if not is_one or not np.array_equal(whole[:, :straight].reshape(-1), of_keys):
            return []
        expand: Any = self._left.pop(made)
        self._rows.give(result, 1)
        latent, turned = self._value_given(expand), size - straight
        ends = heads * size + np.arange(straight, size)
        shared, of_shared = self._rows.narrowed(key, ends.reshape(-1))
        is_shared = np.array_equal(of_shared, np.tile(np.arange(turned), num_heads))
        require(is_shared, "the ends of its keys are not those of all heads")
        self._require_cached(attended.module, latent.tensor, key.tensor[0, 0, :, straight:])
        rank = latent.shape[-1]
        # Queries for latents come first, which are made of these.
        sizes = {query: num_heads * size, latent: rank, shared: turned}
        *firsts, step = accumulate(sizes.values(), initial=num_heads * (rank + turned))
        given = {x: Place(words.QUERIES, at, step) for x, at in zip(sizes, firsts, strict=True)}
        sizes_of_heads = num_heads, 1, rank, rank, turned
        plan = self._attention(attended, given, num_heads * num_value, *sizes_of_heads)
        plan = plan._replace(
            runs=tuple((name, each) for each in range(2) for name in ("attention", "latents")),
            numbers=(*plan.numbers, (words.STRAIGHT, straight, turned, num_value)),
            sizes=(*plan.sizes, ("of_latents", rank + num_value)),
            at_once=1,
            expand=self._product(expand),
        )
        return self._mixing(given, result, plan)

    def _require_cached(self, module: Any, *cached: Tensor) -> None:
        """Refuse an attention that does not cache these rows of tokens."""
        (call, *_), caching = self._calls[module], DynamicCache()
        given = dict(zip(inspect.signature(module.forward).parameters, call.args, strict=False))
        given |= call.kwargs
        names = [CACHE, *(name for name in given if name.endswith("_past"))]
        with Attempt():  # some cache more
            module(**{**given, names[-1]: caching})
        held = [
            x for each in caching.layers if each.is_initialized for x in (each.keys, each.values)
        ]
        pairs = zip(held, cached, strict=False)
        is_cached = [
            each.numel() == rows.numel() and is_near(each.reshape(rows.shape), rows)
            for each, rows in pairs
        ]
        require(is_cached == [True] * len(cached), "its cache has other numbers than it attends to")

    def _convolved(self, layer: nn.Module) -> list[_Part]:
        """Return the short convolution of a layer, or its recurrence behind one."""
        found = [each for each in layer.modules() if type(each) is nn.Conv1d]
        require(len(found) == 1, "it attends to nothing, and is no short convolution")
        (convolution,) = found
        inside = {*self._parents[convolution].modules()}
        called = [each for each in self._calls if each in inside and isinstance(each, PRODUCTS)]
        channels, reason = convolution.out_channels, "its convolution is not one of channels"
        require(convolution.groups == channels and len(called) > 1, reason)
        made = [
            each
            for each in self._trace.made_by("convolution")
            if _root(each.node.ins[1]) is convolution.weight  # type: ignore[union-attr]
        ]
        require(len(made) == 1, reason)
        given: Value = made[0].node.ins[0]  # type: ignore[union-attr]
        (taps,) = convolution.kernel_size
        named = (words.CONVOLUTION, "weight"), (words.CONVOLUTION_BIAS, "bias")
        plan = MixingPlan(
            (("convolution", 0),),
            ((words.ATTENDED_SIZE, channels), (words.TAPS, taps)),
            tuple((word, Constant(convolution, name)) for word, name in named),
            (("taps", taps),),
            ((1, 1, 1, channels),),
            channels,
        )
        if self._parents[convolution]._parameters:
            return self._recurrent(plan, convolution, given, called)
        made += [x for x in self._trace.made_by("slice") if x.node.ins[0] is made[0]]  # type: ignore[union-attr]
        result = next((each for each in made if each.shape == given.shape), made[0])
        wanted = convolved(convolution, given.tensor[0].T)
        require(is_near(result.tensor[0].T.contiguous(), wanted), reason)
        self._rows.give(result, 2)
        return self._mixing({given: Place(words.QUERIES)}, result, plan)

    def _recurrent(
        self, plan: MixingPlan, convolution: nn.Conv1d, given: Value, called: Sequence[nn.Module]
    ) -> list[_Part]:
        """Return the recurrence of a layer: products, a convolution, a state, a gated norm."""
        module: Any = self._parents[convolution]
        firsts = {*map(self._value_made, called[:-1])}
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
                return firsts.issuperset(slice_of(self._rows, [value], self._is_given)[1])
            return False

        decays = [x for x in self._trace.made_by("mul") if _is_decay(x) and of_layer(x)]
        require(len(decays) == 1, "its recurrence has no decay")
        shape, with_decays = decays[0].shape, decays[0].node.ins[1]  # type: ignore[union-attr]
        sigmoids = [x for x in self._trace.made_by("sigmoid") if x.shape == shape and of_layer(x)]
        pairs = self._side_by_side(words.INNER, [given, decays[0], [*sigmoids, with_decays][0]])
        order, _ = slice_of(self._rows, [*pairs], self._is_given)
        used = {self._held[x].name for x in self._held.keys() & {id(y.tensor) for y in order}}
        own = [name for name, each in module._parameters.items() if each is not None]
        names = [name for name in own if name not in used]
        numbers = [x.tensor[0].T if x is given else x.tensor[0] for x in pairs]
        found = read_recurrence(module, convolution, numbers, result.tensor, names)
        of_heads = words.KEY_HEADS, *found.heads, *found.channels, int(found.is_delta)
        size = words.ATTENDED_SIZE, result.tensor.numel() // len(numbers[1])
        skips = () if found.skips is None else ((words.SKIPS, Constant(*found.skips)),)
        (taps,) = convolution.kernel_size
        plan = plan._replace(
            runs=(("recurrence", 0), ("recurrence", 1)),
            numbers=(*plan.numbers, size, of_heads, (words.GIVEN_SIZE, found.row)),
            weights=(*plan.weights, *skips),
            sizes=(*plan.sizes, ("of_recurrence", found.num_scratch(taps))),
            at_once=1,
            recurrence=found,
        )
        return self._mixing(pairs, result, plan)

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
                if value.shape == self._input_ids.shape and not value.any():
                    return words.ZEROS_GIVEN  # the types of tokens
                if torch.equal(value, self._input_ids):
                    return words.TOKENS_GIVEN
                if value.shape == (3, *self._positions.shape) and is_alike(value):
                    return words.AXES_GIVEN
                require(torch.equal(value, self._positions), "its positions have several axes")
                return words.POSITIONS_GIVEN
            return words.STATES_GIVEN if isinstance(value, Tensor) else value

        kwargs = {name: kept(value) for name, value in call.kwargs.items()}
        return CallPlan(module, tuple(map(kept, call.args)), kwargs)

    def _product(self, module: Any, first: int = 0, num: int | None = None) -> ProductPlan:
        """Return the plan of some columns of a linear layer, by default all."""
        name = type(module).__name__
        is_linear = type(module) in PRODUCTS or self._is_linear(module)
        require(is_linear, f"{name} is not a plain linear layer")
        num_columns, num_inputs = size_of(module)
        return ProductPlan(module, first, num or num_columns, num_inputs)

    def _is_linear(self, module: nn.Linear) -> bool:
        """Return whether a linear layer of a class of transformers gives what a plain one gives."""
        held: dict[str, Any] = {**module._parameters}
        given = self._value_given(module).tensor
        is_plain = held.keys() == {"weight", "bias"} and not module._modules and not module._buffers
        is_plain = is_plain and type(module).__module__.startswith("transformers.")
        return is_plain and is_near(module(given), nn.functional.linear(given, **held))


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
    is_masked = implementation == "eager" and attended.mask is not None
    require(is_causal is True or is_masked, "its tokens see those behind them")
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


def made_by(plan: CallPlan, module: nn.Module, tensors: Mapping[Any, Tensor]) -> list[Tensor]:
    """Return what a call of a module gives, with tensors instead of placeholders."""

    def put(value: Any) -> Any:  # which may have no hash
        return next((each for name, each in tensors.items() if name is value), value)

    args, kwargs = [*map(put, plan.args)], {name: put(each) for name, each in plan.kwargs.items()}
    if plan.table:
        return [nn.functional.embedding(args[0] + plan.offset, getattr(module, plan.table))]
    return tensors_of(module(*args, **kwargs))


def _with_program(program: ProgramPlan | None, plan: Any, word: int) -> Iterator[Any]:
    """Yield the phases of a part, whose products read at a word, and of the program before it."""
    if type(plan) is ProductsPlan:
        if program is not None:
            yield RowsStep(program)
        yield plan._replace(given=word)
    elif type(plan) is MixingPlan and plan.runs[0] == ("attention", 0):
        yield plan._replace(rows=program)
    else:
        yield from (RowsStep(None, program), plan)


def of_columns(text: str, num_inputs: int, constants: Iterable[Constant] = ()) -> ProgramPlan:
    """Return the plan of a program of columns, which gets at most two columns and constants."""
    given = ["given[0]", *(f"row(given[{2 + each}], given[0])" for each in range(num_inputs))]
    places = [(each, 1) for each in constants]
    for number, (each, _) in enumerate(places, 4):
        given.append(f"row(given[{number}], {'given[0]' if each.step else 1})")
    return ProgramPlan(text, (*given, "row(given[1], given[0])"), tuple(places))


def _is_decay(value: Value) -> bool:
    """Return whether a value is minus powers of e, one for each head, times numbers of tokens."""
    ins = value.node.ins if value.node is not None else []
    is_pair = len(ins) == 2 and ins[0].node is not None and ins[0].node.name == "neg"
    return is_pair and ins[0].shape == value.shape[-1:] and ins[1].shape == value.shape


def _calls_of(phases: Iterable[Any]) -> list[CallPlan]:
    """Return the calls whose results programs read before some phases."""
    programs = (each.before for each in phases if type(each) is RowsStep)
    places = [place for program in programs if program is not None for place, _ in program.places]
    return [x.made for x in places if type(x) is Place and x.made is not None]


def _root(value: Value) -> Tensor:
    """Return what a value is a view of."""
    while value.node is not None and value.node.ins:
        value = value.node.ins[0]
    return value.tensor
