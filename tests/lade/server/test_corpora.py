"""Corpora: who may draft from them, who changes them, and that they change no text."""

import gc
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

import lade
from lade.cli import serve
from lade.cli.serve import corpora_of, read_corpora
from lade.models.loading import LoadedModel
from lade.server import corpora
from lade.server.app import Server
from lade.server.keys import ApiKeys
from lade.server.options import ServerOptions
from tests.lade.server.serving import (
    asked,
    client_of,
    loaded_model,
    plain_text,
    serving,
    wait_until,
)

KEYS = ["reader pools=docs,more", "other", "any pools=*", "boss admin"]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_model()


@pytest.fixture(scope="module")
def text(loaded: LoadedModel) -> str:
    """A question and its answer, which nobody is likely to guess."""
    return "<user>What-is-a-pool?<assistant>" + plain_text(loaded)


@pytest.fixture
def server(loaded: LoadedModel) -> Iterator[Server]:
    with serving(loaded, api_keys=KEYS) as server:
        yield server


def put(server: Server, name: str, text: Any, key: str = "boss") -> Any:
    with client_of(server, key) as client:
        return client.put(f"/pools/{name}", cast_to=object, body={"text": text})


def delete(server: Server, name: str, key: str = "boss") -> Any:
    with client_of(server, key) as client:
        return client.delete(f"/pools/{name}", cast_to=object)


def listed(server: Server, key: str = "boss") -> list[Mapping[str, Any]]:
    with client_of(server, key) as client:
        told: Any = client.get("/pools", cast_to=object)
        return list(told["data"])


def drafted(server: Server, key: str, *names: str, **options: Any) -> tuple[str, int]:
    """Ask; return the answer and how many of its tokens were drafted."""
    with client_of(server, key) as client:
        answer = asked(client, extra_body={"pools": [*names]}, **options)
    usage = answer.usage.completion_tokens_details
    return answer.choices[0].message.content, usage.accepted_draft_tokens


def test_a_corpus_is_drafted_from_by_requests_that_name_it(
    loaded: LoadedModel, server: Server, text: str
) -> None:
    without, few = drafted(server, "reader", user="a")
    told = put(server, "docs", ["What-else", text])
    assert told["num_tokens"] >= len(text)
    assert told == listed(server)[0]
    found, many = drafted(server, "reader", "docs", user="b")
    assert many > few + 10
    assert found == without == plain_text(loaded)
    assert drafted(server, "reader", user="c") == (without, few)  # it learned nothing
    assert drafted(server, "any", "docs", "docs")[1] == many


def test_who_may_not_draft_from_a_corpus_is_not_told_whether_there_is_one(
    server: Server, text: str
) -> None:
    put(server, "docs", text)
    put(server, "secret", text)
    for key, names in (
        ("other", ["docs", "secret", "none"]),
        ("reader", ["secret", "more", "none"]),
        ("boss", ["docs"]),
    ):
        said = set()
        for name in names:
            with pytest.raises(openai.NotFoundError) as raised:
                drafted(server, key, name)
            assert raised.value.param == "pools"
            assert raised.value.code == "pool_not_found"
            assert repr(name) in raised.value.message
            said.add(raised.value.message.replace(name, "NAME"))
        assert len(said) == 1


@pytest.mark.parametrize("key", ["reader", "any"])
def test_only_administrators_list_add_and_delete(server: Server, text: str, key: str) -> None:
    put(server, "docs", text)
    for attempt in (
        lambda: put(server, "docs", "other-text", key),
        lambda: delete(server, "docs", key),
        lambda: listed(server, key),
    ):
        with pytest.raises(openai.PermissionDeniedError, match="the right admin"):
            attempt()
    assert [each["id"] for each in listed(server)] == ["docs"]


def test_without_keys_all_name_corpora_and_nobody_changes_them(
    loaded: LoadedModel, text: str
) -> None:
    pool = lade.NGramPool()
    pool.observe(loaded.tokenizer(text)["input_ids"], pool.open_sequence())
    with serving(loaded, corpora={"docs": pool}) as server:
        assert drafted(server, "none", "docs")[1] > drafted(server, "none")[1] + 10
        with pytest.raises(openai.PermissionDeniedError):
            put(server, "docs", text)


