"""What cannot be done is refused by name, in OpenAI's form, and harms nobody."""

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lade.models import LoadedModel
from tests.grids import thinned
from tests.lade.apps.server.client import QUESTION, Client, Json, error_of
from tests.lade.apps.server.hostile import BODIES, schema_of
from tests.lade.apps.server.serving import loaded_model, plain_text, serving

CHATS: list[tuple[Json, str]] = [
    ({"frequency_penalty": 2.5}, "frequency_penalty: Input should be less than or equal to 2"),
    ({"add_generation_prompt": False}, "add_generation_prompt: expected true, or continue_final"),
    (
        {"add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message: expected no add_generation_prompt",
    ),
    ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
    ({"top_k": -2}, "top_k: Input should be greater than or equal to -1"),
    ({"n": 17}, "n: Input should be less than or equal to 16"),
    ({"tool_choice": "required"}, "tool_choice: expected one of tools"),
    ({"generation_config": "{}"}, "generation_config: not supported"),
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages.0.role: .*'system', .*'user'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0.type",
    ),
    ({"max_tokens": 101}, "expected an answer of at most 100"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ["a"] * 17}, "stop: .* at most 16 items"),
    ({"stop": 3}, "stop: Input should be a valid array"),
    ({"stop": ""}, "stop"),
    ({"top_logprobs": 3}, "top_logprobs: expected it with logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {"94": 1}}, "expected ids of tokens below 94"),
    ({"stream_options": {"include_usage": True}}, "stream_options: expected it with stream"),
    ({"response_format": {"type": "text", "schema": {}}}, "expected schema with the type json_obj"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"moderation": {"model": "m", "policy": {"input": {"mode": "block"}}}}, "moderation.policy"),
    ({"moderation": True}, "moderation"),
    ({"stream": True, "stream_options": {"a": 0}}, "stream_options.a: not supported"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 0}]}]},
        "messages.0.content.0.b: not supported",
    ),
    ({"tools": [{"function": {"name": "f"}}]}, "tools: not supported: the model's chat template"),
    ({"tools": [{"nonsense": 1}]}, "tools.0.function: expected a function with a name"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type: expected 'function'"),
    ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs.a: not supported"),
    ({"chat_template_kwargs": {"messages": []}}, "got 'messages'"),
    *(
        ({"messages": [*QUESTION, {"role": "user", "content": "a", **field}]}, f"messages.1.{said}")
        for field, said in (
            ({"images": ["aGk="]}, "images: not supported"),
            ({"audio": {"id": "x"}}, "audio: not supported"),
            ({"prefix": True}, "prefix: not supported"),
            ({"function_call": {"name": "f", "arguments": "{}"}}, "function_call: not supported"),
        )
    ),
    *(
        (
            {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [call]}]},
            f"messages.1.tool_calls{said}",
        )
        for call, said in (
            ({"function": {"name": "f", "arguments": "{}"}}, ": not supported"),
            ({"function": {"name": "f", "arguments": ""}}, ".0.function.arguments: expected a"),
            ({"function": {"name": "f", "arguments": None}}, ".0.function.arguments: expected a"),
            ({"function": {"name": "f", "arguments": "[1]"}}, ".0.function.arguments: expected a"),
            ({"function": {"arguments": "{}"}}, ".0.function: expected a function with a name"),
            ({"type": "custom"}, ".0.type: expected 'function'"),
        )
    ),
    ({"user": "a" * 257}, "user"),
    ({"chat_template_kwargs": {"tokenize": False}}, "expected arguments of the chat template"),
    (
        {"prediction": {"type": "content", "content": "a" * 3000}},
        "expected a prediction of at most",
    ),
    ({"prediction": {"type": "content", "content": "a"}, "speculation": False}, "expected no"),
]
TEXTS: list[tuple[Json, str]] = [
    ({"best_of": 2}, "best_of"),
    ({"echo": "yes"}, "echo: Input should be a valid boolean"),
    ({"max_tokens": 0}, "max_tokens: expected at least 1, or echo"),
    ({"prompt": ["a"] * 65}, "prompt: .* at most 64 items"),
    ({"prompt": ["a"] * 9, "n": 8}, "n: expected at most 64 answers"),
    ({"prompt": ["a", []]}, "prompt"),
    ({"prompt": ["a", {"a": 1}]}, "prompt"),
    ({"suffix": "a"}, "suffix: not supported"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, 94]}, "expected ids of tokens below 94, got 94"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": "a" * 301}, "expected a prompt of at most 300 tokens, got 301"),
    ({"logprobs": 6}, "logprobs"),
    ({"prediction": {"type": "content", "content": "a"}}, "prediction: not supported"),
]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_model()


