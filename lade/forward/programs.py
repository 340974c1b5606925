"""Programs of rows: what small operators make of one token's numbers, as source of compiled code.

A value of a trace is known as the numbers of each token, in their order. Moves are tables of
indices, and vanish; maps are joined into one expression; what is summed, joined of parts, or used
several times becomes a row in the thread's memory. All tokens must have the same tables.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lade.forward.comparing import UnsupportedForwardError, require
from lade.forward.operators import CHOICES, JOINS, MAKERS, MAPS, MOVES, REDUCTIONS, number
from lade.forward.trace import Node, Value

Table = NDArray[np.int64]
_DTYPES = {torch.float32, torch.complex64, torch.int64, torch.bool}
_MOST_CHOSEN = 17  # `_experts.select`
_MIXED = "numbers of several tokens are mixed"
_UNLIKE = "tokens take other numbers than each other"


class Layout:
    """Which numbers of a tensor are whose.

    Attributes:
        shape: the tensor's.
        tokens: int64 [numbers], the token of each; -1 for what all tokens share.
        is_one: whether all numbers are the same.
        is_shared: whether all tokens share all numbers.
        rows: int64 [num_tokens, size], the indices of each token's numbers; of what all share,
            one row.
        places: int64 [numbers], of each number in its row; 0 if all are the same.
    """

    def __init__(self, shape: tuple[int, ...], tokens: Table, is_one: bool) -> None:
        self.shape, self.tokens, self.is_one = shape, tokens, is_one
        self.is_shared = bool((tokens < 0).all())
        order = np.argsort(tokens, kind="stable")
        num = 1 if self.is_shared else int(tokens.max(initial=0)) + 1
        wanted = np.repeat(np.arange(num), len(order) // num)
        is_even = self.is_shared or np.array_equal(tokens[order], wanted)
        require(is_even, "a tensor has more numbers of some tokens")
        self.rows = order.reshape(num, -1)
        self.places = np.zeros_like(order)
        if not is_one:
            self.places[self.rows] = np.arange(self.size)

    @property
    def size(self) -> int:
        """How many numbers a token has."""
        return self.rows.shape[1]

    def taken(self, flat: Table, own: Table) -> Table:
        """Return the places of numbers in their token's row, which must be those of all tokens.

        Args:
            flat: indices of the numbers, [num_tokens, …].
            own: the tokens that take them, of a shape that fits; -1 for what all share.
        """
        owners, places = self.tokens[flat], self.places[flat]
        require(bool(((owners == own) | (owners < 0)).all()), _MIXED)
        require(bool((places == places[:1]).all()), _UNLIKE)
        found: Table = places[0]
        return found


class Taken(NamedTuple):
    """Numbers that are those of another value."""

    where: Table | None  # places in the result's row; None for all
    of: Value
    table: Table  # their places in the other value's row


class Meaning(NamedTuple):
    """What an operator does to a token's numbers: it moves, maps or reduces, or makes them."""

    name: str
    layout: Layout
    parts: tuple[Taken, ...] = ()  # of a reduction one, [results, numbers] flat
    #: Of a map: from the source of its tensors to that of its result.
    write: Callable[..., str] | None = None
    number: float | None = None  # that all results are equal to
    call: str = ""  # of a choice, for each of some rows
    num_rows: int = 0

    @property
    def is_of_rows(self) -> bool:
        """Whether it makes numbers of others that must lie side by side."""
        return self.name in REDUCTIONS or bool(self.call)

    @property
    def is_copied(self) -> bool:
        """Whether numbers are only moved, of one value or several."""
        return self.write is None and bool(self.parts) and not self.is_of_rows


