"""One stage of the benchmark: its findings so far, and what it left out and why.

Next file: `bandwidth.py`.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from lade.errors import in_one_line

NO_TIME = "no time was left for it (--minutes)"

_NUM_DIGITS = 6


@dataclass
class Stage:
    """A stage, filled as it runs, so that nothing is lost by what comes after."""

    name: str
    shape: str | None  # the model's, if it has one
    ends_at: float  # by `perf_counter`; no part begins later
    tell: Callable[["Stage"], None]  # called whenever something is begun or found
    doing: str = ""
    model: dict[str, Any] = field(default_factory=dict)  # what was measured, ready for JSON
    rows: list[dict[str, Any]] = field(default_factory=list)  # ready for JSON
    left_out: dict[str, str] = field(default_factory=dict)  # what was not run, and why
    warnings: list[str] = field(default_factory=list)  # lade's own
    failure: str | None = None  # what ended it early
    last_words: list[str] = field(default_factory=list)  # of a process that crashed
    traceback: str = ""  # of the failure; to print, not to save, as it has paths
    sec: float = 0.0

    @property
    def title(self) -> str:
        """The stage in words."""
        return self.name if self.shape is None else f"{self.name} {self.shape}"

    @property
    def has_time(self) -> bool:
        """Whether another part may begin."""
        return perf_counter() < self.ends_at

    def run(self, work: Callable[["Stage"], None]) -> "Stage":
        """Do the work of the stage; an error in it ends this stage and no other."""
        self.say(self.title)
        start = perf_counter()
        try:
            if not self.has_time:
                self.leave_out("all", NO_TIME)
            else:
                with self.part("the rest"):
                    work(self)
        except Exception as error:
            self.failure = in_one_line(error)
            self.traceback = traceback.format_exc()
        finally:
            self.sec = perf_counter() - start
            self.tell(self)
        return self

    def say(self, what: str) -> None:
        """Tell what is being done."""
        self.doing = what
        self.tell(self)

    def add(self, *rows: dict[str, Any]) -> None:
        """Add findings."""
        self.rows += rows
        self.tell(self)

    def replace(self, rows: list[dict[str, Any]]) -> None:
        """Replace the findings by better founded ones."""
        self.rows = rows
        self.tell(self)

    def leave_out(self, what: str, reason: str) -> None:
        """Note what is not run, and why."""
        self.left_out[what] = reason
        self.tell(self)

    def may_begin(self, what: str) -> bool:
        """Return whether there is time for a part of the stage; if not, note it."""
        if self.has_time:
            self.say(f"{self.title}: {what}")
            return True
        self.leave_out(what, NO_TIME)
        return False

    @contextmanager
    def part(self, what: str, *others: type[Exception]) -> Iterator[None]:
        """Leave out a part that runs out of device memory or raises one of `others`."""
        kinds: tuple[type[Exception], ...] = (torch.OutOfMemoryError, *others)
        try:
            yield
        except kinds as error:
            self.leave_out(what, _reason(error))
            torch.cuda.empty_cache()  # does nothing without a GPU

    def as_json(self) -> dict[str, Any]:
        """Return all findings, ready for JSON."""
        return {
            "stage": self.name,
            "shape": self.shape,
            "sec": round(self.sec, 3),
            "model": _shortened(self.model),
            "rows": [_shortened(row) for row in self.rows],
            "left_out": self.left_out,
            "warnings": self.warnings,
            "failure": self.failure,
            "last_words": self.last_words,
        }

    def as_message(self) -> dict[str, Any]:
        """Return all that another process is to know of it, ready for JSON."""
        return {**self.as_json(), "doing": self.doing, "traceback": self.traceback}

    def hear(self, message: dict[str, Any]) -> None:
        """Take over what `as_message` of this stage returned in its process."""
        for name in ("model", "rows", "left_out", "warnings", "failure", "doing", "traceback"):
            setattr(self, name, message[name])
        self.tell(self)


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its floats rounded to `_NUM_DIGITS` significant digits."""
    return {
        name: float(f"{value:.{_NUM_DIGITS}g}") if isinstance(value, float) else value
        for name, value in row.items()
    }


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        # Further sentences count the memory of other processes and name settings of torch.
        message = in_one_line(error).removeprefix(f"{type(error).__name__}: ")
        return ". ".join(message.split(". ")[:2]).rstrip(".")
    return in_one_line(error)
