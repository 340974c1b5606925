"""API keys: the owner of a request, and the owner's rights."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lade.errors import UserError
from lade.server.errors import ApiError


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
