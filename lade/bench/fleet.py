"""A fleet of replicas, simulated: what drafts are worth by how the replicas' pools are shared.

What a model writes does not depend on its drafts, so pools learn recorded answers, and only those
of some requests at the end are replayed draft by draft. What replicas send each other are real
deltas, whose bytes are counted. Three things are left out: the time that requests and messages
take, what is learned of rejected draft tokens, and what answers before the measured ones would have
taught the weights of sources.

Next file: `fleet_report.py`.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lade.bench.replay import replay_trace
from lade.bench.traces import Trace
from lade.bench.traffic import Catalogue, Population, Requests, draw_requests
from lade.drafting.pool_drafter import PoolDrafter
from lade.drafting.successors import Successors, num_prompt_tokens
from lade.stats import DecodeStats
from ngram_pool import NGramPool, PoolDelta, PoolStamp

_Ints = NDArray[np.int64]

# Replicas whose requests are measured. All are alike, so more of them only take more time.
_NUM_WATCHED = 4
# Multiples of it, modulo 1, are spread evenly, however many there are.
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Kind(StrEnum):
    """Whose text a request is drafted from."""

    replica = "replica"  # the replica's own: nothing is shared
    exchange = "exchange"  # the replica's own, and what the others sent
    one = "one"  # all replicas', at once
    tenant = "tenant"
    topic = "topic"  # the tenant's in one category of prompts
    user = "user"
    layered = "layered"  # the tenant's, and all replicas' at once as a layer


#: Kinds of which every request has a key that says where to send it.
SHARDED = (Kind.tenant, Kind.topic, Kind.user, Kind.layered)


class Sharing(NamedTuple):
    """How the pools of a fleet are shared."""

    kind: Kind
    exchange_sec: float | None = None  # between two exchanges of a replica

    @property
    def label(self) -> str:
        """What tables call it."""
        if self.kind is Kind.exchange:
            return f"every {self.exchange_sec:g} s"
        if self.kind is Kind.layered:
            return "per tenant, over one"
        return "one" if self.kind is Kind.one else f"per {self.kind}"


@dataclass(frozen=True)
class Setup:
    """What all simulations of a table have in common.

    Raises:
        ValueError: a value is out of range.
    """

    max_draft_tokens: int = 8
    capacity_tokens: int = 2**18  # of each pool
    num_measured: int = 48  # requests
    with_harvest: bool = True  # whether replicas send what they harvested, besides text

    def __post_init__(self) -> None:
        for name in ("max_draft_tokens", "capacity_tokens", "num_measured"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of 1 or more, got {getattr(self, name)}")


class Cell(NamedTuple):
    """One fleet with one way of sharing."""

    num_replicas: int
    sharing: str
    exchange_sec: float | None
    num_requests: int  # measured
    repeated_share: float  # of these, what the tenant's users had asked before
    mean_accepted_tokens: float
    mean_accepted_tokens_error: float | None  # standard error, over requests
    new_mean_accepted_tokens: float | None  # of requests that are no repeats
    repeated_mean_accepted_tokens: float | None
    acceptance_rate: float
    sent_bytes_per_sec: float | None  # by a replica
    received_bytes_per_sec: float | None
    staleness_sec: float | None  # mean age of others' text when it arrives
    reach_sec: float  # age of the oldest text held, on average
    busiest: float | None  # requests to the busiest replica, the mean being 1
    pools_per_replica: float
    pool_tokens: float  # held, mean over the pools of measured requests
    pool_bytes: float  # of memory, likewise


def simulate(
    catalogue: Catalogue,
    population: Population,
    num_replicas: int,
    sharing: Sharing,
    setup: Setup,
    on_request: Callable[[], None] = lambda: None,
) -> Cell:
    """Return what a fleet's drafts are worth.

    The same requests are measured whatever is shared.

    Args:
        catalogue: what tenants ask.
        population: who asks.
        num_replicas: of the fleet.
        sharing: of its pools.
        setup: of the simulation.
        on_request: called after each measured request.

    Raises:
        ValueError: there are too few requests.
    """
    fleet = _Fleet(
        catalogue, setup, draw_requests(population, num_replicas, len(catalogue)), num_replicas
    )
    run = _Run()
    answering = _exchanging if sharing.kind is Kind.exchange else _pooled
    new, repeated = DecodeStats(), DecodeStats()
    is_new = fleet.requests.is_new
    results = []
    for result in answering(fleet, sharing, run):
        results.append(result)
        (new if is_new[result.request] else repeated).add(result.stats)
        on_request()
    overall = DecodeStats()
    overall.add(new)
    overall.add(repeated)
    keys = _keys(fleet, sharing.kind)
    pools = [learner.pool for learner in run.learners]
    return Cell(
        num_replicas,
        sharing.label,
        sharing.exchange_sec,
        num_requests=len(results),
        repeated_share=1 - float(is_new[fleet.measured].mean()),
        mean_accepted_tokens=overall.mean_accepted_tokens,
        mean_accepted_tokens_error=_error([result.stats for result in results]),
        new_mean_accepted_tokens=new.mean_accepted_tokens if new.num_steps else None,
        repeated_mean_accepted_tokens=repeated.mean_accepted_tokens if repeated.num_steps else None,
        acceptance_rate=overall.acceptance_rate,
        sent_bytes_per_sec=run.sent.per_sec,
        received_bytes_per_sec=run.received.per_sec,
        staleness_sec=run.staleness_sec,
        reach_sec=float(np.mean([result.reach_sec for result in results])),
        busiest=_busiest(keys, num_replicas) if sharing.kind in SHARDED else None,
        pools_per_replica=len(np.unique(keys)) / num_replicas,
        pool_tokens=float(np.mean([len(pool) for pool in pools])),
        pool_bytes=float(np.mean([pool.nbytes for pool in pools])),
    )


def _error(stats: Sequence[DecodeStats]) -> float | None:
    """Return the standard error of MAT, a ratio of sums over requests; None for a single one."""
    if len(stats) < 2:
        return None
    tokens = np.array([each.num_tokens for each in stats], np.float64)
    steps = np.array([each.num_steps for each in stats], np.float64)
    left = tokens - tokens.sum() / steps.sum() * steps
    return float(math.sqrt((left**2).sum() * len(stats) / (len(stats) - 1)) / steps.sum())


class _Result(NamedTuple):
    """A measured request."""

    request: int
    stats: DecodeStats
    reach_sec: float


@dataclass
class _Sent:
    """Bytes that replicas sent, or received, over their time."""

    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def per_sec(self) -> float | None:
        """Bytes a second of one replica; None where nothing is exchanged."""
        return self.num_bytes / self.seconds if self.seconds else None


@dataclass
class _Run:
    """What is counted while a fleet answers."""

    learners: list["_Learner"] = field(default_factory=list)  # of measured requests
    sent: _Sent = field(default_factory=_Sent)
    received: _Sent = field(default_factory=_Sent)
    arrived_tokens: int = 0
    arrived_token_sec: float = 0.0  # their ages, summed

    @property
    def staleness_sec(self) -> float | None:
        """Mean age of a token of another replica when it arrives."""
        return self.arrived_token_sec / self.arrived_tokens if self.arrived_tokens else None

    def count(
        self, sec: float, seconds: float, sent: "_Message", arrived: Sequence["_Message"]
    ) -> None:
        """Count an exchange, `seconds` after the one before it."""
        for counted, messages in ((self.sent, [sent]), (self.received, arrived)):
            counted.num_bytes += sum(message.num_bytes for message in messages)
            counted.seconds += seconds
        texts = [text for message in arrived for text in message.texts]
        self.arrived_tokens += sum(text.num_tokens for text in texts)
        self.arrived_token_sec += sum((sec - text.sec) * text.num_tokens for text in texts)


class _Written(NamedTuple):
    """A text in a pool."""

    sec: float  # when it was written, wherever that was
    num_tokens: int


class _Fleet:
    """The requests of a fleet, and which of them are measured."""

    def __init__(
        self, catalogue: Catalogue, setup: Setup, requests: Requests, num_replicas: int
    ) -> None:
        self.catalogue, self.setup, self.requests = catalogue, setup, requests
        self.num_replicas = num_replicas
        self.num_tokens = catalogue.num_tokens[requests.question]
        num = min(_NUM_WATCHED, num_replicas)
        self.watched = [int((i + 0.5) * num_replicas / num) for i in range(num)]
        to_watched = np.flatnonzero(np.isin(requests.replica, self.watched))
        if not len(to_watched):
            raise ValueError(
                f"expected enough requests to measure some of, got {len(requests.sec)} to "
                f"{num_replicas} replicas"
            )
        self.measured: _Ints = to_watched[-setup.num_measured :]

    def trace(self, request: int) -> Trace:
        """Return what is asked and answered."""
        requests = self.requests
        return self.catalogue.trace(int(requests.question[request]), int(requests.tenant[request]))

    def newest(self, requests: _Ints) -> _Ints:
        """Return the last of some requests: as many as a pool can hold some text of."""
        num_behind = self.num_tokens[requests][::-1].cumsum()[::-1] - self.num_tokens[requests]
        return requests[num_behind < self.setup.capacity_tokens]


class _Learner:
    """A pool that learns what was recorded, and knows when its texts were written."""

    def __init__(self, fleet: _Fleet) -> None:
        self._fleet = fleet
        self.pool = NGramPool(fleet.setup.capacity_tokens, seed=0)
        self._drafter = PoolDrafter(self.pool)
        self.texts: deque[_Written] = deque()  # all that are held, one perhaps in part
        self._num_held = 0

    def learn(self, requests: _Ints) -> None:
        """Learn requests and their answers; what would be forgotten by the end is left out."""
        for request in self._fleet.newest(requests).tolist():
            learn(self._drafter, self._fleet.trace(request), self._fleet.catalogue)
            self._note_request(request)

    def measure(self, request: int, layers: Sequence[NGramPool] = ()) -> _Result:
        """Answer a request, with drafts from layers as well, and learn it."""
        fleet = self._fleet
        reach_sec = fleet.requests.sec[request] - self.texts[0].sec if self.texts else 0.0
        trace = fleet.trace(request)
        width = fleet.setup.max_draft_tokens
        drafter = PoolDrafter(self.pool, layers=layers)
        stats = replay_trace(trace, drafter, width, fleet.catalogue.recorded)
        self._note_request(request)
        return _Result(request, stats, float(reach_sec))

    def note(self, written: _Written) -> None:
        """Note a text that the pool observed last."""
        self.texts.append(written)
        self._num_held += written.num_tokens
        while self._num_held - self.texts[0].num_tokens >= self.pool.capacity_tokens:
            self._num_held -= self.texts.popleft().num_tokens

    def _note_request(self, request: int) -> None:
        fleet = self._fleet
        self.note(_Written(float(fleet.requests.sec[request]), int(fleet.num_tokens[request])))


def learn(drafter: PoolDrafter, trace: Trace, catalogue: Catalogue) -> None:
    """Observe a prompt and its answer, and harvest what decoding harvests of them."""
    token_ids = trace.token_ids
    sequence = drafter.open(token_ids)
    num_before = num_prompt_tokens(catalogue.recorded.max_new_tokens)
    start = max(0, trace.num_prompt_tokens - num_before - 1)
    known = Successors(trace.successors.token_ids[start:], trace.successors.probs[start:])
    parents = range(-1, len(token_ids) - start - 1)
    drafter.harvest(sequence, token_ids[: start + 1], token_ids[start:], parents, known)
    drafter.close(sequence)


# --- pools that nobody sends to -------------------------------------------------------------


def _pooled(fleet: _Fleet, sharing: Sharing, run: _Run) -> Iterator[_Result]:
    """Answer the measured requests from pools that each learn the requests of a key, at once."""
    keys = _keys(fleet, sharing.kind)
    below = _Pool(fleet, np.arange(len(keys))) if sharing.kind is Kind.layered else None
    pools: dict[int, _Pool] = {}
    for request in fleet.measured.tolist():
        key = int(keys[request])
        if key not in pools:
            pools[key] = _Pool(fleet, np.flatnonzero(keys == key))
            run.learners.append(pools[key].learner)
        layers = []
        if below is not None:
            below.learn_until(request)
            layers.append(below.learner.pool.as_read_only())
        pools[key].learn_until(request)
        yield pools[key].measure(request, layers)


class _Pool:
    """A pool, and the requests that it learns."""

    def __init__(self, fleet: _Fleet, requests: _Ints) -> None:
        self.learner = _Learner(fleet)
        self._requests, self._num_done = requests, 0

    def learn_until(self, request: int) -> None:
        """Learn all that came before a request."""
        place = int(np.searchsorted(self._requests, request))
        self.learner.learn(self._requests[self._num_done : place])
        self._num_done = place

    def measure(self, request: int, layers: Sequence[NGramPool]) -> _Result:
        """Answer the next request."""
        self._num_done += 1
        return self.learner.measure(request, layers)


def _keys(fleet: _Fleet, kind: Kind) -> _Ints:
    """Return for each request the number of the pool that it is drafted from."""
    requests, topics = fleet.requests, fleet.catalogue.topics
    if kind is Kind.one:
        return np.zeros_like(requests.tenant)
    if kind in (Kind.tenant, Kind.layered):
        return requests.tenant
    if kind is Kind.user:
        return requests.user
    if kind is Kind.topic:
        return requests.tenant * len(fleet.catalogue.categories) + topics[requests.question]
    return requests.replica


def _busiest(keys: _Ints, num_replicas: int) -> float:
    """Return the load of the busiest replica over the mean, each key being on one at random."""
    replica_of = np.random.default_rng(0).integers(num_replicas, size=int(keys.max()) + 1)
    loads = np.bincount(replica_of[keys], minlength=num_replicas)
    return float(loads.max() / loads.mean())


# --- pools that are exchanged ---------------------------------------------------------------


class _Message(NamedTuple):
    """What replicas sent at once."""

    delta: PoolDelta
    num_bytes: int
    texts: Sequence[_Written]
    sender: int | None  # a watched replica; None for all others

    @classmethod
    def of(
        cls, delta: PoolDelta, texts: Sequence[_Written], sender: int | None = None
    ) -> "_Message":
        # Nobody sends that there is nothing to send.
        return cls(delta, len(delta.to_bytes()) if delta else 0, texts, sender)


class _Replica:
    """A watched replica."""

    def __init__(self, fleet: _Fleet, others: "_Others", number: int, seconds: float) -> None:
        self.number = number
        self.learner = _Learner(fleet)
        self.phase_sec = float(_phases(np.array([number]), seconds)[0])
        self.own_texts: list[_Written] = []  # not sent yet
        self.own_since = self.learner.pool.stamp()
        self.others_since = others.stamp()
        self.num_seen = 0  # texts of unwatched replicas
        self.num_fetched = 0  # messages of watched ones, its own included
        self.has_exchanged = False

    def send(self, with_harvest: bool) -> _Message:
        """Return what was learned since the last time."""
        delta = self.learner.pool.delta(self.own_since, with_harvest=with_harvest)
        texts, self.own_texts, self.own_since = self.own_texts, [], delta.until
        return _Message.of(delta, texts, self.number)

    def take(self, arrived: Sequence[_Message]) -> None:
        """Learn what others sent."""
        for message in arrived:
            self.learner.pool.merge(message.delta)
            for text in message.texts:
                self.learner.note(text)


def _exchanging(fleet: _Fleet, sharing: Sharing, run: _Run) -> Iterator[_Result]:
    """Answer the measured requests from pools of replicas that are exchanged now and then.

    Every replica sends what it learned, and fetches what the others sent, every `exchange_sec`
    seconds, each at its own time.
    """
    seconds, with_harvest = sharing.exchange_sec, fleet.setup.with_harvest
    assert seconds is not None
    others = _Others(fleet, seconds)
    replicas = {number: _Replica(fleet, others, number, seconds) for number in fleet.watched}
    run.learners += [replica.learner for replica in replicas.values()]
    sent: list[_Message] = []
    measured = {*fleet.measured.tolist()}
    for sec, number, request in _events(fleet, replicas, others.start_sec, seconds):
        replica = replicas[number]
        if request is None:
            sent.append(replica.send(with_harvest))
            arrived = others.fetch(replica, sec)
            arrived += [each for each in sent[replica.num_fetched :] if each.sender != number]
            replica.num_fetched = len(sent)
            replica.take(arrived)
            if replica.has_exchanged:  # the first exchange has what came before the simulation
                run.count(sec, seconds, sent[-1], arrived)
            replica.has_exchanged = True
            continue
        if request in measured:
            yield replica.learner.measure(request)
        else:
            replica.learner.learn(np.array([request]))
        replica.own_texts.append(replica.learner.texts[-1])


def _events(
    fleet: _Fleet, replicas: dict[int, _Replica], start_sec: float, seconds: float
) -> list[tuple[float, int, int | None]]:
    """Return requests to watched replicas, and exchanges (None), in order of time."""
    requests = fleet.requests
    last_sec = float(requests.sec[fleet.measured[-1]])
    is_watched = np.isin(requests.replica, fleet.watched) & (requests.sec >= start_sec)
    events: list[tuple[float, int, int | None]] = [
        (float(requests.sec[request]), int(requests.replica[request]), request)
        for request in np.flatnonzero(is_watched).tolist()
    ]
    for number, replica in replicas.items():
        first = math.ceil((start_sec - replica.phase_sec) / seconds)
        last = math.floor((last_sec - replica.phase_sec) / seconds)
        times = [replica.phase_sec + n * seconds for n in range(first, last + 1)]
        events += [(sec, number, None) for sec in times if sec > 0]
    return sorted(events, key=lambda event: event[0])


def _phases(replicas: _Ints, seconds: float) -> NDArray[np.float64]:
    """Return when replicas send first: spread evenly, so that they do not all send at once."""
    return np.asarray(replicas * _GOLDEN_RATIO % 1 * seconds, np.float64)


class _Others:
    """All unwatched replicas: what they sent, as one pool.

    Its deltas are theirs, put together by whoever passes them on, and no more than a pool can hold.
    """

    def __init__(self, fleet: _Fleet, seconds: float) -> None:
        self._fleet = fleet
        self._learner = _Learner(fleet)
        self._log: list[_Written] = []  # all texts
        requests = fleet.requests
        first_sec = float(requests.sec[fleet.measured[0]])
        tokens_per_sec = fleet.num_tokens.sum() / max(float(requests.sec[-1]), 1e-9)
        # By then, a pool has overwritten all that came before, or there was nothing before.
        room_sec = fleet.setup.capacity_tokens / tokens_per_sec
        self.start_sec = max(0.0, first_sec - room_sec - 3 * seconds)
        is_other = ~np.isin(requests.replica, fleet.watched) & (requests.sec >= self.start_sec)
        sent = np.flatnonzero(is_other)
        phases = _phases(requests.replica[sent], seconds)
        arrival = phases + np.ceil((requests.sec[sent] - phases) / seconds) * seconds
        order = np.argsort(arrival, kind="stable")
        self._requests, self._arrival_sec, self._num_done = sent[order], arrival[order], 0

    def stamp(self) -> PoolStamp:
        return self._learner.pool.stamp()

    def fetch(self, replica: _Replica, sec: float) -> list[_Message]:
        """Return what arrived since the replica last asked; nothing where that is nothing."""
        stop = int(np.searchsorted(self._arrival_sec, sec, side="right"))
        arrived = self._fleet.newest(self._requests[self._num_done : stop])
        self._learner.learn(arrived)
        self._num_done = stop
        sizes = self._fleet.num_tokens[arrived].tolist()
        secs = self._fleet.requests.sec[arrived].tolist()
        self._log += [_Written(*each) for each in zip(secs, sizes, strict=True)]
        texts = self._held(self._log[replica.num_seen :])
        replica.num_seen = len(self._log)
        if not texts:
            return []
        with_harvest = self._fleet.setup.with_harvest
        delta = self._learner.pool.delta(replica.others_since, with_harvest=with_harvest)
        replica.others_since = delta.until
        return [_Message.of(delta, texts)]

    def _held(self, texts: list[_Written]) -> list[_Written]:
        """Return the last of some texts, which a pool still holds."""
        sizes = np.array([text.num_tokens for text in texts], np.int64)
        num_behind = sizes[::-1].cumsum()[::-1] - sizes
        return texts[int(np.count_nonzero(num_behind >= self._fleet.setup.capacity_tokens)) :]


# --- single costs ---------------------------------------------------------------------------


class Costs(NamedTuple):
    """What a request costs a pool, measured on the recorded ones."""

    tokens_per_request: float
    text_bytes_per_request: float  # of a delta, as sent
    bytes_per_request: float  # with what was harvested
    pool_bytes_per_token: float  # of memory, in a pool that is full
    empty_pool_bytes: int


def measure_costs(catalogue: Catalogue, setup: Setup) -> Costs:
    """Measure what the recorded requests, each asked once, cost a pool."""
    pool = NGramPool(setup.capacity_tokens, seed=0)
    drafter = PoolDrafter(pool)
    empty_bytes, since = pool.nbytes, pool.stamp()
    for question in range(len(catalogue)):
        learn(drafter, catalogue.trace(question, tenant=question), catalogue)
    text, both = (len(pool.delta(since, with_harvest=is_so).to_bytes()) for is_so in (False, True))
    full = NGramPool(setup.capacity_tokens, seed=0)
    filling: list[Any] = [*pool.texts()]
    while len(full) < full.capacity_tokens:
        for ids in filling:
            full.observe(ids, full.open_sequence())
    full.merge(pool)
    num = len(catalogue)
    return Costs(
        float(catalogue.num_tokens.mean()),
        text / num,
        both / num,
        full.nbytes / len(full),
        empty_bytes,
    )