class TokenRows:
    """Finds what each value of a trace is, token by token.

    Args:
        num_tokens: of the traced text.
        look: is called with each value before what made it is looked at; may `give` its layout.
    """

    def __init__(self, num_tokens: int, look: Callable[[Value], object]) -> None:
        self._num_tokens, self._look = num_tokens, look
        self._layouts: dict[Any, Layout] = {}
        self._alike: dict[Any, Meaning] = {}  # by operator and arguments: layers are alike
        self._meanings: dict[Value, Meaning] = {}
        self._given: dict[Value, Layout] = {}
        self._following: dict[Value, Value] = {}

    # --- layouts ----------------------------------------------------------------------------------

    def give(self, value: Value, axis: int) -> None:
        """Say that a large operation makes a value, and which axis has the tokens."""
        if value not in self._given:
            self._given[value] = self.of_tokens(value.shape, axis)

    def give_in_order(self, value: Value) -> None:
        """Say that a large operation makes a value, one token's numbers after another's."""
        tokens = np.arange(value.tensor.numel()) * self._num_tokens // value.tensor.numel()
        self._given[value] = self._layout(value.shape, tokens.reshape(value.shape))

    def follow(self, value: Value, given: Value) -> None:
        """Say that a module makes a value of the rows of another one."""
        self._following[value] = given

    def of_tokens(self, shape: tuple[int, ...], axis: int) -> Layout:
        """Return the layout of a tensor with an axis of tokens."""
        require(shape[axis] == self._num_tokens, "a large operation has other tokens")
        view = [-1 if each == axis else 1 for each in range(len(shape))]
        return self._layout(shape, np.arange(self._num_tokens).reshape(view))

    def layout(self, value: Value) -> Layout:
        """Return the layout of a value."""
        if value not in self._given and value not in self._meanings:
            self._look(value)
            if value in self._following:
                self._given[value] = self._beside(self._following[value], value.shape)
        return self._given[value] if value in self._given else self.meaning(value).layout

    def _beside(self, value: Value, shape: tuple[int, ...]) -> Layout:
        """Return the layout of what is made of each row of a value: its last axis changes."""
        layout = self.layout(value)
        tokens = layout.tokens.reshape(*layout.shape[:-1], -1)
        is_by_row = shape[:-1] == layout.shape[:-1] and bool((tokens == tokens[..., :1]).all())
        require(is_by_row, "a module mixes the rows that it gets")
        return self._layout(shape, tokens[..., :1])

    def _layout(self, shape: tuple[int, ...], tokens: Table, is_one: bool = False) -> Layout:
        tokens = np.broadcast_to(tokens, shape).reshape(-1)
        key = shape, tokens.tobytes(), is_one
        if key not in self._layouts:
            self._layouts[key] = Layout(shape, tokens, is_one)
        return self._layouts[key]

    # --- meanings ---------------------------------------------------------------------------------

    def meaning(self, value: Value) -> Meaning:
        """Return what made a value.

        Raises:
            UnsupportedForwardError: it is no program of rows.
        """
        if value not in self._meanings:
            require(value.tensor.dtype in _DTYPES, f"it computes in {value.tensor.dtype}")
            self._meanings[value] = self._found(value)
        return self._meanings[value]

    def narrowed(self, value: Value, table: Table) -> tuple[Value, Table]:
        """Return what some numbers of a value are copies of, and which numbers of that."""
        while value not in self._given and value not in self._following:
            found = [
                part
                for part in self.meaning(value).parts * self.meaning(value).is_copied
                if part.where is None or np.isin(table, part.where).all()
            ]
            if len(found) != 1:
                break
            (part,) = found
            inside = table if part.where is None else np.searchsorted(part.where, table)
            value, table = part.of, part.table[inside]
        return value, table

    def _found(self, value: Value) -> Meaning:
        node, shared = value.node, np.array(-1)
        if node is None:
            return Meaning("a constant", self._layout(value.shape, shared))
        name, is_cast = node.name, False
        if name == "overwritten":
            return self._of_overwritten(node, value)
        if not node.ins or name in MAKERS:
            made = math.nan if "empty" in name else value.number
            require(made is not None, f"{name} makes numbers that are no parameters")
            return Meaning("a number", self._layout(value.shape, shared, True), number=made)
        if name == "_to_copy":
            is_cast = node.ins[0].tensor.dtype != value.tensor.dtype
        if name in JOINS:
            return self._of_join(node, value)
        operands = node.ins[1:] if name == "copy" else node.ins[: 1 if name in MOVES else None]
        if name in CHOICES and len(node.outs) > 1 and value.place == 0:
            operands = [*operands, node.outs[1]]  # values are read where their indices say
        given = str(_described((node.args, [*node.kwargs.items()])))
        fixed = [] if name not in MOVES else node.ins[1:]  # by which numbers are looked up
        require(all(map(self.is_fixed, fixed)), f"torch's {name} looks up by the text")
        looked = (each.tensor.numpy().tobytes() for each in fixed)
        kind = value.place, value.shape, value.tensor.dtype
        key = node.func, given, kind, *(id(self.layout(each)) for each in operands), *looked
        if key not in self._alike:
            if name in MOVES and not is_cast:
                found = self._of_move(node, value)
            elif name in CHOICES:
                found = self._of_choice(node, value, operands)
            elif name in MAPS or name == "copy" or is_cast:
                found = self._of_map(node, value, operands, is_cast)
            else:
                require(name in REDUCTIONS, f"torch's {name} is no operation on rows")
                found = self._of_reduction(node, value)
            self._alike[key] = found
        found = self._alike[key]
        pairs = zip(found.parts, operands, strict=True)
        return found._replace(parts=tuple(part._replace(of=each) for part, each in pairs))

    def is_fixed(self, value: Value) -> bool:
        """Return whether a value depends on neither tokens nor positions."""
        is_given = value in self._given or value in self._following
        return not is_given and all(map(self.is_fixed, value.node.ins if value.node else ()))

    def _of_move(self, node: Node, value: Value) -> Meaning:
        of, flat = self.layout(node.ins[0]), _moved(node, value, node.ins[:1])
        layout = self._layout(value.shape, of.tokens[flat].reshape(value.shape), of.is_one)
        table = of.taken(flat[layout.rows], self._own(layout))
        return Meaning(node.name, layout, (Taken(None, node.ins[0], table),))

    def _of_join(self, node: Node, value: Value) -> Meaning:
        moved = node.ins
        if node.name == "index_put":
            (before, *fixed, put), adds = node.ins, any(node.args[3:])
            is_known = not adds and all(map(self.is_fixed, fixed))
            require(is_known, "numbers are put where the text says, or added")
            moved = [before, put]
        flat = _moved(node, value, moved)  # of all sources' numbers, one after the other
        ends = np.cumsum([0, *(math.prod(each.shape) for each in moved)])
        which = np.searchsorted(ends, flat, "right") - 1
        return self._joined(node, value, moved, which, flat - ends[which])

    def _of_overwritten(self, node: Node, value: Value) -> Meaning:
        """Return what a tensor is after another one that shares its memory was written to."""
        before, written = (_memory(each.tensor).tolist() for each in node.ins)
        known = {place: index for index, place in enumerate(written)}
        new = np.array([known.get(place, -1) for place in before])
        flat = np.where(new < 0, np.arange(len(new)), new)
        return self._joined(node, value, node.ins, (new >= 0).astype(int), flat)

    def _joined(
        self, node: Node, value: Value, moved: Sequence[Value], which: Table, flat: Table
    ) -> Meaning:
        """Return what takes each number from one of several values, and from which place."""
        used = [index for index in range(len(moved)) if (which == index).any()]
        layouts = {index: self.layout(moved[index]) for index in used}
        tokens = np.full(len(flat), -1)
        for index, source in layouts.items():
            mine = which == index
            tokens[mine] = source.tokens[flat[mine]]
        tokens = tokens.reshape(value.shape)
        if bool((tokens >= 0).any()):  # what all share may be joined to what tokens have
            layout = self.of_tokens(value.shape, _axis_of(tokens))
        else:
            layout = self._layout(value.shape, tokens)
        parts = []
        for index, source in layouts.items():
            where = np.flatnonzero((which == index)[layout.rows[0]])
            rows = layout.rows[:, where]
            require(bool((which[rows] == index).all()), _UNLIKE)
            table = source.taken(flat[rows], self._own(layout))
            parts.append(Taken(where, *self.narrowed(moved[index], table)))
        if len(parts) == 1:
            parts = [parts[0]._replace(where=None)]
        return Meaning(node.name, layout, tuple(parts))

    def _of_map(
        self, node: Node, value: Value, operands: Sequence[Value], is_cast: bool
    ) -> Meaning:
        sources, tokens = [], np.full(value.tensor.numel(), -1)
        for each in operands:
            indices = np.arange(each.tensor.numel()).reshape(each.shape)
            of, indices = self.layout(each), np.broadcast_to(indices, value.shape).reshape(-1)
            mine = of.tokens[indices]
            require(bool(((mine < 0) | (tokens < 0) | (mine == tokens)).all()), _MIXED)
            tokens = np.maximum(tokens, mine)
            sources.append((each, of, indices))
        layout = self._layout(value.shape, tokens.reshape(value.shape))
        own = self._own(layout)
        parts = tuple(
            Taken(None, each, of.taken(indices[layout.rows], own)) for each, of, indices in sources
        )
        if node.name == "copy":
            return Meaning(node.name, layout, parts)
        write = _written_cast(value) if is_cast else _written(node)
        return Meaning(node.name, layout, parts, write)

    def _of_reduction(self, node: Node, value: Value) -> Meaning:
        (source,), of_axes = node.ins, node.args[1:2] or [node.kwargs.get("dim")]
        layout, num_dims, (dims,) = self.layout(source), len(source.shape), of_axes
        dims = range(num_dims) if dims is None or dims == [] else dims
        dims = [each % num_dims for each in ([dims] if isinstance(dims, int) else dims)]
        rest = [each for each in range(num_dims) if each not in dims]
        moved = np.arange(len(layout.tokens)).reshape(layout.shape).transpose(*rest, *dims)
        groups = moved.reshape(value.tensor.numel(), -1)
        owners = layout.tokens[groups]
        require(bool((owners == owners[:, :1]).all()), f"torch's {node.name} mixes tokens")
        made = self._layout(value.shape, owners[:, 0].reshape(value.shape))
        table = layout.taken(groups[made.rows], self._own(made)[..., None])
        return Meaning(node.name, made, (Taken(None, source, table.reshape(-1)),))

    def _of_choice(self, node: Node, value: Value, operands: Sequence[Value]) -> Meaning:
        """Return what is chosen among the numbers of the last axis, or read or written there."""
        num_last = operands[0].shape[-1]
        num = operands[0].tensor.numel() // num_last
        dim = (*node.args, -1)[2 if node.name == "topk" else 1]
        is_last = dim in (-1, len(operands[0].shape) - 1)
        require(is_last, f"torch's {node.name} is along another axis")
        num_made = value.tensor.numel() // num
        tokens = np.full((num, 1), -1)
        for each in operands:
            mine = self.layout(each).tokens.reshape(num, -1)
            tokens = np.maximum(tokens, mine[:, :1])
        layout = self._layout(value.shape, tokens.repeat(num_made, axis=1).reshape(value.shape))
        which, own, parts = layout.rows[:, ::num_made] // num_made, self._own(layout), []
        for each in operands:
            size = each.tensor.numel() // num
            flat = (which[..., None] * size + np.arange(size)).reshape(len(which), -1)
            parts.append(Taken(None, each, self.layout(each).taken(flat, own)))
        name = "gather" if len(operands) > len(node.ins) else node.name
        try:
            call = CHOICES[name](*node.args)
        except (TypeError, ValueError):
            raise UnsupportedForwardError(f"torch's {name} is called otherwise") from None
        require(num_made <= _MOST_CHOSEN or "choose" not in call, "a token chooses too many")
        return Meaning(node.name, layout, tuple(parts), call=call, num_rows=which.shape[1])

    def is_chosen(self, value: Value) -> bool:
        """Return whether all numbers of a value are places of chosen ones."""
        if value in self._given or value.tensor.dtype is not torch.int64:
            return False
        meaning = self.meaning(value)
        parts = meaning.parts if meaning.is_copied else ()
        return bool(meaning.call) or (bool(parts) and all(self.is_chosen(x.of) for x in parts))

    def _own(self, layout: Layout) -> Table:
        """Return the token of each row of a layout, [rows, 1]."""
        return np.full((1, 1), -1) if layout.is_shared else np.arange(len(layout.rows))[:, None]


