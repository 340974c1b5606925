"""What `NGramPool` promises one by one: drafts, bounds, errors, processes, threads."""

import ctypes
import doctest
import importlib
import pickle
import random
import signal
import threading
import time
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import ngram_pool
from ngram_pool import Draft, NGramPool
from tests.ngram_pool.checking import check_pool
from tests.ngram_pool.threads import in_threads
from tests.oracle import OraclePool


def noisy_text(num_tokens: int, seed: int = 0, alphabet: int = 60) -> list[int]:
    """Random tokens in which a third of the text repeats earlier spans."""
    rng = random.Random(seed)
    text: list[int] = [rng.randrange(alphabet) for _ in range(40)]
    while len(text) < num_tokens:
        if rng.random() < 0.5:
            start = rng.randrange(len(text) - 20)
            text += text[start : start + rng.randrange(5, 20)]
        else:
            text += [rng.randrange(alphabet) for _ in range(12)]
    return text[:num_tokens]


def as_tuple(draft: Draft) -> tuple[list[float], ...]:
    return (
        draft.token_ids.tolist(),
        draft.parents.tolist(),
        draft.depths.tolist(),
        draft.probs.tolist(),
    )


# --- drafts ---------------------------------------------------------------------------------


def test_a_draft_runs_as_deep_as_the_matched_text() -> None:
    pool = NGramPool()
    pool.observe(list(range(1000, 1100)))  # seen once
    draft = pool.draft(list(range(1000, 1008)), max_draft_tokens=200)
    assert draft.candidates() == [list(range(1008, 1100))]
    assert 0 < draft.probs[-1] < draft.probs[0]


def test_long_matches_are_measured_as_the_oracle_measures_them() -> None:
    text = [1, 2, 3, 4, 5, 6, 7] * 12 + [9, 4, 5, 6, 7, 8] + [2, 3, 4, 5, 6, 7, 1] * 12
    pool, oracle = NGramPool(1000, 4, seed=0), OraclePool(1000, 4)
    pool.observe(text)
    oracle.observe(text)
    for end in range(1, len(text), 3):
        pool.observe(text[end : end + 2], 0, is_answer=True)
        oracle.observe(text[end : end + 2], 0, is_answer=True)
        draft = pool.draft(text[:end], max_draft_tokens=12, sequence=0)
        expected = oracle.draft(text[:end], 12, 12, 0)
        assert list(zip(*as_tuple(draft), strict=True)) == expected


def test_frequent_contexts_are_read_as_far_as_the_oracle_reads_them() -> None:
    """More occurrences than any source takes, and more exchanged tokens than are looked at."""
    rng = np.random.default_rng(0)
    for n in (2, 3, 5):
        pool, oracle = NGramPool(120, n, seed=0), OraclePool(120, n)
        layer, oracle_layer = NGramPool(), OraclePool(1000, 4)
        known = [[-1, 0], [-1, 1], [0, 1]], [[2, 4], [1, 3], [2, 0]], [[0.5, 0.25]] * 3
        layer.harvest(*known)
        oracle_layer.harvest(*known)
        sequence = pool.open_sequence([layer.as_read_only()])
        oracle.open_sequence(sequence, [oracle_layer])
        text = rng.integers(0, 3, 200).tolist()
        pool.observe(text, sequence)
        oracle.observe(text, sequence)
        for _ in range(15):
            context = [*rng.integers(0, 3, 6).tolist(), int(rng.integers(0, 5))]
            draft = pool.draft(context, 8, sequence=sequence)
            expected = oracle.draft(context, 8, 8, sequence)
            assert list(zip(*as_tuple(draft), strict=True)) == expected


# --- memory ---------------------------------------------------------------------------------


def test_a_pool_that_cannot_grow_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = NGramPool(10_000)
    pool.observe([1, 2, 3, 1, 2])
    full = np.full

    def starving(shape: tuple[int, int], *args: Any) -> Any:
        if shape[0] == pool.max_ngram_size:  # the last of the three arrays
            raise MemoryError
        return full(shape, *args)

    with monkeypatch.context() as patch:
        patch.setattr(np, "full", starving)
        with pytest.raises(MemoryError):
            pool.observe(range(5000))
    check_pool(pool)
    assert pool.draft([1, 2], 1).token_ids.tolist() == [3]
    pool.observe([3, 4, 5, 6, 7])
    check_pool(pool)


# --- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token_ids", "error", "text"),
    [
        ([1, -1], ValueError, "expected token_ids from 0 to 2147483647, got -1"),
        ([2**31], ValueError, "expected token_ids from 0 to 2147483647, got 2147483648"),
        (
            [2**70],
            ValueError,
            "expected token_ids from 0 to 2147483647, got 1180591620717411303424",
        ),
        (np.array([2**63], np.uint64), ValueError, "got 9223372036854775808"),
        ([1.0], TypeError, "expected token_ids to be integers, got dtype float64"),
        ([True], TypeError, "got dtype bool"),
        (["a"], TypeError, "got dtype <U1"),
        ([None], TypeError, "got dtype object"),
        ([[1, 2]], ValueError, r"expected token_ids of shape \[num_tokens\], got shape \[1, 2\]"),
        ([[1], [2, 3]], ValueError, "expected token_ids to be one-dimensional"),
        (7, ValueError, r"got shape \[\]"),
    ],
)
def test_bad_token_ids_raise_and_change_nothing(
    token_ids: Any, error: type[Exception], text: str
) -> None:
    pool = NGramPool(100)
    pool.observe([1, 2, 3, 1, 2])
    before = as_tuple(pool.draft([1, 2], 8)), len(pool)
    with pytest.raises(error, match=text):
        pool.observe(token_ids)
    with pytest.raises(error, match=text.replace("token_ids", "context")):
        pool.draft(token_ids, 8)
    assert (as_tuple(pool.draft([1, 2], 8)), len(pool)) == before
    check_pool(pool)


