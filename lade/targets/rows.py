"""Rows of a batch: each has its own target, and their forward passes run as parts of one."""

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig

from lade.batch import Batch
from lade.compat import CACHE, Model, prefill
from lade.compat.attempts import Attempt
from lade.compat.view import with_decoding_experts
from lade.drafting.drafts import chain
from lade.engine.engine import EngineCall
from lade.machine.transfer import integers_on
from lade.targets.base import Target
from lade.targets.inputs import CONTINUED
from lade.targets.joint import Part, run_as_one
from lade.targets.rollback import cache_in, crop
from lade.targets.trees import TreeTarget
from lade.tree import Tree

MOST_AT_ONCE = 1024  # tokens of several prompts in one forward


class PromptRow(NamedTuple):
    """One prompt of a batch, as a batch of one."""

    input_ids: Tensor  # int64 [1, num_tokens]
    model_kwargs: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """Return a key that equal prompts share."""
        given = [self.model_kwargs.get(name) for name in (*CONTINUED, "inputs_embeds")]
        return tuple(str(each.tolist()) for each in (self.input_ids, *given) if each is not None)


def split(
    model: Model, input_ids: Tensor, model_kwargs: Mapping[str, Any], keeps_padding: bool = False
) -> list[PromptRow]:
    """Return the prompts of a batch, without leading padding if that changes no position.

    Args:
        keeps_padding: whether to run padding, too, because the caller gets the cache, whose padding
            slots must hold what `generate` leaves there.
    """
    mask, num_rows = model_kwargs.get("attention_mask"), len(input_ids)
    given = {**model_kwargs}
    starts = [0] * num_rows
    if mask is not None and mask.shape == input_ids.shape and not keeps_padding:
        prepared = model.prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=input_ids.shape[1],
            is_first_iteration=True,
            **model_kwargs,
        )
        positions = prepared.get("position_ids")
        if positions is not None and model_kwargs.get("inputs_embeds") is None:
            given["position_ids"] = positions
            # A fully masked prompt keeps one token.
            most = input_ids.shape[1] - 1
            starts = (mask.cumsum(-1) == 0).sum(-1).clamp(max=most).tolist()
    return [_row(input_ids, given, row, start) for row, start in enumerate(starts)]


def _row(input_ids: Tensor, model_kwargs: Mapping[str, Any], row: int, start: int) -> PromptRow:
    of_prompt: dict[str, Any] = {}
    for name, value in model_kwargs.items():
        if name in CONTINUED and value is not None:
            # Some vision-language models count positions along several axes: [axes, rows, …].
            of_row = value[..., row if value.shape[-2] > 1 else 0, start:].unsqueeze(-2)
            if name != "attention_mask" or not bool(of_row.all()):
                of_prompt[name] = of_row
        elif name == "inputs_embeds" and value is not None:
            of_prompt[name] = value[row : row + 1]
        else:
            of_prompt[name] = deepcopy(value) if name == CACHE else value
    return PromptRow(input_ids[row : row + 1, start:], of_prompt)


