"""Whole trees verified in forwards of a few fixed shapes, on memory that stays where it is.

A tree is padded to one of a few widths, keys and values lie in slots taken at first, masks and
positions are made on the device from one small buffer that the host fills, so a step can be
recorded as a CUDA graph and replayed (`graphs.py`). On other devices the same path runs eagerly.
Next file: `chain.py`.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig

from lade.cache import FixedSlots, LayerKind, TreeCache
from lade.errors import LadeError
from lade.graphs import Graphs, surroundings_of
from lade.internals import Model
from lade.masks import Reach, TreeSlots
from lade.rules import MAX_OVERHANG, TreeLayout
from lade.target import Forward, TreeTarget
from lade.tree import ROOT, Tree, TreeBatch
from lade.tree_attention import STABLE_ATTENTION, TREE_ATTENTION, Seen, with_seen

# Tokens of a row in a forward; trees in between are padded. On a GPU a step costs about the same
# up to 16 or 32 tokens, and each width is a recording of its own.
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
_LEAST_SLOTS = 256
# New tokens that memory is taken for at first, however many may come; then it grows, and what was
# recorded is recorded anew.
_FIRST_NEW = 2048

# A larger workspace is not kept between calls: so much of a CUDA device's memory, or of another's.
_MOST_KEPT_SHARE = 1 / 8
_MOST_KEPT_BYTES = 2**30


def slots_for(num_slots: int) -> int:
    """Return the next of the sizes that attention runs over: at most a quarter more."""
    step = 1 << max(0, num_slots.bit_length() - 3)
    return max(_LEAST_SLOTS, -(-num_slots // step) * step)


class Shape(NamedTuple):
    """All that decides what a step tells the device, but for what its inputs hold."""

    rows: int
    width: int
    num_shown: tuple[int, ...]  # slots of the layers with each window
    is_padded: bool
    position_axes: tuple[int, ...]
    token_types: tuple[str, ...]
    attention: str | None


class StaticInputs:
    """What a step tells the device about its trees: one copy, to an address that never changes."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        rows, width = shape.rows, shape.width
        shapes: dict[str, tuple[int, ...]] = {
            "token_ids": (rows, width),
            "depths": (rows, width),
            "ancestors": (rows, width, width),
            "num_cached": (rows,),
            "first_slots": (len(shape.num_shown),),
            "position_offsets": (*shape.position_axes, rows),
            "num_padding": (rows,),
            "token_types": (rows,),
        }
        sizes = [int(np.prod(size)) for size in shapes.values()]
        on_host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._on_host = on_host
        with torch.inference_mode(False):
            self._on_device = torch.zeros_like(on_host, device=device)
        self.alone = np.eye(width, dtype=np.int32)  # ancestors of nodes that see no other
        parts = zip(
            shapes, torch.split(on_host, sizes), torch.split(self._on_device, sizes), strict=True
        )
        self.host: dict[str, NDArray[np.int32]] = {}
        self.device: dict[str, Tensor] = {}
        for name, mine, theirs in parts:
            self.host[name] = mine.numpy().reshape(shapes[name])
            self.device[name] = theirs.view(shapes[name])

    def send(self) -> None:
        """Copy all to the device; the host does not wait."""
        self._on_device.copy_(self._on_host, non_blocking=True)


class Workspace:
    """What outlives a call: memory for keys and values, and the steps recorded on it.

    Attributes:
        cache: of as many rows as its first call had.
        graphs: the recorded steps; None where nothing is recorded.
        surroundings: what recordings depend on besides.
    """

    def __init__(self, num_rows: int, cache: TreeCache) -> None:
        self._num_rows = num_rows
        self.cache = cache
        self.graphs: Graphs | None = None
        self.surroundings: tuple[Hashable, ...] = ()
        self._inputs: dict[tuple[Any, ...], StaticInputs] = {}
        self._visible: Tensor | None = None
        self._addresses: tuple[int, ...] = ()

    def inputs(self, shape: Shape, device: torch.device) -> StaticInputs:
        """Return the buffers of a shape."""
        key = (shape.rows, shape.width, shape.position_axes)
        if key not in self._inputs:
            self._inputs[key] = StaticInputs(shape, device)
        return self._inputs[key]

    def show(self, padding: Tensor) -> None:
        """Tell which slots of the prompts are not padding, bool [rows, num_slots]."""
        rows, num_slots = padding.shape
        known = self._visible
        if known is None or known.shape[0] < rows or known.shape[1] <= num_slots:
            with torch.inference_mode(False):
                known = padding.new_empty((self._num_rows, slots_for(num_slots + 1)))
            self._visible = known
            self.forget_recordings()
        known.fill_(True)
        known[:rows, :num_slots] = padding

    def visible(self, rows: int, slots: Tensor) -> Tensor:
        """Return which slots are not padding, bool [rows, num_slots].

        Args:
            rows: how many there are now.
            slots: int64 [num_slots]; beyond the prompt there is no padding.
        """
        assert self._visible is not None
        return self._visible[:rows, slots.clamp(max=self._visible.shape[1] - 1)]

    def notice_moves(self) -> None:
        """Drop what was recorded where keys and values have moved since."""
        addresses = self.cache.addresses
        if addresses != self._addresses:
            self._addresses = addresses
            self.forget_recordings()

    def forget_recordings(self) -> None:
        """Drop what was recorded."""
        if self.graphs is not None:
            self.graphs.forget()


