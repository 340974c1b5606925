"""One call put together from its options, run, and given its result."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from packaging import version
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from lade.batch import Text
from lade.budget.budget import Budget, FixedBudget, PricedBudget
from lade.closeness import is_exact_in, limit_of
from lade.compat import Model, decode_plainly, device_of_inputs, mesh_of
from lade.config import Config, Execution
from lade.decoder import Decoder, Rules, VerificationError, Watching
from lade.drafting.drafter import Drafter, NgramDrafter, NoDrafter, SamplingDrafter
from lade.drafting.grammar import foresight_of
from lade.drafting.pool_drafter import PoolDrafter, has_table
from lade.drafting.proposer import Proposer
from lade.drafting.ranks import Ranks
from lade.drafting.successors import PromptHarvester
from lade.errors import (
    DrafterWarning,
    EagerExecutionWarning,
    LadeError,
    MisfitError,
    PlainDecodingWarning,
    UnsupportedOptionError,
    VerificationWarning,
)
from lade.gpu.fixed import FixedTarget
from lade.hf.options import refuse_unsupported_options
from lade.hf.resume import Told, finish_plainly
from lade.hf.stopping import StopRule
from lade.hf.streams import ColumnStream, PlainStream
from lade.outputs import Outputs
from lade.prewarming.tables import prior_of
from lade.probing.call import examine
from lade.probing.factory import ChosenWay, make_target, usual_execution
from lade.probing.plan import choose_way
from lade.probing.profile import Profile, profile_of
from lade.probing.rules import refuse_encoder_decoder
from lade.sampling.choice import Choice, OnChoice
from lade.sampling.exact import ChoiceAtOnce, Likeliest, Pick, ProcessedChoice, Race
from lade.sampling.greedy import GreedyChoice
from lade.sampling.processors import Processors
from lade.sampling.rejection_choice import RejectionChoice
from lade.stats import DecodeStats, Step
from lade.targets.base import Target
from lade.targets.rollback import cache_in
from lade.targets.ties import TieError
from ngram_pool import NGramPool

OnStep = Callable[[Step], None]


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """What `return_dict_in_generate=True` returns: transformers' own output and our `stats`."""

    stats: DecodeStats = None  # type: ignore[assignment]  # always set; ModelOutput wants a default


class Ours(NamedTuple):
    """What is not `generate`'s own, checked."""

    pool: NGramPool | None
    drafter: Drafter | None
    config: Config | None
    on_step: OnStep | None


