"""Tree verification in forwards of a few fixed shapes, on memory that stays in place.

Trees are padded to one of a few widths, keys and values lie in preallocated slots, and masks and
positions are computed on the device from one small buffer that the host fills. A step can therefore
be recorded as a CUDA graph and replayed (`graphs.py`). On other devices the same path runs eagerly.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig

from lade.attention.masks import FULL, Reach, TreeSlots
from lade.attention.tree import STABLE_ATTENTION, TREE_ATTENTION, Seen, runs_in_triton, with_seen
from lade.captures import free_unused
from lade.compat import CACHE, Model
from lade.gpu.graphs import Graphs, dependencies_of
from lade.gpu.workspace import (
    StaticInputs,
    StepShape,
    Workspace,
    WorkspaceKey,
    WorkspaceStore,
    slots_for,
    spare_bytes,
)
from lade.targets.inputs import TOKEN_TYPES
from lade.targets.kv_cache import TreeCache
from lade.targets.kv_memory import FixedSlots, LayerKind, Spare
from lade.targets.layout import MAX_OVERHANG, TreeLayout
from lade.targets.trees import TreeTarget
from lade.tree import Tree, TreeTensors

# Tokens per row of a forward; trees are padded to the next width.
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
# A step costs about the same up to 16 or 32 tokens there, and each width needs a recording.
_WIDTHS_ON_CUDA = tuple(width for width in WIDTHS if width not in (2, 4))
# New tokens that memory is first allocated for, however many may come. Beyond that it grows, and
# steps are recorded again.
_FIRST_NEW = 2048


def widths_on(device: torch.device) -> tuple[int, ...]:
    """Return the widths that trees are padded to on a device."""
    return _WIDTHS_ON_CUDA if device.type == "cuda" else WIDTHS


def _dependencies_of_cache(device: torch.device) -> tuple[Hashable, ...]:
    """Return the autocast state, which decides the dtype of keys and values, and the stream."""
    kind = device.type
    stream = torch.cuda.current_stream(device).cuda_stream if kind == "cuda" else None
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), stream


class _FixedStep(NamedTuple):
    shape: StepShape
    inputs: StaticInputs


class StepSettings(NamedTuple):
    """How steps of fixed shape are run."""

    workspace_store: WorkspaceStore  # keeps memory and recordings of earlier calls
    #: Returns an empty `Graphs` to record steps with; None to run all steps eagerly.
    new_graphs: Callable[[], Graphs] | None = None
    why_not_recorded: str | None = None  # although that was asked for
    #: The compiled model that runs the steps, or, where steps are recorded, those that are; None
    #: for the model itself.
    call: Any = None
    variant: Hashable = None  # kind of recordings; a workspace of another one is not reused
    widths: Sequence[int] = WIDTHS  # to pad trees to; beyond the last one, its multiples


class FixedTarget(TreeTarget):
    """A `TreeTarget` whose forwards have a few fixed shapes.

    Args:
        model, input_ids, model_kwargs, layout, max_new_tokens, generation_config, attention: as for
            `TreeTarget`.
        settings: how steps are run.
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
        settings: StepSettings,
    ) -> None:
        self._settings = settings
        self._call = call = settings.call
        # In compiled steps, other attention than ours would run over all slots that there are.
        self._takes_spare = call is None or attention == TREE_ATTENTION
        super().__init__(
            *(model, input_ids, model_kwargs, layout, max_new_tokens, generation_config, attention)
        )
        self._is_shown = False
        # Our Triton attention reads only the keys that exist, however many slots are shown. What is
        # compiled is compiled anew for another number of slots.
        self._shows_all = call is not None or (
            attention == TREE_ATTENTION and runs_in_triton(self.device, model.dtype)
        )
        self._reach_windows = {
            reach: reach.num_slots if reach.num_slots in self.cache.windows else None
            for reach in {*self._reaches.values()}
        }
        self._choose_graphs()

    def _make_cache(self, kinds: Sequence[LayerKind], num_slots: int, max_slots: int) -> TreeCache:
        room = slots_for(min(max_slots, num_slots + _FIRST_NEW + MAX_OVERHANG))
        key = WorkspaceKey((*kinds,), _dependencies_of_cache(self.device), self._settings.variant)
        kept = self._settings.workspace_store.take(key, room)
        if kept is None:
            # As many at once as any text may have, where memory allows it: a conversation grows,
            # and whenever memory moves, steps are recorded anew.
            config = self._model.config.get_text_config(decoder=True)
            longest = getattr(config, "max_position_embeddings", None) or 0
            spare = Spare(longest, spare_bytes(self.device) if self._takes_spare else 0)
            cache = TreeCache(kinds, room, max(room, max_slots), is_fixed=True, spare=spare)
            kept = Workspace(key, cache)
        self._workspace = kept
        return kept.cache

    def _choose_graphs(self) -> None:
        """Keep the steps recorded in earlier calls if nothing they depend on has changed.

        The model may have gained or lost something that prevents recording, and once its weights
        have changed, a recording that failed before may succeed.
        """
        workspace = self._workspace
        if self._settings.new_graphs is None:
            workspace.graphs, workspace.dependencies = None, ()
            return
        dependencies = dependencies_of(self._model)
        if workspace.graphs is None or dependencies != workspace.dependencies:
            workspace.graphs, workspace.dependencies = self._settings.new_graphs(), dependencies

    @property
    def is_timing_valid(self) -> bool:
        """Whether the last forward took as long as later ones of its shape will."""
        graphs = self._workspace.graphs
        return graphs is None or graphs.is_timing_valid

    @property
    def why_not_recorded(self) -> str | None:
        """Why steps, or further steps, are not recorded although that was asked for, or None."""
        graphs = self._workspace.graphs
        return self._settings.why_not_recorded if graphs is None else graphs.reason

    def width_of(self, num_tokens: int) -> int:
        """Return the padded width of a forward over `num_tokens`."""
        for width in self._settings.widths:
            if width >= num_tokens:
                return width
        return -(-num_tokens // self._settings.widths[-1]) * self._settings.widths[-1]

    def inputs(self, trees: Sequence[Tree]) -> Any:
        """Send the device a tree after the committed tokens; return the step."""
        if not self._is_shown:
            self._show_prompt()
        (tree,) = trees
        size = len(tree)
        width = self.width_of(size)
        shape = self._shape(width)
        inputs = self._workspace.inputs(shape, self.device)
        host = inputs.host  # waits until the previous step's copy is done
        if size < width:
            # A padding node sees only itself: attention over nothing is NaN.
            host["ancestors"][0] = inputs.alone
            host["token_ids"][0, size:] = 0
            host["depths"][0, size:] = 0
        host["token_ids"][0, :size] = tree.token_ids
        host["depths"][0, :size] = tree.depths
        host["ancestors"][0, :size, :size] = tree.ancestors
        host["num_cached"][:] = self.num_cached
        host["first_slots"][:] = [self.cache.first_slot(each) for each in self.cache.windows]
        host["position_offsets"][:] = self._offsets
        if self._padding_in_front is not None:
            host["num_padding"][:] = self._padding_in_front
        if self._last_types is not None:
            host["token_types"][:] = self._last_types
        inputs.send()
        return _FixedStep(shape, inputs)

    def forward(self, inputs: Any) -> Tensor:
        """Run the model on a step, or replay the recording of its shape.

        A replay overwrites the logits of the previous step.
        """
        step: _FixedStep = inputs
        graphs = self._workspace.graphs
        if graphs is None:
            return self._run(step, is_recorded=False)
        self._workspace.notice_moves()
        return graphs.run(step.shape, partial(self._run, step))

    def forward_plainly(self, roots: Sequence[Tree], *, by_view: bool = False) -> Tensor:
        """Run roots by the model as it is, prepared by itself."""
        self.cache.unfix()
        TreeTarget._place_root(self)
        return super().forward_plainly(roots, by_view=by_view)

    def hand_over(self, cache: Any) -> Any:
        """Copy the contents of this target's cache into a dynamic cache; return that."""
        self.cache.hand_over(cache, copies=True)
        return cache

    def release(self) -> None:
        """Return the workspace to its store, for the next call."""
        self._settings.workspace_store.put_back(self._workspace)

    # --- one step -----------------------------------------------------------------------------

    def _shape(self, width: int) -> StepShape:
        """Reserve slots for a step and return its shape."""
        try:
            rooms = self.cache.reserve(width)
        except torch.OutOfMemoryError:
            self._workspace.forget_recordings()  # the missing memory may be theirs
            free_unused(self.device)
            rooms = self.cache.reserve(width)
        length = self.cache.length + width
        shown = []
        for window, room in rooms.items():
            needed = length - self.cache.first_slot(window)
            shown.append(room if self._shows_all else min(room, slots_for(needed)))
        axes, is_padded = self._offsets.shape[:-1], self._padding is not None
        types, attention = self._token_type_names, self.attention
        return StepShape(width, tuple(shown), is_padded, axes, types, attention)

    def _place_root(self) -> None:
        """Do nothing: every step sends its positions."""

    def _show_prompt(self) -> None:
        """Upload the padding mask of the prompt, and read what every step sends about it.

        Not done at the end of the prefill, which the device may still be running.
        """
        self._is_shown = True
        self._token_type_names = tuple(
            name for name in TOKEN_TYPES if self._model_kwargs.get(name) is not None
        )
        self._offsets: NDArray[np.int32] = self._position_offsets.cpu().numpy()
        self._padding_in_front: NDArray[np.int64] | None = None
        self._last_types: NDArray[np.int64] | None = None
        if self._padding is not None:
            assert self._num_padding is not None
            self._padding_in_front = self._num_padding.cpu().numpy()
            self._workspace.show(self._padding)
        types = self._model_kwargs.get("token_type_ids")
        if types is not None:
            self._last_types = types[:, -1].cpu().numpy()

    def _run(self, step: _FixedStep, is_recorded: bool) -> Tensor:
        """Compute positions and masks, and run the model."""
        graphs, call = self._workspace.graphs, self._call
        device = step.inputs.on_device()
        num_cached = device["num_cached"]
        nodes = num_cached + torch.arange(step.shape.width, device=self.device)
        slots = {
            window: FixedSlots(nodes - device["first_slots"][index], num_shown)
            for index, (window, num_shown) in enumerate(
                zip(self.cache.windows, step.shape.num_shown, strict=True)
            )
        }
        # Where steps are recorded, those that are not are run by the model itself, to compare with;
        # but before a rehearsal, which refuses to wait, what is compiled has to be made.
        is_plain = call is None or (graphs is not None and not is_recorded)
        compiles = call is not None and is_plain and graphs is not None and graphs.reason is None
        self.cache.fix(slots, num_cached[0] if is_recorded or compiles else None)
        try:
            if compiles:
                self._logits(call, step, device)
                self.cache.fix(slots)
            return self._logits(self._view if is_plain else call, step, device)
        finally:
            self.cache.fix(slots)  # back to the length that the host knows

    def _logits(self, call: Any, step: _FixedStep, device: dict[str, Tensor]) -> Tensor:
        num_cached, depths = device["num_cached"], device["depths"]
        trees = TreeTensors(device["token_ids"], depths, device["ancestors"].bool())
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
        logits: Tensor = call(
            input_ids=trees.token_ids,
            position_ids=depths + roots,
            attention_mask=mask if len(masks) > 1 else next(iter(masks.values())),
            use_cache=True,
            return_dict=True,
            **{CACHE: self.cache},
            **types,
        ).logits
        return logits

    def _mask_of(
        self,
        reach: Reach,
        window: int | None,
        shape: StepShape,
        device: dict[str, Tensor],
        trees: TreeTensors,
    ) -> Tensor:
        index = self.cache.windows.index(window)
        num_shown, first_slot = shape.num_shown[index], device["first_slots"][index]
        is_ours = self.attention in (TREE_ATTENTION, STABLE_ATTENTION)
        visible = not_padding = padding = None
        if shape.is_padded or not is_ours:
            slots = first_slot + torch.arange(num_shown, device=self.device)
        if shape.is_padded:
            not_padding, padding = self._workspace.visible(slots), device["num_padding"]
        if not is_ours:
            visible = slots < device["num_cached"][:, None]
            visible = visible if not_padding is None else visible & not_padding
        seen = TreeSlots(
            visible, device["num_cached"], trees.ancestors, trees.depths, padding, first_slot
        )
        if not is_ours:
            return seen.mask(reach, 0, self._additive_dtype)
        # Nobody reads these numbers. Were they read after all, they would spoil what the self-check
        # compares.
        nothing = torch.full((1, 1, 1, 1), torch.nan, dtype=self._model.dtype, device=self.device)
        starts = torch.zeros_like(trees.depths, dtype=torch.int32)
        return with_seen(
            nothing.expand(1, 1, shape.width, num_shown),
            Seen(
                num_cached=(device["num_cached"] - first_slot).int(),
                starts=starts if reach == FULL else seen.starts(reach).clamp(min=0).int(),
                ancestors=seen.among_nodes(reach),
                visible=not_padding,
            ),
        )