class Shelf:
    """Keeps the workspace of a model between calls: at most one, for one call at a time.

    A copy of the model begins with an empty one: recordings belong to the weights that they read.

    Attributes:
        compiled: what `torch.compile` made of the model; None until it was asked for.
    """

    def __init__(self) -> None:
        self.compiled: Any = None
        self._kept: list[tuple[Hashable, int, Workspace]] = []  # with what it fits, and its room

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle nothing."""
        return Shelf, ()

    def take(self, fits: Hashable, num_slots: int) -> Workspace | None:
        """Return the workspace kept, if it fits and has room; it is the caller's then."""
        try:
            kept = self._kept.pop()
        except IndexError:
            return None
        return kept[2] if kept[0] == fits and kept[1] >= num_slots else None

    def put_back(self, fits: Hashable, num_slots: int, workspace: Workspace) -> None:
        """Keep a workspace for the next call."""
        if not self._kept and workspace.cache.num_bytes <= _most_kept(workspace.cache):
            workspace.cache.reset()
            self._kept.append((fits, num_slots, workspace))

    def clear(self) -> None:
        """Let go of what is kept."""
        self._kept.clear()
        self.compiled = None

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._kept)


def _most_kept(cache: TreeCache) -> int:
    """Return how many bytes may be kept where a cache lies."""
    device = cache.device
    if device is None or device.type != "cuda":
        return _MOST_KEPT_BYTES
    return int(_MOST_KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory)


class _Step(NamedTuple):
    shape: Shape
    inputs: StaticInputs


class _Logits(NamedTuple):
    """What a step gives back; a replay overwrites the logits of the one before."""

    logits: Tensor
    hidden_states: None = None
    attentions: None = None


