"""What operators and their proxies rely on: hosts, probes, metrics, keys, connections, TLS."""

import hmac
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from lade.cli import serve
from lade.models.loading import LoadedModel
from lade.server import connections
from lade.server.app import Server
from lade.server.keys import ApiKeys
from lade.server.options import ServerOptions
from tests.lade.server.serving import (
    NAME,
    QUESTION,
    asked,
    client_of,
    loaded_model,
    plain_text,
    post,
    prompt_ids,
    serving,
    wait_until,
)

CHAT: dict[str, Any] = {"messages": QUESTION, "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_model()


def get(server: Server, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    return httpx.request(method, server.url.removesuffix("/v1") + path, headers=headers)


def test_other_names_of_the_server_are_not_answered(loaded: LoadedModel) -> None:
    """By those, a page in a browser may reach a server that is not for it."""
    with serving(loaded, allowed_hosts=["lade.example"]) as server:
        port = server.url.split(":")[2].removesuffix("/v1")
        for host in ("localhost", f"127.0.0.1:{port}", "[::1]:80", "LADE.example:443"):
            assert get(server, "/v1/models", host=host).status_code == 200
        for host in ("evil.example", "localhost.evil.example", "", "127.0.0.1.nip.io"):
            assert get(server, "/v1/models", host=host).status_code == 421
            assert post(server, json=CHAT, headers={"host": host}).status_code == 421


def test_probes_need_no_key_and_tell_ready_from_alive(loaded: LoadedModel) -> None:
    with serving(loaded, api_keys=["one"]) as server:
        for path in ("/health", "/ready"):
            assert get(server, path).status_code == 200
            head = get(server, path, "HEAD")
            assert (head.status_code, head.content) == (200, b"")
        gate = server._uvicorn._gate
        gate._is_closing = True
        assert get(server, "/ready").json()["error"]["code"] == "shutting_down"
        assert (get(server, "/ready").status_code, get(server, "/health").status_code) == (503, 200)


def test_metrics_are_not_for_those_who_have_keys(loaded: LoadedModel) -> None:
    """They tell how long the prompts of others are."""
    with serving(loaded, api_keys=["one"], metrics_port=0) as server:
        assert get(server, "/metrics").status_code == 401
        assert get(server, "/metrics", authorization="Bearer one").status_code == 403
        assert server.metrics_url is not None
        with client_of(server, "one") as client:
            asked(client)
        found = httpx.get(server.metrics_url).text
        assert f'vllm:prompt_tokens_total{{model_name="{NAME}"}}' in found
        evil = httpx.get(server.metrics_url, headers={"host": "evil.example"})
        assert evil.status_code == 421
        assert httpx.get(server.metrics_url, headers={"origin": "http://a"}).status_code == 404
        assert httpx.get(server.metrics_url.replace("metrics", "v1/models")).status_code == 404
        address = httpx.URL(server.metrics_url)
        num_threads = threading.active_count()
        halves = [socket.create_connection((address.host, address.port or 0)) for _ in range(50)]
        for half in halves:
            half.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert httpx.get(server.metrics_url).status_code == 200
        assert threading.active_count() < num_threads + 9
        for half in halves:
            half.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.metrics_url)
    with serving(loaded) as server:
        assert get(server, "/metrics").status_code == 200
    with pytest.raises(ValueError, match="expected a metrics_port other than"):
        Server(loaded, ServerOptions(metrics_port=8000), port=8000)


def test_how_much_of_a_prompt_was_kept_is_told_to_the_owner_of_a_key_alone(
    loaded: LoadedModel,
) -> None:
    """Without keys, whoever guesses a name would read that one's prompt by it."""
    for keys, is_told in (([], False), (["one"], True)):
        with serving(loaded, api_keys=keys) as server, client_of(server, "one") as client:
            for _ in range(2):
                usage = asked(client, user="alice").usage
            details = usage.prompt_tokens_details
            assert (details is not None and details.cached_tokens > 0) == is_told
            body = {"input": "What-is", "user": "alice", "max_output_tokens": 4}
            headers = {"authorization": "Bearer one"}
            for _ in range(2):
                answer = post(server, "/responses", json=body, headers=headers).json()
            num_cached = answer["usage"]["input_tokens_details"]["cached_tokens"]
            assert (num_cached > 0) == is_told


def test_a_model_is_found_by_its_name_and_tells_no_path(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    (tmp_path / "some-model").mkdir()
    with serving(loaded._replace(name=str(tmp_path / "some-model"))) as server:
        assert server.name == "some-model"
        (found,) = get(server, "/v1/models").json()["data"]
        assert get(server, "/v1/models/some-model").json() == found
        missing = get(server, "/v1/models/other")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"


def test_tokens_of_a_prompt_can_be_asked_for(loaded: LoadedModel) -> None:
    with serving(loaded) as server:
        url = server.url.removesuffix("/v1") + "/tokenize"
        expected = prompt_ids(loaded)["input_ids"][0].tolist()
        told = httpx.post(url, json={"messages": QUESTION}).json()
        assert told == {"count": len(expected), "tokens": expected}
        assert httpx.post(url, json={"prompt": "What-is"}).json()["count"] == 7
        assert httpx.post(url, json={"prompt": 3}).status_code == 400


def test_keys_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(serve, "note", said.append)
    path = tmp_path / "keys"
    path.write_text("one\n")
    path.chmod(0o644)
    source = serve.KeySource([], path)
    keys = ApiKeys(source.read())
    assert "other users of this machine may read" in said[0]
    path.chmod(0o600)
    path.write_text("two\n")
    keys.replace(source.read())
    assert len(said) == 1
    assert keys.identify({"authorization": "Bearer two"}).key == "two"
    with pytest.raises(Exception, match="valid API key"):
        keys.identify({"authorization": "Bearer one"})


def test_keys_read_again_in_mid_request_give_nobody_the_rights_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, compare = ApiKeys(["plain"]), hmac.compare_digest

    def read_again(*digests: bytes) -> bool:
        keys.replace(["ops admin", "plain"])
        return compare(*digests)

    monkeypatch.setattr(hmac, "compare_digest", read_again)
    assert not keys.identify({"authorization": "Bearer plain"}).administers


def test_no_path_writes_a_line_of_its_own(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(loaded) as server, caplog.at_level(logging.INFO, logger="lade.server"):
        get(server, "/%0a2026-01-01 POST 200 FORGED%1b[31m")
        wait_until(lambda: any("FORGED" in record.getMessage() for record in caplog.records))
    (line,) = [each.getMessage() for each in caplog.records if "FORGED" in each.getMessage()]
    assert line.isprintable()


def test_logs_may_be_json(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("lade.server", logging.INFO, "", 0, "%s\n", ("a",), None)
    line = json.loads(serve._JsonLines().format(record))
    assert (line["level"], line["message"]) == ("info", "a\n")


def test_silent_and_slow_connections_are_closed(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADER_SEC", 0.5)
    with serving(loaded) as server:
        host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
        silent = socket.create_connection((host, int(port)), timeout=10)
        slow = socket.create_connection((host, int(port)), timeout=10)
        used = socket.create_connection((host, int(port)), timeout=10)
        used.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += used.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200")
        used.sendall(b"GET /health HTTP/1.1\r\n")
        begin = time.perf_counter()
        for _ in range(3):
            slow.sendall(b"G")
            time.sleep(0.1)
        for connection in (silent, slow, used):
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
            connection.close()
        assert time.perf_counter() - begin < 5
        with httpx.Client(base_url=server.url.removesuffix("/v1")) as client:
            for _ in range(3):  # what is between two requests may be silent
                assert client.get("/health").status_code == 200
                time.sleep(0.6)


def test_there_are_only_so_many_connections_and_each_address_has_a_share(
    loaded: LoadedModel,
) -> None:
    with serving(loaded, max_connections=8) as server:
        host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")

        def is_open(number: int, held: list[socket.socket]) -> bool:
            """Return whether another connection from an address is not hung up at once."""
            source = (f"127.0.0.{number}", 0)
            made = socket.create_connection((host, int(port)), 10, source_address=source)
            held.append(made)
            with suppress(ConnectionResetError):
                made.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                return made.recv(1) != b""
            return False

        held: list[socket.socket] = []
        assert [is_open(2, held) for _ in range(3)] == [True, True, False]
        assert [is_open(number, held) for number in (3, 3, 4, 4, 5, 5)] == [True] * 6
        assert not is_open(6, held)
        for connection in held:
            connection.close()
        wait_until(lambda: not server._uvicorn.server_state.connections)
        assert get(server, "/health").status_code == 200


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("somewhere", "else", False),
    ],
)
def test_a_network_of_one_subscriber_is_one_client(one: str, other: str, is_same: bool) -> None:
    assert (connections.origin_of((one, 1)) == connections.origin_of((other, 2, 0, 0))) == is_same
    assert connections.origin_of(None) == ""


def test_addresses_that_a_client_writes_get_no_turns_of_their_own(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    def note(peer: Sequence[Any]) -> str:
        found.append(peer[0])
        return connections.origin_of(peer)

    monkeypatch.setattr("lade.server.gate.origin_of", note)
    with serving(loaded) as server:
        for number in range(2):
            forged = {"x-forwarded-for": f"192.0.2.{number}"}
            assert post(server, json=CHAT, headers=forged).status_code == 200
    assert found == ["127.0.0.1"] * 2


def test_a_request_has_one_length_and_no_endless_name(loaded: LoadedModel) -> None:
    with serving(loaded) as server:
        host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: 4\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
            )
            answer = b"".join(iter(lambda: connection.recv(4096), b""))  # to its close
        assert answer.startswith(b"HTTP/1.1 400")
        answers = [post(server, json=CHAT, headers={"x-request-id": "a" * n}) for n in (256, 257)]
    assert [each.status_code for each in answers] == [200, 400]
    assert "x-request-id of at most 256 characters, got 257" in answers[1].text


def test_pages_of_named_sites_may_ask(loaded: LoadedModel) -> None:
    asks = {"access-control-request-method": "POST", "origin": "https://a.example"}
    with serving(loaded) as server:
        assert get(server, "/v1/chat/completions", "OPTIONS", **asks).status_code == 405
        assert "access-control-allow-origin" not in get(server, "/health", **asks).headers
    with serving(loaded, allowed_origins=["https://a.example"]) as server:
        allowed = get(server, "/v1/chat/completions", "OPTIONS", **asks)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        answer = post(server, json=CHAT, headers={"origin": "https://a.example"})
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert answer.json()["choices"][0]["message"]["content"] == plain_text(
            loaded, max_new_tokens=4
        )
        other = asks | {"origin": "https://b.example"}
        assert get(server, "/v1/chat/completions", "OPTIONS", **other).status_code == 400


def test_it_is_served_by_tls(loaded: LoadedModel, tmp_path: Path) -> None:
    authority = trustme.CA()
    made = authority.issue_cert("localhost", "127.0.0.1")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    made.cert_chain_pems[0].write_to_path(certificate)
    made.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    with serving(loaded, certificate=certificate, private_key=key) as server:
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
        answer = httpx.get(f"{server.url}/models", verify=trusted)
        assert answer.status_code == 200
    with pytest.raises(ValueError, match="or neither, got one"):
        ServerOptions(certificate=certificate)
