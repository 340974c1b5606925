"""Defects of the engine itself, which tests put there: nobody waits for ever, and it goes on."""

import threading
from typing import Any

import pytest

import lade
from tests.lade.both import ONE
from tests.lade.engine.test_engine import (
    CODE,
    GREEDY,
    LONG,
    SAMPLED,
    SEC,
    expected,
    forked,
    needs_fork,
    once,
    texts,
)
from tests.lade.shared import shared_model
from tests.lade.tiny import draft_of


@pytest.mark.parametrize("kind", [SystemExit, RuntimeError])
def test_a_shared_forward_that_fails_once_fails_nobody(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    import lade.targets.joint as joint

    model, run, num_run = shared_model(), joint.run_as_one, 0

    def failing(parts: Any) -> Any:
        nonlocal num_run
        num_run += 1
        if num_run == 2:
            raise kind("once")
        return run(parts)

    monkeypatch.setattr(joint, "run_as_one", failing)
    with lade.Batcher(model) as batcher:
        assert texts(*(batcher.submit(ONE, **GREEDY) for _ in range(4))) == [expected(model)] * 4
    assert num_run > 2
    assert batcher.why_not_joint is None


class Silent(lade.Drafter):
    """Drafts nothing, and notes that a call has cleaned up."""

    def __init__(self, cleaned: list[int]) -> None:
        self._cleaned = cleaned

    def open(self, prompt_ids: Any) -> int:
        return 0

    def draft(self, sequence: int, committed: Any, max_draft_tokens: int) -> lade.Draft:
        return draft_of([], [])

    def observe(self, sequence: int, token_ids: Any) -> None:
        pass

    def close(self, sequence: int) -> None:
        self._cleaned.append(sequence)


@pytest.mark.parametrize("place", ["_admit", "_resume", "_forward"])
def test_after_a_defect_all_calls_fail_and_the_next_one_works(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lade.engine.engine import Engine

    model, own, num_left = shared_model(), getattr(Engine, place), 15
    cleaned: list[int] = []

    def defective(self: Any, *args: Any) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            raise ZeroDivisionError("a defect")
        return own(self, *args)

    want, sampled = expected(model), expected(model, 3, **SAMPLED)
    with lade.Batcher(model, max_batch_size=3) as batcher:
        batcher.submit(ONE, **GREEDY).result(SEC)
        monkeypatch.setattr(Engine, place, defective)
        requests = [batcher.submit(ONE, **LONG, drafter=Silent(cleaned)) for _ in range(5)]
        for request in requests:
            with pytest.raises(lade.LadeError, match=r"bug in lade.*ZeroDivisionError: a defect"):
                request.result(SEC)
        assert num_left <= 0
        after = [batcher.submit(ONE, **GREEDY), batcher.submit(ONE, seed=3, **SAMPLED)]
        assert texts(*after) == [want, sampled]
        assert batcher.engine.num_running + batcher.engine.num_waiting() == 0
    assert cleaned  # what ran was broken off in order
    assert "ended all its calls" in caplog.text


@needs_fork
def test_a_child_of_a_process_that_was_not_at_rest_says_so(
    monkeypatch: pytest.MonkeyPatch, single_thread: None
) -> None:
    monkeypatch.setattr("lade.engine.processes._REST_SEC", 0.05)
    model, reached, ended = shared_model(), threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        ended.wait(SEC)

    with lade.Batcher(model) as batcher:
        request = batcher.submit(ONE, **GREEDY, **CODE["processor"](once(wait)))
        reached.wait(SEC)
        with pytest.raises(lade.LadeError, match=r"forked during a forward pass.*spawn"):
            forked(lambda: batcher.submit(ONE, **GREEDY))
        ended.set()
        assert texts(request) == [expected(model)]
