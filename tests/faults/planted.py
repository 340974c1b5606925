"""The faults of `planted.txt`, which says how they are written."""

from pathlib import Path
from typing import NamedTuple

_FILE = Path(__file__).with_suffix(".txt")
_CONTRACTS = "tests/lade/test_contracts.py::test_"


class Fault(NamedTuple):
    """A change of one place that makes the product wrong.

    Attributes:
        name: says what is wrong.
        file: path in the checkout.
        breaks: what a user would see.
        tests: files or ids of tests, contracts first; run up to the first that fails.
        changes_text: whether tables that compare texts and outputs with those of `generate` are
            tried first.
        old, new: text that is there exactly once, and what takes its place.
    """

    name: str
    file: str
    breaks: str
    tests: tuple[str, ...]
    changes_text: bool
    old: str
    new: str

    def applied_to(self, text: str) -> str:
        """Return a file's text with the fault.

        Raises:
            ValueError: the text has not the old part exactly once, or the new one is no change.
        """
        found = text.count(self.old)
        if found != 1 or self.old == self.new:
            raise ValueError(f"expected what {self.name!r} replaces once in {self.file}, got {found}")
        return text.replace(self.old, self.new)


def planted() -> list[Fault]:
    """Return all faults."""
    return [*map(_read, _FILE.read_text().split("\n\n")[1:])]


def _read(entry: str) -> Fault:
    begin, *lines = [line for line in entry.strip("\n").split("\n") if line[0] != "#"]
    kind, name, file = begin.split()
    parts = {mark: [line[1:] for line in lines if line[0] == mark] for mark in ":?-+"}
    tests = " ".join(parts["?"]).replace("@", _CONTRACTS).split()
    return Fault(
        name,
        file,
        " ".join(parts[":"]).strip(),
        tuple(tests),
        {"text": True, "other": False}[kind],
        "\n".join(parts["-"]),
        "\n".join(parts["+"]),
    )