class RowsTarget(Target):
    """Target of several rows, whose trees run as parts of one forward.

    Until the first tree, a plain prefill and roots run as the batch of `generate`, with one cache.

    Args:
        rows: the prompts.
        targets: one for each prompt.
        model, input_ids, model_kwargs, config: the whole batch, as `generate` runs it.
    """

    def __init__(
        self,
        rows: Sequence[PromptRow],
        targets: Sequence[TreeTarget],
        model: Model,
        input_ids: Tensor,
        model_kwargs: dict[str, Any],
        config: GenerationConfig,
    ) -> None:
        self._model, self._input_ids, self._config = model, input_ids, config
        self._model_kwargs = model_kwargs
        self._shared: Any = None  # cache of all rows, of equal lengths
        self._num_later, self._is_plain = 0, False
        first = targets[0]
        self.device, self.vocab_size = first.device, first.vocab_size
        self.max_candidates, self.is_fast = first.max_candidates, first.is_fast
        self._all = self._rows = [*targets]
        self.may_join = all(target.may_join for target in targets)
        keys = [row.key for row in rows]
        self._originals = [keys.index(key) for key in keys]
        self._num_prompt = [row.input_ids.shape[1] for row in rows]
        self._starts = [input_ids.shape[1] - num for num in self._num_prompt]  # padding

    def prefill(self, *, is_plain: bool = False) -> Tensor:
        """Run the distinct prompts, and copy their caches to equal ones; return last logits."""
        if is_plain:
            self._is_plain = True
            given = {**self._model_kwargs, CACHE: deepcopy(self._model_kwargs[CACHE])}
            output = prefill(self._model, self._input_ids, self._config, given)
            self._shared = cache_in(output)
            return output.logits[:, -1:].transpose(0, 1)  # type: ignore[no-any-return]
        last: dict[int, Tensor] = {}
        for group in self._groups(sorted({*self._originals})):
            last |= zip(group, self._run_prompts(group), strict=True)
        for row, original in enumerate(self._originals):
            if row != original:
                self._all[row].cache.take_over(self._all[original].cache)
                self._all[row].begin()
        return torch.cat([last[original] for original in self._originals], dim=1)

    def _groups(self, rows: Sequence[int]) -> list[list[int]]:
        """Group prompts that run together."""
        groups: list[list[int]] = [[]]
        for row in rows:
            num = sum(self._num_prompt[each] for each in groups[-1]) + self._num_prompt[row]
            if groups[-1] and num > MOST_AT_ONCE:
                groups.append([])
            groups[-1].append(row)
        return groups

    def _run_prompts(self, rows: Sequence[int]) -> list[Tensor]:
        """Return the logits of the prompts' last tokens, [1, 1, vocab_size] each."""
        targets, parts = [self._all[row] for row in rows], list[Part]()
        if len(rows) > 1 and self._engine_call is None:  # else in prefill chunks
            of_rows = (target.prompt() for target in targets)
            parts = [part for part in of_rows if part is not None]
        if len(parts) < len(rows):
            return [target.prefill() for target in targets]
        logits = torch.split(run_as_one(parts), 1, dim=1)
        for target in targets:
            target.begin()
        return [*logits]

    def _part(self) -> None:
        """Give each row its own cache, without padding in front."""
        shared, self._shared = self._shared, None
        if shared is None:
            return
        for row, (target, start) in enumerate(zip(self._all, self._starts, strict=True)):
            target.cache.take_over(_cache_of(shared, row, start))
            target.begin(self._num_later)

    def inputs(self, trees: Sequence[Tree]) -> Any:
        """Return the inputs of each row."""
        self._part()
        return [target.inputs([tree]) for target, tree in zip(self._rows, trees, strict=True)]

    def forward(self, inputs: Any) -> Tensor:
        """Run the rows as one."""
        if len(self._rows) == 1 and self._engine_call is None:
            return self._rows[0].forward(inputs[0])
        parts = [target.part(each) for target, each in zip(self._rows, inputs, strict=True)]
        if self._engine_call is None:
            return run_as_one(parts)
        return torch.cat(self.ask(self._engine_call, parts), dim=1)

    def join(self, call: EngineCall) -> None:
        """Run forwards together with other calls, if all rows may."""
        super().join(call)
        for target in self._all if self.may_join else ():
            target.join(call)

    def forward_roots(self, roots: Sequence[Tree]) -> Tensor:
        """Run the first row's root as `generate` runs single tokens, and other roots as trees.

        After a plain prefill, run all roots as `generate` does: together until the first tree, then
        each as a call of its own.
        """
        if self._shared is not None:
            return self._together(roots)
        pairs = [*zip(self._rows, roots, strict=True)]
        num_alone = len(pairs) if self._is_plain else 1
        logits = [row.forward_roots([root])[:, -1:] for row, root in pairs[:num_alone]]
        if parts := [row.part(row.inputs([root])) for row, root in pairs[num_alone:]]:
            logits.append(run_as_one(parts))
        return torch.cat(logits, dim=1)

    def _together(self, roots: Sequence[Tree]) -> Tensor:
        """Run roots as the next tokens of a batch, whose other rows have ended."""
        tokens = dict.fromkeys(self._all, int(self._config._pad_token_tensor or 0))
        tokens |= {
            target: root.token_ids[0] for target, root in zip(self._rows, roots, strict=True)
        }
        num_later = self._num_later + 1
        ids = self._input_ids.new_zeros((len(self._all), self._input_ids.shape[1] + num_later))
        ids[:, -1] = integers_on(self.device, [*tokens.values()])
        given = {**self.extended(num_later), CACHE: self._shared}
        inputs = self._model.prepare_inputs_for_generation(ids, next_sequence_length=1, **given)
        output = with_decoding_experts(self._model)(**inputs, return_dict=True)
        return output.logits[[self._all.index(each) for each in self._rows], -1][None]  # type: ignore[no-any-return]

    def discard(self) -> None:
        """Discard the last forward."""
        if self._shared is not None:
            crop(self._shared, 1)
            return
        for target in self._rows:
            target.discard()

    def go_back(self, num_tokens: int) -> bool:
        """Forget the last tokens of all rows, or of none."""
        self._part()
        may_go = all(target.cache.can_go_back(num_tokens) for target in self._rows)
        return may_go and all(target.go_back(num_tokens) for target in self._rows)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep each row's accepted path."""
        if self._shared is not None:
            self._num_later += 1
            return
        for target, path in zip(self._rows, paths, strict=True):
            target.commit([path])

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these rows only."""
        self._rows = [self._all[row] for row in rows]

    def fill(self, batch: Batch) -> int:
        """Run the padding of rows that ended early; return the number of forwards."""
        self._part()
        num_forwards, most = 0, MOST_AT_ONCE
        for target, row, start in zip(self._all, batch.rows, self._starts, strict=True):
            missing = batch.longest - len(row.token_ids)
            whole = [*row.token_ids, *[batch.pad_token_id or 0] * missing]
            # Beside rows that go on, roots run padding in place of a row's last token, too.
            target.go_back(max(0, start + target.cache.length + 1 - row.num_unpadded))
            while left := whole[start + target.cache.length : -1]:
                root, *others = left[:most]
                # Where several tokens fail, they run as by `generate`: one by one.
                passed = [Exception] if most == 1 else []
                with Attempt(*passed, even_memory=True) as attempt:
                    target.forward(target.inputs([Tree.build(root, chain(others))]))
                    target.commit([[*range(1 + len(others))]])
                    num_forwards += 1
                if attempt.failure is not None:
                    target.discard()
                    most = 1
        return num_forwards

    def hand_over(self, cache: Any) -> Any:
        """Fill a dynamic cache with the rows, padded in front; return it."""
        self._part()
        return self._gathered(cache)

    def _gathered(self, cache: Any) -> Any:
        of_rows = [target.hand_over(deepcopy(cache)) for target in self._all]
        for layers in zip(*(each.layers for each in of_rows), strict=True):
            if getattr(layers[0], "keys", None) is None:
                continue  # a layer that keeps nothing
            length = max(layer.keys.shape[2] for layer in layers)
            for name in ("keys", "values"):
                states = (getattr(layer, name) for layer in layers)
                padded = [pad(each, (0, 0, length - each.shape[2], 0)) for each in states]
                setattr(layers[0], name, torch.cat(padded))
            if hasattr(layers[0], "cumulative_length"):
                layers[0].cumulative_length = max(each.cumulative_length for each in layers)
        vars(cache).update(vars(of_rows[0]))
        return cache


def _cache_of(shared: Any, row: int, start: int) -> Any:
    """Return one row of a cache from a slot on, as a cache that shares its memory."""
    cache = copy(shared)
    cache.layers = [copy(layer) for layer in shared.layers]
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None:
            continue  # it keeps nothing
        first = max(0, start - (layer.get_seq_length() - layer.keys.shape[2]))
        keys, values = layer.keys, layer.values
        layer.keys, layer.values = (each[row : row + 1, :, first:] for each in (keys, values))
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length -= start
    return cache
