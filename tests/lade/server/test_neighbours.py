"""What times of a neighbour tell: the tokens of forwards, which those of a key `alone` decide on.

A neighbour times forwards; here it is told their tokens, which is the most that it could learn.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from lade.models.loading import LoadedModel
from lade.server.app import Server
from lade.targets.joint import JoinedCall, JointForwards
from tests.lade.server.serving import asked, client_of, loaded_model, plain_text, serving

# As many tokens in each.
PROMPTS = ["abcabcabcabc", "What-is-this", "~~~~~~~~~~~~"]
KEYS = ["usual", "quiet alone pools=*"]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_model()


@pytest.fixture
def server(loaded: LoadedModel) -> Iterator[Server]:
    with serving(loaded, api_keys=KEYS) as server:
        yield server


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens ran in each forward."""
    found: list[int] = []
    run = JointForwards.__call__

    def noting(self: JointForwards, parts: Sequence[JoinedCall]) -> Any:
        found.append(sum(part.num_tokens for part in parts))
        return run(self, parts)

    monkeypatch.setattr(JointForwards, "__call__", noting)
    return found


def told(server: Server, key: str, prompt: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": prompt}]
    with client_of(server, key) as client:
        return asked(client, messages=messages, **options)


def traces(server: Server, key: str, forwards: list[int]) -> list[tuple[int, ...]]:
    """Return what a neighbour sees of each prompt, asked for the first time and again."""
    seen = []
    for prompt in PROMPTS * 2:
        forwards.clear()
        told(server, key, prompt)
        seen.append(tuple(forwards))
    return seen


def test_forwards_tell_a_text_by_its_drafts(server: Server, forwards: list[int]) -> None:
    assert len({*traces(server, "usual", forwards)}) > 3  # what was asked, and whether before


def test_forwards_of_a_key_alone_tell_its_number_of_tokens_and_no_more(
    server: Server, forwards: list[int]
) -> None:
    (trace,) = {*traces(server, "quiet", forwards)}
    assert len(trace) >= 39
    assert {*trace[1:]} == {1}


def test_answers_of_a_key_alone_are_the_same_and_nothing_is_kept(
    loaded: LoadedModel, server: Server
) -> None:
    messages = [{"role": "user", "content": PROMPTS[0]}]
    for _ in range(2):
        answer = told(server, "quiet", PROMPTS[0], user="a")
        assert answer.choices[0].message.content == plain_text(loaded, messages)
        details = answer.usage.completion_tokens_details
        assert (details.accepted_draft_tokens, details.rejected_draft_tokens) == (0, 0)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert server._pools.store.stats.num_in_memory == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"prediction": {"type": "content", "content": "a"}},
        {"max_draft_tokens": 2},
        {"pools": ["docs"]},
    ],
)
def test_what_a_key_alone_cannot_have_is_refused_by_name(
    server: Server, changes: dict[str, Any]
) -> None:
    (name,) = changes
    with pytest.raises(openai.BadRequestError, match=f"expected no {name}") as raised:
        told(server, "quiet", PROMPTS[0], extra_body=changes)
    assert raised.value.param == name
