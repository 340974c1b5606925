"""How a model verifies a tree, and the check that it does so exactly.

Next file: `cache.py`.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from lade.budget import Budget, MeasuredBudget
from lade.cache import TreeCache
from lade.errors import UnsupportedModelError
from lade.masks import tree_mask
from lade.tree import Tree, TreeBatch
from ngram_pool import Draft

Model = Any  # a transformers PreTrainedModel with generate; transformers is untyped here


# Slots behind the longest text: the rejected part of a last tree.
_MAX_OVERHANG = 64


class Forward(Protocol):
    """What a forward gives back; transformers' own output classes do."""

    logits: Tensor  # [rows, num_nodes, vocab_size]; of a prefill, those of the last tokens alone
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor | None, ...] | None


class Target(Protocol):
    """A model in the middle of one generation: what the decoding loop needs of it.

    Between steps the cache holds every committed token of a row but the last, its next root.
    """

    device: torch.device
    vocab_size: int  # no token id of a draft may reach it

    @property
    def num_cached(self) -> list[int]:
        """Cached tokens of each row there is now."""

    def prefill(self) -> Forward:
        """Run the prompts."""

    def inputs(self, trees: TreeBatch) -> dict[str, Any]:
        """Return what the model's forward takes for trees behind the committed tokens."""

    def forward(self, inputs: dict[str, Any]) -> Forward:
        """Run the model on such inputs."""

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Of the nodes run last, keep those on each row's accepted path, the root first."""

    def select(self, places: Sequence[int]) -> None:
        """Go on with some rows alone, given as ascending indices into those there are now."""

    def rejoin(self) -> None:
        """Take back the rows that were left out."""


