"""transformers in and out: the three doors, what is refused, where to stop. No algorithm here.

`generate` and `wrap` re-enter `model.generate` with `decode` as its `custom_generate`, so all of
transformers' preparation (configs, masks, processors, criteria) is transformers' own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.cache_utils import DynamicCache
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from lade.budget import Budget, FixedBudget
from lade.choose import Choice, GreedyChoice, Prefix, ProcessedGreedyChoice
from lade.config import Config
from lade.decoding import decode_row
from lade.drafting import Drafter, PoolDrafter
from lade.errors import UnsupportedOptionError
from lade.stats import DecodeStats, Step
from lade.target import Model, Profile, TreeTarget, full_attention_layers, profile_of
from ngram_pool import NGramPool

OnStep = Callable[[Step], None]


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """What `return_dict_in_generate=True` returns: transformers' own output and our `stats`."""

    stats: DecodeStats = None  # type: ignore[assignment]  # always set; ModelOutput wants a default


# --- the three doors ------------------------------------------------------------------------


def generate(
    model: Model,
    input_ids: Tensor | None = None,
    *,
    pool: NGramPool | None = None,
    drafter: Drafter | None = None,
    config: Config | None = None,
    on_step: OnStep | None = None,
    **generate_kwargs: Any,
) -> Any:
    """Generate as `model.generate(input_ids, **generate_kwargs)` does, with fewer forwards.

    Args:
        model: a transformers causal LM.
        input_ids: int64 [1, num_tokens].
        pool: learns the prompt and the answer, and drafts from all it has learned; pass the same
            one again to keep it. A new one is made if None.
        drafter: drafts instead of a pool.
        config: fixes what is automatic otherwise.
        on_step: called with a `lade.stats.Step` after each step.
        generate_kwargs: anything that `model.generate` takes, `streamer` included.

    Returns:
        What `generate` returns; with `return_dict_in_generate=True` it has a field `stats` more.

    Raises:
        UnsupportedModelError: the model cannot verify drafts.
        UnsupportedOptionError: an option is not supported; nothing was generated.
    """
    refuse_unsupported_arguments(generate_kwargs)
    _prepare_stop_strings(generate_kwargs)
    model = _without_compiler(model)
    strategy = partial(
        decode,
        pool=pool,
        drafter=drafter,
        config=config,
        on_step=on_step,
        token_streamer=generate_kwargs.get("streamer"),
    )
    if input_ids is not None:
        generate_kwargs["input_ids"] = input_ids
    # The class's generate: the instance may carry the one that `wrap` put there.
    return type(model).generate(model, custom_generate=strategy, **generate_kwargs)


def wrap(model: Model, *, pool: NGramPool | None = None, config: Config | None = None) -> Model:
    """Let `model.generate`, and all that calls it, decode with lade from now on; return the model.

    All calls share one pool, `pool` or a new one, so later answers profit from earlier ones.
    Wrapping again replaces pool and config. The class is not touched; `unwrap` undoes it.
    """
    _check_pool(pool, config)
    inner = _without_compiler(model)
    inner._lade_wrapping = (pool if pool is not None else _new_pool(config), config)
    inner.generate = MethodType(_wrapped_generate, inner)  # a method: a deep copy has its own model
    return model


def unwrap(model: Model) -> Model:
    """Give a wrapped model its own `generate` back; return the model.

    Raises:
        ValueError: the model is not wrapped.
    """
    inner = _without_compiler(model)
    if "_lade_wrapping" not in vars(inner):
        raise ValueError(
            f"expected a model that lade.wrap was called on, got {type(inner).__name__}"
        )
    del inner.generate, inner._lade_wrapping
    return model


def _without_compiler(model: Model) -> Model:
    """Return the model inside of what `torch.compile` returned; `generate` runs that one too."""
    return getattr(model, "_orig_mod", model)


def _wrapped_generate(
    model: Model,
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    **generate_kwargs: Any,
) -> Any:
    """Take what `generate` takes, by place or by name, and hand it on with the model's pool."""
    pool, config = model._lade_wrapping
    by_place = {
        "inputs": inputs,
        "generation_config": generation_config,
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
    }
    generate_kwargs |= {name: value for name, value in by_place.items() if value is not None}
    return generate(model, pool=pool, config=config, **generate_kwargs)


# --- the strategy ---------------------------------------------------------------------------


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
    full_attention_layers(model)
    refuse_unsupported_options(model, generation_config, input_ids, model_kwargs)
    drafter = _choose_drafter(pool, drafter, config)
    profile = profile_of(model)
    max_length = generation_config.max_length
    target = TreeTarget(model, input_ids, model_kwargs, profile.num_layers, max_length)
    # Learned positions end there, and a draft must not ask for more than plain decoding would.
    text_config = model.config.get_text_config(decoder=True)
    last_position = getattr(text_config, "max_position_embeddings", None) or max_length
    prompt_ids: list[int] = input_ids[0].tolist()

    def emit(step: Step) -> None:
        if token_streamer is not None:
            for token_id in step.token_ids:
                token_streamer.put(torch.tensor([token_id]))
        if on_step is not None:
            on_step(step)

    committed, stats = decode_row(
        prompt_ids,
        target,
        drafter,
        _choose_choice(logits_processor, input_ids.device),
        _choose_budget(config, profile),
        min(max_length, last_position),
        _StopRule(stopping_criteria, input_ids.device),
        emit,
    )
    if token_streamer is not None:
        token_streamer.end()
    new_ids = torch.tensor([committed[len(prompt_ids) :]], device=input_ids.device)
    sequences = torch.cat([input_ids, new_ids], dim=1)
    if not generation_config.return_dict_in_generate:
        return sequences
    return GenerateOutput(sequences=sequences, past_key_values=target.cache, stats=stats)


