"""Forward passes of several calls run as one: their tokens follow each other in a single row.

Linear layers, most of the work, take the tokens of all calls at once. Attention takes the tokens of
each call alone, with its own cache and mask: no call pays for the length of another, and nothing is
padded. Servers call this continuous batching (Orca, OSDI 2022).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from lade.budget.seconds import Seconds
from lade.compat import CACHE, Model, drops_tokens
from lade.compat.attempts import Attempt
from lade.machine.transfer import integers_on
from lade.targets.inputs import LOGITS_KEPT, TOKEN_TYPES
from lade.targets.kv_cache import TreeCache
from lade.targets.parts import Calls, with_calls, with_held


@dataclass(eq=False)
class Part:
    """A part of a forward: tokens, cache and mask of a sequence.

    Attributes:
        kind: parts of equal kinds may run together.
        view: the model to run.
        inputs: of the view's forward, one row.
        undo: makes the cache forget the forward.
        num_committed: tokens that the call usually commits in a step.
        is_prompt: whether it is a prefill chunk; only its last token has logits.
        is_inference: whether the call is in torch's inference mode, which belongs to its thread.
    """

    kind: Hashable
    view: Model
    inputs: dict[str, Any]
    undo: Callable[[], None]
    num_committed: float
    is_prompt: bool = False
    is_inference: bool = False

    @contextmanager
    def mode(self) -> Iterator[None]:
        """Set the modes of torch that the call has in its own thread."""
        with torch.inference_mode(self.is_inference), torch.no_grad():
            yield

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the part."""
        return int(self.inputs["input_ids"].shape[1])

    @property
    def num_kept(self) -> int:
        """Number of last tokens that have logits."""
        return 1 if self.is_prompt else self.num_tokens


class JointForwards:
    """Runs the parts of forwards that calls ask for, together if the model allows it.

    The check of the model has shown that rows of different lengths may be parts of one forward.

    Attributes:
        why_not: why forwards of the model no longer run together; None if they do.
        marginal_cost: tokens that a draft token must add to pay for all calls together.
    """

    def __init__(self) -> None:
        self.why_not: str | None = None
        self.marginal_cost: float | None = None
        self._failure: str | None = None  # of the last forward of several calls
        self._costs = Seconds()

    def __call__(self, parts: Sequence[Part]) -> list[Any]:
        """Run parts; return for each its logits, or the exception that it raised."""
        by_kind: dict[Hashable, list[Part]] = {}
        for part in parts:
            by_kind.setdefault(part.kind, []).append(part)
        results: dict[Part, Any] = {}
        for alike in by_kind.values():
            results |= zip(alike, self._run(alike), strict=True)
        return [results[part] for part in parts]

    def _run(self, parts: Sequence[Part]) -> list[Any]:
        if len(parts) == 1 or self.why_not is not None:
            return [_run_alone(part) for part in parts]
        together: list[Any] = []
        # Without memory for all, there may be enough for one after the other. Any other
        # `BaseException`, such as an exit, comes from one call, which raises it again alone.
        with suppress(BaseException), Attempt() as attempt:
            begin = perf_counter()
            kept = [part.num_kept for part in parts]
            together = [*torch.split(run_as_one(parts), kept, dim=1)]
            self._learn(parts, perf_counter() - begin)
        if together:
            self._failure = None
            return together
        for part in parts:
            part.undo()
        alone = [_run_alone(part) for part in parts]
        # A part that also fails alone, as with an unknown token, says nothing about joining.
        if not any(isinstance(each, BaseException) for each in alone):
            self.why_not = self._failure and attempt.failure  # twice in a row
            self._failure = attempt.failure
        if self.why_not is not None:
            self.marginal_cost = None
        return alone

    def _learn(self, parts: Sequence[Part], sec: float) -> None:
        self._costs.record(sum(part.num_tokens for part in parts), sec)
        # Prefill chunks soon end: the marginal cost of draft tokens leaves them out.
        if steps := [part for part in parts if not part.is_prompt]:
            num_tokens = sum(part.num_tokens for part in steps)
            num_committed = sum(part.num_committed for part in steps)
            self.marginal_cost = num_committed * self._costs.marginal_cost(num_tokens)


def _run_alone(part: Part) -> Any:
    try:
        with part.mode():
            kept = {LOGITS_KEPT: 1} if part.is_prompt else {}
            return part.view(**part.inputs, **kept).logits
    except BaseException as failure:  # of this call alone
        return failure


def run_as_one(parts: Sequence[Part]) -> Tensor:
    """Return the logits of parts one after the other, [1, num_tokens, vocab_size]."""
    sizes = [part.num_tokens for part in parts]
    inputs = {**parts[0].inputs}
    for name in ("input_ids", "position_ids", *TOKEN_TYPES):
        if name in inputs:
            inputs[name] = torch.cat([part.inputs[name] for part in parts], dim=-1)
    inputs["attention_mask"] = _mask([part.inputs["attention_mask"] for part in parts], sizes)
    inputs[CACHE] = JointCache([part.inputs[CACHE] for part in parts], sizes)
    kept = [part.num_kept for part in parts]
    largest = max(parts, key=lambda part: part.num_tokens)  # its view fits the most tokens
    if kept != sizes or drops_tokens(largest.view):  # which would take a part of the masks
        stops = zip(accumulate(sizes), kept, strict=True)
        nodes = [node for stop, num in stops for node in range(stop - num, stop)]
        inputs[LOGITS_KEPT] = integers_on(inputs["input_ids"].device, nodes)
    with largest.mode():
        output = largest.view(**inputs)
    logits: Tensor = output.logits
    return logits


def _mask(masks: Sequence[Any], sizes: Sequence[int]) -> Tensor | dict[str, Tensor]:
    """Return a mask that carries the masks of the parts, or one such mask per layer type."""
    names = {name for mask in masks if isinstance(mask, dict) for name in mask}

    def carrying(of_parts: Sequence[Tensor | None]) -> Tensor:
        # Its values mean nothing. It fits no keys, so other attentions refuse it.
        empty = torch.ones((1, 1, sum(sizes), sum(sizes) + 1), dtype=torch.bool, device="cpu")
        return with_calls(empty, Calls(sizes, of_parts))

    if not names:
        return carrying(masks)
    return {
        name: carrying([mask[name] if isinstance(mask, dict) else mask for mask in masks])
        for name in names
    }


class JointCache(Cache):  # type: ignore[misc]
    """The caches of several calls, as one forward pass sees them."""

    def __init__(self, caches: Sequence[TreeCache], sizes: Sequence[int]) -> None:
        super().__init__(layers=caches[0].layers)  # some models ask what kinds they are
        self.caches = caches
        self._sizes = [*sizes]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values into the caches; return tensors that carry those of each call."""
        new = (torch.split(states, self._sizes, dim=2) for states in (key_states, value_states))
        held = [
            cache.update(*of_call, layer_idx, *args, **kwargs)
            for cache, *of_call in zip(self.caches, *new, strict=True)
        ]
        keys, values = zip(*held, strict=True)
        return with_held(key_states, keys), with_held(value_states, values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: masks and position ids already account for cached tokens."""
        return 0
