"""Drafters that run a model: `AssistantModel`, another causal LM, and what `FirstLayers` shares."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import candidate_generator as hf

from lade.budget.seconds import Seconds
from lade.compat import Model, unwrapped
from lade.config import check_integer
from lade.drafters.candidates import Candidates, DraftedText, config_for
from lade.drafters.runner import Assistant, plan_for
from lade.drafting.drafter import Drafter, DraftingCall
from lade.errors import UnsupportedModelError
from lade.probing.factory import VerificationPlan
from lade.probing.profile import computing

#: Options of transformers for how many tokens are drafted.
LENGTH_OPTIONS = (
    *("num_assistant_tokens", "num_assistant_tokens_schedule"),
    "assistant_confidence_threshold",
)
_MAX_LENGTH = 20  # of a draft, if neither lengths nor times are known; as in transformers


class ModelDrafter(Candidates):
    """Base class of drafters that run a model.

    Args:
        name: as for `Candidates`.
        length: as for `AssistantModel`, as are the options.
    """

    # Of a call.
    _model: Model
    _plan: VerificationPlan
    _max_length: int

    def __init__(self, name: str, length: int | None, options: Mapping[str, Any] | None) -> None:
        self.name, self.is_measured = name, length is None
        self._length, self._options, self._forward_sec = length, dict(options or {}), Seconds()
        if length is not None:
            check_integer("length", length, 1)
            self._options["assistant_confidence_threshold"] = 0.0

    def for_call(self, call: DraftingCall) -> Drafter:
        """Return a drafter for one call.

        Raises:
            LadeError: the model cannot draft for the call.
        """
        mine: Any = super().for_call(call)
        mine._model, mine._plan = self._model_for(call)
        config = mine._model.config.get_text_config(decoder=True)
        limit = getattr(config, "max_position_embeddings", None) or call.max_length
        mine._max_length = min(call.max_length - 1, limit)
        return mine  # type: ignore[no-any-return]

    @abstractmethod
    def _model_for(self, call: DraftingCall) -> tuple[Model, VerificationPlan]:
        """Return the model to run for a call, and how."""

    def close(self, sequence: int) -> None:
        """End a sequence; free its KV cache."""
        if (generator := self._texts[sequence].generator) is not None:
            generator.assistant_model.close()
        super().close(sequence)

    def _made(self, input_ids: Tensor, processors: LogitsProcessorList) -> Any:
        call = self._call
        model = Assistant(self._model, self._plan, call, self._forward_sec, self._options)
        return self._generator(model, input_ids, processors)

    def _generator(
        self, assistant: Any, input_ids: Tensor, processors: LogitsProcessorList
    ) -> hf.AssistedCandidateGenerator:
        config, assistant.num_drafted = config_for(self._call), self._call.vocab_size
        return hf.AssistedCandidateGenerator(
            input_ids, assistant, config, {}, logits_processor=processors
        )

    def _found(self, state: DraftedText, input_ids: Tensor, max_draft_tokens: int) -> Any:
        room = min(max_draft_tokens, self._max_length - input_ids.shape[1])
        if room < 1:
            return input_ids, None
        generator = state.generator
        told = generator.num_assistant_tokens
        generator.num_assistant_tokens = min(room, self._best_length(state) or told)
        try:
            return super()._found(state, input_ids, max_draft_tokens)
        finally:
            generator.num_assistant_tokens = told

    def _best_length(self, state: DraftedText) -> int | None:
        """Return the fastest number of tokens by measured times; None for the generator's own."""
        own = state.generator.assistant_model.options
        if self._length is not None or any(
            getattr(own, name) is not None for name in LENGTH_OPTIONS
        ):
            return self._length
        step_sec = self._call.step_sec
        if not self._forward_sec.is_known or not step_sec(1):
            return None
        forward_sec = float(self._forward_sec.at(1.0))
        nums = np.arange(1, _MAX_LENGTH + 1)
        secs = np.array([step_sec(num) for num in nums.tolist()]) + nums * forward_sec
        expected = 1.0 + np.cumsum(state.right.value**nums)
        return int(nums[(expected / secs).argmax()])


class AssistantModel(ModelDrafter):
    """A small causal LM that drafts for a larger one.

    One object serves any number of calls, one after another or side by side. Each call has its own
    KV cache; the measured times of forward passes are kept for later calls.

    Args:
        model: the assistant; it is not changed, and may be in use elsewhere.
        tokenizer: the assistant's tokenizer; see `target_tokenizer`.
        target_tokenizer: the target's tokenizer. With both tokenizers, the vocabularies may differ
            or be padded to different sizes. Without them, their sizes must be equal.
        length: number of tokens of a draft; None for as many as make decoding faster, by measured
            times.
        name: name of this source in `DecodeStats.sources`.
        options: options of transformers' assisted generation, in place of those of the assistant's
            generation config. With one for the number of tokens, such as
            `num_assistant_tokens_schedule`, transformers decides on it.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Any = None,
        *,
        target_tokenizer: Any = None,
        length: int | None = None,
        name: str = "assistant",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(getattr(model, "generate", None)):
            raise TypeError(f"expected a causal LM of transformers, got {type(model).__name__}")
        super().__init__(name, length, options)
        self.model = unwrapped(model)
        self._compares = tokenizer is not None and target_tokenizer is not None
        self._tokenizers: tuple[Any, Any] | None = None  # if ids of the target mean other tokens
        if self._compares and tokenizer is not target_tokenizer:
            size = model.config.get_text_config(decoder=True).vocab_size
            tokens = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
            theirs = ((each, token) for token, each in target_tokenizer.get_vocab().items())
            if not all(each < size and tokens.get(each, token) == token for each, token in theirs):
                self._tokenizers = target_tokenizer, tokenizer

    def _model_for(self, call: DraftingCall) -> tuple[Model, VerificationPlan]:
        mine, theirs = self.model.config.get_text_config(decoder=True).vocab_size, call.vocab_size
        if mine != theirs and not self._compares:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot draft for {type(call.model).__name__}: it has "
                f"another vocabulary, of {mine} tokens beside {theirs}, and no tokenizers were "
                "given to translate between them"
            )
        model = computing(self.model)
        return model, plan_for(model)

    def _generator(
        self, assistant: Any, input_ids: Tensor, processors: LogitsProcessorList
    ) -> hf.AssistedCandidateGenerator:
        if self._tokenizers is None:
            return super()._generator(assistant, input_ids, processors)
        return hf.AssistedCandidateGeneratorDifferentTokenizers(
            input_ids, assistant, *self._tokenizers, config_for(self._call), {}
        )
