"""A client of a server, in a few words, and what comes back."""

import json
import socket
from collections.abc import Sequence
from typing import Any

import httpx

QUESTION = [{"role": "user", "content": "What-is-a-pool?"}]
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
Json = dict[str, Any]


class Client:
    """Asks a server, by default as the owner of a key."""

    def __init__(self, server: Any, url: str, key: str = "none") -> None:
        self.server, self.url, self.key = server, url, key
        self.base = url.removesuffix("/v1")

    def get(self, path: str, key: str | None = None, method: str = "GET", **headers: str) -> Any:
        found = {"authorization": f"Bearer {self.key if key is None else key}", **headers}
        # To read certificates, which nothing here has, takes as long as many an answer.
        return httpx.request(method, self.base + path, headers=found, timeout=60, verify=False)

    def post(self, path: str = "/chat/completions", key: str | None = None, **options: Any) -> Any:
        named = {"authorization": f"Bearer {self.key if key is None else key}"}
        headers = {"content-type": "application/json", **named, **options.pop("headers", {})}
        place = f"{self.url}{path}"
        return httpx.post(place, headers=headers, timeout=60, verify=False, **options)

    def ask(self, path: str = "/chat/completions", key: str | None = None, **body: Any) -> Json:
        what = {} if "prompt" in body or "messages" in body else {"messages": QUESTION}
        body = {"max_tokens": 40, "temperature": 0, **what, **body}
        answer = self.post("/completions" if "prompt" in body else path, key, json=body)
        assert answer.status_code == 200, answer.text
        found: Json = answer.json()
        return found

    def text(self, **body: Any) -> str:
        choice = self.ask(**body)["choices"][0]
        return str(choice["text"] if "prompt" in body else choice["message"]["content"])

    def stream(self, *, done: bool = True, **body: Any) -> list[Json]:
        """Ask; return the events of the answer, which others than lade's do not end by a mark."""
        body = {"max_tokens": 40, "temperature": 0, "stream": True, **body}
        path = "/completions" if "prompt" in body else "/chat/completions"
        if "prompt" not in body:
            body = {"messages": QUESTION, **body}
        return events_of(self.post(path, json=body), done)

    def error(self, status: int = 400, path: str = "/chat/completions", **body: Any) -> Json:
        what = {"prompt": "What-is"} if path == "/completions" else {"messages": QUESTION}
        return error_of(self.post(path, json={"max_tokens": 4, **what, **body}), status)

    def drafted(self, **body: Any) -> int:
        """Ask; return how many tokens of the answer were drafted."""
        details = self.ask(**body)["usage"]["completion_tokens_details"]
        assert details["rejected_draft_tokens"] >= 0
        return int(details["accepted_draft_tokens"])

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric's value; one's key must be `admin` where there are keys."""
        found = 0.0
        for line in self.get("/metrics").text.splitlines():
            named = line.startswith((f"{name}{{", f"{name} "))
            if named and all(f'{label}="{value}"' in line for label, value in labels.items()):
                found += float(line.rsplit(" ", 1)[1])
        return found


def events_of(answer: httpx.Response, done: bool = True) -> list[Json]:
    assert answer.status_code == 200, answer.text
    parts = [each.removeprefix("data: ") for each in answer.text.split("\n\n")]
    if done:
        assert parts[-2:] == ["[DONE]", ""]
    return [json.loads(each) for each in parts if each not in ("[DONE]", "")]


def error_of(answer: httpx.Response, status: int) -> Json:
    assert answer.status_code == status, answer.text
    (name, error), *more = answer.json().items()
    assert (name, more) == ("error", [])
    assert error.keys() == {"message", "type", "param", "code"}
    found: Json = error
    return found


def text_of(events: Sequence[Json]) -> str:
    choices = [each["choices"][0] for each in events if each["choices"]]
    return "".join(each.get("text") or each.get("delta", {}).get("content", "") for each in choices)


def connected(client: Client) -> socket.socket:
    url = httpx.URL(client.url)
    return socket.create_connection((url.host, url.port or 0), 60)


def sent(client: Client, body: Json, promised: int = 0) -> socket.socket:
    """Ask for a few tokens, without reading them; `promised` bytes more never come."""
    connection = connected(client)
    short = {"messages": QUESTION, "max_tokens": 4, "temperature": 0}
    data = json.dumps({**short, **body}).encode()
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (len(data) + promised, data)
    )
    return connection
