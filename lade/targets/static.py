"""Trees on transformers' own static cache: steps of a few shapes, compiled by `torch.compile`.

A tree is padded to one of a few widths and written behind the text, in slots that never move; then
the kept nodes move to its front. What a node sees, in windows and chunks too, is in masks alone.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from threading import Lock
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache

from lade.compat import CACHE, attention_of
from lade.compat.attempts import Attempt
from lade.compat.closeness import distance, limit_of
from lade.errors import UnsupportedModelError
from lade.machine.transfer import integers_on
from lade.targets.base import Target
from lade.targets.kv_cache import LayerKind
from lade.targets.trees import MASK_IS_ADDED, TreeTarget
from lade.tree import Tree, TreeTensors

# Tokens of a step, and slots of the cache. Each pair is compiled: at most 7, as torch compiles the
# same code at most 8 times. A GPU takes about as long for 16 tokens as for one, and four times the
# slots of a short text are a few percent of the weights. What is wider (a full tree behind the
# tokens of a proof) or longer is not compiled.
WIDTHS = (16, 64)
LENGTHS = (2048, 8192, 32_768)
_NUM_RUNS = {"cuda": 3}  # torch warms a graph up, records it, and replays it
_CLASSES = {"indexed": "StaticIndexedLayer", "empty": "DummyLayer"}  # of transformers


def is_too_long(num_tokens: int) -> bool:
    """Return whether no step after so many tokens would be compiled."""
    return num_tokens + WIDTHS[-1] > LENGTHS[-1]


class StaticTreeCache(Cache):  # type: ignore[misc]
    """A `Cache` of transformers' static layers, each as long as the text, with a window or not."""

    def __init__(self, kinds: Sequence[LayerKind], num_slots: int) -> None:
        if {kind.kind for kind in kinds} & {"convolved", "recurrent"}:
            raise UnsupportedModelError("its convolutions see a text as long as it is")
        classes = (getattr(cache_utils, _CLASSES.get(kind.kind, "StaticLayer")) for kind in kinds)
        super().__init__(layers=[of_kind(max_cache_len=num_slots) for of_kind in classes])
        self.num_slots, self.length = num_slots, 0
        self._least = 0  # the shortest text whose windows are held whole

    def take_over(self, cache: Any) -> bool:
        """Copy the text of a cache of lade; return False if it does not suit the memory."""
        self.length, self._least = cache.length, getattr(cache, "_least", 0)
        for mine, theirs in zip(self.layers, cache.layers, strict=True):
            if theirs.keys is None:
                continue
            first = getattr(theirs, "offset", 0)
            self._least = max(self._least, cache.length if first else 0)
            indexed = getattr(theirs, "indexer_keys", None)
            with torch.inference_mode(False):  # the memory may outlive the call
                if not mine.is_initialized:
                    mine.lazy_initialization(theirs.keys, theirs.values)
                if indexed is not None and not mine.is_indexer_initialized:
                    mine.lazy_initialization_indexer(indexed)
            pairs = [(mine.keys, theirs.keys), (mine.values, theirs.values)]
            pairs += [(mine.indexer_keys, indexed)] if indexed is not None else []
            for slots, held in pairs:
                if (held.dtype, held.device) != (slots.dtype, slots.device):
                    return False
                slots.zero_()  # attention multiplies what no node sees by 0
                slots[..., first : self.length, :] = held[..., : self.length - first, :]
        return True

    def _all(self, *names: str) -> list[Tensor]:
        found = (getattr(layer, name, None) for layer in self.layers for name in names)
        return [each for each in found if each is not None]

    def rewind(self) -> None:
        """Make the next forward write behind the text."""
        lengths = self._all("cumulative_length", "indexer_cumulative_length")
        torch._foreach_zero_(lengths)
        torch._foreach_add_(lengths, self.length)

    def first_slot(self, window: int | None) -> int:
        """Return 0: layers show all slots, whatever their window."""
        return 0

    def keep(self, path: Sequence[int]) -> None:
        """Keep the slots of a path: ascending nodes, counted from the end of the text."""
        first, self.length = self.length, self.length + len(path)
        if [*path] != [*range(len(path))]:
            tensors = self._all("keys", "values", "indexer_keys")
            slots = integers_on(tensors[0].device, [first + node for node in path])
            for each in tensors:
                each[..., first : self.length, :] = each.index_select(-2, slots)

    def can_go_back(self, num_tokens: int) -> bool:
        """Return whether all slots are held that tokens see after going back."""
        return self.length - num_tokens >= self._least

    def go_back(self, num_tokens: int) -> None:
        """Forget the last tokens."""
        self.length -= num_tokens


