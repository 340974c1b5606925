"""A collector of pools as an actor of a Ray cluster. Ray is imported when it is first needed."""

from typing import Any

from lade.engines.exchange import Collector, CollectorStats, Cursor, Exchanged, Joined
from lade.errors import MissingExtraError

_NAMESPACE = "lade"
# An exchange takes milliseconds; to join, a pool of up to 60 MB is copied.
_TIMEOUT_SEC = 30.0
# Calls that wait for the collector, of one process: beyond that they fail at once.
_MAX_PENDING_CALLS = 4


class RayCollector:
    """A `Collector` that is an actor: one for all that ask for its name.

    It outlives whoever made it, needs no core of its own, and is restarted by Ray if it dies: then
    it begins with its file, if it has one, and with nothing else.

    Args:
        name: of the actor in the namespace `lade`; one for each group of users who may know of each
            other's text.
        timeout_sec: after which a call fails.
        options: of `Collector`, for the one who makes the actor; the others' are not used.

    Raises:
        MissingExtraError: Ray is not installed.
    """

    def __init__(
        self, name: str = "pools", *, timeout_sec: float = _TIMEOUT_SEC, **options: Any
    ) -> None:
        self._timeout_sec = timeout_sec
        self._ray = _ray()
        actor = self._ray.remote(Collector).options(
            name=name,
            namespace=_NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            max_pending_calls=_MAX_PENDING_CALLS,
        )
        self._actor = actor.remote(**options)

    def join(self) -> Joined:
        """Return a copy of the merged pool, and the cursor from which to go on."""
        joined: Joined = self._wait_for(self._actor.join.remote())
        return joined

    def exchange(self, delta: bytes, cursor: Cursor) -> Exchanged:
        """Send a delta, and return those of others, as `Collector.exchange` does."""
        exchanged: Exchanged = self._wait_for(self._actor.exchange.remote(delta, cursor))
        return exchanged

    def forget(self, token_ids: list[int]) -> int:
        """Remove tokens in a row, as `Collector.forget` does."""
        return int(self._wait_for(self._actor.forget.remote(token_ids)))

    def save(self) -> None:
        """Save the merged pool, if it has a file."""
        self._wait_for(self._actor.save.remote())

    def stats(self) -> CollectorStats:
        """Return what the collector did."""
        stats: CollectorStats = self._wait_for(self._actor.stats.remote())
        return stats

    def kill(self) -> None:
        """End the actor, with all that it has not saved."""
        self._ray.kill(self._actor)

    def _wait_for(self, call: Any) -> Any:
        return self._ray.get(call, timeout=self._timeout_sec)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error
    return ray
