"""The cache layout of a model's attention layers: the tokens that they keep and see."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn
from transformers.cache_utils import DynamicCache

from lade.budget.budget import MAX_DRAFT_TOKENS
from lade.compat import Model
from lade.errors import UnsupportedModelError
from lade.targets.kv_cache import Kind, LayerKind, kind_of
from lade.targets.masks import FULL, AttentionSpan
from lade.targets.parts import TREE_SDPA

# By layer type, the limit of a layer's attention span.
_SPANS = {
    "full_attention": None,
    "indexed_attention": None,
    "sliding_attention": "window",
    "chunked_attention": "chunk",
}
# Layers that attend to nothing.
_CONVOLVED: dict[str, Kind] = {"conv": "convolved", "linear_attention": "recurrent"}


class TreeLayout(NamedTuple):
    """The tokens that a model's attention layers keep, and their attention spans."""

    kinds: tuple[LayerKind, ...]
    spans: dict[str, AttentionSpan]  # by layer type; if all are equal, one mask serves all layers
    is_path: bool = False  # whether a forward has one path, as the model counts its positions

    @property
    def max_candidates(self) -> int | None:
        """Paths that one forward can run: convolutions and states see the tokens as one text."""
        is_one = self.is_path or any(kind.kind in _CONVOLVED.values() for kind in self.kinds)
        return 1 if is_one else None

    @property
    def is_recurrent(self) -> bool:
        """Whether layers have a state, to which torch's forwards add all tokens at once."""
        return any(kind.kind == "recurrent" for kind in self.kinds)


def tree_layout(model: Model) -> TreeLayout:
    """Return the layout of a model whose trees a 4D mask can describe.

    Raises:
        UnsupportedModelError: a rule shows that the model cannot run trees. `lade.probing` checks
            what only a forward can show.
    """
    config = model.config.get_text_config(decoder=True)
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    convolved = _convolved(model, config)
    has_states = any(kind.kind == "recurrent" for kind in convolved.values())
    if getattr(model, "_is_stateful", False) and not has_states:
        raise UnsupportedModelError("it keeps a recurrent state")
    if "position_ids" not in parameters and not takes_any:
        raise UnsupportedModelError("its forward takes no position_ids")
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise UnsupportedModelError("its local layers mask by cache slot, inside the model")
    if getattr(config, "alibi", False):
        raise UnsupportedModelError("its ALiBi bias follows the cache slots and not the positions")
    layers = DynamicCache(config=config).layers
    kinds = [convolved.get(index, kind_of(layer)) for index, layer in enumerate(layers)]
    pairs = zip(kinds, layers, strict=True)
    unknown = {type(layer).__name__ for kind, layer in pairs if kind is None}
    if unknown or not kinds:
        names = ", ".join(sorted(unknown)) or "no layers"
        raise UnsupportedModelError(f"its cache has {names}")
    spans = _spans(config, layers)
    is_both = convolved and any(kind is not None and kind.kind == "windowed" for kind in kinds)
    if is_both or len(convolved) == len(kinds):
        what = "keeps a recurrent state" if has_states else "has convolutions"
        raise UnsupportedModelError(f"it {what} without full attention, or with windows")
    is_remote = not type(model).__module__.startswith("transformers.")
    if is_remote and any(span != FULL for span in spans.values()):
        raise UnsupportedModelError(
            "its code is not part of transformers, and has a window that a short check cannot see"
        )
    return TreeLayout(tuple(kind for kind in kinds if kind is not None), spans)


def takes_parts(model: Model, layout: TreeLayout, attention: str | None) -> bool:
    """Return whether several rows or calls may be parts of one forward by an attention.

    They may not if a token's index in the forward matters, or if separate scores choose the keys: a
    short check would not show that.
    """
    config = model.config.get_text_config(decoder=True)
    is_scaled = getattr(config, "floor_scale", None) is not None  # by slot
    chooses = getattr(config, "index_topk", None) is not None
    chooses |= any(kind.kind == "indexed" for kind in layout.kinds)
    chooses |= layout.max_candidates is not None  # a convolution would see other rows
    return attention == TREE_SDPA and not (is_scaled or chooses or ropes_of(config))


def _spans(config: Any, layers: Sequence[Any]) -> dict[str, AttentionSpan]:
    windows = {getattr(layer, "sliding_window", None) for layer in layers} - {None}
    chunk = getattr(config, "attention_chunk_size", None)
    has_window = getattr(config, "sliding_window", None) is not None
    # Without layer types, all layers are alike, as transformers' caches and masks assume.
    alike = "chunked_attention" if chunk is not None else "full_attention"
    alike = "sliding_attention" if has_window else alike
    spans = {}
    for name in set(getattr(config, "layer_types", None) or (alike,)) - {"moe", "mlp", *_CONVOLVED}:
        if name not in _SPANS:
            raise UnsupportedModelError(f"it has layers of {name}")
        if _SPANS[name] == "window":
            of_windows = windows - {chunk} or {config.sliding_window}
            if len(of_windows) > 1:
                raise UnsupportedModelError("its layers have windows of different sizes")
            spans[name] = AttentionSpan(window=next(iter(of_windows)))
        else:
            spans[name] = AttentionSpan(chunk=chunk) if _SPANS[name] == "chunk" else FULL
    return spans


def _convolved(model: Model, config: Any) -> dict[int, LayerKind]:
    """Return the kinds of a model's layers that begin with short convolutions, by number."""
    types = getattr(config, "layer_types", None) or ()
    kinds = {index: _CONVOLVED[name] for index, name in enumerate(types) if name in _CONVOLVED}
    widths = {each.kernel_size[0] for each in model.modules() if isinstance(each, nn.Conv1d)}
    if not kinds or len(widths) != 1:
        return {}
    window = widths.pop() + 1
    return {index: LayerKind(kind, window) for index, kind in kinds.items()}


def ropes_of(config: Any) -> list[tuple[str, int]]:
    """Return type and limit of each rotary embedding whose angles depend on the forward's length.

    The limit is the number of positions at which the angles change.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    of_layers = (value for value in parameters.values() if isinstance(value, dict))
    found = []
    for entry in (parameters, *of_layers):
        if entry.get("rope_type") in ("dynamic", "longrope"):
            limit = entry.get("original_max_position_embeddings")
            limit = limit or getattr(config, "original_max_position_embeddings", None)
            found.append((entry["rope_type"], limit or config.max_position_embeddings))
    return found


# Slots after the longest text, for the rejected part of a last tree.
MAX_OVERHANG = 1 + MAX_DRAFT_TOKENS
