"""Whose text a draft comes from: each API key's own, or each user's, and nobody else's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lade
from lade.models import LoadedModel
from tests.lade.apps.server.client import QUESTION, Client, Json, error_of
from tests.lade.apps.server.serving import loaded_model, plain_text, prompt_of, serving

KEYS = ("alice-key pools=docs,more", "bob-key", "boss admin pools=*", "quiet alone pools=docs")
ALICE, BOB, BOSS, QUIET = (line.split()[0] for line in KEYS)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_model()


@pytest.fixture(scope="module")
def learned(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pool of the question and its answer, which nobody is likely to guess."""
    pool = lade.NGramPool()
    token_ids = loaded.tokenizer(prompt_of() + plain_text(loaded))["input_ids"]
    pool.observe(token_ids, pool.open_sequence())
    path = tmp_path_factory.mktemp("learned") / "learned.pool"
    lade.save_pool(pool, path, tokenizer=loaded.tokenizer)
    return path


@pytest.fixture
def client(loaded: LoadedModel, learned: Path) -> Iterator[Client]:
    corpora = {"docs": learned, "secret": learned}
    with serving(loaded, api_keys=KEYS, corpora=corpora) as client:
        yield client


def test_a_secret_is_drafted_for_its_own_key_user_or_salt_alone(client: Client) -> None:
    """What nobody has seen is hardly drafted; what one has seen is, for that one."""
    first = client.drafted(key=ALICE)
    assert client.drafted(key=ALICE) > first + 10
    for others in (
        {"key": BOB},
        {"key": ALICE, "user": "a"},
        {"key": ALICE, "user": "b"},
        {"key": ALICE, "cache_salt": "a"},
        {"key": BOB, "user": "a"},
    ):
        assert client.drafted(**others) <= first + 2
    assert client.drafted(key=ALICE, user="a") > first + 10


def test_prompts_are_kept_for_their_own_user_alone(client: Client) -> None:
    def num_kept(key: str = ALICE, **body: Any) -> int:
        usage = client.ask(key=key, **body)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [num_kept(user="ann"), num_kept(user="bea"), num_kept(), num_kept(BOB)] == [0] * 4
    assert num_kept(user="ann") >= len(prompt_of()) - 1


def test_nothing_of_a_prediction_is_there_for_a_later_request(client: Client) -> None:
    prediction = {"type": "content", "content": client.text(key=BOB)}
    first = client.drafted(user="ann")
    client.ask(user="bea", max_tokens=1, prediction=prediction)
    assert client.drafted(user="bea") <= first + 2


def test_requests_of_nobody_are_kept_for_nobody(loaded: LoadedModel, tmp_path: Path) -> None:
    with serving(loaded, pools=tmp_path) as client:
        first = client.drafted()
        assert client.drafted() <= first + 2  # how long drafts are follows time
        assert [*tmp_path.rglob("*.pool")] == []
        assert client.drafted(user="a") <= first + 2
        assert client.drafted(user="a") > first + 10
        # Without keys, a user who guesses another's name could read that prompt by what was kept.
        assert "prompt_tokens_details" not in client.ask(user="a")["usage"]


def test_one_pool_is_shared_where_that_is_asked_for_or_there_is_one_user(
    loaded: LoadedModel,
) -> None:
    shared: list[Json] = [{"is_for_one": True}, {"api_keys": KEYS, "shares_pool": True}]
    for options in shared:
        with serving(loaded, **options) as client:
            first = client.drafted(key=ALICE)
            assert client.drafted(key=BOB) > first + 10
            is_apart = client.drafted(user="another") <= first + 2  # lengths of drafts follow time
            assert is_apart == ("is_for_one" in options)


def test_pools_outlive_the_server_and_name_nobody(loaded: LoadedModel, tmp_path: Path) -> None:
    def num_kept() -> list[int]:
        """Return the tokens of each pool; how many of them are drafted follows measured times."""
        return sorted(len(lade.NGramPool.load(path)) for path in tmp_path.rglob("*.pool"))

    with serving(loaded, api_keys=KEYS, pools=tmp_path) as client:
        client.ask(user="alice")
    (num_tokens,) = num_kept()
    assert num_tokens >= len(prompt_of()) + 39
    with serving(loaded, api_keys=KEYS, pools=tmp_path) as client:
        client.ask(user="alice")
        client.ask(key=BOB, user="alice")
    assert num_kept() == [num_tokens, 2 * num_tokens]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in files:
        assert path.stat().st_mode & 0o077 == 0
        for word in (b"alice", b"key"):
            assert word not in str(path.relative_to(tmp_path)).encode()
            assert path.suffix == ".pool" or word not in path.read_bytes()


