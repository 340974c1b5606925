"""`lade.prewarm`: a table of the model's likely successors, made once, ahead of all use.

The model writes texts, which show the successors of single tokens and pairs; `tables.py` stores
them.
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig

from lade.compat import Model, device_of_inputs, unwrapped
from lade.compat.view import apart
from lade.drafting.successors import successors_of
from lade.drafting.tables import label_of, path_of_table, table_for
from lade.errors import UnsupportedModelError, UserError
from lade.probing.plan import plan_of_calls
from lade.probing.profile import Profiles
from lade.probing.rules import refuse_encoder_decoder, refuse_sharded
from lade.probing.selfcheck import unchanged_random_state
from ngram_pool import DEFAULT_NUM_SUCCESSORS, PoolStore

# For 2**20 contexts: 64 MB on disk and in memory. A full table forgets the least recent contexts.
_CAPACITY_TOKENS = 2**24
# SmolLM2, bfloat16, one core: texts of 16 / 32 / 64 tokens ran at 502 / 450 / 371 tokens a second,
# because attention and copies of the cache cost more with each token.
_TEXT_LENGTH = 16
# Texts written at once: 64 / 128 / 256 / 1024 ran at 276 / 381 / 501 / 566 tokens a second there; a
# KV cache of more texts takes memory beside a server's. The number doubles as long as a batch takes
# at most `_MOST_SEC`, since a run ends only between forward passes.
_FEWEST_ROWS, _MOST_ROWS, _MOST_SEC = 64, 256, 4.0
_LEAST_MENTION = 1e-6  # of tokens that were never mentioned
# Factor on the probability of pairs that the table has. With it, SmolLM2 accepts after a minute as
# many tokens as after 100 seconds without it; a thirtieth is worse than a fifth.
_SHARE_OF_KNOWN = 0.2
_NUM_PAIRS = 16_777_213  # slots of a hash table, a prime number; pairs may share one


@dataclass(frozen=True, slots=True)
class Prewarmed:
    """The contents of a table, and the work that went into it."""

    path: Path  #: of the file
    num_contexts: int  #: single tokens and pairs whose successors are stored
    num_tokens: int  #: run through the model, in this run
    seconds: float  #: of all runs


def prewarm(
    model: Model,
    seconds: float,
    *,
    max_tokens: int | None = None,
    folder: Path | None = None,
    progress: Callable[[Prewarmed], None] | None = None,
) -> Prewarmed:
    """Make a table of a model's likely successors, so that lade drafts from the first step on.

    The table is kept in the user's cache under the model's fingerprint, and is used whenever lade
    generates with that model; it changes only the speed, never the text. At its end, also after an
    exception or Ctrl-C, a run adds its results to the file, beside those of earlier runs. A damaged
    file is replaced, with a warning.

    Args:
        model: a transformers causal LM.
        seconds: how long to run; a forward pass in progress is finished.
        max_tokens: maximum number of tokens to run through the model; None for no limit.
        folder: where to write `lade.pool`, to be published with the checkpoint: lade drafts from it
            beside the weights. None for the user's cache.
        progress: called after every forward pass with the table, and with the tokens and seconds of
            this run so far.

    Raises:
        OSError: the table cannot be read or written, or another process adds to it.
        UnsupportedModelError: the model is an encoder-decoder or tensor-parallel, lade falls back
            to standard decoding for it (so a table would not be used), or it has no weights in
            memory to recognise it by.
        UnsupportedOptionError: it is sharded by FSDP or DeepSpeed ZeRO-3.
        ValueError: `seconds` or `max_tokens` is not above 0, or the existing file is of a newer
            version.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"expected seconds to be above 0, got {seconds!r}")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"expected max_tokens to be above 0, got {max_tokens!r}")
    writer, most_tokens = TableWriter(model, folder), max_tokens or math.inf

    def made(seconds: float) -> Prewarmed:
        return Prewarmed(writer.path, writer.table.num_contexts, writer.num_tokens, seconds)

    def is_enough() -> bool:
        if progress is not None:
            progress(made(writer.seconds))
        return writer.seconds >= seconds or writer.num_tokens >= most_tokens

    try:
        # Our draws do not touch that state, but a model's forward may.
        with unchanged_random_state(writer.model):
            writer.work(is_enough)
    finally:
        writer.close()
    return made(writer.saved_sec)