@pytest.fixture(scope="module")
def client(loaded: LoadedModel) -> Iterator[Client]:
    limits = {"max_body_bytes": 20_000, "max_prompt_tokens": 300, "max_new_tokens": 100}
    with serving(loaded, **limits) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "changes", "said"),
    [("/chat/completions", *each) for each in CHATS] + [("/completions", *each) for each in TEXTS],
    ids=lambda value: json.dumps(value)[:50],
)
def test_what_is_not_supported_is_named(
    client: Client, path: str, changes: Json, said: str
) -> None:
    streamed: Json = {} if "stream_options" in changes else {"stream": True}
    for more in ({}, streamed):
        error = client.error(path=path, **changes, **more)
        assert re.search(said, error["message"]), error
        assert error["type"] == "invalid_request_error"
        named = error["param"]
        assert named is None or named.split(".")[0] in changes


def test_tokens_that_the_model_has_no_row_for_are_refused() -> None:
    loaded = loaded_model()
    loaded.tokenizer.add_tokens(["[PAD]"])
    said = "expected ids of tokens below 94, got 94, '[PAD]'"
    with serving(loaded) as client:
        text = client.text(prompt="what-is")
        message: Json = {"role": "user", "content": "a[PAD]b"}
        for prompt in ({"messages": [message]}, {"prompt": "[PAD]"}, {"prompt": ["a", [94]]}):
            path = "/completions" if "prompt" in prompt else "/chat/completions"
            assert said in client.error(path=path, **prompt)["message"]
        predicted = client.text(prediction={"type": "content", "content": "[PAD]"})
        assert predicted == plain_text(loaded)
        assert client.text(prompt="what-is") == text


def test_fields_that_ask_for_what_is_done_anyway_are_taken(
    loaded: LoadedModel, client: Client
) -> None:
    text = client.text(
        n=1,
        frequency_penalty=0,
        presence_penalty=0,
        tool_choice="none",
        tools=[{"type": "function", "function": {"name": "f"}}],
        parallel_tool_calls=True,
        store=False,
        metadata={},
        response_format={"type": "text"},
        logit_bias={},
        seed=None,
        max_completion_tokens=4,
        messages=[{"role": "user", "content": [{"type": "text", "text": "What-is-a-pool?"}]}],
    )
    assert text == plain_text(loaded, max_new_tokens=4)


@pytest.mark.parametrize(
    ("template", "changes"),
    [
        ("{{ mood }}", {"chat_template_kwargs": {"mood": "good"}}),
        ("{% if mood is not defined %}a{% endif %}", {"chat_template_kwargs": {"mood": None}}),
        ("{{ messages[0].name }}", {"messages": [{**QUESTION[0], "name": "ann"}]}),
        ("{{ messages | tojson }}", {"messages": [{**QUESTION[0], "name": "ann"}]}),
        ("{{ tools[0].function.name }}", {"tools": [{"function": {"name": "f"}}]}),
    ],
)
def test_fields_that_the_template_reads_are_taken(template: str, changes: Json) -> None:
    loaded = loaded_model()
    loaded.tokenizer.chat_template += template
    with serving(loaded) as client:
        client.ask(max_tokens=2, **changes)


def test_what_is_no_request_is_refused(client: Client) -> None:
    surrogate = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    deep = (b"[" * 10_000, b'{"a": ' * 2000 + b"1" + b"}" * 2000)
    for data in (b"", b"{", b"[]", b"\xff\xfe", b'{"messages": NaN}', surrogate, *deep):
        error_of(client.post(content=data), 400)


def test_prompts_that_templates_refuse_are_refused() -> None:
    loaded = loaded_model()
    loaded.tokenizer.chat_template = "{{ raise_exception('roles must take turns') }}"
    with serving(loaded) as client:
        for stream in (False, True):
            assert "roles must take turns" in client.error(stream=stream)["message"]


