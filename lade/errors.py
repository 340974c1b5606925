"""Errors beyond ValueError and TypeError, and warnings. Every message names the cause."""

import json
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname


class LadeError(Exception):
    """Base class of this package's errors."""


class UserError(LadeError, ValueError):
    """A user's input is invalid; the message says what was expected, and the valid choices."""


class UnsupportedModelError(LadeError):
    """A model does not support the requested verification; raised before anything is generated."""


class UnsupportedOptionError(LadeError, ValueError):
    """A generation option that cannot be honoured; raised before anything is generated."""


class PlainDecodingWarning(UserWarning):
    """Drafts cannot be verified for a model or call; lade falls back to standard decoding."""


class MisfitError(ValueError):
    """Arguments of a call do not fit each other; standard decoding would fail, too."""


class VerificationWarning(PlainDecodingWarning):
    """Verification failed during a call; the rest of the call falls back to standard decoding."""


class DrafterWarning(UserWarning):
    """A drafter raised an error or returned an invalid draft; the call continues without it."""


class ContextLengthError(LadeError, ValueError):
    """A prompt has more tokens than the model has positions for; nothing was generated."""


class ModelFetchError(LadeError):
    """The embedded model could not be fetched, checked, read or stored."""


class MissingExtraError(LadeError, ImportError):
    """An optional dependency is missing or too old; the message has the pip command."""

    def __init__(self, module: str, extra: str, what: str = "which is not installed") -> None:
        super().__init__(
            f"this needs the package {module!r}, {what}; "
            f"install it with: pip install {_requirement(extra)}"
        )


def _requirement(extra: str) -> str:
    """Return the extra of this installation as pip takes it: of its folder or wheel, if any."""
    try:
        found = metadata.distribution("lade-decoding").read_text("direct_url.json")
        url = urlsplit(json.loads(found or "{}").get("url", ""))
    except (metadata.PackageNotFoundError, ValueError):  # run from a folder; damaged
        return f'"lade-decoding[{extra}]"'
    path = Path(url2pathname(url.path))
    is_there = url.scheme == "file" and path.exists()
    return f'"{path}[{extra}]"' if is_there else f'"lade-decoding[{extra}]"'


def in_one_line(error: BaseException) -> str:
    """Return an error as its type and the first line of its message, shortened; never raise.

    A line that ends in a colon announces the next one.
    """
    try:
        lines = str(error).strip().splitlines() or [""]
        said = " ".join(lines[: 1 + lines[0].endswith(":")])
        return f"{type(error).__name__}: {said[:200]}"
    except Exception as failure:  # the `__str__` of a user's class
        return f"{type(error).__name__}, and {type(failure).__name__} for its message"
