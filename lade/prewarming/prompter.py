"""Ask a model for its likely successors: after single tokens, and in texts of its own.

The model's forward is called directly where a comparison shows that it tells what `generate` tells;
else everything runs through `generate`, so any causal LM will do, whatever its cache.
"""

import copy
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache

from lade.attempts import Attempt
from lade.compat import CACHE, Model, device_of_inputs
from lade.drafting.successors import Successors, rank, with_probs
from lade.probing.selfcheck import unchanged_random_state
from lade.targets.rollback import expand, saved
from lade.view import in_evaluation

# Rows of a batch: doubled as long as that runs a tenth more tokens a second; three batches are
# timed before they stay, since others use the machine too. SmolLM2, bfloat16, one core: 64 / 128 /
# 256 / 1024 single tokens ran at 276 / 381 / 501 / 566 a second.
_FEWEST_ROWS, _MOST_ROWS, _LEAST_GAIN, _MOST_SLOW = 64, 1024, 1.1, 3
# Rows and tokens of the text by which forwards are compared with `generate`, and the probability
# that both have to give the same successors. Positions or masks that are wrong leave far less.
_COMPARED_ROWS, _COMPARED_LENGTH, _LEAST_SHARED = 4, 4, 0.97

#: Called with one column of the texts: the last token or two of every row, int64
#: [num_rows, 1 or 2], and their likely successors. Returns the next token of every row, int64
#: [num_rows], or None to end the texts.
Continue = Callable[[NDArray[np.int64], Successors], NDArray[np.int64] | None]


@contextmanager
def prompting(model: Model, num_successors: int) -> Iterator["Prompter"]:
    """Yield a prompter; leave the model and the global random state unchanged."""
    if any(module.training for module in model.modules()):
        model = in_evaluation(model)
    # Our own draws do not touch that state, but those of a model's forward may.
    with unchanged_random_state(model), torch.no_grad():
        yield Prompter(model, num_successors)


