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
from transformers.cache_utils import DynamicCache, DynamicLayer

from lade.budget import Budget, MeasuredBudget
from lade.cache import TreeCache
from lade.errors import UnsupportedModelError
from lade.masks import tree_mask
from lade.tree import Tree
from ngram_pool import Draft

Model = Any  # a transformers PreTrainedModel with generate; transformers is untyped here


# Slots behind the longest text: the rejected part of a last tree.
_MAX_OVERHANG = 64


class Target(Protocol):
    """A model in the middle of one generation: what the decoding loop needs of it.

    Between steps the cache holds every committed token but the last, which is the next root.
    """

    device: torch.device
    vocab_size: int  # no token id of a draft may reach it

    def prefill(self) -> Tensor:
        """Run the prompt; return the logits after its last token, [1, vocab_size]."""

    def inputs(self, tree: Tree) -> dict[str, Any]:
        """Return what the model's forward takes for a tree behind the committed tokens."""

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        """Run the model on such inputs; return the logits of all nodes, [num_nodes, vocab_size]."""

    def commit(self, nodes: list[int]) -> None:
        """Of the nodes run last, keep those on the accepted path, the root first."""


class TreeTarget:
    """Verifies a whole tree in one forward, by a 4D mask and explicit positions; full attention.

    Args:
        model: the target.
        input_ids: int64 [1, num_tokens], the prompt.
        model_kwargs: what `generate` prepared for the prefill; `attention_mask` (2D or None) and
            `position_ids` are continued by this class.
        num_layers: of the cache.
        max_length: of the text, prompt included; memory for keys and values is planned by it.
    """

    def __init__(
        self,
        model: Model,
        input_ids: Tensor,
        model_kwargs: dict[str, Any],
        num_layers: int,
        max_length: int,
    ) -> None:
        self.device: torch.device = model.device
        self.vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
        devices = set((getattr(model, "hf_device_map", None) or {}).values())
        self.cache = TreeCache(
            num_layers, input_ids.shape[1], max_length + _MAX_OVERHANG, share=len(devices) <= 1
        )
        self._model = model
        self._input_ids = input_ids
        self._model_kwargs = {**model_kwargs, "past_key_values": self.cache}
        self._num_cached = 0
        mask = model_kwargs.get("attention_mask")
        self._padding = None if mask is None else mask.bool().to(self.device)
        positions = model_kwargs.get("position_ids")
        last = input_ids.shape[1] - 1 if positions is None else int(positions[0, -1])
        self._position_offset = last - (input_ids.shape[1] - 1)  # position minus cache slot
        self._additive_dtype = model.dtype if attention_of(model) == "eager" else None

    def prefill(self) -> Tensor:
        """Run the prompt exactly as `generate` does; return the last logits, [1, vocab_size]."""
        inputs = self._model.prepare_inputs_for_generation(
            self._input_ids, is_first_iteration=True, **self._model_kwargs
        )
        logits: Tensor = self._model(**inputs, return_dict=True).logits[:, -1]
        # The loop commits the last prompt token as the root of a tree without a draft.
        self._num_cached = self._input_ids.shape[1] - 1
        return logits

    def inputs(self, tree: Tree) -> dict[str, Any]:
        """Return the arguments of the model's forward for a tree behind the committed tokens."""
        return {
            "input_ids": tree.token_ids,
            "position_ids": tree.depths + (self._num_cached + self._position_offset),
            "attention_mask": self._mask(tree),
            "past_key_values": self.cache,
            "use_cache": True,
            "return_dict": True,
        }

    def forward(self, inputs: dict[str, Any]) -> Tensor:
        """Run the model on such inputs; return the logits of all nodes, [num_nodes, vocab_size]."""
        logits: Tensor = self._model(**inputs).logits[0]
        return logits

    def commit(self, nodes: list[int]) -> None:
        """Keep the accepted path in the cache; drop the rest of the tree."""
        self.cache.keep(self._num_cached, nodes)
        self._num_cached += len(nodes)

    def _mask(self, tree: Tree) -> Tensor | None:
        if len(tree) == 1 and self._padding is None:
            return None  # as `generate` itself does for one token
        prefix = torch.ones((1, self._num_cached), dtype=torch.bool, device=self.device)
        if self._padding is not None:
            shared = min(self._num_cached, self._padding.shape[1])
            prefix[:, :shared] = self._padding[:, :shared]
        return tree_mask(prefix, tree.ancestors, self._additive_dtype)


