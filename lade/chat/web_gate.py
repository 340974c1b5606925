"""What the page's server answers: what its page asks for, and nothing else that Gradio has.

Among the rest are links that write a chat to disk and show it to anybody, uploads that nobody
removes, and profiles of the process.
"""

from collections.abc import Awaitable, Callable, Container
from typing import Any
from urllib.parse import parse_qs

from lade.hosts import is_known

_READ = {
    *("/", "/config", "/theme.css", "/favicon.ico", "/robots.txt", "/manifest.json"),
    *("/gradio_api/queue/data", "/gradio_api/startup-events", "/gradio_api/app_id"),
}
_READ_BELOW = ("/assets/", "/static/", "/svelte/", "/gradio_api/heartbeat/")
_SENT = {
    *("/gradio_api/queue/join", "/gradio_api/cancel", "/gradio_api/reset"),
    *("/login", "/gradio_api/login"),
}
_SENT_BELOW = ("/gradio_api/run/", "/gradio_api/stream/")
# A question is text in JSON.
_MAX_BODY_BYTES = 2**20


class PageGate:
    """Lets the requests of a page through to Gradio's application.

    Args:
        app: Gradio's.
        names: that the server may be called by; None for any.
    """

    def __init__(self, app: Any, names: Container[str] | None) -> None:
        self._app = app
        self._names = names

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        """Pass a request on, or refuse it."""
        status = self._refusal(scope) if scope["type"] == "http" else None
        if status is None:
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"text/plain"), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def _refusal(self, scope: dict[str, Any]) -> int | None:
        """Return the status that a request is refused with, if it is."""
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if not is_known(headers.get(b"host", ""), self._names):
            return 421
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return 404
        path = scope["path"].rstrip("/") or "/"
        known, below = (
            (_READ, _READ_BELOW) if scope["method"] in ("GET", "HEAD") else (_SENT, _SENT_BELOW)
        )
        if path not in known and not path.startswith(below):
            return 404
        if "deep_link" in parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True):
            return 404
        size = headers.get(b"content-length", "0")
        if scope["method"] == "POST" and not (
            size.isdecimal() and 0 < int(size) <= _MAX_BODY_BYTES
        ):
            return 413
        return None