def decode(
    model: Model,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    pool: NGramPool | None = None,
    drafter: Drafter | None = None,
    config: Config | None = None,
    on_step: OnStep | None = None,
    token_streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode inside `model.generate(..., custom_generate=lade.decode)`.

    `pool`, `drafter`, `config` and `on_step` are as for `lade.generate` and may be given to
    `model.generate`, and so may `token_streamer`, which gets the emitted tokens and the end. A
    `streamer` given to `model.generate` gets the prompt alone: transformers drops it before it
    calls any custom function. `lade.generate` and `lade.wrap` mend that.
    """
    refuse_encoder_decoder(model)
    refuse_unsupported_options(model, generation_config)
    check_ours(Ours(pool, drafter, config, on_step))
    execution = _wished_execution(model, config)
    profile = profile_of(model)
    num_rows, device = input_ids.shape[0], input_ids.device
    lookahead = config.lookahead if config is not None else None
    try:
        call = examine(model, profile, input_ids, generation_config, model_kwargs)
        way = choose_way(
            model,
            is_padded=call.is_padded,
            cache=call.cache,
            asked=config.target if config is not None else None,
            excluded=call.excluded,
            execution=execution,
            why_eager=call.why_eager,
            stable_width=_stable_width(model, config),
            profile=profile,
        )
        if lookahead is not None:
            _refuse_lookahead(model, way)
        target = None
        if way.way != "plain":
            num_new = call.num_new + (0 if lookahead is None else lookahead.num_cells)
            target = make_target(
                model, input_ids, model_kwargs, way, num_new, generation_config, profile
            )
    except (LadeError, MisfitError):
        raise
    except Exception as failure:  # whatever it is, plain decoding runs into it too, or does not
        why = f"{type(failure).__name__}: {failure}"
        way, target = ChosenWay("plain", None, {"tree": why}), None
    if target is None:
        _warn_once(model, profile, way)
        return _decode_plainly(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            PlainStream(token_streamer, on_step, num_rows),
            model_kwargs,
        )
    drafter = _choose_drafter(model, profile, pool, drafter, config, target)
    stop = StopRule(stopping_criteria, num_rows)
    pad_token = generation_config._pad_token_tensor if stop.has_eos else None
    text = Text(input_ids, None if pad_token is None else int(pad_token))
    outputs = Outputs(num_rows, _wanted_outputs(generation_config))
    stop.watch(text, outputs)
    processors = Processors(logits_processor, num_rows)
    is_joint = stop.is_joint or processors.is_joint or target.is_joint
    cache = cache_in(model_kwargs)
    stream = ColumnStream(token_streamer, text)
    told = Told(text)

    def emit(steps: Sequence[Step]) -> None:
        stream.put_complete()
        for step in steps:
            told.add(step)
            if on_step is not None:
                on_step(step)

    is_stable = config is not None and config.stable_text
    rngs = None
    if generation_config.do_sample and config is not None and config.verifier == "rejection":
        rngs, choice = _rejection(text, processors, device, outputs.on_choice)
    proposer = Proposer(
        drafter,
        target.vocab_size,
        target.max_candidates,
        foresight_of(logits_processor),
        rngs,
        config is not None and config.strict_drafter,
    )
    if rngs is None:
        choice = _exact(
            text,
            processors,
            generation_config.do_sample,
            target.vocab_size,
            device,
            outputs.on_choice,
            proposer.num_successors,
        )
    rules = Rules(
        max_length=call.max_length,
        stop=stop,
        is_joint=is_joint,
        # A row that leaves would change the forwards of the others.
        keeps_finished=is_joint or text.pad_token_id is None or len(outputs) > 0 or is_stable,
        fills_cache=bool(generation_config.return_dict_in_generate) or _is_users(cache),
    )
    ranks = Ranks.of(model)
    decoder = Decoder(
        text,
        _contexts(input_ids, model_kwargs.get("attention_mask")),
        target,
        proposer,
        choice,
        _choose_budget(config, profile, way),
        rules,
        emit,
        outputs,
        ranks,
        lookahead,
        _prompt_harvester(model, drafter, proposer, target),
        # Processes that run a model together must all look, or none.
        Watching(profile.watch, limit_of(model), is_exact_in(model)) if ranks is None else None,
        overlaps=_is_waited_for(device),
    )
    stats = decoder.run()
    if decoder.failure is not None:
        emit(told.missing(stats))
        if all(text.is_finished):
            _give_up(model, profile, way, decoder.failure)
        else:
            target.undo()
            output, rest = finish_plainly(
                model,
                text,
                outputs,
                told,
                stream.num_put,
                logits_processor,
                stopping_criteria,
                generation_config,
                token_streamer,
                on_step,
                model_kwargs,
            )
            _give_up(model, profile, way, decoder.failure)  # not where plain decoding fails, too
            if not generation_config.return_dict_in_generate:
                return output
            stats.add(rest)
            return GenerateOutput(**output, stats=stats)
    stream.end()
    if rules.fills_cache:
        cache = target.hand_over(cache)
    if decoder.failure is None:
        target.release()
    if execution != "eager":
        is_asked = config is not None and config.execution is not None
        _warn_of_eager_steps(model, profile, way, target, is_asked)
    if not generation_config.return_dict_in_generate:
        return text.sequences()
    return GenerateOutput(
        sequences=text.sequences(),
        scores=outputs.columns("scores"),
        logits=outputs.columns("logits"),
        attentions=outputs.columns("attentions"),
        hidden_states=outputs.columns("hidden_states"),
        past_key_values=cache,
        stats=stats,
    )


def _give_up(model: Model, profile: Profile, way: ChosenWay, failure: VerificationError) -> None:
    """Say that the rest of a call is plain, and trust the check no more that had said otherwise."""
    # Memory may be there the next time, and another text has other ties.
    if not isinstance(failure.__cause__, (torch.OutOfMemoryError, TieError)):
        profile.drop_verdict(way.way, str(failure))
    text = (
        f"lade decodes the rest of a call of {type(model).__name__} plainly, one token a forward: "
        f"{failure}"
    )
    if failure.is_doubt:
        text += "; the model is checked anew at the next call"
    _say_once(profile, text, VerificationWarning)


def _decode_plainly(
    model: Model,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    stream: PlainStream,
    model_kwargs: dict[str, Any],
) -> Any:
    """Decode as `generate` itself does, for a model or a call that leaves no way to speculate."""
    watched = stream.watch(criteria)
    output = decode_plainly(model, input_ids, processors, watched, config, stream, model_kwargs)
    if not config.return_dict_in_generate:
        return output
    return GenerateOutput(**output, stats=stream.stats)


def _warn_once(model: Model, profile: Profile, way: ChosenWay) -> None:
    """Say why there is no speed to be had; the text is not affected."""
    if not way.reasons:
        return  # asked for
    reasons = "; ".join(f"{name}: {reason}" for name, reason in way.reasons.items())
    text = f"lade decodes {type(model).__name__} plainly, one token a forward. {reasons}"
    _say_once(profile, text, PlainDecodingWarning)


def _say_once(profile: Profile, text: str, category: type[Warning]) -> None:
    if text not in profile.warned:
        profile.warned.add(text)
        warnings.warn(text, category, stacklevel=3)


# Of all steps where text must not depend on drafts. On a CPU 16 cost a tenth more than 8; what is
# best on a GPU was not measured, but few nodes more cost nothing there.
_STABLE_WIDTH = 8
_STABLE_WIDTH_ON_CUDA = 32


def _stable_width(model: Model, config: Config | None) -> int | None:
    """Return the width of all steps of a call whose text must not depend on drafts, else None.

    It follows from settings and device alone, for it is part of what decides the text.
    """
    if config is None or not config.stable_text:
        return None
    is_cuda = device_of_inputs(model).type == "cuda"
    width = _STABLE_WIDTH_ON_CUDA if is_cuda else _STABLE_WIDTH
    num_nodes = width - 1 if config.max_draft_tokens is None else config.max_draft_tokens
    num_cells = 0 if config.lookahead is None else config.lookahead.num_cells
    return -(-(1 + num_nodes + num_cells) // width) * width


def _wished_execution(model: Model, config: Config | None) -> Execution:
    """Return how a call's forwards are to be executed.

    Raises:
        UnsupportedOptionError: graphs were asked for where there are none.
    """
    asked = config.execution if config is not None else None
    usual = usual_execution(model)
    if config is not None and config.stable_text and usual == "eager":
        usual = "fixed"
    if asked == "graphs" and usual != "graphs":
        raise UnsupportedOptionError(
            "lade does not support Config(execution='graphs') on "
            f"{device_of_inputs(model).type!r}: CUDA graphs need a CUDA device; "
            "'fixed' runs the same steps eagerly"
        )
    return asked or usual


def _warn_of_eager_steps(
    model: Model, profile: Profile, way: ChosenWay, target: Target, is_asked: bool
) -> None:
    """Say why steps were not executed as wished for; the text is not affected.

    Other ways than trees know no shapes, which is worth a word only to those who asked for some.
    """
    what, reason = "of fixed shape", way.why_eager
    if way.way != "tree" and is_asked:
        reason = f"it verifies drafts by {way.way!r}"
    if isinstance(target, FixedTarget):
        what, reason = "recorded", target.why_not_recorded
    if reason is not None:
        text = f"lade executes steps of {type(model).__name__} eagerly, not {what}: {reason}"
        _say_once(profile, text, EagerExecutionWarning)


def _contexts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Return what the drafter sees of each prompt: all tokens that are not masked."""
    seen = input_ids >= 0  # others stand where embeddings were passed
    if attention_mask is not None:
        # The mask also covers the cache of an earlier turn, whose tokens may not have been passed.
        masks = attention_mask[:, attention_mask.shape[1] - input_ids.shape[1] :].bool()
        seen &= masks.to(input_ids.device)
    elif bool(seen.all()):
        return input_ids.tolist()
    return [ids[mask].tolist() for ids, mask in zip(input_ids, seen, strict=True)]


def _wanted_outputs(config: GenerationConfig) -> list[str]:
    names = ("scores", "logits", "hidden_states", "attentions")
    wanted = [name for name in names if getattr(config, f"output_{name}")]
    return wanted if config.return_dict_in_generate else []


# Whether `generate` marks a cache that it was given; 5.23 does, 5.15 does not.
_MARKS_CACHES = version.parse(transformers.__version__) >= version.parse("5.23")


def _is_users(cache: DynamicCache | None) -> bool:
    """Tell whether the caller may have passed the cache, and so may go on from it."""
    if cache is None:
        return False
    return not _MARKS_CACHES or getattr(cache, "_is_user_defined", False)


def check_ours(ours: Ours) -> None:
    """Raise where pool, drafter and config are none, or contradict each other."""
    pool, drafter, config, on_step = ours
    for name, value, kind in (("pool", pool, NGramPool), ("config", config, Config)):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"expected {name} to be a lade.{kind.__name__}, got {value!r}")
    if on_step is not None and not callable(on_step):
        raise TypeError(f"expected on_step to be callable, got {on_step!r}")
    _check_pool(pool, config)
    if drafter is None:
        return
    lacking = [name for name in ("open", "draft", "observe", "close") if not hasattr(drafter, name)]
    if lacking or isinstance(drafter, type):
        raise TypeError(
            f"expected drafter to be a lade.Drafter, got {drafter!r}"
            + (f", which has no {lacking[0]}" if lacking else "")
        )
    if pool is not None:
        raise ValueError("expected pool or drafter, got both")
    if config is not None and (config.max_candidates or config.max_ngram_size):
        raise ValueError(
            "expected no Config(max_candidates=…) or Config(max_ngram_size=…) beside a drafter: "
            "they are settings of the pool"
        )
    wants_window = config is not None and config.lookahead is not None
    if wants_window and not isinstance(drafter, NgramDrafter):
        raise UnsupportedOptionError(
            "lade does not support Config(lookahead=…) beside a drafter that learns no n-grams: "
            f"{type(drafter).__name__} has no method observe_ngrams"
        )


