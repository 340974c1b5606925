"""`lade.prewarm`: a table of what the model itself finds likely, made once, ahead of all use.

Single tokens are run by themselves, those first that were named most often as likely successors;
and the model writes texts, which show what pairs occur. `prompter.py` asks the model, `tables.py`
stores the table.
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

from lade.compat import Model, without_compiler
from lade.drafting.successors import Successors
from lade.errors import UnsupportedModelError
from lade.prewarming.prompter import Prompter, prompting, shared_probability
from lade.prewarming.tables import (
    DEFAULT_MAX_CONTEXTS,
    Effort,
    StoredTable,
    forget_prewarmed_table,
    merge_table,
    path_of_table,
    read_table,
)
from lade.probing.report import probe
from lade.probing.rules import refuse_encoder_decoder, refuse_sharded
from lade.view import in_evaluation
from ngram_pool import SuccessorTable

_LONE_TOKENS_SHARE = 1 / 3  # of a run's time, until they are done
# SmolLM2, bfloat16, one core: texts of 16 / 32 / 64 tokens ran at 502 / 450 / 371 tokens a second,
# as attention and copies of the cache cost more with each. They begin in the middle, with a token
# that the model itself named, so that none is run twice.
_TEXT_LENGTH = 16
_LEAST_MENTION = 1e-6  # of tokens that were never mentioned
_SAVE_EVERY_SEC = 30.0
# The prefix of lone tokens: the number of candidates, the length of the texts they are compared in,
# and the number of positions compared.
_NUM_PREFIXES, _PREFIX_TEXT_LENGTH, _NUM_PREFIX_PLACES = 8, 16, 64


@dataclass(frozen=True, slots=True)
class Prewarmed:
    """What the table of a model holds, and what went into it in all runs."""

    path: Path  #: of the file
    num_contexts: int  #: single tokens and pairs whose successors are stored
    num_lone_tokens: int  #: single tokens among them, of `vocab_size`
    vocab_size: int
    num_tokens: int  #: run through the model
    seconds: float
    has_prefix: bool  #: whether it is known behind which token single tokens are best run


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
    max_tokens: int | None = None,
    max_contexts: int = DEFAULT_MAX_CONTEXTS,
    folder: Path | None = None,
    progress: OnProgress | None = None,
) -> Prewarmed:
    """Make a table of what a model finds likely, so that lade drafts from the first step on.

    The table is kept in the user's cache under the model's fingerprint, and is used whenever lade
    generates with that model. Another run adds to it, at the same time too: every 30 seconds and
    at the end, also after an exception or Ctrl-C, what a run learned is added to the file. If that
    fails in between, a warning says so and the run continues. The table changes only the speed,
    never the text.

    Args:
        model: a transformers causal LM.
        seconds: how long to run; a forward in progress is finished.
        max_tokens: how many tokens to run through the model, if that takes less time.
        max_contexts: maximum number of single tokens and pairs, rounded up to a power of two (the
            default takes 64 MB on disk, twice that in memory); beyond it, those not met for
            longest are forgotten.
        folder: of the tables; None for the user's cache, where lade looks for them.
        progress: called after every forward.

    Returns:
        The state of the table, over all runs.

    Raises:
        OSError: the table cannot be read, or cannot be written at the end.
        UnsupportedModelError: the model is an encoder-decoder, tensor-parallel, decoded plainly (so
            a table would not be used), or has no weights in memory to recognise it by.
        UnsupportedOptionError: the model is sharded by FSDP or DeepSpeed ZeRO-3.
        ValueError: `seconds` or `max_tokens` is not above 0, or the existing file is damaged.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"expected seconds to be above 0, got {seconds!r}")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"expected max_tokens to be above 0, got {max_tokens!r}")
    model = without_compiler(model)
    refuse_encoder_decoder(model)
    refuse_sharded(model)
    path = path_of_table(model, folder)
    stored = read_table(path, model, max_contexts)
    _refuse_plain(model)
    path.parent.mkdir(parents=True, exist_ok=True)  # fail now rather than after the work
    with prompting(model, stored.table.num_successors) as prompter:
        run = Run(
            prompter,
            stored,
            path,
            seconds,
            max_tokens=max_tokens,
            save=lambda added: merge_table(path, model, added, max_contexts),
            progress=progress,
        )
        try:
            run.work()
        finally:
            if run.num_new_tokens:
                run.save()
                forget_prewarmed_table(model)
    return run.made()


