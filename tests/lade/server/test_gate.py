"""Clients that leave, wait, read slowly or come when the server stops do not disturb others."""

import json
import signal
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from lade.models.loading import LoadedModel
from lade.server import inference
from lade.server.app import Server
from tests.lade.server.serving import (
    NAME,
    QUESTION,
    Paced,
    asked,
    client_of,
    loaded_model,
    metric,
    plain_text,
    post,
    serving,
    text_of,
    wait_until,
)

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_model()


def send(
    server: Server,
    body: Mapping[str, object],
    receive_bytes: int | None = None,
    promised: int = 0,
) -> socket.socket:
    """Ask without reading the answer; `promised` bytes more never come."""
    host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
    data = json.dumps({"model": NAME, "messages": QUESTION, "temperature": 0, **body}).encode()
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((host, int(port)))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (len(data) + promised, data)
    )
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_more_is_computed_for_a_client_that_has_left(
    loaded: LoadedModel, stream: bool
) -> None:
    with serving(loaded) as server, Paced(loaded) as pace:
        connection = send(server, {"stream": stream, "max_tokens": 300})
        pace.let(3)
        wait_until(lambda: pace.num_tokens == 3)
        connection.close()
        wait_until(lambda: metric(server, "lade:requests_total", code="499") == 1)
        pace.free()
        wait_until(lambda: metric(server, RUNNING) == 0)
        assert pace.num_tokens < 20
        with client_of(server) as client:
            assert asked(client).choices[0].message.content == plain_text(loaded)


def test_a_client_that_leaves_the_line_is_never_computed_for(loaded: LoadedModel) -> None:
    with (
        serving(loaded, max_batch_size=1) as server,
        Paced(loaded) as pace,
        ThreadPoolExecutor(2) as threads,
    ):
        first = threads.submit(post, server, json={"messages": QUESTION, "max_tokens": 4})
        wait_until(lambda: pace.num_calls == 1)
        connection = send(server, {"max_tokens": 300})
        wait_until(lambda: metric(server, WAITING) == 1)
        connection.close()
        wait_until(lambda: metric(server, WAITING) == 0)
        pace.free()
        assert first.result().status_code == 200
        assert pace.num_calls == 1
        assert metric(server, "lade:requests_total", code="499") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_waits_for_room_leaves_its_place(
    loaded: LoadedModel, stream: bool
) -> None:
    with (
        serving(loaded, max_batch_tokens=100) as server,
        Paced(loaded) as pace,
        ThreadPoolExecutor(1) as threads,
    ):
        first = threads.submit(post, server, json={"messages": QUESTION, "max_tokens": 4})
        wait_until(lambda: pace.num_calls == 1)
        connection = send(server, {"max_tokens": 300, "stream": stream})
        wait_until(lambda: metric(server, RUNNING) == 2)
        connection.close()
        wait_until(lambda: metric(server, RUNNING) == 1)  # while there is no room yet
        pace.free()
        assert first.result().status_code == 200
        assert pace.num_calls == 1


def test_requests_beyond_the_line_are_sent_away(loaded: LoadedModel) -> None:
    with (
        serving(loaded, max_queue=2, max_batch_size=1) as server,
        Paced(loaded) as pace,
        ThreadPoolExecutor(3) as threads,
        client_of(server) as client,
    ):
        answers = []
        for number in range(3):
            answers.append(threads.submit(asked, client))
            wait_until(lambda: metric(server, RUNNING) == 1)
            wait_until(lambda number=number: metric(server, WAITING) == number)  # type: ignore[misc]
        with pytest.raises(openai.RateLimitError) as raised:
            asked(client)
        assert raised.value.code == "queue_full"
        assert 1 <= int(raised.value.response.headers["retry-after"]) <= 60
        pace.free()
        for answer in answers:
            assert answer.result().choices[0].message.content == plain_text(loaded)


def test_answers_come_in_order_of_arrival(loaded: LoadedModel) -> None:
    with (
        serving(loaded, max_batch_size=1) as server,
        Paced(loaded) as pace,
        ThreadPoolExecutor(4) as threads,
        client_of(server) as client,
    ):
        order: list[int] = []

        def ask(number: int) -> None:
            for _ in asked(client, stream=True, max_tokens=3):
                if number not in order:
                    order.append(number)

        for number in range(4):
            threads.submit(ask, number)
            wait_until(lambda: metric(server, RUNNING) == 1)
            wait_until(lambda number=number: metric(server, WAITING) == number)  # type: ignore[misc]
        pace.free()
        wait_until(lambda: len(order) == 4)
        assert order == [0, 1, 2, 3]


