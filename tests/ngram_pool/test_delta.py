"""What pools send each other: all that each learned itself, once."""

import copy
import itertools
import json
import multiprocessing
import os
import pickle
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ngram_pool.origins
import ngram_pool.state
from ngram_pool import (
    NGramPool,
    PoolDelta,
    PoolDeltaError,
    PoolStamp,
    ReadOnlyPoolError,
    SuccessorTable,
    _kernels,
)
from tests.ngram_pool.checking import check_pool
from tests.ngram_pool.test_interrupts import interrupted
from tests.ngram_pool.test_pool import noisy_text

ONE, TWO, THREE = (noisy_text(60, seed=seed, alphabet=8) for seed in (1, 2, 3))


def texts_of(pool: NGramPool | PoolDelta) -> list[list[int]]:
    return [text.tolist() for text in pool.texts()]


def tokens_of(pool: NGramPool | PoolDelta) -> list[int]:
    return [*itertools.chain.from_iterable(texts_of(pool))]


def successors_of(pool: NGramPool) -> dict[tuple[int, int], list[int]]:
    table = pool._state.harvested
    known = {tuple(pair): table.get(*pair) for pair in table.contexts()}
    return {pair: found[0].tolist() for pair, found in known.items() if found is not None}


def contexts_of(delta: PoolDelta) -> list[tuple[int, int]]:
    table = SuccessorTable(1000)
    table.take_successors(delta.keys, delta.successor_ids, delta.costs)
    return sorted(map(tuple, table.contexts().tolist()))


# --- what is in a delta -------------------------------------------------------------------------


def test_a_delta_has_what_was_observed_since_the_stamp() -> None:
    pool = NGramPool(1000)
    pool.observe(ONE)
    since = pool.stamp()
    assert not pool.delta(since)
    pool.observe(TWO)
    other = pool.open_sequence()
    pool.observe(THREE, other)
    delta = pool.delta(since)
    assert texts_of(delta) == [TWO, THREE]
    assert (delta.since, delta.num_tokens, delta.num_texts) == (since, 120, 2)
    pool.observe([1], other)
    assert texts_of(pool.delta(delta.until)) == [[1]]
    assert texts_of(pool.delta()) == [ONE + TWO, [*THREE, 1]]


def test_a_delta_has_what_was_observed_to_draft_chains() -> None:
    pool, other = NGramPool(1000), NGramPool(1000)
    beside = pool.beside()
    other.observe(ONE)
    for one in (pool, beside):
        one.merge(other.delta())
    rows = [pool.open_sequence(), beside.open_sequence(), pool.open_sequence()]
    pool.draft_chains(
        [TWO, THREE, ONE], [60, 60, 30], 2, rows, [60, 60, 30], pools=[pool, beside, pool]
    )
    assert texts_of(pool.delta()) == [TWO, ONE[:30]]
    assert texts_of(beside.delta()) == [THREE]
    assert pool.stamp().origin != beside.stamp().origin
    assert beside.merge(pool.delta())
    assert texts_of(beside) == [ONE, THREE, TWO, ONE[:30]]
    assert texts_of(beside.delta()) == [THREE]
    check_pool(beside)


def test_a_delta_has_what_was_harvested_since_the_stamp_once() -> None:
    pool = NGramPool(1000)
    pool.harvest([[-1, 1], [1, 2]], [[5], [6]], [[0.5], [0.25]])
    since = pool.stamp()
    pool.harvest([[1, 2]], [[7]], [[0.75]])
    pool.harvest_tree(3, [4], [-1], [[9, 8]], [[0.5, 0.25]])
    delta = pool.delta(since)
    assert contexts_of(delta) == [(-1, 4), (1, 2), (3, 4)]
    assert not pool.delta(delta.until)
    assert contexts_of(pool.delta()) == [(-1, 1), (-1, 4), (1, 2), (3, 4)]
    assert not pool.delta(with_harvest=False)
    other = NGramPool(1000)
    other.merge(delta)
    assert successors_of(other) == {(-1, 4): [9, 8], (1, 2): [7], (3, 4): [9, 8]}
    ids, counts = other._state.unigrams
    assert dict(zip(ids[ids >= 0].tolist(), counts[ids >= 0].round(2).tolist(), strict=True)) == {
        7: 0.75,
        8: 0.5,
        9: 1.0,
    }


