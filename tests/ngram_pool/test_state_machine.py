"""The pool against the oracle, over any interleaving of operations."""

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
    rule,
)

import ngram_pool.pool
from ngram_pool import NGramPool
from tests.oracle import OraclePool

# A small alphabet makes long matches, ties and shared buckets frequent.
tokens = st.lists(st.integers(0, 4), max_size=30)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let growth by doubling and the lowering of positions happen within a few dozen tokens."""
    monkeypatch.setattr(ngram_pool.pool, "_FIRST_NUM_ROWS", 2)
    monkeypatch.setattr(ngram_pool.pool, "_POSITION_LIMIT", 75)


class PoolMachine(RuleBasedStateMachine):
    sequences: Bundle[int] = Bundle("sequences")

    @initialize(capacity=st.integers(1, 25), max_ngram_size=st.integers(1, 5))
    def start(self, capacity: int, max_ngram_size: int) -> None:
        self.pool = NGramPool(capacity, max_ngram_size)
        self.oracle = OraclePool(capacity, max_ngram_size)

    @rule(target=sequences)
    def open_sequence(self) -> int:
        sequence = self.pool.open_sequence()
        self.oracle.open_sequence(sequence)
        return sequence

    @rule(sequence=consumes(sequences))
    def close_sequence(self, sequence: int) -> None:
        self.pool.close_sequence(sequence)
        self.oracle.close_sequence(sequence)

    @rule()
    def restart_sequence_0(self) -> None:
        self.pool.close_sequence(0)
        self.oracle.close_sequence(0)

    @rule(token_ids=tokens, sequence=st.just(0) | sequences)
    def observe(self, token_ids: list[int], sequence: int) -> None:
        self.pool.observe(token_ids, sequence)
        self.oracle.observe(token_ids, sequence)

    @rule(token_ids=tokens, sequence=sequences)
    def observe_interleaved(self, token_ids: list[int], sequence: int) -> None:
        for token_id in token_ids:
            self.observe([token_id], sequence)
            self.observe([token_id], 0)

    @rule(
        context=st.lists(st.integers(0, 4), min_size=1, max_size=12),
        max_nodes=st.integers(1, 40),
        max_candidates=st.integers(1, 6) | st.none(),
    )
    def draft(self, context: list[int], max_nodes: int, max_candidates: int | None) -> None:
        draft = self.pool.draft(context, max_nodes, max_candidates)
        got = list(
            zip(
                draft.token_ids.tolist(),
                draft.parents.tolist(),
                draft.depths.tolist(),
                draft.probs.tolist(),
                strict=True,
            )
        )
        assert got == self.oracle.draft(context, max_nodes, max_candidates or max_nodes)

    @rule(
        context=st.lists(st.integers(0, 4), min_size=1, max_size=12),
        max_nodes=st.integers(1, 40),
        max_candidates=st.integers(1, 6) | st.none(),
        seed=st.integers(0, 1000),
    )
    def sample(
        self, context: list[int], max_nodes: int, max_candidates: int | None, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        draft = self.pool.sample(context, max_nodes, rng, max_candidates)
        supports = [
            {token_id: prob for token_id, prob in zip(ids, probs, strict=True) if prob > 0}
            for ids, probs in zip(
                draft.support_token_ids.tolist(), draft.support_probs.tolist(), strict=True
            )
        ]
        got = list(
            zip(
                draft.token_ids.tolist(),
                draft.parents.tolist(),
                draft.depths.tolist(),
                draft.probs.tolist(),
                supports,
                strict=True,
            )
        )
        uniforms = np.random.default_rng(seed).random(max_nodes).tolist()
        assert got == self.oracle.sample(context, max_nodes, max_candidates or max_nodes, uniforms)

    @invariant()
    def arrays_are_sound(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert len(self.pool) == len(self.oracle.held())


PoolMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
test_pool_equals_oracle = pytest.mark.usefixtures("small_limits")(PoolMachine.TestCase)
