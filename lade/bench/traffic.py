"""Traffic of a fleet: who asks which recorded question when, and in whose words.

Recordings are short and fleets large, so a question is asked many times. Two things keep that from
flattering pools. Every tenant has its own words: tokens that only one category of the recording has
are replaced, one to one, by others of the vocabulary; what categories have in common is the
language that all tenants share. And requests that the fleet was asked before are counted apart.

Next file: `fleet.py`.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lade.bench.traces import Trace, Traces
from lade.drafting.successors import Successors

_Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Population:
    """Who asks, and how often; a fleet of more replicas has more tenants.

    Raises:
        ValueError: a value is out of range.
    """

    requests_per_sec: float = 1.0  # to each replica, on average
    seconds: float = 300.0  # of traffic, the end of which is measured
    tenants_per_replica: float = 4.0
    users_per_tenant: int = 10
    skew: float = (
        0.8  # the n-th tenant, and the n-th question of a tenant, comes 1 / n^skew as often
    )
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests_per_sec", "seconds", "tenants_per_replica", "users_per_tenant"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"expected {name} above 0, got {value}")
        if not 0 <= self.skew <= 4:
            raise ValueError(f"expected skew from 0 to 4, got {self.skew}")

    def num_tenants(self, num_replicas: int) -> int:
        """Return the number of tenants of a fleet, at least one."""
        return max(1, round(self.tenants_per_replica * num_replicas))


class Requests(NamedTuple):
    """The requests to a fleet, int64 [num_requests] each but `sec`, in order of time."""

    sec: NDArray[np.float64]  # since the beginning
    tenant: _Ints
    user: _Ints  # no two tenants have one in common
    question: _Ints  # number of the trace
    replica: _Ints  # drawn at random

    @property
    def is_new(self) -> NDArray[np.bool_]:
        """Whether nobody of the tenant asked the question before, bool [num_requests]."""
        asked = self.tenant * (1 + int(self.question.max(initial=0))) + self.question
        found = np.zeros(len(asked), np.bool_)
        found[np.unique(asked, return_index=True)[1]] = True
        return found


def draw_requests(population: Population, num_replicas: int, num_questions: int) -> Requests:
    """Return the requests to a fleet, drawn independently of each other.

    The same population, fleet and number of questions give the same requests.
    """
    rng = np.random.default_rng([population.seed, num_replicas])
    num = max(1, round(population.requests_per_sec * population.seconds * num_replicas))
    num_tenants = population.num_tenants(num_replicas)
    tenant = _by_popularity(rng, num, num_tenants, population.skew)
    user = tenant * population.users_per_tenant + rng.integers(
        population.users_per_tenant, size=num
    )
    rank = _by_popularity(rng, num, num_questions, population.skew)
    # Each tenant has an order of its own, so that another question is its most popular one.
    order = rng.permuted(np.tile(np.arange(num_questions), (num_tenants, 1)), axis=1)
    return Requests(
        np.sort(rng.random(num)) * population.seconds,
        tenant,
        user,
        order[tenant, rank],
        rng.integers(num_replicas, size=num),
    )


class Catalogue:
    """The recorded questions and answers, in the words of any tenant.

    Answers that end in loops are left out: drafts of any kind are right there.

    Args:
        recorded: the traces. Where all are of one category, each counts as one.
        num_successors: of each token, to keep.
        seed: of the words that tenants have.

    Raises:
        ValueError: all answers end in loops, or fewer successors were recorded.
    """

    def __init__(self, recorded: Traces, num_successors: int, seed: int = 0) -> None:
        known = recorded.num_successors
        if num_successors > known and known < recorded.vocab_size:
            raise ValueError(
                f"expected traces with {num_successors} successors or more (bench record "
                f"--num-successors {num_successors}), got {known}"
            )
        traces = [
            trace._replace(
                successors=Successors(
                    trace.successors.token_ids[:, :num_successors],
                    trace.successors.probs[:, :num_successors],
                )
            )
            for trace in recorded.traces
            if not trace.loops
        ]
        if not traces:
            raise ValueError("expected an answer that does not end in a loop, got none")
        recorded = replace(recorded, traces=traces)
        self.recorded = recorded
        self.categories = sorted({trace.category for trace in recorded.traces})
        self._seed = seed
        self._own = own_token_ids(recorded)
        self._place = np.full(recorded.vocab_size, -1, np.int64)
        self._place[self._own] = np.arange(len(self._own))

    def __len__(self) -> int:
        """Return the number of questions."""
        return len(self.recorded.traces)

    @property
    def num_tokens(self) -> _Ints:
        """Tokens of each question and its answer."""
        return np.array([len(trace.token_ids) for trace in self.recorded.traces], np.int64)

    @property
    def topics(self) -> _Ints:
        """The number of each question's category."""
        numbers = {name: number for number, name in enumerate(self.categories)}
        return np.array([numbers[trace.category] for trace in self.recorded.traces], np.int64)

    @property
    def shared_share(self) -> float:
        """Share of all tokens that every tenant has in common."""
        token_ids = np.concatenate([trace.token_ids for trace in self.recorded.traces])
        return float((self._place[token_ids] < 0).mean())

    def trace(self, question: int, tenant: int) -> Trace:
        """Return a question and its answer, with the target's successors, in a tenant's words."""
        trace, known = self.recorded.traces[question], self.recorded.traces[question].successors
        flat = np.concatenate([np.array(trace.token_ids), known.token_ids.ravel()])
        token_ids, successor_ids = np.split(self.in_words_of(tenant, flat), [len(trace.token_ids)])
        ids = successor_ids.astype(np.int32).reshape(known.token_ids.shape)
        return trace._replace(token_ids=token_ids.tolist(), successors=Successors(ids, known.probs))

    def in_words_of(self, tenant: int, token_ids: NDArray[Any]) -> _Ints:
        """Return what stands for token ids where a tenant writes; one to one."""
        num = len(self._own)
        if not num:
            return token_ids.astype(np.int64)
        # n -> (factor * n + shift) mod num is one to one, as nothing divides both factor and num.
        rng = np.random.default_rng([self._seed, tenant])
        factor, shift = (int(number) for number in rng.integers(1, num + 1, 2))
        while math.gcd(factor, num) > 1:
            factor += 1
        places = self._place[token_ids]
        replaced: _Ints = self._own[(factor * places + shift) % num]
        return np.where(places < 0, token_ids, replaced)


def own_token_ids(recorded: Traces) -> _Ints:
    """Return the token ids that tenants replace: all that not two categories have in common."""
    categories = {trace.category for trace in recorded.traces}
    seen: dict[str, set[int]] = {}
    for number, trace in enumerate(recorded.traces):
        name = trace.category if len(categories) > 1 else str(number)
        seen.setdefault(name, set()).update(trace.token_ids)
    times = np.zeros(recorded.vocab_size, np.int64)
    for token_ids in seen.values():
        times[[*token_ids]] += 1
    return np.flatnonzero(times < 2)


def _by_popularity(rng: np.random.Generator, num: int, num_kinds: int, skew: float) -> _Ints:
    """Draw `num` numbers below `num_kinds`, the n-th as often as 1 / n^skew."""
    weights = np.arange(1, num_kinds + 1, dtype=np.float64) ** -skew
    bounds = weights.cumsum()
    drawn: _Ints = np.searchsorted(bounds, rng.random(num) * bounds[-1], side="right")
    return np.minimum(drawn, num_kinds - 1)