class StaticSteps:
    """Compiled steps of a model, and the memory they run on; one call at a time has them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._user: Callable[[], object] = lambda: None
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.why_not: str | None = None  # why none are compiled
        self.caches: dict[int, StaticTreeCache] = {}  # by length
        self.runs: dict[Hashable, Callable[..., Any]] = {}  # by what decides their operations

    def lend(self, user: object) -> bool:
        """Return whether a call gets this. It has it until `take_back`, or as long as it lives."""
        with self._lock:
            if is_free := self._user() is None:
                self._user = ref(user)
        return is_free

    def take_back(self) -> None:
        """Make this free for another call."""
        self._user = lambda: None


class StaticTarget(TreeTarget):
    """A `TreeTarget` whose steps have a few shapes, on memory that does not move.

    Args:
        given: as for `TreeTarget`, without `fast_views`.
        steps: of the model, to be compiled; None to compile nothing.
    """

    execution = "static"

    def __init__(self, *given: Any, steps: StaticSteps | None) -> None:
        super().__init__(*given)
        self.may_join = False
        if steps is not None and not steps.lend(self):
            self.why_eager, steps = "another call has its compiled steps", None
        self._is_compiled, self._steps = steps is not None, steps or StaticSteps()

    def record(self, options: Mapping[str, Any]) -> Callable[[int], Any]:
        """Refuse to: a compiled step returns logits."""
        return Target.record(self, options)

    def begin(self, num_later: int = 0) -> None:
        """Commit the prompt, which ran in a cache that grows, and move it to static memory."""
        super().begin(num_later)
        self._move(WIDTHS[-1])

    def _move(self, num_new: int) -> None:
        """Go on in the shortest memory with room for new tokens."""
        needed, caches = self.cache.length + num_new, self._steps.caches
        beyond = -(-needed // LENGTHS[-1]) * LENGTHS[-1]
        num_slots = next((each for each in LENGTHS if each >= needed), beyond)
        kept = caches.get(num_slots)
        if kept is None or not kept.take_over(self.cache):
            kept = StaticTreeCache(self._kinds, num_slots)
            kept.take_over(self.cache)
        if num_slots in LENGTHS:
            caches[num_slots] = kept
        else:
            self.why_eager = f"its text is longer than {LENGTHS[-1]} tokens"
        self.cache = self._model_kwargs[CACHE] = kept

    def width_of(self, num_tokens: int) -> int:
        """Return the padded width of a forward over `num_tokens`."""
        return next((each for each in WIDTHS if each >= num_tokens), num_tokens)

    def inputs(self, trees: Sequence[Tree]) -> Any:
        """Return the forward's arguments for a tree after the committed tokens, padded."""
        return self._padded(trees[0], self.width_of(len(trees[0])))

    def _padded(self, tree: Tree, width: int) -> Any:
        if self.cache.length + width > self.cache.num_slots:
            self._move(width)
        self._num_nodes = len(tree)
        return self._inputs_of(TreeTensors.of(tree, self.device, width), self.cache.num_slots)

    def forward(self, inputs: Any) -> Tensor:
        """Run the model on a step, compiled if it has one of the shapes."""
        shape = inputs["input_ids"].shape[1], self.cache.num_slots
        is_listed, self.is_untimed = shape[0] in WIDTHS and shape[1] in LENGTHS, False
        if self._is_compiled and is_listed and self._steps.why_not is None:
            with Attempt(even_memory=True) as attempt:
                return self._compiled(shape, inputs)
            self.why_eager = self._steps.why_not = attempt.failure
        return self._run(self._view, inputs)

    def _compiled(self, shape: Hashable, inputs: Any) -> Tensor:
        """Run a compiled step, which is held against the same step by the model at first."""
        asked, is_cuda = self._generation_config.compile_config, self.device.type == "cuda"
        options: dict[str, Any] = {"mode": "reduce-overhead" if is_cuda else None}
        options |= {"fullgraph": True, "dynamic": False, "isolate_recompiles": True}
        if asked is not None:
            mode = asked.mode if asked.backend == "inductor" else None
            options |= {"backend": asked.backend, "mode": mode, "options": asked.options}
            options["fullgraph"] = asked.fullgraph
        key, runs = (shape, self.attention, str(options)), self._steps.runs
        if key in runs:
            return self._run(runs[key], inputs)
        self.is_untimed = True
        expected = logits = self._run(self._view, inputs)
        run = torch.compile(self._view.forward, **options)
        for _ in range(_NUM_RUNS.get(self.device.type, 1)):
            logits = self._run(run, inputs)
        if not (error := distance(logits, expected)) <= limit_of(self._model):
            raise ArithmeticError(f"a compiled step differs from the same step by {error:.2g}")
        runs[key] = run
        return logits

    def _run(self, run: Callable[..., Any], inputs: Any) -> Tensor:
        self.cache.rewind()
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        logits: Tensor = run(**inputs).logits[:, : self._num_nodes]
        return logits.clone()  # the next step may overwrite what this one returns

    def forward_roots(self, roots: Sequence[Tree]) -> Tensor:
        """Run a root by the model itself, unless its attention takes no masks."""
        takes_masks = (attention_of(self._model) or "eager") in MASK_IS_ADDED
        return self._run(self._plain_view if takes_masks else self._view, self._padded(roots[0], 1))

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted path in the cache; later steps overwrite the rest of the tree."""
        self.cache.keep(paths[0])

    def hand_over(self, cache: Any) -> Any:
        """Copy the contents of this target's cache into a cache of transformers; return that."""
        copied = self._make_cache(self._kinds, self.cache.length, self.cache.length)
        copied.take_over(self.cache)
        copied.hand_over(cache)
        return cache

    def release(self) -> None:
        """Leave compiled steps and their memory to the next call."""
        if self._is_compiled:
            self._steps.take_back()
