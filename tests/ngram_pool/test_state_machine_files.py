"""The pool against the oracle once more, with files, forgetting and merging."""

import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from ngram_pool import NGramPool
from tests.ngram_pool import test_state_machine
from tests.ngram_pool.test_state_machine import small_limits as small_limits
from tests.oracle import OraclePool


class LivingPoolMachine(test_state_machine.PoolMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.saved: OraclePool | None = None
        self.kept: list[int] = []  # handles: a sequence is closed where nobody has its own

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(token_ids=st.lists(st.integers(0, 4), min_size=1, max_size=4))
    def forget(self, token_ids: list[int]) -> None:
        assert self.pool.forget(token_ids) == self.oracle.forget(token_ids)

    @rule(other=test_state_machine.PoolMachine.layers)
    def merge(self, other: Any) -> None:
        pool, oracle = other
        self.pool.merge(pool)
        self.oracle.merge(oracle)

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
            opened = self.pool._sequences[handle] if handle else None
            if opened is not None and handle is not None:
                loaded._num_opened = handle
                self.kept.append(loaded.open_sequence(opened.prewarmed, opened.layers))
                prior, layers = self.oracle.priors[handle], self.oracle.layers[handle]
                oracle.open_sequence(handle, prior, layers)
        loaded._num_opened = self.pool._num_opened
        self.pool, self.oracle = loaded, oracle

    @precondition(lambda self: self.saved is not None)
    @rule(target=test_state_machine.PoolMachine.layers)
    def read_what_was_saved(self) -> Any:
        layer = NGramPool.load(self.folder / "saved.pool", read_only=True)
        return layer, copy.deepcopy(self.saved)

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def the_text_is_the_same(self) -> None:
        assert [text.tolist() for text in self.pool.texts()] == self.oracle.texts()


LivingPoolMachine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
test_living_pool_equals_oracle = pytest.mark.exhaustive(
    pytest.mark.usefixtures("small_limits")(LivingPoolMachine.TestCase)
)


@pytest.mark.usefixtures("small_limits")
def test_a_layer_of_shorter_ngrams_is_found_after_longer_ones() -> None:
    state = LivingPoolMachine()
    state.start(capacity=25, max_ngram_size=4, known=[], seed=10_000)
    state.observe(is_answer=False, sequence=0, token_ids=[0, 0, 3, 1])
    layer = state.make_layer(
        capacity=34, known=[], max_ngram_size=1, seed=0, texts=[[0, 2, 0, 3, 0]]
    )
    sequence = state.open_sequence(has_prewarmed=False, layers=[layer])
    for context in ([0, 2, 0, 3], [2, 0, 3], [0, 3], [3]):
        state.draft(context=context, max_draft_tokens=8, max_candidates=None, sequence=sequence)
    state.teardown()