def test_when_contexts_were_put_survives_the_growth_of_the_table_and_forgetting() -> None:
    pool = NGramPool(100_000)
    contexts = np.arange(6000).reshape(-1, 2)
    pool.harvest(contexts[:1000], contexts[:1000, :1], np.full((1000, 1), 0.5))
    since = pool.stamp()
    pool.harvest(contexts[1000:], contexts[1000:, :1], np.full((2000, 1), 0.5))
    held = set(map(tuple, pool._state.harvested.contexts().tolist()))
    delta = pool.delta(since)
    assert {*contexts_of_many(delta)} == {*map(tuple, contexts[1000:].tolist())} & held
    pool.forget([2000])
    assert len(contexts_of_many(pool.delta(since))) == delta.num_contexts - 1


def contexts_of_many(delta: PoolDelta) -> list[tuple[int, int]]:
    return [(int(key) // 2**31 - 1, int(key) % 2**31) for key in delta.keys]


def test_what_was_overwritten_or_forgotten_is_not_sent() -> None:
    pool = NGramPool(40)
    since = pool.stamp()
    pool.observe(range(100, 160))
    assert texts_of(pool.delta(since)) == [[*range(120, 160)]]
    pool.forget([130, 131])
    assert texts_of(pool.delta(since)) == [[*range(120, 130)], [*range(132, 160)]]


def test_positions_may_be_lowered_between_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, other = NGramPool(50), NGramPool(5000)
    stamp, tokens = None, itertools.count()
    with monkeypatch.context() as patch:
        patch.setattr(ngram_pool.state, "_POSITION_LIMIT", 150)
        for _ in range(60):
            pool.observe([next(tokens) for _ in range(7)])
            delta = pool.delta(stamp)
            other.merge(delta)
            stamp = delta.until
    assert pool._state.counts[_kernels.LOWERED] > 0
    assert tokens_of(other) == [*range(420)]
    assert len(texts_of(other)) < 10  # one, but for where positions were lowered
    check_pool(pool)
    check_pool(other)


# --- what comes of merging it -------------------------------------------------------------------


def test_a_sequence_goes_on_from_delta_to_delta() -> None:
    pool, other = NGramPool(1000), NGramPool(1000)
    one, two = pool.open_sequence(), pool.open_sequence()
    stamp = pool.stamp()
    for begin in range(0, 60, 5):
        pool.observe(ONE[begin : begin + 5], one)
        if begin % 10 == 0:  # not in every delta
            pool.observe(TWO[begin : begin + 10], two)
        delta = pool.delta(stamp)
        other.merge(delta)
        stamp = delta.until
    assert texts_of(other) == [ONE, TWO]
    assert other.num_open_sequences == 0


def test_what_came_from_others_is_not_sent_back() -> None:
    one, two = NGramPool(1000), NGramPool(1000)
    one.observe(ONE)
    one.harvest([[1, 2]], [[3]], [[0.5]])
    two.observe(TWO)
    two.merge(one.delta())
    two.observe(THREE)
    delta = two.delta()
    assert texts_of(delta) == [TWO + THREE]
    assert delta.num_contexts == 0
    one.merge(delta)
    assert Counter(map(tuple, texts_of(one))) == Counter([tuple(ONE), tuple(TWO + THREE)])
    third = NGramPool(1000)
    third.merge(one)  # the whole pool
    assert not third.delta()
    assert sorted(texts_of(third)) == sorted([ONE, TWO + THREE])


def test_nothing_is_taken_twice() -> None:
    pool, other = NGramPool(1000), NGramPool(1000)
    pool.observe(ONE)
    first = pool.delta()
    pool.observe(TWO)
    second = pool.delta(first.until)
    received = [first, second, first, second, PoolDelta.from_bytes(first.to_bytes())]
    for delta, is_new in zip(received, [True, True, False, False, False], strict=True):
        assert other.merge(delta) is is_new
        copied = copy.copy(other)
        copied.merge(delta)
        assert texts_of(copied) == texts_of(other)
    assert texts_of(other) == [ONE + TWO]
    assert not pool.merge(first)  # its own
    assert texts_of(pool) == [ONE + TWO]


def test_a_part_of_what_was_taken_and_more_is_refused() -> None:
    pool, other = NGramPool(1000), NGramPool(1000)
    pool.observe(ONE)
    other.merge(pool.delta())
    pool.observe(TWO)
    with pytest.raises(ValueError, match=r"expected a delta of the pool \w+ since epoch 1, which"):
        other.merge(pool.delta())
    assert texts_of(other) == [ONE]


def test_another_tokenizer_is_refused_and_another_model_left_out() -> None:
    pool, other = NGramPool(1000), NGramPool(1000)
    pool.tokenizer, pool.model = "words", "large"
    pool.observe(ONE)
    pool.harvest([[1, 2]], [[3]], [[0.5]])
    delta = pool.delta()
    other.tokenizer, other.model = "letters", "small"
    with pytest.raises(ValueError, match="tokenizer letters, got a delta of words"):
        other.merge(delta)
    other.tokenizer = ""
    with pytest.warns(UserWarning, match="successors of the model large are left out") as caught:
        other.merge(delta)
    assert caught[0].filename == __file__
    assert (other.tokenizer, other.model) == ("words", "small")
    assert (texts_of(other), successors_of(other)) == ([ONE], {})


def test_a_pool_that_is_only_read_takes_and_sends_nothing() -> None:
    pool, frozen = NGramPool(1000), NGramPool(1000).as_read_only()
    pool.observe(ONE)
    with pytest.raises(ReadOnlyPoolError, match="expected a pool that learns for merge"):
        frozen.merge(pool.delta())
    for call in (frozen.stamp, frozen.delta):
        with pytest.raises(ReadOnlyPoolError):
            call()


@pytest.mark.parametrize("capacity", [1, 7, 64])
def test_a_pool_smaller_than_a_delta_keeps_the_newest(capacity: int) -> None:
    pool, other = NGramPool(1000), NGramPool(capacity)
    pool.observe(ONE)
    other.merge(pool.delta())
    assert tokens_of(other) == ONE[-capacity:]
    assert not other.delta()
    other.observe([1])
    assert texts_of(other.delta()) == [[1]]
    check_pool(other)


# --- stamps -------------------------------------------------------------------------------------


def test_stamps_are_of_one_pool_in_memory(tmp_path: Any) -> None:
    pool = NGramPool(1000)
    pool.observe(ONE)
    stamp = pool.stamp()
    pool.save(tmp_path / "a.pool")
    for another in (
        NGramPool(1000),
        copy.copy(pool),
        pickle.loads(pickle.dumps(pool)),
        NGramPool.load(tmp_path / "a.pool"),
    ):
        with pytest.raises(ValueError, match=f"expected a stamp of the pool .*{stamp.origin}"):
            another.delta(stamp)
    loaded = NGramPool.load(tmp_path / "a.pool")
    assert texts_of(loaded.delta()) == [ONE]
    since = loaded.stamp()
    loaded.observe(TWO)
    assert texts_of(loaded.delta(since))[-1] == TWO


@pytest.mark.parametrize(
    ("since", "error"),
    [
        (lambda stamp: tuple(stamp), TypeError),
        (lambda stamp: 3, TypeError),
        (lambda stamp: stamp._replace(num_observed=61), ValueError),
        (lambda stamp: stamp._replace(num_observed=-1), ValueError),
        (lambda stamp: stamp._replace(epoch=10), ValueError),
        (lambda stamp: stamp._replace(epoch=-1), ValueError),
    ],
)
def test_other_stamps_are_refused(since: Callable[[PoolStamp], Any], error: type) -> None:
    pool = NGramPool(1000)
    pool.observe(ONE)
    with pytest.raises(error, match=r"^expected (since to be a PoolStamp|a stamp before)"):
        pool.delta(since(pool.stamp()))


def _stamp_in_child(pool: NGramPool, queue: Any) -> None:
    queue.put(pool.stamp().origin)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_child_is_a_pool_of_its_own() -> None:
    pool = NGramPool(1000)
    mine = pool.stamp().origin
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_stamp_in_child, args=(pool, queue))
    child.start()
    theirs = queue.get()
    child.join()
    assert theirs != mine == pool.stamp().origin


# --- bounds -------------------------------------------------------------------------------------


@given(st.integers(4, 2500), st.booleans())
@settings(deadline=None)
def test_a_delta_is_no_larger_than_it_may_be(max_bytes: int, with_harvest: bool) -> None:
    pool = NGramPool(1000)
    contexts = np.arange(20).reshape(-1, 2)
    pool.harvest(contexts, contexts, np.full((10, 2), 0.5))
    for text in (ONE, TWO, THREE):
        pool.observe(text, pool.open_sequence())
    since = pool.stamp()
    whole = copy.copy(pool).delta(with_harvest=with_harvest)
    delta = pool.delta(max_bytes=max_bytes, with_harvest=with_harvest)
    assert delta.nbytes <= max_bytes or not delta
    got, everything = tokens_of(delta), ONE + TWO + THREE
    assert got == everything[len(everything) - len(got) :]
    assert got == everything or not delta.num_contexts  # text comes first
    assert delta.keys.tolist() == whole.keys[len(whole.keys) - delta.num_contexts :].tolist()
    assert delta.num_left_out == (
        whole.num_tokens + whole.num_contexts - delta.num_tokens - delta.num_contexts
    )
    if max_bytes >= whole.nbytes:
        assert delta.num_left_out == 0
    else:  # a context more would not fit, or a text of one token
        assert max_bytes - delta.nbytes < (8 + 6 * 8 if got == everything else 20 + 2 * 4)
    other = NGramPool(1000)
    other.merge(PoolDelta.from_bytes(delta.to_bytes()))
    assert texts_of(other) == texts_of(delta)
    assert not pool.delta(since, with_harvest=False)


def test_what_is_remembered_of_others_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_pool.origins, "_MAX_ORIGINS", 3)
    monkeypatch.setattr(ngram_pool.origins, "_MAX_CONTINUED", 4)
    monkeypatch.setattr(ngram_pool.origins, "_MAX_STRETCHES", 5)
    pool = NGramPool(10_000)
    first = pool.stamp()
    for number in range(12):
        other = NGramPool(10, seed=0)
        other.observe([1000 + number])
        pool.merge(other.delta())
        pool.observe([number], pool.open_sequence())
    origins = pool._origins
    assert [len(origins._until), len(origins._continued), len(origins.stretches)] == [3, 4, 5]
    # Of the text among what came first, nobody knows any more that it is not others'.
    assert texts_of(pool.delta(first)) == [[7], [8], [9], [10], [11]]
    check_pool(pool)


