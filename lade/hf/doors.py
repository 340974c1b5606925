"""`generate`, `wrap` and `unwrap`: what re-enters `model.generate` with our strategy in it.

All of transformers' preparation (configs, masks, processors, criteria) is transformers' own.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from lade.compat import Model, without_compiler
from lade.config import Config
from lade.drafting.drafter import Drafter
from lade.hf.arguments import Arguments, OnStep
from lade.hf.generation import Generation
from lade.hf.options import (
    refuse_unsupported_arguments,
    refuse_unsupported_options,
    take_stop_strings,
)
from lade.probing.profile import Profiles
from lade.probing.rules import refuse_encoder_decoder
from ngram_pool import NGramPool


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
        model: a transformers causal LM, or what PEFT or `torch.compile` made of one.
        input_ids: int64 [rows, num_tokens], batches padded on the left.
        pool: learns the prompt and the answer, and drafts from all it has learned; pass the same
            one again to keep it. A new one is made if None.
        drafter: drafts instead of a pool.
        config: fixes what is automatic otherwise.
        on_step: called with a `lade.stats.Step` after each step.
        generate_kwargs: anything that `model.generate` takes, `streamer` included.

    Returns:
        What `generate` returns; with `return_dict_in_generate=True` it has a field `stats` more.

    Raises:
        TypeError: `model` cannot generate, or another argument is of a wrong type.
        UnsupportedModelError: the model cannot verify drafts in the way that `config` asks for.
        UnsupportedOptionError: an option is not supported; nothing was generated.
    """
    arguments = Arguments(pool, drafter, config, on_step)
    if input_ids is not None:
        generate_kwargs["input_ids"] = input_ids
    return _generate(_generating(model), arguments, (), generate_kwargs)


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
    arguments = Arguments(pool, drafter, config, on_step)
    arguments.check()
    return Generation(
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        arguments,
        token_streamer,
        model_kwargs,
    ).run()


def wrap(
    model: Model,
    *,
    pool: NGramPool | None = None,
    config: Config | None = None,
    shares_text: bool = False,
) -> Model:
    """Let `model.generate`, and all that calls it, decode with lade from now on; return the model.

    `model.generate` takes `pool`, `drafter`, `config` and `on_step` besides, for one call each.
    Wrapping again replaces what was given before. The class is not touched; `unwrap` undoes it.

    Text is private to its call: each has a pool of its own. How fast an answer comes tells what its
    pool has seen, so a pool that strangers share tells each what the others wrote.

    Args:
        model: a transformers causal LM, or what PEFT or `torch.compile` made of one.
        pool: that all calls without one of their own share.
        config: of all calls without one of their own.
        shares_text: share a new pool among all calls, as on a machine with one user, where later
            answers profit from earlier ones.

    Raises:
        TypeError: `model` cannot generate, or another argument is of a wrong type.
    """
    inner = _generating(model)
    Arguments(pool, None, config).check()
    if pool is None and shares_text:
        pool = NGramPool()
    before = vars(inner).get("generate")
    if isinstance(before, _WrappedGenerate):
        before = before.before
    inner.generate = _WrappedGenerate(inner, pool, config, before)
    return model