def test_a_slow_reader_keeps_nobody_waiting(loaded: LoadedModel) -> None:
    with serving(loaded) as server, client_of(server) as client:
        # More than fits into the buffers of a connection, which then blocks.
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = {"stream": True, "max_tokens": 200, "logprobs": True, "top_logprobs": 20}
        connection = send(server, body, receive_bytes=4096)
        assert asked(client).choices[0].message.content == plain_text(loaded)
        wait_until(lambda: metric(server, "lade:requests_total", code="200") >= 1)
        assert metric(server, "vllm:generation_tokens_total") == 40
        connection.close()
        wait_until(lambda: metric(server, "lade:requests_total", code="499") == 1)
        # Both were decoded together: the slow one was ended where the other had long been done.
        assert 40 < metric(server, "vllm:generation_tokens_total") <= 240


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_take_too_long_are_ended(loaded: LoadedModel, stream: bool) -> None:
    with serving(loaded, timeout_sec=0.5) as server, Paced(loaded) as pace:
        pace.let(2)
        body = {"messages": QUESTION, "stream": stream, "temperature": 0}
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(post, server, json=body)
            wait_until(lambda: pace.num_tokens == 2)
            threading.Event().wait(0.6)
            pace.free()
            found = answer.result()
        if stream:
            assert found.status_code == 200
            last = found.text.strip().split("\n\n")[-1]
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            assert found.status_code == 504
            error = found.json()["error"]
        assert (error["code"], error["type"]) == ("timeout", "server_error")
        assert pace.num_tokens < 20


def test_time_in_the_line_counts(loaded: LoadedModel) -> None:
    with (
        serving(loaded, timeout_sec=0.5) as server,
        Paced(loaded) as pace,
        ThreadPoolExecutor(2) as threads,
    ):
        body = {"messages": QUESTION, "max_tokens": 3}
        answers = [threads.submit(post, server, json=body) for _ in range(2)]
        wait_until(lambda: metric(server, "lade:requests_total", code="504") >= 1)
        pace.free()
        assert [answer.result().status_code for answer in answers] == [504, 504]
        assert pace.num_calls == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_fails_says_so_and_no_more(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def fail(*_: object) -> list[object]:
        raise RuntimeError('a secret with "quotes"')

    with serving(loaded) as server, client_of(server) as client:
        monkeypatch.setattr(inference, "_grammar_of", fail)
        body = {"messages": QUESTION, "stream": stream}
        answer = post(server, json=body)
        assert answer.status_code == (200 if stream else 500)
        assert "secret" not in answer.text
        assert '"code": "internal_error"' in answer.text.replace('":"', '": "')
        with pytest.raises(openai.APIError):
            text_of(asked(client, stream=stream))
        found = post(server, "/responses", json={"input": "a", "stream": stream})
        assert "secret" not in found.text
        monkeypatch.undo()
        assert asked(client).choices[0].message.content == plain_text(loaded)


# --- the end --------------------------------------------------------------------------------


def test_a_server_that_stops_finishes_what_is_under_way(loaded: LoadedModel) -> None:
    with (
        ThreadPoolExecutor(3) as threads,
        serving(loaded, grace_sec=60, max_batch_size=1) as server,
    ):
        with Paced(loaded) as pace:
            body = {"messages": QUESTION, "max_tokens": 20, "temperature": 0}
            running = threads.submit(post, server, json=body)
            wait_until(lambda: pace.num_calls == 1)
            waiting = threads.submit(post, server, json=body)
            wait_until(lambda: metric(server, WAITING) == 1)
            closing = threads.submit(server.close)
            assert waiting.result().status_code == 503
            assert waiting.result().json()["error"]["code"] == "shutting_down"
            ready = httpx.get(server.url.removesuffix("/v1") + "/ready")
            assert ready.status_code == 503
            pace.free()
            closing.result()
        text = running.result().json()["choices"][0]["message"]["content"]
        assert text == plain_text(loaded, max_new_tokens=20)
        with pytest.raises(httpx.ConnectError):
            post(server, json=body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops_ends_what_takes_too_long(loaded: LoadedModel, stream: bool) -> None:
    with ThreadPoolExecutor(2) as threads, serving(loaded, grace_sec=0) as server:
        with Paced(loaded) as pace:
            body = {"messages": QUESTION, "max_tokens": 300, "stream": stream}
            running = threads.submit(post, server, json=body)
            pace.let(2)
            wait_until(lambda: pace.num_tokens == 2)
            closing = threads.submit(server.close)
            threading.Event().wait(0.3)
            pace.free()
            closing.result()
        assert "shutting_down" in running.result().text
        assert running.result().status_code == (200 if stream else 503)
        assert pace.num_tokens < 20


def test_a_second_interrupt_waits_for_no_answer(loaded: LoadedModel) -> None:
    with ThreadPoolExecutor(2) as threads, serving(loaded, grace_sec=60) as server:
        with Paced(loaded) as pace:
            running = threads.submit(post, server, json={"messages": QUESTION, "max_tokens": 300})
            wait_until(lambda: pace.num_calls == 1)
            closing = threads.submit(server.close)
            wait_until(lambda: server._uvicorn.should_exit)
            server._uvicorn.handle_exit(signal.SIGINT, None)
            with pytest.raises(httpx.RemoteProtocolError):
                running.result(30)
        closing.result()
        assert pace.num_tokens < 20


def test_who_never_reads_is_hung_up(loaded: LoadedModel) -> None:
    with serving(loaded, timeout_sec=0.5) as server:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = {"stream": True, "max_tokens": 300, "logprobs": True, "top_logprobs": 20}
        with send(server, body, receive_bytes=4096):
            connections = server._uvicorn.server_state.connections
            wait_until(lambda: bool(connections))
            wait_until(lambda: not connections, 30)


def test_a_body_outlasts_no_time(loaded: LoadedModel) -> None:
    with serving(loaded, timeout_sec=0.3) as server, send(server, {}, promised=9) as connection:
        connection.settimeout(10)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))  # to its close
    assert answer.startswith(b"HTTP/1.1 504")
