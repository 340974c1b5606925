"""Wherever a call is interrupted, all is whole: nothing is left in pool, model, thread or process.

`python -m tests.stress` does the same many times more.
"""

import signal
import tempfile
from pathlib import Path

import pytest

from tests.grids import thinned
from tests.stress.interrupts import (
    Line,
    Result,
    interrupt_by_signals,
    interrupt_lines,
    interrupt_threads,
)
from tests.stress.uses import USES

# Each use leaves out the lines of those before, and the count of all lines is behind all uses.
pytestmark = pytest.mark.xdist_group("interrupts")

_KNOWN: set[Line] = set()  # lines at which a call was interrupted already
_DONE: set[str] = set()  # uses


@pytest.fixture(autouse=True)
def no_files_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Count no temporary files of tests that run beside these."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def nothing_was_found(result: Result) -> bool:
    return (result.raised, result.wrong, result.left, result.told) == (0, 0, 0, [])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", USES)
def test_interrupted_at_any_line_nothing_is_left(name: str) -> None:
    result = interrupt_lines([name], answer_every=12, later_every=10, line_every=5, known=_KNOWN)
    _DONE.add(name)
    assert nothing_was_found(result), result.told
    assert result.interrupted >= 0.8 * result.calls  # some lines are not run every time


@pytest.mark.parametrize("num", thinned([12, 40], 12))
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
def test_interrupted_by_a_signal_nothing_is_left(num: int) -> None:
    result = interrupt_by_signals(num, [*USES])
    assert nothing_was_found(result), result.told
    assert result.interrupted >= num // 2  # on a busy machine, more timers run out too late


@pytest.mark.exhaustive
def test_interrupted_by_another_thread_nothing_is_left() -> None:
    result = interrupt_threads(80, ["tree", "chain", "strings"])
    assert nothing_was_found(result), result.told
    assert result.interrupted > 65


@pytest.mark.exhaustive
def test_so_many_lines_were_interrupted() -> None:
    """Behind the others: of all lines of the two packages that are run at all, most."""
    if len(_DONE) < len(USES):
        pytest.skip("not all of the others were run")
    assert len(_KNOWN) > 800
