"""`Generation`: one call of `generate`, assembled from its options, run, and its result made."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from lade.attempts import Attempt
from lade.attention.packed import PACKED_ROWS
from lade.batch import Batch, Text
from lade.budget.budget import Budget
from lade.compat import CACHE, has_adapters_by_row, has_custom_generate, may_be_users, mesh_of
from lade.config import SPECULATING
from lade.decoder import Decoder
from lade.drafters.merged import CallPool, Merged, sources_of
from lade.drafters.prediction import Prediction
from lade.drafting.drafter import Drafter, DraftingCall, ForcedTokens
from lade.drafting.sources import PoolDrafter, Source
from lade.drafting.speculator import Speculator
from lade.engine import current_call, is_in_event_loop
from lade.errors import (
    EagerExecutionWarning,
    LadeError,
    MisfitError,
    PlainDecodingWarning,
    UnsupportedModelError,
    UnsupportedOptionError,
    VerificationWarning,
)
from lade.garbage import without_collection
from lade.gpu.fixed import FixedTarget
from lade.gpu.policy import DevicePolicy
from lade.hf.call import Call
from lade.hf.plain import finish_standard
from lade.hf.pools import credit, opened
from lade.hf.prefixes import Reuse, reuse_of
from lade.hf.stopping import Outputs, Report, StopRule, stopping
from lade.prewarming.tables import prewarmed_table_of
from lade.probing.factory import VerificationPlan, make_target
from lade.probing.plan import choose_verification, execution_of, why_not_run
from lade.probing.profile import profile_of
from lade.probing.proof import DISTANCE, Distances, ProvedTarget, VerificationError
from lade.probing.rules import Requirements, requirements_of
from lade.probing.selfcheck import ready
from lade.probing.user_code import has_user_inputs, is_users, user_code_around
from lade.sampling.choice import Choice
from lade.sampling.exact import exact_choice
from lade.sampling.processors import Processors
from lade.sampling.rejection_choice import rejection_choice
from lade.stats import DecodeStats
from lade.targets.base import Target
from lade.targets.inputs import is_text_alone, sees_its_ends
from lade.targets.rollback import cache_in
from lade.targets.rows import RowsTarget
from lade.targets.trees import TreeTarget
from ngram_pool import NGramPool

_NO_TIME = "max_time leaves no time to compile kernels and check the model; call lade.warm_up first"


class GenerateOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """The result with `return_dict_in_generate=True`; it has an attribute `stats`."""

    stats: DecodeStats

    @classmethod
    def of(cls, stats: DecodeStats, **fields: Any) -> "GenerateOutput":
        """Return a result with these fields."""
        output = cls(**fields)
        output.stats = stats
        return output


class Generation:
    """One call: planned, decoded, and turned into its result."""

    #: Tests replace it to run the code paths of other devices on a CPU.
    policy: ClassVar[DevicePolicy] = DevicePolicy()

    def __init__(self, call: Call) -> None:
        self._call, self._model, self._config = call, call.model, call.config
        self._profile = profile_of(call.model)
        self._around = user_code_around()
        self._user_code = self._profile.user_code or self._around
        self._execution = execution_of(call.model, call.config, self.policy)
        self._cache = cache_in(call.model_kwargs)
        self._stop = StopRule(call.criteria)
        pad_token = call.options._pad_token_tensor if self._stop.has_eos else None
        self._text = Text(call.input_ids, None if pad_token is None else int(pad_token))
        self._outputs = Outputs(call.wanted_scores)
        self._report = Report(call.streamer, call.arguments.on_step, self._text)
        # A call runs alone if it depends on its thread or its model's state: user code in forwards
        # must see only this call's; autocast and asyncio loops belong to the thread; and a custom
        # `generate` may set attributes of the model until its end.
        is_apart = (
            self._user_code is not None
            or is_in_event_loop()
            or torch.is_autocast_enabled(call.input_ids.device.type)
            or has_custom_generate(call.model)
            or has_user_inputs(call.model)
        )
        self._engine_call = None if is_apart else current_call()

    def run(self) -> Any:
        """Decode, and return what `generate` returns."""
        with opened(self._call.arguments.pool) as (self._pool, self._layers):
            self._reuse = self._reused()
            verification, needed, target = self._plan()
            if needed is None or target is None:
                self._say_why_plain(verification)
                return self._decode_standard()
            return self._decode(verification, needed, target)

    def _reused(self) -> Reuse | None:
        """Fill the cache with the kept beginning of the prompt, if the config asks for it."""
        is_plain = why_not_run(self._profile) is not None or not self._has_time
        # Keys by PEFT's adapters of rows fit no later call.
        if is_plain or not self._config.reuses_prefix or has_adapters_by_row(self._model):
            return None
        if self._user_code is not None:
            what = f"{type(self._model).__name__}: your own code ({self._user_code}) may change"
            self._warn_once(f"lade reuses no prefix of {what}", RuntimeWarning)
            return None
        with Attempt(even_memory=True) as attempt:  # weights may be of unusual classes
            return reuse_of(self._call, self._profile)
        text = f"lade reuses no prefix of {type(self._model).__name__} ({attempt.failure})"
        self._warn_once(text, RuntimeWarning)
        return None

    # --- the plan -----------------------------------------------------------------------------

    @without_collection()  # the first call checks the model, and loads or compiles kernels
    def _plan(self) -> tuple[VerificationPlan, Requirements | None, Target | None]:
        """Choose how to decode, and set up the target; no target means standard decoding."""
        model, config, call = self._model, self._config, self._call
        if (reason := self._why_plain) is not None:
            is_asked = config.stable_text or config.lookahead is not None
            if is_asked or why_not_run(self._profile) is not None:
                excluded = dict.fromkeys(SPECULATING, reason)  # raises if the config forbids it
                choose_verification(model, config=config, excluded=excluded, profile=self._profile)
            return VerificationPlan("plain", None, {"tree": reason}), None, None
        with Attempt(LadeError, MisfitError, even_memory=True) as attempt:
            needed = requirements_of(
                model, call.input_ids, call.options, call.model_kwargs, self._user_code
            )
            excluded, why_eager = needed.excluded, needed.why_eager
            if config.stable_text and why_eager is not None:
                excluded = {"tree": why_eager, **excluded}
            choose = partial(
                choose_verification,
                model,
                config=config,
                num_rows=call.num_rows,
                cache=needed.cache,
                excluded=excluded,
                execution=self._execution if why_eager is None else "eager",
                profile=self._profile,
            )
            found: VerificationPlan | None = None
            if self._engine_call is not None:
                # Calls that share a forward are like rows of different lengths.
                with suppress(UnsupportedModelError, UnsupportedOptionError):
                    found = choose(is_padded=True)
            if found is None or found.attention != PACKED_ROWS:
                found, self._engine_call = None, None
            verification = found or choose(is_padded=needed.is_padded)
            verification = verification._replace(why_eager=why_eager or verification.why_eager)
            may_differ = config.stable_text or self._around is not None
            if not may_differ:
                uses_kernels = config.uses_kernels
                verification = ready(verification, model, self._profile, uses_kernels=uses_kernels)
            if verification.verification == "plain":
                return verification, needed, None
            num_beside = 0 if config.lookahead is None else config.lookahead.num_cells
            target: Target = make_target(
                *(model, call.input_ids, call.model_kwargs, verification),
                *(needed.num_new + num_beside, call.options, self._profile, self.policy),
            )
            if self._engine_call is not None and isinstance(target, TreeTarget | RowsTarget):
                target.join(self._engine_call)
        if attempt.failure is not None:  # standard decoding hits the same error, or works
            return VerificationPlan("plain", None, {"tree": attempt.failure}), None, None
        return verification, needed, target

    @cached_property
    def _why_plain(self) -> str | None:
        """Why the call must use standard decoding, whatever its model can do; else None."""
        if (reason := why_not_run(self._profile)) is not None:
            return reason
        if not self._has_time:
            return _NO_TIME
        if has_adapters_by_row(self._model):
            return "PEFT has an adapter for each row of the call, but none for draft tokens"
        if self._call.returns_states:
            return "hidden states or attentions are returned"
        watching = (*self._call.processors, *self._call.criteria)
        if self._is_users_cache and any(map(is_users, watching)):
            return "your own code may look at the cache, which holds draft tokens during a step"
        return None if self._call.num_rows == 1 else self._why_plain_batch

    @property
    def _why_plain_batch(self) -> str | None:
        """Why a batch must use standard decoding, whatever its model can do; else None."""
        call, config = self._call, self._config
        pad_token = call.options._pad_token_tensor
        reasons = (
            (
                self._user_code is not None,
                f"your own code runs in its forward passes ({self._user_code})",
            ),
            (not Processors(call.processors, 1).takes_rows, "a logits processor sees all rows"),
            (not self._stop.takes_rows, "a stop criterion sees all rows"),
            (pad_token is not None and int(pad_token) < 0, "its padding is no token"),
            (bool(call.wanted_scores), "scores are returned, also of rows that have ended"),
            (self._is_users_cache, "a cache was passed"),
            (not is_text_alone(call.model_kwargs), "its prompts have more than tokens"),
            (config.lookahead is not None, "lookahead windows run beside drafts of one row"),
            (config.stable_text, "its rows are parts of one forward"),
            (config.verification not in (None, "tree", "plain"), "its rows are verified as trees"),
        )
        found = next((reason for is_so, reason in reasons if is_so), None)
        return found and f"batches: {found}"

    @property
    def _has_time(self) -> bool:
        """Whether there is time for one-time work, or the config requires it."""
        config = self._config
        is_asked = config.verification is not None or config.lookahead is not None
        is_known = self._profile.is_warm or not self._call.is_timed
        return is_known or is_asked or config.stable_text

    def _drafting(
        self,
        target: Target,
        max_length: int,
        rngs: Sequence[np.random.Generator] | None,
        budget: Budget,
    ) -> tuple[DraftingCall, list[Source], Source | None]:
        """Return the drafting call, its sources, and the source of forced tokens, if any."""
        config, device = self._config, target.device
        limits = (target.max_candidates, config.max_candidates)
        max_candidates = min((limit for limit in limits if limit is not None), default=None)
        given, prediction = self._call.arguments.drafter, self._call.arguments.prediction
        if isinstance(prediction, tuple):  # token ids, from `Arguments.checked`
            given = Merged([CallPool() if given is None else given, Prediction(prediction)])
        call = DraftingCall(
            model=self._model,
            vocab_size=target.vocab_size,
            max_length=max_length,
            device=device,
            num_rows=self._call.num_rows,
            max_candidates=max_candidates,
            processors=self._call.processors,
            samples=bool(self._call.options.do_sample),
            rngs=rngs,
            make_pool_drafter=partial(self._pool_drafter, max_candidates),
            step_sec=partial(budget.step_sec, self._call.num_rows),
        )
        if given is None:
            sources = [Source(call.make_pool_drafter()).make(call)]
        else:
            sources = sources_of(given, call, config.strict_drafter)
            may_learn = any(source.learns_ngrams or source.has_failed for source in sources)
            if config.lookahead is not None and not may_learn:
                raise UnsupportedOptionError(
                    "lade does not support Config(lookahead=…) beside a drafter that learns no "
                    f"n-grams: {type(given).__name__} has learns_ngrams = False"
                )
        foresight, known = None, (p for p in self._call.processors if isinstance(p, ForcedTokens))
        if (grammar := next(known, None)) is not None:
            guards: Any = {"is_strict": config.strict_drafter, "device": device}
            foresight = Source(grammar, what="forced tokens", **guards)
        return call, sources, foresight

    def _pool_drafter(self, max_candidates: int | None) -> Drafter:
        """Return a drafter that uses the pools of the call and the table of its model."""
        config = self._config
        prewarmed = prewarmed_table_of(self._model, self._profile) if config.uses_table else None
        with without_collection():  # the first pool loads or compiles its kernels
            pool = NGramPool() if self._pool is None else self._pool
            return PoolDrafter(pool, max_candidates, prewarmed, self._layers)

    def _budget(self, verification: VerificationPlan) -> Budget:
        config, most_asked = self._config, self._call.options.prompt_lookup_num_tokens
        limits = [each for each in (config.max_draft_tokens, most_asked) if each is not None]
        asked = min(limits, default=None)
        if config.stable_text:
            assert verification.widths is not None
            num_beside = 0 if config.lookahead is None else config.lookahead.num_cells
            most = verification.widths[0] - 1 - num_beside
            return Budget(fixed=most if asked is None else min(asked, most))
        if config.max_draft_tokens is not None and asked is not None:
            return Budget(fixed=asked)
        options = self._call.options
        temperature = 1.0 if options.temperature is None else options.temperature
        temperature = temperature if options.do_sample else 0.0
        method = verification.verification, verification.execution, verification.is_fast
        return Budget(self._profile.step_costs(*method), temperature, asked)

    def _distances(self, verification: VerificationPlan) -> Distances | None:
        """Return the distance between proofs, shared by calls unless user code takes part."""
        if mesh_of(self._model) is not None or self._config.stable_text:
            return None
        if self._user_code is not None:
            return Distances()
        first = Distances(DISTANCE)  # after the check
        return self._profile.proofs.setdefault(verification.verification, first)

    # --- the call ----------------------------------------------------------------------------

    def _decode(self, verification: VerificationPlan, needed: Requirements, target: Target) -> Any:
        """Decode with drafts; continue by standard decoding if they can no longer be verified."""
        config, options, device = self._config, self._call.options, self._call.input_ids.device
        text, outputs, report = self._text, self._outputs, self._report
        self._stop.watch(text, outputs)
        processors = Processors(self._call.processors, self._call.num_rows)
        overlaps = self.policy.overlaps(device)
        rngs = None
        if options.do_sample and config.acceptance == "rejection":
            rngs, rejecting = rejection_choice(text, processors, device, outputs.on_choice)
        budget = self._budget(verification)
        call, sources, grammar = self._drafting(target, needed.max_length, rngs, budget)
        choice: Choice
        if rngs is not None:
            choice = rejecting
        else:
            choice = exact_choice(
                text,
                processors,
                bool(options.do_sample),
                target.vocab_size,
                device,
                outputs.on_choice,
                num_ranked=max(source.num_successors for source in sources),
                ahead=overlaps,
            )
        batch = Batch(
            text,
            _contexts(self._call.input_ids, self._call.model_kwargs.get("attention_mask")),
            needed.max_length,
            stopping(self._stop, report),
            gives_cache=self._call.returns_dict or self._is_users_cache,
            max_lead=choice.max_lead,
        )
        speculator = Speculator(batch, sources, call, budget, target, grammar, config.lookahead)
        proved = ProvedTarget(
            self._model,
            target,
            text,
            self._distances(verification),
            may_repeat_prompts=is_text_alone(self._call.model_kwargs)
            and sees_its_ends(self._call.model_kwargs.get("attention_mask")),
            user_code=self._user_code,
        )
        decoder = Decoder(batch, proved, speculator, choice, report.add, overlaps)
        try:
            if self._reuse is not None:
                decoder.stats.num_reused_tokens = self._reuse.num_tokens
            stats = decoder.run()
        except BaseException:  # an interrupt, or an error of user code between two forwards
            with suppress(Exception):  # memory that cannot be kept is dropped
                target.release()
            raise
        stats.sources, stats.widths = speculator.sources(), budget.widths
        credit(self._call.arguments.pool, stats.num_accepted_tokens)
        if decoder.failure is not None:
            target.undo()
            if self._reuse is not None:
                self._reuse.undo()
                stats.num_reused_tokens = 0
            output, rest = finish_standard(self._call, text, outputs, report)
            self._give_up(verification, decoder.failure)  # unless standard decoding fails, too
            stats.add(rest)
            return self._plain_result(output, stats)
        report.end()
        if self._reuse is not None:
            self._keep(self._reuse, text.token_ids[0], target)
        elif batch.gives_cache:
            if isinstance(target, RowsTarget):
                stats.num_steps += target.fill(text)
            self._cache = target.hand_over(self._cache)
        target.release()
        self._profile.is_warm = True
        self._say_why_eager(verification, target)
        if not self._call.returns_dict:
            return text.sequences()
        return GenerateOutput.of(
            stats,
            sequences=text.sequences(),
            scores=outputs.get("scores"),
            logits=outputs.get("logits"),
            **{CACHE: self._cache},
        )

    def _decode_standard(self) -> Any:
        """Decode as `generate` does, if no method can verify drafts."""
        output, stats = finish_standard(self._call, self._text, self._outputs, self._report)
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
        return GenerateOutput.of(stats, **{**output, **no_cache})

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

    @property
    def _is_users_cache(self) -> bool:
        """Whether the caller may have passed the cache, and may continue from it."""
        has_one = self._call.may_bring_cache and self._cache is not None
        return has_one and may_be_users(self._cache)

    # --- warnings -----------------------------------------------------------------------------

    def _warn_once(self, text: str, category: type[Warning]) -> None:
        if text not in self._profile.warned:
            self._profile.warned.add(text)
            warnings.warn(text, category, stacklevel=3)

    def _say_why_plain(self, verification: VerificationPlan) -> None:
        """Warn once that lade falls back to standard decoding, and why."""
        reasons = verification.reasons
        if not reasons:  # the config asks for standard decoding
            return
        methods = {
            why: ", ".join(name for name, each in reasons.items() if each == why)
            for why in reasons.values()
        }
        (reason, *others) = methods
        if others:
            reason = "; ".join(f"{names}: {why}" for why, names in methods.items())
        name = type(self._model).__name__
        text = (
            f"lade falls back to standard decoding for {name}, one token per forward pass. {reason}"
        )
        self._warn_once(text, PlainDecodingWarning)

    def _say_why_eager(self, verification: VerificationPlan, target: Target) -> None:
        """Warn once if steps were not executed as requested; the text is not affected.

        Only trees have fixed shapes; for other methods, warn only users who set `execution`.
        """
        if self._execution == "eager":
            return
        what, reason = "of fixed shape", verification.why_eager
        if verification.verification != "tree" and self._config.execution is not None:
            reason = f"it verifies drafts by {verification.verification!r}"
        if isinstance(target, FixedTarget):
            what, reason = "recorded", target.why_not_recorded
        if reason is not None:
            name = type(self._model).__name__
            text = f"lade executes steps of {name} eagerly, not {what}: {reason}"
            self._warn_once(text, EagerExecutionWarning)

    def _give_up(self, verification: VerificationPlan, failure: VerificationError) -> None:
        """Warn that the rest of a call falls back, and drop the method's verdict."""
        # Next time there may be enough memory.
        if not isinstance(failure.__cause__, torch.OutOfMemoryError):
            self._profile.drop_verdict(verification.verification, str(failure))
        text = (
            f"lade falls back to standard decoding for the rest of a call of "
            f"{type(self._model).__name__}: {failure}"
        )
        if failure.is_flaw:
            text += "; the next call checks the model again"
        self._warn_once(text, VerificationWarning)


def _contexts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Return each prompt as the drafter sees it: all tokens that are not masked."""
    seen = input_ids >= 0  # negative ids are placeholders of passed embeddings
    if attention_mask is not None:
        # The mask also covers the cache of earlier turns, whose tokens may not have been passed.
        masks = attention_mask[:, attention_mask.shape[1] - input_ids.shape[1] :].bool()
        seen &= masks.to(input_ids.device)
    elif bool(seen.all()):
        return input_ids.tolist()
    return [ids[mask].tolist() for ids, mask in zip(input_ids, seen, strict=True)]