# --- bytes --------------------------------------------------------------------------------------


def learned() -> NGramPool:
    pool = NGramPool(1000)
    pool.tokenizer, pool.model = "words", "model"
    for text in (ONE, TWO):
        pool.observe(text, pool.open_sequence())
    pool.harvest([[-1, 1], [1, 2]], [[5, -1], [6, 7]], [[0.5, 0.0], [0.25, 0.125]])
    return pool


def everything_of(delta: PoolDelta) -> list[Any]:
    arrays = [(array.dtype, array.tolist()) for array in delta._arrays()]
    return [delta.since, delta.until, delta.tokenizer, delta.model, delta.num_left_out, *arrays]


@given(
    st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9), max_size=4),
    st.lists(
        st.tuples(
            st.integers(-1, 2**31 - 1),
            st.integers(0, 2**31 - 1),
            st.lists(st.integers(0, 2**31 - 1), unique=True, max_size=8),
        ),
        max_size=5,
    ),
    st.booleans(),
)
@settings(deadline=None)
def test_bytes_and_pickles_are_the_same_delta(
    texts: list[list[int]], known: list[tuple[int, int, list[int]]], is_small: bool
) -> None:
    most = 300 if is_small else 2**31
    pool = NGramPool(1000)
    for text in texts:
        pool.observe([token_id % most for token_id in text], pool.open_sequence())
    for previous, last, ids in known:
        distinct = [*dict.fromkeys(token_id % most for token_id in ids)]
        row = distinct + [-1] * (8 - len(distinct))
        pool.harvest([[previous % most, last % most]], [row], [[0.1] * 8])
    delta = pool.delta()
    for got in (PoolDelta.from_bytes(delta.to_bytes()), pickle.loads(pickle.dumps(delta))):
        assert everything_of(got) == everything_of(delta)
        assert got.to_bytes() == delta.to_bytes()
        assert (bool(got), got.nbytes, repr(got)) == (bool(delta), delta.nbytes, repr(delta))


