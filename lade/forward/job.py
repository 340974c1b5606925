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
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import getitem, is_
from time import perf_counter
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.pytorch_utils import Conv1D

from lade.attention.packed import Calls
from lade.compat import CACHE, Model, dtype_of, has_hook
from lade.compat.attempts import Attempt
from lade.compat.closeness import limit_of
from lade.compat.view import viewed, with_forward
from lade.forward import words
from lade.forward.comparing import (
    ACTIVATIONS,
    Forward,
    UnsupportedForwardError,
    require,
    why_wrong,
)
from lade.forward.experts import PARTS, STACKS, ExpertsPlan
from lade.forward.linear import FORMATS, MOST_TOKENS, Products, is_plain, kernels
from lade.forward.packed import PackedConv1D, PackedLinear, PackedStack, function_of, made_whole
from lade.forward.reading import (
    AdditionPlan,
    CallPlan,
    DecoderPlan,
    DecoderSizes,
    HeadOrder,
    InputsPlan,
    LatentsPlan,
    LayerPlan,
    NormPlan,
    TransformPlan,
    adapters_of,
    arranged,
    given_to,
    is_alike,
    products_of,
    read,
)
from lade.forward.recurrence import RecurrencePlan, added_by
from lade.forward.workers import Run, most_threads
from lade.machine.threads import alone
from lade.targets.inputs import LOGITS_KEPT
from lade.targets.joint import JointCache
from lade.targets.kv_cache import TreeCache, TreeCacheLayer
from lade.targets.rows import MOST_AT_ONCE

# Tokens of the forwards by which it is found out whether jobs are faster; as a machine may be busy,
# the model's own have to be so much faster.
_TRIED, _CLEAR = (1, 8), 0.8
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
    masks: tuple[Tensor | None, ...]


class _JobRequest(NamedTuple):
    """A forward that a job can run."""

    input_ids: Tensor  # int64 [1, num_tokens]
    positions: Tensor  # int64 [1, num_tokens]
    parts: list[_ForwardPart]
    kept: NDArray[np.int64]  # tokens whose logits are wanted
    #: Runs the model, given a function that runs each layer; None to run all layers at once.
    by_layers: Callable[["_RunLayer"], Tensor] | None = None
    hooked: tuple[bool, ...] = ()  # whether a layer must be called by itself
    held: "_Held | None" = None  # the weights, for all forwards of a call
    model: Model | None = None  # whose modules make angles: a look's differ from the model's own

    @property
    def layers(self) -> list[TreeCacheLayer]:
        """All layers of all caches."""
        return [layer for part in self.parts for layer in part.cache.held]

    def rewinding(self) -> Callable[[], None]:
        """Return a function that makes the layers forget all tokens written from now on."""
        before = [(layer, layer.num_pending) for layer in self.layers]

        def rewind() -> None:
            for layer, num_pending in before:
                layer.num_pending = num_pending

        return rewind


# From a layer's number and input states to its output; the last layer is the head.
_RunLayer = Callable[[int, Tensor], Tensor]


class _Piece(NamedTuple):
    """Tokens of a forward that one job runs."""

    start: int
    num: int
    layers: tuple[int, int]  # the first one, and the one behind the last
    kept: NDArray[np.int64]  # the ones of them whose logits are wanted
    job: NDArray[np.int64]  # the job's array (`words.py`)
    angles: NDArray[np.int64]  # [rotary modules, 2], addresses of cosines and sines
    inputs: list[int]  # addresses of what each layer gets besides states
    refers_to: tuple[NDArray[np.int64], ...]  # arrays whose addresses the job has