def _moved(node: Node, value: Value, moved: Sequence[Value]) -> Table:
    """Run a move on the indices of numbers; return which number each result is."""
    start, indices = 0, dict[Value, Tensor]()
    for each in moved:
        end = start + math.prod(each.shape)
        numbers = torch.arange(start, end, dtype=torch.float64, device="cpu").view(each.shape)
        indices[each] = torch.view_as_complex(numbers) if each.tensor.is_complex() else numbers
        start = end

    def put(given: Any) -> Any:
        return indices.get(given, given.tensor) if type(given) is Value else given

    args, kwargs = tree_map(put, (node.args, node.kwargs))
    kwargs = {} if node.name == "_to_copy" else kwargs
    made = [each for each in tree_leaves(node.func(*args, **kwargs)) if isinstance(each, Tensor)]
    result = made[value.place]
    result = torch.view_as_real(result) if result.is_complex() else result
    flat: Table = result.reshape(-1).long().numpy()
    return flat


def _memory(tensor: Tensor) -> Table:
    """Return where each number of a tensor lies in its memory."""
    size = tensor.untyped_storage().nbytes() // tensor.itemsize
    every = torch.arange(size, dtype=torch.int64, device="cpu")
    seen = every.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    flat: Table = seen.reshape(-1).numpy()
    return flat


