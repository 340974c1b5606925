"""Verification of whole trees in one forward."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import GenerationConfig

from lade.compat import CACHE, Model, attention_of, dtype_of, prefill, prepares_as_usual
from lade.compat.view import (
    FastViews,
    apart,
    keep_attributes,
    with_attention,
    with_decoding_experts,
)
from lade.errors import MisfitError, UnsupportedModelError, UnsupportedOptionError
from lade.machine.transfer import integers_on
from lade.targets.base import Target
from lade.targets.inputs import LOGITS_KEPT, TOKEN_TYPES, is_text_alone, num_slots_of
from lade.targets.joint import Part
from lade.targets.kv_cache import LayerKind, TreeCache, kind_of
from lade.targets.layout import MAX_OVERHANG, TreeLayout, takes_parts
from lade.targets.masks import tree_mask
from lade.targets.parts import TREE_SDPA
from lade.targets.rollback import cache_in
from lade.tree import Tree, TreeTensors

# Attention implementations that honour a dense 4D mask, and whether the mask is additive. (Flex
# attention would do so, too, but recompiles for every tree size.)
MASK_IS_ADDED = {"sdpa": False, TREE_SDPA: False, "eager": True}

# Arguments of every forward.
_OF_FORWARD = {"use_cache": True, "return_dict": True}
# Attention implementations that limit keys to the window themselves, whatever the cache holds.
_KNOW_WINDOWS = {*MASK_IS_ADDED, "flash_attention_2", "flash_attention_3", "flash_attention_4"}
_NUM_RECENT = 8  # steps whose mean predicts how many tokens the next one commits


class Recorded:
    """What forwards of a target return besides logits, of tokens that were committed.

    Args:
        options: arguments of a forward that ask for it, such as `output_hidden_states`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self.output: Any = None  # of the last forward
        self._num_tokens = 0  # committed tokens that were recorded
        self._states: list[Sequence[Tensor | None]] = []  # of forwards, by layer: [1, num, size]
        self._shared: dict[str, tuple[Tensor, Tensor]] = {}  # keys and values of the whole text

    def commit(self, length: int, path: Sequence[int]) -> None:
        """Record the nodes of a path of the last forward, which ran after `length` tokens.

        A proof runs some tokens again that are recorded already.
        """
        output, states = self.output, self.output.hidden_states
        new = path[max(0, self._num_tokens - length) :]
        self._states.append([_at(each, 1, new) for each in states])
        self._num_tokens = max(self._num_tokens, length + len(path))
        num_run = next(each.shape[1] for each in states if each is not None)
        for name, pair in (getattr(output, "shared_kv_states", None) or {}).items():
            first = pair[0].shape[-2] - num_run  # slots before these tokens
            slots = [*range(first), *(first + node for node in path)]
            self._shared[name] = _at(pair[0], -2, slots), _at(pair[1], -2, slots)

    def take(self, num_tokens: int) -> Any:
        """Return the states of tokens that were committed since the last call.

        Returns:
            An output of transformers, with `num_tokens`; None if `num_tokens` tokens of text are
            not what was committed.
        """
        if self._num_tokens != num_tokens or not self._states:
            return None
        states = tuple(
            None if of_layer[0] is None else torch.cat(of_layer, dim=1)
            for of_layer in zip(*self._states, strict=True)
        )
        self._states = []
        num_new = next(each.shape[1] for each in states if each is not None)
        return SimpleNamespace(
            hidden_states=states, shared_kv_states=self._shared, num_tokens=num_new
        )


