"""`lade.prewarm`: a table of what the model itself finds likely, made once, ahead of all use.

First every token of the vocabulary alone, the most frequent ones first (in most vocabularies they
have the lowest ids), then texts that the model writes, which show in what pairs tokens come. How
the model is asked is in `prompter.py`, where the table is kept in `tables.py`.
"""

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lade.compat import Model, mesh_of, without_compiler
from lade.drafting.successors import Successors
from lade.errors import UnsupportedModelError
from lade.prewarming.fingerprint import fingerprint_of
from lade.prewarming.prompter import Hear, Prompter, speaking
from lade.prewarming.tables import (
    Effort,
    StoredTable,
    forget_prewarmed_table,
    read_table,
    table_path,
    tables_folder,
    write_table,
)
from lade.probing.rules import refuse_encoder_decoder, refuse_sharded
from ngram_pool import SuccessorTable

DEFAULT_MAX_CONTEXTS = 2**20
_LONE_TOKENS_SHARE = 1 / 3  # of a run's time, until they are done
# SmolLM2, bfloat16, one core, 40 s of texts alone: texts of 32 / 64 / 128 / 256 tokens came to
# 485 / 461 / 365 / 277 tokens a second (attention costs), and what they told of pairs covered
# 33 / 32 / 30 / 28 % of all places in its answers to prompts. The shortest begin anew all the
# time, which other models may do too much alike.
_TEXT_LENGTH = 64
_SAVE_EVERY_SEC = 30.0
# What lone tokens stand behind is chosen among so many, by texts of so many tokens, at so many of
# their places.
_NUM_PREFIXES, _PREFIX_TEXT_LENGTH, _NUM_PREFIX_PLACES = 8, 16, 128


@dataclass(frozen=True, slots=True)
class Prewarmed:
    """What the table of a model holds, and what has gone into it in all runs."""

    path: Path  #: of the file
    num_contexts: int  #: lone tokens and pairs whose successors are held
    num_lone_tokens: int  #: done, of `vocab_size`
    vocab_size: int
    num_tokens: int  #: run through the model
    seconds: float


@dataclass(frozen=True, slots=True)
class PrewarmProgress:
    """How far a run has come."""

    stage: str  #: what it is doing
    passed_sec: float
    tokens_per_sec: float  #: of this run
    made: Prewarmed  #: what there is now


OnProgress = Callable[[PrewarmProgress], None]