def _described(each: Any) -> Any:
    if isinstance(each, (list, tuple)):
        return [*map(_described, each)]
    return each.shape if type(each) is Value else each


def _axis_of(tokens: Table) -> int:
    """Return the axis along which tokens change."""
    of = np.where(tokens < 0, np.nan, tokens)
    found = [axis for axis in range(of.ndim) if (np.abs(np.diff(of, axis=axis)) > 0).any()]
    require(len(found) == 1, "numbers of tokens are joined in another way than row by row")
    return found[0]


def _written(node: Node) -> Callable[..., str]:
    """Return a function from the source of a map's tensors to that of its result."""

    def write(*operands: str) -> str:
        given = iter(operands)

        def put(each: Any) -> Any:
            if type(each) is Value:
                return next(given)
            return number(each) if isinstance(each, int | float) else each

        args = [put(each) for each in node.args]
        kwargs = {key: put(each) for key, each in node.kwargs.items()}
        try:
            return MAPS[node.name](*args, **kwargs)
        except (TypeError, KeyError):
            raise UnsupportedForwardError(f"torch's {node.name} is called otherwise") from None

    return write


def _written_cast(value: Value) -> Callable[..., str]:
    name = {torch.float32: "F", torch.int64: "np.int64"}.get(value.tensor.dtype)
    return lambda given: f"({given} != 0)" if name is None else f"{name}({given})"


