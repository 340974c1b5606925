"""The entry points `generate`, `decode`, `wrap` and `unwrap`: our loop inside `model.generate`.

All preparation (configs, masks, processors, criteria) is left to transformers.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from lade.compat import (
    CACHE_NAMES,
    MARKS_CACHES,
    Model,
    device_of_inputs,
    has_custom_generate,
    takes_ids_by_name,
    unwrapped,
    without_compiler,
)
from lade.config import Config
from lade.drafters.merged import takes_pool
from lade.drafting.drafter import Drafter
from lade.engine.engine import at_turn
from lade.errors import LadeError, PlainDecodingWarning, UnsupportedOptionError, in_one_line
from lade.hf.arithmetic import run
from lade.hf.assistance import by_itself, take_assistant
from lade.hf.call import Arguments, Call, OnStep, Predicted
from lade.hf.pools import Pools, pools_of
from lade.machine.generators import put_back, random_states
from lade.probing.profile import Profiles
from lade.probing.rules import refuse_encoder_decoder, refuse_sharded
from ngram_pool import NGramPool

_AnyModel = TypeVar("_AnyModel")
_TYPES_OF_IDS = (torch.int64, torch.int32)  # which torch's embeddings take, so plain decoding does


def generate(
    model: Model,
    input_ids: Tensor | None = None,
    *,
    pool: Pools | None = None,
    drafter: Drafter | None = None,
    config: Config | None = None,
    on_step: OnStep | None = None,
    prediction: Predicted | None = None,
    **generate_kwargs: Any,
) -> Any:
    """Generate as `model.generate(input_ids, **generate_kwargs)` does, in fewer forward passes.

    Args:
        model: a transformers causal LM, possibly wrapped by PEFT or `torch.compile`.
        input_ids: int64 [rows, num_tokens], batches padded on the left.
        pool: learns the prompt and the answer, and drafts from everything it has learned; pass the
            same pool again to reuse it. A read-only pool drafts and learns nothing. A named pool of
            a store is opened for the duration of the call. From a list, all pools draft at once; at
            most one may learn, the others must be read-only. If no pool learns, a new one does, for
            this call only.
        drafter: drafts instead of a pool, or makes a drafter for the call.
        config: settings; None for automatic ones.
        on_step: called with a `lade.stats.Step` after each step, once for each row.
        prediction: the probable answer, such as the file that is being edited: text, with
            `tokenizer=`, or token ids [num_tokens]. Only this call drafts from it, for all its
            rows, and no pool learns it. A wrong prediction does not change the text.
        generate_kwargs: anything that `model.generate` takes, including `streamer`. With
            `assistant_model`, `assistant_early_exit` or `use_mtp`, the pool and that model, the
            first layers, or the model's heads draft together (`lade.drafters`).

    Returns:
        The result of `generate`; with `return_dict_in_generate=True`, it has an attribute `stats`.

    Raises:
        TypeError: `model` cannot generate, or another argument has a wrong type.
        ValueError: more than one pool learns.
        UnsupportedModelError: the model cannot verify drafts by the requested method.
        UnsupportedOptionError: an option is not supported; nothing was generated.
    """
    arguments = Arguments(pool, drafter, config, on_step, prediction)
    if input_ids is not None:
        check_ids(input_ids)
    inner = _generating(model)
    args: tuple[Any, ...] = ()
    # PEFT's prompt learning takes a prompt only by name; a class with `*args` only by position.
    if input_ids is not None and takes_ids_by_name(inner):
        generate_kwargs["input_ids"] = input_ids
    elif input_ids is not None:
        args = (input_ids,)
    return _generate(inner, arguments, args, generate_kwargs)


def check_ids(input_ids: Any) -> None:
    """Raise a helpful error for common mistakes in place of token ids."""
    if isinstance(input_ids, Tensor):
        return
    ways_out = (
        (str, "tokenize it: inputs = tokenizer(text, return_tensors='pt')"),
        (Mapping, "pass its fields by name: lade.generate(model, **inputs)"),
        (Sequence, "make it a tensor: torch.tensor([token_ids])"),
    )
    way_out = next((f"; {way}" for kind, way in ways_out if isinstance(input_ids, kind)), "")
    raise TypeError(f"expected input_ids to be a tensor, got {type(input_ids).__name__}{way_out}")


def decode(
    model: Model,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    pool: Pools | None = None,
    drafter: Drafter | None = None,
    config: Config | None = None,
    on_step: OnStep | None = None,
    token_streamer: BaseStreamer | None = None,
    prediction: Predicted | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode inside `model.generate(..., custom_generate=lade.decode)`.

    `pool`, `drafter`, `config`, `on_step` and, as a list of token ids, `prediction` are as for
    `lade.generate`; pass them to `model.generate`. `token_streamer` is a streamer that gets the
    emitted tokens and the end.

    transformers drops `streamer` and `assistant_model` before it calls a custom function, so a
    `streamer` gets only the prompt, and an `assistant_model` is silently unused. Pass
    `token_streamer` and `drafter=lade.drafters.AssistantModel(…)` instead. `lade.generate` and
    `lade.wrap` do not have this limitation.
    """
    drafter = by_itself(model, drafter, generation_config)
    if isinstance(prediction, Tensor):  # transformers repeats tensors for samples of a prompt
        raise TypeError("expected a list of token ids as the prediction, got a tensor")
    arguments = Arguments(pool, drafter, config, on_step, prediction).checked()
    prepared = (logits_processor, stopping_criteria, generation_config)
    return _run(Call(model, input_ids, *prepared, model_kwargs, arguments, token_streamer))


