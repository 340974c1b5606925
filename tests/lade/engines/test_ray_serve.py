"""The example of replicas: its parts here, and all of it where Ray is installed."""

import asyncio
import importlib.util
import json
import random
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

from lade.engines.exchange import Collector
from tests.lade.server.serving import loaded_model, plain_text

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "ray_serve"


def module_of(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a file of the example, as its neighbours do."""
    monkeypatch.syspath_prepend(EXAMPLE)
    for each in ("app", "client", "measure"):
        monkeypatch.delitem(sys.modules, each, raising=False)
    return importlib.import_module(name)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("starlette", reason="an extra: serve, web or ray")
    module: Any = module_of("app", monkeypatch)
    collector = Collector()
    monkeypatch.setattr(module, "RayCollector", lambda name: collector)
    monkeypatch.setattr(module, "load", lambda *args, **options: loaded_model())
    return module


def replica_of(app: Any) -> Any:
    return app.Replica(None, "pools", every_sec=1000.0)


def test_replicas_answer_as_plain_generate_and_learn_from_each_other(app: Any) -> None:
    one = replica_of(app)
    question = app.Question(prompt="What-is-a-pool?", max_tokens=24)
    expected = plain_text(loaded_model(), max_new_tokens=24)
    first = one.answer(question)
    assert (first.text, first.num_tokens, first.num_joined_tokens) == (expected, 24, 0)
    one.__del__()  # as when it is shut down
    two = replica_of(app)
    second = two.answer(question)
    assert second.text == expected
    assert second.num_joined_tokens > 24
    assert second.num_forwards < first.num_forwards
    stats = two.stats()
    assert (stats["has_joined"], stats["num_failures"]) == (True, 0)
    assert stats["pool_tokens"] >= stats["num_joined_tokens"]
    two.__del__()


def test_questions_are_checked(app: Any) -> None:
    for wrong in ({"prompt": ""}, {"prompt": "a" * 20_001}, {"prompt": "a", "max_tokens": 0}):
        with pytest.raises(ValueError, match="validation error"):
            app.Question(**wrong)


def test_a_replica_speaks_http(app: Any) -> None:
    replica = replica_of(app)

    async def ask(method: str, path: str, body: str = "") -> tuple[int, Any]:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body.encode()}

        scope = {"type": "http", "method": method, "path": path, "headers": []}
        response = await replica(app.Request(scope, receive))
        return response.status_code, json.loads(response.body)

    status, answer = asyncio.run(ask("POST", "/answers", '{"prompt": "Why?", "max_tokens": 4}'))
    assert (status, answer["num_tokens"]) == (200, 4)
    status, stats = asyncio.run(ask("GET", "/stats"))
    assert (status, stats["pid"]) == (200, answer["pid"])
    for body in ("", "{}", '{"prompt": 3}', '{"prompt": "Why?", "max_tokens": 1e9}'):
        assert asyncio.run(ask("POST", "/answers", body))[0] == 422
    assert asyncio.run(ask("POST", "/"))[0] == 404
    replica.__del__()


def test_the_application_takes_its_arguments(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def deployment(**options: Any) -> Any:
        asked.update(options)
        return lambda replica: SimpleNamespace(bind=lambda *arguments: (replica, arguments))

    serve = SimpleNamespace(deployment=deployment)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve))
    replica, arguments = app.app({"replicas": "3", "queue": "7", "model": "mine"})
    assert (replica, arguments) == (app.Replica, ("mine", "pools", 5.0))
    assert (asked["num_replicas"], asked["max_queued_requests"]) == (3, 7)
    assert asked["max_ongoing_requests"] == 1
    with pytest.raises(ValueError, match=r"^expected arguments among model.*, got 'replica'"):
        app.app({"replica": "3"})


# --- the client ---------------------------------------------------------------------------------


def asked(
    client: Any, replies: list[Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Counter[str], list[float]]:
    """Ask somebody who replies so; return the answer, all tries, and how long was waited."""
    waits: list[float] = []

    async def sleep(sec: float) -> None:
        waits.append(sec)

    def reply(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content) == {"prompt": "why?", "max_tokens": 5}
        found = replies.pop(0) if len(replies) > 1 else replies[0]
        if isinstance(found, Exception):
            raise found
        return httpx.Response(found, json={"text": "because"})

    async def ask() -> Any:
        transport = httpx.MockTransport(reply)
        async with httpx.AsyncClient(base_url="http://server", transport=transport) as http:
            return await client.ask(http, "why?", 5, rng=random.Random(0), tried=tried)

    tried: Counter[str] = Counter()
    monkeypatch.setattr(client.asyncio, "sleep", sleep)
    return asyncio.run(ask()), tried, waits


def test_a_client_asks_again_until_there_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    client = module_of("client", monkeypatch)
    replies = [503, 500, httpx.ConnectError("gone"), httpx.ReadError("died"), *[503] * 6, 200]
    answer, tried, waits = asked(client, replies, monkeypatch)
    assert answer == {"text": "because"}
    assert tried == {"503": 7, "500": 1, "ConnectError": 1, "ReadError": 1, "200": 1}
    assert len(waits) == 10
    assert waits[0] < 0.16
    assert all(wait < 4.6 for wait in waits)
    assert waits[-1] > 1.4


def test_a_client_does_not_repeat_what_is_its_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    client = module_of("client", monkeypatch)
    with pytest.raises(httpx.HTTPStatusError, match="422"):
        asked(client, [422], monkeypatch)


def test_a_client_gives_up_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    client = module_of("client", monkeypatch)
    with pytest.raises(TimeoutError, match=r"expected an answer in 100 tries, got \{'503': 100\}"):
        asked(client, [503], monkeypatch)


# --- the measurement ----------------------------------------------------------------------------


def answer_of(pid: int, at: float, joined: int = 0, is_right: bool = True) -> dict[str, Any]:
    counts = {"num_tokens": 9, "num_forwards": 4, "num_joined_tokens": joined}
    return {**counts, "pid": pid, "at": at, "sec": 0.5, "is_right": is_right, "text": ""}


def test_a_report_tells_the_replica_that_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("starlette", reason="an extra: serve, web or ray")
    measure: Any = module_of("measure", monkeypatch)
    load = measure.Load(Namespace(requests=5, seed=0, kill_after=2), ["a", "b"], ["x", "y"])
    assert sorted(load.asked) == [0, 0, 0, 1, 1]
    load.answers = [answer_of(1, 1.0), answer_of(2, 2.0), answer_of(2, 3.0, is_right=False)]
    load.answers += [answer_of(3, 9.0, joined=77)]
    load.killed = {"pid": 1, "at": 2.0}
    load.lost = ["no answer"]
    report = load.report(sec=8.0)
    assert [report[f"num_{what}"] for what in ("requests", "answered", "right", "lost")] == [
        *(5, 4, 3, 1)
    ]
    assert report["killed"] == {"replica": 0, "after_answers": 2, "replaced_after_sec": 7.0}
    assert [each["num_answers"] for each in report["replicas"]] == [1, 2, 1]
    assert [each["num_joined_tokens"] for each in report["replicas"]] == [0, 0, 77]
    assert report["replicas"][0]["tokens_per_forward"] == 2.0


@pytest.mark.exhaustive
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: it is no part of the environment for development",
)
def test_two_replicas_lose_nothing_where_one_is_killed(tmp_path: Path) -> None:
    loaded = loaded_model()
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"turns": [f"Question-{number}"]}) for number in range(10)]
    prompts.write_text("\n".join(lines))
    counts = ("--requests", "60", "--kill-after", "20", "--every", "0.5", "--clients", "8")
    files = ("--model", tmp_path / "model", "--prompts", prompts, "--out", tmp_path / "out.json")
    program = [sys.executable, EXAMPLE / "measure.py", *counts, *files]
    subprocess.run(list(map(str, program)), check=True, cwd=ROOT, timeout=170)
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["num_lost"] == 0
    assert report["num_right"] == report["num_requests"] >= 60
    assert len(report["replicas"]) == 3
    assert report["replicas"][2]["num_joined_tokens"] > 0
    assert report["collector"]["num_refused"] == 0