def test_a_small_vocabulary_takes_two_bytes_a_token_or_less() -> None:
    pool = NGramPool(100_000)
    rng = np.random.default_rng(0)
    before = len(pool.delta().to_bytes())
    pool.observe(rng.integers(0, 50_000, 20_000))
    assert len(pool.delta().to_bytes()) - before <= 2 * 20_000 + 100
    pool.observe([70_000])
    assert len(pool.delta().to_bytes()) > 2.5 * 20_000


def test_damaged_bytes_are_refused() -> None:
    data = learned().delta().to_bytes()
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 + place % 255
        with pytest.raises(PoolDeltaError, match=r"^expected"):
            PoolDelta.from_bytes(bytes(damaged))
    for size in range(len(data)):
        with pytest.raises(PoolDeltaError, match=r"^expected"):
            PoolDelta.from_bytes(data[:size])


def forged(data: bytes, change: Callable[[dict[str, Any]], object], body: bytes = b"") -> bytes:
    """Return bytes of a delta with another header, or other arrays, and a right checksum."""
    size = int.from_bytes(data[12:16], "little")
    header = json.loads(data[16 : 16 + size])
    change(header)
    text = json.dumps(header).encode()
    packed = zlib.compress(body) if body else data[16 + size :]
    sent = len(text).to_bytes(4, "little") + text + packed
    return data[:8] + zlib.crc32(sent).to_bytes(4, "little") + sent


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": "1"},
        {"num_tokens": 119},
        {"num_tokens": 2**29 + 1},
        {"num_tokens": -1},
        {"num_tokens": 120.0},
        {"num_texts": 1},
        {"num_contexts": 3},
        {"num_contexts": 2**26, "num_successors": 2**8},
        {"num_known": 17},
        {"num_known": 2},
        {"width": 3},
        {"width": True},
        {"tokenizer": None},
        {"model": "m" * 1001},
        {"since": ["a", 0]},
        {"since": ["a", 0, 0]},
        {"until": ["", 0, 1]},
        {"until": "abc"},
        {"more": 1},
    ],
    ids=json.dumps,
)
def test_a_forged_header_is_refused(change: dict[str, Any]) -> None:
    data = learned().delta().to_bytes()
    with pytest.raises(PoolDeltaError, match=r"^expected"):
        PoolDelta.from_bytes(forged(data, lambda header: header.update(change)))


