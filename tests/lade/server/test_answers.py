"""What clients of OpenAI ask for is what they get: texts are those of plain generate."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch

from lade.models.loading import LoadedModel
from lade.server import inference, upstream
from lade.server.answers import StopCutter
from lade.server.app import Server
from tests.grids import thinned
from tests.lade.server.serving import (
    QUESTION,
    TEMPLATE,
    asked,
    client_of,
    loaded_model,
    plain_ids,
    plain_text,
    post,
    printable_tokenizer,
    prompt_ids,
    serving,
    text_of,
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_model()


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Server]:
    with serving(loaded, max_new_tokens=200) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


@pytest.fixture
def known(loaded: LoadedModel) -> Iterator[openai.OpenAI]:
    """A client with a key, which may know what was kept of its prompts."""
    with serving(loaded, api_keys=["none"]) as server, client_of(server) as client:
        yield client


def test_an_answer_is_plain_generates(loaded: LoadedModel, client: openai.OpenAI) -> None:
    answer = asked(client)
    assert answer.choices[0].message.content == plain_text(loaded)
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == "tiny"
    assert text_of(asked(client, stream=True)) == plain_text(loaded)


@pytest.mark.parametrize("seed", thinned([3, 4, 2**40], 2**40))
def test_the_same_seed_gives_the_same_text(
    loaded: LoadedModel, client: openai.OpenAI, seed: int
) -> None:
    expected = plain_text(loaded, seed=seed, temperature=0.8, top_p=0.9)
    options = {"seed": seed, "temperature": 0.8, "top_p": 0.9}
    assert asked(client, **options).choices[0].message.content == expected
    assert text_of(asked(client, stream=True, **options)) == expected


def test_seeds_of_requests_at_once_do_not_mix(
    loaded: LoadedModel, server: Server, client: openai.OpenAI
) -> None:
    options = {"temperature": 1.0, "max_tokens": 20}
    expected = {
        seed: plain_text(loaded, seed=seed, temperature=1.0, max_new_tokens=20) for seed in range(6)
    }
    with ThreadPoolExecutor(6) as threads:
        answers = threads.map(lambda seed: asked(client, seed=seed, **options), expected)
        for seed, answer in zip(expected, answers, strict=True):
            assert answer.choices[0].message.content == expected[seed]


def test_without_a_seed_texts_differ(client: openai.OpenAI) -> None:
    """Also right after a request with one."""
    texts = set()
    for _ in range(3):
        asked(client, seed=3, temperature=1)
        texts.add(asked(client, temperature=1).choices[0].message.content)
    assert len(texts) == 3


def test_sampling_options_of_vllm_are_known(loaded: LoadedModel, client: openai.OpenAI) -> None:
    sampling = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.3}
    answer = asked(client, seed=1, temperature=1, extra_body=sampling)
    assert answer.choices[0].message.content == plain_text(loaded, seed=1, **sampling)


def test_biases_are_added(client: openai.OpenAI) -> None:
    answer = asked(client, logit_bias={"40": 100}, max_tokens=5)
    assert answer.choices[0].message.content == "I" * 5


# --- stops ----------------------------------------------------------------------------------


def test_an_answer_that_ends_itself_has_no_mark_of_its_end() -> None:
    loaded = loaded_model(eos_token_id=93)
    sampling = {"temperature": 0.9, "max_tokens": 24}
    ids = {
        seed: plain_ids(loaded, seed=seed, temperature=0.9, max_new_tokens=24) for seed in range(9)
    }
    seed = next(seed for seed, each in ids.items() if each[-1] == 93)
    expected = loaded.tokenizer.decode(ids[seed][:-1])
    assert plain_text(loaded, seed=seed, temperature=0.9, max_new_tokens=24) == expected
    with serving(loaded) as server, client_of(server) as client:
        whole = asked(client, seed=seed, **sampling).choices[0]
        assert (whole.message.content, whole.finish_reason) == (expected, "stop")
        assert text_of(asked(client, seed=seed, stream=True, **sampling)) == expected


@pytest.mark.parametrize("place", [(3, 4), (9, 12), (20, 21)])
def test_an_answer_ends_before_a_stop(
    loaded: LoadedModel, client: openai.OpenAI, place: tuple[int, int]
) -> None:
    text = plain_text(loaded)
    stop = text[slice(*place)]
    expected = text[: text.index(stop)]
    whole = asked(client, stop=stop).choices[0]
    assert (whole.message.content, whole.finish_reason) == (expected, "stop")
    assert text_of(asked(client, stop=[stop, "~~~~"], stream=True)) == expected
    options = {"model": "tiny", "prompt": "What-is", "max_tokens": 40, "temperature": 0}
    text = plain_text(loaded, "What-is")
    stop = text[slice(*place)]
    whole = client.completions.create(**options, stop=stop).choices[0]
    assert (whole.text, whole.finish_reason) == (text[: text.index(stop)], "stop")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["ab", "cd"], "abcd"),
        (["a", "b", "--", "c", "END", "d"], "ab--c"),
        (["aE", "N", "Nb"], "aENNb"),
        (["aE", "N", "D"], "a"),
        (["ENEND"], "EN"),
        (["a", "E", "N"], "aEN"),
        (["x.", "."], "x"),
    ],
)
def test_what_may_begin_a_stop_is_held_back(parts: list[str], expected: str) -> None:
    cutter = StopCutter(["END", ".."])
    shown = [cutter.feed(part) for part in parts]
    assert "".join(shown) + cutter.rest() == expected
    assert not any("END".startswith(text[-1:]) and text[-1:] for text in shown)


# --- log-probabilities ----------------------------------------------------------------------


def raw_logprobs(loaded: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    """Return the model's own log-probabilities after the question and each token, plainly."""
    prompt = prompt_ids(loaded)["input_ids"][0].tolist()
    ids = torch.tensor([[*prompt, *token_ids]])
    with torch.no_grad():
        logits = loaded.model(ids).logits[0, len(prompt) - 1 : -1]
    logprobs: torch.Tensor = logits.float().log_softmax(-1)
    return logprobs


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_p": 0.8, "seed": 3}])
def test_logprobs_are_the_models_own(
    loaded: LoadedModel, client: openai.OpenAI, options: dict[str, Any]
) -> None:
    options = {**options, "extra_body": {"repetition_penalty": 1.2}, "max_tokens": 12}
    answer = asked(client, logprobs=True, top_logprobs=3, **options).choices[0]
    content = answer.logprobs.content
    assert "".join(each.token for each in content) == answer.message.content
    token_ids = loaded.tokenizer(answer.message.content)["input_ids"]
    expected = raw_logprobs(loaded, token_ids)
    for place, (each, token_id) in enumerate(zip(content, token_ids, strict=True)):
        assert each.bytes == list(each.token.encode())
        assert each.logprob == pytest.approx(float(expected[place, token_id]), abs=1e-3)
        best = expected[place].topk(3)
        assert [other.logprob for other in each.top_logprobs] == pytest.approx(
            best.values.tolist(), abs=1e-3
        )
        names = [loaded.tokenizer.decode([other]) for other in best.indices.tolist()]
        assert [other.token for other in each.top_logprobs] == names


