"""Tokens through text: what a perfect assistant drafts is accepted, and nothing ever raises."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lade.drafters.vocabularies import Vocabularies, Vocabulary, shares_ids
from tests.grids import thinned
from tests.lade.drafters.tokenizers import TEXT, byte_level, metaspace, with_tokens, word_pieces
from tests.lade.tiny import byte_tokenizer

TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bytes": byte_tokenizer,
    "byte_level": byte_level,
    "smaller": lambda: byte_level(300, ()),
    "metaspace": metaspace,
    "spaced": lambda: metaspace("always"),
    "unspaced": lambda: metaspace("never"),
    "word_pieces": word_pieces,
}
LOSSLESS = [name for name in TOKENIZERS if name != "word_pieces"]
PAIRS = [(target, assistant) for target in LOSSLESS for assistant in LOSSLESS]


class Outcome(NamedTuple):
    """What became of an assistant's drafts."""

    num_steps: int
    num_drafted: int
    num_accepted: int

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted / self.num_drafted

    @property
    def tokens_per_step(self) -> float:
        return 1 + self.num_accepted / self.num_steps


def drafted_by_a_perfect_assistant(
    target: Any, assistant: Any, text: str, num_tokens: int = 6
) -> Outcome:
    """Decode a text whose continuation the assistant always knows, in its own tokens."""
    vocabularies = Vocabularies(target, assistant)
    translation = vocabularies.translation()
    token_ids = target.encode(text)
    start = len(vocabularies.target.first_ids)
    text = vocabularies.target.text_of(token_ids[start:])  # without what the target cannot write
    num = len(target.encode(text[: len(text) // 4]))
    num_steps = num_drafted = num_accepted = 0
    while num < len(token_ids):
        ours = translation.follow(token_ids[:num])
        known, _ = vocabularies.target.complete_text_after([], token_ids[start:num])
        rest = text[len(known) :]
        theirs = vocabularies.assistant.ids_after(ours, rest)
        assert theirs is not None
        theirs = theirs[:num_tokens]
        draft = translation.back(theirs, [0.9] * len(theirs)).token_ids
        right = token_ids[num : num + len(draft)]
        pairs = zip(draft, right, strict=False)
        accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), len(right))
        num_steps += 1
        num_drafted += len(draft)
        num_accepted += accepted
        num += accepted + 1
    return Outcome(num_steps, num_drafted, num_accepted)


@pytest.mark.parametrize(("target", "assistant"), PAIRS[::5])
def test_most_of_what_a_perfect_assistant_drafts_is_accepted(target: str, assistant: str) -> None:
    """Only the last token of a draft is ever wrong, where it ends in the middle of a longer one."""
    outcome = drafted_by_a_perfect_assistant(
        TOKENIZERS[target](), TOKENIZERS[assistant](), TEXT * 2
    )
    assert outcome.acceptance_rate > 0.8
    assert outcome.tokens_per_step > (4 if assistant != "bytes" else 3)


@pytest.mark.model
@pytest.mark.usefixtures("real_model")
@pytest.mark.parametrize("assistant", thinned(LOSSLESS[::3], LOSSLESS[0]))
def test_a_perfect_assistant_of_a_real_vocabulary(assistant: str) -> None:
    from lade.models.embedded import default_model

    real = AutoTokenizer.from_pretrained(default_model())
    other = TOKENIZERS[assistant]()
    text = Path(__file__).read_text(encoding="utf-8")[:3000]
    outcome = drafted_by_a_perfect_assistant(other, real, text)
    assert outcome.acceptance_rate > 0.95
    assert outcome.tokens_per_step > 8  # its tokens are longer
    outcome = drafted_by_a_perfect_assistant(real, other, text, num_tokens=12)
    assert outcome.acceptance_rate > 0.6
    assert outcome.tokens_per_step > 2.5


class Counting:
    """A tokenizer that notes how many characters and tokens it was given at once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> Any:
        self.sizes.append(len(text))
        return self._tokenizer.encode(text, **options)

    def decode(self, token_ids: Any, **options: Any) -> Any:
        self.sizes.append(len(token_ids))
        return self._tokenizer.decode(token_ids, **options)


def test_a_step_costs_the_same_however_long_the_text_is() -> None:
    target, assistant = Counting(byte_level()), Counting(metaspace())
    translation = Vocabularies(target, assistant).translation()
    committed = target.encode(TEXT * 20)
    translation.follow(committed)
    for token_id in target.encode(TEXT):
        committed.append(token_id)
        target.sizes.clear()
        assistant.sizes.clear()
        ours = translation.follow(committed)
        translation.back(ours[-40:-34], [0.5] * 6)
        assert max(target.sizes) < 60
        assert max(assistant.sizes) < 200  # characters


def test_what_is_lost_in_the_assistants_text_does_not_add_up() -> None:
    """Its tokens do not give back capitals, so where they end in the text cannot be found."""
    target, assistant = byte_tokenizer(), Counting(word_pieces())
    translation = Vocabularies(target, assistant).translation()
    token_ids = target.encode("A TEXT IN CAPITALS " * 40)
    assistant.sizes.clear()
    for num in range(1, len(token_ids)):
        translation.follow(token_ids[:num])
    assert max(assistant.sizes) < 500


@pytest.mark.parametrize(("target", "assistant"), PAIRS[::5])
def test_both_have_the_same_text_and_what_is_settled_stays(target: str, assistant: str) -> None:
    vocabularies = Vocabularies(TOKENIZERS[target](), TOKENIZERS[assistant]())
    translation = vocabularies.translation()
    start = len(vocabularies.target.first_ids)
    committed = [*vocabularies.target.first_ids, *vocabularies.target.ids_of(TEXT)]
    settled: list[int] = []
    for num in range(start + 1, len(committed)):
        ours = translation.follow(committed[:num])
        assert ours[: len(settled)] == settled
        settled = ours[: translation.num_settled]
        assert len(ours) - len(settled) <= 60
        known, _ = vocabularies.target.complete_text_after([], committed[start:num])
        first = len(vocabularies.assistant.first_ids)
        assert vocabularies.assistant.text_of(ours[first:]) == known
    assert len(settled) > 50


def test_an_incomplete_character_waits_and_is_completed_by_drafts() -> None:
    vocabularies = Vocabularies(byte_tokenizer(), metaspace())
    translation = vocabularies.translation()
    token_ids = byte_tokenizer().encode("so 😀 what")
    ours = translation.follow(token_ids[:3])
    for num in (4, 5, 6):  # of the emoji's four bytes
        assert translation.follow(token_ids[:num]) == ours
        theirs = vocabularies.assistant.ids_after(ours, "😀 what")
        assert theirs is not None
        draft = translation.back(theirs, [0.9] * len(theirs))
        assert draft.token_ids == token_ids[num:]
    theirs = vocabularies.assistant.ids_after(ours, "ab")
    assert theirs is not None
    assert translation.back(theirs, [0.9] * len(theirs)).token_ids == []  # fits no emoji


def test_a_drafted_character_that_is_incomplete_is_left_out() -> None:
    vocabularies = Vocabularies(byte_level(), byte_tokenizer())
    translation = vocabularies.translation()
    translation.follow(vocabularies.target.ids_of("so"))
    theirs = byte_tokenizer().encode(" what 😀")[:-1]
    draft = translation.back(theirs, [0.9] * len(theirs))
    assert vocabularies.target.text_of(draft.token_ids) == " what "


def test_a_replacement_character_is_text_as_any_other() -> None:
    vocabularies = Vocabularies(byte_tokenizer(), byte_level())
    translation = vocabularies.translation()
    text = "a\N{REPLACEMENT CHARACTER}" * 4
    ours = translation.follow(byte_tokenizer().encode(text + "b"))
    assert vocabularies.assistant.text_of(ours) == text + "b"
    stray = [*byte_tokenizer().encode("a")] + byte_tokenizer().encode("😀")[:1] * 6
    assert vocabularies.assistant.text_of(translation.follow(stray)).startswith("a")


def test_each_token_has_the_probability_of_the_path_that_covers_it() -> None:
    vocabularies = Vocabularies(byte_tokenizer(), byte_level(300, ()))
    translation = vocabularies.translation()
    translation.follow(byte_tokenizer().encode("so"))
    theirs = vocabularies.assistant.ids_of(" th")
    assert vocabularies.assistant.ends_after([], theirs) == [2, 3]
    draft = translation.back(theirs, [0.8, 0.4])
    assert [chr(token) for token in byte_tokenizer().decode(draft.token_ids).encode()] == [*" th"]
    assert draft.probs == pytest.approx([0.8, 0.8, 0.34])  # it may end in the middle of a token
    chain = byte_tokenizer(), metaspace()
    translation = Vocabularies(*reversed(chain)).translation()
    ours = translation.follow([*metaspace().encode("drafts go")])
    assert byte_tokenizer().decode(ours) == "drafts go"
    theirs = byte_tokenizer().encode(" through")
    draft = translation.back(theirs, [0.9**i for i in range(len(theirs))])
    assert draft.probs == sorted(draft.probs, reverse=True)


class TestSpecialTokens:
    """Special tokens: the same on both sides, of one side alone, at both ends of a text."""

    def test_those_of_both_are_the_same(self) -> None:
        target, assistant = byte_level(), with_tokens(metaspace(), "<|im_start|>", "<|im_end|>")
        translation = Vocabularies(target, assistant).translation()
        prompt = "<|im_start|>user\nwhat was said<|im_end|>\n<|im_start|>"
        ours = translation.follow(target.encode(prompt))
        assert ours[0] == assistant.bos_token_id
        start = assistant.convert_tokens_to_ids("<|im_start|>")
        assert [i for i, token in enumerate(ours) if token == start] == [1, len(ours) - 1]
        theirs = assistant.encode("said<|im_end|>", add_special_tokens=False)[-2:]
        draft = translation.back(theirs, [0.9, 0.8])
        assert draft.token_ids[-1] == target.eos_token_id

    def test_the_targets_own_are_text(self) -> None:
        target, assistant = byte_level(), metaspace()
        translation = Vocabularies(target, assistant).translation()
        ours = translation.follow(target.encode("<|im_start|>user"))
        assert assistant.decode(ours, skip_special_tokens=True) == "<|im_start|>user"

    def test_those_that_the_target_does_not_know_end_a_draft(self) -> None:
        target, assistant = byte_level(), with_tokens(metaspace(), "<tool>")
        translation = Vocabularies(target, assistant).translation()
        translation.follow(target.encode("so"))
        theirs = assistant.encode(" what<tool> was", add_special_tokens=False)
        draft = translation.back(theirs, [0.9] * len(theirs))
        assert target.decode(draft.token_ids) == " what"
        tool = assistant.convert_tokens_to_ids("<tool>")
        assert translation.back([tool], [0.9]) == ([], [])

    def test_the_end_of_a_text_is_that_of_the_target(self) -> None:
        target, assistant = byte_level(), metaspace()
        translation = Vocabularies(target, assistant).translation()
        translation.follow(target.encode("so"))
        theirs = [*assistant.encode(" what", add_special_tokens=False), assistant.eos_token_id]
        draft = translation.back(theirs, [0.9] * (len(theirs) - 1) + [0.3])
        assert target.decode(draft.token_ids) == " what<|im_end|>"
        assert draft.probs[-2:] == [0.9, 0.3]
        assert translation.back([assistant.eos_token_id], [0.3]) == ([target.eos_token_id], [0.3])
        endless = Vocabularies(byte_tokenizer(), assistant).translation()
        endless.follow(byte_tokenizer().encode("so"))
        assert endless.back([assistant.eos_token_id], [0.3]) == ([], [])

    def test_each_begins_a_text_in_its_own_way(self) -> None:
        target, assistant = metaspace(), with_tokens(metaspace("always"), "<s>")
        translation = Vocabularies(target, assistant).translation()
        ours = translation.follow(target.encode("what was"))
        assert ours[0] == 1
        assert 1 not in ours[1:]
        bare = Vocabularies(target, byte_level()).translation()
        assert byte_level().decode(bare.follow(target.encode("what was"))) == "what was"
        # Also where there is no text yet.
        assert Vocabularies(byte_level(), target).translation().follow([]) == [1]
        # And where the text has it already.
        written = Vocabularies(with_tokens(byte_level(), "<s>"), target)
        ours = written.translation().follow(written.target.ids_of("<s>what was"))
        assert ours.count(1) == 1


def test_another_text_is_translated_from_its_beginning() -> None:
    vocabularies = Vocabularies(byte_level(), metaspace())
    translation = vocabularies.translation()
    texts = [TEXT, TEXT[:200] + "and goes on", "short", "", TEXT[:300]]
    for text in texts:
        ours = translation.follow(vocabularies.target.ids_of(text))
        assert metaspace().decode(ours, skip_special_tokens=True) == text.lstrip(" ")


TOKENS = st.lists(st.integers(0, 420), max_size=12)


@given(
    names=st.tuples(st.sampled_from([*TOKENIZERS]), st.sampled_from([*TOKENIZERS])),
    steps=st.lists(st.tuples(TOKENS, TOKENS), max_size=6),
)
def test_nothing_raises_whatever_tokens_there_are(
    names: tuple[str, str], steps: list[tuple[list[int], list[int]]]
) -> None:
    """Also tokens that a tokenizer does not have: models have room for more."""
    target, assistant = (TOKENIZERS[name]() for name in names)
    translation = Vocabularies(target, assistant).translation()
    committed: list[int] = []
    for new, drafted in steps:
        committed += new
        ours = translation.follow(committed)
        assert all(0 <= token_id < len(assistant) for token_id in ours)
        probs = [0.9**depth for depth in range(1, len(drafted) + 1)]
        draft = translation.back(drafted, probs)
        assert all(0 <= token_id < len(target) for token_id in draft.token_ids)
        assert len(draft.probs) == len(draft.token_ids)
        assert draft.probs == sorted(draft.probs, reverse=True)


@given(
    names=st.sampled_from(PAIRS),
    text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
def test_any_text_is_the_same_on_both_sides(
    names: tuple[str, str], text: str, cuts: list[int]
) -> None:
    target, assistant = (Vocabulary(TOKENIZERS[name]()) for name in names)
    token_ids = target.ids_of(text)
    text = target.text_of(token_ids)
    translation = Vocabularies(TOKENIZERS[names[0]](), TOKENIZERS[names[1]]()).translation()
    num = 0
    for cut in cuts:
        num += cut
        translation.follow(token_ids[:num])
    ours = translation.follow(token_ids)[len(assistant.first_ids) :]
    assert assistant.text_of(ours).strip() == text.strip()


class TestSharedIds:
    """Vocabularies whose ids are the same need no translation."""

    def test_one_is_the_other(self) -> None:
        assert shares_ids(byte_level(), byte_level(), 400)
        assert shares_ids(byte_level(), byte_level(300, ()), 300) is False

    def test_one_has_more_tokens(self) -> None:
        more = with_tokens(byte_level(), "<tool>")
        assert shares_ids(byte_level(), more, 401)
        assert shares_ids(more, byte_level(), 448)  # the model has room for what is missing
        assert not shares_ids(more, byte_level(), 400)

    def test_one_has_another_token_at_an_id(self) -> None:
        ours, theirs = (with_tokens(byte_level(), token) for token in ("<tool>", "<file>"))
        assert not shares_ids(ours, theirs, 401)