def test_answers_end_where_positions_do(loaded: LoadedModel) -> None:
    with serving(loaded) as client:
        body: Json = {"prompt": "a" * 500, "temperature": 0}
        usage = client.post("/completions", json=body).json()["usage"]
        assert usage["completion_tokens"] == 12
        for body in ({"prompt": "a" * 500, "max_tokens": 13}, {"prompt": "a" * 512}):
            error = error_of(client.post("/completions", json=body), 400)
            assert error["code"] == "context_length_exceeded"


def test_large_bodies_are_refused_however_they_come(client: Client) -> None:
    data = json.dumps({"messages": QUESTION, "user": "a" * 20_000}).encode()
    pieces = (data[begin : begin + 1000] for begin in range(0, len(data), 1000))
    for content in (data, pieces):
        assert error_of(client.post(content=content), 413)["code"] == "too_large"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/load_model", 404),
        ("POST", "/v1/responses", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("POST", "/v1/chat/completions/", 404),
    ],
)
def test_only_what_is_listed_can_be_asked_for(
    loaded: LoadedModel, client: Client, method: str, path: str, status: int
) -> None:
    answer = client.get(path, method=method)
    error_of(answer, status)
    allowed = "POST" if "completions" in path else "GET, HEAD"
    found = answer.headers.get("allow", "")
    assert sorted(found.split(", ")) == (allowed.split(", ") if status == 405 else [""])
    error = client.error(404, model="gpt")
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert client.text(max_tokens=4) == plain_text(loaded, max_new_tokens=4)


def test_pages_of_other_sites_can_send_nothing(loaded: LoadedModel) -> None:
    """By other names of the server, a page in a browser may reach one that is not for it."""
    with serving(loaded, allowed_hosts=["lade.example"]) as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            headers = {"content-type": kind}
            error_of(client.post(content=json.dumps({"messages": QUESTION}), headers=headers), 415)
        for kind in ("gzip", "br"):  # which would be read as broken JSON
            error = error_of(client.post(json={}, headers={"content-encoding": kind}), 415)
            assert "without Content-Encoding" in error["message"]
        for kind in (
            "Application/JSON",
            "application/json; charset=utf-8",
            "APPLICATION/json ;a=b",
        ):
            body = {"messages": QUESTION, "max_tokens": 2}
            assert client.post(json=body, headers={"content-type": kind}).status_code == 200
        for host in ("localhost", "127.0.0.1:8000", "[::1]:80", "LADE.example:443"):
            assert client.get("/v1/models", host=host).status_code == 200
        for host in ("evil.example", "localhost.evil.example", "127.0.0.1.nip.io"):
            for path in ("/v1/models", "/metrics"):
                assert client.get(path, host=host).status_code == 421
            answer = client.post(json={"messages": QUESTION}, headers={"host": host})
            assert answer.status_code == 421


@pytest.fixture(scope="module")
def attacked() -> Iterator[Client]:
    with serving(loaded_model(eos_token_id=93)) as client:
        assert client.text(**schema_of({"type": "null"}))
        yield client


@pytest.mark.xdist_group("attacks")  # whose server takes seconds to begin
@pytest.mark.parametrize("name", thinned(BODIES, *[*BODIES][::2]))
def test_what_would_take_long_is_refused_within_a_second(attacked: Client, name: str) -> None:
    """Of processor time, that of threads included."""
    body = BODIES[name]()
    taken = []
    for _ in range(3):  # two threads on one core take each other's time
        begin = time.process_time()
        error = attacked.error(**body)
        taken.append(time.process_time() - begin)
        assert len(error["message"]) < 500
        if taken[-1] < 1.3:  # with what the test itself takes to send it
            break
    assert min(taken) < 1.3
    assert attacked.text(**schema_of({"enum": ["a"]})).startswith('"a')


def test_nobody_is_heard_before_the_model_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()

    def check(*_: object, **__: object) -> None:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place)

    monkeypatch.setattr("lade.apps.server.app.warm_up", check)
    dockerfile = (Path(__file__).parents[4] / "examples" / "Dockerfile").read_text()
    asked = re.search(r"127\.0\.0\.1:8000(/\w+)'", dockerfile)
    assert asked is not None
    with serving(loaded_model(), port=place[1]) as client:
        assert client.get(asked[1]).status_code == 200
