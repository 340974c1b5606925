"""One call of `generate`, as transformers has prepared it for a decoding function."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
from lade.hf.arguments import Arguments


@dataclass(frozen=True)
class Call:
    """What is decoded, and how."""

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
        """The config given, or that of defaults."""
        return self.arguments.config or Config()

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return int(self.input_ids.shape[0])

    @property
    def is_timed(self) -> bool:
        """Whether there is a limit of time."""
        return any(isinstance(each, MaxTimeCriteria) for each in self.criteria)

    @property
    def returns_dict(self) -> bool:
        """Whether the result has more than the tokens."""
        return bool(self.options.return_dict_in_generate)

    @property
    def wanted_scores(self) -> list[str]:
        """Names of the scores that the result has for each token."""
        return [name for name in ("scores", "logits") if self._returns(name)]

    @property
    def returns_states(self) -> bool:
        """Whether the result has what layers gave for each token."""
        return self._returns("hidden_states") or self._returns("attentions")

    def _returns(self, name: str) -> bool:
        return self.returns_dict and bool(getattr(self.options, f"output_{name}"))
