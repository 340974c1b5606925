"""Drafts of a model with another vocabulary: translated to its tokens and back."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lade.drafters.model_drafter import OpenScorer, Scorer
from lade.drafters.vocabularies import Translation, Vocabularies
from lade.drafting.drafter import Drafter, DraftingCall
from lade.drafting.drafts import chain
from ngram_pool import Draft

# A token that no draft has: what it stands for left the draft.
_ELSEWHERE = -1


@dataclass(slots=True)
class _TranslatedSequence:
    """The state of one sequence."""

    translation: Translation
    text: list[int]  # target tokens
    chain: list[int] = field(default_factory=list)  # the assistant's tokens of the last draft


class TranslatedDrafter(Drafter):
    """Drafter that asks another one, of another vocabulary, for chains.

    Args:
        make_drafter: makes the drafter that is asked, from the call as it has it and what opens
            its scorers.
        open_scorer: returns the assistant for a sequence, given its tokens of the text.
    """

    def __init__(
        self,
        call: DraftingCall,
        vocabularies: Vocabularies,
        model: Any,
        make_drafter: Callable[[DraftingCall, OpenScorer], Drafter],
        open_scorer: OpenScorer,
    ) -> None:
        self._max_length = call.max_length
        self._vocabularies = vocabularies
        self._open_scorer = open_scorer
        self._sequences: dict[int, _TranslatedSequence] = {}
        self._asking: Translation | None = None  # of the sequence that is drafted for
        # Processors, and with them the target's draws, are about its own tokens alone.
        inner = replace(
            call,
            model=model,
            vocab_size=model.config.get_text_config(decoder=True).vocab_size,
            max_length=sys.maxsize,
            max_candidates=1,
            processors=(),
            samples=False,
            rngs=None,
        )
        self._drafter = make_drafter(inner, self._open)

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence; translate its prompt."""
        translation = self._vocabularies.translation()
        handle = self._drafter.open(translation.follow(prompt_ids))
        self._sequences[handle] = _TranslatedSequence(translation, [*prompt_ids])
        return handle

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Translate the text, ask for a chain, and translate it back."""
        state = self._sequences[sequence]
        state.chain = []
        most = min(max_draft_tokens, self._max_length - len(committed) - 1)
        if most < 1:
            return Draft.empty()
        self._asking = state.translation
        draft = self._drafter.draft(sequence, state.translation.follow(committed), most)
        if not len(draft):
            return draft
        state.chain = draft.token_ids.tolist()
        return chain(*state.translation.back(state.chain, draft.probs.tolist())).first(most)

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """See what became of the last draft."""
        state = self._sequences[sequence]
        state.text += token_ids
        if not state.chain:
            return
        state.translation.follow(state.text)
        num_right, is_left = state.translation.outcome()
        self._drafter.observe(
            sequence, [*state.chain[:num_right], *([_ELSEWHERE] if is_left else [])]
        )
        state.chain = []

    def close(self, sequence: int) -> None:
        """End a sequence."""
        del self._sequences[sequence]
        self._drafter.close(sequence)

    def _open(self, committed: Sequence[int]) -> Scorer:
        assert self._asking is not None
        return _SettledScorer(self._open_scorer, self._asking)


class _SettledScorer:
    """Scorer that commits only what stays as it is when the text goes on.

    The newest tokens of the text are grown after that as if they were drafted, so that another
    tokenisation of them costs no more than running them again.
    """

    def __init__(self, open_scorer: OpenScorer, translation: Translation) -> None:
        self.is_chain = True  # that is what is translated
        self._open_scorer = open_scorer
        self._translation = translation
        self._scorer: Scorer | None = None
        self._num_unsettled = 0

    def follow(self, committed: Sequence[int]) -> Tensor:
        """Commit what is settled, and run the rest."""
        # A scorer needs a token, and one before it.
        num = max(self._translation.num_settled, min(2, len(committed)))
        settled, rest = committed[:num], committed[num:]
        if self._scorer is None:
            self._scorer = self._open_scorer(settled)
        logits = self._scorer.follow(settled)
        self._num_unsettled = len(rest)
        return self._scorer.grow(rest, range(len(rest)))[-1] if rest else logits

    def grow(self, token_ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Run nodes."""
        assert self._scorer is not None
        return self._scorer.grow(token_ids, [self._num_unsettled + parent for parent in parents])

    def close(self) -> None:
        """Free what is held."""
        if self._scorer is not None:
            self._scorer.close()