@pytest.mark.parametrize("value", [0, -3])
def test_sizes_must_be_positive(value: int) -> None:
    pool = NGramPool(10)
    for call in (
        lambda: NGramPool(capacity_tokens=value),
        lambda: NGramPool(max_ngram_size=value),
        lambda: pool.draft([1], max_draft_tokens=value),
        lambda: pool.draft([1], max_draft_tokens=1, max_candidates=value),
    ):
        with pytest.raises(ValueError, match=f"to be positive, got {value}"):
            call()


@pytest.mark.parametrize("value", [1.5, "3", None, True])
def test_sizes_must_be_integers(value: Any) -> None:
    with pytest.raises(TypeError, match="expected capacity_tokens to be an integer, got"):
        NGramPool(capacity_tokens=value)
    with pytest.raises(TypeError, match="expected max_draft_tokens to be an integer, got"):
        NGramPool(10).draft([1], max_draft_tokens=value)


@pytest.mark.parametrize("sequence", [1, -1, "x", []])
def test_a_sequence_must_be_open(sequence: Any) -> None:
    pool = NGramPool(10)
    with pytest.raises(ValueError, match="expected an open sequence, got"):
        pool.observe([1], sequence)
    with pytest.raises(ValueError, match="expected an open sequence, got"):
        pool.close_sequence(sequence)
    for context in ([1], []):
        with pytest.raises(ValueError, match="expected an open sequence, got"):
            pool.draft(context, 1, sequence=sequence)
        with pytest.raises(ValueError, match="expected an open sequence, got"):
            pool.sample(context, 1, np.random.default_rng(0), sequence=sequence)
    assert len(pool) == 0


# --- processes, threads, compilation --------------------------------------------------------


def test_threads_may_share_a_pool() -> None:
    pool = NGramPool(20_000)
    layer = NGramPool().as_read_only()
    texts = {seed: [seed * 1000 + t for t in noisy_text(800, seed)] for seed in range(4)}

    def work(seed: int) -> None:
        sequence = pool.open_sequence([layer])
        for start in range(0, 800, 5):
            new = texts[seed][start : start + 5]
            pool.observe(new, sequence, is_answer=start % 20 == 0)
            pool.harvest(list(pairwise(new)), [[seed * 1000]] * 4, [[0.1]] * 4)
            draft = pool.draft(texts[seed][max(0, start - 5) : start + 1], 8, sequence=sequence)
            # Of other threads, only what they harvested is common.
            assert {t // 1000 for t in draft.token_ids.tolist() if t % 1000} <= {seed}

    assert in_threads(*(partial(work, seed) for seed in texts)) == []
    check_pool(pool)
    assert len(pool) == 3200


@pytest.mark.parametrize("name", ["ngram_pool.pool", "ngram_pool.draft"])
def test_examples_in_docstrings_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


def test_examples_of_the_readme_run() -> None:
    results = doctest.testfile("README.md", package=ngram_pool)
    assert results.attempted > 9
    assert results.failed == 0


# --- interrupts -----------------------------------------------------------------------------


def test_a_pool_is_whole_after_asynchronous_exceptions() -> None:
    rng, text = random.Random(0), noisy_text(400, seed=3, alphabet=6)
    pool = NGramPool(300, 3)

    def work(started: threading.Event) -> None:
        try:
            started.set()
            while True:
                pool.observe(text, None)
                pool.observe(text[:9], is_answer=True)
                pool.harvest([[1, 2]], [[3]], [[0.5]])
                pool.draft(text[:5], 20)
        except KeyboardInterrupt:
            pass

    for _ in range(30):
        started = threading.Event()
        thread = threading.Thread(target=work, args=(started,))
        thread.start()
        assert started.wait(10)
        time.sleep(rng.random() * 1e-3)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
        )
        thread.join(10)
        assert not thread.is_alive()
        check_pool(pool)  # which needs the lock


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
def test_long_input_is_interrupted_between_pieces() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    pool = NGramPool(2**22)
    text = np.arange(2**22) % 50_000
    pool.observe(text[: 2**10])
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.observe(text)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(pool) < 2**22
    assert pool.draft(text[:5], 1).token_ids.tolist() == [5]


def test_every_pool_has_a_secret_seed_of_its_own_unless_it_is_given_one(
    monkeypatch: pytest.MonkeyPatch, seed_of_pools: None
) -> None:
    monkeypatch.undo()  # of what makes tests repeatable
    assert len({NGramPool(10).seed for _ in range(20)}) == 20
    for seed in (0, 1, 2**31, 2**60 - 1):
        pool = NGramPool(10, seed=seed)
        assert pool.seed == pool.as_read_only().seed == seed
        assert pickle.loads(pickle.dumps(pool)).seed == seed
    for wrong, error in (
        (-1, ValueError),
        (2**60, ValueError),
        (1.0, TypeError),
        (True, TypeError),
    ):
        with pytest.raises(error, match="expected seed"):
            NGramPool(10, seed=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity", [1, 1000, 5000, 100_000])
def test_memory_stays_within_what_is_promised(capacity: int) -> None:
    pool = NGramPool(capacity)
    scratch = 64 * 7300 + 12 * 4096 + 30_000
    for _ in range(3):
        pool.observe(np.arange(capacity) % 50_000)
        last = np.arange(capacity // 2)
        contexts = np.stack([np.full(len(last), -1), last], 1)
        pool.harvest(contexts, last[:, None], np.full((len(last), 1), 0.1))
        pool.draft([1, 2, 3], 60)
        assert len(pool) == capacity
        assert pool.nbytes <= 64 * capacity + scratch