def test_streamed_logprobs_go_with_their_text(client: openai.OpenAI) -> None:
    whole = asked(client, logprobs=True, stop="zz").choices[0]
    assert whole.logprobs.content[0].top_logprobs == []
    found = []
    for chunk in asked(client, logprobs=True, stop="zz", stream=True):
        choice = chunk.choices[0]
        shown = [] if choice.logprobs is None else choice.logprobs.content
        assert "".join(each.token for each in shown) == (choice.delta.content or "")
        found += [each.logprob for each in shown]
    assert found == pytest.approx([each.logprob for each in whole.logprobs.content], abs=1e-3)


def test_completions_have_logprobs_of_their_own(loaded: LoadedModel, client: openai.OpenAI) -> None:
    options = {"model": "tiny", "prompt": "What-is", "max_tokens": 9, "temperature": 0}
    answer = client.completions.create(**options, logprobs=2).choices[0]
    assert answer.text == plain_text(loaded, "What-is", max_new_tokens=9)
    logprobs = answer.logprobs
    assert "".join(logprobs.tokens) == answer.text
    assert logprobs.text_offset == list(range(9))
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 2
        assert top[token] == max(top.values()) == logprob
    streamed = [*client.completions.create(**options, logprobs=2, stream=True)]
    shown = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs]
    assert [token for each in shown for token in each.tokens] == logprobs.tokens
    assert [at for each in shown for at in each.text_offset] == logprobs.text_offset


