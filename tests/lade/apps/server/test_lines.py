"""Clients that leave, wait, flood or come when the server stops do not disturb others."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from lade.models import LoadedModel
from tests.lade.apps.server.client import (
    QUESTION,
    RUNNING,
    WAITING,
    Client,
    Json,
    connected,
    error_of,
    sent,
    text_of,
)
from tests.lade.apps.server.serving import (
    Paced,
    plain_text,
    serving,
    wait_until,
)

SHORT: Json = {"messages": QUESTION, "max_tokens": 4, "temperature": 0}
KEYS = ["boss admin", "one", "two"]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(20) as threads:
        yield threads


def is_listening(client: Client) -> bool:
    with suppress(ConnectionRefusedError), connected(client):
        return True
    return False


@pytest.mark.parametrize("more", [{}, {"stream": True, "n": 4}], ids=str)
def test_nothing_more_is_computed_for_a_client_that_has_left(
    loaded: LoadedModel, more: Json
) -> None:
    with serving(loaded) as client, Paced() as pace:
        connection = sent(client, {"max_tokens": 300, **more})
        pace.let(3)
        wait_until(lambda: pace.num_tokens == 3)
        connection.close()
        wait_until(lambda: client.metric("lade:requests_total", code="499") == 1)
        pace.free()
        wait_until(lambda: client.metric(RUNNING) == 0)
        assert pace.num_tokens < 20
        assert client.text() == plain_text(loaded)


@pytest.mark.parametrize("options", [{"max_batch_size": 1}, {"max_batch_tokens": 100}], ids=str)
def test_who_leaves_while_waiting_is_never_computed_for(
    loaded: LoadedModel, threads: ThreadPoolExecutor, options: Json
) -> None:
    """Whether it waits for its turn or for room in the memory."""
    with serving(loaded, **options) as client, Paced() as pace:
        first = threads.submit(client.post, json=SHORT)
        wait_until(lambda: pace.num_calls == 1)
        connection = sent(client, {"max_tokens": 300})
        wait_until(lambda: client.metric(WAITING) + client.metric(RUNNING) == 2)
        connection.close()
        wait_until(lambda: client.metric("lade:requests_total", code="499") == 1)
        wait_until(lambda: client.metric(WAITING) + client.metric(RUNNING) == 1)
        pace.free()
        assert first.result().status_code == 200
        assert pace.num_calls == 1


def test_answers_come_in_order_of_arrival_and_more_are_sent_away(
    loaded: LoadedModel, threads: ThreadPoolExecutor
) -> None:
    with serving(loaded, max_queue=3, max_batch_size=1) as client, Paced() as pace:
        answers = []
        for number in range(4):
            answers.append(threads.submit(client.text, max_tokens=3))
            wait_until(lambda: client.metric(RUNNING) == 1)
            wait_until(lambda n=number: client.metric(WAITING) == n)  # type: ignore[misc]
        refused = client.post(json=SHORT)
        assert error_of(refused, 429)["code"] == "queue_full"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        expected = plain_text(loaded, max_new_tokens=3)
        for number, answer in enumerate(answers):
            pace.let(3)  # which is one answer
            assert answer.result(60) == expected
            assert not any(each.done() for each in answers[number + 1 :])


def test_a_key_that_floods_turns_nobody_else_away(
    loaded: LoadedModel, threads: ThreadPoolExecutor
) -> None:
    options: dict[str, Any] = {"api_keys": KEYS, "max_queue": 5, "max_batch_size": 1}
    with serving(loaded, **options) as client, Paced() as pace:
        flood = [threads.submit(client.post, key="one", json=SHORT) for _ in range(12)]
        wait_until(lambda: sum(each.done() for each in flood) == 6)
        assert {each.result().status_code for each in flood if each.done()} == {429}
        other = threads.submit(client.post, key="two", json=SHORT)
        wait_until(lambda: client.metric(WAITING) == 6)
        pace.free()
        wait_until(other.done)
        # It came last and was served second.
        assert other.result().status_code == 200
        assert sum(each.done() for each in flood) < 12
        assert sorted(each.result().status_code for each in flood) == [200] * 6 + [429] * 6


def test_many_run_at_once_and_one_key_leaves_a_place_to_others(
    loaded: LoadedModel, threads: ThreadPoolExecutor
) -> None:
    with serving(loaded, api_keys=KEYS, max_batch_size=4) as client, Paced() as pace:
        body = {**SHORT, "max_tokens": 300}
        many = [threads.submit(client.post, key="one", json=body) for _ in range(6)]
        pace.let_until(lambda: (client.metric(RUNNING), client.metric(WAITING)) == (3, 3))
        other = threads.submit(client.post, key="two", json=SHORT)
        pace.let_until(lambda: client.metric(RUNNING) == 4)
        pace.free()
        assert {each.result().status_code for each in (*many, other)} == {200}


def test_bodies_of_those_who_wait_are_bounded(
    loaded: LoadedModel, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lade.apps.server.routes._MAX_BODIES_OF_KEY", 3)
    options: dict[str, Any] = {"api_keys": KEYS, "max_body_bytes": 1000, "max_batch_size": 1}
    with serving(loaded, **options) as client, Paced() as pace:
        long = {**SHORT, "stop": ["x" * 250] * 3}
        first = threads.submit(client.post, key="one", json=SHORT)
        wait_until(lambda: pace.num_calls == 1)  # what runs needs its body no more
        waiting = []
        for number in range(1, 4):
            waiting.append(threads.submit(client.post, key="one", json=long))
            wait_until(lambda n=number: client.metric(WAITING) == n)  # type: ignore[misc]
        refused = client.post(key="one", json=long)
        assert error_of(refused, 429)["code"] == "queue_full"
        other = threads.submit(client.post, key="two", json=SHORT)
        pace.free()
        assert {each.result().status_code for each in (first, *waiting, other)} == {200}
        assert client.post(key="one", json=long).status_code == 200


def test_addresses_that_a_client_writes_get_no_turns_of_their_own(
    loaded: LoadedModel, threads: ThreadPoolExecutor
) -> None:
    with serving(loaded, max_queue=1, max_batch_size=1) as client, Paced() as pace:
        forged = [{"x-forwarded-for": f"192.0.2.{number}"} for number in range(4)]
        asked = [threads.submit(client.post, json=SHORT, headers=each) for each in forged]
        wait_until(lambda: sum(each.done() for each in asked) == 2)
        pace.free()
        assert sorted(each.result().status_code for each in asked) == [200, 200, 429, 429]


def test_what_takes_too_long_ends_with_an_error(loaded: LoadedModel) -> None:
    with serving(loaded, timeout_sec=0.4) as client:
        with Paced() as pace:
            pace.let(2)
            whole = client.post(json={**SHORT, "max_tokens": 300})
            assert error_of(whole, 504)["code"] == "timeout"
            pace.free()
        with Paced() as pace:
            threading.Timer(0.6, pace.free).start()
            text = client.post(json={**SHORT, "max_tokens": 300, "stream": True}).text
            assert json.loads(text.split("data: ")[-1])["error"]["code"] == "timeout"
        with sent(client, {}, promised=9) as half:
            answer = b"".join(iter(lambda: half.recv(4096), b""))  # to its close
        assert answer.startswith(b"HTTP/1.1 504")
        assert client.text(max_tokens=4) == plain_text(loaded, max_new_tokens=4)


def test_an_answer_that_fails_is_told_and_the_next_is_right(loaded: LoadedModel) -> None:
    def fail(**_: Any) -> None:
        raise MemoryError("secret")

    with serving(loaded, max_batch_size=1) as client:
        loaded.model.generate = fail
        try:
            error = error_of(client.post(json=SHORT), 500)
            text = client.post(json={**SHORT, "stream": True}).text
        finally:
            del loaded.model.generate
        assert (error["code"], error["type"]) == ("internal_error", "server_error")
        assert json.loads(text.split("data: ")[-1])["error"] == error
        assert "secret" not in text + str(error)
        assert client.text() == plain_text(loaded)


def test_a_stop_finishes_what_runs_and_turns_away_the_rest(
    loaded: LoadedModel, threads: ThreadPoolExecutor
) -> None:
    with serving(loaded, max_batch_size=1) as client, Paced() as pace:
        running = threads.submit(client.stream, max_tokens=20)
        wait_until(lambda: pace.num_calls == 1)
        waiting = threads.submit(client.post, json=SHORT)
        wait_until(lambda: client.metric(WAITING) == 1)
        closing = threads.submit(client.server.close)
        assert error_of(waiting.result(), 503)["code"] == "shutting_down"
        wait_until(lambda: not is_listening(client))
        pace.free()
        assert text_of(running.result()) == plain_text(loaded, max_new_tokens=20)
        closing.result()


def test_a_stop_ends_what_runs_for_too_long(
    loaded: LoadedModel, threads: ThreadPoolExecutor
) -> None:
    with serving(loaded, grace_sec=0.1) as client, Paced() as pace:
        whole = threads.submit(client.post, json={**SHORT, "max_tokens": 300})
        body = {**SHORT, "max_tokens": 300, "stream": True}
        streamed = threads.submit(client.post, json=body)
        pace.let_until(lambda: client.metric(RUNNING) == 2)
        closing = threads.submit(client.server.close)
        time.sleep(0.3)
        pace.free()
        assert error_of(whole.result(), 503)["code"] == "shutting_down"
        error = json.loads(streamed.result().text.split("data: ")[-1])["error"]
        assert error["code"] == "shutting_down"
        closing.result()
        assert pace.num_tokens < 40
