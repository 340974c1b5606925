"""Pools that learn from each other: everything once, whatever fails in between."""

import logging
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from lade.engines.exchange import Collector, Cursor, Exchanged, Joined, PoolExchange
from ngram_pool import NGramPool, PoolDelta, PoolDeltaError, PoolStamp
from tests.ngram_pool.checking import check_pool

_T = TypeVar("_T")


def texts_of(pool: NGramPool) -> list[list[int]]:
    return sorted(text.tolist() for text in pool.texts())


def told(exchange: PoolExchange, *texts: list[int]) -> None:
    for text in texts:
        exchange.pool.observe(text, exchange.pool.open_sequence())


class Failing:
    """A collector that can be out of reach, before or after it does its work."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.before: Exception | None = None
        self.after: Exception | None = None

    def join(self) -> Joined:
        return self._call(self.collector.join)

    def exchange(self, delta: bytes, cursor: Cursor) -> Exchanged:
        return self._call(lambda: self.collector.exchange(delta, cursor))

    def _call(self, call: Callable[[], _T]) -> _T:
        if self.before is not None:
            raise self.before
        found = call()
        if self.after is not None:
            raise self.after
        return found


# --- what gets where ----------------------------------------------------------------------------


def test_what_one_learns_all_get_once() -> None:
    collector = Collector()
    one, two, three = (PoolExchange(collector) for _ in range(3))
    told(one, [1, 2, 3])
    told(two, [4, 5])
    for _ in range(3):
        for each in (one, two, three):
            assert each.exchange()
    for each in (one, two, three):
        assert texts_of(each.pool) == [[1, 2, 3], [4, 5]]
    assert [each.stats().tokens_sent for each in (one, two, three)] == [3, 2, 0]
    assert [each.stats().tokens_received for each in (one, two, three)] == [2, 3, 5]
    stats = collector.stats()
    assert (stats.num_joined, stats.num_exchanges, stats.num_deltas) == (3, 9, 2)
    assert (stats.pool_tokens, stats.num_missed, stats.num_refused) == (5, 0, 0)
    sent = sum(each.stats().bytes_sent for each in (one, two, three))
    received = sum(each.stats().bytes_received for each in (one, two, three))
    assert (stats.bytes_in, stats.bytes_out) == (sent, received)


def test_who_joins_later_begins_with_all_and_sends_none_of_it() -> None:
    collector = Collector()
    one = PoolExchange(collector)
    told(one, [1, 2, 3])
    one.pool.harvest([[-1, 1]], [[2]], [[0.5]])
    one.exchange()
    two = PoolExchange(collector)
    assert two.stats().has_joined
    assert (texts_of(two.pool), two.stats().num_joined_tokens) == ([[1, 2, 3]], 3)
    assert two.pool.draft([1], 2).candidates() == [[2, 3]]
    two.pool.observe([9])
    two.exchange()
    one.exchange()
    assert texts_of(one.pool) == [[1, 2, 3], [9]]
    assert texts_of(collector.join().pool) == [[1, 2, 3], [9]]


def test_a_copy_that_was_handed_out_is_independent() -> None:
    collector = Collector()
    collector.join().pool.observe([1, 2, 3])
    assert len(collector.join().pool) == 0


def test_harvested_successors_are_sent_unless_they_are_not_to_be() -> None:
    for with_harvest in (True, False):
        collector = Collector()
        one, two = (PoolExchange(collector, with_harvest=with_harvest) for _ in range(2))
        one.pool.harvest([[-1, 1]], [[2]], [[0.5]])
        one.exchange()
        two.exchange()
        assert (two.pool._state.harvested.get(-1, 1) is not None) is with_harvest


def test_a_long_answer_is_one_text_wherever_it_was_cut() -> None:
    collector = Collector()
    one, two = PoolExchange(collector), PoolExchange(collector)
    sequence = one.pool.open_sequence()
    for begin in range(0, 40, 4):
        one.pool.observe([*range(begin, begin + 4)], sequence)
        one.exchange()
        two.exchange()
    assert texts_of(two.pool) == [[*range(40)]]


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_nothing_is_lost_or_taken_twice_where_a_call_fails(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    collector = Failing(Collector())
    one, two = PoolExchange(collector), PoolExchange(collector)
    told(two, [8, 9])
    assert two.exchange()
    told(one, [1, 2])
    setattr(collector, when, TimeoutError("no answer"))
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            told(one, [3 + number])
            assert not one.exchange()
    assert len(caplog.records) == 1  # said once
    assert "no answer" in caplog.text
    setattr(collector, when, None)
    for _ in range(2):
        assert one.exchange()
        assert two.exchange()
    for pool in (one.pool, two.pool, collector.collector.join().pool):
        assert texts_of(pool) == [[1, 2], [3], [4], [5], [8, 9]]
    assert one.stats().num_failures == 3
    repeated = collector.collector.stats().num_repeated
    assert repeated == (3 if when == "after" else 0)


def test_a_collector_out_of_reach_is_joined_later_by_its_deltas() -> None:
    collector = Failing(Collector())
    one = PoolExchange(collector)
    told(one, [1, 2])
    one.exchange()
    collector.before = OSError("away")
    two = PoolExchange(collector, capacity_tokens=100)
    assert (two.stats().has_joined, two.pool.capacity_tokens) == (False, 100)
    told(two, [3])
    assert not two.exchange()
    collector.before = None
    assert two.exchange()
    assert texts_of(two.pool) == [[1, 2], [3]]


def test_a_collector_that_was_restarted_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "all.pool"
    collector = Failing(Collector(path=path, save_every_sec=0.0))
    one, two = PoolExchange(collector), PoolExchange(collector)
    told(one, [1, 2])
    one.exchange()
    collector.collector = Collector(path=path)  # as after a crash, with its file
    told(one, [3])
    for _ in range(2):
        assert one.exchange()
        assert two.exchange()
    assert texts_of(collector.join().pool) == [[1, 2], [3]]
    assert texts_of(two.pool) == [[3]]  # what nobody had fetched is lost to those that live
    assert texts_of(PoolExchange(collector).pool) == [[1, 2], [3]]


def test_what_is_refused_is_not_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector()
    one, two = PoolExchange(collector), PoolExchange(collector)
    one.pool.tokenizer, two.pool.tokenizer = "words", "letters"
    told(one, [1, 2])
    told(two, [3])
    assert one.exchange()
    assert two.exchange()  # the call, not what it sent
    assert "expected text of the tokenizer words, got a delta of letters" in caplog.text
    told(two, [4])
    two.pool.tokenizer = "words"
    two.exchange()
    assert texts_of(collector.join().pool) == [[1, 2], [4]]
    assert (two.stats().num_refused, collector.stats().num_refused) == (1, 1)


def test_a_delta_of_others_that_cannot_be_taken_stops_no_other() -> None:
    collector = Collector()
    one, two = PoolExchange(collector), PoolExchange(collector)
    told(one, [1, 2])
    one.exchange()
    told(two, [3])
    two.exchange()
    collector._log.appendleft(("somebody", b"noise"))
    collector._num_logged += 1
    three = PoolExchange(Failing(collector))
    three._cursor = Cursor()
    three.exchange()
    assert three.stats().num_refused == 1
    assert texts_of(three.pool) == [[1, 2], [3]]  # it knows what it joined with


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda data: b"", PoolDeltaError),
        (lambda data: data[:-1], PoolDeltaError),
        (lambda data: data + bytes(2000), ValueError),
    ],
)
def test_a_collector_refuses_what_it_cannot_read(
    change: Callable[[bytes], bytes], error: type[Exception]
) -> None:
    collector, pool = Collector(max_delta_bytes=1000), NGramPool(100)
    pool.observe([1, 2, 3])
    with pytest.raises(error, match=r"^expected"):
        collector.exchange(change(pool.delta().to_bytes()), Cursor())
    assert (collector.stats().num_refused, collector.stats().pool_tokens) == (1, 0)


# --- bounds -------------------------------------------------------------------------------------


def test_deltas_are_kept_within_their_room_and_those_missed_are_counted() -> None:
    pool = NGramPool(1000)
    pool.observe([1])
    size = len(pool.delta().to_bytes())
    collector = Collector(log_bytes=4 * size + 100)
    one, two = PoolExchange(collector), PoolExchange(collector)
    for number in range(10):
        told(one, [100 + number])
        one.exchange()
        assert collector.stats().log_bytes <= 4 * size + 100
    two.exchange()
    assert texts_of(two.pool) == [[number] for number in range(106, 110)]
    assert (two.stats().num_missed, collector.stats().num_missed) == (6, 6)
    told(one, [7])
    one.exchange()
    two.exchange()
    assert two.stats().num_missed == 6
    assert [7] in texts_of(two.pool)


def test_a_delta_after_a_long_absence_is_bounded() -> None:
    collector = Failing(Collector())
    one = PoolExchange(collector, max_delta_bytes=400)
    collector.before = OSError("away")
    one.exchange()
    told(one, [*range(5000)])
    one.exchange()
    collector.before = None
    assert one.exchange()
    assert one.exchange()
    got = texts_of(collector.join().pool)
    assert got == [[*range(5000 - len(got[0]), 5000)]]
    assert 80 < len(got[0]) <= 100


@pytest.mark.parametrize(
    "options",
    [{"capacity_tokens": 0}, {"log_bytes": 0}, {"max_delta_bytes": -1}, {"save_every_sec": -1.0}],
    ids=str,
)
def test_wrong_options_of_a_collector_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^expected {next(iter(options))}"):
        Collector(**options)


@pytest.mark.parametrize(
    "options", [{"every_sec": 0}, {"max_delta_bytes": 0}, {"capacity_tokens": 0}], ids=str
)
def test_wrong_options_of_an_exchange_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^expected {next(iter(options))}"):
        PoolExchange(Collector(), **options)


# --- files and forgetting -----------------------------------------------------------------------


def test_a_collector_begins_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "all.pool"
    collector = Collector(path=path)
    one = PoolExchange(collector)
    told(one, [1, 2])
    one.exchange()
    assert not path.exists()  # not yet
    collector.save()
    assert texts_of(Collector(path=path).join().pool) == [[1, 2]]
    Collector().save()  # to nowhere


def test_what_is_forgotten_is_handed_out_no_more(tmp_path: Path) -> None:
    path = tmp_path / "all.pool"
    collector = Collector(path=path, save_every_sec=0.0)
    one, two = PoolExchange(collector), PoolExchange(collector)
    told(one, [1, 777, 888, 2])
    one.exchange()
    assert collector.forget([777, 888]) == 1
    two.exchange()
    assert texts_of(two.pool) == []
    assert texts_of(collector.join().pool) == texts_of(NGramPool.load(path)) == [[1], [2]]
    assert two.stats().num_missed == 1
    assert collector.stats().log_bytes == 0


# --- the thread ---------------------------------------------------------------------------------


def test_a_thread_exchanges_until_it_is_stopped_and_then_once_more() -> None:
    collector = Collector()
    is_told = threading.Event()

    class Watched(Failing):
        def exchange(self, delta: bytes, cursor: Cursor) -> Exchanged:
            if PoolDelta.from_bytes(delta):
                is_told.set()
            return super().exchange(delta, cursor)

    with PoolExchange(Watched(collector), every_sec=0.01) as exchange:
        exchange.start()  # again: without effect
        told(exchange, [1, 2])
        assert is_told.wait(30)
        exchange._every_sec = 1000.0
        told(exchange, [3])
    assert texts_of(collector.join().pool) == [[1, 2], [3]]
    assert not [each for each in threading.enumerate() if each.name == "lade-exchange"]
    exchange.stop()  # again: without effect
    with exchange:
        told(exchange, [4])
    assert texts_of(collector.join().pool) == [[1, 2], [3], [4]]


def test_pools_that_learn_meanwhile_lose_and_repeat_nothing() -> None:
    """Four threads write while four others exchange; every token is of its own."""
    collector = Collector()
    exchanges = [PoolExchange(collector, every_sec=0.001) for _ in range(4)]

    def write(number: int) -> None:
        for turn in range(50):
            told(exchanges[number], [1000 * number + 10 * turn + place for place in range(9)])

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for each in exchanges:
        each.start()
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    for each in exchanges:
        each.stop()
    for each in exchanges:
        assert each.exchange()
    everything = sorted(
        [1000 * number + 10 * turn + place for place in range(9)]
        for number in range(4)
        for turn in range(50)
    )
    assert texts_of(collector.join().pool) == everything
    for each in exchanges:
        assert texts_of(each.pool) == everything
        check_pool(each.pool)
        assert each.stats().num_failures == 0


def test_a_delta_that_unpacks_to_much_is_refused_before() -> None:
    """Zeros pack to a thousandth: 20 kB were 1.6 GB."""
    bomb = PoolDelta(
        PoolStamp("a" * 32, 0, 0),
        PoolStamp("a" * 32, 10**7, 1),
        *("", ""),
        np.zeros(10**7, np.int32),
        np.array([0, 10**7], np.int32),
        np.array([[-1, 10**7 - 1]], np.int64),
        np.zeros(0, np.int64),
        np.zeros((0, 4), np.int32),
        np.zeros((0, 4), np.uint16),
        0,
    ).to_bytes()
    assert len(bomb) < 2**18
    collector = Collector(max_delta_bytes=2**20)
    tracemalloc.start()
    with pytest.raises(PoolDeltaError, match="arrays of at most 1048576 bytes, got 2"):
        collector.exchange(bomb, collector.join().cursor)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 2**20
    with pytest.raises(PoolDeltaError, match="arrays of at most 1000 bytes"):
        PoolDelta.from_bytes(bomb, 1000)
    assert PoolDelta.from_bytes(bomb).num_tokens == 10**7


def test_nobody_sends_deltas_of_anothers_pool() -> None:
    """A later one than its own would have its own count as taken."""
    collector, pool = Collector(), NGramPool()
    mine, other = collector.join().cursor, collector.join().cursor
    pool.observe([1, 2, 3])
    first = pool.delta()
    mine, _, _ = collector.exchange(first.to_bytes(), mine)
    _, (seen,), _ = collector.exchange(NGramPool().delta().to_bytes(), other)
    stamp = PoolDelta.from_bytes(seen).until
    forged = replace(
        PoolDelta.from_bytes(seen), since=stamp, until=stamp._replace(epoch=2**40)
    ).to_bytes()
    with pytest.raises(ValueError, match="from one replica alone"):
        collector.exchange(forged, other)
    pool.observe([4, 5])
    collector.exchange(pool.delta(first.until).to_bytes(), mine)
    assert collector.stats().num_deltas == 2
    assert (collector.stats().num_repeated, collector.stats().num_refused) == (0, 1)