def _choose_drafter(
    model: Model,
    profile: Profile,
    pool: NGramPool | None,
    drafter: Drafter | None,
    config: Config | None,
    target: Target,
) -> Drafter:
    if drafter is None:
        prior = prior_of(model, profile) if config is None or config.uses_table else None
        limits = [target.max_candidates, config.max_candidates if config is not None else None]
        max_candidates = min((limit for limit in limits if limit is not None), default=None)
        try:
            pool = new_pool(config) if pool is None else pool
        except Exception as failure:  # no memory, no compiler: that costs the drafts alone
            what = f"{type(failure).__name__}: {failure}"
            _say_once(
                profile, f"lade drafts nothing, for no pool can be made ({what})", DrafterWarning
            )
            return NoDrafter()
        return PoolDrafter(pool, max_candidates, prior)
    rejects = config is not None and config.verifier == "rejection"
    if rejects and target.max_candidates is not None and isinstance(drafter, SamplingDrafter):
        # Which of the drawn paths to leave out is the drafter's to say.
        raise UnsupportedOptionError(
            "lade does not support a drafter of one's own that draws its drafts where only "
            f"{target.max_candidates} of their paths can be verified"
        )
    return drafter


def _prompt_harvester(
    model: Model, drafter: Drafter, proposer: Proposer, target: Target
) -> PromptHarvester | None:
    """Return what looks at the prompts for a drafter that wants it.

    Nothing does for a model that several processes run together: whether it can be done is decided
    by numbers that differ between them, and all of them have to do it, or none.
    """
    if proposer.num_successors == 0 or has_table(drafter) or mesh_of(model) is not None:
        return None
    return PromptHarvester(model, proposer.num_successors, target.vocab_size)


