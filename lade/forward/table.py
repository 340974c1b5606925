"""The table of a job: the phases of a plan in numbers (`words.py`), and addresses of weights."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import getitem
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lade.forward import _latents, _recurrence, words
from lade.forward._rows import address_of
from lade.forward.comparing import UnsupportedForwardError, require
from lade.forward.experts import PARTS, STACKS, ExpertsPlan
from lade.forward.linear import FORMATS, is_plain
from lade.forward.packed import (
    PackedConv1D,
    PackedLinear,
    PackedStack,
    formats_in,
    function_of,
    has_digits,
)
from lade.forward.reading import (
    CallPlan,
    Constant,
    DecoderPlan,
    MixingPlan,
    Place,
    ProductsPlan,
    ProgramPlan,
    RowsStep,
    of_columns,
)
from lade.forward.recurrence import added_by

_PACKED = "its weights are packed in a format that jobs do not read"
_UNEVEN = "its columns are no whole number of vectors"
# Words of what products read: beside it are its digits, if it is made in whole blocks.
WITH_DIGITS = {words.NORMED, words.ATTENDED, words.INNER, words.OF_EXPERTS}


class Held:
    """Keeps the memory of weights alive while their addresses are in use.

    A reference to the parameter is not enough, because its `data` may be exchanged.
    """

    def __init__(self) -> None:
        self.owners: Sequence[Any] = ()  # the dict in a module that has each weight
        self.addresses: list[int] = []
        self.table: Any = None  # int64, the job's table of these weights
        self._memory: list[Tensor] = []
        self._parts: dict[tuple[int, int], Held] = {}

    def part(self, first: int, end: int) -> "Held":
        """Return what holds the weights of some layers, which hooks may have replaced."""
        return self._parts.setdefault((first, end), Held())

    def hold(self, weights: Sequence[Tensor]) -> None:
        """Hold the memory of weights."""
        self._memory = [*map(Tensor.detach, weights)]
        self.addresses = [*map(Tensor.data_ptr, self._memory)]


class Weights:
    """A plan as the rows of a job, with addresses of weights, looked up anew for each forward.

    Attributes:
        num_phases: number of all phases.
        starts: the first phase of each layer, and of what follows.
        of_kind: numbers of the caches that each kind of mask is for.
        calls: names of the modules that make embeddings and angles, and what they get.
        wanted: what is used of these: number of the call and of its result, numbers of a token.
        steps: int64, bytes from one token to the next in each of these.
        turning: int64 [addresses, 2], where each is in the table, and its number in `wanted`.
        digits: which digits of their inputs products read, if any.
        turned: most inputs whose digits are turned.
        memory: words of the job, and most numbers of a token that lie there.
        sizes: arguments of `scratch_size`.
    """

    def __init__(
        self,
        plan: DecoderPlan,
        kinds: Sequence[str],
        keeping: Sequence[int],
        compiled: Any,
        names: Mapping[nn.Module, str],
    ) -> None:
        self._all_names, self._compiled, self.digits = names, compiled, words.NO_DIGITS
        self.turned = 0
        in_bytes = any(map(has_digits, formats_in(names)))  # digits of one kind are there
        self._kind = words.IN_BYTES if in_bytes else words.IN_BFLOAT16
        self.memory: dict[int, int] = {}
        self.sizes = {"hidden": plan.hidden, "num_chosen": 0}
        ids = torch.tensor(plan.replaced, dtype=torch.int64, device="cpu")
        self._replaced = ids.unbind(1) if plan.replaced else None
        lists = [plan.ahead, *(layer.phases for layer in plan.layers), plan.last]
        self.num_phases = sum(len(self._runs_of(each)) for phases in lists for each in phases)
        # Behind phases: what describes programs, and what mixes tokens.
        self._rows = [np.zeros(words.ROW_SIZE, np.int64) for _ in range(self.num_phases)]
        self._num_filled = 0
        # Parameters by module and name, with the number of their word and an offset in bytes.
        self._slots: list[tuple[Any, ...]] = []
        self._absent: list[tuple[int, Callable[[], Any], str]] = []  # parameters that are None
        self._bounds: list[int] = []  # index of the first parameter of each layer, and behind
        self.starts: list[int] = []
        self.calls: list[tuple[str, CallPlan]] = []
        self.wanted: list[tuple[int, int, int]] = []
        self._turning: list[tuple[int, int]] = []
        seen = [set[int]() for _ in kinds]
        for number, phases in enumerate(lists):
            if number > 0:
                self.starts.append(self._num_filled)
                self._bounds.append(len(self._slots))
            if 0 < number <= len(plan.layers):
                layer = plan.layers[number - 1]
                kind, keys_of = kinds.index(plan.kinds[number - 1]), layer.mixing.keys_of
                cache = keeping.index(number - 1 if keys_of is None else keys_of)
                seen[kind].add(cache)
                self._add_phases(phases, kind, cache)
                at_end = self._add_program(layer.at_end)
                self._rows[self._num_filled][words.AT_END] = at_end
            else:
                self._add_phases(phases)
        self.of_kind = [np.array(sorted(each), np.int64) for each in seen]
        self._table = np.stack(self._rows)
        self.turning = np.array(self._turning, np.int64).reshape(-1, 2)
        slots = zip(*self._slots, strict=True)
        self._modules, self._kinds, self._names, index, starts, self._known = slots
        self._index, self._starts = np.array(index), np.array(starts)
        self.steps = np.array([4 * size for *_, size in self.wanted], np.int64)

    def _add_phases(self, phases: Sequence[Any], kind: int = 0, cache: int = 0) -> None:
        """Describe phases, with the number of the layer's masks and of its cache."""
        for phase in phases:
            row, number = self._rows[self._num_filled], self._num_filled
            if type(phase) is RowsStep:
                row[words.TOKENS], row[words.BEFORE] = phase.tokens, self._add_program(phase.before)
                row[words.AT_END] += self._add_program(phase.at_end)
            elif type(phase) is ProductsPlan:
                self._add_products(number, phase, _have_digits(phase.given, phases))
            else:
                is_mixing = type(phase) is MixingPlan
                add: Any = self._add_mixing if is_mixing else self._add_experts
                of = self._add_row()
                add(len(self._rows) - 1, phase)
                for index, (run, step) in enumerate(self._runs_of(phase)):
                    row = self._rows[number + index]
                    row[words.RUN : words.CACHE + 1] = run().address, step, of, kind, cache
            self._num_filled += len(self._runs_of(phase))

    def _runs_of(self, phase: Any) -> list[tuple[Any, int]]:
        """Return what compiles each phase of a job that one of a plan is, and its number there."""
        if type(phase) is ExpertsPlan:
            return [(self._compiled.run_experts, step) for step in range(3)]
        if type(phase) is not MixingPlan:
            return [(None, 0)]  # compiled with all jobs
        of_names = {
            "attention": self._compiled.run_attention,
            "convolution": self._compiled.run_convolution,
            "latents": _latents.run_latents,
            "recurrence": _recurrence.run_recurrence,
        }
        return [(of_names[name], step) for name, step in phase.runs]

    def _need(self, word: int = words.NOTHING, num: int = 0, **sizes: int) -> None:
        """Note how many numbers of a token lie at a word, and other sizes."""
        self.memory[word] = max(self.memory.get(word, 0), num)
        for name, size in sizes.items():
            self.sizes[name] = max(self.sizes.get(name, 0), size)

    def _add_products(self, number: int, plan: ProductsPlan, by_digits: bool) -> None:
        row = self._rows[number]
        require(len(plan.products) <= words.MOST_PRODUCTS, "too many products have equal inputs")
        row[words.NUM_PRODUCTS], row[words.TOKENS] = len(plan.products), plan.tokens
        row[words.GIVEN], row[words.NUM_GIVEN] = plan.given, plan.row
        row[words.TARGET], row[words.NUM_MADE] = plan.target, plan.num_made
        row[words.COLUMNS] = self._add_program(plan.columns)
        starts = (product.start for product in plan.products)
        by_digits &= not any(each % words.DIGITS_BLOCK for each in (plan.row, *starts))
        for index, product in enumerate(plan.products):
            word = words.PRODUCT_SIZE * index
            self._add_matrix(number, word, product.module, product.first, by_digits=by_digits)
            of_product = product.num, product.start, product.num_inputs
            row[word + words.NUM_COLUMNS : word + words.NUM_INPUTS + 1] = of_product
        self._need(plan.target, plan.num_made)

    def _add_mixing(self, number: int, plan: MixingPlan) -> None:
        row = self._rows[number]
        for word, *numbers in plan.numbers:
            row[word : word + len(numbers)] = numbers
        row[words.HEADS] = self._add_program(plan.rows)
        of_heads = row[words.HEAD_SIZE : words.MORE_SIZE]  # of keys and of values
        is_whole = not (of_heads % self._compiled.LANES).any()
        require(is_whole, "its heads are no whole number of vectors")
        self._need(words.ATTENDED, int(row[words.ATTENDED_SIZE]), **dict(plan.sizes))
        self._need(words.QUERIES, plan.added[0][-1])  # of a recurrence: no more than its inputs
        for word, each in plan.weights:
            self._add(number, word, each.module, each.name)
        if plan.expand is not None:
            expand = plan.expand.module
            self._add_matrix(number, words.EXPAND, expand)
            dtype: Any = expand._parameters["weight"].dtype  # type: ignore[union-attr]
            require(dtype in FORMATS, "what latents are expanded by is in blocks")
            row[words.OF_EXPAND] = FORMATS[dtype]

    def _add_row(self) -> int:
        """Add a row to the table; return its number among those behind the layers, from 1 on."""
        self._rows.append(np.zeros(words.ROW_SIZE, np.int64))
        return len(self._rows) - self.num_phases

    def _add_program(self, plan: ProgramPlan | None) -> int:
        """Add the row that describes a program; return its number, 0 for none."""
        if plan is None:
            return 0
        number, row, index = self._add_row(), self._rows[-1], len(self._rows) - 1
        require(len(plan.places) <= words.MOST_PLACES, "a program of rows takes too much")
        row[words.PROGRAM] = address_of(plan.text, plan.given, plan.tables)
        row[words.NUM_PLACES] = len(plan.places)
        self._need(of_rows=plan.num_scratch)
        for each, (place, size) in enumerate(plan.places):
            word = words.PLACES + 3 * each
            if isinstance(place, Constant):
                row[word], row[word + 2] = words.NOTHING, 4 * place.step
                self._add(index, word + 1, place.module, place.name, start=4 * place.first)
                continue
            row[words.NUM_DIGITS] = size if place.word in WITH_DIGITS else 0  # of the last one
            self._need(place.word, place.step or size)
            step = 8 if place.word == words.POSITIONS else 4 * (place.step or size)
            row[word : word + 3] = place.word, 4 * place.first, step
            if place.made is not None:
                row[word + 1] = 0
                at = index * words.ROW_SIZE + word + 1
                self._turning.append((at, self._number_of(place, size)))
        constants = (place for place, _ in plan.places if isinstance(place, Constant))
        for module in dict.fromkeys(each.module for each in constants):
            for name, held in module._parameters.items():
                if held is None:
                    self._absent.append((len(self._slots), weakref.ref(module), name))
        return number

    def _number_of(self, place: Place, size: int) -> int:
        """Return the number of what a call gives, among all that is wanted."""
        assert place.made is not None
        made = self._all_names[place.made.module], place.made._replace(module=None)
        if made not in self.calls:
            self.calls.append(made)
        wanted = self.calls.index(made), place.first, size
        if wanted not in self.wanted:
            self.wanted.append(wanted)
        return self.wanted.index(wanted)

    def _add_experts(self, number: int, plan: ExpertsPlan) -> None:
        """Describe gate, up and down of all experts, each as one product."""
        module, inner, row = plan.module, plan.inner, self._rows[number]
        self._need(words.OF_EXPERTS, plan.num_chosen * inner)
        self._need(words.RESULT, self.sizes["hidden"])
        self._need(words.GROUPS, 4 * plan.num_chosen + 2 * plan.num + 6)
        self._need(num_experts=plan.num, num_chosen=plan.num_chosen)
        row[words.NUM_EXPERTS : words.GATE_UP_BIAS] = plan.num, plan.num_chosen, inner
        names: tuple[str, ...] = STACKS[:2]
        biases, formats = STACKS[2:], list[int | None]((None, None))
        stacks: list[Any] = [vars(module).get(name) for name in names]
        if type(stacks[0]) is PackedStack:
            formats = [each for stack in stacks for each in stack.ggml_types]
            names = PARTS[: 3 : 4 - len(formats)]
        if len(names) == 2:  # gate and up are one stack
            names, formats, row[words.LIES] = (names[0], *names), [formats[0], *formats], plan.lies
        else:  # as files have them, whatever the module wants
            inner, biases = 0, (PARTS[3], STACKS[3])
        alternates = row[words.LIES] & words.ALTERNATE
        text = plan.gating if alternates else plan.gating.replace("[2 * i]", "[i]")
        row[words.GATING] = address_of(text, of_columns(text, 2).given)
        of_words = words.EXPERT_GATE, words.EXPERT_UP, words.EXPERT_DOWN
        of_biases = words.GATE_UP_BIAS, words.EXPERT_DOWN + words.BIAS
        across = bool(row[words.LIES] & words.LIE_ACROSS)
        require(not across or inner % self._compiled.LANES == 0, _UNEVEN)
        firsts = 0, inner, 0
        are_alike = all(map(has_digits, formats[:2]))  # gate and up read the same rows
        row[words.BY_DIGITS] = are_alike
        by_digits = are_alike, are_alike, has_digits(formats[-1])
        parts = zip(of_words, names, formats, firsts, by_digits, strict=True)
        for word, name, format_, first, each in parts:
            self._add_weight(number, word, module, name, format_, across, first, by_digits=each)
        for word, name in zip(of_biases, biases, strict=True):
            self._add(number, word, module, name)

    def _add_matrix(
        self, number: int, word: int, module: Any, column: int = 0, *, by_digits: bool = False
    ) -> None:
        """Describe a linear layer, from one of its columns on; see `_add_weight`."""
        is_packed = isinstance(module, PackedLinear | PackedConv1D)
        format_ = module.ggml_type if is_packed else None
        of_weight = format_, isinstance(module, Conv1D), column
        self._add_weight(number, word, module, "weight", *of_weight, by_digits=by_digits)
        self._add(number, word + words.BIAS, module, "bias", start=4 * column)

    def _add_weight(
        self,
        number: int,
        word: int,
        module: nn.Module,
        name: str,
        *of_weight: Any,
        by_digits: bool,
    ) -> None:
        """Describe a matrix, or a stack of matrices whose columns count one after another.

        Args:
            number, word: where the product's words begin.
            module, name: the weight.
            of_weight: GGML's number of the weight's format, or None if it is not packed; whether it
                lies input by input; the first column.
            by_digits: whether its inputs have digits.
        """
        format_, across, column = of_weight
        weight: Any = module._parameters[name]
        row, of_row = self._rows[number][word:], weight.shape[-1] * weight.itemsize
        dtype, start = torch.float32 if format_ is None else weight.dtype, column * of_row
        row[words.NUM_COLUMNS] = weight.shape[-1 if across else -2]
        if across:
            require(weight.shape[-1] % self._compiled.LANES == 0, _UNEVEN)
            require(dtype in FORMATS, _PACKED)
            row[words.ACROSS], row[words.ROW_BYTES] = of_row, FORMATS[dtype]
            start = column * dtype.itemsize
        elif format_ is not None:
            rows = weight.detach().view(torch.uint8).flatten(0, -2)
            function = function_of(rows, format_, (self._kind,) if by_digits else ())
            if function is None:
                raise UnsupportedForwardError(_PACKED)
            self.digits = self.digits or function.digits
            if function.digits == words.IN_BFLOAT16:
                self.turned = max(self.turned, rows.shape[1] // 2)
            row[words.PACKED], row[words.ROW_BYTES] = function.address, of_row
        self._add(number, word, module, name, dtype, start)

    def _add(
        self,
        number: int,
        word: int,
        module: nn.Module,
        name: str,
        dtype: torch.dtype = torch.float32,
        start: int = 0,
    ) -> None:
        kind = "_buffers" if name in module._buffers else "_parameters"
        weight = vars(module)[kind].get(name)
        if weight is None:
            self._absent.append((len(self._slots), weakref.ref(module), name))
        else:
            index = number * words.ROW_SIZE + word
            known = dtype, weight.shape
            self._slots.append((weakref.ref(module), kind, name, index, start, known))

    def replaced(self, tokens: Tensor) -> Tensor:
        """Return tokens as the model embeds them: for some it embeds others."""
        for placeholder, token in zip(*self._replaced, strict=True) if self._replaced else ():
            tokens = torch.where(tokens == placeholder, token, tokens)
        return tokens

    def fit(self, part: slice = slice(None)) -> bool:
        """Return whether all weights are still plain matrices in memory."""
        first, stop, _ = part.indices(len(self._slots))
        none_came = all(
            module()._parameters.get(name) is None
            for word, module, name in self._absent
            if first <= word <= stop
        )
        weights: Iterable[Any] = map(getitem, self._owners(part), self._names[part])
        return none_came and all(
            is_plain(weight, dtype) and weight.shape == shape
            for weight, (dtype, shape) in zip(weights, self._known[part], strict=True)
        )

    def _owners(self, part: slice) -> list[Any]:
        modules = [reference() for reference in self._modules[part]]
        kinds = zip(modules, self._kinds[part], strict=True)
        return [None if each is None else vars(each)[kind] for each, kind in kinds]

    def fill(self, held: Held) -> bool:
        """Hold all weights, once for a call; return whether they are plain matrices in memory."""
        try:
            return self.table(held) is not None
        except (ValueError, RuntimeError):  # sparse ones have no addresses
            return False

    def table(self, held: Held, layers: tuple[int, int] | None = None) -> NDArray[np.int64]:
        """Return the rows of all phases, and the descriptions, for one forward at a time.

        Args:
            held: holds the weights and the words, made again only where weights have moved.
            layers: the first one whose weights are wanted, and the one behind the last; by default
                all, and what comes after them.
        """
        part = slice(None) if layers is None else slice(*(self._bounds[each] for each in layers))
        held.owners = held.owners or self._owners(part)
        weights: list[Any] = [*map(getitem, held.owners, self._names[part])]
        are_plain = all(map(Tensor.is_contiguous, weights)) and not any(map(Tensor.is_neg, weights))
        addresses = [*map(Tensor.data_ptr, weights)]
        if not are_plain or (addresses != held.addresses and not self.fit(part)):
            raise ValueError("weights are no plain matrices any more")
        if addresses != held.addresses:
            held.hold(weights)
            held.table = self._table.copy()
            words = np.array(held.addresses, np.int64) + self._starts[part]
            held.table.reshape(-1)[self._index[part]] = words
        if 0 in held.addresses:
            raise ValueError("weights have no memory")
        table: NDArray[np.int64] = held.table
        return table


def _have_digits(word: int, phases: Iterable[Any]) -> bool:
    """Return whether what some phases write for a product, at a word of the job, gets digits."""
    mixing = next((each for each in phases if type(each) is MixingPlan), None)
    if word != words.ATTENDED or mixing is None:
        return word in WITH_DIGITS
    return mixing.at_once % words.DIGITS_BLOCK == 0


def added_in(plan: MixingPlan) -> tuple[Any, ...]:
    """Return what a token adds to the cache of a layer, see `TreeCache.slot_addresses`."""
    made = (torch.empty(each, dtype=torch.float32, device="cpu") for each in plan.added)
    return (*made,) if plan.recurrence is None else (*made, *added_by(plan.recurrence))
