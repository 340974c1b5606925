"""Text of tokens that come one by one is that of all at once, whatever the tokenizer.

Private, since no command lets one choose tokens.
"""

from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lade.models.stream import TextStream
from tests.lade.tiny import byte_tokenizer


def metaspace_tokenizer() -> Any:
    """Return a tokenizer that strips the space before the first word, as Llama 2's does."""
    words = ["<unk>", "▁Hello", "▁world", "▁", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {word: i for i, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def streamed(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """Return the parts of a text, which are those of all tokens decoded at once."""
    stream = TextStream(tokenizer)
    parts = [*map(stream.put, token_ids), stream.end()]
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    assert "".join(parts) == tokenizer.decode(token_ids, **options)
    return parts


def test_any_text_any_begin_of_it_and_any_bytes() -> None:
    tokenizer = byte_tokenizer()
    for text in ("añ€😀中文 ﷽", "a\N{REPLACEMENT CHARACTER}b", "👨‍👩‍👧 e\u0301"):
        token_ids = tokenizer(text)["input_ids"]
        for cut in range(len(token_ids) + 1):  # also where a character is cut
            streamed(tokenizer, token_ids[:cut])
    for row in np.random.default_rng(0).integers(0, 256, (50, 40)):
        streamed(tokenizer, row.tolist())


def test_words_come_as_soon_as_they_are_known() -> None:
    tokenizer = metaspace_tokenizer()
    words = ["▁Hello", "▁world", "<0xE2>", "<0x82>", "<0xAC>", "▁Hello", "!"]
    parts = streamed(tokenizer, tokenizer.convert_tokens_to_ids(words * 3))
    assert parts[:7] == ["Hello", " world", "", "", "€", " Hello", "!"]
