"""Errors in OpenAI's form."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

from lade.errors import LadeError

_KINDS = {401: "authentication_error", 429: "rate_limit_error"}
_LATER = {"retry-after": "5"}  # seconds
_HEADERS = {401: {"www-authenticate": "Bearer"}, 429: _LATER, 503: _LATER}


@dataclass(eq=False)
class ApiError(LadeError):
    """An error that a client gets instead of an answer."""

    status: int  # of HTTP
    message: str  # expected and given value; nothing of other clients' requests
    _: KW_ONLY
    param: str | None = None  # the field at fault, as in "messages.0.role"
    code: str | None = None  # for programs
    closes: bool = False  # whether to close the connection, as more of the body may come

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _KINDS.get(self.status, default)
        details = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": details}

    def headers(self) -> dict[str, str]:
        """Return the headers that go with the status."""
        headers = {"connection": "close"} if self.closes else {}
        return {**headers, **_HEADERS.get(self.status, {})}


def failed() -> ApiError:
    """Return the error that a client reads if the server fails; the log has the details."""
    return ApiError(500, "the server failed to answer; its log says why", code="internal_error")
