"""`check`: find what is wrong with a drafter."""

from lade.errors import LadeError


class DrafterError(LadeError):
    """A drafter has flaws; the message lists them."""


def check() -> None:
    """Check."""
