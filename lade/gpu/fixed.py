"""Tree verification in forwards of a few fixed shapes, on memory that stays in place.

Trees are padded to one of a few widths, keys and values lie in preallocated slots, and masks and
positions are computed on the device from one small buffer that the host fills. A step can therefore
be recorded as a CUDA graph and replayed (`graphs.py`). On other devices the same path runs eagerly.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lade.attention.masks import AttentionSpan, Seen, TreeSlots
from lade.attention.tree import STABLE_ATTENTION, TREE_ATTENTION, runs_in_triton, with_seen
from lade.compat import CACHE
from lade.errors import UnsupportedModelError
from lade.gpu.graphs import Graphs, dependencies_of
from lade.gpu.workspace import (
    StaticInputs,
    StepShape,
    Workspace,
    WorkspaceStore,
    slots_for,
    spare_bytes,
)
from lade.machine.captures import free_unused
from lade.targets.inputs import TOKEN_TYPES
from lade.targets.kv_cache import FixedSlots, LayerKind, TreeCache
from lade.targets.layout import MAX_OVERHANG
from lade.targets.prefixes import move_to_own_memory
from lade.targets.trees import TreeTarget
from lade.tree import Tree, TreeTensors

# Tokens per row of a forward; trees are padded to the next width.
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
# A step costs about the same up to 16 or 32 tokens there, and each width needs a recording.
_WIDTHS_ON_CUDA = tuple(width for width in WIDTHS if width not in (2, 4))
# New tokens that memory is first allocated for, however many may come. Beyond this, it grows, and
# steps are recorded again.
_FIRST_NEW = 2048


def widths_on(device: torch.device) -> tuple[int, ...]:
    """Return the widths that trees are padded to on a device."""
    return _WIDTHS_ON_CUDA if device.type == "cuda" else WIDTHS


class StepSettings(NamedTuple):
    """How steps of fixed shape are run."""

    workspace_store: WorkspaceStore  # keeps memory and recordings of earlier calls
    #: Returns an empty `Graphs` to record steps with; None to run all steps eagerly.
    new_graphs: Callable[[], Graphs] | None = None
    why_not_recorded: str | None = None  # although the config asks for it
    variant: Hashable = None  # kind of recordings; a workspace of another kind is not reused
    widths: Sequence[int] = WIDTHS  # to pad trees to; beyond the last one, its multiples


class FixedTarget(TreeTarget):
    """A `TreeTarget` whose forwards have a few fixed shapes.

    Args:
        given: as for `TreeTarget`, without `fast_views`.
        settings: how steps are run.
    """

    def __init__(self, *given: Any, settings: StepSettings) -> None:
        self._settings = settings
        super().__init__(*given)
        # Our Triton attention reads only the keys that exist, however many slots are shown.
        is_ours = self.attention == TREE_ATTENTION
        self._shows_all = is_ours and runs_in_triton(self.device, self._model.dtype)
        windows = self.cache.windows
        self._window_indices = {  # of the window of each attention span
            span: windows.index(span.num_slots if span.num_slots in windows else None)
            for span in {*self._spans.values()}
        }
        self._choose_graphs()

    def _make_cache(self, kinds: Sequence[LayerKind], num_slots: int, max_slots: int) -> TreeCache:
        if any(kind.kind in ("convolved", "recurrent") for kind in kinds):
            raise UnsupportedModelError("its convolutions see a text as long as it is")
        size = slots_for(min(max_slots, num_slots + _FIRST_NEW + MAX_OVERHANG))
        kind, stream = self.device.type, None
        if kind == "cuda":
            stream = torch.cuda.current_stream(self.device).cuda_stream
        # Autocast decides the dtype of keys and values.
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        key = (*kinds,), autocast, stream, self._settings.variant
        kept = self._settings.workspace_store.take(key, size)
        if kept is None:
            # Enough slots for the longest text, if memory allows it: a conversation grows, and
            # whenever memory moves, steps must be recorded again.
            config = self._model.config.get_text_config(decoder=True)
            longest = getattr(config, "max_position_embeddings", None) or 0
            spare, most = spare_bytes(self.device), max(size, max_slots, longest)
            kept = Workspace(key, TreeCache(kinds, size, most, is_fixed=True, spare_bytes=spare))
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
    def extra_sec(self) -> float:
        """Extra seconds of the last forward: infinite if it recorded its shape."""
        graphs = self._workspace.graphs
        return 0.0 if graphs is None or graphs.is_timing_valid else math.inf

    @property
    def why_not_recorded(self) -> str | None:
        """Why steps, or further ones, are not recorded although the config asks for it, or None."""
        graphs = self._workspace.graphs
        return self._settings.why_not_recorded if graphs is None else graphs.reason

    def width_of(self, num_tokens: int) -> int:
        """Return the padded width of a forward over `num_tokens`."""
        (*_, most) = widths = self._settings.widths
        beyond = -(-num_tokens // most) * most
        return next((width for width in widths if width >= num_tokens), beyond)

    def inputs(self, trees: Sequence[Tree]) -> Any:
        """Send the device a tree after the committed tokens; return the step."""
        (tree,) = trees
        size = len(tree)
        width = self.width_of(size)
        inputs = self._workspace.inputs(self._shape(width), self.device)
        host = inputs.host  # waits until the previous step's copy is done
        if size < width:
            # A padding node sees only itself: attention over nothing is NaN.
            host["ancestors"][0] = inputs.alone
            host["token_ids"][0, size:] = 0
            host["depths"][0, size:] = 0
        host["token_ids"][0, :size] = tree.token_ids
        host["depths"][0, :size] = tree.depths
        host["ancestors"][0, :size, :size] = tree.ancestors
        host["num_cached"][:] = self.cache.length
        host["first_slots"][:] = [self.cache.first_slot(each) for each in self.cache.windows]
        for name, value in self._of_prompt.items():
            host[name][:] = value
        inputs.send()
        return inputs

    def forward(self, inputs: Any) -> Tensor:
        """Run the model on a step, or replay the recording of its shape.

        A replay overwrites the logits of the previous step.
        """
        step: StaticInputs = inputs
        workspace, graphs = self._workspace, self._workspace.graphs
        if graphs is None:
            return self._run(step, False)
        if (addresses := self.cache.addresses) != workspace.addresses:
            graphs.forget()  # before, for an interrupt may come in between
            workspace.addresses = addresses
        return graphs.run(step.shape, partial(self._run, step))

    def forward_roots(self, roots: Sequence[Tree], *, by_view: bool = False) -> Tensor:
        """Run roots by the model itself, which prepares them."""
        self.cache.unfix()
        return super().forward_roots(roots, by_view=by_view)

    def hand_over(self, cache: Any) -> Any:
        """Copy the contents of this target's cache into a dynamic cache; return that."""
        self.cache.hand_over(cache)
        move_to_own_memory(cache)
        return cache

    def release(self) -> None:
        """Return the workspace to its store, for the next call."""
        self._settings.workspace_store.put_back(self._workspace)

    # --- one step -----------------------------------------------------------------------------

    def _shape(self, width: int) -> StepShape:
        """Reserve slots for a step and return its shape."""
        try:
            capacities = self.cache.reserve(width)
        except torch.OutOfMemoryError:
            if self._workspace.graphs is not None:  # recordings may take the missing memory
                self._workspace.graphs.forget()
            free_unused(self.device)
            capacities = self.cache.reserve(width)
        length = self.cache.length + width
        shown = []
        for window, capacity in capacities.items():
            needed = length - self.cache.first_slot(window)
            shown.append(capacity if self._shows_all else min(capacity, slots_for(needed)))
        types = tuple(name for name in TOKEN_TYPES if self._model_kwargs.get(name) is not None)
        axes = self._position_offsets.shape[:-1]
        return StepShape(width, tuple(shown), axes, types, self.attention)

    @cached_property
    def _of_prompt(self) -> dict[str, Any]:
        """Inputs about the prompt that every step sends; read once the first step is made."""
        types = self._model_kwargs.get("token_type_ids")
        found = {
            "position_offsets": self._position_offsets,
            "num_padding": self._num_padding,
            "token_types": None if types is None else types[:, -1],
        }
        return {name: 0 if each is None else each.cpu().numpy() for name, each in found.items()}

    def _run(self, step: StaticInputs, is_recorded: bool) -> Tensor:
        """Compute positions and masks, and run the model."""
        device = step.on_device()
        num_cached = device["num_cached"]
        nodes = num_cached + torch.arange(step.shape.width, dtype=torch.int64, device=self.device)
        slots = {
            window: FixedSlots(nodes - device["first_slots"][index], num_shown)
            for index, (window, num_shown) in enumerate(
                zip(self.cache.windows, step.shape.num_shown, strict=True)
            )
        }
        self.cache.fix(slots, num_cached[0] if is_recorded else None)
        try:
            return self._logits(step, device)
        finally:
            self.cache.fix(slots)  # back to the length that the host knows

    def _logits(self, step: StaticInputs, device: dict[str, Tensor]) -> Tensor:
        num_cached, depths = device["num_cached"], device["depths"]
        trees = TreeTensors(device["token_ids"], depths, device["ancestors"].bool())
        roots = (num_cached + device["position_offsets"])[..., None]
        types = {
            name: torch.zeros_like(trees.token_ids)
            + (device["token_types"][:, None] if name == "token_type_ids" else 0)
            for name in step.shape.token_types
        }
        masks = {
            span: self._mask_of(span, step.shape.num_shown[index], index, device, trees)
            for span, index in self._window_indices.items()
        }
        mask: Any = {name: masks[span] for name, span in self._spans.items()}
        logits: Tensor = self._view(
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
        span: AttentionSpan,
        num_shown: int,
        index: int,
        device: dict[str, Tensor],
        trees: TreeTensors,
    ) -> Tensor:
        first_slot = device["first_slots"][index]
        num_cached, num_padding = device["num_cached"], device["num_padding"]
        is_ours, visible = self.attention in (TREE_ATTENTION, STABLE_ATTENTION), None
        if not is_ours:
            slots = first_slot + torch.arange(num_shown, dtype=torch.int64, device=self.device)
            visible = ((slots >= num_padding) & (slots < num_cached))[None]
        seen = TreeSlots(
            visible, num_cached, trees.ancestors, trees.depths, num_padding, first_slot
        )
        if not is_ours:
            return seen.mask(span, 0, self._additive_dtype)
        # No attention should read these numbers. If one does, the self-check finds NaN.
        nothing = torch.full((1, 1, 1, 1), torch.nan, dtype=self._model.dtype, device=self.device)
        starts = torch.maximum(seen.starts(span), num_padding - first_slot).clamp(min=0)
        return with_seen(
            nothing.expand(1, 1, trees.depths.shape[1], num_shown),
            Seen((num_cached - first_slot).int(), starts.int(), seen.among_nodes(span)),
        )