class TreeTarget(Target):
    """Target that verifies whole trees in one forward, by a 4D mask and explicit positions.

    Layers that do not see the whole text get their own mask, in a dict by layer type.

    Args:
        input_ids: int64 [1, num_tokens], the prompt; num_tokens is 0 with `inputs_embeds`.
        model_kwargs: the arguments that `generate` prepared for the prefill; this class extends
            `attention_mask` (2D or None) and `position_ids`. A filled `past_key_values` is copied.
        max_new_tokens: maximum number of new tokens to plan key and value memory for.
        generation_config: provides `prefill_chunk_size` for the prefill.
        attention: the attention implementation for verification, if the model's own ignores masks
            or is slow with them; the prefill uses the model's own. None for the model's own.
        fast_views: makes views that run by lade's kernels; None for torch's own forwards.
    """

    _recorded: Recorded | None = None

    def __init__(
        self,
        model: Model,
        input_ids: Tensor,
        model_kwargs: dict[str, Any],
        layout: TreeLayout,
        max_new_tokens: int,
        generation_config: GenerationConfig | None = None,
        attention: str | None = None,
        fast_views: FastViews | None = None,
    ) -> None:
        self.device: torch.device = input_ids.device
        self.vocab_size: int = model.config.get_text_config(decoder=True).vocab_size
        self._model = model
        self._input_ids = input_ids
        self._generation_config = generation_config or GenerationConfig()
        self._spans = layout.spans
        self._is_uniform = all(kind.kind == "full" for kind in layout.kinds)
        self.attention = attention
        self.max_candidates = layout.max_candidates
        past = model_kwargs.get(CACHE)
        num_slots = num_slots_of(input_ids, self._generation_config, model_kwargs)
        self._kinds = _kinds_held(layout.kinds, past)
        self.cache = self._make_cache(
            self._kinds, num_slots, num_slots + max_new_tokens + MAX_OVERHANG
        )
        if past is not None and past.get_seq_length():
            keys = (getattr(layer, "keys", None) for layer in past.layers)
            held = next(each.shape[0] for each in keys if each is not None)
            if held != 1:
                raise MisfitError(f"expected {CACHE} of 1 row, got {held}")
            self.cache.take_over(past)
        self._model_kwargs = {**model_kwargs, CACHE: self.cache}
        mask = model_kwargs.get("attention_mask")
        #: Which tokens of the prompt are no padding, bool [1, num_tokens]; None if all.
        self.padding: Tensor | None = None
        if mask is not None and not bool(mask.all()):
            self.padding = mask.bool().to(self.device)
        self._fast_views, self.is_fast = fast_views, fast_views is not None
        self.may_join = takes_parts(model, layout, attention) and self.padding is None
        self._num_committed = 1.0  # recent mean of tokens per step
        # A user's attention is assumed to take masks as torch's does; the check compares them.
        is_added = MASK_IS_ADDED.get(attention or attention_of(model) or "eager", False)
        self._additive_dtype = dtype_of(model) if is_added else None
        limits = (span.num_slots for span in self._spans.values())
        self._least_span = min((each for each in limits if each is not None), default=math.inf)

    def _make_cache(self, kinds: Sequence[LayerKind], num_slots: int, max_slots: int) -> TreeCache:
        devices = set((getattr(self._model, "hf_device_map", None) or {}).values())
        return TreeCache(kinds, num_slots, max_slots, share=len(devices) <= 1)

    def record(self, options: Mapping[str, Any]) -> Callable[[int], Any]:
        """Have forwards return more than logits, by torch; return what takes it of the text."""
        is_text = self.padding is None and self._prompt_positions() is not None
        if not is_text or self.cache.get_seq_length():
            return super().record(options)
        held = getattr(self._model.config, "dtype", None)
        if held in (torch.bfloat16, torch.float16) and dtype_of(self._model) is torch.float32:
            raise UnsupportedOptionError(
                "a drafter reads hidden states of the target, and in its dtype: pass "
                "Config(arithmetic='model')"
            )
        # Transformers hooks the modules whose outputs it collects.
        self._model, self._fast_views, self._engine_call = apart(self._model), None, None
        self._recorded, self.may_join, self.is_fast = Recorded(options), False, False
        return self._recorded.take

    def prefill(self, *, is_plain: bool = False) -> Tensor:
        """Run the prompt as `generate` does, or in the forwards of other calls."""
        is_as_usual = is_plain and self._recorded is None
        logits = None if is_as_usual else self._in_chunks()
        if logits is None:
            model, fast_views = self._model, self._fast_views
            # The whole length decides, so that a kept prefix makes no difference.
            num_tokens = max(self._input_ids.numel(), 1)
            if fast_views is not None and not is_plain and fast_views.pays(num_tokens):
                model = fast_views.view(model)
            kwargs = self._model_kwargs
            output = prefill(model, self._input_ids, self._generation_config, kwargs)
            if model is not self._model:
                keep_attributes(model, self._model)
            cache = cache_in(output)
            # phi3 starts a cache of its own if the prompt is long.
            if cache is not None and cache is not self.cache:
                self.cache.take_over(cache)
            logits = output.logits[:, -1:]
        self.begin()
        return logits

    def begin(self, num_later: int = 0) -> None:
        """Commit the prompt, and tokens after it, and set up for steps after these."""
        self.cache.keep_all()
        if self.padding is not None and self.cache.has_nan_in_windows:
            # Even masked, a NaN spreads, and the memory holds more padding than a window shows.
            raise UnsupportedModelError("the keys and values of padding are no numbers (NaN)")
        self._num_prefilled = num_cached = self.cache.length - num_later
        positions = self._model_kwargs.get("position_ids")
        if positions is None:
            last = torch.full((1,), num_cached - 1, dtype=torch.int64, device=self.device)
        else:  # some vision-language models count positions along several axes: [axes, 1, …]
            last = positions[..., -1].to(self.device)
        self._position_offsets = last - (num_cached - 1)  # position minus cache slot
        self._plain_view = with_decoding_experts(self._model)
        self._learn_habits(last)

    def _in_chunks(self) -> Tensor | None:
        """Run a prompt as its later tokens will: whole, or in prefill chunks beside other calls.

        Returns None if the prompt runs as usual.
        """
        num_tokens, start = self._input_ids.shape[1], self.cache.get_seq_length()
        call, positions = self._engine_call, self._prompt_positions()
        if call is not None and not call.has_batch_mates:
            call = call if num_tokens - start > call.engine.prefill_chunk else None
        if positions is None or (call is None and not self._runs_by_masks):
            return None
        logits = None
        while start < num_tokens:
            num = num_tokens - start if call is None else call.reserve(num_tokens - start)
            part = self._prompt_part(positions, start, num)
            if call is not None:
                (logits,) = self.ask(call, [part])
            else:
                logits = self._run(part.view, {**part.inputs, LOGITS_KEPT: 1})
                keep_attributes(part.view, self._model)  # that hooks of both collect states, say
            if self._recorded is not None:
                self._recorded.commit(start, range(num))
            self.cache.keep([*range(num)])
            start += num
        return logits

    @property
    def _runs_by_masks(self) -> bool:
        """Whether a prompt runs as its later tokens will.

        That is one whose states are recorded; and one with padding, or longer than a window, unless
        torch is to run it: without packed weights.
        """
        num_tokens, fast_views = self._input_ids.shape[1], self._fast_views
        if fast_views is None or not fast_views.is_packed:
            return self._recorded is not None
        if self.padding is not None and (self.max_candidates or not self.padding[0, -1]):
            # A model leaves padding out of its convolutions, a job does not. And where the last
            # token is padding, what it sees decides the text: itself here, not in `generate`.
            return False
        is_masked = self.padding is not None or num_tokens > self._least_span
        return is_masked and fast_views.pays(num_tokens)

    def _prompt_positions(self) -> Tensor | None:
        """Return the positions of a prompt that may run as parts of forwards; None for others."""
        num_tokens = self._input_ids.shape[1]
        positions = self._model_kwargs.get("position_ids")
        if positions is None and self.padding is not None:
            return None
        if positions is None:
            positions = torch.arange(num_tokens, dtype=torch.int64, device=self.device)[None]
        # If the caller passed only new tokens, only the mask shows where they begin.
        num_slots = num_slots_of(self._input_ids, self._generation_config, self._model_kwargs)
        if (
            not prepares_as_usual(self._model)
            or num_slots != num_tokens
            or not is_text_alone(self._model_kwargs)
            or positions.shape != (1, num_tokens)
            or self._generation_config.prefill_chunk_size is not None
            or LOGITS_KEPT not in inspect.signature(self._model.forward).parameters
        ):
            return None
        return positions

    def _prompt_part(self, positions: Tensor, start: int, num: int) -> Part:
        """Return a prefill chunk of `num` tokens as a part of a forward."""
        nodes, mask = slice(start, start + num), None  # causal
        token_ids = self._input_ids[:, nodes]
        if start or self.padding is not None or not self._is_uniform:
            seen = torch.ones((1, num, num), dtype=torch.bool, device=self.device).tril()
            if self.padding is not None:  # which sees itself, as numbers must come of it
                own = torch.eye(num, dtype=torch.bool, device=self.device)
                seen &= self.padding[:, None, nodes] | own
            steps = torch.arange(num, dtype=torch.int64, device=self.device)[None]
            mask = self._mask(TreeTensors(token_ids, steps, seen), start)
        inputs = {
            "input_ids": token_ids,
            "position_ids": positions[:, nodes],
            "attention_mask": mask,
            CACHE: self.cache,
            **_OF_FORWARD,
        }
        part = self.part(inputs, is_prompt=True)
        if not self._is_uniform:
            part.kind = self  # it runs alone: tokens that left a window cannot be put back
        return part

    def prompt(self) -> Part | None:
        """Return the whole prompt as a part of a forward; None if it must run alone."""
        positions = self._prompt_positions()
        if positions is None or self.padding is not None or self.cache.get_seq_length():
            return None
        return self._prompt_part(positions, 0, self._input_ids.shape[1])

    def inputs(self, trees: Sequence[Tree]) -> Any:
        """Return the forward's arguments for a tree after the committed tokens."""
        return self._inputs_of(TreeTensors.of(trees[0], self.device))

    def _inputs_of(self, tree: TreeTensors, num_slots: int = 0) -> dict[str, Any]:
        """Return the arguments for a tree; layers show `num_slots` slots, or those in use."""
        inputs = {
            "input_ids": tree.token_ids,
            "position_ids": tree.depths + self._position_offsets[..., None] + self.cache.length,
            "attention_mask": self._mask(tree, self.cache.length, num_slots),
            CACHE: self.cache,
            **_OF_FORWARD,
        }
        for name in TOKEN_TYPES:  # those of text, if the prompt has any
            if (of_prompt := self._model_kwargs.get(name)) is not None:
                last = of_prompt[:, -1:] if name == "token_type_ids" else 0
                inputs[name] = torch.zeros_like(tree.token_ids) + last
        return inputs

    def forward(self, inputs: Any) -> Tensor:
        """Run the model on the inputs, together with other calls if there are any."""
        view = self._view_for(inputs["input_ids"].shape[1])
        self._last_inputs = inputs
        if self._engine_call is None:
            return self._run(view, inputs)
        logits: Tensor
        (logits,) = self.ask(self._engine_call, [self.part(inputs, view)])
        return logits

    def _run(self, view: Model, inputs: Mapping[str, Any]) -> Tensor:
        """Run a view alone."""
        recorded = self._recorded
        output = view(**inputs, **({} if recorded is None else recorded.options))
        if recorded is not None:
            recorded.output = output
        logits: Tensor = output.logits
        return logits

    def part(
        self, inputs: dict[str, Any], view: Model | None = None, is_prompt: bool = False
    ) -> Part:
        """Return a step, or a prefill chunk, as a part of a forward; by the view for trees."""
        is_inference = torch.is_inference_mode_enabled()
        shape = inputs["position_ids"].dim(), *sorted(inputs)
        kind = (id(self._model), self.attention, self._fast_views, is_inference, *shape)
        ways = self.discard, self._num_committed, is_prompt, is_inference
        return Part(kind, self._view if view is None else view, inputs, *ways)

    def extend(self, tree: Tree, num_run: int) -> Tensor:
        """Run a growing tree's nodes from `num_run` on; earlier nodes ran since the last commit.

        `commit` takes a path of the whole tree.
        """
        inputs = self.inputs([tree])
        logits = self.forward(_nodes_of(inputs, num_run, len(tree)))
        self._last_inputs = inputs
        return logits

    def forward_roots(self, roots: Sequence[Tree]) -> Tensor:
        """Run a root by the model itself, which prepares it unless its attention needs a mask."""
        if self._is_uniform or (attention_of(self._model) or "eager") in _KNOW_WINDOWS:
            new = self._input_ids.new_zeros((1, self.cache.length + 1 - self._num_prefilled))
            new[:, -1] = integers_on(self.device, [roots[0].token_ids[0]])
            return self._run(self._plain_view, {**self._prepared(new), "return_dict": True})
        inputs = TreeTarget.inputs(self, roots)
        has_mask = inputs["attention_mask"] is not None  # the model's attention may not take it
        return self._run(self._view_for(1) if has_mask else self._plain_view, inputs)

    def discard(self) -> None:
        """Discard the last forward."""
        self.cache.keep([])

    def go_back(self, num_tokens: int) -> bool:
        """Forget the last tokens, if layers with windows still hold earlier ones."""
        if not self.cache.can_go_back(num_tokens):
            return False
        self.cache.go_back(num_tokens)
        return True

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the accepted path in the cache; drop the rest of the tree."""
        self._num_committed += (len(paths[0]) - self._num_committed) / _NUM_RECENT
        if self._recorded is not None:
            self._recorded.commit(self.cache.length, paths[0])
        if not self.cache.can_keep(len(paths[0])):  # torch ran a chain, and added it to a state
            self.cache.keep([])
            self.forward(_nodes_of(self._last_inputs, 0, len(paths[0])))
        self.cache.keep(paths[0])

    def hand_over(self, cache: Any) -> Any:
        """Fill a dynamic cache with the contents of this target's cache; return it."""
        self.cache.hand_over(cache)
        return cache

    def _view_for(self, num_tokens: int) -> Model:
        """Return the view that runs `num_tokens` tokens."""
        if num_tokens > 1:
            return self._view
        is_alone = self._engine_call is None  # else one view runs several calls
        if self._fast_views is not None and is_alone and not self._fast_views.pays(1):
            return self._attending_view
        return self._roots_view

    @cached_property
    def _attending_view(self) -> Model:
        """The view with tree attention; made after the prefill, which may set attributes."""
        attention, model = self.attention, self._model
        return model if attention is None else with_attention(model, attention)

    @cached_property
    def _view(self) -> Model:
        """The view that runs trees."""
        view = self._attending_view
        return view if self._fast_views is None else self._fast_views.view(view)

    @cached_property
    def _roots_view(self) -> Model:
        """The view for single nodes, whose keys lie where standard decoding has them."""
        return with_decoding_experts(self._view)

    def _learn_habits(self, last: Tensor) -> None:
        """Observe how the model prepares the inputs of tokens after the prompt."""
        later = self._prepared(self._input_ids.new_zeros((1, 1)))
        for name in TOKEN_TYPES:
            if later.get(name) is None:  # only for the prompt
                self._model_kwargs.pop(name, None)
        positions = later.get("position_ids")
        if self._model_kwargs.get("position_ids") is not None and positions is not None:
            self._position_offsets += positions[..., -1].to(self.device) - (last + 1)

    def _prepared(self, new: Tensor) -> dict[str, Any]:
        """Return the arguments that the model prepares for the last of new tokens [1, num_new]."""
        ids = torch.cat([self._input_ids, new], dim=1)
        prepare, given = self._model.prepare_inputs_for_generation, self.extended(new.shape[1])
        prepared: dict[str, Any] = prepare(ids, next_sequence_length=1, **given)
        return prepared

    def _mask(
        self, tree: TreeTensors, cached: int, num_slots: int = 0
    ) -> Tensor | dict[str, Tensor] | None:
        width = tree.token_ids.shape[1]
        if not num_slots and width == 1 and self.padding is None and cached < self._least_span:
            return None  # as in `generate` for one token
        masks = {}
        for span in {*self._spans.values()}:
            given = num_slots or cached + width, span, self.padding, self._additive_dtype
            held = tree_mask(tree, cached, *given)
            masks[span] = held[..., self.cache.first_slot(span.num_slots) :]
        if len(masks) == 1:
            return next(iter(masks.values()))
        return {name: masks[span] for name, span in self._spans.items()}


