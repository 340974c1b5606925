"""Another causal LM as a drafter."""

from collections.abc import Sequence
from typing import Any

from lade.budget.sources import SourceCosts
from lade.compat import Model
from lade.drafters.growth import ExpansionName, Growth, LengthName
from lade.drafters.merging import alone
from lade.drafters.model_drafter import ModelDrafter, OpenScorer
from lade.drafters.runner import ModelRunner, plan_for
from lade.drafters.translated import TranslatedDrafter
from lade.drafters.vocabularies import Vocabularies, shares_ids
from lade.drafting.drafter import Drafter, DraftingCall
from lade.errors import UnsupportedModelError
from lade.probing.profile import profile_of


class AssistantModel(Drafter):
    """A small causal LM that drafts for a larger one.

    With another vocabulary than the target's, its drafts are chains that are translated through
    text, which both tokenizers are needed for.

    One object serves any number of calls, one after another or side by side. Each call has caches
    of its own; only what forwards cost is kept for the next.

    Args:
        model: drafts; it is not changed, and may be in use elsewhere.
        tokenizer: of the assistant; see `target_tokenizer`.
        target_tokenizer: of the target. With both tokenizers, vocabularies may differ: tokens of
            the same ids are the same, however far models pad their number, and all others are
            translated. Without, the sizes of the vocabularies must be equal.
        length: how many tokens a draft has along a path, K: "measured" goes on as long as that
            makes tokens come faster, by measured times; "confidence" ends after the first token of
            a probability below `confidence`, as transformers does; a number is a constant K.
        expansion: "tree" drafts the likeliest paths, "chain" one.
        max_draft_tokens: tokens of a draft at most, all paths together; None for no limit.
        confidence: threshold of "confidence", and of "measured" until times are known, from 0 to 1.
        name: of this source in `DecodeStats.sources`.

    Raises:
        TypeError, ValueError: an argument is none of those.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Any = None,
        *,
        target_tokenizer: Any = None,
        length: LengthName | int = "measured",
        expansion: ExpansionName = "tree",
        max_draft_tokens: int | None = None,
        confidence: float = 0.4,
        name: str = "assistant",
    ) -> None:
        if not callable(getattr(model, "generate", None)):
            raise TypeError(f"expected a causal LM of transformers, got {type(model).__name__}")
        self.model = model
        self.name = name
        self._has_tokenizers = tokenizer is not None and target_tokenizer is not None
        self._vocabularies: Vocabularies | None = None  # if they differ
        if self._has_tokenizers and not shares_ids(target_tokenizer, tokenizer, self._vocab_size):
            self._vocabularies = Vocabularies(target_tokenizer, tokenizer)
        self._growth = Growth(length, expansion, max_draft_tokens, confidence)
        self._costs = SourceCosts()

    def for_call(self, call: DraftingCall) -> Drafter:
        """Return a drafter for one call.

        Raises:
            UnsupportedModelError: the model has another vocabulary, or its cache cannot go back.
        """
        self._check_vocabulary(call)
        plan, structure = plan_for(self.model), profile_of(self.model).structure

        def open_scorer(committed: Sequence[int]) -> ModelRunner:
            # In another vocabulary, texts have other lengths; memory grows where this is too short.
            max_length = max(call.max_length, len(committed) + 1)
            return ModelRunner(self.model, plan, max_length, structure)

        made: Drafter
        if self._vocabularies is None:
            made = self._drafter(call, open_scorer)
        else:
            made = TranslatedDrafter(
                call, self._vocabularies, self.model, self._drafter, open_scorer
            )
        return alone(self.name, made, self._costs, call, asks_all=not self._growth.is_measured)

    def _drafter(self, call: DraftingCall, open_scorer: OpenScorer) -> ModelDrafter:
        """Return a drafter for a call in the vocabulary of the assistant."""
        config = self.model.config.get_text_config(decoder=True)
        max_length = getattr(config, "max_position_embeddings", None)
        return ModelDrafter(call, open_scorer, self._growth, max_length)

    @property
    def _vocab_size(self) -> int:
        size: int = self.model.config.get_text_config(decoder=True).vocab_size
        return size

    def _check_vocabulary(self, call: DraftingCall) -> None:
        mine, theirs = self._vocab_size, call.vocab_size
        if self._has_tokenizers or mine == theirs:
            return
        raise UnsupportedModelError(
            f"{type(self.model).__name__} cannot draft for {type(call.model).__name__}: it has "
            f"another vocabulary, of {mine} tokens and not {theirs}; with both tokenizers "
            "(tokenizer=, target_tokenizer=), drafts are translated"
        )