@dataclass(slots=True)
class Profile:
    """What is known of a model on its device; kept with the model, as `model._lade_profile`."""

    setting: tuple[object, ...]  # attention, dtype and device it is true for
    num_layers: int
    budget: Budget = field(default_factory=MeasuredBudget)


def profile_of(model: Model) -> Profile:
    """Return what is known of a model; at its first use, check that it verifies trees exactly.

    The check costs five forwards of a dozen tokens. It draws no random numbers.

    Raises:
        UnsupportedModelError: the model cannot verify a tree, with the reason.
    """
    setting = (attention_of(model), model.dtype, str(model.device))
    known: Profile | None = getattr(model, "_lade_profile", None)
    if known is not None and known.setting == setting:
        return known
    num_layers = full_attention_layers(model)
    try:
        error = _tree_error(model, num_layers)
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot verify a tree of drafts: its forward fails on a tree "
            f"({type(failure).__name__}: {failure})"
        ) from failure
    # Half precision rounds differently in forwards of different sizes; a wrong mask, position or
    # cache is off by about 1 in this measure.
    limit = max(1e-3, 40 * torch.finfo(model.dtype).eps)
    if not error <= limit:
        raise UnsupportedModelError(
            f"{type(model).__name__}: the logits of a tree differ from those of its paths alone "
            f"by {error:.2g} of their standard deviation (expected at most {limit:.2g}), so drafts "
            "cannot be verified exactly"
            + ("; the model is in training mode, try model.eval()" if model.training else "")
        )
    model._lade_profile = Profile(setting, num_layers)
    return model._lade_profile  # type: ignore[no-any-return]


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
def _tree_error(model: Model, num_layers: int) -> float:
    """Return how far a tree, a commit and a further step are from plain forwards without a cache.

    The measure is the largest difference of two logits in units of the logits' standard deviation.
    """
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    # Any tokens do; these differ from each other in every vocabulary of a real model.
    tokens = [(7919 * (i + 1)) % vocab_size for i in range(12)]
    prompt, root, draft_ids, after = tokens[:6], tokens[6], tokens[7:11], tokens[11]
    input_ids = torch.tensor([prompt], device=model.device)
    draft = Draft(
        np.array(draft_ids, np.int32),
        np.array(_CHECK_PARENTS, np.int32),
        np.array(_CHECK_DEPTHS, np.int32),
        np.ones(4),
    )
    target = TreeTarget(model, input_ids, {"use_cache": True}, num_layers, len(tokens))
    target.prefill()
    target.commit([0])
    tree_logits = target.forward(target.inputs(Tree.build(root, draft, model.device)))
    target.commit(list(_CHECK_BRANCHES[1]))
    step = Tree.build(after, Draft.empty(), model.device)
    step_logits = target.forward(target.inputs(step))

    def alone(branch: Sequence[int], *more: int) -> Tensor:
        path = [draft_ids[node - 1] for node in branch[1:]]
        ids = torch.tensor([[*prompt, root, *path, *more]], device=model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False, return_dict=True).logits
        return logits[0, len(prompt) :].double()

    first, second = alone(_CHECK_BRANCHES[0]), alone(_CHECK_BRANCHES[1], after)
    got = [
        tree_logits[list(_CHECK_BRANCHES[0])],
        tree_logits[list(_CHECK_BRANCHES[1])],
        step_logits,
    ]
    expected = torch.cat([first, second])
    return float((torch.cat(got).double() - expected).abs().max() / expected.std())
