"""Who asks: API keys and their rights, host names, addresses; whose pool a request has."""

import hashlib
import json
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from lade.apps.server.errors import ApiError
from lade.apps.server.requests import Asked
from lade.compat.fingerprint import fingerprint_of
from lade.errors import UserError
from lade.hf.pool_files import fingerprint_of_tokenizer, load_pool
from lade.hf.pools import AnyPool, Pools
from lade.models.loading import LoadedModel
from ngram_pool import PoolStore

if TYPE_CHECKING:
    from lade.apps.server.options import ServerOptions

_LOCAL = ("localhost", "127.0.0.1", "[::1]")


class KeyOwner(NamedTuple):
    """The owner of a request, and the rights of its key."""

    key: str = ""  # "" on a server without keys
    corpora: frozenset[str] | None = None  # names of corpora that it may use; None for all
    administers: bool = False  # whether it may read the metrics
    is_alone: bool = False  # decoded without drafts, nothing kept


class ApiKeys:
    """The API keys of a server; a server without keys answers everybody.

    Args:
        lines: a key and its rights each. `pools=NAME,…` or `pools=*` names the corpora that it may
            use, `admin` may read the metrics. `alone` is decoded without drafts and leaves nothing
            behind, so that others who measure times learn nothing of its text.

    Raises:
        UserError: a line has another right, a key that no client can send, or a key twice.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self.replace(lines)

    def replace(self, lines: Sequence[str]) -> None:
        """Replace the keys; requests that are running go on."""
        owners = [_owner_of(line, number) for number, line in enumerate(lines, 1)]
        known = {owner.key: owner for owner in owners}
        if len(known) < len(owners):  # its rights would be ambiguous
            raise UserError("expected each API key once, got one again")
        self._known = known

    def identify(self, headers: Mapping[str, str]) -> KeyOwner:
        """Return the owner of a request.

        Raises:
            ApiError: the request has no valid key, and the server has keys.
        """
        known = self._known  # once: SIGHUP may replace it at any line
        if not known:
            return KeyOwner(administers=True)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        owner = known.get(key.strip())
        if scheme.lower() != "bearer" or owner is None:
            raise ApiError(
                401, "expected a valid API key: Authorization: Bearer KEY", code="invalid_api_key"
            )
        return owner


def _owner_of(line: str, number: int) -> KeyOwner:
    key, *rights = line.split() or [""]
    if not key:
        raise UserError("expected API keys of one character or more, got ''")
    if not (key.isascii() and key.isprintable()):  # a byte order mark, for instance
        raise UserError(
            f"expected API keys that a header may have, in ASCII, got another: key {number}"
        )
    if not all(re.fullmatch("admin|alone|pools=.+", right) for right in rights):
        # The message must not show the line: it may be part of a key.
        raise UserError(f"expected nothing but pools=NAME,…, admin and alone behind key {number}")
    named = (right.removeprefix("pools=").split(",") for right in rights if "=" in right)
    corpora = frozenset(name for names in named for name in names if name)
    return KeyOwner(key, None if "*" in corpora else corpora, "admin" in rights, "alone" in rights)


def is_local(address: str) -> bool:
    """Return whether an address can be reached from this machine alone."""
    if address == "localhost":
        return True
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address and port, 0 for a free one.

    Raises:
        UserError: another program listens there, or the address is none of this machine.
    """
    if not host:  # which would let everybody in
        raise UserError("expected an address to listen at, got ''")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(f"cannot listen at {host}:{port}: {error.strerror}") from None


def is_known(header: str, address: str, more: Sequence[str]) -> bool:
    """Return whether a `Host` header, with a port or without, is one that clients may use.

    The owner of another site may point its name at this machine (DNS rebinding). A browser then
    lets that site's pages read answers of this server, by requests with that name as host.

    Args:
        header: of a request.
        address: address that the server listens at. One that other machines reach may have any
            name.
        more: names given by the operator.
    """
    if not (is_local(address) or more):
        return True
    end = header.find("]") + 1 if header.startswith("[") else header.find(":")
    host = (header if end < 0 else header[:end]).lower()
    return host in {name.lower() for name in (*_LOCAL, address, *more)}


# --- pools ----------------------------------------------------------------------------------


class UserPools:
    """A pool for each user, layers for all requests, and corpora that requests choose.

    Pools of another tokenizer have a folder of their own.

    Raises:
        OSError, ngram_pool.PoolFileError: a folder or a layer cannot be used.
    """

    def __init__(self, loaded: LoadedModel, options: "ServerOptions") -> None:
        self._shares, self._is_for_one = options.shares_pool, options.is_for_one
        self._stack = ExitStack()
        folder = options.pools
        if folder is None:
            made = TemporaryDirectory(prefix="lade-pools-", ignore_cleanup_errors=True)
            folder = Path(self._stack.enter_context(made))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tokenizer, model = loaded.tokenizer, loaded.model
        fingerprint = fingerprint_of_tokenizer(tokenizer)
        self.store = PoolStore(
            folder / fingerprint,
            options.pool_memory_bytes,
            options.pool_disk_bytes,
            options.save_every_sec if options.pools else float("inf"),
            tokenizer=fingerprint,
            model=fingerprint_of(model) or "",
        )

        def read(path: Path) -> AnyPool:
            return load_pool(path, tokenizer=tokenizer, model=model, read_only=True)

        self._layers = [*map(read, dict.fromkeys(path.resolve() for path in options.layers))]
        self._corpora = {name: read(path) for name, path in options.corpora.items()}

    def of(self, owner: KeyOwner, asked: Asked) -> tuple[Pools | None, str]:
        """Return the pools of a request, and the name of its user's pool and kept prefixes.

        The name is "", and the pool ends with the request, if the request names no user on a server
        of several users, or if its key is `alone`.

        Raises:
            ApiError: a corpus does not exist, or the key may not use it.
        """
        chosen = [*dict.fromkeys(asked.pools or ())]
        for name in chosen:
            is_allowed = owner.corpora is None or name in owner.corpora
            if not is_allowed or name not in self._corpora:  # the error does not say which
                message = f"expected pools that this key may draft from, got {name!r}"
                raise ApiError(404, message, param="pools", code="pool_not_found")
        layers = [*map(self._corpora.__getitem__, chosen), *self._layers]
        key, user, salt = owner.key, asked.user, asked.cache_salt
        knows_who = self._shares or self._is_for_one or key
        is_nobody = not knows_who and user is None and salt is None
        if is_nobody or owner.is_alone:
            return layers or None, ""
        who = json.dumps([key, user, salt]).encode()
        name = "shared" if self._shares else hashlib.sha256(who).hexdigest()  # hides who it is
        return [self.store.named(name), *layers], name

    def close(self) -> None:
        """Save all pools, or remove them if they are in a temporary folder."""
        with self._stack:
            self.store.close()