# --- source ---------------------------------------------------------------------------------------


class Written(NamedTuple):
    """The source of a program, and what it is called with.

    The function `program` takes scratch memory, then inputs, constants and results, as arrays.
    """

    text: str
    num_scratch: int  # numbers of scratch memory
    inputs: tuple[Value, ...]
    constants: tuple[Value, ...]
    tables: tuple[tuple[int, ...], ...]  # of moves that are no sums of steps


class Columns(NamedTuple):
    """What becomes of numbers one by one, and what they are made of.

    The function `program` takes how many they are, inputs, constants and the result.
    """

    text: str
    inputs: tuple[tuple[Value, int, int], ...]  # with the first number, and the step
    constants: tuple[tuple[Value, int, int], ...]
    size: int
    is_copy: bool


class _Leaf(NamedTuple):
    name: str
    table: Table | None  # None for a single number


class _Op(NamedTuple):
    write: Callable[..., str]
    operands: tuple[Any, ...]


def slice_of(
    rows: TokenRows, outputs: Sequence[Value], is_given: Callable[[Value], bool]
) -> tuple[list[Value], list[Value]]:
    """Return the values between given ones and outputs, in order, and those given ones."""
    order, given, seen = list[Value](), list[Value](), set[Value]()
    todo: list[tuple[Value, bool]] = [(each, False) for each in reversed(outputs)]
    while todo:
        value, is_done = todo.pop()
        if is_done:
            order.append(value)
        elif value not in seen:
            seen.add(value)
            if is_given(value):
                given.append(value)
                continue
            todo.append((value, True))
            todo += [(part.of, False) for part in reversed(rows.meaning(value).parts)]
    return order, given


