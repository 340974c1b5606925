"""Simulated fleets as a table and as JSON, and on paper what many users come to.

Next file: `project.py`.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from lade.bench.environment import environment
from lade.bench.fleet import Cell, Costs, Setup
from lade.bench.report import rounded, share_text
from lade.bench.tables import Sheet
from lade.bench.traffic import Population
from ngram_pool.pool import MAX_CAPACITY_TOKENS

# Requests come in waves: so many times the mean of a day in its busiest hours.
_PEAK = 3
_SEC_PER_DAY = 86_400
_DAYS = 30  # whose text a pool is to hold

_COLUMNS = (
    *("MAT", "±", "MAT new", "MAT again", "in kB/s", "fleet MB/s", "stale s", "reach s"),
    *("busiest", "pool MB"),
)


class Paper(NamedTuple):
    """What many users come to, from the measured costs of a request."""

    num_users: int
    requests_per_day: float  # of a user
    requests_per_sec: float  # of all, in the busiest hours
    num_replicas: int  # that these take
    tokens_per_sec: float
    received_bytes_per_sec: float  # by a replica, if every one gets what all others learned
    fleet_bytes_per_sec: float  # of all replicas
    text_fleet_bytes_per_sec: float  # without what was harvested
    reach_sec: float  # how far back the text of all goes in a pool of the capacity
    largest_reach_sec: float  # and in the largest pool
    largest_pool_bytes: float
    user_tokens_per_day: float
    user_pool_bytes: float  # of memory, with the text of 30 days, up to the capacity
    users_pool_bytes: float  # of all users' pools together
    tenant_pool_bytes: float  # likewise, of a tenant and of all
    tenants_pool_bytes: float

    def of_replica(self, num_bytes: float) -> float:
        """Return a replica's share of what all have."""
        return num_bytes / self.num_replicas


def on_paper(
    costs: Costs, population: Population, setup: Setup, num_users: int, requests_per_day: float
) -> Paper:
    """Return what `num_users` come to.

    Raises:
        ValueError: there is no user, or none asks.
    """
    if num_users < 1 or not 0 < requests_per_day < math.inf:
        raise ValueError(
            "expected users of 1 or more, and requests per day above 0, "
            f"got {num_users} and {requests_per_day}"
        )
    per_sec = num_users * requests_per_day / _SEC_PER_DAY * _PEAK
    num_replicas = math.ceil(per_sec / population.requests_per_sec)
    tokens_per_sec = per_sec * costs.tokens_per_request
    from_others = per_sec * (1 - 1 / num_replicas)
    user_tokens = requests_per_day * costs.tokens_per_request

    def pool_bytes(num_members: int) -> float:
        held = min(_DAYS * num_members * user_tokens, setup.capacity_tokens)
        return max(costs.empty_pool_bytes, held * costs.pool_bytes_per_token)

    user_pool, tenant_pool = pool_bytes(1), pool_bytes(population.users_per_tenant)
    return Paper(
        num_users,
        requests_per_day,
        per_sec,
        num_replicas,
        tokens_per_sec,
        from_others * costs.bytes_per_request,
        num_replicas * from_others * costs.bytes_per_request,
        num_replicas * from_others * costs.text_bytes_per_request,
        setup.capacity_tokens / tokens_per_sec,
        MAX_CAPACITY_TOKENS / tokens_per_sec,
        MAX_CAPACITY_TOKENS * costs.pool_bytes_per_token,
        user_tokens,
        user_pool,
        num_users * user_pool,
        tenant_pool,
        num_users / population.users_per_tenant * tenant_pool,
    )


