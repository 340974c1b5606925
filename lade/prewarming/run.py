"""`lade.prewarm`: a table of what the model itself finds likely, made once, ahead of all use.

First every token of the vocabulary is run by itself, the most frequent ones first (in most
vocabularies they have the lowest ids); then the model writes texts, which show what pairs occur.
`prompter.py` asks the model, `tables.py` stores the table.
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
from lade.prewarming.prompter import Collect, Prompter, prompting
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
# SmolLM2, bfloat16, one core, 40 s of texts only: texts of 32 / 64 / 128 / 256 tokens ran at
# 485 / 461 / 365 / 277 tokens a second (attention costs), and the pairs learned covered
# 33 / 32 / 30 / 28 % of all positions in its answers to prompts. The shortest restart all the
# time, and other models may begin too many texts alike.
_TEXT_LENGTH = 64
_SAVE_EVERY_SEC = 30.0
# The prefix of lone tokens: the number of candidates, the length of the texts they are compared in,
# and the number of positions compared.
_NUM_PREFIXES, _PREFIX_TEXT_LENGTH, _NUM_PREFIX_PLACES = 8, 16, 128


@dataclass(frozen=True, slots=True)
class Prewarmed:
    """What the table of a model holds, and what went into it in all runs."""

    path: Path  #: of the file
    num_contexts: int  #: single tokens and pairs whose successors are stored
    num_lone_tokens: int  #: single tokens done, of `vocab_size`
    vocab_size: int
    num_tokens: int  #: run through the model
    seconds: float


@dataclass(frozen=True, slots=True)
class PrewarmProgress:
    """Progress of a run."""

    stage: str  #: what the run is doing
    passed_sec: float
    tokens_per_sec: float  #: of this run
    made: Prewarmed  #: state of the table


OnProgress = Callable[[PrewarmProgress], None]


def prewarm(
    model: Model,
    seconds: float,
    *,
    max_contexts: int = DEFAULT_MAX_CONTEXTS,
    folder: Path | None = None,
    progress: OnProgress | None = None,
) -> Prewarmed:
    """Make a table of what a model finds likely, so that lade drafts from the first step on.

    The table is kept in the user's cache under the model's fingerprint, and is used whenever lade
    generates with that model. Another run continues where the last one ended. Results are saved
    every 30 seconds and at the end, also after an exception or Ctrl-C; if an intermediate save
    fails, a warning says so and the run continues. If two processes run at once, only the work of
    the last one to save is kept. The table changes only the speed, never the text.

    Args:
        model: a transformers causal LM.
        seconds: how long to run; a forward in progress is finished.
        max_contexts: maximum number of single tokens and pairs, rounded up to a power of two (the
            default takes 64 MB on disk, twice that in memory); beyond it, those not met for
            longest are forgotten.
        folder: of the tables; None for the user's cache, where lade looks for them.
        progress: called after every forward.

    Returns:
        The state of the table, over all runs.

    Raises:
        OSError: the table cannot be read, or cannot be written at the end.
        UnsupportedModelError: the model is an encoder-decoder, tensor-parallel, or has no weights
            in memory to recognise it by.
        UnsupportedOptionError: the model is sharded by FSDP or DeepSpeed ZeRO-3.
        ValueError: `seconds` is not above 0, or the existing file is damaged.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"expected seconds to be above 0, got {seconds!r}")
    model = without_compiler(model)
    path = _path_for(model, tables_folder() if folder is None else folder)
    if path.exists():
        stored = read_table(path, model, max_contexts)
    else:
        stored = StoredTable(SuccessorTable(max_contexts), Effort())
    path.parent.mkdir(parents=True, exist_ok=True)  # fail now rather than after the work
    with prompting(model, stored.table.num_successors) as prompter:
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
    """Return the file of a model's table, or raise if the model cannot be prewarmed."""
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
    """One run that makes a table, or continues one.

    Args:
        prompter: asks the model.
        stored: table and effort, both updated in place.
        path: of the file, for reports only.
        seconds: how long to run.
        save: called every 30 seconds; may raise OSError.
        progress: called after every forward.
        clock: returns the time in seconds.
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
        """Ask the model until the time is up."""
        if self._effort.prefix_token_id is None:
            self._stage = "first words"
            self._choose_prefix()
        self._stage = "lone tokens"
        self._ask_lone_tokens()
        self._stage = "own texts"
        while self._passed() < self._seconds:
            self._write(_TEXT_LENGTH, self._collect)

    def made(self) -> Prewarmed:
        """Return the state of the table."""
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
        """Choose the prefix after which single tokens continue most as in the model's texts.

        Candidates are the start token and the commonest tokens of the texts; only the model can
        tell which of them add no meaning of their own, unlike the start of a chat. In SmolLM2's
        answers to prompts, the likeliest successor of the last token alone was right at 10.9 % of
        all positions with the start token as the prefix, 13.0 % with a newline, 14.1 % with a full
        stop, 16.3 % with a dash, which is what is chosen, and 0.6 % with no prefix.
        """
        lasts: list[NDArray[np.int64]] = []
        collected: list[Successors] = []

        def collect(tokens: NDArray[np.int64], successors: Successors) -> bool:
            if tokens.shape[1] > 1:  # nothing comes before the start token
                lasts.append(tokens[:, -1])
                collected.append(successors)
            return self._collect(tokens, successors)

        while not self._write(_PREFIX_TEXT_LENGTH, collect):
            if self._passed() >= self._seconds:
                return
            lasts.clear()
            collected.clear()
        tokens = np.concatenate(lasts)
        in_texts = Successors(*(np.concatenate(parts) for parts in zip(*collected, strict=True)))
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
        """Ask for the successors of single tokens, within their share of the time."""
        prefix, effort = self._effort.prefix_token_id, self._effort
        # They may fill half the table at most: pairs are worth more.
        stop = min(self._prompter.vocab_size, self._table.capacity // 2)
        end = self._passed() + _LONE_TOKENS_SHARE * (self._seconds - self._passed())
        while prefix is not None and effort.num_lone_tokens < stop and self._passed() < end:
            start = effort.num_lone_tokens
            token_ids = np.arange(start, min(start + self._prompter.num_rows, stop))
            successors = self._prompter.successors_of(prefix, token_ids)
            self._table.put(_lone(token_ids), *successors)
            effort.num_lone_tokens += len(token_ids)
            self._count(len(token_ids))

    def _write(self, num_tokens: int, collect: Collect) -> bool:
        """Let the model write the next batch of texts; return whether they are complete."""
        seed = self._effort.num_texts
        self._effort.num_texts += 1  # first, so that an interrupted batch is not written again
        return self._prompter.write(num_tokens, seed, collect)

    def _collect(self, tokens: NDArray[np.int64], successors: Successors) -> bool:
        """Store the successors of one column of texts; return whether there is time left."""
        self._table.put(_lone(tokens[:, -1]), *successors)
        if tokens.shape[1] == 2:
            self._table.put(tokens, *successors)
        return self._count(len(tokens))

    def _count(self, num_tokens: int) -> bool:
        """Count tokens, save when due and report progress; return whether there is time left."""
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
        """Save; warn once if that fails, since the save at the end may succeed."""
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
    """Return single tokens as contexts of the table, int64 [num_tokens, 2]."""
    return np.stack([np.full(len(token_ids), -1), token_ids], axis=1)


def _shared_probability(successors: Successors, others: Successors) -> float:
    """Return the probability mass that two sets of successors share, over all positions."""
    same = successors.token_ids[:, :, None] == others.token_ids[:, None, :]
    least = np.minimum(successors.probs[:, :, None], others.probs[:, None, :])
    return float(least[same].sum())
