"""Pools on disk, labelled with the tokenizer and the model of their text.

`ngram_pool` defines the file format and knows neither; this file computes the labels.
"""

import hashlib
import json
from os import PathLike
from typing import Any

from lade.compat import Model
from lade.compat.fingerprint import fingerprint_of
from ngram_pool import NGramPool


def load_pool(
    path: str | PathLike[str],
    *,
    tokenizer: Any = None,
    model: Model | None = None,
    read_only: bool = False,
) -> NGramPool:
    """Load a pool that `save_pool`, `NGramPool.save` or `lade pool build` wrote.

    The file is read into memory and never changed: what the pool learns stays in memory until the
    pool is saved. Later changes to the file do not affect the pool.

        pool = lade.load_pool("mine.pool", tokenizer=tokenizer, model=model)

    Args:
        path: the file.
        tokenizer: of transformers; a pool of another vocabulary or other merges is refused. Added
            tokens do not count. None skips the check.
        model: the model that the pool is for; the likely successors of another model are left out,
            with a warning, and the text is kept. None to keep everything.
        read_only: whether the pool is only drafted from. Such pools may be layers of a call,
            `pool=[mine, *others]`, and are shared between threads without waiting.

    Raises:
        ngram_pool.PoolFileError: the file is damaged, of a newer version or no pool, or its text
            has another tokenizer.
        OSError: the file cannot be read.
        TypeError: `tokenizer` has no vocabulary.
    """
    return NGramPool.load(
        path,
        tokenizer="" if tokenizer is None else fingerprint_of_tokenizer(tokenizer),
        model="" if model is None else fingerprint_of(model) or "",
        read_only=read_only,
    )


def save_pool(
    pool: NGramPool,
    path: str | PathLike[str],
    *,
    tokenizer: Any = None,
    model: Model | None = None,
) -> None:
    """Save a pool to one file that only its owner may read; an older file is replaced as a whole.

    Everyone who can read the file can read all text in it. A pool may be saved while other threads
    use it.

    Args:
        pool: the pool; it keeps the labels of tokenizer and model.
        path: the file.
        tokenizer: the tokenizer of the pool's text; `load_pool` refuses any other. None to save the
            label that the pool has.
        model: the model whose likely successors were learned, likewise.

    Raises:
        OSError: the file cannot be written; an older one is as it was.
        TypeError: `tokenizer` has no vocabulary.
        ValueError: the pool is known to be of another tokenizer or model.
    """
    if tokenizer is not None:
        pool.tokenizer = _same("tokenizer", pool.tokenizer, fingerprint_of_tokenizer(tokenizer))
    if model is not None:
        pool.model = _same("model", pool.model, fingerprint_of(model) or "")
    pool.save(path)


def fingerprint_of_tokenizer(tokenizer: Any) -> str:
    """Return a label that tokenizers with equal ids share, such as "49152-1f3a9c0d2b4e5f60".

    It is the size of the vocabulary, and a hash of vocabulary and merges. Added tokens, such as
    tokens for padding or tools, do not count: text without them has the same ids.

    Raises:
        TypeError: `tokenizer` has no vocabulary.
    """
    merges: list[Any] = []
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        vocabulary = backend.get_vocab(with_added_tokens=False)
        merges = json.loads(backend.to_str())["model"].get("merges") or []
    elif hasattr(tokenizer, "get_vocab"):
        added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
        vocabulary = {token: i for token, i in tokenizer.get_vocab().items() if token not in added}
    else:
        raise TypeError(f"expected a tokenizer of transformers, got {type(tokenizer).__name__}")
    # Merges were texts, "a b", before tokenizers 0.20, and are pairs now.
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    ordered = sorted(vocabulary.items(), key=lambda item: item[1])
    digest = hashlib.sha256(json.dumps([ordered, pairs]).encode()).hexdigest()
    return f"{len(ordered)}-{digest[:16]}"


def _same(what: str, known: str, given: str) -> str:
    """Return the given fingerprint, or else the known one.

    Raises:
        ValueError: both exist, and differ.
    """
    if known and given and known != given:
        raise ValueError(f"expected the {what} that the pool learned from, {known}, got {given}")
    return given or known
