"""Pools on disk: whose they are, and who may use them."""

import copy
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

import lade
from lade.hf.pool_files import fingerprint_of_tokenizer
from ngram_pool import NGramPool, PoolFileError
from tests.lade.tiny import byte_tokenizer, tiny_model


def merged_tokenizer(*merges: tuple[str, str]) -> Any:
    """Return a tokenizer of three letters and some pairs, with merges in another order or not."""
    from transformers import PreTrainedTokenizerFast

    tokens = ["a", "b", "c", "ab", "bc"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, [*merges])))


def test_a_tokenizer_is_told_by_its_vocabulary_and_merges() -> None:
    first = merged_tokenizer(("a", "b"), ("b", "c"))
    other = merged_tokenizer(("b", "c"), ("a", "b"))
    assert first.get_vocab() == other.get_vocab()
    assert first.encode("abc") != other.encode("abc")
    assert fingerprint_of_tokenizer(first) != fingerprint_of_tokenizer(other)
    assert fingerprint_of_tokenizer(first) == fingerprint_of_tokenizer(copy.deepcopy(first))
    assert fingerprint_of_tokenizer(byte_tokenizer()).startswith("256-")


def test_added_tokens_do_not_make_another_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    before = fingerprint_of_tokenizer(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.add_tokens(["<tool>"])
    assert fingerprint_of_tokenizer(tokenizer) == before


def test_a_tokenizer_in_python_is_told_by_its_vocabulary() -> None:
    class Slow:
        def __init__(self, *tokens: str) -> None:
            self.tokens = tokens

        def get_vocab(self) -> dict[str, int]:
            return {token: i for i, token in enumerate(self.tokens)}

        def get_added_vocab(self) -> dict[str, int]:
            return {"<pad>": self.tokens.index("<pad>")} if "<pad>" in self.tokens else {}

    assert fingerprint_of_tokenizer(Slow("a", "b")) == fingerprint_of_tokenizer(
        Slow("a", "b", "<pad>")
    )
    assert fingerprint_of_tokenizer(Slow("a", "b")) != fingerprint_of_tokenizer(Slow("b", "a"))
    with pytest.raises(TypeError, match="expected a tokenizer of transformers, got str"):
        fingerprint_of_tokenizer("smollm2")


def test_a_pool_is_loaded_for_its_tokenizer_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.pool"
    first, other = merged_tokenizer(("a", "b")), merged_tokenizer(("b", "c"))
    pool = NGramPool()
    pool.observe([1, 2, 3, 4, 1, 2])
    lade.save_pool(pool, path, tokenizer=first)
    loaded = lade.load_pool(str(path), tokenizer=first)
    assert loaded.draft([1, 2], 1).token_ids.tolist() == [3]
    loaded.observe([5])
    assert not loaded.is_read_only
    assert lade.load_pool(path, read_only=True).is_read_only
    with pytest.raises(PoolFileError, match="tokenizer"):
        lade.load_pool(path, tokenizer=other)
    with pytest.raises(ValueError, match="expected the tokenizer that the pool learned from"):
        lade.save_pool(loaded, tmp_path / "other.pool", tokenizer=other)
    assert not (tmp_path / "other.pool").exists()
    lade.save_pool(loaded, path)  # as what it was loaded for
    with pytest.raises(PoolFileError, match="tokenizer"):
        lade.load_pool(path, tokenizer=other)


def test_what_another_model_found_likely_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.pool"
    first, other = tiny_model("llama", seed=1), tiny_model("llama", seed=2)
    pool = NGramPool()
    pool.observe([1, 2, 3, 1])
    pool.harvest([[-1, 9]], [[7]], [[0.9]])
    lade.save_pool(pool, path, model=first)
    assert lade.load_pool(path, model=first).draft([9], 1).token_ids.tolist() == [7]
    with pytest.warns(UserWarning, match="model"):
        loaded = lade.load_pool(path, model=other)
    assert len(loaded.draft([9], 1)) == 0
    assert loaded.draft([1], 1).token_ids.tolist() == [2]
    lade.save_pool(loaded, path, model=other)
    with pytest.raises(ValueError, match="expected the model that the pool learned from"):
        lade.save_pool(loaded, path, model=first)