def _run(call: Call) -> Any:
    """Check the model and the options of `generate`, then decode."""
    refuse_encoder_decoder(call.model)
    _refuse_options(call.model, call.options)
    if call.input_ids.dtype not in _TYPES_OF_IDS:
        raise TypeError(f"expected input_ids of int64 or int32, got {call.input_ids.dtype}")
    if not len(call.input_ids):
        raise ValueError(f"expected input_ids of one row or more, got {[*call.input_ids.shape]}")
    with at_turn():  # in a callback of a call, too
        return run(call)


def wrap(
    model: _AnyModel,
    *,
    pool: Pools | None = None,
    drafter: Drafter | None = None,
    config: Config | None = None,
    shares_text: bool = False,
) -> _AnyModel:
    """Make `model.generate`, and everything that calls it, decode with lade; return the model.

    `model.generate` then also takes `pool`, `drafter`, `config`, `on_step` and `prediction`, each
    for one call. Wrapping again replaces earlier settings. The class is not changed; `unwrap`
    undoes it.

    Text is private to its call: each call has its own pool. The speed of an answer reveals the text
    that its pool has seen, so a pool shared by strangers reveals their text to each other.

    Args:
        model: a transformers causal LM, possibly wrapped by PEFT or `torch.compile`.
        pool: shared by all calls without a `pool` or `drafter` argument; also a list of pools, as
            for `generate`.
        drafter: drafts for all calls without a `pool` or `drafter` argument. Copies of the model do
            not get it, because it may hold text.
        config: settings of all calls without a `config` argument.
        shares_text: whether all calls share a new pool, so that later answers benefit from earlier
            ones; suits a machine with one user.

    Raises:
        TypeError: `model` cannot generate, or another argument has a wrong type.
        ValueError: `drafter` and pools are given, but the drafter uses no pool.
    """
    inner = _generating(model)
    Arguments(pool, drafter, config).checked()
    if drafter is not None and shares_text and not takes_pool(drafter):
        raise ValueError("expected shares_text=True without a drafter, which drafts by no pool")
    if pool is None and shares_text:
        pool = NGramPool()
    before = vars(inner).get("generate")
    if isinstance(before, _WrappedGenerate):
        before = before.before
    inner.generate = _WrappedGenerate(inner, pool, config, before, drafter)
    return model


def unwrap(model: _AnyModel) -> _AnyModel:
    """Restore the original `generate` of a wrapped model; return the model.

    Raises:
        ValueError: the model is not wrapped.
    """
    inner = without_compiler(model)
    wrapped = getattr(inner, "__dict__", {}).get("generate")
    if not isinstance(wrapped, _WrappedGenerate):
        raise ValueError(
            f"expected a model that lade.wrap was called on, got {type(inner).__name__}"
        )
    if wrapped.before is None:
        del inner.generate
    else:
        inner.generate = wrapped.before
    return model


