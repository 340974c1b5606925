"""Calls in threads of their own."""

import threading
from collections.abc import Callable
from typing import Any


def in_threads(*calls: Callable[[], Any], seconds: float | None = 30) -> list[BaseException]:
    """Return what the calls raise, once all are done; each has so many seconds, None for no end."""
    errors: list[BaseException] = []

    def work(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive()
    return errors
