"""Pictures of `lade chat --web`, with the default model: `python docs/screenshots.py web`.

Needs the extra `web`, Playwright, and Chromium or Google Chrome. Speeds in them are of the machine
it runs on; none is quoted anywhere.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import expect, sync_playwright

from lade.chat.settings import Settings
from lade.chat.web import Page
from lade.chat.web_sessions import Setup
from lade.models import load

_IMAGES = Path(__file__).parent / "images"
_WIDTH, _HEIGHT = 1180, 760
_QUESTIONS = (
    "Write a Python function that tells whether a number is even.",
    "Now write one that tells whether it is odd.",
)
_RACE = "Write a Python function that adds two numbers. Explain it."
_WAIT_MSEC = 300_000


def main() -> None:
    """Chat and race once, and take a picture of each."""
    loaded = load(dtype="float32")
    page = Page(Setup(loaded, Settings(max_new_tokens=120)))
    address = page.launch()
    with sync_playwright() as playwright:
        names = ("chromium", "chromium-browser", "google-chrome")
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(
            executable_path=next(filter(None, map(shutil.which, names))), args=arguments
        )
        tab = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT})
        tab.set_default_timeout(_WAIT_MSEC)
        tab.goto(address)
        for number, question in enumerate(_QUESTIONS, start=1):
            tab.get_by_label("Message").fill(question)
            tab.get_by_label("Message").press("Enter")
            answers = tab.locator("#history .answer")
            expect(answers).to_have_count(number, timeout=_WAIT_MSEC)
        _take(tab, "chat")
        tab.get_by_role("tab", name="Race").click()
        tab.get_by_label("Question").fill(_RACE)
        tab.get_by_label("Question").press("Enter")
        tab.locator("#race p.status").wait_for()
        _take(tab, "race")
        browser.close()
    page.close()


def _take(tab: Any, name: str) -> None:
    tab.emulate_media(color_scheme="light")
    expect(tab.locator("body.dark")).to_have_count(0)
    tab.screenshot(path=_IMAGES / f"web-{name}.png", animations="disabled")
