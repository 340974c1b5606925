"""`Generation`: one call of `generate`, assembled from its options, run, and its result made."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from lade.batch import Batch
from lade.compat import CACHE, dtype_of, has_adapters_by_row
from lade.compat.attempts import Attempt
from lade.config import Verification
from lade.decoder import Decoder
from lade.errors import PlainDecodingWarning, VerificationWarning
from lade.forward.job import FusedForwards
from lade.hf.call import Call
from lade.hf.plain import finish_standard
from lade.hf.planning import plan, proved
from lade.hf.pools import opened
from lade.hf.prefixes import Reuse, reuse_of
from lade.hf.setup import CallPools, set_up
from lade.hf.stopping import Outputs, Report, StopRule
from lade.machine.transfer import is_asynchronous
from lade.probing.plan import why_not_run
from lade.probing.profile import Profiles
from lade.probing.proof import VerificationError
from lade.stats import DecodeStats
from lade.targets.base import Target


class GenerateOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """The result with `return_dict_in_generate=True`; it has an attribute `stats`."""

    stats: DecodeStats


class Generation:
    """One call: planned, decoded, and turned into its result."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._outputs = Outputs(call.wanted_scores)
        self._batch = Batch(call.input_ids, call.pad_token_id)
        self._cache = call.cache
        self._report = Report(call.streamer, call.arguments.on_step, self._batch)

    def run(self) -> Any:
        """Decode, and return what `generate` returns."""
        with opened(self._call.arguments.pool) as pools:
            self._reuse = self._reused()
            planned = plan(self._call)
            if isinstance(planned, Target):
                return self._decode(planned, pools)
            _say_why_plain(self._call, planned.reasons)
            return self._decode_standard()

    def _reused(self) -> Reuse | None:
        """Fill the cache with the kept beginning of the prompt, if the config asks for it."""
        call, name = self._call, type(self._call.model).__name__
        is_plain = why_not_run(call.profile) is not None or not call.has_time
        # Keys by PEFT's adapters of rows fit no later call.
        if is_plain or not call.config.reuses_prefix or has_adapters_by_row(call.model):
            return None
        if call.user_code is not None:
            what = f"{name}: your own code ({call.user_code}) may change its results"
            call.warn_once(f"lade reuses no prefix of {what}", RuntimeWarning)
            return None
        with Attempt(even_memory=True) as attempt:  # weights may be of unusual classes
            return reuse_of(call)
        call.warn_once(f"lade reuses no prefix of {name} ({attempt.failure})", RuntimeWarning)
        return None

    def _decode(self, target: Target, pools: CallPools) -> Any:
        """Decode with drafts; continue by standard decoding if they can no longer be verified."""
        call, batch, outputs, report = self._call, self._batch, self._outputs, self._report
        overlaps = is_asynchronous(call.input_ids.device)
        gives_cache = call.returns_dict or call.is_users_cache
        speculator, choice = set_up(call, target, pools, batch, outputs, overlaps)
        parts = proved(call, target), speculator, choice
        stop = StopRule(call, outputs, batch, report)
        decoder = Decoder(batch, *parts, stop, report.add, gives_cache, overlaps)
        try:
            if self._reuse is not None:
                decoder.stats.num_reused_tokens = self._reuse.num_tokens
            stats = decoder.run()
        except BaseException:  # an interrupt, or an error of user code between two forwards
            with suppress(Exception):  # memory that cannot be kept is dropped
                target.release()
            raise
        stats.sources, stats.widths = speculator.sources(), speculator.widths()
        if decoder.failure is not None:
            target.undo()
            if self._reuse is not None:
                self._reuse.undo()
                stats.num_reused_tokens = 0
            output, rest = finish_standard(call, batch, outputs, report)
            _give_up(call, target, decoder.failure)  # unless standard decoding fails, too
            stats.add(rest)
            return self._plain_result(output, stats)
        report.end()
        if self._reuse is not None:
            self._keep(self._reuse, batch.rows[0].token_ids, target)
        elif gives_cache:
            stats.num_steps += target.fill(batch)
            self._cache = target.hand_over(self._cache)
        target.release()
        call.profile.is_warm = True
        if target.why_eager is not None:
            how = f"steps of {type(call.model).__name__} eagerly, not compiled on a static cache"
            call.warn_once(f"lade runs {how}: {target.why_eager}", RuntimeWarning)
        if target.verification == "tree" and call.config.uses_kernels:
            _say_why_by_torch(call)
        scores = {name: outputs.get(name) for name in ("scores", "logits")}
        return self._result(stats, batch.sequences(), **scores, **{CACHE: self._cache})

    def _result(self, stats: DecodeStats, sequences: Tensor, **fields: Any) -> Any:
        """Return the text, and with it what else was asked for."""
        if not self._call.returns_dict:
            return sequences
        stats.arithmetic = str(dtype_of(self._call.model)).removeprefix("torch.")
        output = GenerateOutput(sequences=sequences, **fields)
        output.stats = stats
        return output

    def _decode_standard(self) -> Any:
        """Decode as `generate` does, if no method can verify drafts."""
        output, stats = finish_standard(self._call, self._batch, self._outputs, self._report)
        stats.num_prefills = self._call.num_rows
        if self._reuse is not None:
            sequences = output.sequences if self._call.returns_dict else output
            self._keep(self._reuse, sequences[0].tolist())
            stats.num_reused_tokens = self._reuse.num_tokens
        return self._plain_result(output, stats)

    def _plain_result(self, output: Any, stats: DecodeStats) -> Any:
        """Return the output of standard decoding with `stats`, without a cache that lade keeps."""
        if not self._call.returns_dict:
            return output
        no_cache = {} if self._reuse is None else {CACHE: None}
        return self._result(stats, **{**output, **no_cache})

    def _keep(self, reuse: Reuse, token_ids: Sequence[int], target: Target | None = None) -> None:
        """Keep the KV cache of a text for later calls; the caller gets none.

        A cache that cannot be kept is dropped: the text is complete.

        Args:
            target: holds the keys and values; None if the call's cache does.
        """
        with Attempt(even_memory=True) as attempt:
            if target is not None:
                target.hand_over(self._cache)
            reuse.end(token_ids)
        if attempt.failure is not None:
            reuse.undo()
        self._cache = None