def prewarm(
    model: Model,
    seconds: float,
    *,
    max_contexts: int = DEFAULT_MAX_CONTEXTS,
    folder: Path | None = None,
    progress: OnProgress | None = None,
) -> Prewarmed:
    """Let a model tell what it finds likely, so that lade drafts from the first step on.

    The table is kept in the user's cache under the model's fingerprint, and is used whenever lade
    generates with that model. Another run goes on where the last one ended. What is done is written
    every 30 seconds and in the end, also after an exception or Ctrl-C; where it cannot be written
    meanwhile, a warning says so and the work goes on. Of two processes at once, the last one's work
    stays. The table changes the speed alone, never the text.

    Args:
        model: a transformers causal LM.
        seconds: how long to work; a forward that has begun is finished.
        max_contexts: lone tokens and pairs to hold, rounded up to a power of two (the default
            takes 64 MB on disk, twice that in memory); beyond, what was met longest ago is
            forgotten.
        folder: of the tables; None for the user's cache, where lade looks for them.
        progress: called after every forward.

    Returns:
        What there is now.

    Raises:
        OSError: the table cannot be read, or not be written in the end.
        UnsupportedModelError: it is an encoder-decoder, tensor-parallel, or without weights in
            memory that it could be recognised by.
        UnsupportedOptionError: it is sharded by FSDP or DeepSpeed ZeRO-3.
        ValueError: the seconds are not above 0, or the file that is there is damaged.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"expected seconds to be above 0, got {seconds!r}")
    model = without_compiler(model)
    path = _path_for(model, tables_folder() if folder is None else folder)
    if path.exists():
        stored = read_table(path, model, max_contexts)
    else:
        stored = StoredTable(SuccessorTable(max_contexts), Effort())
    path.parent.mkdir(parents=True, exist_ok=True)  # raises now rather than after the work
    with speaking(model, stored.table.num_successors) as prompter:
        run = Run(
            prompter,
            stored,
            path,
            seconds,
            save=lambda: write_table(path, model, stored),
            progress=progress,
        )
        try:
            run.work()
        finally:
            if run.num_new_tokens:
                write_table(path, model, stored)
                forget_prewarmed_table(model)
    return run.made()


def _path_for(model: Model, folder: Path) -> Path:
    """Return the file of a model that can be asked, or raise."""
    refuse_encoder_decoder(model)
    refuse_sharded(model)
    name = type(model).__name__
    if mesh_of(model) is not None:
        raise UnsupportedModelError(
            f"{name} is tensor-parallel; lade.prewarm runs a model in one process"
        )
    fingerprint = fingerprint_of(model)
    if fingerprint is None:
        raise UnsupportedModelError(f"{name} has no weights in memory to be recognised by")
    return table_path(folder, fingerprint)


class Run:
    """One run that makes a table, or goes on with one.

    Args:
        prompter: the model to ask.
        stored: table and effort, written to.
        path: of the file, to tell of.
        seconds: how long to work.
        save: called every 30 seconds; it may raise OSError.
        progress: called after every forward.
        clock: tells the time in seconds.
    """

    def __init__(
        self,
        prompter: Prompter,
        stored: StoredTable,
        path: Path,
        seconds: float,
        *,
        save: Callable[[], None],
        progress: OnProgress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_new_tokens = 0
        self._prompter = prompter
        self._table, self._effort = stored
        self._path = path
        self._seconds = seconds
        self._save = save
        self._progress = progress
        self._clock = clock
        self._began = self._saved = clock()
        self._seconds_before = self._effort.seconds
        self._stage = ""
        self._has_warned = False

    def work(self) -> None:
        """Ask until the time is over."""
        if self._effort.prefix_token_id is None:
            self._stage = "first words"
            self._choose_prefix()
        self._stage = "lone tokens"
        self._ask_lone_tokens()
        self._stage = "own texts"
        while self._passed() < self._seconds:
            self._write(_TEXT_LENGTH, self._hear)

    def made(self) -> Prewarmed:
        """Return what there is now."""
        effort = self._effort
        return Prewarmed(
            path=self._path,
            num_contexts=len(self._table),
            num_lone_tokens=effort.num_lone_tokens,
            vocab_size=self._prompter.vocab_size,
            num_tokens=effort.num_tokens,
            seconds=effort.seconds,
        )

    def _choose_prefix(self) -> None:
        """Choose the token behind which lone tokens go on most as they do in the model's texts.

        Candidates are the start of a text and the commonest tokens of the texts: which of them
        lend others no meaning of their own, as the start of a chat does, only the model can tell.
        SmolLM2's answers to prompts went on with the likeliest token behind the last one alone in
        10.9 % of all places with the start before it, 13.0 % with a newline, 14.1 % with a full
        stop, 16.3 % with a dash, which is what is chosen, and 0.6 % with nothing.
        """
        lasts: list[NDArray[np.int64]] = []
        heard: list[Successors] = []

        def hear(tokens: NDArray[np.int64], successors: Successors) -> bool:
            if tokens.shape[1] > 1:  # the start has no other token before it
                lasts.append(tokens[:, -1])
                heard.append(successors)
            return self._hear(tokens, successors)

        while not self._write(_PREFIX_TEXT_LENGTH, hear):
            if self._passed() >= self._seconds:
                return
            lasts.clear()
            heard.clear()
        tokens = np.concatenate(lasts)
        in_texts = Successors(*(np.concatenate(parts) for parts in zip(*heard, strict=True)))
        places = np.linspace(0, len(tokens) - 1, _NUM_PREFIX_PLACES).astype(np.int64)
        in_texts = Successors(in_texts.token_ids[places], in_texts.probs[places])
        common = [token for token, _ in Counter(tokens.tolist()).most_common(_NUM_PREFIXES - 1)]
        shared: dict[int, float] = {}
        for prefix in (self._prompter.start_token_id, *common):
            alone = self._prompter.successors_of(prefix, tokens[places])
            shared[prefix] = _shared_probability(alone, in_texts)
            if not self._count(len(places)):
                return
        self._effort.prefix_token_id = max(shared, key=lambda prefix: shared[prefix])

    def _ask_lone_tokens(self) -> None:
        """Ask for the successors of single tokens, for as long as they may take in this run."""
        prefix, effort = self._effort.prefix_token_id, self._effort
        # They are half the table at most: pairs tell more.
        stop = min(self._prompter.vocab_size, self._table.capacity // 2)
        end = self._passed() + _LONE_TOKENS_SHARE * (self._seconds - self._passed())
        while prefix is not None and effort.num_lone_tokens < stop and self._passed() < end:
            start = effort.num_lone_tokens
            token_ids = np.arange(start, min(start + self._prompter.num_rows, stop))
            successors = self._prompter.successors_of(prefix, token_ids)
            self._table.put(_lone(token_ids), *successors)
            effort.num_lone_tokens += len(token_ids)
            self._count(len(token_ids))

    def _write(self, num_tokens: int, hear: Hear) -> bool:
        """Let the model write the next batch of texts; return whether it came to the end."""
        seed = self._effort.num_texts
        self._effort.num_texts += 1  # before, so that one that is broken off is not written again
        return self._prompter.write(num_tokens, seed, hear)

    def _hear(self, tokens: NDArray[np.int64], successors: Successors) -> bool:
        """Put what may follow one more token of every text; return whether there is time left."""
        self._table.put(_lone(tokens[:, -1]), *successors)
        if tokens.shape[1] == 2:
            self._table.put(tokens, *successors)
        return self._count(len(tokens))

    def _count(self, num_tokens: int) -> bool:
        """Count tokens, save and tell what is due; return whether there is time left."""
        self._effort.num_tokens += num_tokens
        self.num_new_tokens += num_tokens
        passed = self._passed()
        self._effort.seconds = self._seconds_before + passed
        if self._clock() - self._saved >= _SAVE_EVERY_SEC:
            self._save_meanwhile()
        if self._progress is not None:
            speed = self.num_new_tokens / max(passed, 1e-9)
            self._progress(PrewarmProgress(self._stage, passed, speed, self.made()))
        return self._passed() < self._seconds

    def _save_meanwhile(self) -> None:
        """Save what there is; where that fails, say so once: the last save may work."""
        try:
            self._save()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"lade.prewarm could not save its table yet, and works on: {error}",
                    stacklevel=2,
                )
        self._saved = self._clock()

    def _passed(self) -> float:
        return self._clock() - self._began


def _lone(token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the contexts of single tokens, int64 [num_tokens, 2]."""
    return np.stack([np.full(len(token_ids), -1), token_ids], axis=1)


def _shared_probability(successors: Successors, others: Successors) -> float:
    """Return how much probability two sets of likeliest tokens have in common, over all places."""
    same = successors.token_ids[:, :, None] == others.token_ids[:, None, :]
    least = np.minimum(successors.probs[:, :, None], others.probs[:, None, :])
    return float(least[same].sum())
