"""Requests made to take much: each is refused, or takes little, and others are served meanwhile."""

import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from transformers.cli.serving.utils import BaseHandler

from lade.batcher import Batcher
from lade.models import load
from lade.models.loading import LoadedModel
from lade.server import requests, upstream
from lade.server.app import Server
from lade.server.compiling import CompilerProcess
from lade.server.errors import ApiError
from lade.server.exchange import Exchange
from lade.server.grammars import Grammars
from lade.server.limits import RequestLimits
from lade.server.options import ServerOptions
from tests.lade.server.hostile import BODIES, schema_of
from tests.lade.server.serving import (
    QUESTION,
    Paced,
    asked,
    client_of,
    loaded_model,
    metric,
    plain_text,
    post,
    serving,
    wait_until,
)

CHAT: dict[str, Any] = {"messages": QUESTION, "max_tokens": 4, "temperature": 0}
MOST_CPU_SEC = 1.0


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_model(eos_token_id=93)


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Server]:
    with serving(loaded, api_keys=["one", "two"]) as server:
        assert send(server, **schema_of({"type": "null"})).status_code == 200  # begins the compiler
        yield server


def send(server: Server, key: str = "one", **body: Any) -> httpx.Response:
    return post(server, json={**CHAT, **body}, headers={"authorization": f"Bearer {key}"})


@pytest.mark.xdist_group("attacks")  # whose server takes seconds to begin
@pytest.mark.parametrize("name", BODIES)
def test_what_would_take_long_is_refused_within_a_second(server: Server, name: str) -> None:
    """Of processor time, that of threads and of the compiler's children bounded as well."""
    body = BODIES[name]()
    json.dumps(body)
    taken = []
    for _ in range(3):  # two threads on one core take each other's time
        begin = time.process_time()
        answer = send(server, **body)
        taken.append(time.process_time() - begin)
        assert answer.status_code == 400, answer.text[:200]
        if taken[-1] < MOST_CPU_SEC + 0.3:  # what the test itself takes to send it
            break
    assert min(taken) < MOST_CPU_SEC + 0.3
    assert len(answer.text) < 1000


def test_stops_of_any_length_take_no_time(server: Server, loaded: LoadedModel) -> None:
    text = plain_text(loaded, max_new_tokens=40)
    stops = [text[20:23], *("xy" * 100 + str(number) for number in range(3))]
    begin = time.process_time()
    answer = send(server, max_tokens=40, stop=stops)
    assert time.process_time() - begin < MOST_CPU_SEC
    choice = answer.json()["choices"][0]
    assert choice["message"]["content"] == text[: text.index(stops[0])]
    assert choice["finish_reason"] == "stop"


@pytest.mark.exhaustive
def test_while_one_key_sends_what_takes_long_another_is_served(
    server: Server, loaded: LoadedModel
) -> None:
    expected = plain_text(loaded, max_new_tokens=4)
    begin = time.perf_counter()
    assert send(server, "two").json()["choices"][0]["message"]["content"] == expected
    alone = time.perf_counter() - begin
    names = ["900 patterns", "a prompt of 4 MB", "a million messages"]
    with ThreadPoolExecutor(6) as threads:
        sent = [threads.submit(send, server, **BODIES[name]()) for name in names * 2]
        slowest = slowest_health = 0.0
        while not all(each.done() for each in sent):
            begin = time.perf_counter()
            assert send(server, "two").json()["choices"][0]["message"]["content"] == expected
            slowest = max(slowest, time.perf_counter() - begin)
            begin = time.perf_counter()
            assert httpx.get(server.url.removesuffix("/v1") + "/health").status_code == 200
            slowest_health = max(slowest_health, time.perf_counter() - begin)
    assert {each.result().status_code for each in sent} <= {400, 429}
    # It was minutes; these threads share two cores with the client, and other tests.
    assert slowest < alone + 15
    assert slowest_health < 5


