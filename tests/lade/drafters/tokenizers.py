"""Small tokenizers of every kind, made in code."""

import json
from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

#: What they are trained on, and part of what tests translate.
TEXT = """The pool learns what was said and drafts how it may go on. A small model drafts, too: its
own tokens are not those of the large one, so that every draft goes through text. Where the text
ends in the middle of a word, the two differ; where it ends with a word, they mostly agree.

    def walk(tree, choice):
        for node in tree:
            if choice[node] == node.token_id:
                yield node  # accepted, 3 of 4

Numbers such as 12345 or 3.14 are cut in other places, as are names, quotes ("so what?") and words
of other languages: Straße, naïve, façade, Übergröße, 中文字符, кошка, 😀.
"""
SPECIAL = ("<|im_start|>", "<|im_end|>")


def _made(tokenizer: Tokenizer, **options: Any) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def _train(tokenizer: Tokenizer, trainer: Any) -> None:
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)


@cache
def byte_level(vocab_size: int = 400, special: tuple[str, ...] = SPECIAL) -> Any:
    """Return a byte-level BPE, as GPT-2's, Llama 3's and Qwen's are."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    _train(made, trainer)
    return _made(made, eos_token=special[-1]) if special else _made(made)


@cache
def metaspace(prepend_scheme: Any = "first", vocab_size: int = 260) -> Any:
    """Return a Unigram model whose spaces are part of words, and whose text begins with <s>.

    Characters that it does not know are bytes.
    """
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    _train(made, trainer)
    pieces = [tuple(piece) for piece in json.loads(made.to_str())["model"]["vocab"]]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    made.model = models.Unigram(pieces, unk_id=0, byte_fallback=True)
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
        if prepend_scheme != "never"
        else [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return _made(made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def word_pieces() -> Any:
    """Return a WordPiece model that knows no capitals, as BERT's: a text is not what it was."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]"], show_progress=False
    )
    _train(made, trainer)
    return _made(made, unk_token="[UNK]")


def with_tokens(tokenizer: Any, *tokens: str) -> Any:
    """Return a copy of a tokenizer with more special tokens."""
    copied = _made(
        Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()), **tokenizer.special_tokens_map
    )
    copied.add_tokens([AddedToken(token, special=True) for token in tokens])
    return copied
