"""What one client sends or asks for costs the server and the others only so much."""

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lade.models import LoadedModel
from tests.lade.apps.server.client import Client, Json, connected, error_of
from tests.lade.apps.server.hostile import FLOODS, schema_of
from tests.lade.apps.server.serving import (
    loaded_model,
    serving,
)

KEYS = ["boss admin", "one", "quiet alone", "still alone"]


@pytest.fixture(scope="module")
def client(loaded: LoadedModel) -> Iterator[Client]:
    with serving(loaded, api_keys=KEYS) as client:
        yield client


def said(client: Client, data: bytes) -> bytes:
    """Send something, and return all that comes up to the close."""
    found = b""
    with connected(client) as connection, suppress(ConnectionResetError, BrokenPipeError):
        connection.sendall(data)
        while piece := connection.recv(4096):
            found += piece
    return found


# --- headers and lengths --------------------------------------------------------------------


@pytest.mark.parametrize("name", FLOODS)
def test_headers_are_bounded_in_bytes(client: Client, name: str) -> None:
    """By one parser, whichever is installed: of `httptools` nothing bounds them."""
    assert said(client, FLOODS[name][: 3 * 2**14]).startswith(b"HTTP/1.1 400")
    assert said(client, FLOODS[name] * 200)[:12] in (b"HTTP/1.1 400", b"")  # a reset may come first
    assert client.get("/health").status_code == 200


@pytest.mark.parametrize("second", ["localhost", "evil.example", ""])
def test_a_request_names_one_host(client: Client, second: str) -> None:
    hosts = f"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: {second}\r\n\r\n"
    assert said(client, hosts.encode()).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "line",
    [
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "GET /health",
        "PUT /v1/models",
        "GET /no",
    ],
)
@pytest.mark.parametrize("key", ["one", "none"])
def test_a_request_has_one_length(client: Client, line: str, key: str) -> None:
    """On every path and for every key: else a proxy may take the rest for another's request."""
    begin = f"{line} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    lengths = "Content-Type: application/json\r\nContent-Length: 4\r\nTransfer-Encoding: chunked"
    second = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = said(client, f"{begin}{lengths}\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n{second}".encode())
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"connection: close" in answer
    assert b"expected one length of the body" in answer
    assert answer.count(b"HTTP/1.1") == 1


# --- what keys leave to each other ----------------------------------------------------------


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Schemas that a process has checked; each check takes time."""
    found, run = list[str](), subprocess.run

    def counted(command: Any, **options: Any) -> Any:
        found.append(options["input"].decode())
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", counted)
    return found


def test_keys_that_are_alone_share_no_schema(client: Client, looks: list[str]) -> None:
    body = {**schema_of({"enum": [1]}), "max_tokens": 2}
    for key, num in (("one", 1), ("one", 1), ("quiet", 2), ("quiet", 3), ("still", 4), ("one", 4)):
        client.ask(key=key, **body)
        assert len(looks) == num


# --- what clients can read ------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ""},
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": []}},
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"number": "a"}},
        {"messages": [{"role": "tool", "content": "a"}]},
    ],
    ids=str,
)
def test_errors_name_no_folder_and_no_function(tmp_path: Path, body: Json) -> None:
    (tmp_path / "some-model").mkdir()
    loaded = loaded_model()
    loaded.tokenizer.chat_template = (
        "{{ 1 + (number or 1) }}{% for m in messages %}{{ m.content }}"
        "{% if m.role == 'tool' %}{{ m.no.such }}{% endif %}{% endfor %}"
    )
    with serving(loaded._replace(name=str(tmp_path / "some-model"))) as client:
        path = "/completions" if "prompt" in body else "/chat/completions"
        message = error_of(client.post(path, json=body), 400)["message"]
    for word in (str(tmp_path), "()", "jinja", "Error", "NoneType", "object has"):
        assert word not in message, message
