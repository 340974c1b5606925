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

    Args:
        model_name: the model's name in the API; None for the name that it was loaded by.
        api_keys: lines of a key and its rights, as in `--api-keys-file`; with none, no client needs
            a key.
        shares_pool: whether all clients share one pool and one set of kept prefixes.
        is_for_one: whether requests without a key, `user` or `cache_salt` belong to one user, whose
            pool and prefixes are kept; else nothing of them is kept.
        layers: files of read-only pools, for all requests.
        corpora: files of read-only pools by name, for requests that name them.
        pools: folder that keeps the pools of clients; None for a temporary folder.
        pool_memory_bytes, pool_disk_bytes: limits of all pools together.
        save_every_sec: seconds between two saves of the pools that have learned.
        allowed_hosts: host names that requests may have, beside the server's address. If empty, a
            server that other machines reach accepts all names, others those of this machine.
        max_batch_size: maximum number of requests that are answered at once, if the model's forward
            passes can run together; one key gets all slots but one at most.
        max_batch_tokens: maximum tokens of these requests, as for `lade.Batcher`.
        max_queue: maximum number of waiting requests of a key, or of an address without keys.
        max_prompt_tokens: maximum length of a prompt; None for the model's context length.
        max_new_tokens: maximum length of an answer.
        max_body_bytes: maximum size of a request's body.
        timeout_sec: limit of a request, from its headers to the last token of its answer.
        grace_sec: seconds that running answers have to finish when the server stops.
        ignores_unknown: whether unknown fields of requests are left out, and named in a header of
            the answer and in the log; else such requests are refused.
        config: settings of all calls; `reuses_prefix` is set for requests that have a pool.
        prewarms: whether the model writes its table while no request runs, as `lade.prewarm` does.
        drafter: drafter of all requests, such as a `lade.drafters.Merged` of a `CallPool` and
            others; None for the pools alone.

    Raises:
        UserError: a setting is out of its range.
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