class FusedForwards:
    """Runs forwards of a model by jobs if that is faster.

    Args:
        model: the model, in one state; another state needs another object.
        compiled: the kernels.
        run: calls a function on several threads.
        is_unchanged: returns whether the model's state is unchanged; called before each forward of
            a model with adapters, which may be switched at any time; None if it is unknown.

    Attributes:
        why_not: why jobs are no longer used; None if they may be.
        is_packed: whether weights are packed, which torch would unpack in each forward.

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
        self._kernels, self._run, self._products = compiled, run, Products(compiled, run)
        self.why_not: str | None = None
        plan = read(model)
        self._sizes = sizes = plan.sizes
        heads = [layer.heads for layer in plan.layers if layer.heads is not None]
        of_heads = {size for each in heads for size in (each.size, each.size_of_value)}
        is_whole = all(each % compiled.LANES == 0 for each in of_heads)
        require(is_whole, "its heads are no whole number of vectors")
        across = [each.module for each in products_of(plan) if isinstance(each.module, Conv1D)]
        experts = [layer.experts for layer in plan.layers if layer.experts is not None]
        lying = {each.inner for each in experts if each.lies & words.LIE_ACROSS}
        columns = {each.nf for each in across} | lying | {sizes.hidden for _ in lying}
        is_whole = all(each % compiled.LANES == 0 for each in columns)
        require(is_whole, "its columns are no whole number of vectors")
        self.is_packed = type(plan.head) is PackedLinear
        self._limit = limit_of(model)
        names = {module: name for name, module in model.named_modules()}
        self._names = [names[each] for each in (plan.head, *plan.modules)]
        self._kinds = sorted({*plan.kinds})
        #: By layer that keeps tokens, what one adds to the cache, and the state of a recurrent one.
        keeping = [each for each, layer in enumerate(plan.layers) if layer.keys_of is None]
        self._states = [_added_by(plan.layers[each]) for each in keeping]
        #: The layers from here on write no keys: only tokens whose logits are wanted need them.
        self._num_writing = 1 + keeping[-1]
        #: By layer, which of these has its keys and values.
        self._keeper = np.array(
            [
                keeping.index(number if layer.keys_of is None else layer.keys_of)
                for number, layer in enumerate(plan.layers)
            ]
        )
        self._is_recurrent = any(layer.recurrence is not None for layer in plan.layers)
        self._is_slow = False
        self._workspaces: list[_Workspace] = []
        self._weights = _Weights(plan, self._kinds, compiled, names)
        require(self._weights.fit(), "its weights are no plain matrices")
        self._is_unchanged = is_unchanged if any(adapters_of(plan)) else None

    def settle(self, by_torch: Forward, by_job: Forward) -> None:
        """Compare jobs with the model's own forward, in results and in time; once.

        Args:
            by_torch: returns the logits [1, num_tokens, vocab_size] of the first tokens of a text,
                by the model's own forward; the tokens leave no trace in its cache.
            by_job: returns the same by a job.
        """
        reason = why_wrong(
            *(by_torch, by_job, self._limit, "compiled forward", self._sizes.num_experts > 0),
        )
        self.why_not = self.why_not or reason  # jobs may have failed
        if self.is_packed or self.why_not is not None:
            return
        self._is_slow = self._are_slow(by_torch, by_job)

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
        if self.why_not is not None or not self._weights.fit():
            return model
        children = [*model._modules.values()]
        head, *layers = map(model.get_submodule, self._names)
        held = _Held()

        @functools.cache
        def by_layers() -> tuple[Model, list[_RunLayer]]:
            return _by_layers(model, [*layers, head])

        def forward(view: Any, *args: Any, **inputs: Any) -> Any:
            by_torch = type(view).forward.__get__(view)
            is_whole = all(map(is_, view._modules.values(), children))  # else they are a view's
            try:
                require(is_whole and not args, "it is not of this model, or has other arguments")
                request = self._request(inputs)._replace(held=held, model=model)
                with_hooks = [
                    each for each in layers if each._forward_hooks or each._forward_pre_hooks
                ]
                has_kwargs = any(each._forward_pre_hooks_with_kwargs for each in with_hooks)
                require(not has_kwargs, "hooks of a layer see more than states")
            except UnsupportedForwardError:
                return by_torch(*args, **inputs)
            if with_hooks and any(map(has_hook, with_hooks)):
                kept = inputs.get(LOGITS_KEPT, 0)
                drops_tokens = (
                    self._num_writing < self._sizes.num_layers
                    and isinstance(kept, int)
                    and kept > 0
                )
                if self._weights.transform is not None or drops_tokens:
                    return by_torch(**inputs)  # whose products' rows would depend on each other
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
        """Run a forward by a job, unless that is slower or wrong."""
        if self.why_not is not None or self._is_slow:
            return by_torch()
        return self._run_job(request, by_torch, cache)

    def _run_job(self, request: _JobRequest, by_torch: Callable[[], Any], cache: Any) -> Any:
        """Run a forward by a job; by the model itself if the job fails."""
        rewind = request.rewinding()
        with Attempt() as attempt:
            logits = self._by_job(request)
            if logits is not None:
                return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})
        rewind()
        with made_whole():
            result = by_torch()
        self.why_not = attempt.failure  # unless that fails, too
        return result

    def _by_job(self, request: _JobRequest) -> Tensor | None:
        """Return logits [num_rows, …, vocab_size]; None, with nothing written, if impossible."""
        sizes, num = self._sizes, request.input_ids.shape[1]
        input_ids, positions = self._weights.replaced(request.input_ids), request.positions
        states = alone(lambda: self._weights.embedded(input_ids, positions))
        if states.dtype is not torch.float32 or states.shape != (1, num, sizes.hidden):
            return None
        # Angles of all pieces at once: some depend on the length of the text.
        angles = alone(lambda: self._angles(states, request))
        make_inputs = self._weights.make_inputs
        inputs = None if make_inputs is None else make_inputs(input_ids, states, self._product)
        pieces = self._pieces(request, angles, inputs)
        if pieces is None:
            return None
        if request.by_layers is not None:
            logits = request.by_layers(partial(self._run_layer, request, pieces))
        else:
            wide = _written(states)
            logits = states.new_empty((1, len(request.kept), sizes.vocab_size))
            table, done = self._weights.table(request.held or _Held()), 0
            transform = self._weights.transform
            for piece in pieces:
                is_last = transform is None and piece.layers[1] == sizes.num_layers
                of_piece = logits[0, done:] if is_last else None
                self._run_piece(piece, wide, table, piece.layers, of_piece)
                done += len(piece.kept)
            if transform is not None:
                last = wide[torch.from_numpy(request.kept)][None]
                logits = self._by_head(transform(last, self._product))
            logits = sizes.finish(logits)
        for part in request.parts:
            part.cache.count(part.num)
        return logits

    def _run_layer(
        self, request: _JobRequest, pieces: list[_Piece], number: int, states: Tensor
    ) -> Tensor:
        """Run a layer and all up to the next with hooks, or the head; return the states."""
        last, hidden, hooked = self._sizes.num_layers, self._sizes.hidden, request.hooked
        is_known = states.dtype is torch.float32 and states.shape[::2] == (1, hidden)
        if not is_known:
            raise ValueError(f"states of a layer have become {states.dtype} {[*states.shape]}")
        if number == last:
            return self._by_head(states)
        if number > 0 and not hooked[number] and not hooked[number - 1]:
            return states  # it has run together with an earlier layer
        wide = _written(states)
        end = number + 1
        while end < last and not hooked[number] and not hooked[end]:
            end += 1
        if len(wide) != sum(piece.num for piece in pieces):
            raise ValueError(f"a layer has states of {len(wide)} tokens")
        held = (request.held or _Held()).part(number, end)
        table = self._weights.table(held, (number, end))
        for piece in pieces:
            self._run_piece(piece, wide, table, (number, end))
        return wide[None]

    def _by_head(self, states: Tensor) -> Tensor:
        return self._product(states, self._weights.head())

    def _product(self, states: Tensor, linear: nn.Linear) -> Tensor:
        if type(linear) is PackedLinear:
            return linear.forward(states)
        if not is_plain(linear.weight, torch.float32):
            raise ValueError("weights are no plain matrices any more")
        return self._products.product(states, linear.weight, linear.bias)

    def _pieces(
        self, request: _JobRequest, angles: Sequence[tuple[Tensor, ...]], inputs: Tensor | None
    ) -> list[_Piece] | None:
        """Describe the tokens that one job runs; None if no job can.

        Args:
            request: the forward.
            angles: cosines and sines, float32 [1, num_tokens, …], of each rotary module.
            inputs: what layers get besides states, float32 [num_layers, num_tokens, size], if any.
        """
        sizes, num, all_caches = self._sizes, request.input_ids.shape[1], self._caches(request)
        if all_caches is None:
            return None
        step, pieces = MOST_TOKENS if len(request.parts) == 1 else num, []
        spans = [(start, min(step, num - start)) for start in range(0, num, step)]
        ends = [(0, sizes.num_layers)] * len(spans)
        may_drop = self._num_writing < sizes.num_layers and request.by_layers is None
        if may_drop and len(request.parts) == 1 and request.kept.tolist() == [num - 1] != [0]:
            ends = [(0, self._num_writing)] * len(spans) + [(self._num_writing, sizes.num_layers)]
            spans.append((num - 1, 1))
        for (start, size), layers in zip(spans, ends, strict=True):
            caches = all_caches.copy()
            caches[..., words.NUM_KEYS] -= num - start - size
            at = np.array([[each[:, start:].data_ptr() for each in pair] for pair in angles])
            parts = np.array(
                [
                    (part.first, min(part.num, size), *_place_of(part.masks[kind], start))
                    for kind in range(len(self._kinds))
                    for part in request.parts
                ]
            )
            job = np.zeros(words.JOB_SIZE, np.int64)
            of_model = sizes.hidden, sizes.num_layers, sizes.vocab_size
            job[: words.STATES] = size, *of_model, most_threads()
            job[words.TILES] = self._kernels.run_tiles().address
            job[words.PARTS], job[words.NUM_PARTS] = parts.ctypes.data, len(request.parts)
            job[words.CACHES] = caches.ctypes.data
            job[words.BETWEEN_SIZE] = sizes.between
            job[words.FACTORS] = at[-1, 0] if sizes.factors is not None else 0
            job[words.SCORES_SIZE] = sizes.num_experts + 1
            inside = request.kept[(request.kept >= start) & (request.kept < start + size)]
            inside = inside[: len(inside) if layers[1] == sizes.num_layers else 0]
            of_layers = [] if inputs is None else [each[start:].data_ptr() for each in inputs]
            made = job, at, of_layers, (parts, caches)
            pieces.append(_Piece(start, size, layers, inside - start, *made))
        return pieces

    def _run_piece(
        self,
        piece: _Piece,
        states: Tensor,
        table: NDArray[np.int64],
        layers: tuple[int, int],
        logits: Tensor | None = None,
    ) -> None:
        """Run some layers on tokens, and write their keys and values.

        Args:
            piece: the tokens.
            states: float32 [num_tokens, hidden_size] of all pieces, which are overwritten.
            table: a table of `_Weights.table`; gets the addresses of the piece's angles.
            layers: the first layer, and the one behind the last.
            logits: gets the logits of the kept tokens; None if more layers follow.
        """
        job, num, (first, end) = piece.job.copy(), piece.num, layers
        turning = self._weights.turning
        if len(turning):
            table[turning[:, 0], words.COS : words.SIN + 1] = piece.angles[turning[:, 1]]
        if piece.inputs:
            table[: self._sizes.num_layers, words.INPUTS] = piece.inputs
        job[words.ADDITIONS] = table[self._sizes.num_layers + 1 :].ctypes.data
        last = table[self._sizes.num_layers]
        job[words.LAST_NORM :] = last[: words.NORM_SIZE + words.PRODUCT_SIZE]
        job[words.STATES] = states.data_ptr() + 4 * self._sizes.hidden * piece.start
        job[words.NUM_LAYERS] = end - first
        job[words.LAYERS] = table.ctypes.data + 8 * words.LAYER_SIZE * first
        job[words.CACHES] += 8 * words.CACHE_SIZE * job[words.NUM_PARTS] * first
        num_threads = int(job[words.NUM_THREADS])
        workspace = self._workspace(num, num_threads)
        workspace.describe(job)
        if logits is None:
            job[words.LAST_NORM :] = job[words.VOCAB_SIZE] = 0
            job[words.KEPT], job[words.NUM_KEPT] = job[words.EVERY], num
        else:
            job[words.KEPT], job[words.NUM_KEPT] = piece.kept.ctypes.data, len(piece.kept)
            job[words.LOGITS] = logits.data_ptr()
        self._run(self._kernels.run_forward().address, job.ctypes.data, num_threads)
        self._workspaces.append(workspace)

    def _caches(self, request: _JobRequest) -> NDArray[np.int64] | None:
        """Return addresses in the caches by layer and part, CACHE_SIZE each; None if unknown."""
        found = [part.cache.slot_addresses(part.num, self._states) for part in request.parts]
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            return None
        caches: NDArray[np.int64] = np.stack(known, axis=1)[self._keeper]
        num_keys = caches[..., words.NUM_KEYS]
        for number, part in enumerate(request.parts):
            for kind, mask in enumerate(part.masks):
                if mask is not None and bool(
                    (num_keys[self._weights.of_kind[kind], number] > mask.shape[1]).any()
                ):
                    return None
        return caches

    def _angles(self, states: Tensor, request: _JobRequest) -> list[tuple[Tensor, ...]]:
        """Let the model make its angles: cosines and sines, float32 [1, num_tokens, …].

        If queries have factors, these come last, twice.
        """
        positions, model = request.positions, request.model
        assert model is not None
        given = {words.STATES_GIVEN: states, words.POSITIONS_GIVEN: positions}
        given[words.AXES_GIVEN] = positions.expand(3, -1, -1)
        made = []
        for name, plan, how in self._weights.rotaries:
            args, kwargs = given_to(plan, given)
            angles = arranged(model.get_submodule(name)(*args, **kwargs), how)
            made.append(tuple(each.float().contiguous() for each in angles))
        if self._sizes.factors is not None:
            made.append((self._sizes.factors(positions).float(),) * 2)
        return made

    def _workspace(self, num_tokens: int, num_threads: int) -> "_Workspace":
        """Return memory for so many tokens that no other thread uses."""
        with suppress(IndexError):
            found = self._workspaces.pop()
            if found.fits(num_tokens, num_threads):
                return found
        of_call = num_tokens, num_threads, self._weights.by_digits
        return _Workspace(self._kernels, self._sizes, *of_call)

    # --- requests ---------------------------------------------------------------------------------

    def _request(self, inputs: dict[str, Any]) -> _JobRequest:
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
        has_all = all(len(part.cache.held) == len(self._states) for part in parts)
        positions: Any = inputs.get("position_ids")
        if positions is None and len(parts) == 1:
            positions = torch.arange(num, dtype=torch.int64, device=ids.device)[None]
            positions = positions + cache.get_seq_length()
        if positions is not None and positions.dim() == 3 and is_alike(positions):
            positions = positions[0]  # of text, several axes count the same
        is_known = positions is not None and positions.shape == ids.shape
        require(has_all and is_known, "its cache or its positions are of another kind")
        kept: Any = inputs.get(LOGITS_KEPT, 0)
        nodes = np.arange(num)
        nodes = nodes[kept.numpy()] if isinstance(kept, Tensor) else nodes[-kept:]
        return _JobRequest(ids, positions, parts, nodes)

    def _parts(self, mask: Any, cache: TreeCache | JointCache, num: int) -> list[_ForwardPart]:
        """Return the calls that run together, or one alone, as parts."""
        by_kind = mask if isinstance(mask, dict) else dict.fromkeys(self._kinds, mask)
        require(by_kind.keys() >= {*self._kinds}, "some masks are missing")
        kinds = [by_kind[kind] for kind in self._kinds]
        held: Sequence[Any] = [cache]
        calls: list[Any] = [Calls([num], [each]) for each in kinds]
        if isinstance(cache, JointCache):
            held, calls = cache.caches, [getattr(each, "_lade_calls", None) for each in kinds]
            require(None not in calls, "the masks of calls are lost")
        of_parts, parts = zip(*(each.masks for each in calls), strict=True), []
        for own, nodes, masks in zip(held, calls[0].nodes, of_parts, strict=True):
            size = nodes.stop - nodes.start
            sees_all = own.get_seq_length() + size <= self._sizes.reach
            of_kinds = tuple(_of_part(each, size, sees_all) for each in masks)
            parts.append(_ForwardPart(own, nodes.start, size, of_kinds))
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


def _written(states: Tensor) -> Tensor:
    """Return a copy of states [1, num_tokens, hidden_size] that a job may write to."""
    return states[0].clone(memory_format=torch.contiguous_format)


class _Held:
    """Keeps the memory of weights alive while their addresses are in use.

    A reference to the parameter is not enough, because its `data` may be exchanged.
    """

    def __init__(self) -> None:
        self.owners: Sequence[Any] = ()  # the dict in a module that has each weight
        self.addresses: list[int] = []
        self.table: Any = None  # int64, the job's table of these weights
        self._memory: list[Tensor] = []
        self._parts: dict[tuple[int, int], _Held] = {}

    def part(self, first: int, end: int) -> "_Held":
        """Return what holds the weights of some layers, which hooks may have replaced."""
        return self._parts.setdefault((first, end), _Held())

    def hold(self, weights: Sequence[Tensor]) -> None:
        """Hold the memory of weights."""
        self._memory = [*map(Tensor.detach, weights)]
        self.addresses = [*map(Tensor.data_ptr, self._memory)]


def _calling(plan: CallPlan) -> Callable[[Mapping[Any, Any]], Any]:
    """Return a function that calls a module, weakly referenced, with tensors for placeholders."""
    module, unheld = _reference(plan.module), plan._replace(module=None)

    def call(tensors: Mapping[Any, Any]) -> Any:
        args, kwargs = given_to(unheld, tensors)
        return module()(*args, **kwargs)

    return call


def _giving_inputs(plan: InputsPlan, num_layers: int) -> Callable[..., Tensor]:
    """Return a function of tokens, states and products that gives what layers get besides states.

    torch's products of several tokens depend on how many they are, so its own are not used.
    """
    linear, norm, look = _reference(plan.product), _reference(plan.norm), _calling(plan.embedding)

    def give(tokens: Tensor, states: Tensor, product: Callable[[Tensor, Any], Tensor]) -> Tensor:
        shape = *tokens.shape, num_layers, -1
        made = norm()((product(states, linear()) * plan.times).view(shape))
        whole: Tensor = (made + look({words.TOKENS_GIVEN: tokens}).view(shape)) * plan.scale
        return whole[0].transpose(0, 1).contiguous()

    return give


def _transforming(plan: TransformPlan) -> Callable[[Tensor, Callable[[Tensor, Any], Tensor]], Any]:
    """Return a function that transforms states by a plan, whose modules are weakly referenced."""
    first, linear, last = map(_reference, (plan.first, plan.linear, plan.last))
    activation, has_first = ACTIVATIONS[plan.activation], plan.first is not None

    def transform(states: Tensor, product: Callable[[Tensor, Any], Tensor]) -> Any:
        given = first()(states) if has_first else states
        return last()(activation(product(given, linear())))

    return transform


def _reference(module: nn.Module | None) -> Callable[[], Any]:
    return (lambda: None) if module is None else weakref.ref(module)


class _Weights:
    """Addresses of a plan's weights, in the form of a job; looked up anew for each forward.

    Attributes:
        head: a weak reference to the module that makes logits of states.
        make_inputs: gives what layers get besides states, float32 [num_layers, num_tokens, size],
            for tokens, states and a function for products; None if they get nothing.
        transform: turns the last states into the head's input, given a function for products; None
            if there is only a norm between them, or nothing.
        of_kind: numbers of the layers that have each kind of mask.
        rotaries: names of the modules that make angles, what they get, and the angles' arrangement.
        turning: int64 [layers with angles, 2], numbers of the layer and of its rotary module.
        by_digits: whether products read digits of their inputs.
    """

    by_digits = False

    def __init__(
        self,
        plan: DecoderPlan,
        kinds: Sequence[str],
        compiled: Any,
        names: Mapping[nn.Module, str],
    ) -> None:
        end = len(plan.layers)
        calls, self._scale, first_norm, replaced = plan.embedding
        ids = torch.tensor(replaced, dtype=torch.int64, device="cpu") if replaced else None
        self._replaced = None if ids is None else ids.unbind(1)
        self._lookups = [*map(_calling, calls)]
        self._first_norm = _reference(first_norm)
        self.make_inputs = None if plan.inputs is None else _giving_inputs(plan.inputs, end)
        self.head: Callable[[], Any] = weakref.ref(plan.head)
        self.transform = None if plan.transform is None else _transforming(plan.transform)
        # Rows behind the layers': last norm and head, then additions, then experts, recurrences and
        # latents.
        of_more = 1 + sum(len(each.added) for each in products_of(plan))
        of_layers = [(layer.experts, layer.recurrence, layer.latents) for layer in plan.layers]
        num_rows = end + of_more + sum(each is not None for those in of_layers for each in those)
        self._table = np.zeros((num_rows, words.LAYER_SIZE), np.int64)
        indices = [kinds.index(kind) for kind in plan.kinds]
        self.of_kind = [np.flatnonzero(np.array(indices) == kind) for kind in range(len(kinds))]
        # Parameters by module and name, with the number of their word and an offset in bytes. The
        # last norm and the head count as the layer after the last; additions follow.
        self._slots: list[tuple[Any, ...]] = []
        self._absent: list[tuple[int, Callable[[], Any], str]] = []  # parameters that are None
        bounds = [0]  # index of the first parameter of each layer, and of the parts behind
        self.rotaries: list[tuple[str, CallPlan, int]] = []
        turning: list[tuple[int, int]] = []
        known: dict[tuple[int, int], int] = {}
        num_added, ends = 0, range(words.INNER_SIZE)
        for number, layer in enumerate(plan.layers):
            row, between, rotary = self._table[number], 0, layer.rotary
            if rotary is not None:
                which = known.setdefault((id(rotary), layer.arrangement), len(known))
                if which == len(self.rotaries):
                    given = names[rotary.module], rotary._replace(module=None)
                    self.rotaries.append((*given, layer.arrangement))
                turning.append((number, which))
            for word, norm in zip(ends[: words.QUERY : words.NORM_SIZE], layer.norms, strict=True):
                self._add_norm(number, word, norm)
            words_of = ends[words.QUERY :: words.PRODUCT_SIZE]
            for word, product in zip(words_of, layer.products, strict=True):
                row[word + words.FIRST_ADDED] = num_added
                if product is not None:
                    row[word + words.NUM_COLUMNS] = product.num
                    are_whole = word != words.OUT or _are_whole_blocks(layer)
                    of_product = word, product.module, product.first
                    self._add_matrix(number, *of_product, by_digits=are_whole)
                    for added in product.added:
                        self._add_addition(end + 1 + num_added, added, product.first, between)
                        between += added.first.out_features
                        num_added += 1
                row[word + words.END_ADDED] = num_added
            if layer.experts is not None:
                self._add_experts(end + of_more, layer.experts)
                row[words.EXPERTS], of_more = of_more, of_more + 1
            if layer.recurrence is not None:
                self._add_recurrence(end + of_more, layer.recurrence)
                row[words.RECURRENCE], of_more = of_more, of_more + 1
            if layer.latents is not None:
                self._add_latents(end + of_more, layer.latents, compiled)
                row[words.LATENT], of_more = of_more, of_more + 1
            if layer.heads is not None:
                *sizes, times = layer.heads
                row[words.NUM_HEADS : words.LATENT] = *sizes, _bits(times)
            row[words.RUN_ATTENTION : words.NUM_HEADS] = _jobs_of(layer, compiled)
            row[words.INNER_SIZE], row[words.INPUT_SIZE] = layer.inner, layer.of_inputs
            row[words.READS] = layer.keys_of is not None
            if layer.scalar is not None:
                self._add(number, words.SCALAR, plan.modules[number], layer.scalar)
            row[words.ACTIVATION], row[words.TURN] = layer.activation, layer.turn
            row[words.TURNED], row[words.SEES] = layer.num_turned, indices[number]
            row[words.SCALING] = _bits(layer.scaling)
            row[words.SOFTCAP], row[words.FACTOR] = _bits(layer.softcap), _bits(layer.factor)
            row[words.IS_PARALLEL], row[words.SCALED] = layer.is_parallel, layer.is_scaled
            row[words.NUM_GROUPS : words.MIXED_SIZE] = _flat(layer.order)
            row[words.MIXED_SIZE], row[words.ATTENDED_SIZE] = layer.mixed, layer.attended
            if layer.convolution is not None:
                row[words.TAPS] = layer.convolution.kernel_size[0]
                self._add(number, words.CONVOLUTION, layer.convolution, "weight")
                self._add(number, words.CONVOLUTION_BIAS, layer.convolution, "bias")
            if layer.sinks is not None:
                self._add(number, words.SINKS, layer.sinks, "sinks")
            bounds.append(len(self._slots))
        self._add_norm(end, 0, plan.norm)
        self._table[end, words.NORM_SIZE + words.NUM_COLUMNS] = plan.head.out_features
        self._add_matrix(end, words.NORM_SIZE, plan.head, by_digits=True)
        self.turning = np.array(turning, np.int64).reshape(-1, 2)
        slots = zip(*self._slots, strict=True)
        self._modules, self._kinds, self._names, index, starts, self._known = slots
        self._index, self._starts, self._bounds = np.array(index), np.array(starts), bounds

    def _add_norm(self, number: int, word: int, norm: NormPlan | None) -> None:
        if norm is not None:
            self._table[number, word + words.FLAGS] = norm.flags
            self._table[number, word + words.EPS] = _bits(norm.eps)
            self._add(number, word + words.NORM_WEIGHT, norm.module, "weight")
            self._add(number, word + words.NORM_BIAS, norm.module, "bias")

    def _add_addition(self, number: int, added: AdditionPlan, column: int, start: int) -> None:
        row = self._table[number]
        require(type(added.second) is nn.Linear, "what is added to a product is packed")
        self._add_matrix(number, 0, added.first)
        self._add_matrix(number, words.SECOND, added.second, column)
        row[words.NUM_COLUMNS], row[words.START] = added.first.out_features, start
        row[words.TIMES] = _bits(added.times)

    def _add_experts(self, number: int, plan: ExpertsPlan) -> None:
        row, routing = self._table[number], plan.routing
        row[words.ROUTER + words.NUM_COLUMNS] = len(plan.router.weight)
        if isinstance(plan.router, nn.Linear):
            self._add_matrix(number, words.ROUTER, plan.router)
        else:
            self._add(number, words.ROUTER + words.WEIGHT, plan.router, "weight")
            self._add(number, words.ROUTER + words.BIAS, plan.router, "bias")
        if plan.shared_gate is not None:
            row[words.SHARED_GATE + words.NUM_COLUMNS] = 1
            self._add_matrix(number, words.SHARED_GATE, plan.shared_gate)
        row[words.NUM_CHOSEN], row[words.WEIGHS] = plan.num_chosen, routing.weighs
        row[words.ROUTING], row[words.SHARE] = routing.flags, _bits(routing.share)
        row[words.ADDED_TO_SUM] = _bits(routing.added)
        row[words.NUM_SETS], row[words.NUM_SETS_CHOSEN] = routing.groups
        row[words.EXPERT_INNER] = plan.inner
        if plan.correction is not None:
            self._add(number, words.CORRECTION, *plan.correction)
        row[words.LIES], row[words.GATING] = plan.lies, plan.gating.activation
        row[words.ALPHA : words.ADDED_TO_UP + 1] = [*map(_bits, plan.gating[1:])]
        held = vars(plan.module)
        if type(held.get(STACKS[0])) is PackedStack:
            self._add_packed_experts(number, plan, [held[name] for name in STACKS[:2]])
            return
        first_words = words.EXPERT_GATE_UP, words.EXPERT_DOWN, words.GATE_UP_BIAS, words.DOWN_BIAS
        for word, name in zip(first_words, STACKS, strict=True):
            self._add(number, word, plan.module, name)

    def _add_packed_experts(
        self, number: int, plan: ExpertsPlan, stacks: list[PackedStack]
    ) -> None:
        row, module = self._table[number], plan.module
        of_parts = words.EXPERT_GATE_UP, words.EXPERT_UP, words.EXPERT_DOWN
        if stacks[0].is_one:  # as the model stores it, in 16 bits
            for word, index, name, stack in zip(
                of_parts[::2], (0, 2), PARTS[:3:2], stacks, strict=True
            ):
                weight = stack.parts[0]
                if plan.lies & words.LIE_ACROSS:
                    row[words.OF_STACKS] = FORMATS[weight.dtype]
                else:
                    self._pack_experts(row, index, stack.blocks[0], stack.ggml_types[0])
                self._add(number, word, module, name, weight.dtype)
            row[words.GATE_PACKED + 1] = row[words.GATE_PACKED]
            row[words.GATE_ROW + 1] = row[words.GATE_ROW]
            biases: tuple[str, ...] = STACKS[2:]
        else:
            parts = (
                pair for each in stacks for pair in zip(each.parts, each.ggml_types, strict=True)
            )
            for index, (part, format_) in enumerate(parts):
                self._pack_experts(row, index, part, format_)
            row[words.LIES] = 0  # as files have gate and up, whatever the module wants
            for word, name in zip(of_parts, PARTS[:3], strict=True):
                self._add(number, word, module, name, torch.uint8)
            biases = PARTS[3], STACKS[3]
        for word, name in zip((words.GATE_UP_BIAS, words.DOWN_BIAS), biases, strict=True):
            self._add(number, word, module, name)

    def _pack_experts(self, row: Any, index: int, part: Tensor, format_: int) -> None:
        function = function_of(part[0], format_)
        if function is None:
            raise UnsupportedForwardError("its experts are in a format that jobs do not read")
        row[words.GATE_PACKED + index], row[words.GATE_ROW + index] = (
            function.address,
            part.shape[2],
        )
        row[words.GATE_DIGITS + index] = function.by_digits
        self.by_digits |= function.by_digits

    def _add_recurrence(self, number: int, plan: RecurrencePlan) -> None:
        row = self._table[number]
        row[words.KEY_HEADS : words.COLUMNS] = plan.heads
        row[words.COLUMNS : words.CHANNELS] = *plan.columns, *plan.steps
        row[words.CHANNELS : words.NUM_NORMED] = plan.channels
        row[words.NUM_NORMED], row[words.IS_DELTA] = plan.num_normed, plan.is_delta
        for word, name in enumerate(plan.names, words.DECAY_BIASES):
            self._add(number, word, plan.module, name)

    def _add_latents(self, number: int, plan: LatentsPlan, compiled: Any) -> None:
        row, products = self._table[number], {words.EXPAND: plan.expand}
        if plan.query is not None:
            products[words.SECOND_QUERY] = plan.query
        for word, product in products.items():
            row[word + words.NUM_COLUMNS] = product.num
            self._add_matrix(number, word, product.module)
        expand: Any = plan.expand.module.weight
        require(expand.dtype in FORMATS, "what latents are expanded by is in blocks")
        row[words.OF_EXPAND] = FORMATS[expand.dtype]
        row[words.STRAIGHT : words.ATTEND] = plan[2:]
        row[words.ATTEND] = compiled.run_attention().address

    def _add_matrix(
        self, number: int, word: int, module: Any, column: int = 0, *, by_digits: bool = False
    ) -> None:
        """Add weight and bias of a linear layer, from one of its columns on.

        By digits, its inputs are written in whole blocks.
        """
        if type(module) is PackedLinear:
            function = function_of(module.blocks, module.ggml_type, by_digits=by_digits)
            half, of_row = module.half_head, module.blocks.shape[1]
            if function is None or (column and half):
                raise UnsupportedForwardError("its weights are packed otherwise")
            self.by_digits |= function.by_digits
            packed = function.address, of_row, half
            self._table[number, word + words.PACKED : word + words.HALF + 1] = packed
            start, dtype = column * of_row, module.weight.dtype
        elif isinstance(module, Conv1D):
            packed_as = type(module) is PackedConv1D
            dtype = module.weight.dtype if packed_as else torch.float32
            require(dtype in FORMATS, "its weights are packed otherwise")
            self._table[number, word + words.ACROSS] = module.nf * dtype.itemsize
            self._table[number, word + words.ROW_BYTES] = FORMATS[dtype]
            start = column * dtype.itemsize
        else:
            start, dtype = 4 * column * module.in_features, torch.float32
        self._add(number, word, module, "weight", dtype, start)
        self._add(number, word + words.BIAS, module, "bias", start=4 * column)

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
            index = number * words.LAYER_SIZE + word
            known = dtype, weight.shape
            self._slots.append((weakref.ref(module), kind, name, index, start, known))

    def replaced(self, tokens: Tensor) -> Tensor:
        """Return tokens as the model embeds them: for some it embeds others."""
        for placeholder, token in zip(*self._replaced, strict=True) if self._replaced else ():
            tokens = torch.where(tokens == placeholder, token, tokens)
        return tokens

    def embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the states of the first layer."""
        given = {words.TOKENS_GIVEN: tokens, words.POSITIONS_GIVEN: positions}
        states, *others = (look({**given, words.STATES_GIVEN: None}) for look in self._lookups)
        states = sum(others, states if self._scale == 1.0 else states * self._scale)
        norm = self._first_norm()
        embedded: Tensor = states if norm is None else norm(states)
        return embedded

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

    def table(self, held: _Held, layers: tuple[int, int] | None = None) -> NDArray[np.int64]:
        """Return the words of all layers, of what comes last, and of additions.

        They are [num_layers + 1 + num_additions, LAYER_SIZE], for one forward at a time.

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


def _jobs_of(layer: LayerPlan, compiled: Any) -> tuple[int, int]:
    """Return RUN_ATTENTION and RUN_EXPERTS of a layer; what they name is compiled now."""
    run = compiled.run_attention if layer.convolution is None else compiled.run_convolution
    if layer.latents is not None:
        from lade.forward._latents import run_latents as run
    if layer.recurrence is not None:
        from lade.forward._recurrence import run_recurrence as run
    return run().address, 0 if layer.experts is None else compiled.run_experts().address


def _are_whole_blocks(layer: LayerPlan) -> bool:
    """Return whether attention, or what a layer has instead, gives its results in whole blocks."""
    is_usual = layer.recurrence is None and layer.latents is None
    return is_usual and (layer.heads is None or layer.heads.size_of_value % words.DIGITS_BLOCK == 0)


def _flat(order: HeadOrder) -> tuple[int, ...]:
    return order.num_groups, *order.firsts, order.query_step, order.gate


def _added_by(layer: LayerPlan) -> tuple[Any, ...]:
    """Return what a token adds to the cache of a layer, see `TreeCache.slot_addresses`."""
    if layer.convolution is None:
        assert layer.heads is not None
        _, num, of_key, of_value, more, _ = layer.heads
        sizes = of_key, more or of_value
        shapes = [(1, num, 1, size) for size in sizes]
        return tuple(torch.empty(each, dtype=torch.float32, device="cpu") for each in shapes)
    num = layer.convolution.out_channels
    inputs = torch.empty((1, 1, 1, num), dtype=torch.float32, device="cpu")
    return (inputs,) if layer.recurrence is None else (inputs, *added_by(layer.recurrence))


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))


class _Workspace:
    """Memory that a job needs while it runs."""

    def __init__(
        self, kernels: Any, sizes: DecoderSizes, num_tokens: int, num_threads: int, digits: bool
    ) -> None:
        self._num_tokens, self._num_threads = num_tokens, num_threads
        hidden, head, chosen = sizes.hidden, sizes.head_size, sizes.num_chosen
        scratch = kernels.scratch_size(
            *(num_tokens, hidden, sizes.num_heads, head, sizes.between, sizes.num_experts),
            *(chosen, sizes.taps, sizes.of_recurrence, sizes.of_latents),
        )
        inputs = {
            words.NORMED: num_tokens * (4 * sizes.normed + words.DIGITS_APART),
            words.ATTENDED: num_tokens * (4 * sizes.attended + words.DIGITS_APART),
            words.INNER: num_tokens * (4 * sizes.inner + words.DIGITS_APART),
            words.OF_EXPERTS: num_tokens * chosen * (4 * sizes.expert_inner + words.DIGITS_APART),
        }
        # The same for all: what lies between is never touched, so it takes no memory.
        to_digits = -(-max(inputs.values()) // 64) * 64 if digits else 0
        # torch aligns memory to cache lines, so two threads never write to one line.
        self._memory = {
            word: torch.empty(num, dtype=torch.uint8, device="cpu")
            for word, num in {
                **{word: num + to_digits for word, num in inputs.items()},
                words.MIXED: 4 * num_tokens * sizes.mixed,
                words.QUERIES: 4 * num_tokens * sizes.queries,
                words.ADDED: 4 * num_tokens * hidden,
                words.BETWEEN: 4 * num_tokens * sizes.between,
                words.SCORES: 4 * num_tokens * (sizes.num_experts + 1),
                words.CHOSEN: 8 * num_tokens * chosen,
                words.SHARES: 4 * num_tokens * chosen,
                words.PHASES: 256 * (sizes.num_layers * words.PHASES_OF_LAYER + 2),
                words.SCRATCH: scratch * num_threads,
            }.items()
        }
        self._every, self._phases = np.arange(num_tokens), self._memory[words.PHASES].numpy()
        words_of = {word: memory.data_ptr() for word, memory in self._memory.items()}
        words_of |= {words.SCRATCH_SIZE: scratch, words.EVERY: self._every.ctypes.data}
        words_of[words.DIGITS] = to_digits
        self._indices, self._words = [*words_of], [*words_of.values()]

    def fits(self, num_tokens: int, num_threads: int) -> bool:
        """Return whether the memory is large enough."""
        return num_tokens <= self._num_tokens and num_threads <= self._num_threads

    def describe(self, job: NDArray[np.int64]) -> None:
        """Write the addresses of the memory into a job."""
        self._phases.fill(0)
        job[self._indices] = self._words


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
