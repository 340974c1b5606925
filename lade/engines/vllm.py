"""`PoolProposer`: a pool that drafts for all requests of a vLLM worker.

vLLM makes one from its dotted name (docs/comparison.md); this file imports nothing of vLLM. Tested
with vLLM 0.32. Next files: `options.py`, `requests.py`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lade.engines.options import PoolOptions
from lade.engines.requests import Found, Prefixes, Requests
from ngram_pool import NGramPool
from ngram_pool._kernels import Int32Array, Int64Array
from ngram_pool.pool import compile_chains

_logger = logging.getLogger(__name__)

# Requests remembered for each row of a batch: the current one, and one that was preempted or that a
# next turn may continue.
_SLOTS_PER_ROW = 2
# If a request has more new tokens than this many steps can bring, they are observed as a prompt.
_MAX_STEPS_MISSED = 4
# Tokens of a step, over all requests, from which pools learn how far to trust their sources. With
# few requests this is every token; with many requests, this many suffice.
_MAX_LEARNED = 128
_MAX_FAILURES = 3  # in a row, after which nothing more is drafted


@dataclass
class ProposerStats:
    """The counts of a proposer."""

    steps: int = 0
    drafts: int = 0  # rows that got a draft of at least one token
    draft_tokens: int = 0
    observed_tokens: int = 0  # prompts included
    known_tokens: int = 0  # first tokens of prompts that the shared pool held already
    requests: int = 0  # new requests
    failures: int = 0  # steps without drafts because of an error
    is_off: bool = False  # after too many failures in a row


def options_from(vllm_config: Any) -> PoolOptions:
    """Return the options in a vLLM config: `additional_config={"lade": {...}}`.

    Raises:
        TypeError, ValueError: an option is unknown, of the wrong type or out of range.
    """
    additional = getattr(vllm_config, "additional_config", None)
    options = additional.get("lade", {}) if isinstance(additional, Mapping) else {}
    if not isinstance(options, Mapping):
        raise TypeError(f"expected additional_config['lade'] to be an object, got {options!r}")
    return PoolOptions(**options)


class PoolProposer:
    """Drafts for all requests of a vLLM worker, from pools that learn from these requests.

    Drafts depend only on the arguments of `propose` so far, not on clocks, random numbers or ids,
    so that every rank of a tensor-parallel engine drafts the same. The amount of work limits the
    time of a step (`PoolOptions.max_step_tokens`): with more requests, each gets a shorter draft,
    and long prompts are observed in slices over several steps.

    No error reaches the engine: the step then has no drafts, and the failure is counted.

    Args:
        vllm_config: the engine's `VllmConfig`.

    Raises:
        TypeError, ValueError: an option is wrong. The engine does not start.
        OSError, PoolFileError: a file that an option names cannot be read.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.options = options = options_from(vllm_config)
        self._max_draft_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._max_rows: int = vllm_config.scheduler_config.max_num_seqs
        self._vocab_size: int = vllm_config.model_config.get_vocab_size()
        self._stats = ProposerStats()
        self._num_failed_in_row = 0
        is_shared = options.sharing == "all"
        # The pool of all requests, or the one beside which each request gets its own.
        self._pool = NGramPool(options.capacity_tokens, options.max_ngram_size, options.seed)
        self._layers: list[NGramPool] = []
        if options.pool is not None and is_shared:
            self._pool = NGramPool.load(options.pool)
        elif options.pool is not None:
            self._layers = [NGramPool.load(options.pool, read_only=True)]
        if options.prewarmed is not None:
            self._layers.append(NGramPool.load(options.prewarmed, read_only=True))
        num_slots = _SLOTS_PER_ROW * self._max_rows
        compile_chains()
        self._requests = Requests(num_slots, self._max_model_len)
        # If requests share no pool, each one's whole prompt is observed.
        self._prefixes = Prefixes(self._pool.capacity_tokens) if is_shared else None
        # What was observed of each remembered request, by slot. Skipped rows, with slot NONE, use
        # the last entry.
        self._pools = [self._pool] * (num_slots + 1)
        self._sequences = [0] * (num_slots + 1)
        self._is_text = np.zeros(num_slots + 1, np.bool_)
        self._num_prompt = np.zeros(num_slots + 1, np.int64)  # first tokens, observed as a prompt
        self._num_observed = np.zeros(num_slots + 1, np.int64)

    def load_model(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a pool needs no model. vLLM calls this once."""

    def observe(self, token_ids: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """Teach the shared pool a text, such as documents, before requests come.

        Raises:
            ValueError: requests share no pool; or as for `NGramPool.observe`.
        """
        if self.options.sharing != "all":
            raise ValueError("expected the option sharing='all' to observe text for all requests")
        self._pool.observe(token_ids, None)
        self._stats.observed_tokens += len(token_ids)

    def stats(self) -> dict[str, int | bool]:
        """Return the counts since the engine started, by name."""
        return asdict(self._stats)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
        **kwargs: Any,
    ) -> list[list[int]]:
        """Observe the accepted tokens, and draft the continuation of each request.

        Args:
            sampled_token_ids: the newest tokens of each row; empty for a row to skip.
            num_tokens_no_spec: int32 [max_num_seqs], number of tokens of each row, new included.
            token_ids_cpu: int32 [max_num_seqs, max_model_len], the tokens; not kept.
            slot_mappings, kwargs: not needed.

        Returns:
            A draft for each row, of at most `num_speculative_tokens` tokens; may be empty.
        """
        if self._stats.is_off:
            return [[] for _ in sampled_token_ids]
        try:
            drafts = self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception as error:  # an engine must not end because of its drafts
            self._note_failure(error)
            return [[] for _ in sampled_token_ids]
        self._num_failed_in_row = 0
        return drafts

    # --- inside -----------------------------------------------------------------------------

    def _note_failure(self, error: Exception) -> None:
        if self._stats.failures == 0:
            _logger.warning(
                "lade has no drafts for this step, nor for later steps that fail", exc_info=error
            )
        self._stats.failures += 1
        self._num_failed_in_row += 1
        if self._num_failed_in_row == _MAX_FAILURES:
            self._stats.is_off = True
            _logger.error("lade stops drafting: %d steps in a row failed", _MAX_FAILURES)

    def _propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any
    ) -> list[list[int]]:
        num_rows = len(sampled_token_ids)
        self._stats.steps += 1
        if num_rows == 0:
            return []
        texts = np.asarray(token_ids_cpu)[:num_rows]
        lengths = np.asarray(num_tokens_no_spec)[:num_rows].astype(np.int64)
        num_sampled = np.fromiter(map(len, sampled_token_ids), np.int64, num_rows)
        if (
            num_rows > self._max_rows
            or texts.dtype != np.int32
            or len(texts) != num_rows
            or lengths.min() < 0
            or lengths.max() > min(texts.shape[1], self._max_model_len)
        ):
            raise ValueError(
                f"expected at most {self._max_rows} rows of int32, and lengths within them, got "
                f"{num_rows} rows, {texts.dtype} {texts.shape} and {lengths.tolist()}"
            )
        known_lengths = np.where(num_sampled > 0, (lengths - num_sampled).clip(0), 0)
        found = self._requests.find(texts, lengths, known_lengths)
        self._begin_requests(found, texts, known_lengths)
        num_new = self._observe_prompts(found.slots, texts, lengths)
        return self._draft(found.slots, texts, lengths, num_new)

    def _begin_requests(self, found: Found, texts: Int32Array, known_lengths: Int64Array) -> None:
        for slot in found.dropped:
            if self._sequences[slot]:
                self._pools[slot].close_sequence(self._sequences[slot])
            self._pools[slot], self._sequences[slot] = self._pool, 0
            self._is_text[slot] = False
        for row in found.new:
            slot, num_prompt = found.slots.item(row), known_lengths.item(row)
            self._stats.requests += 1
            if texts[row, :num_prompt].min() < 0:  # a part of it is no text
                continue
            pool = self._pool if self._prefixes is not None else self._pool.beside()
            sequence = pool.open_sequence(self._layers)
            self._pools[slot], self._sequences[slot] = pool, sequence
            self._is_text[slot] = True
            self._num_prompt[slot], self._num_observed[slot] = num_prompt, 0
            if self._prefixes is not None:
                num_held = self._prefixes.num_held(
                    texts[row, :num_prompt], self._stats.observed_tokens
                )
                # The last tokens are observed again: later matches may begin in them.
                num_known = max(0, num_held - self._pool.max_match)
                self._num_observed[slot] = num_known
                self._stats.known_tokens += num_known

    def _observe_prompts(
        self, by_row: Int64Array, texts: Int32Array, lengths: Int64Array
    ) -> Int64Array:
        """Observe the rest of prompts, within a step's limit; return the new tokens by row."""
        few = _MAX_STEPS_MISSED * (self._max_draft_tokens + 1)
        num_observed, num_prompt = self._num_observed[by_row], self._num_prompt[by_row]
        is_late = lengths - np.maximum(num_observed, num_prompt) > few
        num_new = np.where(self._is_text[by_row], lengths - num_observed, 0)
        num_left = self.options.max_step_tokens
        is_left = self._is_text[by_row] & (is_late | (num_observed < num_prompt))
        for row in np.flatnonzero(is_left).tolist():
            slot, length = by_row.item(row), lengths.item(row)
            if is_late[row]:
                self._num_prompt[slot] = length
            begin, end = num_observed.item(row), self._num_prompt.item(slot)
            stop = min(end, begin + num_left)
            self._pools[slot].observe(texts[row, begin:stop], self._sequences[slot])
            if self._prefixes is not None:
                self._prefixes.add(texts[row], begin, stop, self._stats.observed_tokens)
            self._num_observed[slot] = stop
            num_left -= stop - begin
            self._stats.observed_tokens += stop - begin
            num_new[row] = length - stop if stop == end else 0
        return num_new

    def _draft(
        self, by_row: Int64Array, texts: Int32Array, lengths: Int64Array, num_new: Int64Array
    ) -> list[list[int]]:
        """Observe the new tokens, and draft, in one call for all requests."""
        slots, is_in = by_row.tolist(), self._is_text[by_row]
        most = min(self._max_draft_tokens, max(1, self.options.max_step_tokens // len(texts)))
        chains = self._pool.draft_chains(
            texts,
            np.where(is_in, lengths, 0),
            np.minimum(self._max_model_len - 1 - lengths, most).clip(0),
            [self._sequences[slot] for slot in slots],
            num_new,
            self.options.min_probability,
            None if self._prefixes is not None else [self._pools[slot] for slot in slots],
            _MAX_LEARNED,
        )
        self._num_observed[by_row] += num_new
        drafts = chains.tolist()
        if chains.token_ids.max(initial=0) >= self._vocab_size:
            # As when a file of another model was loaded.
            drafts = [[*takewhile(lambda t: t < self._vocab_size, ids)] for ids in drafts]
        self._stats.observed_tokens += int(num_new.sum())
        self._stats.drafts += int(np.count_nonzero(chains.lengths))
        self._stats.draft_tokens += sum(map(len, drafts))
        return drafts
