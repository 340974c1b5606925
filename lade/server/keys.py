"""Who asks, and what that one may do: API keys."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lade.errors import UserError
from lade.server.errors import ApiError


class KeyOwner(NamedTuple):
    """Whose a request is, and what it may do beyond asking."""

    key: str = ""  # of the API; "" where none is needed
    corpora: frozenset[str] | None = None  # that it may draft from; None for all
    administers: bool = False  # whether it may read the metrics
    is_alone: bool = False  # whether no time that others measure depends on its texts


class ApiKeys:
    """The keys that open the server; without any, it is open.

    Args:
        lines: a key each, and behind it what its owner may do: `pools=NAME,…` or `pools=*` for the
            corpora to draft from, `admin` to read the metrics; `alone` to be served without drafts
            and without anything kept, so that others who measure times learn nothing of the text.

    Raises:
        UserError: something else is behind a key, no client can send it, or it is there twice.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self.replace(lines)

    def replace(self, lines: Sequence[str]) -> None:
        """Take other keys from now on; what is under way is ended for nobody."""
        owners = [_owner_of(line, number) for number, line in enumerate(lines, 1)]
        known = {owner.key: owner for owner in owners}
        if len(known) < len(owners):  # which of its rights would hold?
            raise UserError("expected each API key once, got one again")
        self._known = known

    def identify(self, headers: Mapping[str, str]) -> KeyOwner:
        """Return whose a request is.

        Raises:
            ApiError: it has no key where one is needed, or one that is not known.
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
        # What else is there may be a part of a key.
        raise UserError(f"expected nothing but pools=NAME,…, admin and alone behind key {number}")
    named = (right.removeprefix("pools=").split(",") for right in rights if "=" in right)
    corpora = frozenset(name for names in named for name in names if name)
    return KeyOwner(key, None if "*" in corpora else corpora, "admin" in rights, "alone" in rights)
