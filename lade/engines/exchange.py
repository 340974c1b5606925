"""Pools of several processes that learn from each other, through one that collects.

`Collector` is what one process holds, `PoolExchange` what each of the others has beside its pool.
How they reach each other is left open here: `ray.py`, next to read, has them in a Ray cluster.
"""

import copy
import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import NamedTuple, Protocol

from ngram_pool import NGramPool, PoolDelta, PoolStamp
from ngram_pool.checks import positive
from ngram_pool.pool import DEFAULT_CAPACITY_TOKENS

_logger = logging.getLogger(__name__)

# Deltas are kept for those who have not fetched them: of 100 replicas that each write 100 tokens a
# second, ten minutes of text.
DEFAULT_LOG_BYTES = 2**26
# One delta of a pool that was cut off for long. Its newest text comes first.
DEFAULT_DELTA_BYTES = 2**22
DEFAULT_EVERY_SEC = 5.0
# Pools whose senders a collector remembers.
_MAX_OWNERS = 10_000


class Cursor(NamedTuple):
    """How far somebody has fetched what a collector handed out."""

    collector: str = ""  # another one once it was restarted
    num_deltas: int = 0
    #: A secret of whoever joined with it, without which nobody sends deltas of the same pool.
    replica: str = ""


class Joined(NamedTuple):
    """What a pool begins with."""

    pool: NGramPool  # an independent copy of all that was collected
    cursor: Cursor


class Exchanged(NamedTuple):
    """What others learned since a cursor."""

    cursor: Cursor
    deltas: list[bytes]
    num_missed: int  # deltas that were dropped before they were fetched


@dataclass
class CollectorStats:
    """What a collector holds, and what it did since it was made."""

    num_joined: int = 0
    num_exchanges: int = 0
    num_deltas: int = 0  # taken, empty ones left out
    num_repeated: int = 0  # deltas that were sent again
    num_refused: int = 0  # deltas that could not be read or merged
    num_missed: int = 0  # deltas that somebody did not fetch in time
    bytes_in: int = 0
    bytes_out: int = 0  # of deltas; joining not counted
    log_bytes: int = 0
    pool_tokens: int = 0
    pool_bytes: int = 0


class Collecting(Protocol):
    """A collector, or what stands for one elsewhere. Every call may raise."""

    def join(self) -> Joined:
        """Return what a pool begins with."""

    def exchange(self, delta: bytes, cursor: Cursor) -> Exchanged:
        """Take what one pool learned, return what others did."""