class FixedTarget(TreeTarget):
    """Verifies trees as `TreeTarget` does, in forwards of a few fixed shapes.

    Args:
        model, input_ids, model_kwargs, layout, max_new_tokens, generation_config, attention: as of
            a `TreeTarget`. Hidden states and attentions cannot be asked for.
        shelf: where memory and recordings of earlier calls are kept.
        new_graphs: makes what records steps; None to run all of them eagerly.
        why_not_recorded: the reason for that, where they were to be recorded.
        call: runs the model; the model itself, or what `torch.compile` made of it.
        widths: to pad trees to; multiples of the last one beyond it.
    """

    def __init__(
        self,
        model: Model,
        input_ids: Tensor,
        model_kwargs: dict[str, Any],
        layout: TreeLayout,
        max_new_tokens: int,
        generation_config: GenerationConfig | None = None,
        attention: str | None = None,
        *,
        shelf: Shelf,
        new_graphs: Callable[[], Graphs] | None = None,
        why_not_recorded: str | None = None,
        call: Any = None,
        widths: Sequence[int] = WIDTHS,
    ) -> None:
        self._shelf = shelf
        self._new_graphs = new_graphs
        self._why_not_recorded = why_not_recorded
        self._call = model if call is None else call
        self._widths = widths
        super().__init__(
            model,
            input_ids,
            model_kwargs,
            layout,
            max_new_tokens,
            generation_config,
            attention,
        )
        if self._outputs:
            raise LadeError(f"expected no {', '.join(self._outputs)} in steps of fixed shape")
        self._must_show_rows = True
        self._reach_windows = {
            reach: reach.num_slots if reach.num_slots in self.cache.windows else None
            for reach in {*self._reaches.values()}
        }
        graphs = self._workspace.graphs
        surroundings = () if graphs is None else surroundings_of(model)
        if surroundings != self._workspace.surroundings:
            self._workspace.forget_recordings()
            self._workspace.surroundings = surroundings

    def _make_cache(self, kinds: Sequence[LayerKind], num_slots: int, max_slots: int) -> TreeCache:
        num_rows = self._input_ids.shape[0]
        room = slots_for(min(max_slots, num_slots + _FIRST_NEW + MAX_OVERHANG))
        self._fits = (num_rows, *kinds)
        self._room = room
        kept = self._shelf.take(self._fits, room)
        if kept is None:
            cache = TreeCache(kinds, room, max(room, max_slots), is_fixed=True)
            kept = Workspace(num_rows, cache)
        # The model may have got, or lost, what keeps it from being recorded.
        if self._new_graphs is None:
            kept.graphs = None
        elif kept.graphs is None:
            kept.graphs = self._new_graphs()
        self._workspace = kept
        return kept.cache

    @property
    def is_typical(self) -> bool:
        """Whether the last forward was neither recorded nor will be replayed faster."""
        graphs = self._workspace.graphs
        return graphs is None or graphs.is_typical

    @property
    def records(self) -> bool:
        """Whether steps are recorded, or were."""
        return self._workspace.graphs is not None

    @property
    def why_not_recorded(self) -> str | None:
        """Why steps are not recorded, or no more of them, where they were to be."""
        graphs = self._workspace.graphs
        return self._why_not_recorded if graphs is None else graphs.reason

    def width_of(self, num_tokens: int) -> int:
        """Return the next of the widths."""
        for width in self._widths:
            if width >= num_tokens:
                return width
        return -(-num_tokens // self._widths[-1]) * self._widths[-1]

    def inputs(self, trees: Sequence[Tree]) -> Any:
        """Tell the device about the trees behind the committed tokens."""
        if self._must_show_rows:
            self._show_rows()
        width = self.width_of(max(map(len, trees)))
        shape = self._shape(len(trees), width)
        inputs = self._workspace.inputs(shape, self.device)
        host = inputs.host
        for row, tree in enumerate(trees):
            size = len(tree)
            if size < width:
                # A padding node sees itself alone: attention over nothing is NaN.
                host["ancestors"][row] = inputs.alone
                host["token_ids"][row, size:] = 0
                host["depths"][row, size:] = 0
            num_drafted = len(tree.draft)
            host["token_ids"][row, 0] = tree.token_ids[ROOT]
            host["token_ids"][row, 1 : num_drafted + 1] = tree.draft.token_ids
            host["depths"][row, 0] = 0
            host["depths"][row, 1 : num_drafted + 1] = tree.draft.depths
            if num_drafted + 1 < size:  # cells beside the draft
                host["token_ids"][row, num_drafted + 1 : size] = tree.token_ids[num_drafted + 1 :]
                host["depths"][row, num_drafted + 1 : size] = tree.depths[num_drafted + 1 :]
            host["ancestors"][row, :size, :size] = tree.ancestors
        host["num_cached"][:] = self.num_cached
        host["first_slots"][:] = [self.cache.first_slot(each) for each in self.cache.windows]
        host["position_offsets"][:] = self._offsets[..., self._rows]
        if self._padding_in_front is not None:
            host["num_padding"][:] = self._padding_in_front[self._rows]
        if self._last_types is not None:
            host["token_types"][:] = self._last_types[self._rows]
        inputs.send()
        return _Step(shape, inputs)

    def forward(self, inputs: Any) -> Forward:
        """Run the model on such inputs, or replay what it did for others of that shape."""
        step: _Step = inputs
        graphs = self._workspace.graphs
        if graphs is None:
            return _Logits(self._run(step, is_recorded=False))
        self._workspace.notice_moves()
        return _Logits(graphs.run(step.shape, partial(self._run, step)))

    def select(self, places: Sequence[int]) -> None:
        """Leave the other rows out; what the cache holds of them stays."""
        super().select(places)
        self._must_show_rows = True

    def rejoin(self) -> None:
        """Take back the rows that were left out."""
        super().rejoin()
        self._must_show_rows = True

    def hand_over(self, cache: Any) -> Any:
        """Let a dynamic cache hold a copy of what this target's own holds."""
        self.cache.hand_over(cache, copies=True)
        return cache

    def release(self) -> None:
        """Keep the memory for the next call."""
        self._shelf.put_back(self._fits, self._room, self._workspace)

    # --- one step -----------------------------------------------------------------------------

    def _shape(self, num_rows: int, width: int) -> Shape:
        """Make room for a step and return its shape."""
        try:
            rooms = self.cache.reserve(width)
        except torch.OutOfMemoryError:
            self._workspace.forget_recordings()  # what they held may be what is missing
            torch.cuda.empty_cache()  # does nothing where there is none
            rooms = self.cache.reserve(width)
        lengths = max(self.num_cached) + width
        # Our own attention on a GPU looks at no more keys than there are, however many are shown.
        shows_all = self._attention == TREE_ATTENTION and self.device.type == "cuda"
        shown = []
        for window, room in rooms.items():
            needed = lengths - self.cache.first_slot(window)
            shown.append(room if shows_all else min(room, slots_for(needed)))
        axes, is_padded = self._offsets.shape[:-1], self._padding is not None
        types, attention = self._token_type_names, self._attention
        return Shape(num_rows, width, tuple(shown), is_padded, axes, types, attention)

    def _place_rows(self) -> None:
        """Do nothing: every step tells the device where its rows are."""

    def _show_rows(self) -> None:
        """Tell the device which slots of the rows there are now are not padding.

        And learn what a step has to tell it of them. Not at the end of the prefill, which the
        device may still be at.
        """
        self._must_show_rows = False
        self._token_type_names = tuple(
            name
            for name in ("token_type_ids", "mm_token_type_ids")
            if self._model_kwargs.get(name) is not None
        )
        self._offsets: NDArray[np.int32] = self._position_offsets.cpu().numpy()
        self._padding_in_front: NDArray[np.int64] | None = None
        self._last_types: NDArray[np.int64] | None = None
        if self._padding is not None:
            assert self._num_padding is not None
            self._padding_in_front = self._num_padding.cpu().numpy()
            self._workspace.show(self._padding[self._rows])
        types = self._model_kwargs.get("token_type_ids")
        if types is not None:
            self._last_types = types[:, -1].cpu().numpy()

    def _run(self, step: _Step, is_recorded: bool) -> Tensor:
        """Make positions and masks, and run the model."""
        device = {name: part.long() for name, part in step.inputs.device.items()}
        num_cached = device["num_cached"]
        nodes = num_cached[:, None] + torch.arange(step.shape.width, device=self.device)
        slots = {
            window: FixedSlots(nodes - device["first_slots"][index], num_shown)
            for index, (window, num_shown) in enumerate(
                zip(self.cache.windows, step.shape.num_shown, strict=True)
            )
        }
        self.cache.fix(slots, num_cached.max() if is_recorded else None)
        try:
            return self._logits(step, device)
        finally:
            self.cache.fix(slots)  # the host knows the length again

    def _logits(self, step: _Step, device: dict[str, Tensor]) -> Tensor:
        num_cached, depths = device["num_cached"], device["depths"]
        trees = TreeBatch(device["token_ids"], depths, device["ancestors"].bool())
        roots = (num_cached + device["position_offsets"])[..., None]
        types = {
            name: torch.zeros_like(trees.token_ids)
            + (device["token_types"][:, None] if name == "token_type_ids" else 0)
            for name in step.shape.token_types
        }
        masks = {
            reach: self._mask_of(reach, window, step.shape, device, trees)
            for reach, window in self._reach_windows.items()
        }
        mask: Any = {name: masks[reach] for name, reach in self._reaches.items()}
        logits: Tensor = self._call(
            input_ids=trees.token_ids,
            position_ids=depths + roots,
            attention_mask=mask if len(masks) > 1 else next(iter(masks.values())),
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
            **types,
        ).logits
        return logits

    def _mask_of(
        self,
        reach: Reach,
        window: int | None,
        shape: Shape,
        device: dict[str, Tensor],
        trees: TreeBatch,
    ) -> Tensor:
        index = self.cache.windows.index(window)
        num_shown, first_slot = shape.num_shown[index], device["first_slots"][index]
        slots = first_slot + torch.arange(num_shown, device=self.device)
        visible = slots < device["num_cached"][:, None]
        not_padding = None
        if shape.is_padded:
            not_padding = self._workspace.visible(shape.rows, slots)
            visible = visible & not_padding
        padding = device["num_padding"] if shape.is_padded else None
        seen = TreeSlots(
            visible, device["num_cached"], trees.ancestors, trees.depths, padding, first_slot
        )
        mask = seen.mask(reach, 0, self._additive_dtype)
        if self._attention not in (TREE_ATTENTION, STABLE_ATTENTION):
            return mask
        # The mask says the same, for whoever looks at that.
        return with_seen(
            mask,
            Seen(
                num_cached=(device["num_cached"] - first_slot).int(),
                starts=seen.starts(reach).clamp(min=0).int(),
                ancestors=seen.among_nodes(reach),
                visible=not_padding,
            ),
        )