def _nodes_of(inputs: dict[str, Any], first: int, stop: int) -> dict[str, Any]:
    """Return the inputs of some nodes of a tree; masks cover those before them, too."""
    num_dropped = inputs["input_ids"].shape[1] - stop
    if first == num_dropped == 0:
        return inputs
    left = {**inputs}
    for name in {"input_ids", "position_ids", *TOKEN_TYPES} & inputs.keys():
        left[name] = inputs[name][..., first:stop]

    def of_type(mask: Tensor) -> Tensor:
        return mask[..., first:stop, : mask.shape[-1] - num_dropped]

    return {**left, "attention_mask": tree_map(of_type, inputs["attention_mask"])}


def _kinds_held(kinds: Sequence[LayerKind], past: Any) -> list[LayerKind]:
    """Return the layer kinds to allocate, taken from the caller's cache if there is one.

    A dynamic cache made without a config keeps the whole text in every layer.
    """
    if past is None:
        return [*kinds]
    pairs = zip(past.layers, kinds, strict=False)
    given = [kind_of(layer) or kind for layer, kind in pairs]
    full = LayerKind("full")
    later = [full if kind.kind == "windowed" else kind for kind in kinds[len(given) :]]
    return [*given, *later][: len(kinds)]


def _at(tensor: Tensor | None, dim: int, places: Sequence[int]) -> Any:
    return None if tensor is None else tensor.index_select(dim, integers_on(tensor.device, places))
