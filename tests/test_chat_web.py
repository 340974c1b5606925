"""`examples/chat_web.py` in a real browser: answers, a race, and what tabs keep to themselves."""

import asyncio
import os
import runpy
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lade.models import LoadedModel
from tests.lade.tiny import byte_tokenizer, tiny_model

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PAGE = str(Path(__file__).parents[1] / "examples" / "chat_web.py")
_WAIT_MSEC = 90_000  # a busy machine takes its time

pytestmark = [
    pytest.mark.exhaustive,  # it imports Gradio and starts a browser
    pytest.mark.xdist_group("web"),  # one browser, one server
    # Gradio's statistics of requests, with pandas 3.
    pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting' is deprecated"),
    pytest.mark.filterwarnings("ignore:The copy keyword is deprecated"),
]


@pytest.fixture
def served() -> Iterator[tuple[Any, str]]:
    """A page and its address."""
    pytest.importorskip("gradio", reason='needs: pip install ".[web]"')
    names = runpy.run_path(PAGE)
    model = tiny_model(vocab_size=256, eos_token_id=None, max_position_embeddings=2**15)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE

    async def begin() -> tuple[Any, str]:
        page = names["Page"](LoadedModel(model, tokenizer, "tiny"), 48)
        return page, page.launch()

    page, address = asyncio.run(begin())  # without a loop, Gradio begins some and closes none
    yield page, address
    page.close()


@pytest.fixture
def open_tab(served: tuple[Any, str]) -> Iterator[Callable[[], Any]]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs: pip install playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("needs a browser: apt-get install chromium, or Google Chrome")
    _, address = served
    asked: list[str] = []
    faults: list[str] = []
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has none as root
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser, args=arguments)

        def make() -> Any:
            tab = started.new_page()
            tab.set_default_timeout(_WAIT_MSEC)
            tab.on("request", lambda request: asked.append(request.url))
            tab.on("pageerror", lambda error: faults.append(str(error)))
            tab.goto(address)
            return tab

        sync_api.expect.set_options(timeout=_WAIT_MSEC)
        yield make
        started.close()
    assert faults == []
    assert [url for url in asked if not url.startswith((address, "data:"))] == []


def test_a_race_ends_where_an_answer_repeats_itself() -> None:
    pytest.importorskip("gradio", reason='needs: pip install ".[web]"')
    stop = runpy.run_path(PAGE)["_Stop"](threading.Event(), 3)
    texts = [torch.tensor([[1, 2, 3, *[5, 6] * 200]])[:, : 3 + num] for num in range(1, 400)]
    assert [stop(text, None).all().item() for text in texts].index(True) == 320 - 1
    assert stop.has_loop


def test_tabs_chat_race_and_share_nothing(
    open_tab: Callable[[], Any], served: tuple[Any, str]
) -> None:
    from playwright.sync_api import expect

    page, _ = served
    first, second = open_tab(), open_tab()
    expect(first.locator("#model")).to_contain_text("tiny on this machine")
    expect(first.get_by_text("Why is the sky blue?").first).to_be_visible()
    for tab, question in ((first, "alpha <b>bold</b>"), (second, "omega")):
        tab.locator("#message textarea").fill(question)
        tab.locator("#message textarea").press("Enter")
        expect(tab.locator("#figures")).to_contain_text("48 tokens, ")
        expect(tab.locator("#figures")).to_contain_text(" tokens a step")
    assert "alpha" not in second.locator("#chat").text_content()
    one, other = page.tabs.values()
    assert one.pool is not other.pool
    first.locator("#message textarea").fill("and then?")
    first.locator("#message textarea").press("Enter")
    expect(first.locator("#figures")).to_contain_text("tokens of the prompt not run again")
    assert len(one.pool) > len(other.pool)

    second.get_by_role("tab", name="Race").click()
    second.get_by_label("Question").fill("abcabc")
    second.get_by_label("Question").press("Enter")
    expect(second.locator("#race")).to_contain_text(" times as fast. The texts are the same.")
    expect(second.get_by_text("plain generate", exact=True).first).to_be_visible()
    assert second.locator("#plain").text_content() == second.locator("#lade").text_content()

    # A tab that is closed leaves nothing, and what runs for it ends.
    first.get_by_role("button").first.click()  # the options
    first.get_by_role("spinbutton").last.fill("4096")
    first.locator("#message textarea").fill("a long one")
    first.locator("#message textarea").press("Enter")
    first.close()
    second.close()
    for _ in range(300):
        if not page.tabs:
            break
        page.batcher.run(lambda: None)
        time.sleep(0.1)
    assert not page.tabs
    assert one.stopped.is_set()
