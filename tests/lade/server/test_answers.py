"""What clients of OpenAI ask for is what they get: texts are those of plain generate."""

from collections.abc import Iterator

import openai
import pytest

from lade.models.loading import LoadedModel
from lade.server.app import Server
from tests.lade.server.serving import (
    asked,
    client_of,
    loaded_model,
    plain_text,
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


def test_an_answer_is_plain_generates(loaded: LoadedModel, client: openai.OpenAI) -> None:
    answer = asked(client)
    assert answer.choices[0].message.content == plain_text(loaded)
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == "tiny"
    assert text_of(asked(client, stream=True)) == plain_text(loaded)


@pytest.mark.parametrize("seed", [3, 4, 2**40])
def test_the_same_seed_gives_the_same_text(
    loaded: LoadedModel, client: openai.OpenAI, seed: int
) -> None:
    expected = plain_text(loaded, seed=seed, temperature=0.8, top_p=0.9)
    options = {"seed": seed, "temperature": 0.8, "top_p": 0.9}
    assert asked(client, **options).choices[0].message.content == expected
    assert text_of(asked(client, stream=True, **options)) == expected