def test_what_was_deleted_is_nowhere(server: Server, text: str) -> None:
    put(server, "docs", text)
    _, many = drafted(server, "reader", "docs", user="a", max_tokens=20)
    (held,) = server._pools.corpora._pools.values()
    pool = weakref.ref(held)
    del held
    assert delete(server, "docs") == {"id": "docs", "object": "pool", "deleted": True}

    def is_gone() -> bool:
        gc.collect()
        return pool() is None

    wait_until(is_gone)  # the thread that answered may not have ended yet
    assert listed(server) == []
    with pytest.raises(openai.NotFoundError):
        drafted(server, "reader", "docs")
    with pytest.raises(openai.NotFoundError, match="expected a pool, got 'docs'"):
        delete(server, "docs")
    _, few = drafted(server, "reader", user="b", max_tokens=20)
    put(server, "docs", "something-else")  # takes its place
    assert drafted(server, "reader", "docs", user="c", max_tokens=20)[1] <= few + 2 < many


def test_corpora_are_bounded(
    loaded: LoadedModel, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpora, "_MOST", 2)
    with serving(loaded, api_keys=KEYS) as server:
        for name in ("a", "b", "b"):
            put(server, name, text)
        with pytest.raises(openai.APIStatusError, match="expected at most 2 pools") as raised:
            put(server, "c", text)
        assert raised.value.status_code == 413
    with serving(loaded, api_keys=KEYS, corpora_bytes=1000) as server:
        with pytest.raises(openai.APIStatusError, match="of 1,000 bytes together"):
            put(server, "a", text)
        assert listed(server) == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("docs", "", "one token or more"),
        ("docs", [], "one token or more"),
        ("docs", 3, "text"),
        ("a b", "text", "expected the name of a pool"),
        ("a/b", "text", "expected the name of a pool"),
        ("x" * 65, "text", "expected the name of a pool"),
    ],
)
def test_what_is_no_corpus_is_refused(server: Server, name: str, content: Any, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        put(server, name, content)
    assert listed(server) == []


def test_a_request_names_few_corpora_and_no_less_than_it_drafts_from(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        drafted(server, "any", *map(str, range(9)))
    assert raised.value.param == "pools"
    with client_of(server, "any") as client, pytest.raises(openai.BadRequestError) as raised:
        asked(client, extra_body={"pools": ["docs"], "speculation": False})
    assert raised.value.param == "pools"


def test_rights_are_read_with_keys() -> None:
    keys = ApiKeys(KEYS)
    found = {
        name: keys.identify({"authorization": f"Bearer {name}"})
        for name in ("reader", "other", "any", "boss")
    }
    assert {name: owner.corpora for name, owner in found.items()} == {
        "reader": {"docs", "more"},
        "other": set(),
        "any": None,
        "boss": set(),
    }
    assert [name for name, owner in found.items() if owner.administers] == ["boss"]
    for line in ("key word", "key pools=", "key admin=yes"):
        with pytest.raises(ValueError, match=r"behind key 2$"):
            ServerOptions(api_keys=["one", line])


def test_what_a_corpus_leaves_out_is_told(
    loaded: LoadedModel, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(serve, "note", said.append)
    monkeypatch.setattr(serve, "_MOST_TOKENS", 16)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_bytes(b"\x00\xff" * 999)
    read_corpora({"docs": tmp_path}, loaded)
    num_tokens = len(loaded.tokenizer(text)["input_ids"])
    assert said == [
        "left out of the corpus docs: binary: 1",
        f"the corpus docs holds the last 16 of {num_tokens} tokens",
    ]


def test_corpora_of_the_start_are_pools_texts_and_folders(
    loaded: LoadedModel, text: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text(text)
    pool = lade.NGramPool()
    pool.observe(loaded.tokenizer(text)["input_ids"], pool.open_sequence())
    lade.save_pool(pool, tmp_path / "b.pool", tokenizer=loaded.tokenizer)
    paths = {"a": "folder", "b": "b.pool", "c": "folder/a.txt"}
    named = corpora_of([f"{name}={tmp_path / path}" for name, path in paths.items()])
    pools = read_corpora(named, loaded)
    with serving(loaded, corpora=pools) as server:
        few = drafted(server, "none")[1]
        for name in paths:
            assert drafted(server, "none", name)[1] > few + 10
    (tmp_path / "folder" / "a.txt").write_text("")
    with pytest.raises(ValueError, match="expected text in"):
        read_corpora(named, loaded)
    for wrong in ("a", f"={tmp_path}", "a=", "a=/no/such/file"):
        with pytest.raises(ValueError, match="expected"):
            corpora_of([wrong])
    with pytest.raises(ValueError, match="once for each name"):
        corpora_of([f"a={tmp_path}"] * 2)
