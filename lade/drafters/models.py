"""Drafters that are models: `AssistantModel`; `FirstLayers` and `Heads` of the target."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import LogitsProcessorList

from lade.compat import Model, candidate_generator, mesh_of, unwrapped
from lade.compat.attempts import Attempt
from lade.compat.view import with_first_layers
from lade.config import check_integer
from lade.drafters.candidates import Candidates, config_for
from lade.drafters.runner import Assistant, plan_for
from lade.drafting.drafter import DraftingCall
from lade.errors import UnsupportedModelError, UnsupportedOptionError
from lade.probing.profile import Profiles, computing, profile_of
from lade.probing.rules import refuse_encoder_decoder


class AssistantModel(Candidates):
    """A small model that drafts for a larger one: a causal LM, or one trained for its states.

    One object serves any number of calls, one after another or side by side. Each call has its own
    KV cache; the measured times of drafts are kept for later calls. lade runs a causal LM. Torch
    runs a model that reads hidden states of the target (DFlash, Gemma 4's assistants), and the
    target, too, for a single prompt of text that is verified by trees.

    Args:
        model: the assistant; it is not changed, and may be in use elsewhere.
        tokenizer: the assistant's tokenizer; see `target_tokenizer`.
        target_tokenizer: the target's tokenizer. With both tokenizers, the vocabularies may differ
            or be padded to different sizes. Without them, their sizes must be equal.
        length: number of tokens of a draft; None for as many as the assistant is sure of, and to
            draft only where that pays.
        name: name of this source in `DecodeStats.sources`.
        options: options of transformers' assisted generation, in place of those of the assistant's
            generation config: `num_assistant_tokens`, its schedule, and
            `assistant_confidence_threshold` decide on the number of tokens.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value.
    """

    _tokenizers: tuple[Any, Any] | None = None  # if ids of the target mean other tokens
    _reads_states = False  # of the target

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
        self._set(length, name, options)
        self.model = unwrapped(model)
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"expected a model of transformers, got {type(model).__name__}")
        self._is_dflash = not hasattr(self.model, "generation_config")
        of_forward = inspect.signature(self.model.forward).parameters
        self._reads_states = self._is_dflash or "shared_kv_states" in of_forward
        self._compares = tokenizer is not None and target_tokenizer is not None
        if self._compares and tokenizer is not target_tokenizer:
            size = model.config.get_text_config(decoder=True).vocab_size
            tokens = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
            theirs = ((each, token) for token, each in target_tokenizer.get_vocab().items())
            if not all(each < size and tokens.get(each, token) == token for each, token in theirs):
                self._tokenizers = target_tokenizer, tokenizer

    def _set(self, length: int | None, name: str, options: Mapping[str, Any] | None) -> None:
        super().__init__(self._generator, name=name)
        self.is_measured, self._options = length is None, dict(options or {})
        if length is not None:
            check_integer("length", length, 1)
            self._options |= {"num_assistant_tokens": length, "assistant_confidence_threshold": 0.0}
            self._options["num_assistant_tokens_schedule"] = "constant"

    def _generator(
        self, call: DraftingCall, input_ids: Tensor, processors: LogitsProcessorList
    ) -> Any:
        if self._reads_states:
            config = config_for(call, speculation_type="dflash" if self._is_dflash else None)
            made = candidate_generator(call.model, config, input_ids, processors, self.model)
            vars(made).update(self._options)  # those of its length
            return made
        config, model = config_for(call, speculation_type=None), self._model_for(call)
        limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        config.max_length = min(call.max_length, 1 + (limit or call.max_length))
        num_drafted = call.vocab_size if self._tokenizers is None else None
        assistant = Assistant(model, call.max_length, self._options, num_drafted)
        given = config, input_ids, processors, assistant, self._tokenizers
        return candidate_generator(call.model, *given)

    def _model_for(self, call: DraftingCall) -> Model:
        """Return the model to run for a call."""
        mine, theirs = self.model.config.get_text_config(decoder=True).vocab_size, call.vocab_size
        if mine != theirs and not self._compares:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot draft for {type(call.model).__name__}: it has "
                f"another vocabulary, of {mine} tokens beside {theirs}, and no tokenizers were "
                "given to translate between them"
            )
        return computing(self.model)


class FirstLayers(AssistantModel):
    """The target's own first layers, followed by its last norm and head, as a drafter.

    No second model is needed; the memory is that of a second KV cache, as the first layers run the
    prompt once more. The model is not changed: a view of it has a shorter list of layers.

    Args:
        num_layers: number of layers; try a third of them first.
        length: as for `AssistantModel`.
        name: name of this source in `DecodeStats.sources`.
        options: as for `AssistantModel`, in place of those of the model's generation config.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        length: int | None = None,
        name: str = "first_layers",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_integer("num_layers", num_layers, 1)
        self._set(length, name, options)
        self.num_layers = num_layers

    def _model_for(self, call: DraftingCall) -> Model:
        """Return a view that runs only the first layers, kept with the model's profile."""
        model, num_layers = call.model, self.num_layers
        refuse_encoder_decoder(model)
        layers = _layers_of(model)
        if num_layers >= len(layers):
            raise UnsupportedOptionError(
                f"expected num_layers from 1 to {len(layers) - 1} for {type(model).__name__}, got "
                f"{num_layers}"
            )

        def view(cuts_cache: bool) -> Model:
            found = with_first_layers(model, layers, num_layers, cuts_cache=cuts_cache)
            found.__dict__["_lade_profiles"] = Profiles()
            plan_for(found)  # which refuses a view that does not run
            return found

        def find() -> Model:
            with Attempt():
                return view(cuts_cache=True)
            return view(cuts_cache=False)

        return profile_of(model).once(("first layers", num_layers), find)


class Heads(Candidates):
    """The target's own heads for later tokens (multi-token prediction), if it ships with them.

    They are loaded from its checkpoint, once, and run by torch. They read hidden states of the
    target, which runs by torch as well, for a single prompt of text that is verified by trees.

    Args:
        name: name of this source in `DecodeStats.sources`.
    """

    def __init__(self, *, name: str = "heads") -> None:
        super().__init__(_heads_for, name=name)


def _heads_for(call: DraftingCall, input_ids: Tensor, processors: LogitsProcessorList) -> Any:
    def load() -> Any:
        config = config_for(call, use_mtp=True)
        return candidate_generator(call.model, config, input_ids, LogitsProcessorList())

    try:
        loaded = profile_of(call.model).once("heads", load)
    except ValueError as reason:
        name = type(call.model).__name__
        raise UnsupportedModelError(f"{name} has no heads to draft with: {reason}") from reason
    heads = loaded.mtp_model  # shared; the cache is of one text
    made = copy.deepcopy(loaded, {id(heads): heads})
    made.logits_processor = processors or None
    return made


def _layers_of(model: Model) -> nn.ModuleList:
    """Return a model's layers: the longest list of modules that is in no other list.

    Raises:
        UnsupportedModelError: there is none, with the reason.
    """
    lists = [each for each in model.get_decoder().modules() if isinstance(each, nn.ModuleList)]
    inner = {id(module) for of_list in lists for each in of_list for module in each.modules()}
    outer = [each for each in lists if id(each) not in inner and len(each) > 1]
    if outer and mesh_of(model) is None:
        return max(outer, key=len)
    reason = "several processes run it together" if outer else "it has no list of layers"
    raise UnsupportedModelError(
        f"{type(model).__name__} cannot draft by its first layers: {reason}"
    )
