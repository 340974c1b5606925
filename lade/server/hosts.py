"""Names that a server on this machine may be called by, so that no page of another site reaches it.

The owner of another site may point its name at this machine (DNS rebinding). A browser then lets
that site's pages read answers of this server. Their requests have the other site's name as host.
"""

from collections.abc import Container, Iterable
from ipaddress import ip_address

_LOCAL = ("localhost", "127.0.0.1", "[::1]")


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
