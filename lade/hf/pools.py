"""The pools of a call: at most one that learns, and any number of read-only ones."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from typing import Any

from ngram_pool import NamedPool, NGramPool

AnyPool = NGramPool | NamedPool
Pools = AnyPool | Sequence[AnyPool]


def pools_of(pool: Pools | None) -> list[AnyPool]:
    """Return the pools of an argument `pool`, or raise.

    Raises:
        TypeError: one of them is no pool.
        ValueError: more than one would learn.
    """
    if pool is None:
        return []
    asked: Sequence[Any] = pool if isinstance(pool, list | tuple) else [pool]
    pools: list[AnyPool] = []
    for each in asked:
        if not isinstance(each, NGramPool | NamedPool):
            is_name = isinstance(each, str | PathLike)
            raise TypeError(
                "expected pool to be a lade.NGramPool, a named pool, or a list of these, got "
                f"{each!r}{'; lade.load_pool reads one from a file' if is_name else ''}"
            )
        pools.append(each)
    _split([each for each in pools if isinstance(each, NGramPool)])
    return pools


@contextmanager
def opened(pool: Pools | None) -> Iterator[tuple[NGramPool | None, tuple[NGramPool, ...]]]:
    """Open an argument `pool`: yield the pool that learns, or None, and the read-only pools.

    Raises:
        TypeError, ValueError: as for `pools_of`.
    """
    with ExitStack() as stack:
        pools: list[NGramPool] = []
        for each in pools_of(pool):
            found = each if isinstance(each, NGramPool) else stack.enter_context(each.open())
            pools.append(found)
        yield _split(pools)


def _split(pools: Sequence[NGramPool]) -> tuple[NGramPool | None, tuple[NGramPool, ...]]:
    learning = [pool for pool in pools if not pool.is_read_only]
    if len(learning) > 1:
        raise ValueError(
            f"expected at most one pool that learns, got {len(learning)}: make the others "
            "read-only by lade.load_pool(..., read_only=True) or pool.as_read_only()"
        )
    return learning[0] if learning else None, tuple(pool for pool in pools if pool.is_read_only)