def test_schemas_of_others_are_compiled_anew(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the time of an answer would tell which schemas others use."""
    compiled: list[str] = []
    compile_schema = CompilerProcess.compile

    def note(self: CompilerProcess, schema: str) -> str:
        compiled.append(schema)
        return compile_schema(self, schema)

    monkeypatch.setattr(CompilerProcess, "compile", note)
    body = schema_of({"type": "integer"})
    for key, expected in (("one", 1), ("one", 1), ("two", 2), ("two", 2), ("one", 2)):
        assert send(server, key, **body).status_code == 200
        assert len(compiled) == expected


def test_many_who_ask_for_one_schema_at_once_wait_for_one_compilation(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, go_on = list[str](), threading.Event()
    compile_schema = CompilerProcess.compile

    def wait(self: CompilerProcess, schema: str) -> str:
        compiled.append(schema)
        assert go_on.wait(60)
        return compile_schema(self, schema)

    monkeypatch.setattr(CompilerProcess, "compile", wait)
    with (
        serving(loaded, max_queue=1) as server,
        Paced(loaded) as pace,
        ThreadPoolExecutor(16) as threads,
    ):
        body = {**CHAT, **schema_of({"type": "integer"})}
        sent = [threads.submit(post, server, json=body) for _ in range(16)]
        wait_until(lambda: server._uvicorn._gate._compilers._line.num_waiting == 15)
        go_on.set()
        wait_until(lambda: metric(server, "vllm:num_requests_running") == 15)
        pace.free()
        assert {each.result().status_code for each in sent} == {200}
    assert len(compiled) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 500},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}},
        {"anyOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(200)]},
    ],
    ids=["500 characters", "300 properties", "200 schemas"],
)
def test_schemas_of_users_are_compiled(schema: dict[str, Any]) -> None:
    grammars = Grammars(load())
    try:
        assert grammars.compiled("", grammars.checked(schema)) is not None
    finally:
        grammars.close()


@pytest.mark.exhaustive
def test_a_compiler_that_was_killed_is_begun_anew(server: Server) -> None:
    assert send(server, **schema_of({"type": "boolean"})).status_code == 200
    (process,) = [each for each in _compilers(server) if each is not None and each.poll() is None]
    process.kill()
    process.wait()
    assert (
        send(server, **schema_of({"enum": ["a"]}))
        .json()["choices"][0]["message"]["content"]
        .startswith('"a')
    )


def _compilers(server: Server) -> list[Any]:
    grammars = server._uvicorn._gate._reader.grammars
    return [grammars._process and grammars._process._process]


def test_a_key_whose_answers_fill_the_memory_delays_another_by_what_is_under_way(
    loaded: LoadedModel,
) -> None:
    with (
        serving(loaded, api_keys=["one", "two"], max_batch_tokens=100) as server,
        Paced(loaded) as pace,
        ThreadPoolExecutor(5) as threads,
    ):
        waiting = server._manager._batcher._room._waiting
        sent = [threads.submit(send, server, max_tokens=300) for _ in range(4)]
        wait_until(lambda: len(waiting) == 3)
        other = threads.submit(send, server, "two")
        wait_until(lambda: len(waiting) == 4)
        pace.free()
        wait_until(other.done)
        assert sum(each.done() for each in sent) < 3
        assert {each.result().status_code for each in (*sent, other)} == {200}


def test_a_key_that_floods_turns_nobody_else_away(loaded: LoadedModel) -> None:
    with (
        serving(loaded, api_keys=["one", "two"], max_queue=5, max_batch_size=1) as server,
        Paced(loaded) as pace,
        ThreadPoolExecutor(20) as threads,
    ):
        sent = [threads.submit(send, server) for _ in range(12)]
        wait_until(lambda: sum(each.done() for each in sent) == 6)
        assert {each.result().status_code for each in sent if each.done()} == {429}
        other = threads.submit(send, server, "two")
        time.sleep(0.2)
        assert not other.done()
        pace.free()
        wait_until(other.done)
        # It came last and was served second.
        assert other.result().status_code == 200
        assert sum(each.done() for each in sent) < 12
        statuses = sorted(each.result().status_code for each in sent)
        assert statuses == [200] * 6 + [429] * 6


def test_bodies_that_nobody_finishes_are_bounded(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lade.server.gate._MAX_BODIES_OF_KEY", 3)
    go_on = threading.Event()

    def unfinished() -> Iterator[bytes]:
        yield b'{"messages": "' + b"a" * 900
        go_on.wait(60)
        yield b'"}'

    with (
        serving(loaded, api_keys=["one", "two"], max_body_bytes=1000) as server,
        ThreadPoolExecutor(8) as threads,
    ):
        headers = {"authorization": "Bearer one"}
        sent = [threads.submit(post, server, content=unfinished(), headers=headers) for _ in "1234"]
        wait_until(lambda: metric(server, "lade:requests_total", code="429") == 1)
        assert send(server, "two").status_code == 200
        go_on.set()
        assert sorted(each.result().status_code for each in sent) == [400, 400, 400, 429]


def test_silent_bodies_are_ended(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lade.server.gate._IDLE_SEC", 0.3)
    go_on = threading.Event()

    def silent() -> Iterator[bytes]:
        yield b"{"
        go_on.wait(60)
        yield b"}"

    with serving(loaded) as server, ThreadPoolExecutor(1) as threads:
        sent = threads.submit(post, server, content=silent())
        wait_until(lambda: metric(server, "lade:requests_total", code="408") == 1)
        go_on.set()
        assert sent.result().status_code == 408
        with client_of(server) as client:
            assert asked(client).choices


def test_bodies_of_those_who_wait_are_bounded(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lade.server.gate._MAX_BODIES_OF_KEY", 3)
    with (
        serving(loaded, api_keys=["one", "two"], max_body_bytes=1000, max_batch_size=1) as server,
        Paced(loaded) as pace,
        ThreadPoolExecutor(6) as threads,
    ):
        sent = [threads.submit(send, server)]
        wait_until(lambda: pace.num_calls == 1)  # what runs needs its body no more
        for number in range(1, 4):
            sent.append(threads.submit(send, server, stop=["x" * 250] * 3))
            wait_until(lambda n=number: metric(server, "vllm:num_requests_waiting") == n)  # type: ignore[misc]
        assert send(server, stop=["x" * 250] * 3).json()["error"]["code"] == "queue_full"
        other = threads.submit(send, server, "two")
        pace.free()
        assert {each.result().status_code for each in (*sent, other)} == {200}
        assert send(server, stop=["x" * 250] * 3).status_code == 200


def test_one_key_has_a_share_of_what_is_open(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lade.server.gate._MAX_OPEN_OF_KEY", 2)
    with (
        serving(loaded, api_keys=["one", "two"]) as server,
        Paced(loaded) as pace,
        ThreadPoolExecutor(3) as threads,
    ):
        sent = [threads.submit(send, server) for _ in range(2)]
        wait_until(lambda: metric(server, "vllm:num_requests_running") == 2)
        assert send(server).json()["error"]["code"] == "queue_full"
        sent.append(threads.submit(send, server, "two"))
        wait_until(lambda: metric(server, "vllm:num_requests_running") == 3)
        pace.free()
        assert {each.result().status_code for each in sent} == {200}
        assert send(server).status_code == 200


def test_many_short_texts_are_refused_for_their_first(loaded: LoadedModel) -> None:
    made: list[str] = []

    class Backend:
        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            made.extend(texts)
            return loaded.tokenizer._tokenizer.encode_batch_fast(texts, **options)

    limits = RequestLimits(loaded.model, ServerOptions(max_prompt_tokens=500))
    messages = [{"role": "user", "content": "a-short-text"}] * 16_000
    with pytest.raises(ApiError, match="at most 500 tokens"):
        limits.check_texts(SimpleNamespace(_tokenizer=Backend()), messages)
    assert sum(map(len, made)) < 100_000
    limits.check_texts(loaded.tokenizer, messages[:30])


def test_nothing_long_is_looked_at_in_the_event_loop(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[tuple[str, int]] = []  # by which thread, and how much

    def note(
        owner: Any, name: str, size: Callable[..., int], kind: Any = lambda each: each
    ) -> None:
        function = getattr(owner, name)

        def noting(*args: Any, **options: Any) -> Any:
            looked.append((threading.current_thread().name, size(*args)))
            return function(*args, **options)

        monkeypatch.setattr(owner, name, kind(noting))

    note(requests, "from_json", len)
    note(Grammars, "pieces", lambda _: 10_000)
    name = "get_processor_inputs_from_messages"
    note(BaseHandler, name, lambda messages, _: len(json.dumps(messages)), staticmethod)
    with serving(loaded) as server:
        long = [{"role": "user", "content": "What-is-" * 20}]
        answer = post(server, json={**CHAT, "messages": long, "logprobs": True})
        assert answer.json()["choices"][0]["logprobs"]["content"]
    assert len(looked) == 4
    assert {name.rsplit("_")[0] for name, size in looked if size > 100} == {"lade-prepares"}


@pytest.mark.parametrize("broken", [(Batcher, "run"), (upstream, "DirectStreamer")])
def test_a_place_of_an_answer_that_never_begins_is_given_back(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, broken: tuple[Any, str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    with serving(loaded, max_batch_size=1) as server:
        with monkeypatch.context() as patched:
            patched.setattr(*broken, fail)
            assert "internal_error" in post(server, json={**CHAT, "stream": True}).text
        wait_until(lambda: metric(server, "vllm:num_requests_running") == 0)
        assert post(server, json=CHAT).status_code == 200


@pytest.mark.parametrize("name", ["tools of 4 MB", "many messages", "many biases"])
def test_nothing_is_kept_of_a_request_that_was_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Megabytes in cycles would wait for a collection that comes late."""
    made: list[weakref.ref[Exchange]] = []

    def make(*args: Any, **options: Any) -> Exchange:
        exchange = Exchange(*args, **options)
        made.append(weakref.ref(exchange))
        return exchange

    monkeypatch.setattr("lade.server.gate.Exchange", make)
    gc.collect()
    gc.disable()
    try:
        assert send(server, **BODIES[name]()).status_code == 400
        wait_until(lambda: made[0]() is None, 10)
    finally:
        gc.enable()