class _Enough(Exception):  # noqa: N818 - it ends a run and is no error
    """The work is to stop."""


class TableWriter:
    """Lets a model write texts, and collects the likely successors of their tokens in its table.

    The model writes by `generate`, so any causal LM will do. Texts begin with tokens that are
    frequent among the successors in the table. No other process adds to it until this is closed.

    Args:
        model: a transformers causal LM, which is not changed.
        folder: of `lade.pool`; None for the user's cache.

    Attributes:
        path: the table's file.
        table: what is in the file, and what was learned since.
        seconds: how long the latter took.
        num_tokens: tokens run through the model.
        saved_sec: seconds of all runs in the file.

    Raises:
        OSError, UnsupportedModelError, UnsupportedOptionError, ValueError: as `prewarm` does.
    """

    def __init__(self, model: Model, folder: Path | None = None) -> None:
        self.model = model = unwrapped(model)
        refuse_encoder_decoder(model)
        refuse_sharded(model)
        self.path = path_of_table(model, folder)
        self._model = view = apart(model).eval()
        is_training = any(each.training for each in model.modules())
        _, found = plan_of_calls(view if is_training else model)
        if found.verification == "plain":
            reasons = "; ".join(f"{name}: {reason}" for name, reason in found.reasons.items())
            raise UnsupportedModelError(
                "lade would not use a table: it falls back to standard decoding for "
                f"{type(model).__name__}. {reasons}"
            )
        self.seconds, self.num_tokens = 0.0, 0
        self._num_rows = _FEWEST_ROWS
        self._rng = np.random.default_rng()  # different texts in every run and process
        config = model.config.get_text_config(decoder=True)
        # Many models treat the very first token of a text unlike any other: it is this one.
        names = ("bos_token_id", "eos_token_id")
        ids = [getattr(each, n, None) for n in names for each in (model.generation_config, config)]
        self._start_token_id = next((each for each in ids if type(each) is int and each >= 0), 0)
        longest = getattr(config, "max_position_embeddings", None) or _TEXT_LENGTH + 2
        # The model's default options must not apply.
        self._model.generation_config = GenerationConfig(
            max_new_tokens=min(_TEXT_LENGTH, longest - 2), do_sample=False
        )
        if not self.path.exists() and (known := table_for(model)) is not None:
            known.pool.save(self.path)  # the checkpoint's to begin with, or one's own to publish
        options: Any = {"save_every_sec": math.inf, "capacity_tokens": _CAPACITY_TOKENS}
        store = PoolStore(self.path.parent, model=label_of(model), **options)
        with ExitStack() as opened:  # an error lets others open it
            self._store = opened.enter_context(store)
            self.table = opened.enter_context(store.open(self.path.stem))
            # A file of other weights was emptied, but for its note.
            note = self.table.note if self.table.num_contexts else ""
            if num := len(self.table):
                raise UserError(f"expected a table of lade prewarm, got a pool of {num:,} tokens")
            try:
                self.saved_sec = float(note or 0.0)
            except ValueError:
                message = f"expected a table of lade prewarm, got a file with the note {note!r}"
                raise UserError(message) from None
            self._opened = opened.pop_all()
        # How often each token is to be expected, by the likely successors.
        self._mentions = np.zeros(config.vocab_size)
        for token_id, count in self.table.unigrams().items():
            self._mentions[token_id] = count
        self._is_known = np.zeros(_NUM_PAIRS, np.bool_)
        pairs = self.table.contexts()
        self._is_known[self._numbers_of(pairs[:, 0], pairs[:, 1])[pairs[:, 0] >= 0]] = True

    def work(self, should_stop: Callable[[], bool]) -> None:
        """Let the model write until a function, called after every forward pass, returns True.

        Raises:
            BlockingIOError: another process adds to the table.
        """
        if self.table.is_read_only:
            raise BlockingIOError(f"another process prewarms this model: {self.path}")
        self._should_stop, self._looked = should_stop, time.monotonic()
        with suppress(_Enough), torch.no_grad():
            while True:
                self._num_rows, began = min(self._num_rows, len(self._mentions)), time.monotonic()
                try:
                    self._write(self._num_rows)
                except torch.OutOfMemoryError:
                    if self._num_rows == 1:
                        raise
                    self._num_rows //= 2
                    continue
                if 2 * (time.monotonic() - began) < _MOST_SEC:
                    self._num_rows = min(2 * self._num_rows, _MOST_ROWS)

    def save(self) -> None:
        """Write what was learned since the last `save` to the file."""
        if self.seconds:
            self.saved_sec += self.seconds
            self.seconds, self.table.note = 0.0, str(self.saved_sec)
            self._store.save()
            with suppress(FileNotFoundError):  # nothing was learned
                self.path.chmod(0o644)  # it holds no text
            for profile in Profiles.of(self.model):  # so that the next call reads the table again
                profile.found.pop("prewarmed", None)

    def close(self) -> None:
        """Save, and let other processes add to the table."""
        with self._opened:
            self.save()

    def _write(self, num_rows: int) -> None:
        """Write a batch of texts.

        An end-of-text token in the middle counts as any other: its successors are likely there,
        such as an answer after a question.
        """
        weights = self._mentions + _LEAST_MENTION
        first = self._rng.choice(len(weights), num_rows, replace=False, p=weights / weights.sum())
        rows = np.stack([np.full_like(first, self._start_token_id), first], axis=1)
        input_ids = torch.from_numpy(rows).to(device_of_inputs(self._model))
        type(self._model).generate(  # `lade.wrap` may have replaced that of the instance
            self._model,
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            logits_processor=[self._continue],
        )

    def _continue(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Learn the successors of the last tokens; return scores that choose one of them."""
        logits = scores[:, : len(self._mentions)]  # some models have more logits than tokens
        successors = successors_of(logits, DEFAULT_NUM_SUCCESSORS)
        if input_ids.shape[1] > 2:  # the first token of a text has no context
            tokens = input_ids[:, -2:].cpu().numpy()
            single = np.stack([np.full_like(tokens[:, 1], -1), tokens[:, 1]], axis=1)
            self.table.harvest(single, *successors)
            self.table.harvest(tokens, *successors)
        token_ids, probs = (part.reshape(-1) for part in successors)
        self._mentions += np.bincount(token_ids, probs, minlength=len(self._mentions))
        self.num_tokens += len(scores)
        now = time.monotonic()
        self.seconds += now - self._looked
        self._looked = now
        if self._should_stop():
            raise _Enough
        # Draw by probability, preferring pairs that are new.
        last = input_ids[:, -1:].cpu().numpy()
        numbers = self._numbers_of(last, successors.token_ids.astype(np.int64))
        shares = np.where(self._is_known[numbers], _SHARE_OF_KNOWN, 1.0)
        sums = (successors.probs * shares).cumsum(axis=1)
        at = self._rng.random((len(sums), 1)) * sums[:, -1:]
        ranks = (sums <= at).sum(axis=1).clip(max=sums.shape[1] - 1)
        rows = np.arange(len(ranks))
        self._is_known[numbers[rows, ranks]] = True
        chosen = successors.token_ids[rows, ranks].astype(np.int64)
        at_chosen = torch.from_numpy(chosen)[:, None].to(scores.device)
        return scores.scatter_(1, at_chosen, torch.inf)  # generate passes a copy

    def _numbers_of(self, first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
        """Return the index of each pair of tokens in the table of known pairs."""
        numbers: NDArray[Any] = (first * len(self._mentions) + second) % _NUM_PAIRS
        return numbers