def test_layers_are_drafted_from_and_learn_nothing(loaded: LoadedModel, learned: Path) -> None:
    before = learned.read_bytes()
    with serving(loaded, layers=[learned]) as client:
        assert client.drafted() > 20
        assert client.drafted(user="a") > 20
    assert learned.read_bytes() == before


def test_a_corpus_is_drafted_from_by_requests_that_name_it(
    loaded: LoadedModel, client: Client
) -> None:
    few = client.drafted(key=ALICE, user="a")
    answer = client.ask(key=ALICE, user="b", pools=["docs", "docs"])
    assert answer["choices"][0]["message"]["content"] == plain_text(loaded)
    assert answer["usage"]["completion_tokens_details"]["accepted_draft_tokens"] > few + 10
    assert client.drafted(key=ALICE, user="c") == few  # it learned nothing
    assert client.drafted(key=BOSS, pools=["secret"]) > few + 10


def test_who_may_not_draft_from_a_corpus_is_not_told_whether_there_is_one(client: Client) -> None:
    said = set()
    for key, names in ((BOB, ["docs", "none"]), (ALICE, ["secret", "more", "none"])):
        for name in names:
            body = {"messages": QUESTION, "pools": [name]}
            error = error_of(client.post(json=body, key=key), 404)
            assert (error["param"], error["code"]) == ("pools", "pool_not_found")
            said.add(error["message"].replace(name, "NAME"))
    assert len(said) == 1
    assert client.error(pools=list("123456789"))["param"] == "pools"
    assert client.error(pools=["docs"], speculation=False)["param"] == "pools"


@pytest.mark.parametrize(
    "header", ["none", "alice-key", "Bearer", "Bearer carol-key", "Basic alice-key"]
)
def test_a_wrong_key_opens_nothing(client: Client, header: str) -> None:
    headers = {"authorization": header}
    for answer in (
        client.post(json={"messages": QUESTION}, headers=headers),
        client.get("/v1/models", authorization=header),
        client.get("/metrics", authorization=header),
    ):
        error = error_of(answer, 401)
        assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert client.get("/health", authorization=header).status_code == 200


def test_metrics_are_those_of_the_answers_and_for_administrators(client: Client) -> None:
    """They tell how long the prompts of others are."""
    assert client.get("/metrics", key=ALICE).status_code == 403
    for _ in range(2):
        client.ask(user="a")
    client.ask(key=QUIET)
    client.key = BOSS
    drafted = "vllm:spec_decode_num_"
    accepted = client.metric(f"{drafted}accepted_tokens_total", model_name="tiny")
    name = f"{drafted}accepted_tokens_per_pos_total"
    by_position = [client.metric(name, position=str(place)) for place in range(4)]
    assert sum(by_position) == accepted > 10
    num_drafts = client.metric(f"{drafted}drafts_total")
    assert by_position[0] <= num_drafts <= client.metric(f"{drafted}draft_tokens_total")
    assert client.metric("vllm:generation_tokens_total") == 120
    assert client.metric("vllm:prompt_tokens_total") == 3 * len(prompt_of())
    assert client.metric("vllm:prefix_cache_queries_total") == 2 * len(prompt_of())
    assert client.metric("vllm:prefix_cache_hits_total") >= len(prompt_of()) - 1
    for name in ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency"):
        assert client.metric(f"vllm:{name}_seconds_count") == 3
    assert client.metric("vllm:request_queue_time_seconds_count") == 3
    assert client.metric("lade:requests_total", code="403") == 1
    assert client.metric("lade:pool_in_memory") == 1
    assert client.metric("process_resident_memory_bytes") > 0
    text = client.get("/metrics").text
    assert not any(word in text for word in ("alice", "boss", "What-is"))


def test_of_a_key_alone_nothing_is_drafted_or_kept(loaded: LoadedModel, client: Client) -> None:
    """Its text decides on no time that others may measure."""
    for _ in range(2):
        answer = client.ask(key=QUIET, user="a")
        assert answer["choices"][0]["message"]["content"] == plain_text(loaded)
        assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    prediction: Json = {"prediction": {"type": "content", "content": "a"}}
    for change in (prediction, {"pools": ["docs"]}):
        error = error_of(client.post(json={"messages": QUESTION, **change}, key=QUIET), 400)
        assert [error["param"]] == [*change]


@pytest.mark.parametrize(
    "line", ["key word", "key pools=", "key admin=yes", " ", "one admin", "\ufeffkey", "kéy"]
)
def test_what_is_no_key_or_right_is_refused(loaded: LoadedModel, line: str) -> None:
    match = r"behind key 2$|one character or more|got one again$|in ASCII, got another: key 2$"
    with pytest.raises(ValueError, match=match), serving(loaded, api_keys=["one", line]):
        pass