def _refuse_lookahead(model: Model, way: ChosenWay) -> None:
    """Raise where a lookahead window was asked for and whole trees cannot be verified."""
    if way.way == "tree":
        return
    why = way.reasons.get("tree", f"Config(target={way.way!r}) asks for it")
    raise UnsupportedOptionError(
        f"lade does not support Config(lookahead=…) where drafts are not verified by 'tree'; "
        f"{type(model).__name__} verifies them by {way.way!r} here: {why}"
    )


def new_pool(config: Config | None) -> NGramPool:
    if config is None or config.max_ngram_size is None:
        return NGramPool()
    return NGramPool(max_ngram_size=config.max_ngram_size)


def _check_pool(pool: NGramPool | None, config: Config | None) -> None:
    if pool is None or config is None or config.max_ngram_size is None:
        return
    if config.max_ngram_size != pool.max_ngram_size:
        raise ValueError(
            f"expected Config(max_ngram_size={pool.max_ngram_size}) or None, as the pool has it, "
            f"got {config.max_ngram_size}"
        )


def _choose_budget(config: Config | None, profile: Profile, way: ChosenWay) -> Budget:
    if config is not None and config.stable_text:
        assert way.widths is not None
        num_cells = 0 if config.lookahead is None else config.lookahead.num_cells
        most = way.widths[0] - 1 - num_cells
        asked = config.max_draft_tokens
        return FixedBudget(most if asked is None else min(asked, most))
    if config is not None and config.max_draft_tokens is not None:
        return FixedBudget(config.max_draft_tokens)
    if config is not None and config.step_costs is not None:
        return PricedBudget(config.step_costs)
    return profile.budget(way.way, way.execution)