@dataclass(eq=False, repr=False)
class _WrappedGenerate:
    """The `generate` of a wrapped model, copied and pickled with the model."""

    is_lades: ClassVar[bool] = True  # how other code recognises it

    model: Model
    pool: Pools | None  # shared by its calls
    config: Config | None  # of its calls
    before: Callable[..., Any] | None  # the model's own attribute `generate`, if it had one
    drafter: Drafter | None  # of its calls

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped method, such as `__wrapped__` or `__func__`."""
        if name == "model":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(_generate_of(self.model), name)

    @property
    def __self__(self) -> Model:
        return self.model

    def __call__(self, *args: Any, **generate_kwargs: Any) -> Any:
        """Generate; takes the arguments of `generate` and of `lade.generate`."""
        given = Arguments(*(generate_kwargs.pop(name, None) for name in Arguments._fields))
        custom = generate_kwargs.get("custom_generate")
        if custom is not None:  # the caller has chosen a decoding function
            if custom is decode and "assistant_model" in generate_kwargs:
                # transformers would drop it.
                drafter = take_assistant(self.model, given.drafter, generate_kwargs)
                given = given._replace(drafter=drafter)
            mine: dict[str, Any] = given._asdict()
            generate_kwargs |= {name: each for name, each in mine.items() if each is not None}
            return _generate_of(self.model)(*args, **generate_kwargs)
        if given.pool is None and given.drafter is None:
            given = given._replace(pool=self.pool)
            if generate_kwargs.get("assistant_model") is None:  # else that one drafts
                given = given._replace(drafter=self.drafter)
        if given.config is None:
            given = given._replace(config=self.config)
        return _generate(self.model, given, args, generate_kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out all text: a copy may have another user.

        A pool that learns becomes an empty one. Named pools, read-only pools and drafters stay with
        the original.
        """
        emptied = [
            NGramPool(pool.capacity_tokens, pool.max_ngram_size)
            for pool in pools_of(self.pool)
            if isinstance(pool, NGramPool) and not pool.is_read_only
        ]
        return {**vars(self), "pool": emptied[0] if emptied else None, "drafter": None}


def _generating(model: Model) -> Model:
    """Return the model without its `torch.compile` wrapper, or raise if it cannot generate."""
    inner = without_compiler(model)
    can_generate = callable(getattr(type(inner), "generate", None))
    if not (isinstance(inner, nn.Module) and can_generate and hasattr(inner, "config")):
        got = repr(inner) if isinstance(inner, str) else type(inner).__name__
        raise TypeError(
            f"expected a transformers causal LM, which has a method generate, got {got[:100]}"
        )
    return inner


