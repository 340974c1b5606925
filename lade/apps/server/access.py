"""Who may ask, and by which name of the server: API keys, addresses, host names, fair shares."""

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple

from lade.apps.server.errors import ApiError
from lade.errors import UserError

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


class Shares:
    """Counts a limited resource, for all keys together and for each key."""

    def __init__(self, most: int, most_of_key: int) -> None:
        self._most, self._most_of_key = most, most_of_key
        self._taken: Counter[str] = Counter()
        self._num_taken = 0

    def take(self, key: str, number: int = 1) -> bool:
        """Take some of it; return whether as much was free."""
        of_key, of_all = self._taken[key] + number, self._num_taken + number
        if of_all > self._most or of_key > self._most_of_key:
            return False
        self._taken[key], self._num_taken = of_key, of_all
        return True

    def give(self, key: str, number: int = 1) -> None:
        """Give some of it back."""
        self._num_taken -= number
        self._taken[key] -= number
        if not self._taken[key]:
            del self._taken[key]


def origin_of(peer: Sequence[Any] | None) -> str:
    """Return the address of a client, of IPv6 its /64 network, for limits without keys.

    A single subscriber has all of a /64, and may use another address for each request.
    """
    if not peer:  # it has left
        return ""
    found = ip_address(peer[0])
    is_old = getattr(found, "ipv4_mapped", found)
    return str(is_old or ip_network((int(found), 64), strict=False))


def is_local(address: str) -> bool:
    """Return whether an address can be reached from this machine alone."""
    if address == "localhost":
        return True
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def names_of(address: str, more: Iterable[str] = ()) -> Container[str] | None:
    """Return the names, in lower case, that clients may use; None for any.

    The owner of another site may point its name at this machine (DNS rebinding). A browser then
    lets that site's pages read answers of this server, by requests with that name as host.

    Args:
        address: address to listen at. One that other machines reach may have any name.
        more: names given by the operator.
    """
    more = [*more]
    if not (is_local(address) or more):
        return None
    return {name.lower() for name in (*more, *_LOCAL, address)}


def is_known(header: str, names: Container[str] | None) -> bool:
    """Return whether a `Host` header, with a port or without, has one of some names."""
    if names is None:
        return True
    end = header.find("]") + 1 if header.startswith("[") else header.find(":")
    return (header if end < 0 else header[:end]).lower() in names
