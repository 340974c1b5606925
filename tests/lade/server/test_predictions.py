"""`prediction`, `speculation` and `max_draft_tokens` of requests: they change the speed alone."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

import lade
from lade.models.loading import LoadedModel
from lade.server.app import Server
from lade.server.errors import ApiError
from lade.server.exchange import Asked
from lade.server.limits import config_for
from tests.lade.server.serving import asked, client_of, loaded_model, plain_text, serving, text_of


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_model()


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[Server]:
    with serving(loaded, max_prompt_tokens=300) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def predicted(content: Any) -> dict[str, Any]:
    return {"type": "content", "content": content}


def details_of(answer: Any) -> Any:
    return answer.usage.completion_tokens_details


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 7}], ids=["greedy", "seeded"])
def test_the_text_is_the_same_and_usage_counts_the_prediction(
    client: openai.OpenAI, options: dict[str, Any]
) -> None:
    without = asked(client, **options)
    text = without.choices[0].message.content
    details = details_of(without)
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    right = asked(client, prediction=predicted(text), **options)
    assert right.choices[0].message.content == text
    details = details_of(right)
    assert details.accepted_prediction_tokens >= 30
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == len(text)
    assert details.accepted_draft_tokens >= 24  # of each step, at most 4
    parts = [{"type": "text", "text": part} for part in (text[:9], text[9:])]
    streamed = asked(client, prediction=predicted(parts), stream=True, **options)
    assert text_of(streamed) == text
    wrong = asked(client, prediction=predicted("~!" * 40), **options)
    assert wrong.choices[0].message.content == text
    assert details_of(wrong).rejected_prediction_tokens >= 70


def test_nothing_is_drafted_where_speculation_is_off(
    loaded: LoadedModel, client: openai.OpenAI
) -> None:
    answer = asked(client, extra_body={"speculation": False})
    assert answer.choices[0].message.content == plain_text(loaded)
    details = details_of(answer)
    assert (details.accepted_draft_tokens, details.rejected_draft_tokens) == (0, 0)
    assert details_of(asked(client, extra_body={"speculation": True})).accepted_draft_tokens > 0


def test_steps_have_at_most_so_many_draft_tokens(client: openai.OpenAI) -> None:
    text = asked(client).choices[0].message.content
    few = details_of(asked(client, prediction=predicted(text), extra_body={"max_draft_tokens": 1}))
    assert 15 <= few.accepted_draft_tokens + few.rejected_draft_tokens <= 40


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {"type": "other", "content": "a"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": 3}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": "a", "more": 1}}, "prediction.more"),
        ({"prediction": predicted("a" * 3000)}, "prediction"),
        ({"prediction": predicted("a"), "speculation": False}, "prediction"),
        ({"speculation": "no"}, "speculation"),
        ({"speculation": False, "max_draft_tokens": 2}, "max_draft_tokens"),
        ({"max_draft_tokens": -1}, "max_draft_tokens"),
        ({"max_draft_tokens": 5}, "max_draft_tokens"),  # the server's own number is 4
    ],
)
def test_what_is_not_allowed_is_refused_by_name(
    client: openai.OpenAI, changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        asked(client, extra_body=changes)
    assert raised.value.param == param


def test_completions_and_responses_take_no_prediction(client: openai.OpenAI) -> None:
    more = {"prediction": predicted("a")}
    with pytest.raises(openai.BadRequestError, match="prediction is not supported"):
        client.completions.create(model="tiny", prompt="What", max_tokens=4, extra_body=more)
    with pytest.raises(openai.BadRequestError, match="prediction is not supported"):
        client.responses.create(model="tiny", input="What", extra_body=more)
    answer = client.completions.create(
        model="tiny", prompt="What", max_tokens=4, extra_body={"speculation": False}
    )
    assert answer.usage.completion_tokens_details.rejected_draft_tokens == 0


def test_nothing_of_it_is_there_for_a_later_request(client: openai.OpenAI) -> None:
    text = asked(client).choices[0].message.content
    first = details_of(asked(client, user="ann")).accepted_draft_tokens
    asked(client, user="bob", max_tokens=1, prediction=predicted(text))
    assert details_of(asked(client, user="bob")).accepted_draft_tokens <= first + 2


def test_no_request_changes_the_width_of_steps_where_texts_are_stable() -> None:
    stable = lade.Config(stable_text=True, max_draft_tokens=16)
    changed: tuple[dict[str, Any], ...] = ({"speculates": False}, {"max_draft_tokens": 4})
    for changes in changed:
        with pytest.raises(ApiError, match="the texts are kept stable"):
            config_for(Asked("chat", **changes), stable)
    without = config_for(Asked("chat", speculates=False), lade.Config(lookahead=lade.Lookahead()))
    assert (without.max_draft_tokens, without.lookahead) == (0, None)
