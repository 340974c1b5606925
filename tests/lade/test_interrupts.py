"""Wherever a call is interrupted, all is whole: nothing is left in pool, model, thread or process.

`python -m tests.stress` does the same many times more.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import lade.decoder
from tests.grids import thinned, thinned_rows
from tests.stress.interrupts import (
    Result,
    interrupt_between,
    interrupt_by_signals,
)
from tests.stress.uses import USES


@pytest.fixture(autouse=True)
def no_files_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Count no temporary files of tests that run beside these."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def nothing_was_found(result: Result) -> bool:
    return (result.raised, result.wrong, result.left, result.told) == (0, 0, 0, [])


@pytest.mark.parametrize("name", thinned(USES, "tree", "sampled"))
def test_interrupted_between_functions_nothing_is_left(name: str) -> None:
    result = interrupt_between(12, [name])
    assert nothing_was_found(result), result.told
    assert result.interrupted >= 6  # not all functions are called every time


@pytest.mark.parametrize("num", thinned([12, 40], 12))
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
def test_interrupted_by_a_signal_nothing_is_left(num: int) -> None:
    result = interrupt_by_signals(num, [*USES][:: 1 + (num < 40)])
    assert nothing_was_found(result), result.told
    assert result.interrupted >= num // 2  # on a busy machine, more timers run out too late


def test_what_is_left_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[Any] = []

    class Careless(lade.decoder.Decoder):
        def _prefill(self) -> None:
            body: Any = self._target._target._model.model  # type: ignore[attr-defined]
            handles.append(body.register_forward_hook(lambda *args: args[-1]))
            super()._prefill()

    monkeypatch.setattr("lade.hf.generation.Decoder", Careless)
    result = interrupt_between(3, ["tree"])
    for handle in handles:
        handle.remove()
    assert result.left > 0
    assert "model: hooks differs" in " ".join(result.told)


@pytest.mark.parametrize(("num", "num_interrupted"), thinned_rows([(4, 1), (7, 2)], (4, 1)))
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_that_end_in_the_middle_of_calls_have_their_own_status(
    num: int, num_interrupted: int
) -> None:
    """Of seven ways to end one; a program makes them, for a test is none that may end."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.stress", "processes"]
    command += ["--calls", str(num)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    told = json.loads(done.stdout)
    assert (done.returncode, told["left"], told["told"]) == (0, 0, []), told
    assert (told["calls"], told["interrupted"]) == (num, num_interrupted)
