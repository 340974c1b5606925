"""Pieces of text: exact, as early as they can be, with thinking told apart."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from lade.chat.pieces import Piece, PieceStream, TextStream
from tests.lade.tiny import byte_tokenizer

TEXTS = [
    "plain words",
    "añ€😀中文 ﷽",
    "a\N{REPLACEMENT CHARACTER}b",
    "",
    "👨‍👩‍👧 e\u0301",
    "\n\n  x",
]


def metaspace_tokenizer() -> Any:
    """Return a tokenizer that strips the space before the first word, as Llama 2's does."""
    words = [
        "<unk>",
        "▁Hello",
        "▁world",
        "▁",
        "!",
        "lo",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    made = Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def wordpiece_tokenizer() -> Any:
    words = ["[UNK]", "he", "##llo", "world", ".", "'", "s"]
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")


def streamed(tokenizer: Any, token_ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*map(stream.put, token_ids), stream.end()]


def decoded(tokenizer: Any, token_ids: list[int]) -> Any:
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_parts_are_what_decoding_all_at_once_gives(text: str) -> None:
    tokenizer = byte_tokenizer()
    token_ids = tokenizer(text)["input_ids"]
    assert "".join(streamed(tokenizer, token_ids)) == text
    for cut in range(len(token_ids)):  # also where a character is cut
        expected = decoded(tokenizer, token_ids[:cut])
        assert "".join(streamed(tokenizer, token_ids[:cut])) == expected


def test_a_cut_answer_ends_before_the_character_that_was_cut() -> None:
    tokenizer = byte_tokenizer()
    token_ids = tokenizer("a€😀")["input_ids"]
    for num_tokens, text in ((7, "a€"), (5, "a€"), (3, "a"), (len(token_ids), "a€😀")):
        stream = PieceStream(tokenizer, [])
        pieces = [piece for each in token_ids[:num_tokens] for piece in stream.put(each, False)]
        pieces += stream.end(is_cut=True)
        assert "".join(piece.text for piece in pieces) == text


def test_any_bytes_are_streamed_as_they_are_decoded() -> None:
    import numpy as np

    tokenizer = byte_tokenizer()
    rng = np.random.default_rng(0)
    for _ in range(50):
        token_ids = rng.integers(0, 256, 40).tolist()
        assert "".join(streamed(tokenizer, token_ids)) == decoded(tokenizer, token_ids)


def test_spaces_between_words_are_kept_and_the_first_is_not() -> None:
    tokenizer = metaspace_tokenizer()
    token_ids = tokenizer.convert_tokens_to_ids(
        ["▁Hello", "▁world", "<0xE2>", "<0x82>", "<0xAC>", "▁Hello", "!"] * 3
    )
    assert streamed(tokenizer, token_ids)[:7] == ["Hello", " world", "", "", "€", " Hello", "!"]
    assert "".join(streamed(tokenizer, token_ids)) == decoded(tokenizer, token_ids)


def test_parts_of_words_are_joined() -> None:
    tokenizer = wordpiece_tokenizer()
    token_ids = tokenizer.convert_tokens_to_ids(["he", "##llo", "world", ".", "he", "'", "s"] * 3)
    assert streamed(tokenizer, token_ids)[:3] == ["he", "llo", " world"]
    assert "".join(streamed(tokenizer, token_ids)) == decoded(tokenizer, token_ids)


# --- pieces -------------------------------------------------------------------------------------


def pieces_of(text: str, *, prompt: str = "", tokenizer: Any = None, step: int = 1) -> list[Piece]:
    tokenizer = tokenizer or byte_tokenizer()
    stream = PieceStream(tokenizer, tokenizer(prompt)["input_ids"])
    found = [
        piece
        for i, token_id in enumerate(tokenizer(text)["input_ids"])
        for piece in stream.put(token_id, is_drafted=i % 2 == 0)
    ]
    return found + stream.end()


def joined(pieces: list[Piece]) -> tuple[str, str]:
    thinking = "".join(piece.text for piece in pieces if piece.is_thinking)
    return thinking, "".join(piece.text for piece in pieces if not piece.is_thinking)


@pytest.mark.parametrize(
    ("prompt", "text", "thinking", "answer"),
    [
        ("", "no thinking", "", "no thinking"),
        ("", "<think>\nhm, é</think>\n\nyes", "\nhm, é", "\n\nyes"),
        ("", " \n<think>a</think>b", " \na", "b"),
        ("", "[THINK]a[/THINK]b", "a", "b"),
        ("", "<think>a </thin b </think>c</think>", "a </thin b ", "c</think>"),
        ("", "<think>never ends </thi", "never ends </thi", ""),
        ("", "say <think>a</think>", "", "say <think>a</think>"),
        ("", "<thin", "", "<thin"),
        ("", "  ", "", "  "),
        ("", "<think></think>", "", ""),
        ("assistant\n<think>\n", "a</think>b", "a", "b"),
        ("assistant\n<think>\n\n</think>\n\n", "b", "", "b"),
    ],
)
def test_thinking_is_told_from_the_answer(
    prompt: str, text: str, thinking: str, answer: str
) -> None:
    assert joined(pieces_of(text, prompt=prompt)) == (thinking, answer)


def test_marks_that_are_special_tokens_are_found_and_others_are_no_text() -> None:
    tokenizer = byte_tokenizer()
    marks = ["<think>", "</think>", "<|im_end|>", "<|channel>", "<channel|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    assert len(tokenizer("<think>")["input_ids"]) == 1
    found = pieces_of("<think>hm</think>yes<|im_end|>", tokenizer=tokenizer)
    assert joined(found) == ("hm", "yes")
    alike = byte_tokenizer()  # as Qwen's, which names none of them but the end
    alike.add_tokens([AddedToken(mark, special=True) for mark in marks])
    assert joined(pieces_of("<think>hm</think>yes<|im_end|>", tokenizer=alike)) == ("hm", "yes")
    found = pieces_of("<|channel>thought\nhm<channel|>yes<|im_end|>", tokenizer=tokenizer)
    assert joined(found) == ("hm", "yes")


def test_marks_of_the_tokenizers_own_template_are_known() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.response_template = {"fields": {"thinking": {"open": "((", "close": "))"}}}
    assert joined(pieces_of("((hm))yes", tokenizer=tokenizer)) == ("hm", "yes")


def test_text_is_held_back_only_while_a_mark_may_come() -> None:
    tokenizer = byte_tokenizer()
    stream = PieceStream(tokenizer, [])
    shown = [
        "".join(piece.text for piece in stream.put(token_id, False))
        for token_id in tokenizer("<then</th")["input_ids"]
    ]
    assert shown == ["", "", "", "<the", "n", "<", "/", "t", "h"]


def test_a_character_was_drafted_if_all_its_tokens_were() -> None:
    tokenizer = byte_tokenizer()
    stream = PieceStream(tokenizer, [])
    drafted = [True, True, False, True, True, True]
    found = [
        piece
        for token_id, is_drafted in zip(tokenizer("a€éb")["input_ids"], drafted, strict=False)
        for piece in stream.put(token_id, is_drafted)
    ]
    assert found == [Piece("a", True, False), Piece("€", False, False), Piece("é", True, False)]
