"""Forward passes of a model as compiled jobs, if that is faster than module by module.

On a CPU, torch spends as long between matrix products as on them: a layer is thirty calls, and each
call wakes all threads. A job (`_kernels.py`) runs a whole forward pass on the model's own weights.
Its parts are tokens that follow one cache: a prompt, a tree, or the tokens of one of several calls.
`reading.py` reads from the model what it computes. Before a text begins, jobs of a few sizes are
compared with the model's own forward pass, in their results and their time. All numbers are
float32, whatever weights are stored in. Figures are in docs/internals/forward.md.
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import is_
from time import perf_counter
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from lade.compat import CACHE, Model, dtype_of, has_hook
from lade.compat.attempts import Attempt
from lade.compat.closeness import limit_of
from lade.compat.view import viewed, with_forward
from lade.forward import words
from lade.forward.comparing import Forward, UnsupportedForwardError, require, why_wrong
from lade.forward.linear import MOST_TOKENS, is_plain, kernels, product, turned_size
from lade.forward.packed import (
    PackedLinear,
    is_whole,
    made_whole,
)
from lade.forward.reading import is_alike, made_by, read
from lade.forward.table import WITH_DIGITS, Held, Weights, added_in
from lade.forward.workers import NumThreads, Run, most_threads
from lade.machine.threads import alone
from lade.targets.inputs import LOGITS_KEPT
from lade.targets.joint import JointCache
from lade.targets.kv_cache import TreeCache
from lade.targets.rows import MOST_AT_ONCE

# Tokens of the forwards by which it is found out whether jobs are faster; as a machine may be busy,
# the model's own have to be so much faster.
_TRIED, _CLEAR = (1, 8), 0.8
# Words whose memory belongs to a forward, or to none.
_OWN = {words.STATES, words.INPUTS, words.LOGITS, words.POSITIONS, words.NOTHING}
# Packages of modules whose settings stay those of a call.
_HOMES = "torch.", "transformers.", f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}.", "lade."
#: Prompts of more tokens run by the model's own forwards if it has recurrences.
MANY_TOKENS = 64
_GIVEN = {
    *("input_ids", "position_ids", "attention_mask", "return_dict", "use_cache"),
    *(CACHE, LOGITS_KEPT),
}


class _ForwardPart(NamedTuple):
    """Tokens of a forward that follow one row of a cache."""

    cache: TreeCache
    first: int  # number of its first token among all parts
    num: int
    # By kind: bool [num, num_keys], or None to see all tokens before.
    masks: list[Tensor | None]


class _JobRequest(NamedTuple):
    """A forward that a job can run."""

    input_ids: Tensor  # int64 [1, num_tokens]
    positions: Tensor  # int64 [1, num_tokens]
    parts: list[_ForwardPart]
    kept: NDArray[np.int64]  # tokens whose logits are wanted
    held: Held  # the weights, for all forwards of a call
    model: Model  # whose modules make angles: a look's differ from the model's own
    #: Runs the model, given a function that runs each layer; None to run all layers at once.
    by_layers: Callable[["_RunLayer"], Tensor] | None = None
    hooked: tuple[bool, ...] = ()  # whether a layer must be called by itself


# From a layer's number and input states to its output; the last layer is the head.
_RunLayer = Callable[[int, Tensor], Tensor]


class _Piece(NamedTuple):
    """Tokens of a forward that one job runs."""

    start: int
    num: int
    phases: tuple[int, int]  # the first one, and the one behind the last
    kept: NDArray[np.int64]  # the ones of them whose logits are wanted
    job: NDArray[np.int64]  # the job's array (`words.py`)
    given: NDArray[np.int64]  # addresses of what modules give, such as angles
    refers_to: tuple[Any, ...]  # arrays whose addresses the job has


class FusedForwards:
    """Runs forwards of a model by jobs if that is faster.

    Args:
        model: the model, in one state; another state needs another object.
        compiled: the kernels.
        run: calls a function on several threads.
        is_unchanged: returns whether the model's state is unchanged; called before each forward of
            a model with modules of other packages, as adapters may be switched at any time; None if
            it is unknown.

    Attributes:
        why_not: why jobs are no longer used; None if they may be.
        is_packed: whether weights are packed, which torch would unpack in each forward.
        counts: whether the model counts positions by itself, so that a forward has one path.

    Raises:
        UnsupportedForwardError: the model computes something that a plan cannot describe.
    """

    def __init__(
        self,
        model: Model,
        compiled: ModuleType,
        run: Run,
        is_unchanged: Callable[[], bool] | None = None,
    ) -> None:
        self._kernels, self._run = compiled, run
        self._function, self._tiles = compiled.run_forward().address, compiled.run_tiles().address
        self.why_not: str | None = None
        plan = read(model)
        self._hidden, self._reach, self._num_layers = plan.hidden, plan.reach, len(plan.layers)
        self._vocab_size = plan.head.out_features
        mixing = [layer.mixing for layer in plan.layers]
        self.is_packed, self.counts = type(plan.head) is PackedLinear, plan.counts
        self._limit = limit_of(model)
        names = {module: name for name, module in model.named_modules()}
        self._names = [names[each] for each in (plan.head, *plan.modules)]
        self._kinds = sorted({*plan.kinds})
        #: By layer that keeps tokens, what one adds to the cache, and the state of a recurrent one.
        keeping = [number for number, each in enumerate(mixing) if each.keys_of is None]
        self._states = [added_in(mixing[each]) for each in keeping]
        #: The layers from here on write no keys: only tokens whose logits are wanted need them.
        self._num_writing = 1 + keeping[-1]
        self._is_recurrent = any(each.recurrence is not None for each in mixing)
        first, _ = plan.ahead[0].before.places[-1]
        #: Products besides those of layers and the head.
        self._has_more = len(plan.last) > 2 or first.word != words.STATES
        self._is_slow = False
        self._workspaces: list[_Workspace] = []
        self._threads = NumThreads()
        self._weights = Weights(plan, self._kinds, keeping, compiled, names)
        taken = [x for _, call in self._weights.calls for x in (*call.args, *call.kwargs.values())]
        self._gets_zeros = any(each is words.ZEROS_GIVEN for each in taken)
        require(self._weights.fit(), "its weights are no plain matrices")
        files = (f"{type(each).__module__}." for each in model.modules())
        self._is_unchanged = None if all(x.startswith(_HOMES) for x in files) else is_unchanged

    def settle(self, run: Forward, timed: Forward) -> None:
        """Compare jobs with the model's own forward, in results and in time; once.

        Args:
            run: returns the logits [1, num_tokens, vocab_size] of the first tokens of a text by a
                view; the tokens leave no trace in its cache.
            timed: does the same, and notes the time.
        """

        def by_torch(num_tokens: int) -> Tensor:
            with made_whole():  # packed weights: else a job would be held against itself
                return run(num_tokens)

        reason = why_wrong(by_torch, timed, self._limit, self._weights.sizes["num_chosen"] > 0)
        self.why_not = self.why_not or reason  # jobs may have failed
        if self.is_packed or self.why_not is not None:
            return
        self._is_slow = self._are_slow(by_torch, timed)

    def _are_slow(self, by_torch: Forward, by_job: Forward) -> bool:
        """Return whether jobs of a few tokens are slower than the model's own forwards."""
        least = np.full((2, len(_TRIED)), math.inf)
        for _ in range(2):  # what runs for the first time takes longer, and a machine may be busy
            for number, num_tokens in enumerate(_TRIED):
                for sec, run in zip(least, (by_torch, by_job), strict=True):
                    begin = perf_counter()
                    run(num_tokens)
                    sec[number] = min(sec[number], perf_counter() - begin)
            theirs, mine = least.sum(axis=1).tolist()
            if theirs > mine:
                return False
        return bool(theirs < _CLEAR * mine)

    def view(self, model: Model) -> Model:
        """Return a view whose forwards run by jobs if these are faster; the model if none can.

        Args:
            model: a view of the model that has the modules which the plan uses.
        """
        held = Held()
        if self.why_not is not None or not self._weights.fill(held):
            return model
        children = [*model._modules.values()]
        head, *layers = map(model.get_submodule, self._names)

        @functools.cache
        def by_layers() -> tuple[Model, list[_RunLayer]]:
            return _by_layers(model, [*layers, head])

        def forward(view: Any, *args: Any, **inputs: Any) -> Any:
            by_torch = type(view).forward.__get__(view)
            is_whole = all(map(is_, view._modules.values(), children))  # else they are a view's
            try:
                require(is_whole and not args, "it is not of this model, or has other arguments")
                request = self._request(inputs, held, model)
            except UnsupportedForwardError:
                return by_torch(*args, **inputs)
            with_hooks = [each for each in layers if each._forward_hooks or each._forward_pre_hooks]
            if with_hooks and any(map(has_hook, with_hooks)):
                has_kwargs = any(each._forward_pre_hooks_with_kwargs for each in with_hooks)
                kept = inputs.get(LOGITS_KEPT, 0)
                drops_tokens = (
                    self._num_writing < self._num_layers and isinstance(kept, int) and kept > 0
                )
                # Hooks would see more than states, or rows of torch's products each other.
                if has_kwargs or self._has_more or drops_tokens:
                    return by_torch(**inputs)
                hooked = tuple(each in with_hooks and has_hook(each) for each in layers)
                run = partial(_run_by, *by_layers(), inputs)
                request = request._replace(by_layers=run, hooked=hooked)
            return self._choose(request, lambda: by_torch(**inputs), inputs[CACHE])

        return with_forward(model, forward)

    def pays(self, num_rows: int) -> bool:
        """Return whether a prompt of so many tokens runs by a job."""
        # Torch adds many tokens to a recurrent state at once, a job one by one.
        is_slow = self._is_recurrent and num_rows > MANY_TOKENS
        return self.why_not is None and not (self._is_slow or is_slow)

    # --- running ----------------------------------------------------------------------------------

    def _choose(self, request: _JobRequest, by_torch: Callable[[], Any], cache: Any) -> Any:
        """Run a forward by a job, unless that is slower or wrong; by the model if the job fails."""
        if self.why_not is not None or self._is_slow or is_whole():
            return by_torch()
        with Attempt() as attempt:  # what it has written does not count yet
            logits = self._by_job(request)
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})
        with made_whole():
            result = by_torch()
        self.why_not = attempt.failure  # unless that fails, too
        return result

    def _by_job(self, request: _JobRequest) -> Tensor | None:
        """Return logits [num_rows, …, vocab_size]; None, with nothing written, if impossible."""
        weights, num = self._weights, request.input_ids.shape[1]
        # For all pieces at once: some angles depend on the length of the text.
        given = alone(lambda: self._given(request))
        pieces = self._pieces(request, given)
        if pieces is None:
            return None
        states = torch.empty((num, self._hidden), dtype=torch.float32, device="cpu")
        table, done = weights.table(request.held), 0
        if request.by_layers is not None:
            for piece in pieces if weights.starts[0] > 1 else ():  # what layers get besides states
                self._run_piece(piece, states, table, (0, weights.starts[0]))
            logits = request.by_layers(partial(self._run_layer, request, pieces))
        else:
            logits = states.new_empty((1, len(request.kept), self._vocab_size))
            for piece in pieces:
                is_last = piece.phases[1] == weights.num_phases
                of_piece = logits[0, done:] if is_last else None
                self._run_piece(piece, states, table, piece.phases, of_piece)
                done += len(piece.kept)
        for part in request.parts:
            part.cache.count(part.num)
        return logits

    def _run_layer(
        self, request: _JobRequest, pieces: list[_Piece], number: int, states: Tensor
    ) -> Tensor:
        """Run a layer and all up to the next with hooks, or the head; return the states."""
        last, hidden, hooked = self._num_layers, self._hidden, request.hooked
        is_known = states.dtype is torch.float32 and states.shape[::2] == (1, hidden)
        if not is_known:
            raise ValueError(f"states of a layer have become {states.dtype} {[*states.shape]}")
        if number == last:
            return self._product(states, request.model.get_submodule(self._names[0]))
        if number > 0 and not hooked[number] and not hooked[number - 1]:
            return states  # it has run together with an earlier layer
        wide = states[0].clone(memory_format=torch.contiguous_format)
        end = number + 1
        while end < last and not hooked[number] and not hooked[end]:
            end += 1
        if len(wide) != sum(piece.num for piece in pieces):
            raise ValueError(f"a layer has states of {len(wide)} tokens")
        held = request.held.part(number, end)
        table = self._weights.table(held, (number, end))
        phases = self._weights.starts[number], self._weights.starts[end] + 1
        for piece in pieces:
            self._run_piece(piece, wide, table, phases)
        return wide[None]

    def _product(self, states: Tensor, linear: Any) -> Tensor:
        if type(linear) is PackedLinear:
            return linear.forward(states)
        if not is_plain(linear.weight, torch.float32):
            raise ValueError("weights are no plain matrices any more")
        return product(self._kernels, self._run, states, linear.weight, linear.bias)

    def _pieces(self, request: _JobRequest, given: Sequence[Tensor]) -> list[_Piece] | None:
        """Describe the tokens that one job runs; None if no job can.

        Args:
            request: the forward.
            given: what modules give, float32 [num_tokens, …].
        """
        num, all_caches = request.input_ids.shape[1], self._caches(request)
        if all_caches is None:
            return None
        starts, num_phases = self._weights.starts, self._weights.num_phases
        given_at = np.array([*map(Tensor.data_ptr, given)], np.int64)
        num_inputs = self._weights.memory.get(words.INPUTS, 0)
        inputs = torch.empty((num, num_inputs), dtype=torch.float32, device="cpu")
        step, pieces = MOST_TOKENS if len(request.parts) == 1 else num, []
        spans = [(start, min(step, num - start)) for start in range(0, num, step)]
        ends = [(0, num_phases)] * len(spans)
        may_drop = self._num_writing < self._num_layers and request.by_layers is None
        if may_drop and len(request.parts) == 1 and request.kept.tolist() == [num - 1] != [0]:
            middle = starts[self._num_writing]
            ends = [(0, middle + 1)] * len(spans) + [(middle, num_phases)]
            spans.append((num - 1, 1))
        for (start, size), phases in zip(spans, ends, strict=True):
            caches = all_caches.copy()
            caches[..., words.NUM_KEYS] -= num - start - size
            at = given_at + start * self._weights.steps
            positions = request.positions[0, start:]
            parts = np.array(
                [
                    (part.first, min(part.num, size), *_place_of(part.masks[kind], start))
                    for kind in range(len(self._kinds))
                    for part in request.parts
                ]
            )
            job = np.zeros(words.JOB_SIZE, np.int64)
            job[words.NUM_TOKENS], job[words.HIDDEN] = size, self._hidden
            is_whole = request.by_layers is None  # else no time is learned of it
            num_threads = self._threads.choose(size) if is_whole else most_threads()
            job[words.NUM_THREADS], job[words.TILES] = num_threads, self._tiles
            job[words.PARTS], job[words.NUM_PARTS] = parts.ctypes.data, len(request.parts)
            job[words.CACHES] = caches.ctypes.data
            job[words.POSITIONS] = positions.data_ptr()
            job[words.INPUTS] = inputs[start:].data_ptr()
            inside = request.kept[(request.kept >= start) & (request.kept < start + size)]
            inside = inside[: len(inside) if phases[1] == num_phases else 0]
            made = job, at, (parts, caches, positions, inputs)
            pieces.append(_Piece(start, size, phases, inside - start, *made))
        return pieces

    def _run_piece(
        self,
        piece: _Piece,
        states: Tensor,
        table: NDArray[np.int64],
        phases: tuple[int, int],
        logits: Tensor | None = None,
    ) -> None:
        """Run some phases on tokens, and write their keys and values.

        Args:
            piece: the tokens.
            states: float32 [num_tokens, hidden_size] of all pieces, which are overwritten.
            table: a table of `Weights.table`; gets the addresses of what modules give.
            phases: the first phase, and the one behind the last.
            logits: gets the logits of the kept tokens; None if more phases follow.
        """
        job, num, (first, end) = piece.job.copy(), piece.num, phases
        turning = self._weights.turning
        table.reshape(-1)[turning[:, 0]] = piece.given[turning[:, 1]]
        job[words.DESCRIPTIONS] = table[self._weights.num_phases :].ctypes.data
        job[words.STATES] = states.data_ptr() + 4 * self._hidden * piece.start
        job[words.LIST], job[words.NUM_PHASES] = table[first:].ctypes.data, end - first
        num_threads = int(job[words.NUM_THREADS])
        workspace = self._workspace(num, num_threads)
        workspace.phases.fill(0)
        job[workspace.indices] = workspace.words
        if logits is None:
            job[words.KEPT], job[words.NUM_KEPT] = job[words.EVERY], num
        else:
            job[words.KEPT], job[words.NUM_KEPT] = piece.kept.ctypes.data, len(piece.kept)
            job[words.LOGITS] = logits.data_ptr()
        begin = perf_counter()
        self._run(self._function, job.ctypes.data, num_threads)
        if phases == (0, self._weights.num_phases):
            self._threads.record(num_threads, num, perf_counter() - begin)
        self._workspaces.append(workspace)

    def _caches(self, request: _JobRequest) -> NDArray[np.int64] | None:
        """Return addresses in the caches by layer that keeps keys, and part; None if unknown."""
        found = [part.cache.slot_addresses(part.num, self._states) for part in request.parts]
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            return None
        caches: NDArray[np.int64] = np.stack(known, axis=1)
        num_keys = caches[..., words.NUM_KEYS]
        for number, part in enumerate(request.parts):
            for kind, mask in enumerate(part.masks):
                if mask is not None and bool(
                    (num_keys[self._weights.of_kind[kind], number] > mask.shape[1]).any()
                ):
                    return None
        return caches

    def _given(self, request: _JobRequest) -> list[Tensor]:
        """Let the model make its embedding and angles, and what else is of positions alone."""
        positions, num = request.positions, request.positions.shape[1]
        given = {words.POSITIONS_GIVEN: positions, words.AXES_GIVEN: positions.expand(3, -1, -1)}
        given[words.TOKENS_GIVEN] = self._weights.replaced(request.input_ids)
        if self._gets_zeros:
            given[words.ZEROS_GIVEN] = torch.zeros_like(positions)
        if self.counts:
            counted = [part.cache.get_seq_length() + np.arange(part.num) for part in request.parts]
            given[words.PLACES_GIVEN] = torch.from_numpy(np.concatenate(counted))[None]
        given[words.STATES_GIVEN] = torch.zeros(1, dtype=torch.float32, device="cpu").expand(
            1, num, self._hidden
        )
        get, found = request.model.get_submodule, []
        made = [made_by(plan, get(name), given) for name, plan in self._weights.calls]
        for call, part, size in self._weights.wanted:
            each = made[call][part]
            real = torch.view_as_real(each) if each.is_complex() else each
            found.append(real.float().reshape(num, size).contiguous())
        return found

    def _workspace(self, num_tokens: int, num_threads: int) -> "_Workspace":
        """Return memory for so many tokens that no other thread uses."""
        with suppress(IndexError):
            found = self._workspaces.pop()
            if num_tokens <= found.num_tokens and num_threads <= found.num_threads:
                return found
        return _Workspace(self._kernels, self._weights, num_tokens, num_threads)

    # --- requests ---------------------------------------------------------------------------------

    def _request(self, inputs: dict[str, Any], held: Held, model: Model) -> _JobRequest:
        """Return the request of a forward's inputs.

        Raises:
            UnsupportedForwardError: no job can run them.
        """
        ids, cache = inputs.get("input_ids"), inputs.get(CACHE)  # type: Any, Any
        others = [inputs[name] for name in inputs.keys() - _GIVEN]
        require(
            all(each is None or each is False for each in others)
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
            and inputs.get("return_dict", True)
            and not torch_module._global_forward_hooks
            and not torch_module._global_forward_pre_hooks
            and (self._is_unchanged is None or self._is_unchanged())
            and ids is not None
            and ids.dim() == 2
            and len(ids) == 1
            and ids.numel() > 0
            and type(cache) in (TreeCache, JointCache),
            "it is called in another way",
        )
        num = ids.shape[1]
        parts = self._parts(inputs.get("attention_mask"), cache, num)
        require(len(parts) == 1 or num <= MOST_AT_ONCE, "several parts run in one piece")
        positions: Any = inputs.get("position_ids")
        if positions is None and len(parts) == 1:
            positions = torch.arange(num, dtype=torch.int64, device=ids.device)[None]
            positions = positions + cache.get_seq_length()
        if positions is not None and positions.dim() == 3 and is_alike(positions):
            positions = positions[0]  # of text, several axes count the same
        is_known = positions is not None and positions.shape == ids.shape
        require(is_known, "its positions are of another kind")
        kept: Any = inputs.get(LOGITS_KEPT, 0)
        nodes = np.arange(num)
        nodes = nodes[kept.numpy()] if isinstance(kept, Tensor) else nodes[-kept:]
        return _JobRequest(ids, positions, parts, nodes, held, model)

    def _parts(self, mask: Any, cache: TreeCache | JointCache, num: int) -> list[_ForwardPart]:
        """Return the calls that run together, or one alone, as parts."""
        by_kind = mask if isinstance(mask, dict) else dict.fromkeys(self._kinds, mask)
        require(by_kind.keys() >= {*self._kinds}, "some masks are missing")
        held: Sequence[TreeCache] = [cache] if isinstance(cache, TreeCache) else cache.caches
        nodes, kinds = [slice(0, num)], [*map(by_kind.get, self._kinds)]
        of_parts: list[Any] = [kinds]
        if isinstance(cache, JointCache):
            calls: list[Any] = [getattr(each, "_lade_calls", None) for each in kinds]
            require(None not in calls, "the masks of calls are lost")
            nodes, of_parts = calls[0].nodes, [*zip(*[each.masks for each in calls], strict=True)]
        parts = list[_ForwardPart]()
        for own, of_part, masks in zip(held, nodes, of_parts, strict=True):
            require(len(own.held) == len(self._states), "its cache is of another kind")
            size = of_part.stop - of_part.start
            sees_all = own.get_seq_length() + size <= self._reach
            of_kinds = [_of_part(each, size, sees_all) for each in masks]
            parts.append(_ForwardPart(own, of_part.start, size, of_kinds))
        return parts


