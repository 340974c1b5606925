"""What `NGramPool` promises one by one: drafts, bounds, errors, processes, threads."""

import copy
import doctest
import importlib
import inspect
import os
import random
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

import ngram_pool.chains
import ngram_pool.pool
from ngram_pool import Draft, NGramPool, SuccessorTable, _kernels
from ngram_pool.pool import compile_chains, compile_texts
from tests.ngram_pool.checking import check_pool
from tests.ngram_pool.table_oracle import OracleTable
from tests.ngram_pool.threads import in_threads
from tests.oracle import OraclePool, check_tree

JIT_IS_OFF = os.environ.get("NUMBA_DISABLE_JIT") == "1"


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


def test_the_longest_match_decides_before_a_more_frequent_shorter_one() -> None:
    pool = NGramPool()
    pool._weights[:] = 0.0
    pool._weights[: _kernels.MATCH_ROWS, _kernels.TEXT] = 1.0  # the text and no more
    pool.observe([7, 2, 3, 100, 1, 2, 3, 200, 7, 2, 3, 100, 7, 2, 3, 100])
    assert pool.draft([1, 2, 3], max_draft_tokens=1).token_ids.tolist() == [200]  # not 100


def test_backs_off_to_the_last_token_alone() -> None:
    pool = NGramPool()
    pool.observe([1, 2, 3])
    assert pool.draft([9, 9, 9, 2], max_draft_tokens=4).token_ids.tolist() == [3]


def test_a_draft_runs_as_deep_as_the_matched_text() -> None:
    pool = NGramPool()
    pool.observe(list(range(1000, 1100)))  # seen once
    draft = pool.draft(list(range(1000, 1008)), max_draft_tokens=200)
    assert draft.candidates() == [list(range(1008, 1100))]
    assert 0 < draft.probs[-1] < draft.probs[0]


def test_unknown_context_gives_an_empty_draft() -> None:
    pool = NGramPool()
    assert len(pool.draft([1], max_draft_tokens=5)) == 0
    pool.observe([1, 2])
    assert len(pool.draft([2], max_draft_tokens=5)) == 0  # seen, but nothing ever followed
    assert len(pool.draft([], max_draft_tokens=5)) == 0


def test_no_ngram_runs_across_two_sequences() -> None:
    pool = NGramPool()
    other = pool.open_sequence()
    for mine, theirs in zip([1, 2, 3, 4], [11, 12, 13, 14], strict=True):
        pool.observe([mine])
        pool.observe([theirs], other)
    assert pool.draft([1], 10).candidates() == [[2, 3, 4]]
    assert pool.draft([11], 10).candidates() == [[12, 13, 14]]
    pool.close_sequence(other)
    third = pool.open_sequence()
    pool.observe([12, 99], third)  # does not continue the closed one, but shares its text
    assert set(pool.draft([12], 10).token_ids.tolist()) == {13, 14, 99}
    assert len(pool.draft([14], 2)) == 0


@pytest.mark.parametrize("max_draft_tokens", [1, 5, 33, 200])
@pytest.mark.parametrize("max_candidates", [1, 3, None])
def test_draft_is_a_tree_within_its_bounds(
    max_draft_tokens: int, max_candidates: int | None
) -> None:
    text = noisy_text(3000)
    pool = NGramPool()
    pool.observe(text)
    for end in range(2000, 2100):
        draft = pool.draft(text[end - 8 : end], max_draft_tokens, max_candidates)
        check_tree(draft, max_draft_tokens, max_candidates)
        assert (np.diff(draft.probs) <= 0).all()
        assert 0 < draft.probs.min() <= draft.probs.max() <= 1
        children_of_root = draft.probs[draft.parents == -1]
        assert children_of_root.sum() <= 1 + 1e-12


def test_first_nodes_of_a_draft_are_the_smaller_draft() -> None:
    text = noisy_text(2000)
    pool = NGramPool()
    pool.observe(text)
    for end in range(1000, 1050):
        large = pool.draft(text[end - 5 : end], max_draft_tokens=20)
        assert as_tuple(large.first(7)) == as_tuple(
            pool.draft(text[end - 5 : end], max_draft_tokens=7)
        )


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
        pool._weights[:] = rng.normal(0.0, 0.3, pool._weights.shape)
        oracle.weights = pool._weights.tolist()
        prewarmed, oracle_prior = SuccessorTable(64), OracleTable(64)
        known = [[-1, 0], [-1, 1], [0, 1]], [[2, 4], [1, 3], [2, 0]], [[0.5, 0.25]] * 3
        prewarmed.put(*known)
        oracle_prior.put(*known)
        sequence = pool.open_sequence(prewarmed)
        oracle.open_sequence(sequence, oracle_prior)
        text = rng.integers(0, 3, 200).tolist()
        pool.observe(text, sequence)
        oracle.observe(text, sequence)
        for _ in range(15):
            context = [*rng.integers(0, 3, 6).tolist(), int(rng.integers(0, 5))]
            draft = pool.draft(context, 8, sequence=sequence)
            expected = oracle.draft(context, 8, 8, sequence)
            assert list(zip(*as_tuple(draft), strict=True)) == expected


