"""Corpora: named pools that are only read, chosen by requests and changed by an operator."""

import re
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from lade.server.errors import ApiError
from lade.server.keys import KeyOwner
from ngram_pool import NGramPool

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST = 64


class Corpora:
    """Pools by name, in memory alone. Methods may be called from any thread.

    Args:
        tokenizer: of the model.
        at_start: those that are there from the start, whatever they take.
        most_bytes: memory of all of them, beyond which none is added.

    Raises:
        ValueError: a name is none.
    """

    def __init__(self, tokenizer: Any, at_start: Mapping[str, NGramPool], most_bytes: int) -> None:
        for name in at_start:
            check_name(name)
        self._tokenizer = tokenizer
        self._most_bytes = most_bytes
        self._pools = {name: pool.as_read_only() for name, pool in at_start.items()}
        self._lock = Lock()

    def of(self, names: Sequence[str], owner: KeyOwner) -> list[NGramPool]:
        """Return the pools that a request names.

        Raises:
            ApiError: its owner may not draft from one, or there is none; which of both is not told.
        """
        pools = []
        for name in dict.fromkeys(names):
            pool = self._pools.get(name)
            if pool is None or not (owner.corpora is None or name in owner.corpora):
                raise ApiError(
                    404,
                    f"expected pools that this key may draft from, got {name!r}",
                    param="pools",
                    code="pool_not_found",
                )
            pools.append(pool)
        return pools

    def put(self, name: str, texts: Sequence[str]) -> dict[str, Any]:
        """Make a corpus of texts, in place of one of that name; return what is told of it.

        Raises:
            ApiError: it is empty, or there is no room for it.
        """
        encode = self._tokenizer._tokenizer.encode_batch_fast
        ids = [each.ids for text in texts for each in encode([text], add_special_tokens=False)]
        num_tokens = sum(map(len, ids))
        if not num_tokens:
            raise ApiError(400, "expected a text of one token or more, got none", param="text")
        pool = NGramPool(num_tokens)
        for text_ids in ids:
            pool.observe(text_ids, None)
        pool = pool.as_read_only()
        with self._lock:
            others = {each: held for each, held in self._pools.items() if each != name}
            num_bytes = pool.nbytes + sum(held.nbytes for held in others.values())
            if len(others) >= _MOST or num_bytes > self._most_bytes:
                raise ApiError(
                    413,
                    f"expected at most {_MOST} pools, of {self._most_bytes:,} bytes together, "
                    f"got {len(others) + 1} of {num_bytes:,}",
                    code="too_large",
                )
            self._pools = {**others, name: pool}
        return _told(name, pool)

    def delete(self, name: str) -> dict[str, Any]:
        """Delete a corpus; calls under way that draft from it are its last.

        Raises:
            ApiError: there is none of that name.
        """
        with self._lock:
            if name not in self._pools:
                raise ApiError(404, f"expected a pool, got {name!r}", code="pool_not_found")
            self._pools = {each: held for each, held in self._pools.items() if each != name}
        return {"id": name, "object": "pool", "deleted": True}

    def told(self) -> list[dict[str, Any]]:
        """Return what is told of each, by name."""
        return [_told(*each) for each in sorted(self._pools.items())]


def check_name(name: str) -> None:
    """Raise if a corpus cannot be named so.

    Raises:
        ValueError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            "expected the name of a pool, up to 64 letters, digits, dots, dashes and underscores, "
            f"got {name[:80]!r}"
        )


def _told(name: str, pool: NGramPool) -> dict[str, Any]:
    return {"id": name, "object": "pool", "num_tokens": len(pool), "num_bytes": pool.nbytes}