# --- grammars and tools ---------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"enum": [1, 2]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_a_schema_is_kept_and_what_it_forces_is_drafted() -> None:
    with serving(loaded_model(eos_token_id=93)) as server, client_of(server) as client:
        form = {"type": "json_schema", "json_schema": {"name": "who", "schema": SCHEMA}}
        answer = asked(client, response_format=form)
        assert answer.choices[0].finish_reason == "stop"
        found = json.loads(answer.choices[0].message.content)
        assert found["name"] in ("ann", "bob")
        assert found["age"] in (1, 2)
        details = answer.usage.completion_tokens_details
        assert details.accepted_draft_tokens > 10
        assert json.loads(text_of(asked(client, response_format=form, stream=True))) == found
        form = {"type": "json_object"}
        assert asked(client, response_format=form).choices[0].message.content.startswith("{")
        text = {"format": {"type": "json_schema", "name": "who", "schema": SCHEMA}}
        response = client.responses.create(
            model="tiny", input="What-is", text=text, temperature=0, max_output_tokens=60
        )
        assert json.loads(response.output_text).keys() == {"name", "age"}


def test_schemas_that_cannot_be_kept_are_refused(client: openai.OpenAI) -> None:
    def refused(client: openai.OpenAI, schema: dict[str, Any], match: str) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "who", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match=match) as raised:
            asked(client, response_format=form)
        assert raised.value.param == "response_format"

    refused(client, SCHEMA, "no token that ends an answer")
    with serving(loaded_model(eos_token_id=93)) as server, client_of(server) as client:
        refused(client, {"type": "nothing"}, "type 'nothing'")
        refused(client, {"description": "long" * 2**14}, "at most 65536 characters")


PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
CALL = '<call>{"name":"f","arguments":{"a":1}}</call>'


@pytest.fixture
def calling(monkeypatch: pytest.MonkeyPatch) -> Iterator[openai.OpenAI]:
    """A client of a model that is made to call a tool, and of a template that tells calls."""

    class Writes:
        """A logits processor that makes the model write a call."""

        def __init__(self) -> None:
            self.left = [*printable_tokenizer()(CALL)["input_ids"]]

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(scores, -torch.inf)
            forced[:, self.left.pop(0) if self.left else 93] = 0
            return forced

    monkeypatch.setattr(inference, "_grammar_of", lambda exchange: [Writes()])
    loaded = loaded_model(eos_token_id=93)
    loaded.tokenizer.chat_template = TEMPLATE.replace(
        "{% endfor %}",
        "{% for c in m.tool_calls or [] %}<call>"
        '{"name":"{{ c.function.name }}","arguments":{"a":""}}</call>{% endfor %}{% endfor %}',
    )
    loaded.tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<assistant>",
        "fields": {
            "tool_calls": {
                "open": "<call>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": "~", "content": "text"},
        },
    }
    with serving(loaded) as server, client_of(server) as client:
        yield client


