"""`ServerOptions`: the settings of a server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from lade.apps.server.access import ApiKeys
from lade.config import Config
from lade.drafting.drafter import Drafter
from lade.errors import UserError

_LEAST = {
    **dict.fromkeys(("max_batch_size", "max_batch_tokens"), 1),
    **dict.fromkeys(("max_prompt_tokens", "max_new_tokens", "max_body_bytes"), 1),
    **dict.fromkeys(("max_queue", "grace_sec", "pool_memory_bytes"), 0),
}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of a server, most of them options of `lade serve`.

    Raises:
        UserError: a setting is out of its range.
    """

    model_name: str | None = None  # in the API; None for the name that it was loaded by
    api_keys: Sequence[str] = ()  # with their rights, as in `--api-keys-file`; none for everybody
    shares_pool: bool = False  # one pool and one set of kept prefixes for all clients
    # Whether requests without a key, `user` or `cache_salt` belong to one user, whose pool and
    # prefixes are kept; else nothing of them is kept.
    is_for_one: bool = False
    layers: Sequence[Path] = ()  # files of read-only pools, for all requests
    corpora: Mapping[str, Path] = field(default_factory=dict)  # which requests name
    pools: Path | None = None  # folder that keeps clients' pools; None for a temporary one
    pool_memory_bytes: int = 2**30  # of all pools together
    pool_disk_bytes: int = 2**34
    save_every_sec: float = 60.0  # between two saves of the pools that have learned
    # Host names that requests may have, beside the server's address. If empty, a server that other
    # machines reach accepts all names, others those of this machine.
    allowed_hosts: Sequence[str] = ()
    # Requests that are answered at once, if the model's forward passes can run together; one key
    # gets all slots but one at most. Their tokens are limited as for `lade.Batcher`.
    max_batch_size: int = 16
    max_batch_tokens: int | None = None
    max_queue: int = 100  # waiting requests of a key, or of an address without keys
    max_prompt_tokens: int | None = None  # None for the model's context length
    max_new_tokens: int = 4096
    max_body_bytes: int = 2**22
    timeout_sec: float = 600.0  # from a request's headers to the last token of its answer
    grace_sec: float = 30.0  # that running answers have to finish when the server stops
    # Whether unknown fields of requests are left out, and named in a header of the answer and in
    # the log; else such requests are refused.
    ignores_unknown: bool = False
    # Of all calls; `reuses_prefix` is set for requests that have a pool.
    config: Config = field(default_factory=Config)
    prewarms: bool = False  # writes the model's table while no request runs
    drafter: Drafter | None = None  # of all requests, beside their pools if it holds a `CallPool`

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value < inf:
                raise UserError(f"expected {name} of at least {least}, got {value!r}")
        if not 0 < self.timeout_sec < inf:
            raise UserError(f"expected timeout_sec (--timeout) above 0, got {self.timeout_sec!r}")
        for host in self.allowed_hosts:
            if not host or "/" in host:
                raise UserError(f"expected allowed hosts by their names alone, got {host!r}")
        ApiKeys(self.api_keys)