def _generate(
    model: Model, arguments: Arguments, args: tuple[Any, ...], generate_kwargs: dict[str, Any]
) -> Any:
    """Call the model's `generate` with lade's decoding function."""
    if getattr(generate_kwargs.get("custom_generate"), "is_lades", False):
        # The model's `generate` has called this wrapper again, with lade's function in place.
        return type(model).generate(model, *args, **generate_kwargs)
    arguments = arguments.checked(generate_kwargs.get("tokenizer"))
    original = _generate_of(model)
    args, generate_kwargs = _by_name(original, args, generate_kwargs)
    standard = partial(original, *args, **generate_kwargs)
    _refuse_arguments(model, generate_kwargs)
    Profiles.of(unwrapped(model))  # made here, for a twin of the model to share
    drafter = take_assistant(model, arguments.drafter, generate_kwargs)
    arguments = arguments._replace(drafter=drafter)
    twin = _take_stop_strings(model, generate_kwargs)
    streamer = generate_kwargs.get("streamer")
    passed = (generate_kwargs.get(name) for name in CACHE_NAMES)  # an empty cache is false
    may_bring_cache = MARKS_CACHES or any(each is not None for each in passed)

    def strategy(
        model: Model,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        # Decode with the model passed in: the outer one may be PEFT's wrapper.
        prepared = (logits_processor, stopping_criteria, generation_config, model_kwargs)
        drafter = by_itself(model, arguments.drafter, generation_config)
        given = arguments._replace(drafter=drafter)
        return _run(Call(model, input_ids, *prepared, given, streamer, may_bring_cache))

    strategy.is_lades = True  # type: ignore[attr-defined]
    speculate = partial(_generate_of(twin), *args, **generate_kwargs)
    if not has_custom_generate(model):
        return speculate(custom_generate=strategy)
    return _by_custom_generate(model, speculate, strategy, standard)


def _by_custom_generate(
    model: Model,
    speculate: "partial[Any]",
    strategy: Callable[..., Any],
    standard: "partial[Any]",
) -> Any:
    """Call a model's custom `generate`, without lade if it does not use the decoding function.

    A custom `generate` may refuse the function, or drop it together with changed options.
    """
    is_used = False
    given = standard.keywords.get("stopping_criteria") or ()
    added = [
        each for each in speculate.keywords.get("stopping_criteria") or () if each not in given
    ]

    def noted(*args: Any, stopping_criteria: StoppingCriteriaList, **kwargs: Any) -> Any:
        nonlocal is_used
        if not all(each in stopping_criteria for each in added):
            raise LadeError("it drops stopping criteria")
        is_used = True
        return strategy(*args, stopping_criteria=stopping_criteria, **kwargs)

    noted.is_lades = True  # type: ignore[attr-defined]
    device = device_of_inputs(model)
    states = random_states(device)
    is_whole = False
    try:
        output = speculate(custom_generate=noted)
        if is_used:
            return output
        reason = "its custom `generate` drops the decoding function"
        is_whole = speculate.keywords.keys() == standard.keywords.keys()
    except Exception as failure:  # of the custom `generate`
        if is_used:
            raise
        reason = f"its custom `generate` takes no decoding function ({in_one_line(failure)})"
    if not is_whole:
        put_back(device, states)
        output = standard()  # raises the caller's error if the call itself is invalid
    text = f"lade falls back to standard decoding for {type(model).__name__}: {reason}"
    warnings.warn(text, PlainDecodingWarning, stacklevel=4)
    return output


def _generate_of(model: Model) -> Callable[..., Any]:
    """Return the `generate` that a model would have without lade."""
    original: Callable[..., Any] | None = vars(model).get("generate")
    if isinstance(original, _WrappedGenerate):
        original = original.before
    return MethodType(type(model).generate, model) if original is None else original


def _by_name(
    original: Callable[..., Any], args: tuple[Any, ...], generate_kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn positional arguments into keyword arguments where possible, so they can be inspected.

    Positional arguments that `original` takes as `*args`, as PEFT's `generate` does, get the names
    of transformers' own `generate`, except the first, which stays positional.
    """
    taken = [*inspect.signature(original).parameters.values()]
    names = [each.name for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD]
    first = 0
    if any(each.kind is each.VAR_POSITIONAL for each in taken):
        first = 0 if names else 1
        names += [*inspect.signature(GenerationMixin.generate).parameters][1:][len(names) :]
    named = dict(zip(names[first:], args[first:], strict=False))
    twice = named.keys() & generate_kwargs.keys()
    if twice:
        raise TypeError(f"generate() got multiple values for argument {min(twice)!r}")
    return args[:first] + args[len(names) :], generate_kwargs | named


# --- options that cannot be honoured, and stop strings --------------------------------------------


def _refuse_arguments(model: Model, generate_kwargs: dict[str, Any]) -> None:
    """Raise for arguments of `generate` that are unsupported but would never reach `decode`."""
    configs = (model.generation_config, generate_kwargs.get("generation_config"))
    heals = any(config.token_healing for config in configs if config is not None)
    asked = {
        "custom_generate": generate_kwargs.pop("custom_generate", None) is not None,
        "cache_implementation='paged'": generate_kwargs.get("cache_implementation") == "paged",
        "synced_gpus": generate_kwargs.get("synced_gpus"),
        "token_healing": generate_kwargs.get("token_healing", heals),
    }
    for name in asked:
        if asked[name]:
            raise UnsupportedOptionError(
                f"lade.generate does not support {name} yet{_way_out(model)}"
            )


def _take_stop_strings(model: Model, generate_kwargs: dict[str, Any]) -> Model:
    """Turn `stop_strings` and `tokenizer` into a criterion: a custom function gets neither.

    Returns:
        The model whose `generate` to call: `model`, or, if its generation config has stop strings,
        a twin without them that shares everything else. transformers would ask for the missing
        tokenizer, and other threads may be using the model's config.
    """
    tokenizer = generate_kwargs.pop("tokenizer", None)
    of_call = generate_kwargs.get("generation_config")
    asked = generate_kwargs.pop("stop_strings", None)
    if of_call is not None and of_call.stop_strings is not None:
        asked = of_call.stop_strings if asked is None else asked
        of_call = generate_kwargs["generation_config"] = copy.deepcopy(of_call)
        of_call.stop_strings = None
    of_model = model.generation_config
    stop_strings = of_model.stop_strings if asked is None else asked
    if stop_strings is None:
        return model
    if tokenizer is None:
        raise ValueError("expected tokenizer= beside stop_strings, got none")
    criteria = list(generate_kwargs.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
    generate_kwargs["stopping_criteria"] = StoppingCriteriaList(criteria)
    if of_model.stop_strings is None:
        return model
    twin = copy.copy(model)
    twin.generation_config = copy.deepcopy(of_model)
    twin.generation_config.stop_strings = None
    return twin


def _refuse_options(model: Model, config: GenerationConfig) -> None:
    """Raise for options that would change the text or the output and cannot be honoured."""
    mode = config.get_generation_mode().value
    refuse_sharded(model)
    # Early exit, heads and prompt lookup are ways of drafting; other modes decode differently.
    num_lookup = config.prompt_lookup_num_tokens
    if num_lookup is not None and num_lookup < 1:
        raise ValueError(f"expected prompt_lookup_num_tokens of at least 1, got {num_lookup!r}")
    if mode not in ("greedy_search", "sample", "assisted_generation"):
        raise UnsupportedOptionError(
            f"lade does not support the generation mode {mode} yet{_way_out(model)}"
        )


def _way_out(model: Model) -> str:
    """Return a hint at the model's original `generate`, for an error's end."""
    if getattr(vars(model).get("generate"), "is_lades", False):
        return "; lade.unwrap(model) restores the model's original generate"
    return "; call model.generate for it"