class TreeTarget:
    """Verifies whole trees in one forward, by a 4D mask and explicit positions; full attention.

    Args:
        model: the target.
        input_ids: int64 [rows, num_tokens], the prompts; no tokens where `inputs_embeds` is given.
        model_kwargs: what `generate` prepared for the prefill; `attention_mask` (2D or None) and
            `position_ids` are continued by this class. A filled `past_key_values` is copied.
        num_layers: of the cache.
        max_new_tokens: memory for keys and values is planned by it.
        generation_config: the prefill follows its `prefill_chunk_size`.
    """

    def __init__(
        self,
        model: Model,
        input_ids: Tensor,
        model_kwargs: dict[str, Any],
        num_layers: int,
        max_new_tokens: int,
        generation_config: GenerationConfig | None = None,
    ) -> None:
        self.device: torch.device = model.device
        self.vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
        self._model = model
        self._input_ids = input_ids
        self._generation_config = generation_config or GenerationConfig()
        past = model_kwargs.get("past_key_values")
        embeds = model_kwargs.get("inputs_embeds")
        num_slots = input_ids.shape[1] if embeds is None else embeds.shape[1]
        num_slots += past.get_seq_length() if past is not None else 0
        devices = set((getattr(model, "hf_device_map", None) or {}).values())
        self.cache = TreeCache(
            num_layers,
            num_slots,
            num_slots + max_new_tokens + _MAX_OVERHANG,
            share=len(devices) <= 1,
        )
        if past is not None and past.get_seq_length():
            held, rows = past.layers[0].keys.shape[0], input_ids.shape[0]
            if held != rows:
                raise ValueError(f"expected past_key_values of {rows} rows, got {held}")
            self.cache.take_over(past)
        self._model_kwargs = {**model_kwargs, "past_key_values": self.cache}
        mask = model_kwargs.get("attention_mask")
        self._padding = None if mask is None else mask.bool().to(self.device)
        self._outputs = {
            name: model_kwargs[name]
            for name in ("output_attentions", "output_hidden_states")
            if model_kwargs.get(name)
        }
        self._additive_dtype = model.dtype if attention_of(model) == "eager" else None

    @property
    def num_cached(self) -> list[int]:
        """Cached tokens of each row there is now."""
        return self.cache.lengths

    def prefill(self) -> Forward:
        """Run the prompts exactly as `generate` does."""
        output: Forward = self._model._prefill(
            self._input_ids, self._generation_config, dict(self._model_kwargs)
        )
        self.cache.keep_all()
        rows, num_cached = self._input_ids.shape[0], self.num_cached[0]
        positions = self._model_kwargs.get("position_ids")
        if positions is None:
            last = torch.full((rows,), num_cached - 1, device=self.device)
        else:
            last = positions[:, -1].to(self.device).expand(rows)
        self._position_offsets = last - (num_cached - 1)  # position minus cache slot
        self._rows = torch.arange(rows, device=self.device)  # those there are now
        self._place_rows()
        return output

    def inputs(self, trees: TreeBatch) -> dict[str, Any]:
        """Return the arguments of the model's forward for trees behind the committed tokens."""
        return {
            "input_ids": trees.token_ids,
            "position_ids": trees.depths + self._root_positions,
            "attention_mask": self._mask(trees),
            "past_key_values": self.cache,
            "use_cache": True,
            "return_dict": True,
            **self._outputs,
        }

    def forward(self, inputs: dict[str, Any]) -> Forward:
        """Run the model on such inputs."""
        output: Forward = self._model(**inputs)
        return output

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted paths in the cache; drop the rest of the trees."""
        self.cache.keep(paths)
        self._place_rows()

    def select(self, places: Sequence[int]) -> None:
        """Leave the other rows out; what the cache holds of them stays."""
        self.cache.select(places)
        self._rows = self._rows[torch.tensor(places, device=self.device)]
        self._place_rows()

    def rejoin(self) -> None:
        """Take back the rows that were left out."""
        self.cache.rejoin()
        self._rows = torch.arange(len(self._position_offsets), device=self.device)
        self._place_rows()

    def _place_rows(self) -> None:
        self._num_cached = torch.tensor(self.num_cached, device=self.device)
        self._root_positions = (self._num_cached + self._position_offsets[self._rows])[:, None]

    def _mask(self, trees: TreeBatch) -> Tensor | None:
        is_ragged = len(set(self.num_cached)) > 1
        if trees.width == 1 and self._padding is None and not is_ragged:
            return None  # as `generate` itself does for one token
        slots = torch.arange(max(self.num_cached), device=self.device)
        visible = slots < self._num_cached[:, None]
        if self._padding is not None:
            shared = min(visible.shape[1], self._padding.shape[1])
            visible[:, :shared] &= self._padding[self._rows, :shared]
        return tree_mask(visible, self._num_cached, trees.ancestors, self._additive_dtype)


@dataclass(slots=True)
class Profile:
    """What is known of a model on its device; kept with the model, as `model._lade_profile`."""

    setting: tuple[object, ...]  # attention, dtype and device it is true for
    num_layers: int
    budget: Budget = field(default_factory=MeasuredBudget)
    has_batched: bool = False  # whether a padded and ragged batch was checked too


def profile_of(model: Model, num_rows: int = 1) -> Profile:
    """Return what is known of a model; at its first use, check that it verifies trees exactly.

    The check costs five forwards of a dozen tokens, and as many again when the first batch comes.
    It draws no random numbers.

    Raises:
        UnsupportedModelError: the model cannot verify a tree, with the reason.
    """
    setting = (attention_of(model), model.dtype, str(model.device))
    known: Profile | None = getattr(model, "_lade_profile", None)
    if known is None or known.setting != setting:
        num_layers = full_attention_layers(model)
        _check(model, num_layers, is_batch=False)
        known = model._lade_profile = Profile(setting, num_layers)
    if num_rows > 1 and not known.has_batched:
        _check(model, known.num_layers, is_batch=True)
        known.has_batched = True
    return known


def _check(model: Model, num_layers: int, *, is_batch: bool) -> None:
    trees = "trees of drafts in a batch" if is_batch else "a tree of drafts"
    try:
        error = _tree_error(model, num_layers, is_batch=is_batch)
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot verify {trees}: its forward fails on a tree "
            f"({type(failure).__name__}: {failure})"
        ) from failure
    # Half precision rounds differently in forwards of different sizes; a wrong mask, position or
    # cache is off by about 1 in this measure.
    limit = max(1e-3, 40 * torch.finfo(model.dtype).eps)
    if not error <= limit:
        raise UnsupportedModelError(
            f"{type(model).__name__}: the logits of {trees} differ from those of its paths alone "
            f"by {error:.2g} of their standard deviation (expected at most {limit:.2g}), so drafts "
            "cannot be verified exactly"
            + ("; the model is in training mode, try model.eval()" if model.training else "")
        )


def attention_of(model: Model) -> str | None:
    """Return the name of the attention implementation in use."""
    name: str | None = model.config.get_text_config(decoder=True)._attn_implementation
    return name


def full_attention_layers(model: Model) -> int:
    """Return the number of cache layers.

    Raises:
        UnsupportedModelError: a rule says that the model is outside full attention; what only a
            forward can tell is left to `profile_of`.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    reason = None
    if model.config.is_encoder_decoder:
        reason = "it is an encoder-decoder"
    elif getattr(model, "_is_stateful", False):
        reason = "it keeps a recurrent state, which cannot be rolled back"
    elif attention_of(model) not in ("sdpa", "eager"):
        reason = (
            f"attention implementation {attention_of(model)!r} does not honour a tree mask; load "
            'the model with attn_implementation="sdpa" or "eager"'
        )
    elif "position_ids" not in inspect.signature(model.forward).parameters:
        reason = "its forward takes no position_ids"
    elif "local" in (getattr(config, "attention_layers", None) or ()):
        reason = "its local layers mask by cache slot, inside the model"
    elif getattr(config, "keep_window_size", None) is not None:
        reason = "its dynamic mask depends on the length of the cache"
    elif getattr(config, "alibi", False):
        reason = "its ALiBi bias follows the cache slots and not the positions"
    elif rope := _length_dependent_rope(config):
        reason = f"its rotary embedding ({rope}) depends on the length of each forward"
    if reason is not None:
        raise UnsupportedModelError(f"{name} cannot verify a tree of drafts: {reason}")
    layers = DynamicCache(config=config).layers
    others = {type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer}
    if others or not layers:
        raise UnsupportedModelError(
            f"{name} cannot verify a tree of drafts: only full attention is supported so far, and "
            f"its cache has {', '.join(sorted(others)) or 'no layers'}"
        )
    return len(layers)