def _of_part(mask: Tensor | None, size: int, sees_all: bool) -> Tensor | None:
    """Return a job's mask, bool [size, num_keys]; None if tokens see all tokens before them.

    Args:
        mask: [1, 1, num, num_keys], or which of the tokens are no padding, or None.
        size: number of tokens of the part.
        sees_all: whether tokens without a mask see all tokens before them.
    """
    if mask is None or mask.dim() == 2:
        has_none = mask is None or bool(mask[0].all())
        require(sees_all and has_none, "a mask is missing")
        return None
    of_tokens = mask[0, 0, :size]
    require(len(of_tokens) == size, "a mask is of other tokens")
    sees = of_tokens if mask.dtype is torch.bool else of_tokens == 0
    return sees if sees.stride(1) == 1 else sees.contiguous()


def _by_layers(model: Model, modules: Sequence[nn.Module]) -> tuple[Model, list[_RunLayer]]:
    """Return a view in which the last function of a list runs some modules, inside their hooks."""
    numbers = {id(module): number for number, module in enumerate(modules)}
    running: list[_RunLayer] = []

    def change(module: nn.Module) -> dict[str, Any] | None:
        number = numbers.get(id(module))
        if number is None:
            return None

        def forward(*args: Tensor, **inputs: Any) -> Tensor:
            return running[-1](number, args[0] if args else inputs["hidden_states"])

        return {"forward": forward}

    return viewed(model, change), running


