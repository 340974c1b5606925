"""One call of `generate`: assembled from its options, run, and turned into its result."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from lade.batch import Batch, Limits, Text
from lade.budget.budget import Budget, FixedBudget, PricedBudget
from lade.closeness import is_exact_in, limit_of
from lade.compat import Model, decode_plainly, may_be_users, mesh_of, placeholders_of
from lade.config import Config
from lade.decoder import Decoder, VerificationError
from lade.drafting.drafter import (
    CallDrafter,
    Drafter,
    DraftingCall,
    NoDrafter,
    SamplingDrafter,
)
from lade.drafting.grammar import forced_tokens_of
from lade.drafting.pool_drafter import PoolDrafter, has_table
from lade.drafting.proposer import Proposer
from lade.drafting.ranks import Ranks
from lade.drafting.speculator import Speculator
from lade.drafting.successors import PromptHarvester, num_prompt_tokens
from lade.errors import (
    DrafterWarning,
    EagerExecutionWarning,
    LadeError,
    MisfitError,
    PlainDecodingWarning,
    UnsupportedOptionError,
    VerificationWarning,
    in_one_line,
)
from lade.gpu.fixed import FixedTarget
from lade.gpu.policy import DevicePolicy
from lade.hf.arguments import Arguments, refuse_lookahead
from lade.hf.pools import credit, opened
from lade.hf.prefixes import Reuse, reuse_of
from lade.hf.resume import Told, finish_plainly
from lade.hf.stopping import StopRule
from lade.hf.streams import ColumnStream, PlainStream
from lade.outputs import Outputs
from lade.prewarming.costs import first_costs_of
from lade.prewarming.tables import prewarmed_table_of
from lade.probing.call import Call, examine
from lade.probing.factory import VerificationPlan, make_target
from lade.probing.plan import choose_verification, execution_of, stable_width_of
from lade.probing.profile import profile_of
from lade.probing.watch import Watching
from lade.sampling.choice import Choice
from lade.sampling.exact import exact_choice
from lade.sampling.processors import Processors
from lade.sampling.rejection_choice import rejection_choice
from lade.stats import DecodeStats, Step
from lade.targets.base import Target
from lade.targets.rollback import cache_in
from lade.targets.ties import TieError
from ngram_pool import NGramPool


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """The result with `return_dict_in_generate=True`: transformers' own fields and `stats`."""

    stats: DecodeStats = None  # type: ignore[assignment]  # always set; ModelOutput wants a default


