"""`Call`: one call of `generate`, what transformers prepared for it, and what follows from that."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StaticCache,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from lade.compat import Model, has_adapters_by_row, may_be_users, start_compiler
from lade.config import Config, Execution
from lade.drafters.merged import takes_pool
from lade.drafting.drafter import Drafter
from lade.errors import UnsupportedModelError
from lade.hf.pools import Pools, pools_of
from lade.probing.profile import Profile, profile_of
from lade.probing.rules import Lengths, lengths_of
from lade.probing.user_code import is_users, user_code_around
from lade.sampling.processors import Processors
from lade.stats import Step
from lade.targets.inputs import is_text_alone
from lade.targets.rollback import cache_in
from ngram_pool.arrays import token_ids_of

OnStep = Callable[[Step], None]
Predicted = str | Sequence[int] | Tensor

_NO_TIME = "max_time leaves no time to compile kernels and check the model; call lade.warm_up first"


class Arguments(NamedTuple):
    """The arguments that `generate` itself does not take."""

    pool: Pools | None = None
    drafter: Drafter | None = None
    config: Config | None = None
    on_step: OnStep | None = None
    prediction: Predicted | None = None

    def checked(self, tokenizer: Any = None) -> "Arguments":
        """Return the same with the prediction as token ids, None if it is empty.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: arguments contradict each other, more than one pool would learn, or the
                prediction is invalid.
        """
        pool, drafter, config, on_step, prediction = self
        pools_of(pool)
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"expected config to be a lade.Config, got {config!r}")
        if on_step is not None and not callable(on_step):
            raise TypeError(f"expected on_step to be callable, got {on_step!r}")
        if drafter is not None and not isinstance(drafter, Drafter):
            raise TypeError(
                f"expected drafter to be an object of a subclass of lade.Drafter, got {drafter!r}"
            )
        if drafter is not None and not takes_pool(drafter):
            if pool is not None:
                raise ValueError(
                    "expected pool or drafter, got both; to draft by both, pass "
                    "drafter=lade.drafters.Merged([lade.drafters.CallPool(), drafter])"
                )
            if config is not None and config.max_candidates:
                raise ValueError(
                    "expected no Config(max_candidates=…) beside a drafter: it is a setting of the "
                    "pool"
                )
        if prediction is None:
            return self
        return self._replace(prediction=predicted_ids(prediction, tokenizer) or None)


def predicted_ids(prediction: Predicted, tokenizer: Any = None) -> tuple[int, ...]:
    """Return the ids of an argument `prediction`.

    Args:
        prediction: text, or ids [num_tokens].
        tokenizer: encodes text; None if there is none.

    Raises:
        TypeError: the prediction is neither text nor ids, or ids are not integers.
        ValueError: it is text, but there is no tokenizer; or ids are negative or not [num_tokens].
    """
    if isinstance(prediction, str):
        if tokenizer is None:
            raise ValueError(
                "expected tokenizer= beside a prediction of text, got none; with "
                "custom_generate=lade.decode, which gets no tokenizer, pass token ids"
            )
        prediction = tokenizer(prediction, add_special_tokens=False)["input_ids"]
    ids: Any = prediction.tolist() if isinstance(prediction, Tensor) else prediction
    return tuple(token_ids_of("prediction, as text or token ids,", ids).tolist())


@dataclass(frozen=True)
class Call:
    """Everything that one call of `generate` prepared, and what follows from that."""

    model: Model
    input_ids: Tensor  # int64 or int32 [rows, num_tokens]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    options: GenerationConfig
    model_kwargs: dict[str, Any]  # model inputs of the prefill
    arguments: Arguments
    streamer: BaseStreamer | None  # gets the emitted tokens and the end
    may_bring_cache: bool = True  # whether the caller may have passed a cache

    @cached_property
    def config(self) -> Config:
        """The given config, or the defaults."""
        return self.arguments.config or Config()

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return int(self.input_ids.shape[0])

    @cached_property
    def lengths(self) -> Lengths:
        """The extent of the call, in positions and in cache slots."""
        return lengths_of(self.input_ids, self.options, self.model_kwargs)

    @cached_property
    def cache(self) -> Any:
        """The cache among the model inputs, or None."""
        return cache_in(self.model_kwargs)

    @property
    def is_users_cache(self) -> bool:
        """Whether the caller may have passed the cache, and may continue from it."""
        has_one = self.may_bring_cache and self.cache is not None
        return has_one and may_be_users(self.cache)

    # --- what is returned -----------------------------------------------------------------------

    @property
    def returns_dict(self) -> bool:
        """Whether the result is a dict, and not only tokens."""
        return bool(self.options.return_dict_in_generate)

    @property
    def wanted_scores(self) -> list[str]:
        """Names of the scores in the result: "scores", "logits", both or none."""
        return [name for name in ("scores", "logits") if self._returns(name)]

    @property
    def returns_states(self) -> bool:
        """Whether the result has hidden states or attentions."""
        return self._returns("hidden_states") or self._returns("attentions")

    def _returns(self, name: str) -> bool:
        return self.returns_dict and bool(getattr(self.options, f"output_{name}"))

    # --- where it ends --------------------------------------------------------------------------

    @property
    def is_timed(self) -> bool:
        """Whether the call has `max_time`."""
        return any(isinstance(each, MaxTimeCriteria) for each in self.criteria)

    @cached_property
    def pad_token_id(self) -> int | None:
        """The token behind the end of a row; without one, a row continues until all have ended."""
        has_eos = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        pad_token = self.options._pad_token_tensor if has_eos else None
        return None if pad_token is None else int(pad_token)

    @cached_property
    def stops_see_rows(self) -> bool:
        """Whether some stop criteria see several rows at once."""
        by_length = MaxLengthCriteria, EosTokenCriteria
        kinds = {type(each) for each in self.criteria}.difference(by_length)
        takes_rows = not kinds or (self.pad_token_id is not None and kinds == {StopStringCriteria})
        return self.num_rows > 1 and not takes_rows

    # --- its model ------------------------------------------------------------------------------

    @cached_property
    def execution(self) -> Execution:
        """How forwards that verify trees are to be executed."""
        is_compiled = (  # by `generate`
            type(self.cache) is StaticCache
            and self.input_ids.device.type == "cuda"
            and not self.options.disable_compile
        )
        return self.config.execution or ("static" if is_compiled else "eager")

    @cached_property
    def profile(self) -> Profile:
        """What is known of the model in its state at the start of the call."""
        if self.execution == "static":
            start_compiler()
        return profile_of(self.model)

    @cached_property
    def around(self) -> str | None:
        """Where the user's code runs around every forward, and not in the model, or None."""
        return user_code_around()

    @cached_property
    def user_code(self) -> str | None:
        """Where the user's code runs in forwards, or None."""
        return self.profile.user_code or self.around

    @property
    def has_time(self) -> bool:
        """Whether there is time for one-time work, or the config requires it."""
        is_known = self.profile.is_warm or not self.is_timed
        return is_known or self.config.verification is not None

    def warn_once(self, text: str, category: type[Warning]) -> None:
        """Warn, once for the model."""
        if text not in self.profile.warned:
            self.profile.warned.add(text)
            warnings.warn(text, category, stacklevel=4)

    # --- why it falls back to standard decoding -------------------------------------------------

    @cached_property
    def why_plain(self) -> str | None:
        """Why the call must use standard decoding, whatever its model can do; else None."""
        if not self.has_time:
            return _NO_TIME
        if has_adapters_by_row(self.model):
            return "PEFT has an adapter for each row of the call, but none for draft tokens"
        if self.returns_states:
            return "hidden states or attentions are returned"
        watching = (*self.processors, *self.criteria)
        if self.is_users_cache and any(map(is_users, watching)):
            return "your own code may look at the cache, which holds draft tokens during a step"
        return None if self.num_rows == 1 else self._why_plain_of_batch

    @property
    def _why_plain_of_batch(self) -> str | None:
        pad_token = self.options._pad_token_tensor
        reasons = (
            (
                self.user_code is not None and self._forgets,
                f"your own code ({self.user_code}) sees them, and its windows leave nothing to "
                "prove drafts by",
            ),
            (not Processors(self.processors, 1).takes_rows, "a logits processor sees all rows"),
            (
                self.stops_see_rows and self._shows_rows_ahead,
                "a stop criterion sees all rows, and some rows would be ahead of others",
            ),
            (pad_token is not None and int(pad_token) < 0, "the pad token id is negative"),
            (bool(self.wanted_scores), "scores are returned, also of rows that have ended"),
            (self.is_users_cache, "a cache was passed"),
            (not is_text_alone(self.model_kwargs), "the prompts contain images or embeddings"),
            (
                self.config.verification not in (None, "tree", "plain"),
                "its rows are verified as trees",
            ),
        )
        found = next((reason for is_so, reason in reasons if is_so), None)
        return found and f"batches: {found}"

    @property
    def _shows_rows_ahead(self) -> bool:
        """Whether the caller can see more of rows that run ahead than their tokens in the end."""
        watches = self.streamer is not None or self.arguments.on_step is not None
        is_more = watches or self.returns_dict or bool(self.options.do_sample)
        return is_more or self.user_code is not None

    @property
    def _forgets(self) -> bool:
        """Whether layers of the model keep a part of the text alone."""
        with suppress(UnsupportedModelError):  # then there are no trees
            return any(each.kind != "full" for each in self.profile.layout_of(self.model).kinds)
        return False