def _run_by(
    view: Model, running: list[_RunLayer], inputs: dict[str, Any], run: _RunLayer
) -> Tensor:
    """Return the logits of a view whose layers are run by a function."""
    running.append(run)  # a hook may run the model, too
    try:
        logits: Tensor = type(view).forward.__get__(view)(**inputs).logits
    finally:
        running.pop()
    return logits


def _place_of(mask: Tensor | None, start: int) -> tuple[int, int]:
    """Return the address of a token's row of a mask, and the bytes between rows."""
    return (0, 0) if mask is None else (mask[start:].data_ptr(), mask.stride(0))


class _Workspace:
    """Memory that a job needs while it runs.

    Attributes:
        num_tokens, num_threads: for at most so many.
        indices, words: of a job that has the memory's addresses.
        phases: the counters of all phases, which begin with zeros.
    """

    def __init__(self, kernels: Any, weights: Weights, num_tokens: int, num_threads: int) -> None:
        self.num_tokens, self.num_threads = num_tokens, num_threads
        sizes, memory = weights.sizes, weights.memory.items()
        scratch, to_turned = kernels.scratch_size(num_tokens, **sizes), 0
        if weights.turned:
            to_turned, scratch = scratch, scratch + turned_size(num_tokens, weights.turned)
        of_words = {word: 4 * num_tokens * size for word, size in memory if word not in _OWN}
        # The same for all: what lies between is never touched, so it takes no memory.
        to_digits = 0
        if weights.digits:
            apart = words.DIGITS_APART * num_tokens * max(sizes["num_chosen"], 1)
            to_digits = -(-(max(of_words.values()) + apart) // 64) * 64
            of_words |= {
                each: weights.digits * to_digits + of_words[each] + apart
                for each in WITH_DIGITS & {*of_words}
            }
        of_words |= {words.PHASES: 128 * weights.num_phases, words.SCRATCH: scratch * num_threads}
        # torch aligns memory to cache lines, so two threads never write to one line.
        self._memory = {
            word: torch.empty(num, dtype=torch.uint8, device="cpu")
            for word, num in of_words.items()
        }
        self._every, self.phases = np.arange(num_tokens), self._memory[words.PHASES].numpy()
        words_of = {word: memory.data_ptr() for word, memory in self._memory.items()}
        words_of |= {words.SCRATCH_SIZE: scratch, words.EVERY: self._every.ctypes.data}
        words_of |= {words.DIGITS: to_digits, words.KIND: weights.digits, words.TURNED: to_turned}
        self.indices, self.words = [*words_of], [*words_of.values()]


def forwards_for(
    model: Model, is_unchanged: Callable[[], bool] | None = None
) -> FusedForwards | None:
    """Return the `FusedForwards` of a model; None if no job can run its forwards.

    The first time on a machine, kernels are compiled, which takes some seconds.
    """
    found = _found_for(model, is_unchanged)
    return None if isinstance(found, str) else found


def why_by_torch(model: Model) -> str | None:
    """Return why no job can run forwards of a model, with the module at fault; None if one can."""
    found = _found_for(model, None)
    return found if isinstance(found, str) else None


def _found_for(model: Model, is_unchanged: Callable[[], bool] | None) -> FusedForwards | str:
    if dtype_of(model) is not torch.float32:
        return f"its weights are {dtype_of(model)}"
    compiled = kernels()
    if compiled is None:
        return "compiled kernels do not run here"
    with Attempt(even_memory=True) as attempt:  # the watched forward runs the model's code
        return FusedForwards(model, *compiled, is_unchanged)
    return str(attempt.failure).removeprefix(f"{UnsupportedForwardError.__name__}: ")
