"""Another causal LM as a drafter."""

from functools import partial
from typing import Any

from lade.budget.seconds import Seconds
from lade.compat import Model, unwrapped
from lade.config import check_integer
from lade.drafters.model_drafter import ModelDrafter
from lade.drafters.runner import ModelRunner, plan_for
from lade.drafting.drafter import Drafter, DraftingCall
from lade.errors import UnsupportedModelError


class AssistantModel(Drafter):
    """A small causal LM that drafts for a larger one.

    One object serves any number of calls, one after another or side by side. Each call has its own
    KV cache; the measured times of forward passes are kept for later calls.

    Args:
        model: the assistant; it is not changed, and may be in use elsewhere.
        tokenizer: the assistant's tokenizer; see `target_tokenizer`.
        target_tokenizer: the target's tokenizer. With both tokenizers, equal ids must be equal
            tokens, and the vocabularies may be padded to different sizes. Without them, the sizes
            must be equal.
        length: number of tokens of a draft; None to extend a draft as long as that makes decoding
            faster, by measured times.
        name: name of this source in `DecodeStats.sources`.

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
    ) -> None:
        if not callable(getattr(model, "generate", None)):
            raise TypeError(f"expected a causal LM of transformers, got {type(model).__name__}")
        if length is not None:
            check_integer("length", length, 1)
        self.model = model = unwrapped(model)
        self.name = name
        self._shares_ids: bool | None = None  # None without both tokenizers
        if tokenizer is not None and target_tokenizer is not None:
            size = model.config.get_text_config(decoder=True).vocab_size
            self._shares_ids = _shares_ids(target_tokenizer, tokenizer, size)
        self._length, self._forward_sec = length, Seconds()

    def for_call(self, call: DraftingCall) -> Drafter:
        """Return a drafter for one call.

        Raises:
            UnsupportedModelError: the model has another vocabulary, or its cache cannot go back.
        """
        config = self.model.config.get_text_config(decoder=True)
        mine, theirs = config.vocab_size, call.vocab_size
        if not (mine == theirs if self._shares_ids is None else self._shares_ids):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot draft for {type(call.model).__name__}: it has "
                f"another vocabulary, of {mine} tokens beside {theirs}"
            )
        open_runner = partial(ModelRunner, self.model, plan_for(self.model), call.max_length)
        max_length = getattr(config, "max_position_embeddings", None)
        return ModelDrafter(call, open_runner, self._length, self._forward_sec, max_length)


def _shares_ids(target_tokenizer: Any, tokenizer: Any, num_ids: int) -> bool:
    """Return whether tokens of the target are, by their ids, the same for an assistant.

    Args:
        num_ids: that the assistant can run; models of a family often differ in how far they pad
            this number. All ids of the target's tokens must be below it.
    """
    if target_tokenizer is tokenizer:
        return True
    by_id = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    return all(
        token_id < num_ids and by_id.get(token_id, token) == token
        for token, token_id in target_tokenizer.get_vocab().items()
    )
