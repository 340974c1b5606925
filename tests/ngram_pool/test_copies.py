"""Copies and pickles of pools that other threads are using."""

import copy
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ngram_pool import NGramPool
from tests.grids import thinned
from tests.ngram_pool.checking import check_pool
from tests.ngram_pool.test_pool import as_tuple, noisy_text

TEXT = noisy_text(300, alphabet=12)
KNOWN = [[t % 60 - 1, t % 7] for t in range(200)], [[t % 9] for t in range(200)], [[0.5]] * 200

WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda pool: pickle.loads(pickle.dumps(pool)),
    "pickle without copying": lambda pool: pickled_beside(pool),
}


def pickled_beside(pool: NGramPool) -> NGramPool:
    """Pickle as for another process that shares memory: arrays come back read-only."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(pool, protocol=5, buffer_callback=buffers.append)
    restored: NGramPool = pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])
    return restored


def use(pool: NGramPool, rng: random.Random) -> None:
    sequence = pool.open_sequence()
    pool.observe(TEXT[rng.randrange(250) :], sequence)
    pool.observe(TEXT[: rng.randrange(9)], sequence, is_answer=True)
    pool.harvest(*KNOWN)
    pool.draft(TEXT[:5], 20, None, sequence)
    pool.close_sequence(sequence)


@contextmanager
def used(pool: NGramPool) -> Iterator[None]:
    """Let three threads use a pool, until the block ends."""
    done = threading.Event()
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not done.is_set():
                use(pool, rng)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not errors


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_a_pool_of_its_own(way: str) -> None:
    pool = NGramPool(200)
    sequence = pool.open_sequence()
    pool.observe(TEXT, sequence)
    pool.observe(TEXT[:20], 0, is_answer=True)
    pool.harvest(*KNOWN)
    copied = WAYS[way](pool)
    assert copied.num_open_sequences == 0
    with pytest.raises(ValueError, match="expected an open sequence, got 1"):
        copied.observe([1], sequence)
    assert copied.open_sequence() == 2  # no other one's number
    contexts = [TEXT[end - 4 : end] for end in range(4, 200, 9)]

    def drafts(of: NGramPool) -> list[Any]:
        return [as_tuple(of.draft(context, 12, sequence=0)) for context in contexts]

    before = drafts(pool)
    assert drafts(copied) == before
    for one, other in ((copied, pool), (pool, copied)):
        others = drafts(other)
        one.observe(TEXT[50:90], 0, is_answer=True)
        one.harvest([[-1, t] for t in range(12)], [[3]] * 12, [[0.9]] * 12)
        assert drafts(one) != before
        assert drafts(other) == others
        check_pool(one)
        check_pool(other)
    assert drafts(copied) == drafts(pool)


@pytest.mark.parametrize("way", thinned(WAYS, "copy", "pickle"))
def test_what_others_are_using_is_copied_whole(way: str) -> None:
    pool = NGramPool(2000)
    with used(pool):
        for _ in range(6):
            copied = WAYS[way](pool)
            check_pool(copied)
            copied.observe(TEXT, is_answer=True)
            check_pool(copied)
            copied.harvest(*KNOWN)