def unwrap(model: Model) -> Model:
    """Give a wrapped model its own `generate` back; return the model.

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


class _WrappedGenerate:
    """The `generate` of a wrapped model; it goes where the model goes, copied or pickled.

    Args:
        model: the wrapped one.
        pool: that its calls share, if they share one.
        config: of its calls.
        before: what the model had in this place, which is not its class's.
    """

    is_lades = True  # what others know it by

    def __init__(
        self,
        model: Model,
        pool: NGramPool | None,
        config: Config | None,
        before: Callable[..., Any] | None,
    ) -> None:
        self.pool = pool
        self.config = config
        self.before = before
        self._model = model

    def __call__(
        self,
        *args: Any,
        pool: NGramPool | None = None,
        drafter: Drafter | None = None,
        config: Config | None = None,
        on_step: OnStep | None = None,
        **generate_kwargs: Any,
    ) -> Any:
        """Take what `generate` takes, and what `lade.generate` takes besides."""
        if generate_kwargs.get("custom_generate") is not None:
            # The caller has chosen another way of decoding; it may be lade's own.
            mine = {"pool": pool, "drafter": drafter, "config": config, "on_step": on_step}
            generate_kwargs |= {name: each for name, each in mine.items() if each is not None}
            return _generate_of(self._model)(*args, **generate_kwargs)
        if pool is None and drafter is None:
            pool = self.pool
        config = self.config if config is None else config
        return _generate(
            self._model, Arguments(pool, drafter, config, on_step), args, generate_kwargs
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was written: a copy of the model is not the model's user."""
        pool = self.pool
        if pool is not None:
            pool = NGramPool(pool.capacity_tokens, pool.max_ngram_size)
        return {**vars(self), "pool": pool}


def _generating(model: Model) -> Model:
    """Return the model inside of what `torch.compile` made of it, or raise where it is none."""
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
    """Call the model's own `generate` with our strategy in it."""
    if getattr(generate_kwargs.get("custom_generate"), "is_lades", False):
        # The model has a generate of its own that calls us: we are on our way already.
        return type(model).generate(model, *args, **generate_kwargs)
    arguments.check()
    own = _generate_of(model)
    args, generate_kwargs = _by_name(own, args, generate_kwargs)
    refuse_unsupported_arguments(model, generate_kwargs)
    Profiles.of(model)  # a twin of the model shares them
    twin = take_stop_strings(model, generate_kwargs)
    if twin is not model:
        own = _generate_of(twin)
    streamer = generate_kwargs.get("streamer")

    def strategy(model: Model, input_ids: Tensor, **prepared_kwargs: Any) -> Any:
        # The model handed over is the one to decode: PEFT's is around it.
        return decode(
            model,
            input_ids,
            pool=arguments.pool,
            drafter=arguments.drafter,
            config=arguments.config,
            on_step=arguments.on_step,
            token_streamer=streamer,
            **prepared_kwargs,
        )

    strategy.is_lades = True  # type: ignore[attr-defined]
    return own(*args, custom_generate=strategy, **generate_kwargs)


def _generate_of(model: Model) -> Callable[..., Any]:
    """Return the `generate` that a model has without lade."""
    own: Callable[..., Any] | None = vars(model).get("generate")
    if isinstance(own, _WrappedGenerate):
        own = own.before
    return partial(type(model).generate, model) if own is None else own


def _by_name(
    own: Callable[..., Any], args: tuple[Any, ...], generate_kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments by name where they have one, for those that are looked at here.

    What a `generate` takes as `*args`, as PEFT's does, has the names of transformers' own; but the
    first is left in its place.
    """
    try:
        taken = [*inspect.signature(own).parameters.values()]
    except (TypeError, ValueError):  # of code that is not Python
        return args, generate_kwargs
    by_place = [each for each in taken if each.kind <= each.POSITIONAL_OR_KEYWORD]
    takes_more = any(each.kind is each.VAR_POSITIONAL for each in taken)
    usual = [*inspect.signature(GenerationMixin.generate).parameters][1:]
    in_place, named = [], {}
    for place, value in enumerate(args):
        if place < len(by_place):
            if by_place[place].kind is inspect.Parameter.POSITIONAL_ONLY:
                in_place.append(value)
            else:
                named[by_place[place].name] = value
        elif takes_more and 0 < place < len(usual):
            named |= {} if value is None else {usual[place]: value}
        else:
            in_place.append(value)
    twice = named.keys() & generate_kwargs.keys()
    if twice:
        raise TypeError(f"generate() got multiple values for argument {min(twice)!r}")
    return tuple(in_place), generate_kwargs | named
