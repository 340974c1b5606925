"""What cannot be done is refused by name, in OpenAI's form, and harms nobody."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lade.models.loading import LoadedModel
from lade.server.app import Server
from tests.lade.server.serving import (
    QUESTION,
    asked,
    client_of,
    loaded_model,
    plain_text,
    post,
    serving,
)

CHAT: dict[str, Any] = {"messages": QUESTION, "max_tokens": 4}
TEXT: dict[str, Any] = {"prompt": "What-is", "max_tokens": 4}
RESPONSE: dict[str, Any] = {"input": "What-is", "max_output_tokens": 4}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_model()


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Server]:
    with serving(
        loaded, max_body_bytes=20_000, max_prompt_tokens=300, max_new_tokens=100
    ) as server:
        yield server


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    return found


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        ("/chat/completions", {"n": 2}, "n"),
        ("/chat/completions", {"frequency_penalty": 0.5}, "frequency_penalty"),
        ("/chat/completions", {"presence_penalty": -1}, "presence_penalty"),
        ("/chat/completions", {"tool_choice": "required"}, "tool_choice"),
        (
            "/chat/completions",
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
        ),
        ("/chat/completions", {"parallel_tool_calls": False}, "parallel_tool_calls"),
        ("/chat/completions", {"store": True}, "store"),
        ("/chat/completions", {"metadata": {"a": "b"}}, "metadata"),
        ("/chat/completions", {"generation_config": "{}"}, "generation_config"),
        ("/chat/completions", {"audio": {}}, "audio"),
        ("/chat/completions", {"nonsense": 1}, "nonsense"),
        ("/chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("/chat/completions", {"messages": []}, "messages"),
        ("/chat/completions", {"messages": "hello"}, "messages"),
        ("/chat/completions", {"messages": [{"content": "a"}]}, "messages.0.role"),
        ("/chat/completions", {"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type",
        ),
        ("/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("/chat/completions", {"max_tokens": "many"}, "max_tokens"),
        ("/chat/completions", {"max_tokens": 101}, "max_tokens"),
        ("/chat/completions", {"temperature": 2.5}, "temperature"),
        ("/chat/completions", {"temperature": "hot"}, "temperature"),
        ("/chat/completions", {"top_p": 0}, "top_p"),
        ("/chat/completions", {"seed": 2**64}, "seed"),
        ("/chat/completions", {"seed": True}, "seed"),
        ("/chat/completions", {"stop": ["a"] * 5}, "stop"),
        ("/chat/completions", {"stop": ""}, "stop"),
        ("/chat/completions", {"top_logprobs": 3}, "top_logprobs"),
        ("/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/chat/completions", {"logit_bias": {"94": 1}}, "logit_bias"),
        ("/chat/completions", {"logit_bias": {"a": 1}}, "logit_bias"),
        ("/chat/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("/chat/completions", {"response_format": {"type": "xml"}}, "response_format.type"),
        ("/chat/completions", {"response_format": {"type": "json_schema"}}, "response_format"),
        ("/chat/completions", {"user": 3}, "user"),
        ("/chat/completions", {"user": "a" * 257}, "user"),
        ("/completions", {"cache_salt": "a" * 257}, "cache_salt"),
        (
            "/chat/completions",
            {"chat_template_kwargs": {"tokenize": False}},
            "chat_template_kwargs.tokenize",
        ),
        ("/completions", {"best_of": 2}, "best_of"),
        ("/completions", {"echo": True}, "echo"),
        ("/completions", {"suffix": "a"}, "suffix"),
        ("/completions", {"prompt": ["a", "b"]}, "prompt"),
        ("/completions", {"logprobs": 6}, "logprobs"),
        ("/completions", {"prompt": None}, "prompt"),
        ("/responses", {"previous_response_id": "a"}, "previous_response_id"),
        ("/responses", {"input": 3}, "input"),
        ("/responses", {"include": ["message.output_text.logprobs"]}, "include"),
        ("/responses", {"max_output_tokens": 101}, "max_output_tokens"),
        ("/responses", {"tool_choice": "required"}, "tool_choice"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_is_not_supported_is_named(
    server: Server, path: str, changes: dict[str, Any], param: str
) -> None:
    body = {"/chat/completions": CHAT, "/completions": TEXT, "/responses": RESPONSE}[path]
    error = error_of(post(server, path, json=body | changes), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        ("/chat/completions", {"n": 2}, "n: nothing but 1 is supported"),
        (
            "/chat/completions",
            {"frequency_penalty": 0.5},
            "frequency_penalty: nothing but 0 is supported",
        ),
        ("/completions", {"echo": True}, "echo: nothing but false is supported"),
        ("/completions", {"suffix": "a"}, "suffix is not supported"),
        ("/chat/completions", {"stop": ["a", "b", "c", "d", "e"]}, "stop: .* at most 4 items"),
        ("/chat/completions", {"stop": 3}, "stop: Input should be a valid string"),
        (
            "/chat/completions",
            {"messages": [{"role": "wizard", "content": "a"}]},
            "messages.0.role: Input should be 'system', .*'user'",
        ),
        (
            "/responses",
            {"input": [{"role": "wizard", "content": "a"}]},
            "input.0.role is not supported",
        ),
    ],
    ids=str,
)
def test_messages_name_what_is_supported(
    server: Server, path: str, changes: dict[str, Any], message: str
) -> None:
    body = {"/chat/completions": CHAT, "/completions": TEXT, "/responses": RESPONSE}[path]
    error = error_of(post(server, path, json=body | changes), 400)
    assert re.match(message, error["message"]), error["message"]


def test_fields_that_ask_for_what_is_done_anyway_are_taken(
    loaded: LoadedModel, server: Server
) -> None:
    changes = {
        **dict.fromkeys(("n",), 1),
        **dict.fromkeys(("frequency_penalty", "presence_penalty"), 0),
        "tool_choice": "none",
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "parallel_tool_calls": True,
        "store": False,
        "metadata": {},
        "response_format": {"type": "text"},
        "temperature": 0.0,
        "logit_bias": {},
        "seed": None,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What-is-a-pool?"}]}],
    }
    answer = post(server, json=CHAT | changes)
    assert answer.json()["choices"][0]["message"]["content"] == plain_text(loaded, max_new_tokens=4)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"messages": NaN}',
        b"[" * 10_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"a": ' * 2000 + b"1" + b"}" * 2000,
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_no_request_is_refused(server: Server, data: bytes) -> None:
    error_of(post(server, content=data), 400)


def test_prompts_that_templates_refuse_are_refused() -> None:
    loaded = loaded_model()
    loaded.tokenizer.chat_template = "{{ raise_exception('roles must take turns') }}"
    with serving(loaded) as server:
        for stream in (False, True):
            error = error_of(post(server, json=CHAT | {"stream": stream}), 400)
            assert "roles must take turns" in error["message"]


def test_long_prompts_are_refused(server: Server) -> None:
    for stream in (False, True):
        body = {"prompt": "a" * 301, "max_tokens": 4, "stream": stream}
        error = error_of(post(server, "/completions", json=body), 400)
        assert error["code"] == "context_length_exceeded"
        assert "at most 300 tokens, got 301" in error["message"]
    error_of(post(server, "/completions", json={"prompt": ""}), 400)


def test_answers_end_where_positions_do(loaded: LoadedModel) -> None:
    with serving(loaded) as server:
        body = {"prompt": "a" * 500, "temperature": 0}
        usage = post(server, "/completions", json=body).json()["usage"]
        assert usage["completion_tokens"] == 12
        error = error_of(post(server, "/completions", json=body | {"max_tokens": 13}), 400)
        assert error["code"] == "context_length_exceeded"
        error_of(post(server, "/completions", json={"prompt": "a" * 512}), 400)


def test_large_bodies_are_refused_however_they_come(server: Server) -> None:
    data = json.dumps(CHAT | {"user": "a" * 20_000}).encode()
    assert error_of(post(server, content=data), 413)["code"] == "too_large"
    pieces = (data[begin : begin + 1000] for begin in range(0, len(data), 1000))
    assert error_of(post(server, content=pieces), 413)["code"] == "too_large"


def test_other_models_are_not_found(server: Server) -> None:
    error = error_of(post(server, json=CHAT | {"model": "gpt"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/reset", 404),
        ("POST", "/load_model", 404),
        ("POST", "/v1/systemone", 404),
        ("POST", "/v1/audio/transcriptions", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/chat/completions/", 404),
    ],
)
def test_only_what_is_listed_can_be_asked_for(
    loaded: LoadedModel, server: Server, method: str, path: str, status: int
) -> None:
    url = server.url.removesuffix("/v1") + path
    error_of(httpx.request(method, url, json={"model": "tiny"}), status)
    with client_of(server) as client:  # the model is still there
        assert asked(client).choices[0].message.content == plain_text(loaded)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_pages_of_other_sites_can_send_nothing(server: Server, kind: str) -> None:
    error_of(post(server, content=json.dumps(CHAT), headers={"content-type": kind}), 415)