class Writer:
    """Writes the program of some values.

    Args:
        rows: what these are.
        outputs: the values.
        is_given: whether a value is an input.
    """

    def __init__(
        self, rows: TokenRows, outputs: Sequence[Value], is_given: Callable[[Value], bool]
    ) -> None:
        self._rows, self._outputs = rows, outputs
        self._order, self._inputs = slice_of(rows, outputs, is_given)
        self._lines: list[str] = []
        self._named: dict[Value, str] = {each: f"a{i}" for i, each in enumerate(self._inputs)}
        self._constants: dict[Value, str] = {}
        self._tables: dict[tuple[int, ...], str] = {}
        self._num_scratch = self._num_rows = 0

    def source(self) -> Written:
        """Return the program of whole rows."""
        uses = self._uses()
        for value in self._order:
            meaning = self._rows.meaning(value)
            is_map = meaning.write is not None
            is_float = value.tensor.dtype is torch.float32 or self._rows.is_chosen(value)
            is_shared = meaning.layout.is_shared or not is_float
            is_row = uses[value] > 1 and not is_shared if is_map else len(meaning.parts) > 1
            if is_row or meaning.is_of_rows:
                require(is_float, f"torch's {meaning.name} gives no float32")
                self._named[value] = self._made(value, meaning)
        ends = [f"o{index}" for index in range(len(self._outputs))]
        for name, value in zip(ends, self._outputs, strict=True):
            every = np.arange(self._rows.layout(value).size)
            self._loop(_Leaf(name, every), self._tree(value, every))
        given = ["scratch", *(self._named[x] for x in self._inputs), *self._constants.values()]
        head = f"def program({', '.join([*given, *ends])}):"
        text = "\n    ".join([head, *self._lines, "return"]) + "\n"
        of_rows = tuple(self._inputs), tuple(self._constants), tuple(self._tables)
        return Written(text, self._num_scratch, *of_rows)

    def columns(self, steps: Sequence[int] = (1,)) -> Columns:
        """Return what becomes of each number of the output by itself.

        Inputs may be so many numbers apart as `steps` says.
        """
        (output,) = self._outputs
        size = self._rows.layout(output).size
        tree, named = self._tree(output, np.arange(size)), dict[Any, str]()
        inputs, constants = list[tuple[Value, int, int]](), list[tuple[Value, int, int]]()
        of_name = {name: each for each, name in {**self._named, **self._constants}.items()}

        def at(leaf: _Leaf) -> str:
            assert leaf.table is not None
            value, start = of_name[leaf.name], int(leaf.table[0])
            step = int(leaf.table[1]) - start if size > 1 else 1
            is_constant = value in self._constants
            is_even = np.array_equal(leaf.table, start + step * np.arange(size))
            is_even = is_even and (step in steps or (is_constant and step == 0))
            require(is_even, "columns change their order")
            if (value, start, step) not in named:
                among = constants if is_constant else inputs
                named[value, start, step] = f"{'c' if is_constant else 'a'}{len(among)}"
                among.append((value, start, step))
            return named[value, start, step] + ("[i]" if step == 1 else f"[{step} * i]")

        made = _text(tree, at)
        names = [f"a{i}" for i in range(len(inputs))] + [f"c{i}" for i in range(len(constants))]
        head = f"def program(num, {', '.join([*names, 'out'])}):"
        text = f"{head}\n    for i in range(num):\n        out[i] = {made}\n"
        return Columns(text, tuple(inputs), tuple(constants), size, made == "a0[i]")

    def _uses(self) -> dict[Value, int]:
        """Return how often each value is read, if moves are read through; twice if by more."""
        uses = dict.fromkeys(self._order, 0)
        for value in self._outputs:
            uses[value] = uses.get(value, 0) + 1
        for value in reversed(self._order):
            meaning = self._rows.meaning(value)
            is_move = meaning.is_copied and len(meaning.parts) == 1
            for part in meaning.parts:
                if part.of in uses:
                    is_fewer = self._rows.layout(part.of).size < meaning.layout.size
                    is_spread = is_fewer and meaning.write is not None
                    uses[part.of] += 2 if is_spread else uses[value] if is_move else 1
        return uses

    def _tree(self, value: Value, table: Table) -> Any:
        """Return the expression of some numbers of a token's row of a value."""
        if value in self._named:
            name = self._named[value]
            return _Leaf(name, None if name.startswith("v") else table)
        meaning = self._rows.meaning(value)
        if meaning.number is not None:
            return number(meaning.number)
        if meaning.name == "a constant":
            return _Leaf(self._constants.setdefault(value, f"c{len(self._constants)}"), table)
        if meaning.is_copied:
            copied, narrow = self._rows.narrowed(value, table)
            require(copied is not value, "numbers of several values lie among each other")
            return self._tree(copied, narrow)
        require(meaning.write is not None, "its numbers depend on each other")
        operands = [self._tree(part.of, part.table[table]) for part in meaning.parts]
        return _Op(meaning.write or str, tuple(operands))

    def _row(self, size: int) -> str:
        """Return the name of a new row in scratch memory."""
        name = f"x{self._num_rows}"
        self._num_rows += 1
        self._lines.append(f"{name} = scratch[{self._num_scratch} : {self._num_scratch + size}]")
        self._num_scratch += -(-size // 16) * 16
        return name

    def _made(self, value: Value, meaning: Meaning) -> str:
        """Write what makes a row of a value; return the row's name."""
        size = meaning.layout.size
        every = np.arange(size)
        if meaning.is_of_rows:
            return self._of_rows(meaning, size)
        if meaning.write is not None and size == 1:
            name = f"v{self._num_rows}"
            self._num_rows += 1
            self._loop(_Leaf(name, None), self._tree(value, every))
            return name
        name = self._row(size)
        if meaning.write is not None:
            self._loop(_Leaf(name, every), self._tree(value, every))
        for part in meaning.parts if meaning.write is None else ():
            where = every if part.where is None else part.where
            self._loop(_Leaf(name, where), self._tree(part.of, part.table))
        return name

    def _of_rows(self, meaning: Meaning, size: int) -> str:
        """Write what a reduction or a choice makes, row by row."""
        num = meaning.num_rows or size
        names, sizes = [*map(self._whole, meaning.parts)], [len(x.table) for x in meaning.parts]
        names += [""] * (2 - len(names)) + [self._row(size)]
        sizes += [0] * (2 - len(sizes)) + [size]
        rows = [
            f"{name}[r * {each // num} : (r + 1) * {each // num}]"
            for name, each in zip(names, sizes, strict=True)
        ]
        if meaning.call:
            memory = self._row(2 * sizes[0] // num) if "{3}" in meaning.call else ""
            made = meaning.call.format(*rows, memory)
        else:
            made = f"{names[2]}[r] = " + REDUCTIONS[meaning.name].format(rows[0], sizes[0] // num)
        self._lines += [f"for r in range({num}):", f"    {made}"]
        return names[2]

    def _whole(self, part: Taken) -> str:
        """Return the name of a row that has the numbers of a part side by side."""
        every, tree = np.arange(len(part.table)), self._tree(part.of, part.table)
        if type(tree) is _Leaf and tree.table is not None and np.array_equal(tree.table, every):
            return tree.name
        name = self._row(len(every))
        self._loop(_Leaf(name, every), tree)
        return name

    def _loop(self, target: _Leaf, tree: Any) -> None:
        """Write loops that set the numbers of a row."""
        tables = [each.table for each in (target, *_leaves(tree)) if each.table is not None]
        extents = _nest(tables, len(tables[0]) if tables else 1)
        names = [f"i{index}" for index in range(len(extents))]
        indent = ""
        for name, extent in [*zip(names, extents, strict=True)][::-1]:
            self._lines.append(f"{indent}for {name} in range({extent}):")
            indent += "    "

        def at(leaf: _Leaf) -> str:
            if leaf.table is None:
                return leaf.name
            return f"{leaf.name}[{self._index(leaf.table, extents, names)}]"

        self._lines.append(f"{indent}{at(target)} = {_text(tree, at)}")

    def _index(self, table: Table, extents: Sequence[int], names: Sequence[str]) -> str:
        steps = np.cumprod([1, *extents])[:-1]
        strides = [int(table[each] - table[0]) for each in steps]
        made = np.zeros(1, np.int64)
        for extent, stride in zip(extents, strides, strict=True):
            made = (np.arange(extent)[:, None] * stride + made).reshape(-1)
        if not np.array_equal(made + table[0], table):
            held = self._tables.setdefault((*table.tolist(),), f"t{len(self._tables)}")
            return f"{held}[{_sum(names, steps.tolist(), 0)}]"
        return _sum(names, strides, int(table[0]))


def _sum(names: Sequence[str], strides: Sequence[int], first: int) -> str:
    pairs = zip(names, strides, strict=True)
    terms = [name if stride == 1 else f"{name} * {stride}" for name, stride in pairs if stride]
    return " + ".join([*terms, *([str(first)] if first or not terms else [])])


def _leaves(tree: Any) -> Iterator[_Leaf]:
    if type(tree) is _Leaf:
        yield tree
    elif type(tree) is _Op:
        for each in tree.operands:
            yield from _leaves(each)


def _text(tree: Any, at: Callable[[_Leaf], str]) -> str:
    if type(tree) is _Leaf:
        return at(tree)
    if type(tree) is _Op:
        return tree.write(*(_text(each, at) for each in tree.operands))
    return str(tree)


def _nest(tables: Sequence[Table], size: int) -> list[int]:
    """Return the extents of nested loops, inner first, in which most tables are sums of steps."""
    bounds = {size}
    for table in tables:
        more = bounds | _bounds(table)
        ordered = sorted(more)
        if all(b % a == 0 for a, b in pairwise(ordered)):
            bounds = more
    ordered = [1, *sorted(bounds - {1})]
    return [b // a for a, b in pairwise(ordered)]


def _bounds(table: Table) -> set[int]:
    """Return after how many numbers a table's step changes; empty if it has no steps."""
    found, offsets, num = set[int](), table, 1
    while len(offsets) > 1:
        steps = np.diff(offsets)
        other = np.flatnonzero(steps != steps[0])
        run = int(other[0]) + 1 if len(other) else len(offsets)
        if len(offsets) % run:
            return set()
        blocks = offsets.reshape(-1, run)
        if not (blocks == blocks[:, :1] + steps[0] * np.arange(run)).all():
            return set()
        num *= run
        found.add(num)
        offsets = blocks[:, 0]
    return found