class Collector:
    """Merges what pools learned into one, and hands it on to the others.

    Who joins begins with a copy of the merged pool. From then on, each sends what it learned itself
    (`NGramPool.delta`) and gets what the others did, each delta once; what was sent twice, because
    an answer was lost, is taken once. Memory is bounded: by the capacity of the pool, and by the
    bytes of the deltas that are kept for those who have not fetched them; the oldest are dropped
    first. Methods may be called from several threads.

    It hands everyone's text to all: have one for each group of users who may know of each other's.

    Args:
        capacity_tokens: of the merged pool.
        log_bytes: of deltas that are kept.
        max_delta_bytes: of one delta, as it is sent and unpacked; a larger one is refused.
        path: of a file to begin with, and to save the pool in; None for neither.
        save_every_sec: how often it is saved, at most, while deltas come.

    Raises:
        OSError, PoolFileError: there is a file, but it cannot be read.
        TypeError, ValueError: a size is not a positive integer, or the time is negative.

    >>> collector, pool = Collector(), NGramPool()
    >>> pool.observe([5, 6, 7])
    >>> cursor, deltas, _ = collector.exchange(pool.delta().to_bytes(), Cursor())
    >>> deltas, collector.join().pool.draft([5], max_draft_tokens=2).candidates()
    ([], [[6, 7]])
    """

    def __init__(
        self,
        capacity_tokens: int = DEFAULT_CAPACITY_TOKENS,
        *,
        log_bytes: int = DEFAULT_LOG_BYTES,
        max_delta_bytes: int = 2 * DEFAULT_DELTA_BYTES,
        path: str | PathLike[str] | None = None,
        save_every_sec: float = 60.0,
    ) -> None:
        self._log_bytes = positive("log_bytes", log_bytes)
        self._max_delta_bytes = positive("max_delta_bytes", max_delta_bytes)
        if not save_every_sec >= 0:
            raise ValueError(f"expected save_every_sec of at least 0, got {save_every_sec!r}")
        self._save_every_sec = save_every_sec
        self._path = None if path is None else Path(path)
        if self._path is not None and self._path.exists():
            self._pool = NGramPool.load(self._path)
        else:
            self._pool = NGramPool(capacity_tokens)
        self._lock = threading.Lock()
        self._name = secrets.token_hex(8)
        # By origin, who sends deltas of it. Others, who all see it, might make up later ones, after
        # which its own count as repeated.
        self._owners: OrderedDict[str, str] = OrderedDict()
        self._log: deque[tuple[str, bytes]] = deque()  # with the origin of each
        self._num_logged = 0  # those that were dropped, too
        self._saved_at = time.monotonic()
        self._stats = CollectorStats()

    def join(self) -> Joined:
        """Return a copy of the merged pool, and the cursor from which to go on."""
        with self._lock:
            self._stats.num_joined += 1
            return Joined(copy.copy(self._pool), self._cursor(secrets.token_hex(16)))

    def exchange(self, delta: bytes, cursor: Cursor) -> Exchanged:
        """Take what one pool learned, and return what others did since.

        Args:
            delta: `PoolDelta.to_bytes` of what the pool learned, often nothing; deltas of a pool
                come in order, and one whose answer was lost comes again as it was.
            cursor: of the last answer.

        Raises:
            PoolDeltaError: the delta cannot be read, or is too large.
            ValueError: it is of another tokenizer, of a pool that somebody else sends deltas of, or
                has a part of one that was taken. Nothing was taken.
        """
        with self._lock:
            self._stats.num_exchanges += 1
            self._stats.bytes_in += len(delta)
            try:
                origin = self._take(delta, cursor.replica)
            except ValueError:
                self._stats.num_refused += 1
                raise
            found = self._since(cursor, origin)
            self._stats.num_missed += found.num_missed
            self._stats.bytes_out += sum(map(len, found.deltas))
        if time.monotonic() - self._saved_at >= self._save_every_sec:
            self.save()
        return found

    def forget(self, token_ids: Sequence[int]) -> int:
        """Remove tokens in a row from the merged pool, as `NGramPool.forget` does, and its file.

        All deltas that somebody has not fetched are dropped, since they may hold them. The pools
        that took them before have to forget them as well.
        """
        with self._lock:
            num_found = self._pool.forget(token_ids)
            self._log.clear()
            self._stats.log_bytes = 0
        self.save()
        return num_found

    def save(self) -> None:
        """Save the merged pool, if it has a file.

        Raises:
            OSError: the file cannot be written; an older one is as it was.
        """
        self._saved_at = time.monotonic()
        if self._path is not None:
            self._pool.save(self._path)

    def stats(self) -> CollectorStats:
        """Return what was done since the collector was made."""
        with self._lock:
            return replace(self._stats, pool_tokens=len(self._pool), pool_bytes=self._pool.nbytes)

    # --- inside, under the lock -------------------------------------------------------------

    def _take(self, data: bytes, replica: str) -> str:
        """Merge a delta and keep it for others; return which pool it is of."""
        if len(data) > self._max_delta_bytes:
            raise ValueError(
                f"expected a delta of at most {self._max_delta_bytes} bytes, got {len(data)}"
            )
        delta = PoolDelta.from_bytes(data, self._max_delta_bytes)
        origin = delta.since.origin
        if not secrets.compare_digest(self._owners.setdefault(origin, replica), replica):
            raise ValueError("expected deltas of a pool from one replica alone, got another's")
        self._owners.move_to_end(origin)
        while len(self._owners) > _MAX_OWNERS:
            self._owners.popitem(last=False)
        if not self._pool.merge(delta):
            self._stats.num_repeated += 1
        elif delta:
            self._stats.num_deltas += 1
            self._log.append((origin, data))
            self._num_logged += 1
            self._stats.log_bytes += len(data)
            while self._stats.log_bytes > self._log_bytes:
                self._stats.log_bytes -= len(self._log.popleft()[1])
        return origin

    def _since(self, cursor: Cursor, origin: str) -> Exchanged:
        # A cursor of an earlier life of this collector: all of the log is later.
        fetched = cursor.num_deltas if cursor.collector == self._name else 0
        num_new = max(0, self._num_logged - fetched)
        num_held = min(num_new, len(self._log))
        newest = [self._log[-place] for place in range(num_held, 0, -1)]
        num_missed = num_new - num_held if cursor.collector == self._name else 0
        deltas = [data for sender, data in newest if sender != origin]
        return Exchanged(self._cursor(cursor.replica), deltas, num_missed)

    def _cursor(self, replica: str) -> Cursor:
        return Cursor(self._name, self._num_logged, replica)


@dataclass
class ExchangeStats:
    """What a pool and its collector told each other."""

    has_joined: bool = False  # began with what was collected
    num_joined_tokens: int = 0
    num_exchanges: int = 0
    num_failures: int = 0  # calls of the collector that failed
    num_refused: int = 0  # deltas, sent or received, that could not be merged
    num_missed: int = 0  # deltas of others that came too late to be fetched
    bytes_sent: int = 0
    bytes_received: int = 0
    tokens_sent: int = 0
    tokens_received: int = 0


