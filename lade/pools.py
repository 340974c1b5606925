"""Pools on disk: whose text a pool holds, told by tokenizer and model.

The format of the file is `ngram_pool`'s, which knows neither; this is where both get their names.
"""

import hashlib
import json
from os import PathLike
from typing import Any

from lade.compat import Model
from lade.prewarming.fingerprint import fingerprint_of
from ngram_pool import NGramPool


def load_pool(
    path: str | PathLike[str],
    *,
    tokenizer: Any = None,
    model: Model | None = None,
    read_only: bool = False,
) -> NGramPool:
    """Load a pool that `save_pool`, `NGramPool.save` or `lade pool build` wrote.

    The file is read into memory, never changed: what the pool learns is in memory alone until it
    is saved. Whatever is done to the file meanwhile, pools that came of it go on.

        pool = lade.load_pool("mine.pool", tokenizer=tokenizer, model=model)

    Args:
        path: the file.
        tokenizer: of transformers; a pool of another vocabulary or other merges is refused. Added
            tokens do not count. None to trust that it is the right one.
        model: the model that is to draft; what another one found likely is left out, with a
            warning, and the text is kept. None to keep everything.
        read_only: whether the pool is only drafted from. Such pools may be layers of a call,
            `pool=[mine, *others]`, and are shared between threads without waiting.

    Raises:
        ngram_pool.PoolFileError: the file is damaged, of a newer version or no pool, or its text is
            that of another tokenizer.
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

    Whoever may read the file may read all text in it. It may be saved while other threads use it.

    Args:
        pool: the pool; remembers whose it is.
        path: the file.
        tokenizer: that of the pool's text, so that no other is used with it later. None to save
            what the pool knows of it.
        model: the one whose likely successors were learned, likewise.

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
    """Return what tokenizers share if their ids mean the same, such as "49152-1f3a9c0d2b4e5f60".

    It is the size of the vocabulary, and a hash of it and of the merges. Tokens added to them, such
    as those for padding or for tools, do not count: text without them has the same ids.

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
    """Return a fingerprint, given or known.

    Raises:
        ValueError: they differ.
    """
    if known and given and known != given:
        raise ValueError(f"expected the {what} that the pool learned from, {known}, got {given}")
    return given or known
