"""The pool against the oracle, over any interleaving of operations; then with files, too."""

import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

import ngram_pool.pool
from ngram_pool import NGramPool
from tests.ngram_pool.checking import check_pool
from tests.ngram_pool.test_pool import as_tuple
from tests.oracle import OraclePool

# A small alphabet makes long matches, ties and shared buckets frequent.
tokens = st.lists(st.integers(0, 4), max_size=30)
contexts = st.lists(st.integers(0, 4), min_size=1, max_size=12)
# Tables also know a token that no text has. What rows leave out is padded with -1.
successors = st.lists(
    st.tuples(st.integers(0, 5), st.floats(0, 1, width=32)), max_size=3, unique_by=lambda x: x[0]
)
entries = st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 4), successors), max_size=12)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let growth by doubling and the lowering of positions happen within a few dozen tokens."""
    monkeypatch.setattr(ngram_pool.pool, "_FIRST_NUM_ROWS", 2)
    monkeypatch.setattr(ngram_pool.pool, "_POSITION_LIMIT", 75)


def as_arguments(known: list[tuple[int, int, list[tuple[int, float]]]]) -> tuple[Any, Any, Any]:
    """Contexts, token ids and probabilities, as `put` and `harvest` take them."""
    pairs = np.array([row[:2] for row in known], np.int64).reshape(-1, 2)
    padded = [[*row[2], *[(-1, 0.0)] * 3][:3] for row in known]
    ids = np.array([[token_id for token_id, _ in row] for row in padded], np.int64)
    probs = np.array([[prob for _, prob in row] for row in padded], np.float32)
    return pairs, ids.reshape(-1, 3), probs.reshape(-1, 3)


class PoolMachine(RuleBasedStateMachine):
    sequences: Bundle[int] = Bundle("sequences")
    layers: Bundle[tuple[NGramPool, OraclePool]] = Bundle("layers")

    @initialize(
        capacity=st.integers(1, 25),
        max_ngram_size=st.integers(1, 5),
        seed=st.integers(0, 2**60 - 1),
    )
    def start(self, capacity: int, max_ngram_size: int, seed: int) -> None:
        self.pool = NGramPool(capacity, max_ngram_size, seed)
        self.oracle = OraclePool(capacity, max_ngram_size, seed)
        # Any weights will do, and among random ones none is without effect.
        weights = self.pool._weights
        weights[:] = np.random.default_rng(seed).normal(0.0, 0.3, weights.shape)
        self.oracle.weights = weights.tolist()

    @rule(
        target=layers,
        capacity=st.integers(1, 40),
        max_ngram_size=st.integers(1, 7),
        seed=st.integers(0, 2**60 - 1),
        texts=st.lists(tokens, max_size=2),
        known=entries,
    )
    def make_layer(
        self, capacity: int, max_ngram_size: int, seed: int, texts: Any, known: Any
    ) -> tuple[NGramPool, OraclePool]:
        pool = NGramPool(capacity, max_ngram_size, seed)
        oracle = OraclePool(capacity, max_ngram_size, seed)
        for text in texts:
            sequence = pool.open_sequence()
            oracle.open_sequence(sequence)
            pool.observe(text, sequence)
            oracle.observe(text, sequence)
        pool.harvest(*as_arguments(known))
        oracle.harvest(*(array.tolist() for array in as_arguments(known)))
        return pool.as_read_only(), oracle

    @rule(target=sequences, layers=st.lists(layers, max_size=6))
    def open_sequence(self, layers: Any) -> int:
        sequence = self.pool.open_sequence([pool for pool, _ in layers])
        self.oracle.open_sequence(sequence, [oracle for _, oracle in layers])
        return sequence

    @rule(sequence=consumes(sequences))
    def close_sequence(self, sequence: int) -> None:
        self.pool.close_sequence(sequence)
        self.oracle.close_sequence(sequence)

    @rule()
    def restart_sequence_0(self) -> None:
        self.pool.close_sequence(0)
        self.oracle.close_sequence(0)

    @rule(token_ids=tokens, sequence=st.just(0) | sequences, is_answer=st.booleans())
    def observe(self, token_ids: list[int], sequence: int, is_answer: bool) -> None:
        self.pool.observe(token_ids, sequence, is_answer)
        self.oracle.observe(token_ids, sequence, is_answer)

    @rule(token_ids=tokens, sequence=sequences, is_answer=st.booleans())
    def observe_interleaved(self, token_ids: list[int], sequence: int, is_answer: bool) -> None:
        for token_id in token_ids:
            self.observe([token_id], sequence, is_answer)
            self.observe([token_id], 0, False)

    @rule(known=entries)
    def harvest(self, known: Any) -> None:
        self.pool.harvest(*as_arguments(known))
        self.oracle.harvest(*(array.tolist() for array in as_arguments(known)))

    @rule(
        context=contexts,
        max_draft_tokens=st.integers(1, 40),
        max_candidates=st.integers(1, 6) | st.none(),
        sequence=st.none() | st.just(0) | sequences,
    )
    def draft(
        self,
        context: list[int],
        max_draft_tokens: int,
        max_candidates: int | None,
        sequence: int | None,
    ) -> None:
        draft = self.pool.draft(context, max_draft_tokens, max_candidates, sequence)
        got = list(zip(*as_tuple(draft), strict=True))
        max_leaves = max_candidates or max_draft_tokens
        assert got == self.oracle.draft(context, max_draft_tokens, max_leaves, sequence)

    @rule(
        context=contexts,
        max_draft_tokens=st.integers(1, 40),
        max_candidates=st.integers(1, 6) | st.none(),
        seed=st.integers(0, 1000),
        sequence=st.none() | st.just(0) | sequences,
    )
    def sample(
        self,
        context: list[int],
        max_draft_tokens: int,
        max_candidates: int | None,
        seed: int,
        sequence: int | None,
    ) -> None:
        rng = np.random.default_rng(seed)
        draft = self.pool.sample(context, max_draft_tokens, rng, max_candidates, sequence)
        supports = [
            {token_id: prob for token_id, prob in zip(ids, probs, strict=True) if prob > 0}
            for ids, probs in zip(
                draft.support_token_ids.tolist(), draft.support_probs.tolist(), strict=True
            )
        ]
        got = list(zip(*as_tuple(draft), supports, strict=True))
        uniforms = np.random.default_rng(seed).random(max_draft_tokens).tolist()
        max_leaves = max_candidates or max_draft_tokens
        assert got == self.oracle.sample(context, max_draft_tokens, max_leaves, uniforms, sequence)

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def arrays_are_sound(self) -> None:
        check_pool(self.pool)
        assert len(self.pool) == len(self.oracle.held())
        assert [text.tolist() for text in self.pool.texts()] == self.oracle.texts()

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def what_was_learned_is_the_same(self) -> None:
        assert self.pool._weights.tolist() == self.oracle.weights


PoolMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
test_pool_equals_oracle = pytest.mark.usefixtures("small_limits")(PoolMachine.TestCase)


class LivingPoolMachine(PoolMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.saved: OraclePool | None = None

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(target=PoolMachine.layers)
    def freeze(self) -> tuple[NGramPool, OraclePool]:
        return self.pool.as_read_only(), copy.deepcopy(self.oracle)

    @rule()
    def save(self) -> None:
        self.pool.save(self.folder / "saved.pool")
        self.saved = copy.deepcopy(self.oracle)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def go_on_with_what_was_saved(self) -> None:
        """Load the file, and open every sequence in it that is open now, under its handle."""
        loaded = NGramPool.load(self.folder / "saved.pool")
        assert self.saved is not None
        oracle = copy.deepcopy(self.saved)
        for handle in [*oracle.open]:
            if handle not in (0, None):
                del oracle.open[handle]
        for handle in [*self.oracle.open]:
            if handle:
                loaded._num_opened = handle
                loaded.open_sequence(self.pool._sequences[handle].layers)
                oracle.open_sequence(handle, self.oracle.layers[handle])
        loaded._num_opened = self.pool._num_opened
        self.pool, self.oracle = loaded, oracle

    @precondition(lambda self: self.saved is not None)
    @rule(target=PoolMachine.layers)
    def read_what_was_saved(self) -> Any:
        layer = NGramPool.load(self.folder / "saved.pool", read_only=True)
        return layer, copy.deepcopy(self.saved)


LivingPoolMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
test_living_pool_equals_oracle = pytest.mark.exhaustive(
    pytest.mark.usefixtures("small_limits")(LivingPoolMachine.TestCase)
)


@pytest.mark.usefixtures("small_limits")
def test_a_layer_of_shorter_ngrams_is_found_after_longer_ones() -> None:
    state = LivingPoolMachine()
    state.start(capacity=25, max_ngram_size=4, seed=10_000)
    state.observe(is_answer=False, sequence=0, token_ids=[0, 0, 3, 1])
    layer = state.make_layer(
        capacity=34, known=[], max_ngram_size=1, seed=0, texts=[[0, 2, 0, 3, 0]]
    )
    sequence = state.open_sequence(layers=[layer])
    for context in ([0, 2, 0, 3], [2, 0, 3], [0, 3], [3]):
        state.draft(context=context, max_draft_tokens=8, max_candidates=None, sequence=sequence)
    state.teardown()