def table(cells: Sequence[Cell]) -> Sheet:
    """Return a table of fleets, with a section for each number of replicas."""
    sections = [
        [_cells(cell) for cell in of_fleet]
        for _, of_fleet in groupby(cells, key=lambda cell: cell.num_replicas)
    ]
    shares = [cell.repeated_share for cell in cells]
    repeats = f"{share_text(min(shares))} to {share_text(max(shares))}"
    caption = (
        "per replica: nothing is shared. every T s: pools of replicas, exchanged. one: all text at "
        "once. over one: with that as a layer.\n"
        f"±: standard error of MAT. again: asked by the tenant before, as {repeats} are.\n"
        "in: received by a replica. stale: mean age of others' text when it arrives. reach: age of "
        "the oldest text held.\n"
        "busiest: requests to the busiest replica over the mean, where pools decide who answers."
    )
    headings = ("replicas", "pools", *_COLUMNS)
    return Sheet("Pools of a fleet, simulated", headings, 2, sections, caption)


def paper_table(paper: Paper) -> Sheet:
    """Return what many users come to, in words."""
    users = f"{paper.num_users:,} users"
    sections = [
        [
            ("requests a second, in the busiest hours", f"{paper.requests_per_sec:,.0f}"),
            ("replicas", f"{paper.num_replicas:,}"),
            ("tokens a second, of prompts and answers", f"{paper.tokens_per_sec:,.0f}"),
        ],
        [
            ("all to all: received by a replica", _per_sec(paper.received_bytes_per_sec)),
            ("all to all: the fleet", _per_sec(paper.fleet_bytes_per_sec)),
            ("all to all: the fleet, text alone", _per_sec(paper.text_fleet_bytes_per_sec)),
            ("a pool of all text reaches back", f"{paper.reach_sec:,.1f} s"),
            ("the largest pool reaches back", f"{paper.largest_reach_sec:,.0f} s"),
            ("memory of the largest pool", bytes_text(paper.largest_pool_bytes)),
        ],
        [
            ("tokens of a user a day", f"{paper.user_tokens_per_day:,.0f}"),
            (f"a user's pool, {_DAYS} days", bytes_text(paper.user_pool_bytes)),
            ("all users' pools", bytes_text(paper.users_pool_bytes)),
            ("a replica's share of them", bytes_text(paper.of_replica(paper.users_pool_bytes))),
            (f"a tenant's pool, {_DAYS} days", bytes_text(paper.tenant_pool_bytes)),
            ("all tenants' pools", bytes_text(paper.tenants_pool_bytes)),
            ("a replica's share of them", bytes_text(paper.of_replica(paper.tenants_pool_bytes))),
        ],
    ]
    title = f"On paper: {users}, {paper.requests_per_day:g} requests a day each"
    caption = (
        f"The busiest hours have {_PEAK} times the mean of a day. All to all: every replica gets "
        "what all others learned. Pools are those of this capacity, all in memory."
    )
    return Sheet(title, ("what", "figure"), 1, sections, caption)


def as_json(
    cells: Sequence[Cell], paper: Paper, costs: Costs, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return all of it, ready for JSON."""
    return {
        "environment": environment(),
        "settings": settings,
        "costs": rounded(costs._asdict()),
        "paper": rounded(paper._asdict()),
        "runs": [rounded(cell._asdict()) for cell in cells],
    }


def bytes_text(num_bytes: float) -> str:
    """Return a size with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 1000 or unit == "TB":
            break
        num_bytes /= 1000
    return f"{num_bytes:,.0f} {unit}" if num_bytes >= 100 else f"{num_bytes:.2g} {unit}"


def _per_sec(num_bytes: float) -> str:
    return f"{bytes_text(num_bytes)}/s"


def _cells(cell: Cell) -> tuple[str, ...]:
    received = cell.received_bytes_per_sec
    return (
        f"{cell.num_replicas:,}",
        cell.sharing,
        f"{cell.mean_accepted_tokens:.2f}",
        _number(cell.mean_accepted_tokens_error, 2),
        _number(cell.new_mean_accepted_tokens, 2),
        _number(cell.repeated_mean_accepted_tokens, 2),
        _number(received, 1, 1e3),
        _number(None if received is None else cell.num_replicas * received, 2, 1e6),
        _number(cell.staleness_sec, 1),
        f"{cell.reach_sec:.1f}",
        _number(cell.busiest, 1),
        f"{cell.pool_bytes / 1e6:.1f}",
    )


def _number(value: float | None, num_digits: int, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.{num_digits}f}"