def test_a_bucket_is_read_no_further_than_256_entries() -> None:
    """Else a text made so that its n-grams share a bucket would make every draft slow."""
    bucket = _kernels.hash_step(0, 5) % 4096
    other = next(t for t in range(6, 10**6) if _kernels.hash_step(0, t) % 4096 == bucket)
    for num_others, expected in ((255, [7]), (256, [])):
        pool = NGramPool(4096, seed=0)
        pool.observe([5, 7] + [other] * num_others)
        assert pool.draft([5], 1).token_ids.tolist() == expected


# --- memory ---------------------------------------------------------------------------------


def test_an_untaught_old_pool_behaves_like_a_new_one_given_the_newest_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ngram_pool.pool, "_FIRST_NUM_ROWS", 16)
    rng = random.Random(5)
    capacity = 300
    old, new = NGramPool(capacity, seed=0), NGramPool(capacity, seed=0)
    arrivals: list[tuple[int, int]] = []
    handles = [0, old.open_sequence(), old.open_sequence()]
    for token_id in noisy_text(2500, seed=2, alphabet=12):
        arrivals.append((rng.randrange(3), token_id))
        old.observe([token_id], handles[arrivals[-1][0]])
    new_handles = [0, new.open_sequence(), new.open_sequence()]
    for sequence, token_id in arrivals[-capacity:]:
        new.observe([token_id], new_handles[sequence])
    assert len(old) == len(new) == capacity
    assert old.nbytes == new.nbytes
    for _ in range(300):
        context = [rng.randrange(12) for _ in range(rng.randrange(1, 4))]
        assert as_tuple(old.draft(context, 16)) == as_tuple(new.draft(context, 16))


def test_one_call_and_many_calls_observe_the_same() -> None:
    text = noisy_text(1500)
    whole, pieces = NGramPool(1000, seed=0), NGramPool(1000, seed=0)
    whole.observe(np.array(text, np.int32))
    for start in range(0, len(text), 7):
        pieces.observe(text[start : start + 7])
    whole.observe(text[:300], is_answer=True)
    for start in range(0, 300, 7):
        pieces.observe(text[start : min(start + 7, 300)], is_answer=True)
    for end in range(600, 700):
        context = text[end - 4 : end]
        assert as_tuple(whole.draft(context, 16, sequence=0)) == as_tuple(
            pieces.draft(context, 16, sequence=0)
        )