def _refuse_plain(model: Model) -> None:
    """Raise if lade would not draft from the table."""
    if any(module.training for module in model.modules()):
        model = in_evaluation(model)
    found = probe(model)
    if found.verification == "plain":
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.reasons.items())
        raise UnsupportedModelError(
            f"lade decodes {found.model} plainly, so it would not use a table. {reasons}"
        )


class Run:
    """One run that makes a table, or continues one.

    Args:
        stored: table and effort of the runs before; the table is updated in place.
        path: of the file, for reports only.
        save: called every 30 seconds with what was added; returns all that is stored then, by other
            processes too. May raise OSError.
    """

    def __init__(
        self,
        prompter: Prompter,
        stored: StoredTable,
        path: Path,
        seconds: float,
        *,
        save: Callable[[StoredTable], StoredTable],
        max_tokens: int | None = None,
        progress: OnProgress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_new_tokens = 0
        self._prompter = prompter
        self._path = path
        self._seconds = seconds
        self._max_tokens = math.inf if max_tokens is None else max_tokens
        self._save = save
        self._progress = progress
        self._clock = clock
        self._began = self._saved = clock()
        self._rng = np.random.default_rng()  # other texts in every run, and every process
        self._stage = ""
        self._has_warned = False
        # How often each token is among the likely successors; from now on, its probability in them.
        known = stored.table.arrays()["token_ids"]
        counts = np.bincount(known[known >= 0], minlength=prompter.vocab_size)
        self._mentions = counts.astype(np.float64)
        self._hold(stored)
        self._began_adding = self._began

    def work(self) -> None:
        """Ask the model until the time is up."""
        if self._prefix_token_id is None:
            self._stage = "first words"
            self._choose_prefix()
        self._stage = "lone tokens"
        self._ask_lone_tokens()
        self._stage = "own texts"
        while self._has_time():
            starts = self._common(self._prompter.num_rows)
            self._prompter.write(starts, _TEXT_LENGTH, self._go_on, self._prefix_token_id)

    def save(self) -> None:
        """Save what was added since the last time."""
        self._hold(self._save(self._added))

    def made(self) -> Prewarmed:
        """Return the state of the table."""
        before, added = self._stored.effort, self._added.effort
        return Prewarmed(
            path=self._path,
            num_contexts=len(self._stored.table),
            num_lone_tokens=int(self._is_known.sum()),
            vocab_size=self._prompter.vocab_size,
            num_tokens=before.num_tokens + added.num_tokens,
            seconds=before.seconds + added.seconds,
            has_prefix=self._prefix_token_id is not None,
        )

    @property
    def _prefix_token_id(self) -> int | None:
        before, added = self._stored.effort, self._added.effort
        return added.prefix_token_id if before.prefix_token_id is None else before.prefix_token_id

    def _hold(self, stored: StoredTable) -> None:
        """Go on from what is stored."""
        table = stored.table
        contexts = table.contexts()
        lasts = contexts[contexts[:, 0] < 0, 1]
        self._is_known = np.zeros(self._prompter.vocab_size, dtype=bool)
        self._is_known[lasts[lasts < len(self._is_known)]] = True
        empty = SuccessorTable(table.capacity, table.num_successors)
        self._stored, self._added = stored, StoredTable(empty, Effort())
        self._began_adding = self._clock()

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

        def go_on(tokens: NDArray[np.int64], successors: Successors) -> NDArray[np.int64] | None:
            if tokens.shape[1] > 1:  # nothing comes before the start token
                lasts.append(tokens[:, -1])
                collected.append(successors)
            return self._go_on(tokens, successors)

        while True:
            starts = np.full(self._prompter.num_rows, self._prompter.start_token_id)
            if self._prompter.write(starts, _PREFIX_TEXT_LENGTH, go_on):
                break
            if not self._has_time():
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
            shared[prefix] = shared_probability(alone, in_texts)
            if not self._count(len(places)):
                return
        self._added.effort.prefix_token_id = max(shared, key=lambda prefix: shared[prefix])

    def _ask_lone_tokens(self) -> None:
        """Ask for the successors of single tokens, within their share of the time."""
        prefix = self._prefix_token_id
        # They may fill half the table at most: pairs are worth more.
        most = self._stored.table.capacity // 2
        end = self._passed() + _LONE_TOKENS_SHARE * (self._seconds - self._passed())
        while prefix is not None and self._passed() < end and self._has_time():
            num = min(self._prompter.num_rows, most - int(self._is_known.sum()))
            token_ids = self._wanted()[: max(num, 0)]
            if not len(token_ids):
                return
            self._learn(_lone(token_ids), self._prompter.successors_of(prefix, token_ids))
            self._count(len(token_ids))

    def _wanted(self) -> NDArray[np.int64]:
        """Return the tokens whose successors are unknown, the most often mentioned ones first."""
        unknown = np.flatnonzero(~self._is_known)
        return unknown[np.argsort(-self._mentions[unknown], kind="stable")]

    def _common(self, num_tokens: int) -> NDArray[np.int64]:
        """Draw different tokens, rather those that are mentioned often."""
        weights = self._mentions + _LEAST_MENTION
        num_tokens = min(num_tokens, len(weights))
        return self._rng.choice(len(weights), num_tokens, replace=False, p=weights / weights.sum())

    def _go_on(self, tokens: NDArray[np.int64], successors: Successors) -> NDArray[np.int64] | None:
        """Learn from one column of texts; return the next one, or None when the time is up."""
        self._learn(_lone(tokens[:, -1]), successors)
        if tokens.shape[1] == 2:
            self._learn(tokens, successors)
        if not self._count(len(tokens)):
            return None
        return self._drawn(successors)

    def _drawn(self, successors: Successors) -> NDArray[np.int64]:
        """Draw one of the likely successors of each token."""
        sums = successors.probs.cumsum(axis=1)
        at = self._rng.random((len(sums), 1)) * sums[:, -1:]
        places = (sums <= at).sum(axis=1).clip(max=sums.shape[1] - 1)
        drawn: NDArray[np.int64] = successors.token_ids[np.arange(len(places)), places]
        return drawn.astype(np.int64)

    def _learn(self, contexts: NDArray[np.int64], successors: Successors) -> None:
        """Store successors of contexts, all of them single tokens or all pairs."""
        for table in (self._stored.table, self._added.table):
            table.put(contexts, *successors)
        if contexts[0, 0] < 0:
            self._is_known[contexts[:, 1]] = True
            self._mentions += np.bincount(
                successors.token_ids.reshape(-1),
                successors.probs.reshape(-1),
                minlength=len(self._mentions),
            )

    def _count(self, num_tokens: int) -> bool:
        """Count tokens, save when due and report progress; return whether there is time left."""
        self._added.effort.num_tokens += num_tokens
        self._added.effort.seconds = self._clock() - self._began_adding
        self.num_new_tokens += num_tokens
        if self._clock() - self._saved >= _SAVE_EVERY_SEC:
            self._save_meanwhile()
        if self._progress is not None:
            passed = self._passed()
            speed = self.num_new_tokens / max(passed, 1e-9)
            self._progress(PrewarmProgress(self._stage, passed, speed, self.made()))
        return self._has_time()

    def _save_meanwhile(self) -> None:
        """Save; warn once if that fails, since the save at the end may succeed."""
        try:
            self.save()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"lade.prewarm could not save its table yet, and works on: {error}",
                    stacklevel=2,
                )
        self._saved = self._clock()

    def _has_time(self) -> bool:
        return self._passed() < self._seconds and self.num_new_tokens < self._max_tokens

    def _passed(self) -> float:
        return self._clock() - self._began


def _lone(token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return single tokens as contexts of the table, int64 [num_tokens, 2]."""
    return np.stack([np.full(len(token_ids), -1), token_ids], axis=1)