def _length_dependent_rope(config: Any) -> str | None:
    """Return the rope type if its frequencies change with the largest position of a forward."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for entry in (parameters, *nested):
        if entry.get("rope_type") in ("dynamic", "longrope"):
            return str(entry["rope_type"])
    return None


# The tree of the check, nodes counted from the root: two branches, 0-1-3 and 0-2-4, interleaved so
# that keeping the second one has to move rows.
_CHECK_PARENTS = (-1, -1, 0, 1)
_CHECK_DEPTHS = (1, 1, 2, 2)
_CHECK_BRANCHES = ((0, 1, 3), (0, 2, 4))


@torch.no_grad()
def _tree_error(model: Model, num_layers: int, *, is_batch: bool) -> float:
    """Return how far a tree, a commit and a further step are from plain forwards without a cache.

    In a batch, a second row has two tokens masked, has the same tree and keeps nothing but its
    root, so that the further step is ragged.

    The measure is the largest difference of two logits in units of the logits' standard deviation.
    """
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    # Any tokens do; these differ from each other in every vocabulary of a real model.
    tokens = [(7919 * (i + 1)) % vocab_size for i in range(12)]
    prompt, root, draft_ids, after = tokens[:6], tokens[6], tokens[7:11], tokens[11]
    draft = Draft(
        np.array(draft_ids, np.int32),
        np.array(_CHECK_PARENTS, np.int32),
        np.array(_CHECK_DEPTHS, np.int32),
        np.ones(4),
    )
    masks = [[1] * len(prompt)]
    kept: list[tuple[int, ...]] = [_CHECK_BRANCHES[1]]
    if is_batch:
        # Masked behind the first token, not before it: a query that sees nothing at all, as in left
        # padding, is NaN in eager attention in float64, also for `generate`.
        masks.append([1, 0, 0, *[1] * (len(prompt) - 3)])
        kept.append((0,))
    rows = len(kept)
    mask = torch.tensor(masks, device=model.device)
    model_kwargs: dict[str, Any] = {"use_cache": True}
    if is_batch:
        model_kwargs["attention_mask"] = mask
        model_kwargs["position_ids"] = mask.cumsum(-1) - 1
    input_ids = torch.tensor([prompt] * rows, device=model.device)
    target = TreeTarget(model, input_ids, model_kwargs, num_layers, len(tokens))

    def run(tree: Tree) -> Tensor:
        trees = TreeBatch.stack([tree] * rows, model.device)
        return target.forward(target.inputs(trees)).logits.double()

    def alone(row: int, *more: int) -> Tensor:
        seen = [token_id for token_id, is_seen in zip(prompt, masks[row], strict=True) if is_seen]
        ids = torch.tensor([[*seen, root, *more]], device=model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False, return_dict=True).logits
        return logits[0, len(seen) :].double()

    target.prefill()
    tree_logits = run(Tree.build(root, draft))
    target.commit(kept)
    step_logits = run(Tree.build(after, Draft.empty()))
    got, expected = [], []
    for row in range(rows):
        for branch in _CHECK_BRANCHES:
            path = [draft_ids[node - 1] for node in branch[1:]]
            is_kept = branch == kept[row]
            got.append(tree_logits[row, list(branch)])
            expected.append(alone(row, *path, *([after] if is_kept else [])))
            if is_kept:
                got.append(step_logits[row])
    if is_batch:
        got.append(step_logits[1])
        expected.append(alone(1, after)[1:])
    return float((torch.cat(got) - torch.cat(expected)).abs().max() / torch.cat(expected).std())
