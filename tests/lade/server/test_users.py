"""Whose text a draft comes from: each API key's own, or each user's, and nobody else's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from lade.models.loading import LoadedModel
from lade.server.app import Server
from tests.lade.server.serving import (
    NAME,
    QUESTION,
    asked,
    client_of,
    loaded_model,
    plain_text,
    post,
    serving,
)

KEYS = ("alice-key", "bob-key")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_model()


@pytest.fixture
def server(loaded: LoadedModel, tmp_path: Path) -> Iterator[Server]:
    with serving(loaded, api_keys=KEYS, pools=tmp_path / "pools") as server:
        yield server


def num_accepted(server: Server, key: str, **options: Any) -> int:
    """Ask, and return how many tokens of the answer were drafted."""
    with client_of(server, key) as client:
        usage = asked(client, **options).usage
    accepted: int = usage.completion_tokens_details.accepted_draft_tokens
    rejected = usage.completion_tokens_details.rejected_draft_tokens
    assert 0 <= accepted <= usage.completion_tokens
    assert rejected >= 0
    return accepted


def test_a_secret_is_drafted_for_its_own_key_alone(server: Server) -> None:
    """What nobody has seen is hardly drafted; what one has seen is, for that one."""
    first = num_accepted(server, KEYS[0])
    again = num_accepted(server, KEYS[0])
    assert again > first + 10
    assert num_accepted(server, KEYS[1]) == first


def test_users_and_salts_of_one_key_have_pools_of_their_own(server: Server) -> None:
    first = num_accepted(server, KEYS[0], user="a")
    assert num_accepted(server, KEYS[0], user="a") > first + 10
    assert num_accepted(server, KEYS[0], user="b") == first
    assert num_accepted(server, KEYS[0], extra_body={"cache_salt": "a"}) == first
    assert num_accepted(server, KEYS[1], user="a") == first


def test_requests_of_nobody_are_kept_for_nobody(loaded: LoadedModel, tmp_path: Path) -> None:
    with serving(loaded, pools=tmp_path) as server:
        first = num_accepted(server, "none")
        assert num_accepted(server, "none") == first
        assert [*tmp_path.rglob("*.pool")] == []
        assert num_accepted(server, "none", user="a") == first
        assert num_accepted(server, "none", user="a") > first + 10


def test_one_pool_is_shared_where_it_is_asked_for(loaded: LoadedModel) -> None:
    with serving(loaded, api_keys=KEYS, shares_pool=True) as server:
        first = num_accepted(server, KEYS[0])
        assert num_accepted(server, KEYS[1]) > first + 10


@pytest.mark.parametrize(
    "header", ["", "alice-key", "Bearer", "Bearer carol-key", "Basic alice-key"]
)
def test_a_wrong_key_opens_nothing(server: Server, header: str) -> None:
    body = {"model": NAME, "messages": QUESTION}
    refused = post(server, json=body, headers={"authorization": header})
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert refused.json()["error"]["type"] == "authentication_error"
    with client_of(server, "wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_pools_outlive_the_server_and_name_nobody(loaded: LoadedModel, tmp_path: Path) -> None:
    with serving(loaded, api_keys=KEYS, pools=tmp_path) as server:
        first = num_accepted(server, KEYS[0], user="alice")
    with serving(loaded, api_keys=KEYS, pools=tmp_path) as server:
        assert num_accepted(server, KEYS[0], user="alice") > first + 10
        assert num_accepted(server, KEYS[1], user="alice") == first
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.suffix == ".pool" for path in files) == 2
    for path in files:
        assert path.stat().st_mode & 0o077 == 0
        for word in (b"alice", b"key"):
            assert word not in str(path.relative_to(tmp_path)).encode()
            assert path.suffix == ".pool" or word not in path.read_bytes()


def test_layers_are_drafted_from_and_learn_nothing(loaded: LoadedModel, tmp_path: Path) -> None:
    import lade

    pool = lade.NGramPool()
    answer = loaded.tokenizer(plain_text(loaded))["input_ids"]
    prompt = "<user>What-is-a-pool?<assistant>"
    pool.observe([*loaded.tokenizer(prompt)["input_ids"], *answer], pool.open_sequence())
    layer = tmp_path / "layer.pool"
    lade.save_pool(pool, layer, tokenizer=loaded.tokenizer)
    before = layer.read_bytes()
    with serving(loaded, layers=[layer]) as server:
        assert num_accepted(server, "none") > 20
        assert num_accepted(server, "none", user="a") > 20
    assert layer.read_bytes() == before
