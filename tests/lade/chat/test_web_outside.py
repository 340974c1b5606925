"""The page's server as anybody who reaches its port meets it, without a browser."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lade.chat.settings import Settings
from lade.models.loading import LoadedModel
from tests.lade.chat.conftest import tokenizer_with
from tests.lade.chat.loops import in_loop
from tests.lade.tiny import tiny_model

pytest.importorskip("gradio", reason='needs the extra: pip install "lade-decoding[web]"')

from lade.chat.web import Page
from lade.chat.web_sessions import Setup

pytestmark = pytest.mark.xdist_group("web")  # whoever looks for a free port does so alone


def launched(**options: Any) -> tuple[Page, str]:
    loaded = LoadedModel(tiny_model(vocab_size=256), tokenizer_with(), "tiny")
    page = in_loop(lambda: Page(Setup(loaded, Settings())))
    return page, in_loop(lambda: page.launch(**options)).rstrip("/")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    page, address = launched()
    yield address
    page.close()


def test_the_page_is_there(address: str) -> None:
    assert httpx.get(f"{address}/").status_code == 200
    assert httpx.get(f"{address}/config").status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/gradio_api/deep_link?session_hash=abc"),
        ("GET", "/config?deep_link=abc"),
        ("GET", "/?deep_link=abc"),
        ("POST", "/gradio_api/upload"),
        ("GET", "/gradio_api/file=/etc/passwd"),
        ("GET", "/gradio_api/proxy=http://localhost"),
        ("GET", "/gradio_api/openapi.json"),
        ("GET", "/gradio_api/info"),
        ("GET", "/monitoring"),
        ("POST", "/gradio_api/component_server"),
        ("GET", "/gradio_api/run-history/records"),
        ("DELETE", "/gradio_api/queue/join"),
    ],
)
def test_nothing_else_of_gradio_is(address: str, method: str, path: str) -> None:
    assert httpx.request(method, address + path).status_code == 404


def test_bodies_are_bounded(address: str) -> None:
    large = httpx.post(f"{address}/gradio_api/queue/join", content=b"{" + b" " * 2**20)
    assert large.status_code == 413
    pieces = iter([b"{", b"}"])
    assert httpx.post(f"{address}/gradio_api/queue/join", content=pieces).status_code == 413


def test_other_names_of_the_server_are_not_answered(address: str) -> None:
    port = address.rpartition(":")[2]
    for host, status in (("localhost", 200), (f"127.0.0.1:{port}", 200), ("evil.example", 421)):
        assert httpx.get(f"{address}/config", headers={"host": host}).status_code == status


def test_a_password_keeps_others_off() -> None:
    page, address = launched(password="correct horse")
    try:
        assert httpx.get(f"{address}/config").status_code == 401
        join = f"{address}/gradio_api/queue/join"
        assert httpx.post(join, json={"fn_index": 0, "session_hash": "a"}).status_code == 401
        with httpx.Client(base_url=address, follow_redirects=True) as visitor:
            wrong = {"username": "ann", "password": "correct"}
            assert visitor.post("/login", data=wrong).status_code == 400
            assert visitor.get("/config").status_code == 401
            assert visitor.post("/login", data=wrong | {"password": "correct horse"}).is_success
            assert visitor.get("/config").status_code == 200
    finally:
        page.close()
