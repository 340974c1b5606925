"""What was found of architectures: cells of a table, counts, and the content of a file."""

from collections.abc import Iterable, Sequence
from typing import Any

from tests.support.inside import NO_ROWS, Verification, environment
from tests.support.run import CASES, MAX_DRAFT_TOKENS, Kind, Row, Verdict

_KINDS: tuple[Kind, ...] = (
    *("tree", "chain", "snapshot", "plain"),
    *("not a text model", "cannot build"),
)
HEADINGS = ("model type", "class", "one row", "batch", "MAT", "text", "why no better method")
VERDICTS: tuple[Verdict, ...] = ("exact", "tie", "wrong", "failed")
_MAX_REASON = 120  # characters


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """Return the number of rows in all, of those that speculate, and by kind and verdict."""
    rows = [*rows]
    return {
        "all": len(rows),
        "speculate": sum(row.speculates for row in rows),
        **{kind: sum(row.kind == kind for row in rows) for kind in _KINDS},
        **{verdict: sum(row.verdict == verdict for row in rows) for verdict in VERDICTS},
    }


def summary(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Return the counts of architectures, and those of their variants."""
    return {
        "architectures": counts(row for row in rows if not row.is_variant),
        "variants": counts(row for row in rows if row.is_variant),
    }


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row as text."""
    return (
        row.name,
        row.model,
        row.kind,
        row.batch_verification or "",
        "" if row.mat is None else f"{row.mat:.2f}",
        text_of(row),
        reason_of(row),
    )


def text_of(row: Row) -> str:
    """Return whether the text is that of plain `generate`, with details."""
    found: list[str] = []
    if row.compared or row.failures:
        found.append(row.verdict)
    if row.in_float32:
        everything = row.in_float32 == row.compared
        found[0] += " in float32" if everything else f", {_named(row.in_float32)} in float32"
    found += [f"differs: {difference}" for difference in row.differences]
    found += [f"{case}: {short(error)}" for case, error in row.failures.items()]
    by_type: dict[str, list[str]] = {}  # the numbers in a message may differ from case to case
    for case, error in row.plain_failures.items():
        by_type.setdefault(error.split(":")[0], []).append(case)
    for cases in by_type.values():
        error = short(row.plain_failures[cases[0]])
        found.append(f"plain generate fails on {_named(cases)} ({error})")
    return "; ".join(found)


def reason_of(row: Row) -> str:
    """Return why no better verification was chosen, or why there is no model; each reason once."""
    if row.why_not is not None:
        return short(row.why_not)
    found = _reasons(row.reasons)
    if row.batch_reasons != row.reasons and row.batch_verification != row.kind:
        new = {
            verification: reason
            for verification, reason in row.batch_reasons.items()
            if reason not in (row.reasons.get(verification), NO_ROWS)  # a rule for all models
        }
        found += [f"in a batch, {reason}" for reason in _reasons(new)]
    for reason in dict.fromkeys(row.plain_by_rule.values()):
        cases = [case for case, why in row.plain_by_rule.items() if why == reason]
        found.append(f"plain in {_named(cases)}: {short(reason)}")
    return "; ".join(found)


def _reasons(reasons: dict[Verification, str]) -> list[str]:
    return [
        f"{', '.join(each for each, why in reasons.items() if why == reason)}: {short(reason)}"
        for reason in dict.fromkeys(reasons.values())
    ]


def _named(cases: Sequence[str]) -> str:
    if len(cases) == len(CASES):
        return "everything"
    for label, group in (
        ("padding", [case for case in CASES if min(case.lengths) < case.width]),
        ("batches", [case for case in CASES if len(case.lengths) > 1]),
    ):
        if [*cases] == [case.name for case in group]:
            return label
    return ", ".join(cases)


def short(text: str) -> str:
    """Return the beginning of a text, for a cell."""
    return text if len(text) <= _MAX_REASON else f"{text[: _MAX_REASON - 1].rstrip()}…"


def content_of(rows: Sequence[Row], seed: int, stopped: bool) -> dict[str, Any]:
    """Return what a result file has: the counts, and the table's rows."""
    settings = {
        "seed": seed,
        "max_draft_tokens": MAX_DRAFT_TOKENS,
        "cases": {
            case.name: {"prompts": [*case.lengths], "max_new_tokens": case.num_new}
            for case in CASES
        },
        "interrupted": stopped,
    }
    return {
        "environment": environment(),
        "settings": settings,
        "summary": summary(rows),
        "headings": [*HEADINGS],
        "rows": [[*cells(row)] for row in rows],
    }
