"""`ServerOptions`: what an operator decides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from lade.config import Config
from lade.drafting.drafter import Drafter
from lade.errors import UserError
from lade.server.keys import ApiKeys

_LEAST = {
    **dict.fromkeys(("max_connections", "max_batch_size", "max_batch_tokens"), 1),
    **dict.fromkeys(("max_prompt_tokens", "max_new_tokens", "max_body_bytes"), 1),
    **dict.fromkeys(("max_queue", "grace_sec", "pool_memory_bytes"), 0),
}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to serve a model.

    Args:
        model_name: what clients call it; None for the name that it was loaded by.
        api_keys: keys; a client must send one of them. Each line has its owner's rights, as for
            `lade.server.keys.ApiKeys`; none let everybody in.
        shares_pool: whether all clients have one pool and one set of prefixes.
        is_for_one: whether requests that say nothing of who asks are one user's, whose pool and
            prefixes are kept; else nothing is kept of them.
        layers: files of pools that are only read, for all.
        corpora: files of pools by name, for requests that choose them.
        pools: folder that keeps the pools of clients; None for a temporary one.
        pool_memory_bytes, pool_disk_bytes: for all of them together.
        save_every_sec: how often those that learn are saved.
        allowed_hosts: names that clients may call the server by, beside its address; without any,
            all where it listens at an address that others reach, else those of this machine.
        max_connections: clients that may be connected.
        max_batch_size: requests that are answered at once, where forwards of the model can run
            together; one key has all places but one at most.
        max_batch_tokens: of all of these, as for `lade.Batcher`.
        max_queue: requests that may wait, of each key or, without keys, from each address.
        max_prompt_tokens: of a request; None for what the model has positions for.
        max_new_tokens: of an answer.
        max_body_bytes: of a request.
        timeout_sec: of a request, from its first byte to the last of its answer.
        grace_sec: for answers that are under way when the server is to stop.
        ignores_unknown: whether unknown fields of requests are left out, and named in a header of
            the answer and in the log; else such requests are refused.
        config: of all calls; prefixes are reused for those who have a pool, whatever it says.
        prewarms: whether the model writes its table while nobody asks, as `lade.prewarm` does.
        drafter: drafts from a request's pools and whatever else it has, as a `lade.drafters.Merged`
            of a `CallPool` and others does; None for the pools alone.

    Raises:
        UserError: one is out of its range.
    """

    model_name: str | None = None
    api_keys: Sequence[str] = ()
    shares_pool: bool = False
    is_for_one: bool = False
    layers: Sequence[Path] = ()
    corpora: Mapping[str, Path] = field(default_factory=dict)
    pools: Path | None = None
    pool_memory_bytes: int = 2**30
    pool_disk_bytes: int = 2**34
    save_every_sec: float = 60.0
    allowed_hosts: Sequence[str] = ()
    max_connections: int = 10_000
    max_batch_size: int = 16
    max_batch_tokens: int | None = None
    max_queue: int = 100
    max_prompt_tokens: int | None = None
    max_new_tokens: int = 4096
    max_body_bytes: int = 2**22
    timeout_sec: float = 600.0
    grace_sec: float = 30.0
    ignores_unknown: bool = False
    config: Config = field(default_factory=Config)
    prewarms: bool = False
    drafter: Drafter | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value < inf:
                raise UserError(f"expected {name} of at least {least}, got {value!r}")
        if not 0 < self.timeout_sec < inf:
            raise UserError(f"expected timeout_sec above 0, got {self.timeout_sec!r}")
        for host in self.allowed_hosts:
            if not host or "/" in host:
                raise UserError(f"expected allowed hosts by their names alone, got {host!r}")
        ApiKeys(self.api_keys)