def _choose_drafter(
    pool: NGramPool | None, drafter: Drafter | None, config: Config | None
) -> Drafter:
    if drafter is not None:
        if pool is not None:
            raise ValueError("expected pool or drafter, got both")
        if config is not None and (config.max_candidates or config.max_ngram_size):
            raise ValueError(
                "expected no Config(max_candidates=…) or Config(max_ngram_size=…) beside a "
                "drafter: they are settings of the pool"
            )
        return drafter
    _check_pool(pool, config)
    max_candidates = config.max_candidates if config is not None else None
    return PoolDrafter(pool if pool is not None else _new_pool(config), max_candidates)


def _new_pool(config: Config | None) -> NGramPool:
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


def _choose_budget(config: Config | None, profile: Profile) -> Budget:
    if config is None or config.max_draft_tokens is None:
        return profile.budget
    return FixedBudget(config.max_draft_tokens)


def _choose_choice(logits_processor: LogitsProcessorList, device: torch.device) -> Choice:
    if not logits_processor:
        return GreedyChoice()
    return ProcessedGreedyChoice(logits_processor, device)


class _StopRule:
    """Every stop condition, asked after each token, exactly where `generate` asks.

    Length and EOS, which every call has, are compared as integers; other criteria get tensors.
    """

    def __init__(self, criteria: StoppingCriteriaList, device: torch.device) -> None:
        self._prefix = Prefix(device)
        self._max_length: int | None = None
        self._eos_token_ids: set[int] = set()
        self._others = []
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                limits = [self._max_length, criterion.max_length]
                self._max_length = min(limit for limit in limits if limit is not None)
            elif type(criterion) is EosTokenCriteria:
                self._eos_token_ids.update(criterion.eos_token_id.tolist())
            else:
                self._others.append(criterion)

    def __call__(self, committed: list[int]) -> bool:
        finished = committed[-1] in self._eos_token_ids
        if self._max_length is not None and len(committed) >= self._max_length:
            finished = True
        if self._others:
            input_ids = self._prefix.of(committed)
            for criterion in self._others:
                finished = bool(criterion(input_ids, None)) or finished
        return finished


# --- what is refused ------------------------------------------------------------------------


# transformers drops these before it calls a custom function, or turns elsewhere.
_DROPPED = ("assistant_model", "assistant_tokenizer", "custom_generate", "past_key_values")


def refuse_unsupported_arguments(generate_kwargs: dict[str, Any]) -> None:
    """Raise for arguments of `generate` that would never reach us."""
    refused = [name for name in _DROPPED if generate_kwargs.pop(name, None) is not None]
    if generate_kwargs.get("cache_implementation") == "paged":
        refused.append("cache_implementation='paged'")
    refused += [name for name in ("synced_gpus", "token_healing") if generate_kwargs.get(name)]
    if refused:
        raise UnsupportedOptionError(f"lade.generate does not support {refused[0]} yet")


def _prepare_stop_strings(generate_kwargs: dict[str, Any]) -> None:
    """Turn `stop_strings` and `tokenizer` into a criterion: a custom function gets neither."""
    tokenizer = generate_kwargs.pop("tokenizer", None)
    stop_strings = generate_kwargs.pop("stop_strings", None)
    config = generate_kwargs.get("generation_config")
    if config is not None and config.stop_strings:
        raise UnsupportedOptionError(
            "lade.generate does not support stop_strings in a generation_config yet; pass "
            "stop_strings= and tokenizer= instead"
        )
    if stop_strings is None:
        return
    if tokenizer is None:
        raise ValueError("expected tokenizer= beside stop_strings=, got none")
    criteria = list(generate_kwargs.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
    generate_kwargs["stopping_criteria"] = StoppingCriteriaList(criteria)


def refuse_unsupported_options(
    model: Model,
    generation_config: GenerationConfig,
    input_ids: Tensor,
    model_kwargs: dict[str, Any],
) -> None:
    """Raise for what would change the text or the output and cannot be honoured yet."""
    config = generation_config
    reasons = {
        f"num_beams={config.num_beams}": (config.num_beams or 1) > 1,
        f"num_return_sequences={config.num_return_sequences}": (
            (config.num_return_sequences or 1) > 1
        ),
        "do_sample=True": config.do_sample,
        f"a batch of {input_ids.shape[0]} rows": input_ids.shape[0] != 1,
        f"generation mode {config.get_generation_mode().value}": (
            config.get_generation_mode().value != "greedy_search"
        ),
        "use_cache=False": config.use_cache is False,
        f"cache_implementation={config.cache_implementation!r}": (
            config.cache_implementation not in (None, "dynamic")
        ),
        "prefill_chunk_size": config.prefill_chunk_size is not None,
        "models sharded by FSDP or DeepSpeed ZeRO-3": (
            is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
        ),
    }
    if config.return_dict_in_generate:
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
            reasons[name] = bool(getattr(config, name))
    reasons["inputs_embeds without input_ids"] = input_ids.shape[1] == 0
    cache = model_kwargs.get("past_key_values")
    is_foreign = getattr(cache, "_is_user_defined", False) or type(cache) is not DynamicCache
    reasons["past_key_values"] = cache is not None and (is_foreign or cache.get_seq_length() > 0)
    known = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
    for name, value in model_kwargs.items():
        reasons[f"the model input {name}"] = name not in known and value is not None
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedOptionError(f"lade does not support {reason} yet")