# 16,400 is the worst: the harvest has a context more than a power of two, hence room for twice as
# many, and the buckets are of one row each.
@pytest.mark.parametrize(
    "capacity", [1, 1000, 4096, 5000, 16_400, *([] if JIT_IS_OFF else [100_000])]
)
def test_memory_stays_within_64_bytes_a_token(capacity: int) -> None:
    pool = NGramPool(capacity_tokens=capacity)
    scratch = pool.nbytes - 52 * min(capacity, 4096)
    pool.observe(np.arange(3 * capacity) % 50_000 if not JIT_IS_OFF else np.arange(2 * capacity))
    num_contexts = max(1000, capacity // 2)  # at least four times as many as there is room for
    contexts = np.stack([np.full(num_contexts, -1), np.arange(num_contexts)], 1)
    likeliest = np.arange(8 * num_contexts).reshape(-1, 8) % 50_000
    pool.harvest(contexts, likeliest, np.full(likeliest.shape, 0.1))
    assert len(pool) == capacity
    assert len(pool._harvested) > 0.9 * max(64, capacity // 16)
    assert pool.nbytes <= 64 * capacity + max(scratch, 0)


def test_what_is_promised_is_all_that_is_allocated() -> None:
    """Of text, harvest and drafts, one after the other, as Python's own account has it."""
    for max_ngram_size in (1, 2, 3, 7, 13, 33):
        capacity = 2**12 if JIT_IS_OFF else 40_000
        NGramPool(10, max_ngram_size)  # compiles
        tracemalloc.start()
        pool = NGramPool(capacity, max_ngram_size)
        pool.observe(np.arange(2 * capacity) % 50_000)
        contexts = np.stack([np.full(capacity // 4, -1), np.arange(capacity // 4)], 1)
        pool.harvest(contexts, contexts[:, 1:], np.full((len(contexts), 1), 0.1))
        del contexts
        pool.draft([1, 2, 3], 200)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        promised = (20 + 8 * max_ngram_size) * capacity + 200 * 2800 + 12 * 4096 + 30_000
        assert pool.nbytes <= promised
        assert held < pool.nbytes + 20_000  # nothing is left out of the account
        # Growing holds the old arrays and the new; 16 bytes a token are the arguments above.
        assert peak < 1.5 * promised + 16 * capacity


def test_a_pool_that_cannot_grow_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_pool.pool, "_FIRST_NUM_ROWS", 8)
    pool = NGramPool(100)
    pool.observe([1, 2, 3, 1, 2])
    full = np.full

    def starving(shape: tuple[int, int], *args: Any) -> Any:
        if shape[0] == pool.max_ngram_size:  # the last of the three arrays
            raise MemoryError
        return full(shape, *args)

    with monkeypatch.context() as patch:
        patch.setattr(np, "full", starving)
        with pytest.raises(MemoryError):
            pool.observe(range(20))
    check_pool(pool)
    assert pool.draft([1, 2], 1).token_ids.tolist() == [3]
    pool.observe([3, 4, 5, 6, 7])
    check_pool(pool)


def test_a_pool_without_room_for_a_large_draft_goes_on_with_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = noisy_text(300)
    pool = NGramPool()
    pool.observe(text)
    before = as_tuple(pool.draft(text[-3:], 64)), pool.nbytes
    empty = np.empty

    def starving(shape: Any, *args: Any) -> Any:
        if shape == (1001, _kernels.MAX_FOUND):  # one of the last arrays
            raise MemoryError
        return empty(shape, *args)

    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", starving)
        with pytest.raises(MemoryError):
            pool.draft(text[-3:], 1000)
    # All or nothing; else a sample of 1000 nodes would be written where there is no room.
    assert (as_tuple(pool.draft(text[-3:], 64)), pool.nbytes) == before


def test_memory_grows_with_the_text_and_not_at_once() -> None:
    pool = NGramPool(capacity_tokens=2**20)
    assert pool.nbytes < 2**19
    assert repr(pool).startswith("NGramPool(capacity_tokens=1048576, max_ngram_size=5, held=0, ")


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


def test_capacity_has_an_upper_bound() -> None:
    with pytest.raises(ValueError, match="expected capacity_tokens of at most 536870912"):
        NGramPool(capacity_tokens=2**40)


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


def test_a_prior_must_be_a_table() -> None:
    prewarmed: Any = {}
    with pytest.raises(TypeError, match="expected prewarmed to be a SuccessorTable, got"):
        NGramPool(10).open_sequence(prewarmed)


# --- processes, threads, compilation --------------------------------------------------------

DIGEST_PROGRAM = """
import hashlib, sys
from tests.ngram_pool.test_pool import as_tuple, noisy_text
from ngram_pool import NGramPool
text = noisy_text(2000)
pool = NGramPool(1500, seed=0)
pool.observe(text)
drafts = [as_tuple(pool.draft(text[end - 4 : end], 12)) for end in range(1000, 1100)]
print(hashlib.sha256(repr(drafts).encode()).hexdigest(), "torch" in sys.modules)
"""


@pytest.mark.exhaustive
def test_drafts_are_the_same_in_every_process_and_torch_is_never_imported() -> None:
    outputs = set()
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        result = subprocess.run(
            [sys.executable, "-c", DIGEST_PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(result.stdout.strip())
    (output,) = outputs
    assert output.endswith(" False")


def test_threads_may_share_a_pool() -> None:
    pool = NGramPool(20_000)
    prewarmed = SuccessorTable(100)
    texts = {seed: [seed * 1000 + t for t in noisy_text(800, seed)] for seed in range(4)}

    def work(seed: int) -> None:
        sequence = pool.open_sequence(prewarmed)
        for start in range(0, 800, 5):
            new = texts[seed][start : start + 5]
            pool.observe(new, sequence, is_answer=start % 20 == 0)
            pool.harvest(list(pairwise(new)), [[seed * 1000]] * 4, [[0.1]] * 4)
            draft = pool.draft(texts[seed][max(0, start - 5) : start + 1], 8, sequence=sequence)
            assert all(token // 1000 == seed for token in draft.token_ids.tolist())

    assert in_threads(*(partial(work, seed) for seed in texts)) == []
    check_pool(pool)
    assert len(pool) == 3200


@pytest.mark.skipif(JIT_IS_OFF, reason="nothing is compiled with NUMBA_DISABLE_JIT=1")
def test_each_kernel_is_compiled_once_and_for_all_when_it_may_be_needed() -> None:
    # Those that Python calls; what they call in turn is compiled, or cached, with them.
    source = inspect.getsource(ngram_pool.pool) + inspect.getsource(ngram_pool.chains)
    names = re.findall(r"_kernels\.([a-z_]+)\(", source)
    of_chains = {"observe_rows", "draft_rows", "find_negative"}
    of_texts = {"find_unsound", "write_texts", "find_occurrences", "forget"}
    of_drafts = {*names} - of_chains - of_texts
    assert of_drafts == {
        *("append", "reindex", "rebase", "lower", "grow_tree"),
        *("count_unigrams", "find_worthwhile"),
    }
    program = f"""
from ngram_pool import NGramPool, _kernels
kernels = {{name: getattr(_kernels, name) for name in {sorted(names)!r}}}
compiled = lambda: {{name for name, kernel in kernels.items() if kernel.signatures}}
pool = NGramPool(50)
first = compiled()
list(pool.texts())
texts = compiled() - first
pool.draft_chains([[1]], [1], 1)
print(sorted(first), sorted(texts), sorted(compiled() - first - texts), sep="|")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    groups = (of_drafts, of_texts, of_chains)
    assert done.stdout.decode().strip() == "|".join(str(sorted(group)) for group in groups)

    kernels = {name: getattr(_kernels, name) for name in names}
    compile_texts()
    compile_chains()
    pool = NGramPool(50)
    signatures = {name: list(kernel.nopython_signatures) for name, kernel in kernels.items()}
    assert all(signatures.values())
    sequence = pool.open_sequence(SuccessorTable(10))
    pool.observe([1, 2, 3, 1, 2], sequence)
    pool.observe([3, 1, 2], sequence, is_answer=True)
    pool.draft([1, 2], 100, max_candidates=3, sequence=sequence)
    pool.sample([1, 2], 100, np.random.default_rng(0), max_candidates=3, sequence=sequence)
    pool.harvest([[1, 2]], [[3, 4]], [[0.5, 0.25]])
    pool.explore(100, [3], sequence)
    pool.draft_chains([[1, 2]], [2], 3, [sequence], num_new=[1])
    given = np.array([[1, 2]], np.int32)
    given.setflags(write=False)
    pool.draft_chains(given, [2], 3, [sequence], num_new=1)
    pool.forget([3, 1])
    check_pool(pool)
    for name, kernel in kernels.items():
        assert list(kernel.nopython_signatures) == signatures[name]
    for name, kernel in vars(_kernels).items():  # nor is any compiled twice, whoever calls it
        if isinstance(kernel, Dispatcher) and name not in ("hash_with", "hash_step"):
            assert len(kernel.nopython_signatures) <= 1, name


def test_construction_compiles_the_kernels_that_a_harvest_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: dict[str, set[Any]] = {"put_successors": set(), "rehash": set()}

    def recorder(name: str) -> Callable[..., int]:
        function = getattr(_kernels, name)

        def record(*args: Any) -> int:
            calls[name].add(tuple(getattr(arg, "dtype", type(arg)) for arg in args))
            number: int = function(*args)
            return number

        return record

    for name in calls:
        monkeypatch.setattr(_kernels, name, recorder(name))
    pool = NGramPool(10_000)
    at_first = copy.deepcopy(calls)
    assert all(at_first.values())
    contexts = np.arange(1000).reshape(-1, 2)
    pool.harvest(contexts.tolist(), contexts[:, :1], np.full((500, 1), 0.5))
    assert calls == at_first


def test_a_folder_that_cannot_be_written_costs_the_cache_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def njit(**options: bool) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr("numba.njit", njit)
    with pytest.warns(UserWarning, match="compiles anew in each process.* NUMBA_CACHE_DIR"):
        assert _kernels.kernel(len) is len


@pytest.mark.parametrize("name", ["ngram_pool.pool", "ngram_pool.draft", "ngram_pool.table"])
def test_examples_in_docstrings_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