class Generation:
    """One call: what is decoded, how, and its result.

    Args:
        model: the target.
        input_ids: int64 [rows, num_tokens].
        processors, criteria, options: as prepared by `generate` for the call.
        arguments: lade's own arguments.
        streamer: gets the emitted tokens and the end.
        model_kwargs: as prepared by `generate` for the prefill.
    """

    #: Replaced by tests, to run on a CPU what other devices run.
    policy: ClassVar[DevicePolicy] = DevicePolicy()

    def __init__(
        self,
        model: Model,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        options: GenerationConfig,
        arguments: Arguments,
        streamer: BaseStreamer | None,
        model_kwargs: dict[str, Any],
    ) -> None:
        self._model = model
        self._input_ids = input_ids
        self._processors = processors
        self._criteria = criteria
        self._options = options
        self._arguments = arguments
        self._config = arguments.config or Config()
        self._streamer = streamer
        self._model_kwargs = model_kwargs
        self._num_rows: int = input_ids.shape[0]
        self._profile = profile_of(model)
        self._execution = execution_of(model, self._config, self.policy)
        self._cache = cache_in(model_kwargs)

    def run(self) -> Any:
        """Decode, and return what `generate` returns."""
        with opened(self._arguments.pool) as (self._pool, self._layers):
            return self._run()

    def _run(self) -> Any:
        self._reuse = self._reused()
        verification, call, target = self._plan()
        if call is None or target is None:
            self._say_why_plain(verification)
            return self._decode_plainly()
        return self._decode(verification, call, target)

    def _reused(self) -> Reuse | None:
        """Fill the cache with what is kept of the prompt, where that was asked for."""
        if not self._config.reuses_prefix:
            return None
        try:
            return reuse_of(
                self._model,
                self._profile,
                self._input_ids,
                self._options,
                self._model_kwargs,
                self._arguments,
            )
        except Exception as failure:  # unusual weights: only the reuse is lost
            what = f"{type(failure).__name__}: {failure}"
            self._warn_once(f"lade reuses no prefix of this model ({what})", RuntimeWarning)
            return None

    # --- the plan -----------------------------------------------------------------------------

    def _plan(self) -> tuple[VerificationPlan, Call | None, Target | None]:
        """Choose how to decode, and set up the target; no target means plain decoding."""
        model, config = self._model, self._config
        try:
            call = examine(model, self._profile, self._input_ids, self._options, self._model_kwargs)
            verification = choose_verification(
                model,
                is_padded=call.is_padded,
                cache=call.cache,
                asked=config.verification,
                excluded=call.excluded,
                execution=self._execution,
                why_eager=call.why_eager,
                stable_width=stable_width_of(model, config),
                profile=self._profile,
            )
            if config.lookahead is not None and verification.verification != "tree":
                _refuse_lookahead(model, verification)
            if verification.verification == "plain":
                return verification, call, None
            target = make_target(
                model,
                self._input_ids,
                self._model_kwargs,
                verification,
                call.num_new + (0 if config.lookahead is None else config.lookahead.num_cells),
                self._options,
                self._profile,
                self.policy,
            )
        except (LadeError, MisfitError):
            raise
        except Exception as failure:  # plain decoding either hits the same error or works
            why = f"{type(failure).__name__}: {failure}"
            return VerificationPlan("plain", None, {"tree": why}), None, None
        return verification, call, target

    def _drafter(
        self,
        target: Target,
        processors: LogitsProcessorList,
        max_length: int,
        rngs: Sequence[np.random.Generator] | None,
    ) -> Drafter:
        drafter = self._arguments.drafter
        if drafter is None:
            return self._pool_drafter(target)
        if isinstance(drafter, CallDrafter):
            drafting_call = DraftingCall(
                model=self._model,
                target=target,
                vocab_size=target.vocab_size,
                num_rows=self._num_rows,
                max_length=max_length,
                max_candidates=target.max_candidates,
                processors=processors,
                samples=bool(self._options.do_sample),
                rngs=rngs,
                make_pool_drafter=lambda: self._pool_drafter(target),
                is_strict=self._config.strict_drafter,
            )
            return self._made(drafter, drafting_call)
        draws = self._config.acceptance == "rejection" and isinstance(drafter, SamplingDrafter)
        if draws and target.max_candidates is not None:
            # Only the drafter could say which of the drawn paths to leave out.
            raise UnsupportedOptionError(
                "lade does not support a drafter of one's own that draws its drafts where only "
                f"{target.max_candidates} of their paths can be verified"
            )
        return drafter

    def _made(self, drafter: CallDrafter, drafting_call: DraftingCall) -> Drafter:
        """Return the drafter of a call, or one that drafts nothing where making it fails."""
        try:
            made = drafter.for_call(drafting_call)
            if self._config.lookahead is not None:
                refuse_lookahead(made)
            return made
        except (LadeError, TypeError, ValueError):
            raise
        except Exception as failure:  # no memory, say: only the drafts are lost
            if self._config.strict_drafter:
                raise
            what = f"{type(drafter).__name__} failed ({in_one_line(failure)})"
            warnings.warn(f"lade drafts nothing: {what}", DrafterWarning, stacklevel=2)
            return NoDrafter()

    def _pool_drafter(self, target: Target) -> Drafter:
        """Return a drafter by the pools of the call and the table of its model."""
        config = self._config
        prewarmed = prewarmed_table_of(self._model, self._profile) if config.uses_table else None
        limits = (target.max_candidates, config.max_candidates)
        max_candidates = min((limit for limit in limits if limit is not None), default=None)
        try:
            pool = NGramPool() if self._pool is None else self._pool
            return PoolDrafter(pool, max_candidates, prewarmed, self._layers)
        except Exception as failure:  # no memory, no compiler: only the drafts are lost
            what = f"{type(failure).__name__}: {failure}"
            text = f"lade drafts nothing, for no pool can be made ({what})"
            self._warn_once(text, DrafterWarning)
            return NoDrafter()

    def _budget(self, verification: VerificationPlan) -> Budget:
        config = self._config
        if config.stable_text:
            assert verification.widths is not None
            num_beside = 0 if config.lookahead is None else config.lookahead.num_cells
            most = verification.widths[0] - 1 - num_beside
            asked = config.max_draft_tokens
            return FixedBudget(most if asked is None else min(asked, most))
        if config.max_draft_tokens is not None:
            return FixedBudget(config.max_draft_tokens)
        if config.step_costs is not None:
            return PricedBudget(config.step_costs)
        try:
            return self._profile.budget(
                verification.verification,
                verification.execution,
                lambda: first_costs_of(self._model, self._profile, verification),
            )
        except Exception as failure:  # no compiler: only the drafts are lost
            what = f"{type(failure).__name__}: {failure}"
            text = f"lade drafts nothing, for the costs of steps cannot be learned ({what})"
            self._warn_once(text, DrafterWarning)
            return FixedBudget(0)

    def _prompt_harvester(
        self, drafter: Drafter, proposer: Proposer, target: Target, max_length: int
    ) -> PromptHarvester | None:
        """Return a harvester of the prompts if the drafter needs one, else None.

        There is none for a model that several processes run together: all of them must harvest or
        none, but whether it is possible is decided by numbers that differ between them.
        """
        if proposer.num_successors == 0 or has_table(drafter) or mesh_of(self._model) is not None:
            return None
        max_tokens = num_prompt_tokens(max_length - self._input_ids.shape[1])
        if max_tokens < 1:
            return None
        return PromptHarvester(self._model, proposer.num_successors, target.vocab_size, max_tokens)

    # --- the call ----------------------------------------------------------------------------

    def _decode(self, verification: VerificationPlan, call: Call, target: Target) -> Any:
        """Decode with drafts, and plainly once they can no longer be verified."""
        config, options, device = self._config, self._options, self._input_ids.device
        stop = StopRule(self._criteria, self._num_rows)
        pad_token = options._pad_token_tensor if stop.has_eos else None
        text = Text(self._input_ids, None if pad_token is None else int(pad_token))
        outputs = Outputs(self._num_rows, self._wanted_outputs)
        stop.watch(text, outputs)
        processors = Processors(self._processors, self._num_rows)
        stream, told = ColumnStream(self._streamer, text), Told(text)

        def emit(steps: Sequence[Step]) -> None:
            stream.put_complete()
            for step in steps:
                told.add(step)
                if self._arguments.on_step is not None:
                    self._arguments.on_step(step)

        overlaps = self.policy.overlaps(device)
        rngs = None
        if options.do_sample and config.acceptance == "rejection":
            rngs, rejecting = rejection_choice(text, processors, device, outputs.on_choice)
        drafter = self._drafter(target, self._processors, call.max_length, rngs)
        proposer = Proposer(
            drafter,
            target.vocab_size,
            target.max_candidates,
            forced_tokens_of(self._processors),
            rngs,
            config.strict_drafter,
            placeholders_of(self._model),
        )
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
                num_ranked=proposer.num_successors,
                ahead=overlaps,
            )
        is_lockstep = stop.is_lockstep or processors.is_lockstep or target.is_lockstep
        limits = Limits(
            max_length=call.max_length,
            stop=stop,
            is_lockstep=is_lockstep,
            # Dropping a finished row would change the forwards of the others.
            keeps_finished=(
                is_lockstep or text.pad_token_id is None or len(outputs) > 0 or config.stable_text
            ),
            fills_cache=self._returns_dict or self._is_users_cache,
        )
        contexts = _contexts(self._input_ids, self._model_kwargs.get("attention_mask"))
        batch = Batch(text, contexts, limits, choice.max_lead)
        ranks = Ranks.of(self._model)
        budget = self._budget(verification)
        temperature = 1.0 if options.temperature is None else options.temperature
        budget.begin(temperature if options.do_sample else 0.0)
        decoder = Decoder(
            batch,
            target,
            Speculator(batch, proposer, budget, target, config.lookahead, ranks),
            choice,
            emit,
            outputs,
            self._prompt_harvester(drafter, proposer, target, limits.max_length),
            # All processes that run a model together must watch, or none.
            self._watching if ranks is None else None,
            overlaps,
        )
        try:
            if self._reuse is not None:
                decoder.stats.num_reused_tokens = self._reuse.num_tokens
            stats = decoder.run()
        except BaseException:  # an interrupt, or an error of the user's code between two forwards
            with suppress(Exception):  # what cannot be kept for the next call is dropped
                target.release()
            raise
        stats.sources = proposer.sources()
        credit(self._arguments.pool, stats.num_accepted_tokens)
        if decoder.failure is not None:
            emit(told.missing(stats))
            if not all(text.is_finished):
                target.undo()
                if self._reuse is not None:
                    self._reuse.undo()
                    stats.num_reused_tokens = 0
                return self._go_on_plainly(
                    verification, decoder.failure, stats, text, outputs, told, stream
                )
            self._give_up(verification, decoder.failure)
        stream.end()
        if self._reuse is not None:
            self._keep(self._reuse, text.token_ids[0], decoder.failure is None, target)
        elif limits.fills_cache:
            self._cache = target.hand_over(self._cache)
        if decoder.failure is None:
            target.release()
        self._say_why_eager(verification, target)
        return self._result(text, outputs, stats)

    def _result(self, text: Text, outputs: Outputs, stats: DecodeStats) -> Any:
        if not self._returns_dict:
            return text.sequences()
        return GenerateOutput(
            sequences=text.sequences(),
            scores=outputs.columns("scores"),
            logits=outputs.columns("logits"),
            attentions=outputs.columns("attentions"),
            hidden_states=outputs.columns("hidden_states"),
            past_key_values=self._cache,
            stats=stats,
        )

    def _go_on_plainly(
        self,
        verification: VerificationPlan,
        failure: VerificationError,
        stats: DecodeStats,
        text: Text,
        outputs: Outputs,
        told: Told,
        stream: ColumnStream,
    ) -> Any:
        """Continue the text in `generate`'s own loop."""
        output, rest = finish_plainly(
            self._model,
            text,
            outputs,
            told,
            stream.num_put,
            self._processors,
            self._criteria,
            self._options,
            self._streamer,
            self._arguments.on_step,
            self._model_kwargs,
        )
        self._give_up(verification, failure)  # not reached if plain decoding fails, too
        if not self._returns_dict:
            return output
        stats.add(rest)
        return self._plain_result(output, stats)

    def _decode_plainly(self) -> Any:
        """Decode as `generate` itself does, if no method can verify drafts."""
        stream = PlainStream(self._streamer, self._arguments.on_step, self._num_rows)
        output = decode_plainly(
            self._model,
            self._input_ids,
            self._processors,
            stream.watch(self._criteria),
            self._options,
            stream,
            self._model_kwargs,
        )
        if self._reuse is not None:
            sequences = output.sequences if self._returns_dict else output
            self._keep(self._reuse, sequences[0].tolist())
            stream.stats.num_reused_tokens = self._reuse.num_tokens
        return self._plain_result(output, stream.stats) if self._returns_dict else output

    def _plain_result(self, output: Any, stats: DecodeStats) -> GenerateOutput:
        """Return what plain decoding gave, with `stats`, and without a cache that is kept."""
        kept = {} if self._reuse is None else {"past_key_values": None}
        return GenerateOutput(**{**output, **kept, "stats": stats})

    def _keep(
        self,
        reuse: Reuse,
        token_ids: Sequence[int],
        is_whole: bool = True,
        target: Target | None = None,
    ) -> None:
        """Keep the keys and values of a text for later calls; the caller gets none.

        What cannot be kept is dropped: the text is complete.

        Args:
            reuse: of this call.
            token_ids: the text.
            is_whole: whether its keys and values are to be trusted.
            target: holds them; None if the call's cache does.
        """
        try:
            if target is not None and is_whole:
                target.hand_over(self._cache)
            if is_whole:
                reuse.end(token_ids)
        except Exception:
            is_whole = False
        if not is_whole:
            reuse.undo()
        self._cache = None

    # --- options ------------------------------------------------------------------------------

    @property
    def _returns_dict(self) -> bool:
        return bool(self._options.return_dict_in_generate)

    @property
    def _wanted_outputs(self) -> list[str]:
        names = ("scores", "logits", "hidden_states", "attentions")
        wanted = [name for name in names if getattr(self._options, f"output_{name}")]
        return wanted if self._returns_dict else []

    @property
    def _is_users_cache(self) -> bool:
        """Whether the caller may have passed the cache, and so may continue from it."""
        if not isinstance(self._cache, DynamicCache):
            return False
        return may_be_users(self._cache)

    @property
    def _watching(self) -> Watching:
        return Watching(self._profile.watch, limit_of(self._model), is_exact_in(self._model))

    # --- warnings -----------------------------------------------------------------------------

    def _warn_once(self, text: str, category: type[Warning]) -> None:
        if text not in self._profile.warned:
            self._profile.warned.add(text)
            warnings.warn(text, category, stacklevel=3)

    def _say_why_plain(self, verification: VerificationPlan) -> None:
        """Warn once that decoding is plain, and why; the text is not affected."""
        if verification.reasons:  # else plain decoding was asked for
            reasons = "; ".join(
                f"{name}: {reason}" for name, reason in verification.reasons.items()
            )
            text = (
                f"lade decodes {type(self._model).__name__} plainly, one token a forward. {reasons}"
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
            if reason is None and target.why_not_dense is not None:
                text = (
                    f"lade records steps of {type(self._model).__name__} with the model's own "
                    f"operations, not with fused ones: {target.why_not_dense}"
                )
                self._warn_once(text, EagerExecutionWarning)
        if reason is not None:
            name = type(self._model).__name__
            text = f"lade executes steps of {name} eagerly, not {what}: {reason}"
            self._warn_once(text, EagerExecutionWarning)

    def _give_up(self, verification: VerificationPlan, failure: VerificationError) -> None:
        """Warn that the rest of a call is decoded plainly, and drop the method's verdict."""
        # Next time there may be enough memory, and another text has other ties.
        if not isinstance(failure.__cause__, (torch.OutOfMemoryError, TieError)):
            self._profile.drop_verdict(verification.verification, str(failure))
        text = (
            f"lade decodes the rest of a call of {type(self._model).__name__} plainly, one token a "
            f"forward: {failure}"
        )
        if failure.is_doubt:
            text += "; the model is checked anew at the next call"
        self._warn_once(text, VerificationWarning)


def _contexts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Return what the drafter sees of each prompt: all tokens that are not masked."""
    seen = input_ids >= 0  # negative ids are placeholders of passed embeddings
    if attention_mask is not None:
        # The mask also covers the cache of earlier turns, whose tokens may not have been passed.
        masks = attention_mask[:, attention_mask.shape[1] - input_ids.shape[1] :].bool()
        seen &= masks.to(input_ids.device)
    elif bool(seen.all()):
        return input_ids.tolist()
    return [ids[mask].tolist() for ids, mask in zip(input_ids, seen, strict=True)]


def _refuse_lookahead(model: Model, verification: VerificationPlan) -> None:
    """Raise because a lookahead window was asked for, but drafts are not verified as trees."""
    why = verification.reasons.get(
        "tree", f"Config(verification={verification.verification!r}) asks for it"
    )
    raise UnsupportedOptionError(
        f"lade does not support Config(lookahead=…) where drafts are not verified by 'tree'; "
        f"{type(model).__name__} verifies them by {verification.verification!r} here: {why}"
    )
