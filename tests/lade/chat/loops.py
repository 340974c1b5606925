"""A way around what Gradio leaves behind."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_loop(act: Callable[[], T]) -> T:
    """Do something while an event loop runs, without which Gradio begins some and closes none."""

    async def acted() -> T:
        return act()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(acted())
    return act()  # Playwright's runs