class PoolExchange:
    """A pool that begins with what others learned, and keeps in step with them.

    Nothing that fails here reaches whoever drafts from the pool: it is counted, and said once. What
    was not acknowledged is sent again, and what came meanwhile in the next delta, so that an
    absent collector costs no memory. Use it as a context, or call `start` and `stop`.

        with PoolExchange(collector) as exchange:
            output = lade.generate(model, input_ids, pool=exchange.pool)

    Args:
        collector: a `Collector`, or what stands for one in another process.
        every_sec: how long to wait between exchanges.
        with_harvest: whether to send harvested successors too; they are the most of all bytes.
        max_delta_bytes: of one delta in memory, and so of what is sent.
        capacity_tokens: of a new pool, where the collector cannot be reached at first.

    Raises:
        TypeError, ValueError: a size is not a positive integer, or the time is not positive.
    """

    def __init__(
        self,
        collector: Collecting,
        *,
        every_sec: float = DEFAULT_EVERY_SEC,
        with_harvest: bool = True,
        max_delta_bytes: int = DEFAULT_DELTA_BYTES,
        capacity_tokens: int = DEFAULT_CAPACITY_TOKENS,
    ) -> None:
        if not every_sec > 0:
            raise ValueError(f"expected every_sec to be positive, got {every_sec!r}")
        self._collector = collector
        self._every_sec = every_sec
        self._with_harvest = with_harvest
        self._max_delta_bytes = positive("max_delta_bytes", max_delta_bytes)
        self._stats = ExchangeStats()
        self._said: set[str] = set()
        self._cursor = Cursor()
        self.pool = self._join(positive("capacity_tokens", capacity_tokens))
        self._since: PoolStamp = self.pool.stamp()
        self._unacknowledged: PoolDelta | None = None
        self._one_at_a_time = threading.Lock()
        self._is_done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "PoolExchange":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Exchange every so many seconds, on a thread of its own, until `stop`."""
        if self._thread is None:
            self._is_done.clear()
            self._thread = threading.Thread(target=self._run, name="lade-exchange", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, and send what is left once more."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._is_done.set()
            thread.join()
            self.exchange()

    def exchange(self) -> bool:
        """Send what the pool learned, take what others did; return whether that worked."""
        with self._one_at_a_time:
            num_failures = self._stats.num_failures
            with self._noting("exchange deltas with"):
                self._exchange()
            return self._stats.num_failures == num_failures

    def stats(self) -> ExchangeStats:
        """Return what was exchanged so far."""
        return replace(self._stats)

    # --- inside -----------------------------------------------------------------------------

    def _join(self, capacity_tokens: int) -> NGramPool:
        pool = None
        with self._noting("join"):
            pool, self._cursor = self._collector.join()
            self._stats.has_joined, self._stats.num_joined_tokens = True, len(pool)
        return NGramPool(capacity_tokens) if pool is None else pool

    def _run(self) -> None:
        while not self._is_done.wait(self._every_sec):
            self.exchange()

    def _exchange(self) -> None:
        delta = self._unacknowledged
        if delta is None:
            delta = self.pool.delta(
                self._since, with_harvest=self._with_harvest, max_bytes=self._max_delta_bytes
            )
            self._since, self._unacknowledged = delta.until, delta
        data = delta.to_bytes()
        try:
            found = self._collector.exchange(data, self._cursor)
        except ValueError as error:  # it would be refused again
            self._unacknowledged = None
            self._stats.num_refused += 1
            self._warn("send a delta to", error)
            return
        self._unacknowledged = None
        self._stats.num_exchanges += 1
        self._stats.num_missed += found.num_missed
        self._stats.bytes_sent += len(data)
        self._stats.tokens_sent += delta.num_tokens
        self._cursor = found.cursor
        for received in found.deltas:
            self._take(received)

    def _take(self, data: bytes) -> None:
        self._stats.bytes_received += len(data)
        try:
            delta = PoolDelta.from_bytes(data)
            if self.pool.merge(delta):
                self._stats.tokens_received += delta.num_tokens
        except ValueError as error:
            self._stats.num_refused += 1
            self._warn("take a delta from", error)

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Go on without the collector where it fails, whatever the connection to it raises."""
        try:
            yield
        except Exception as error:  # the collector is the user's, and may be far away
            self._stats.num_failures += 1
            self._warn(what, error)

    def _warn(self, what: str, error: Exception) -> None:
        """Say once what could not be done."""
        if what not in self._said:
            self._said.add(what)
            _logger.warning(
                "lade could not %s the collector of pools, and goes on without: %s", what, error
            )