def test_calls_of_tools_are_transformers(calling: openai.OpenAI) -> None:
    choice = asked(calling, tools=TOOLS, tool_choice="auto", max_tokens=90).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"a": 1})
    chunks = [*asked(calling, tools=TOOLS, stream=True, max_tokens=90)]
    (streamed,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert (streamed.function.name, json.loads(streamed.function.arguments)) == ("f", {"a": 1})
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_calls_of_tools_are_predicted(
    calling: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They change no text, and count as no prediction of the client's."""

    def told(**options: Any) -> tuple[Any, Any]:
        answer = asked(calling, tools=TOOLS, max_tokens=90, **options)
        (call,) = answer.choices[0].message.tool_calls
        return call.function, answer.usage.completion_tokens_details

    call, details = told()
    assert details.accepted_draft_tokens > 25
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    with_own, details = told(prediction={"type": "content", "content": "nothing-of-it"})
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == 13
    details = asked(
        calling, tools=TOOLS, max_tokens=90, tool_choice="none"
    ).usage.completion_tokens_details
    assert details.accepted_draft_tokens < 20

    def refuse(*_: Any) -> str:
        raise ValueError

    monkeypatch.setattr(upstream, "tool_calls", refuse)
    without, details = told()
    assert details.accepted_draft_tokens < 20
    assert call == with_own == without


# --- usage, other endpoints -----------------------------------------------------------------


def test_usage_says_what_was_drafted_and_what_was_kept(
    loaded: LoadedModel, known: openai.OpenAI
) -> None:
    num_prompt = prompt_ids(loaded)["input_ids"].shape[1]
    usage = asked(known, user="ann").usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, 40)
    assert usage.prompt_tokens_details.cached_tokens == 0
    streamed = [*asked(known, user="ann", stream=True, stream_options={"include_usage": True})]
    assert [chunk.usage for chunk in streamed[:-1]] == [None] * (len(streamed) - 1)
    assert streamed[-1].choices == []
    usage = streamed[-1].usage
    assert usage.completion_tokens_details.accepted_draft_tokens > 20
    assert usage.prompt_tokens_details.cached_tokens >= num_prompt - 1
    assert all(chunk.usage is None for chunk in asked(known, stream=True))


def test_what_another_user_said_is_not_kept_for_this_one(known: openai.OpenAI) -> None:
    for user in ("carl", "dora"):
        assert asked(known, user=user).usage.prompt_tokens_details.cached_tokens == 0
    assert asked(known).usage.prompt_tokens_details.cached_tokens == 0


def test_streams_end_as_openais(server: Server) -> None:
    body = {"messages": QUESTION, "max_tokens": 3, "stream": True}
    for path in ("/chat/completions", "/completions"):
        if path == "/completions":
            body = {"prompt": "What-is", "max_tokens": 3, "stream": True}
        answer = post(server, path, json=body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.endswith("\n\ndata: [DONE]\n\n")


def test_completions_and_responses_are_plain_generates(
    loaded: LoadedModel, known: openai.OpenAI
) -> None:
    options = {"model": "tiny", "prompt": "What-is", "max_tokens": 30, "temperature": 0}
    expected = plain_text(loaded, "What-is", max_new_tokens=30)
    assert known.completions.create(**options).choices[0].text == expected
    chunks = known.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    options = {
        "model": "tiny",
        "input": "What-is-a-pool?",
        "max_output_tokens": 40,
        "temperature": 0,
    }
    response = known.responses.create(**options, user="erna")
    assert response.output_text == plain_text(loaded)
    events = [*known.responses.create(**options, stream=True, user="erna")]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == plain_text(loaded)
    assert events[-1].type == "response.completed"
    usage = events[-1].response.usage
    assert usage.output_tokens == 40
    assert usage.input_tokens_details.cached_tokens >= usage.input_tokens - 1


def test_the_one_model_is_listed(server: Server, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    health = httpx.get(server.url.removesuffix("/v1") + "/health")
    assert health.json() == {"status": "ok"}


def test_a_prompt_that_goes_on_is_not_run_again(known: openai.OpenAI) -> None:
    messages: list[Any] = [*QUESTION]
    for turn in range(3):
        answer = asked(known, messages=messages, user="turns", max_tokens=20)
        kept = answer.usage.prompt_tokens_details.cached_tokens
        assert (kept > 20) == (turn > 0)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": "And-then?"})