# --- what is said once about calls that are decoded otherwise than was to be expected -------------


def _say_why_plain(call: Call, reasons: Mapping[Verification, str]) -> None:
    """Warn once that lade falls back to standard decoding, and why."""
    if not reasons:  # the config asks for standard decoding
        return
    methods = {
        why: ", ".join(name for name, each in reasons.items() if each == why)
        for why in reasons.values()
    }
    (reason, *others) = methods
    if others:
        reason = "; ".join(f"{names}: {why}" for why, names in methods.items())
    name = type(call.model).__name__
    text = f"lade falls back to standard decoding for {name}, one token per forward pass. {reason}"
    call.warn_once(text, PlainDecodingWarning)


def _say_why_by_torch(call: Call) -> None:
    """Warn once if forwards were compiled in an earlier state of the model, and are no longer."""
    model, present = call.model, call.profile
    were = [each.found.get("fast_views") for each in Profiles.of(model) if each is not present]
    is_lost = any(isinstance(each, FusedForwards) for each in were)
    if not is_lost or (reason := present.why_by_torch(model)) is None:
        return
    text = (
        f"lade's compiled forward no longer runs {type(model).__name__}, and torch takes about "
        f"twice as long: {reason}. Undo that, and the next call is compiled again"
    )
    call.warn_once(text, RuntimeWarning)


def _give_up(call: Call, target: Target, failure: VerificationError) -> None:
    """Warn that the rest of a call falls back, and let the next call read the model again."""
    # Next time there may be enough memory.
    if not isinstance(failure.__cause__, torch.OutOfMemoryError):
        Profiles.of(call.model).end(call.profile, target.verification, str(failure))
    text = (
        f"lade falls back to standard decoding for the rest of a call of "
        f"{type(call.model).__name__}: {failure}"
    )
    if failure.is_flaw:
        text += "; the next call checks the model again"
    call.warn_once(text, VerificationWarning)
