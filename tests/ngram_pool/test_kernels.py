"""Kernels: compiled once, within their arrays whatever these hold."""

import inspect
import os
import re
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

import ngram_pool.pool
from ngram_pool import NGramPool, _kernels
from tests.ngram_pool.checking import check_pool
from tests.ngram_pool.test_copies import KNOWN
from tests.ngram_pool.test_pool import noisy_text

ROOT = Path(__file__).parents[2]
TEXT = noisy_text(400, seed=3, alphabet=6)


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
def test_each_kernel_is_compiled_once_and_for_all_when_it_may_be_needed() -> None:
    # Those that Python calls; what they call in turn is compiled, or cached, with them.
    names = {*re.findall(r"_kernels\.([a-z_]+)\b\(?", inspect.getsource(ngram_pool.pool))}
    names = {name for name in names if hasattr(_kernels, name)}
    of_chains = {"draft_rows"}
    program = f"""
from ngram_pool import NGramPool, _kernels
kernels = {{name: getattr(_kernels, name) for name in {sorted(names)!r}}}
compiled = lambda: {{name for name, kernel in kernels.items() if kernel.signatures}}
pool = NGramPool(50)
first = compiled()
pool.draft_chains([[1]], [1], 1)
print(sorted(first), sorted(compiled() - first), sep="|")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    groups = names - of_chains, of_chains
    assert done.stdout.decode().strip() == "|".join(str(sorted(group)) for group in groups)
    pool = NGramPool(50)
    sequence = pool.open_sequence([NGramPool(50).as_read_only()])
    given = np.array([[1, 2]], np.int32)
    given.setflags(write=False)
    pool.draft_chains(given, [2], 3, [sequence], num_new=1)
    pool.sample([1, 2], 100, np.random.default_rng(0), max_candidates=3, sequence=sequence)
    for name, kernel in vars(_kernels).items():  # none is compiled twice
        if isinstance(kernel, Dispatcher) and name != "hash_with":
            assert len(kernel.nopython_signatures) <= 1, name


# --- within arrays --------------------------------------------------------------------------


def noise(array: np.ndarray[Any, Any], rng: np.random.Generator, most: int) -> None:
    """Overwrite some items, or all, by values of any size, or by such as positions have."""
    flat = array.reshape(-1)
    num = int(rng.choice([1, 3, len(flat)]))
    info = np.iinfo(array.dtype)
    low, high = (info.min, info.max) if rng.random() < 0.5 else (max(-2, info.min), most + 2)
    places = rng.integers(0, len(flat), num)
    flat[places] = rng.integers(low, high, num, array.dtype, endpoint=True)


def noisy_pool(rng: np.random.Generator, is_read_only: bool) -> NGramPool:
    capacity, max_ngram_size = int(rng.choice([1, 2, 7, 64, 100])), int(rng.integers(1, 6))
    pool = NGramPool(capacity, max_ngram_size)
    pool.observe(TEXT[: int(rng.integers(0, 200))])
    pool = pool.as_read_only() if is_read_only else pool
    for array in (*pool._held, *pool._harvested.held[:4]):
        if rng.random() < 0.7:
            noise(array, rng, 200)
    return pool


def use(pool: NGramPool, layers: list[NGramPool]) -> None:
    """Do all that can be done with a pool; what it says must be a draft."""
    sequence = pool.open_sequence(layers=layers)
    for start in (0, 40, 80):
        context = TEXT[start : start + 9]
        draft = pool.draft(context, 30, sequence=sequence)
        assert ((draft.probs >= 0) & (draft.probs <= 1)).all()
        sampled = pool.sample(context, 30, np.random.default_rng(start), 4, 0)
        assert np.isfinite(sampled.probs).all()
        pool.observe(TEXT[start : start + 20], sequence, is_answer=start > 0)
        pool.observe(TEXT[start : start + 5])
        pool.harvest(*KNOWN)
        assert all(count > 0 for count in pool.unigrams().values())
        other = pool.open_sequence(layers=layers)
        texts, lengths = [TEXT[start : start + 20], TEXT[start + 20 : start + 40]], [20, 12]
        chains = pool.draft_chains(texts, lengths, 6, [sequence, other], num_new=[3, 12])
        assert (chains.lengths <= 6).all()
        with suppress(ValueError):  # of noise that is no token
            NGramPool(100).observe(next(pool.texts()), None)


# In a process of its own, because Numba's cache does not tell code with checks from other code, and
# because an endless loop in a kernel cannot be interrupted.
ON_NOISE = """
import sys
import numpy as np
from ngram_pool import _kernels
from tests.ngram_pool.test_kernels import noisy_pool, use

try:  # whether anything is checked at all
    few = np.zeros((5, 1), np.int64)
    _kernels.read_context(few, 7, few[0].astype(np.int32), few[1])
except IndexError:
    print("checked", end=" ")
for seed in range(int(sys.argv[1])):
    rng = np.random.default_rng(seed)
    use(noisy_pool(rng, False), [noisy_pool(rng, True)] * int(rng.integers(0, 3)))
print("ended")
"""


@pytest.mark.exhaustive  # compiles all kernels, with checks
def test_kernels_stay_within_arrays_and_end_whatever_these_hold(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_NOISE, "2000"],
        env={
            **os.environ,
            "NUMBA_BOUNDSCHECK": "1",
            "NUMBA_CACHE_DIR": str(tmp_path),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.stdout == "checked ended\n", done.stderr[-3000:]


# --- positions, buckets and weights ---------------------------------------------------------


def test_a_sequence_not_used_for_long_follows_when_positions_are_lowered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ngram_pool.pool, "_POSITION_LIMIT", 140)
    pool = NGramPool(40, 3)
    idle = pool.open_sequence()
    pool.observe([1, 2, 3], idle)
    pool.observe([4], idle, is_answer=True)
    for num_tokens in (30, 300):  # its tail is held yet; it is forgotten
        pool.observe(np.arange(num_tokens) + 10)
        check_pool(pool)
        pool.observe([5, 6], idle, is_answer=True)
        pool.draft_chains([[6, 7]], [2], 2, [idle], [1])
        check_pool(pool)
        assert pool.draft([5], 2, sequence=idle).token_ids.tolist() == [6, 7]


def test_a_bucket_is_read_no_further_than_256_entries_and_no_text_fills_that_of_a_secret_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a text made so that its n-grams share a bucket would make every draft slow."""
    hashed = partial(_kernels.hash_with, 0, multiplier=_kernels.HASH_MULTIPLIER)
    bucket = hashed(5) % 4096
    tokens = [t for t in range(6, 2_000_000) if hashed(t) % 4096 == bucket][:300]
    for num_others, expected in ((255, [7]), (256, [])):
        pool = NGramPool(4096, seed=0)
        pool.observe([5, 7, *[tokens[0]] * num_others])
        assert pool.draft([5], 1).token_ids.tolist() == expected
    monkeypatch.undo()  # of what makes seeds repeatable
    for seed in (0, None):
        pool = NGramPool(4096, seed=seed)
        pool.observe(tokens)
        _, counts = np.unique(pool._held.links[: len(tokens), 0], return_counts=True)
        chained = int((pool._held.links[: len(tokens), 0] >= 0).sum())
        assert chained == 299 if seed == 0 else chained < 60, counts
