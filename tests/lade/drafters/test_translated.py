"""Assistants of another vocabulary: exact, mostly right where they know the text, run once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lade
from lade.budget.levels import Rule
from lade.drafters import AssistantModel
from lade.drafters.growth import Growth
from lade.drafters.model_drafter import ModelDrafter, OpenScorer
from lade.drafters.translated import TranslatedDrafter
from lade.drafters.vocabularies import Vocabularies
from lade.drafting.drafter import Drafter, DraftingCall
from lade.errors import UnsupportedModelError
from lade.stats import SourceStats
from tests.grids import thinned
from tests.lade.both import same_as_generate
from tests.lade.drafters.tokenizers import TEXT, byte_level, metaspace, with_tokens
from tests.lade.shared import shared_model
from tests.lade.tiny import MAMBA2

STRICT = lade.Config(strict_drafter=True)
ASSISTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tree": ("llama", {}),
    "windows": ("gemma3_text", {}),
    "snapshot": ("mamba2", {"attention": "eager", **MAMBA2}),
}


def a_target() -> Any:
    return shared_model("llama", vocab_size=len(byte_level()))


def an_assistant(kind: str = "tree") -> Any:
    family, options = ASSISTANTS[kind]
    return shared_model(family, 1, vocab_size=len(metaspace()) + 6, **options)  # padded


def translated(kind: str = "tree", **options: Any) -> AssistantModel:
    return AssistantModel(
        an_assistant(kind), metaspace(), target_tokenizer=byte_level(), **{"length": 4, **options}
    )


@pytest.mark.parametrize("kind", ASSISTANTS)
@pytest.mark.parametrize("do_sample", thinned([False, True], True))
def test_text_is_that_of_plain_decoding(kind: str, do_sample: bool) -> None:
    prompt = torch.tensor([byte_level().encode("The pool learns what was said")])
    _, got = same_as_generate(
        a_target(), prompt, drafter=translated(kind), config=STRICT, do_sample=do_sample
    )
    assert got.stats.sources["assistant"].num_draft_tokens > 10


@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
def test_batches_whose_drafts_would_be_drawn_are_verified_too(acceptance: Any) -> None:
    texts = ["The pool learns", "what was said"]
    rows = [byte_level().encode(text) for text in texts]
    width = max(map(len, rows))
    prompts = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    got = lade.generate(
        a_target(),
        prompts,
        attention_mask=(prompts != 0).long(),
        drafter=translated(),
        config=lade.Config(strict_drafter=True, acceptance=acceptance),
        do_sample=True,
        max_new_tokens=8,
    )
    assert got.shape == (2, width + 8)


class KnowingScorer:
    """A scorer that knows the whole text, and counts what it runs."""

    is_chain = False

    def __init__(self, text: str, tokenizer: Any) -> None:
        self._vocabularies = Vocabularies(tokenizer, tokenizer)
        self._text = text
        self._first = len(self._vocabularies.assistant.first_ids)
        self.num_run = 0
        self.num_prefills = 0
        self._paths: list[list[int]] = []
        self._committed: list[int] = []

    def follow(self, committed: Sequence[int]) -> Tensor:
        if committed[: len(self._committed)] != self._committed:
            self.num_prefills += 1
        kept = max(
            (len(path) for path in self._paths if path == [*committed[: len(path)]]), default=0
        )
        self.num_run += max(1, len(committed) - kept)
        self._committed = [*committed]
        self._paths = [[*committed]]
        return self._logits(committed)

    def grow(self, token_ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        for token_id, parent in zip(token_ids, parents, strict=True):
            self._paths.append([*self._paths[parent], token_id])
        self.num_run += len(token_ids)
        return torch.stack([self._logits(path) for path in self._paths[-len(token_ids) :]])

    def close(self) -> None:
        pass

    def _logits(self, path: Sequence[int]) -> Tensor:
        vocabulary = self._vocabularies.assistant
        known = vocabulary.text_of(path[self._first :])
        after = vocabulary.ids_after(path, self._text[len(known) :][:40]) or [3]
        logits = torch.zeros(600)
        if self._text.startswith(known):
            logits[after[0]] = 20.0
        return logits


def a_call(max_length: int) -> DraftingCall:
    return DraftingCall(a_target(), len(byte_level()), max_length, samples=True, rngs=[])


def decoded(scorer: KnowingScorer, text: str, max_draft_tokens: int = 8) -> tuple[int, Any]:
    """Decode a text with drafts; return the number of steps and the counts of the drafter."""
    token_ids = byte_level().encode(text)

    def make(call: DraftingCall, open_scorer: OpenScorer) -> Drafter:
        assert call.rngs is None
        assert not call.samples
        return ModelDrafter(call, open_scorer, Growth(4))

    drafter = TranslatedDrafter(
        a_call(len(token_ids)),
        Vocabularies(byte_level(), metaspace()),
        an_assistant(),
        make,
        lambda _: scorer,
    )
    num = 30
    sequence = drafter.open(token_ids[:num])
    num_steps = num_drafted = num_accepted = 0
    while num < len(token_ids):
        draft = drafter.draft(sequence, token_ids[:num], max_draft_tokens)
        assert len(draft) <= max(0, min(max_draft_tokens, len(token_ids) - num - 1))
        assert draft.parents.tolist() == [*range(-1, len(draft) - 1)]
        drafted = [*draft.token_ids.tolist(), -1]
        num_new = next(
            i + 1 for i, t in enumerate(drafted) if token_ids[num : num + i + 1][i:] != [t]
        )
        drafter.observe(sequence, token_ids[num : num + num_new])
        num += num_new
        num_steps += 1
        num_drafted += len(draft)
        num_accepted += num_new - 1
    drafter.close(sequence)
    return num_steps, SourceStats(num_steps, num_drafted, num_accepted)


def test_an_assistant_that_knows_the_text_runs_each_token_about_once() -> None:
    scorer = KnowingScorer(TEXT * 3, metaspace())
    num_steps, source = decoded(scorer, TEXT * 3)
    num_tokens = len(byte_level().encode(TEXT * 3)) - 30
    assert num_steps < num_tokens / 3
    assert source.num_accepted_tokens > 0.8 * source.num_draft_tokens
    assert source.num_accepted_tokens + num_steps == num_tokens
    assert scorer.num_prefills == 0  # what was committed was never another text
    # Besides the tokens drafted, 4 in each step: those that later text may change, once more.
    assert scorer.num_run < len(metaspace().encode(TEXT * 3)) + 8 * num_steps


def test_a_rule_for_k_learns_from_the_text_what_was_right() -> None:
    """Whatever tokens it is cut into, a chain of which all characters were right was right."""
    seen: list[Any] = []

    class Recording(Rule):
        def learn(self, levels: Any, num_right: int, is_ended: bool) -> None:
            seen.append((num_right, is_ended))

    growth = Growth(4)

    def recording(step_sec: Callable[[int], float] | None = None) -> Rule:
        return Recording(4)

    growth.rule = recording  # type: ignore[method-assign]
    text = "The pool learns what was said and drafts how it may go on."
    scorer = KnowingScorer(text, metaspace())
    drafter = TranslatedDrafter(
        a_call(100),
        Vocabularies(byte_level(), metaspace()),
        an_assistant(),
        lambda call, open_: ModelDrafter(call, open_, growth),
        lambda _: scorer,
    )
    token_ids = byte_level().encode("The pool learns")
    sequence = drafter.open(token_ids)
    drafter.draft(sequence, token_ids, 8)  # " what was" and more
    drafter.observe(sequence, byte_level().encode(" what"))
    token_ids += byte_level().encode(" what")
    assert seen[0][1] is False
    drafter.draft(sequence, token_ids, 8)
    drafter.observe(sequence, byte_level().encode(" is"))
    assert seen[1] == (0, True)
    drafter.close(sequence)


def test_vocabularies_of_the_same_ids_are_not_translated() -> None:
    padded = shared_model("llama", 0, vocab_size=len(byte_level()) + 24)
    call = replace(a_call(100), is_part=True)  # drafters alone come wrapped
    drafter = AssistantModel(padded, byte_level(), target_tokenizer=byte_level())
    assert isinstance(drafter.for_call(call), ModelDrafter)
    more = AssistantModel(
        padded, with_tokens(byte_level(), "<tool>"), target_tokenizer=byte_level()
    )
    assert isinstance(more.for_call(call), ModelDrafter)
    assert isinstance(translated().for_call(call), TranslatedDrafter)
    prompt = torch.tensor([byte_level().encode("The pool learns")])
    same_as_generate(a_target(), prompt, drafter=drafter, config=STRICT, max_new_tokens=12)


def test_another_vocabulary_without_tokenizers_is_refused() -> None:
    prompt = torch.tensor([[5, 6, 7]])
    for options in ({}, {"tokenizer": metaspace()}, {"target_tokenizer": byte_level()}):
        drafter = AssistantModel(an_assistant(), **options)
        with pytest.raises(UnsupportedModelError, match=r"has another vocabulary.*tokenizers"):
            lade.generate(a_target(), prompt, drafter=drafter, max_new_tokens=4)


def test_a_prompt_of_one_token_and_an_end_of_text() -> None:
    for prompt in ([[5]], [[byte_level().eos_token_id]], [byte_level().encode("😀")[:1]]):
        ids, mask = torch.tensor(prompt), torch.ones(1, 1, dtype=torch.int64)
        same_as_generate(
            a_target(),
            ids,
            drafter=translated(),
            config=STRICT,
            max_new_tokens=8,
            attention_mask=mask,
        )