class Prompter:
    """A model that is asked for its likeliest next tokens."""

    def __init__(self, model: Model, num_successors: int) -> None:
        self._model = copy.copy(model)  # shares everything but the attribute set here
        self._model.generation_config = GenerationConfig()  # none of the model's own options
        self._device = device_of_inputs(model)
        self._num_successors = num_successors
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.start_token_id = _start_token_of(model.generation_config, config)
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        arguments = inspect.signature(type(model).forward).parameters
        self._takes_cache = CACHE in arguments
        self._is_direct: bool | None = None  # not compared yet
        self._prefix: tuple[int, Any] | None = None  # the newest, and its cache
        #: Rows of a batch; doubled while that pays, and halved whenever memory runs out.
        self.num_rows = _FEWEST_ROWS
        self._speed = 0.0  # of the last batch before they were doubled, in rows a second
        self._num_slow = 0  # batches since that were hardly faster

    def successors_of(self, prefix_token_id: int, token_ids: NDArray[np.int64]) -> Successors:
        """Return the likely successors of single tokens, each after a prefix of one token.

        Args:
            prefix_token_id: the prefix; without one, each token would be the first of its text,
                and many models continue a first token unlike any other.
            token_ids: int64 [num_tokens].
        """
        collected: list[Successors] = []

        def go_on(_: NDArray[np.int64], successors: Successors) -> None:
            collected.append(successors)

        while (start := sum(len(part.token_ids) for part in collected)) < len(token_ids):
            part = token_ids[start : start + self.num_rows]
            began = time.perf_counter()
            self.write(part, 1, go_on, prefix_token_id)  # nothing is collected if memory runs out
            self._see_speed(len(part), time.perf_counter() - began)
        return Successors(*(np.concatenate(parts) for parts in zip(*collected, strict=True)))

    def write(
        self,
        first_token_ids: NDArray[np.int64],
        num_tokens: int,
        go_on: Continue,
        prefix_token_id: int | None = None,
    ) -> bool:
        """Write a batch of texts, of which the model tells the likely successors at every place.

        An end-of-text token in the middle counts as any other: what comes after it is what this
        model finds likely there, such as an answer after a question.

        Args:
            first_token_ids: int64 [num_rows], each begins a text.
            num_tokens: maximum number of tokens per text.
            go_on: called for each column of tokens; chooses the next one.
            prefix_token_id: a token that comes before all texts and is no part of them.

        Returns:
            Whether the texts are complete; false if `go_on` ended them or memory ran out.
        """
        length = num_tokens if self.max_length is None else min(num_tokens, self.max_length - 2)
        write = self._write_directly if self._can_step() else self._write_by_generate
        try:
            return write(first_token_ids, length, go_on, prefix_token_id)
        except torch.OutOfMemoryError:
            if len(first_token_ids) == 1:
                raise
        # Only after the handler, which keeps the failed forward alive.
        self._shrink(len(first_token_ids))
        return False

    # --- sizes of batches -------------------------------------------------------------------

    def _see_speed(self, num_rows: int, seconds: float) -> None:
        """Double the batches after a full one, unless it was hardly faster than half of it."""
        if num_rows < self.num_rows or num_rows >= _MOST_ROWS or self._num_slow == _MOST_SLOW:
            return
        speed = num_rows / max(seconds, 1e-9)
        if speed < _LEAST_GAIN * self._speed:
            self._num_slow += 1
        else:
            self._speed, self._num_slow = speed, 0
            self.num_rows *= 2

    def _shrink(self, num_rows: int) -> None:
        self.num_rows = max(1, num_rows // 2)
        self._num_slow = _MOST_SLOW

    # --- by the model's forward -------------------------------------------------------------

    def _step(self, token_ids: NDArray[np.int64], cache: Any) -> tuple[Successors, Any]:
        """Run the next token of every row; return its successors, and the cache."""
        output = self._model(
            input_ids=torch.from_numpy(token_ids)[:, None].to(self._device),
            use_cache=True,
            **{CACHE: cache},
        )
        logits = output.logits[:, -1]
        successors = _successors_in(logits, self.vocab_size, self._num_successors)
        return successors, getattr(output, CACHE)

    def _can_step(self) -> bool:
        """Return whether forwards tell what `generate` tells; compared once, in a short text."""
        if self._is_direct is None:
            self._is_direct = self._takes_cache and self._steps_agree()
        return self._is_direct

    def _steps_agree(self) -> bool:
        tokens: list[NDArray[np.int64]] = []
        expected: list[Successors] = []

        def go_on(newest: NDArray[np.int64], successors: Successors) -> NDArray[np.int64]:
            tokens.append(newest[:, -1])
            expected.append(successors)
            rows = np.arange(len(newest))  # each goes on in its own way
            columns = rows % successors.token_ids.shape[1]
            chosen: NDArray[np.int64] = successors.token_ids[rows, columns].astype(np.int64)
            return chosen

        starts = np.full(_COMPARED_ROWS, self.start_token_id)
        self._write_by_generate(starts, _COMPARED_LENGTH, go_on, None)
        cache: Any = None
        for column, likely in zip(tokens, expected, strict=True):
            with Attempt() as attempt:
                found, cache = self._step(column, cache)
            # It may want more than tokens, or return no cache: `generate` knows.
            if attempt.failure is not None:
                return False
            shared = shared_probability(found, likely)
            if cache is None or shared < _LEAST_SHARED * likely.probs.sum():
                return False
        return True

    def _write_directly(
        self,
        first_token_ids: NDArray[np.int64],
        length: int,
        go_on: Continue,
        prefix_token_id: int | None,
    ) -> bool:
        columns, cache = first_token_ids[:, None], None
        if prefix_token_id is not None:
            cache = self._behind(prefix_token_id, len(first_token_ids))
        for _ in range(length):
            successors, cache = self._step(columns[:, -1], cache)
            next_token_ids = go_on(columns, successors)
            if next_token_ids is None:
                return False
            columns = np.stack([columns[:, -1], next_token_ids], axis=1)
        return True

    def _behind(self, prefix_token_id: int, num_rows: int) -> Any:
        """Return the cache of rows that hold a prefix alone."""
        if self._prefix is None or self._prefix[0] != prefix_token_id:
            self._prefix = prefix_token_id, self._step(np.array([prefix_token_id]), None)[1]
        cache = self._prefix[1]
        if type(cache) is not DynamicCache:  # one that may not be repeated
            return self._step(np.full(num_rows, prefix_token_id), None)[1]
        cache = saved(cache)
        expand(cache, num_rows, self._device)
        return cache

    # --- by `generate` ----------------------------------------------------------------------

    def _write_by_generate(
        self,
        first_token_ids: NDArray[np.int64],
        length: int,
        go_on: Continue,
        prefix_token_id: int | None,
    ) -> bool:
        rows = first_token_ids[:, None]
        if prefix_token_id is not None:
            rows = np.concatenate([np.full_like(rows, prefix_token_id), rows], axis=1)
        num_hidden = rows.shape[1] - 1  # of the first tokens, which are not shown
        has_ended = False

        def choose(input_ids: Tensor, scores: Tensor) -> Tensor:
            nonlocal has_ended
            successors = _successors_in(scores, self.vocab_size, self._num_successors)
            chosen = go_on(input_ids[:, num_hidden:][:, -2:].cpu().numpy(), successors)
            has_ended = chosen is None
            if chosen is None:
                return scores
            places = torch.from_numpy(chosen)[:, None].to(scores.device)
            return scores.scatter_(1, places, torch.inf)  # generate passes a copy

        def until(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.full((len(input_ids),), has_ended, device=input_ids.device)

        input_ids = torch.from_numpy(rows).to(self._device)
        # The class's `generate`: that of the instance may be the one that `lade.wrap` set.
        type(self._model).generate(
            self._model,
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=length,
            do_sample=False,
            logits_processor=[choose],
            stopping_criteria=[until],
        )
        return not has_ended


def _successors_in(logits: Tensor, vocab_size: int, num_successors: int) -> Successors:
    """Return the likely successors by logits, [num_rows, at least vocab_size]."""
    logits = logits[:, :vocab_size]  # some models have more logits than that
    return with_probs(rank(logits, num_successors), logits).get()


def shared_probability(successors: Successors, others: Successors) -> float:
    """Return the probability mass that two sets of successors share, over all positions."""
    same = successors.token_ids[:, :, None] == others.token_ids[:, None, :]
    least = np.minimum(successors.probs[:, :, None], others.probs[:, None, :])
    return float(least[same].sum())


def _start_token_of(*configs: Any) -> int:
    """Return the token that texts begin with: BOS, or else EOS, or else token 0."""
    for name in ("bos_token_id", "eos_token_id"):
        for config in configs:
            found = getattr(config, name, None)
            found = found[0] if isinstance(found, Sequence) and found else found
            if isinstance(found, int) and found >= 0:
                return found
    return 0