def _exact(
    text: Text,
    processors: Processors,
    do_sample: bool,
    vocab_size: int,
    device: torch.device,
    on_choice: OnChoice | None,
    num_ranked: int,
) -> Choice:
    """Return what chooses the very tokens that `generate` would."""
    if not do_sample and not processors and on_choice is None:
        return GreedyChoice(num_ranked)
    at_once = _is_waited_for(device) and not processors.need_prefix
    pick: Pick = Likeliest()
    if do_sample:
        pick = Race(text.num_rows, vocab_size, device, ahead=at_once)
    kind = ChoiceAtOnce if at_once else ProcessedChoice
    return kind(text, processors, pick, device, on_choice)


def _is_waited_for(device: torch.device) -> bool:
    """Tell whether each look at a result holds the host up until the device has caught up."""
    return device.type != "cpu"


def _rejection(
    text: Text, processors: Processors, device: torch.device, on_choice: OnChoice | None
) -> tuple[list[np.random.Generator], Choice]:
    """Return what draws the drafts of each row, and what accepts or rejects them.

    All follow from torch's default generator, so that `torch.manual_seed` repeats a call.
    """
    seeds = torch.randint(2**62, (text.num_rows, 2)).tolist()
    generators = [torch.Generator(device).manual_seed(seed) for seed, _ in seeds]
    rngs = [np.random.default_rng(seed) for _, seed in seeds]
    return rngs, RejectionChoice(text, processors, generators, device, on_choice)
