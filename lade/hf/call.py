"""One call of `generate`: lade's arguments, and the inputs that transformers prepared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from lade.compat import Model
from lade.config import Config
from lade.drafters.merged import takes_pool
from lade.drafting.drafter import Drafter
from lade.hf.pools import Pools, pools_of
from lade.stats import Step
from ngram_pool.arrays import token_ids_of

OnStep = Callable[[Step], None]
Predicted = str | Sequence[int] | Tensor


class Arguments(NamedTuple):
    """The arguments that `generate` itself does not take."""

    pool: Pools | None = None
    drafter: Drafter | None = None
    config: Config | None = None
    on_step: OnStep | None = None
    prediction: Predicted | None = None

    @classmethod
    def taken_from(cls, generate_kwargs: dict[str, Any]) -> "Arguments":
        """Remove lade's arguments from the arguments of a call, and return them."""
        return cls(*(generate_kwargs.pop(name, None) for name in cls._fields))

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
    """Everything that one call of `generate` prepared."""

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

    @property
    def is_timed(self) -> bool:
        """Whether the call has `max_time`."""
        return any(isinstance(each, MaxTimeCriteria) for each in self.criteria)

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