def test_a_delta_never_unpacks_to_more_than_it_announces() -> None:
    data = learned().delta().to_bytes()
    with pytest.raises(PoolDeltaError, match=r"expected arrays of \d+ bytes, got others"):
        PoolDelta.from_bytes(forged(data, lambda header: None, bytes(10_000_000)))


@given(st.binary(max_size=400), st.integers(0, 400))
@settings(deadline=None)
def test_forged_arrays_are_refused_or_sound(noise: bytes, at: int) -> None:
    """Whatever is read is merged without harm: ids are ids, and nothing is out of bounds."""
    data = learned().delta().to_bytes()
    size = int.from_bytes(data[12:16], "little")
    body = bytearray(zlib.decompress(data[16 + size :]))
    noise = noise[: max(0, len(body) - at)]
    body[at : at + len(noise)] = noise
    other = NGramPool(1000)
    try:
        delta = PoolDelta.from_bytes(forged(data, lambda header: None, bytes(body)))
    except PoolDeltaError:
        return
    other.merge(delta)
    check_pool(other)


def test_a_fingerprint_that_is_too_long_is_refused() -> None:
    pool = learned()
    pool.model = "m" * 1001
    with pytest.raises(PoolDeltaError, match="expected the fingerprint 'model'"):
        pool.delta().to_bytes()


# --- many pools ---------------------------------------------------------------------------------


