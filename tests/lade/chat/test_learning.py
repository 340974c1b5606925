"""Learning in the pauses of a chat: while there is one, and no longer."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lade.chat import learning
from lade.chat.learning import IdleLearner
from lade.prewarming import tables
from lade.prewarming.run import prewarm as usual_prewarm
from tests.lade.tiny import tiny_model


def test_the_table_grows_while_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "_FIRST_SEC", 0.2)
    monkeypatch.setattr(learning, "_LEAST_SEC", 0.2)
    told: list[str] = []
    learner = IdleLearner(tiny_model(vocab_size=256, eos_token_id=None), told.append)
    has_run = threading.Event()

    def prewarm(*args: Any, **options: Any) -> Any:
        try:
            return usual_prewarm(*args, **options)
        finally:
            has_run.set()

    monkeypatch.setattr(learning, "prewarm", prewarm)
    with learner.pause(0.0):  # nothing was answered yet
        assert not has_run.is_set()
    with learner.pause(1.0):
        assert has_run.wait(60)
    assert told == []
    assert len([*tables.tables_folder().glob("*.safetensors")]) == 1


def test_a_question_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    seconds: list[float] = []

    def prewarm(model: Any, sec: float, *, progress: Any) -> None:
        seconds.append(sec)
        while True:  # as long as nobody asks
            begun.set()
            progress(SimpleNamespace(made=SimpleNamespace(has_prefix=True)))

    monkeypatch.setattr(learning, "prewarm", prewarm)
    learner = IdleLearner(None, pytest.fail)
    for _ in range(2):
        with learner.pause(100.0):
            assert begun.wait(60)
        begun.clear()
    assert seconds == [10.0, 5.0]  # the first time to find the prefix


def test_a_thread_that_cannot_start_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: Any, **options: Any) -> None:
        raise RuntimeError("can't start new thread")

    told: list[str] = []
    with monkeypatch.context() as patch:
        for name in ("_start_new_thread", "_start_joinable_thread"):  # up to Python 3.12, and now
            patch.setattr(threading, name, start, raising=False)
        with IdleLearner(None, told.append).pause(1.0):
            pass
    assert told == ["nothing more is learned: can't start new thread"]


def test_a_failure_is_told_once_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    calls: list[int] = []

    def prewarm(*args: Any, **options: Any) -> None:
        calls.append(1)
        raise OSError("disk full")

    monkeypatch.setattr(learning, "prewarm", prewarm)
    learner = IdleLearner(None, told.append)
    for _ in range(3):
        with learner.pause(1.0):
            pass
    assert told == ["nothing more is learned: OSError: disk full"]
    assert len(calls) == 1
