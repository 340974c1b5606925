"""Requests as programs of others send them, word for word where it matters, and what these read."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lade.models import LoadedModel
from tests.lade.apps.server.client import QUESTION, Client, Json, events_of, text_of
from tests.lade.apps.server.serving import plain_text, serving, wait_until

# --- lm-evaluation-harness ------------------------------------------------------------------

PROMPTS = ["What-is-a-pool?It-is", "a-list-of-n-grams~or-not", "x-and-y"]


def logprobs_of(loaded: LoadedModel, token_ids: list[int]) -> Any:
    """Return the model's log-probabilities of each token but the first, [num_tokens - 1]."""
    with torch.no_grad():
        rows = loaded.model(torch.tensor([token_ids])).logits[0, :-1].float().log_softmax(-1)
    return rows.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize(("max_tokens", "is_text"), [(0, False), (1, True)])
def test_lm_eval_scores_continuations(
    loaded: LoadedModel, client: Client, max_tokens: int, is_text: bool
) -> None:
    """As `local-completions` sends them, and reads `token_logprobs[ctxlen:-1]`."""
    ids: list[list[int]] = [loaded.tokenizer(text)["input_ids"] for text in PROMPTS]
    body: Json = {"model": "tiny", "prompt": PROMPTS if is_text else ids, "temperature": 0}
    body |= {"max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True}
    answer = client.ask(**body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, text, token_ids in zip(answer["choices"], PROMPTS, ids, strict=True):
        reported = choice["logprobs"]
        assert reported["token_logprobs"][0] is reported["top_logprobs"][0] is None
        found, end = reported["token_logprobs"], len(token_ids)
        assert len(found) == end + max_tokens
        assert found[1:end] == pytest.approx(logprobs_of(loaded, token_ids).tolist(), abs=1e-4)
        for logprob, top in zip(found[1:], reported["top_logprobs"][1:], strict=True):
            assert len(top) == 1
            assert logprob <= max(top.values())
        assert choice["text"].startswith(text.replace("~", ""))
        assert choice["finish_reason"] in ("length", "stop")
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(map(len, ids))
    assert usage["completion_tokens"] == 3 * max_tokens


def test_prompts_at_once_have_several_answers_each_in_order(client: Client) -> None:
    asked: Json = {"n": 2, "seed": 5, "temperature": 0.9, "max_tokens": 9, "echo": True}
    asked["stop"] = ["e"]  # as lm-eval's `generate_until`
    answer = client.ask(prompt=PROMPTS, logprobs=2, **asked)
    alone = [
        choice for prompt in PROMPTS for choice in client.ask(prompt=prompt, **asked)["choices"]
    ]
    assert [each["index"] for each in answer["choices"]] == [*range(6)]
    assert [each["text"] for each in answer["choices"]] == [each["text"] for each in alone]
    events = client.stream(prompt=PROMPTS, logprobs=2, **asked)
    for choice in answer["choices"]:
        of_it = [each for each in events if each["choices"][0]["index"] == choice["index"]]
        assert text_of(of_it) == choice["text"]
        shown = [each["choices"][0].get("logprobs") or {"tokens": []} for each in of_it]
        assert [name for each in shown for name in each["tokens"]] == choice["logprobs"]["tokens"]


def test_a_long_prompt_has_the_logprobs_of_one_forward(loaded: LoadedModel) -> None:
    """It runs in pieces, between which others may go on."""
    token_ids = [place * place % 90 for place in range(300)]
    body: Json = {"max_tokens": 0, "echo": True, "logprobs": 0}
    with serving(loaded) as client:
        client.ask(max_tokens=4)  # shows that forwards of this model run together
        engine = client.server._engine
        engine.prefill_chunk = engine._prefill_left = 50  # tokens
        choice = client.ask(prompt=token_ids, **body)["choices"][0]
    expected = logprobs_of(loaded, token_ids).tolist()
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-3)
    assert choice["logprobs"]["top_logprobs"][1:] == [{}] * 299


# --- clients with strict types --------------------------------------------------------------


@pytest.mark.parametrize("asked", [{}, {"prompt": "What-is"}], ids=["chat", "text"])
def test_answers_have_the_nulls_that_openais_schema_requires(client: Client, asked: Json) -> None:
    (choice,) = client.ask(max_tokens=9, **asked)["choices"]
    said = "text" if asked else "message"
    assert choice.keys() == {"index", said, "logprobs", "finish_reason"}
    assert choice["logprobs"] is None
    assert asked or choice["message"]["refusal"] is None
    *first, last = [event["choices"][0] for event in client.stream(max_tokens=9, **asked)]
    assert first
    assert {each["finish_reason"] for each in first} == {None}
    assert last["finish_reason"] == "length"
    assert {each["logprobs"] for each in (*first, last)} == {None}


def test_a_null_is_a_field_that_is_left_out(client: Client) -> None:
    """As openai-python sends what its user names and gives None: also fields we do not know."""
    nulls: Json = {"suffix": None, "best_of": None, "seed": None, "stop": None, "max_tokens": 3}
    assert client.ask(prompt="What-is", **nulls)["usage"]["completion_tokens"] == 3
    nulls = {"audio": None, "functions": None, "tools": None, "response_format": None, "n": None}
    assert client.ask(max_tokens=3, **nulls)["usage"]["completion_tokens"] == 3
    assert client.error(messages=None)["param"] == "messages"
    assert client.error(path="/completions", suffix="a")["param"] == "suffix"


# --- fields that only some know -------------------------------------------------------------

CACHED: Json = {"cache_control": {"type": "ephemeral"}}
# By program: whether it needs `--unknown-fields ignore`, its request, what has no effect in it.
REQUESTS: dict[str, tuple[bool, Json, str]] = {
    "openai": (
        False,
        {"metadata": {"a": "b"}, "verbosity": "low", "store": False, "reasoning_effort": "low"}
        | {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"}}
        | {"moderation": {"model": "omni-moderation-latest"}},
        "metadata, moderation, prompt_cache_options, prompt_cache_retention, reasoning_effort, "
        "verbosity",
    ),
    "autogen": (False, {"messages": [{**QUESTION[0], "name": "user"}]}, "messages.0.name"),
    "librechat": (
        False,
        {"user": "65f1", "stream_options": {"include_usage": True}, "stream": True}
        | {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a", **CACHED}]},
                {"role": "assistant", "content": "b", "refusal": None, "annotations": []}
                | {"reasoning_content": "hm", "reasoning_details": [{"text": "hm"}]}
                | {"audio": None, "tool_calls": None},
                {"role": "tool", "content": "b", "tool_call_id": "c", "name": "f"},
                {**QUESTION[0], **CACHED},
            ]
        },
        "messages.0.content.0.cache_control, messages.3.cache_control",
    ),
    "guidellm": (
        True,
        {"stream": True, "max_completion_tokens": 9, "stop": None, "ignore_eos": True}
        | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        "ignore_eos, stream_options.continuous_usage_stats",
    ),
    "litellm": (
        True,
        {"drop_params": True, "api_version": None, "user": "ann", "metadata": {"tags": []}},
        "drop_params, metadata",
    ),
    "open-webui": (
        True,
        {"num_ctx": 8192, "keep_alive": "5m", "think": False, "mirostat": 0, "chat_id": "a1"}
        | {"features": {"web_search": False}, "moderation": {"model": "m", "policy": {}}}
        | {"messages": [{**QUESTION[0], "id": "c3", "timestamp": 1}]},
        "chat_id, features, keep_alive, messages.0.id, messages.0.timestamp, mirostat, moderation, "
        "moderation.policy, num_ctx, think",
    ),
}


@pytest.fixture(scope="module")
def lenient(loaded: LoadedModel) -> Iterator[Client]:
    with serving(loaded, ignores_unknown=True) as client:
        yield client


@pytest.mark.parametrize("name", REQUESTS)
def test_what_has_no_effect_is_told_of(
    loaded: LoadedModel,
    client: Client,
    lenient: Client,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    needs_leave, fields, useless = REQUESTS[name]
    body: Json = {"max_tokens": 9, "temperature": 0, "messages": QUESTION, **fields}
    if needs_leave:
        assert client.error(**fields)["message"].startswith(tuple(useless.split(", ")))
    texts = [each["content"] for each in body["messages"]]
    texts = [text if isinstance(text, str) else text[0]["text"] for text in texts]
    pairs = zip(body["messages"], texts, strict=True)
    prompt = [{"role": each["role"], "content": text} for each, text in pairs]
    for asked in [lenient] if needs_leave else [client, lenient]:
        with caplog.at_level(logging.INFO, "lade.apps.server"):
            answer = asked.post(json=body)
            told_of = answer.headers["x-without-effect"]
            wait_until(lambda told_of=told_of: told_of in caplog.text)  # type: ignore[misc]
        assert sorted(told_of.split(", ")) == useless.split(", ")
        is_whole = "stream" not in body
        said = answer.json()["choices"][0]["message"]["content"] if is_whole else None
        said = said or text_of(events_of(answer))
        assert said == plain_text(loaded, prompt, max_new_tokens=9)
        plain = asked.post(json={"messages": QUESTION, "max_tokens": 1})
        assert "x-without-effect" not in plain.headers


def test_what_is_ignored_neither_hides_mistakes_nor_breaks_headers(lenient: Client) -> None:
    assert lenient.error(temperature=3, other=1)["param"] == "temperature"
    assert lenient.error(tools=[{"function": {"name": "f"}}])["param"] == "tools"
    fields = {"a\r\nb: c": 1, "é": 2, **{f"field{place}" * 99: 0 for place in range(99)}}
    body: Any = {"messages": QUESTION, "max_tokens": 1, **fields}
    reported = lenient.post(json=body).headers["x-without-effect"]
    assert reported.startswith("a%0D%0Ab%3A%20c, ")
    assert len(reported) < 2**13
    for content in (b"[1]", b"{", b'{"messages": NaN, "a": 1}', b"[" * 10_000):
        assert lenient.post(content=content).status_code == 400