class Exchange:
    """Pools that write texts of tokens of their own, and send each other deltas in order."""

    def __init__(self, num_pools: int, capacity: int) -> None:
        self.pools = [NGramPool(capacity, max_ngram_size=2) for _ in range(num_pools)]
        self.tokens = itertools.count()
        self.open: list[dict[int, int]] = [{} for _ in range(num_pools)]
        self.written: dict[tuple[int, int], list[int]] = {}
        self.log: list[tuple[int, bytes]] = []
        self.stamps: list[PoolStamp | None] = [None] * num_pools
        self.read = [0] * num_pools

    def write(self, which: int, name: int, num: int) -> None:
        pool = self.pools[which]
        handle = self.open[which].setdefault(name, pool.open_sequence())
        ids = [next(self.tokens) for _ in range(num)]
        pool.observe(ids, handle)
        pool.harvest([[-1, ids[0]]], [[ids[-1]]], [[0.5]])
        self.written.setdefault((which, name), []).extend(ids)

    def send(self, which: int) -> None:
        delta = self.pools[which].delta(self.stamps[which])
        self.stamps[which] = delta.until
        self.log.append((which, delta.to_bytes()))

    def receive(self, which: int, again: int = 0) -> None:
        """Take what was logged, beginning some deltas before those that were not read yet."""
        begin = max(0, self.read[which] - again)
        for _, data in self.log[begin:]:
            self.pools[which].merge(PoolDelta.from_bytes(data))
        self.read[which] = len(self.log)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "send", "receive"]),
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(1, 9),
    ),
    max_size=40,
)


def run(exchange: Exchange, actions: Iterable[tuple[str, int, int, int]]) -> None:
    for action, which, name, num in actions:
        if action == "write":
            exchange.write(which, name, num)
        elif action == "send":
            exchange.send(which)
        else:
            exchange.receive(which, again=name)
    for which in range(3):
        exchange.send(which)
    for which in range(3):
        exchange.receive(which, again=2)


@given(ACTIONS)
@settings(deadline=None)
def test_in_the_end_every_pool_has_every_text_once(
    actions: list[tuple[str, int, int, int]],
) -> None:
    exchange = Exchange(3, capacity=1000)
    run(exchange, actions)
    for pool in exchange.pools:
        assert sorted(texts_of(pool)) == sorted(exchange.written.values())
        check_pool(pool)
    assert all(successors_of(pool) == successors_of(exchange.pools[0]) for pool in exchange.pools)
    sent = Counter(
        token_id for _, data in exchange.log for text in texts_of(PoolDelta.from_bytes(data))
        for token_id in text
    )  # fmt: skip
    assert sent == Counter(itertools.chain.from_iterable(exchange.written.values()))


@given(ACTIONS)
@settings(deadline=None)
def test_small_pools_send_their_own_text_alone(actions: list[tuple[str, int, int, int]]) -> None:
    exchange = Exchange(3, capacity=20)
    run(exchange, actions)
    own: list[set[int]] = [set(), set(), set()]
    for (which, _), ids in exchange.written.items():
        own[which].update(ids)
    sent: Counter[int] = Counter()
    for which, data in exchange.log:
        for text in texts_of(PoolDelta.from_bytes(data)):
            assert own[which].issuperset(text)
            sent.update(text)
    assert all(number == 1 for number in sent.values())
    for pool in exchange.pools:
        check_pool(pool)


# --- interrupts ---------------------------------------------------------------------------------


@pytest.mark.skipif(sys.gettrace() is not None, reason="needs the tracer for itself")
def test_wherever_it_is_interrupted_nothing_is_taken_or_sent_twice() -> None:
    sender = NGramPool(1000)
    for text in (ONE, TWO):
        sender.observe([token_id + 100 for token_id in text], sender.open_sequence())
    sender.harvest([[1, 2]], [[3]], [[0.5]])
    delta = sender.delta()
    line = 0
    while True:
        pool = NGramPool(300)
        pool.observe(ONE)
        since = pool.stamp()
        if not interrupted(lambda pool=pool: pool.merge(delta), line):  # type: ignore[misc]
            break
        line += 1
        check_pool(pool)
        got = tokens_of(pool)
        assert got[60:] == tokens_of(delta)[: len(got) - 60]
        pool.merge(delta)
        pool.merge(delta)
        pool.observe(THREE)
        check_pool(pool)
        assert all(token_id < 100 for text in texts_of(pool.delta(since)) for token_id in text)
        counts = Counter(tokens_of(pool))
        assert all(counts[t] <= n for t, n in Counter(tokens_of(delta)).items())
    assert line > 50
