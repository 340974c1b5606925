"""`python -m benchmarks serve`, against servers whose answers are written down."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.prompts import choose
from benchmarks.serving import Reply, Round, as_json, ask_all
from lade import LadeError


def chunk(**content: Any) -> str:
    return f"data: {json.dumps(content)}\n\n"


def delta(text: str | None) -> str:
    return chunk(choices=[{"index": 0, "delta": {} if text is None else {"content": text}}])


USAGE = chunk(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 4})


class Server(ThreadingHTTPServer):
    """Answers each request with the same stream, and keeps what it was asked."""

    def __init__(self, stream: str, status: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.stream, self.status = stream, status
        self.asked: list[dict[str, Any]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        size = int(self.headers["Content-Length"])
        self.server.asked.append(json.loads(self.rfile.read(size)))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.stream.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(*parts: str, status: int = 200) -> Iterator[Server]:
    with Server("".join(parts), status) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def prompts_of(folder: Path, *turns: list[str]) -> Any:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps({'turns': each})}\n" for each in turns))
    return choose(path, None, None).prompts


def test_every_server_gets_all_turns_with_its_own_answers(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, ["Hi", "And?"], ["Ho"])
    with (
        serving(delta(None), delta("A"), delta("b"), USAGE, "data: [DONE]\n\n") as one,
        serving(delta("C"), USAGE) as two,
    ):
        rounds = [*ask_all({"one": one.address, "two": f"{two.address}/"}, prompts, 7)]
    assert [each[:2] for each in rounds] == [("one", 1), ("two", 1)]
    replies = [reply for each in rounds for reply in each.replies]
    order = [(reply.prompt_id, reply.turn) for reply in replies]
    assert order == [("1", 0), ("1", 1), ("2", 0)] * 2
    assert [reply.text for reply in replies] == ["Ab"] * 3 + ["C"] * 3
    assert {reply[2:4] for reply in replies} == {(9, 4)}
    assert all(0 < reply.first_token_sec <= reply.sec for reply in replies)
    assert all(sum(reply.sec for reply in each.replies) <= each.sec for each in rounds)
    said = [[(each["role"], each["content"]) for each in body["messages"]] for body in one.asked]
    assert said == [
        [("user", "Hi")],
        [("user", "Hi"), ("assistant", "Ab"), ("user", "And?")],
        [("user", "Ho")],
    ]
    assert two.asked[1]["messages"][1] == {"role": "assistant", "content": "C"}
    assert all(body["temperature"] == 0 and body["max_tokens"] == 7 for body in one.asked)


@pytest.mark.parametrize(
    ("parts", "status", "message"),
    [
        (['{"error": "no model"}'], 503, "'one' answered 503: .*no model"),
        ([delta("A")], 200, "'one' does not say how many tokens"),
    ],
)
def test_what_a_server_refuses_is_said(
    parts: list[str], status: int, message: str, tmp_path: Path
) -> None:
    asked = prompts_of(tmp_path, ["Hi"])
    with serving(*parts, status=status) as server, pytest.raises(LadeError, match=message):
        list(ask_all({"one": server.address}, asked, 7))
    with pytest.raises(LadeError, match=f"'one' at {server.address} cannot be asked"):
        list(ask_all({"one": server.address}, asked, 7))  # it is not there any more


def test_servers_are_compared_with_the_first() -> None:
    rounds = [
        Round("one", 1, 5.0, [Reply("a", 0, 5, 10, 1.0, 2.0, "x")]),
        Round("two", 1, 1.5, [Reply("a", 0, 5, 12, 0.5, 1.0, "x")]),
        Round("one", 1, 5.0, [Reply("a", 1, 9, 10, 3.0, 3.0, "y")]),
        Round("two", 1, 0.5, [Reply("a", 1, 9, 12, 0.1, 1.0, "z")]),
        Round("one", 2, 1.0, [Reply("a", 0, 5, 10, 1.0, 2.0, "x")]),
        Round("two", 2, 2.0, [Reply("a", 0, 5, 10, 1.0, 2.0, "w")]),
    ]
    found = as_json(rounds)
    one, two = found["1"]["one"], found["1"]["two"]
    assert (one["tokens_per_sec"], two["tokens_per_sec"]) == (2.0, 12.0)  # of all rounds
    assert (one["first_token_sec"], two["first_token_sec"]) == (2.0, 0.3)  # medians
    assert (one["same_text"], two["same_text"]) == (1.0, 0.5)
    assert (found["2"]["two"]["tokens_per_sec"], found["2"]["two"]["same_text"]) == (5.0, 0.0)
