"""Rows as JSON for a file, and several runs as one Markdown document."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from packaging import version

from lade.bench.environment import environment
from lade.config import Execution, Verification
from tests.support.run import CASES, MAX_DRAFT_TOKENS, Difference, Kind, Row, Verdict

_KINDS: tuple[Kind, ...] = (
    *("tree", "chain", "snapshot", "plain"),
    *("not a text model", "cannot build"),
)
_HEADINGS = ("model type", "class", "one row", "batch", "MAT", "text", "why no better method")
_ALL = [case.name for case in CASES]
_REASONS = ("reasons", "batch_reasons", "plain_by_rule")
_NOT_SHOWN = ("speculated", "num_drafted", "num_accepted", "sec")
#: Fields of a row that a file has only where they are not those of another field.
_USUAL = {"model_type": "name", "batch_verification": "kind", "batch_reasons": "reasons"}
_TOLD: tuple[Verdict, ...] = ("exact", "tie", "wrong", "failed")
_MAX_REASON = 120  # characters; the JSON has all of it
_INTRODUCTION = """\
# Supported architectures

Written by `python -m tests.support`, which builds a tiny model with random weights of every causal
LM that the installed transformers maps, and decodes with plain `generate` and with lade, with the
same seeds: a prompt shorter than the windows of the tiny models, one longer, one padded on the
left, and two of them as a batch, greedily and sampled, {new} new tokens each. Drafts are made so
that some of their tokens are right and some are wrong. Rows such as `mixtral-window` are the same
architecture with what its default configuration leaves off.

Drafts are verified by one of these methods: `tree`, all candidates in one forward; `chain`,
one candidate, with the cache cropped after what was accepted; `snapshot`, one candidate, from a
copy of the state; `plain`, not at all: the same text at plain speed. A check of the loaded model
chooses the best method that is exact (`lade.probe`), so a model with trained weights may get
another one than here.

- **one row**, **batch**: the method chosen for one sequence and for several.
- **MAT**: mean accepted tokens, those that a step commits to a row. It is that of these drafts, and
  says that they were accepted and rejected, not how fast a real model is.
- **text**: *exact* if every token is that of plain `generate`, in float64, or in float32 where that
  is stated because the model cannot run in float64. *Tie*: a first difference where plain's best
  two logits are the same up to rounding. *Wrong*: any other. *Failed*: lade raises where plain
  `generate` does not. What plain `generate` itself cannot do with the model is named, and not
  compared.
- **why no better method**: for each better method, what the check found.
"""


_Row = TypeVar("_Row")


class Results(NamedTuple, Generic[_Row]):
    """The findings of one run, as in its file."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    rows: list[_Row]

    @property
    def transformers(self) -> str:
        """The version of transformers."""
        return str(self.environment["transformers"])


# --- counts ---------------------------------------------------------------------------------


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """Return the number of rows in all, of those that speculate, and by kind and verdict."""
    rows = [*rows]
    return {
        "all": len(rows),
        "speculate": sum(row.speculates for row in rows),
        **{kind: sum(row.kind == kind for row in rows) for kind in _KINDS},
        **{verdict: sum(row.verdict == verdict for row in rows) for verdict in _TOLD},
    }


def summary(rows: Sequence[Row]) -> str:
    """Return the counts in two lines: of architectures, and of their variants."""
    return "\n".join(
        _counted(part, name)
        for part, name in (
            ([row for row in rows if not row.is_variant], "architectures"),
            ([row for row in rows if row.is_variant], "variants"),
        )
        if part
    )


def _counted(rows: Sequence[Row], name: str) -> str:
    count = counts(rows)
    kinds = ", ".join(f"{count[kind]} {kind}" for kind in _KINDS if count[kind])
    verdicts = ", ".join(f"{count[verdict]} {verdict}" for verdict in _TOLD)
    return f"{count['all']} {name}, {count['speculate']} speculate: {kinds}; {verdicts}"


# --- cells --------------------------------------------------------------------------------------


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
            if row.reasons.get(verification) != reason
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


# --- JSON -----------------------------------------------------------------------------------


def results_of(
    rows: Sequence[Row], seed: int, stopped: bool, execution: Execution = "eager"
) -> Results[Row]:
    """Return rows with the environment and settings of their run."""
    settings = {
        "seed": seed,
        "execution": execution,
        "max_draft_tokens": MAX_DRAFT_TOKENS,
        "cases": {
            case.name: {"prompts": [*case.lengths], "max_new_tokens": case.num_new}
            for case in CASES
        },
        "interrupted": stopped,
    }
    return Results(environment(), settings, [*rows])


def content_of(results: Results[Row]) -> dict[str, Any]:
    """Return what a result file has."""
    summary = {
        "architectures": counts(row for row in results.rows if not row.is_variant),
        "variants": counts(row for row in results.rows if row.is_variant),
    }
    # Of steps of fixed shape the pages show the counts, and a row only where lade is at fault.
    is_shown = results.settings.get("execution", "eager") == "eager"
    return {
        "environment": results.environment,
        "settings": results.settings,
        "summary": summary,
        "rows": [as_json(row) for row in results.rows if is_shown or row.is_bad],
    }


def read_json(path: Path) -> Results[Row]:
    """Return what a file has of `content_of`."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = [row_of(entry) for entry in content["rows"]]
    return Results(content["environment"], content["settings"], rows)


def as_json(row: Row) -> dict[str, Any]:
    """Return what the page shows of a row: non-empty fields that are not as others have them."""
    entry = {name: value for name, value in asdict(row).items() if value not in (None, [], {})}
    for name in _NOT_SHOWN:
        entry.pop(name, None)
    for name, usual in _USUAL.items():
        entry[name] = getattr(row, name)
        if entry[name] == getattr(row, usual):
            del entry[name]
    if row.batch_verification == row.kind:
        entry.pop("batch_reasons", None)
    entry["compared"] = row.compared
    if row.compared == (_ALL if row.is_built else []):
        del entry["compared"]
    if row.in_float32 and row.in_float32 == row.compared:
        entry["in_float32"] = "all"
    for name in _REASONS:
        if name in entry:
            entry[name] = _by_reason(entry[name])
    if row.mat is not None:
        entry["mat"] = round(row.mat, 4)
    return entry


def _by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for what, reason in reasons.items():
        found.setdefault(reason, []).append(what)
    return found


def row_of(entry: dict[str, Any]) -> Row:
    """Return the row that `as_json` made an entry of, as far as the page shows it."""
    known = {one.name: entry[one.name] for one in fields(Row) if one.name in entry}
    known["differences"] = [Difference(**each) for each in entry.get("differences", ())]
    for name in _REASONS:
        if name in known:
            known[name] = {each: why for why, found in known[name].items() for each in found}
    for name, usual in _USUAL.items():
        if usual in known:
            known.setdefault(name, known[usual])
    known.setdefault("compared", [*_ALL] if known["batch_verification"] is not None else [])
    if known.get("in_float32") == "all":
        known["in_float32"] = [*known["compared"]]
    return Row(**known)


# --- Markdown -------------------------------------------------------------------------------


def markdown(runs: Iterable[Results[Row]]) -> str:
    """Return one document of several runs, the newest transformers first."""
    newest_first = sorted(runs, key=lambda run: version.parse(run.transformers), reverse=True)
    parts = [_INTRODUCTION.format(new=CASES[0].num_new), *map(_section, newest_first)]
    return "\n".join(parts)


def _section(run: Results[Row]) -> str:
    made = run.environment
    lines = [
        f"## transformers {run.transformers}",
        "",
        f"With torch {made['torch']} and lade {made['lade']}, {made['date']}, seed "
        f"{run.settings['seed']}." + (" Interrupted." if run.settings["interrupted"] else ""),
        "",
    ]
    architectures = counts(row for row in run.rows if not row.is_variant)
    variants = counts(row for row in run.rows if row.is_variant)
    lines += ["| | architectures | variants |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {number} | {variants[name]} |" for name, number in architectures.items()]
    lines += ["", "| " + " | ".join(_HEADINGS) + " |"]
    lines.append("| " + " | ".join("---:" if name == "MAT" else "---" for name in _HEADINGS) + " |")
    lines += [f"| {' | '.join(map(in_cell, cells(row)))} |" for row in run.rows]
    return "\n".join([*lines, ""])


def in_cell(text: str) -> str:
    """Return a text as it may stand in a Markdown table."""
    return text.replace("|", r"\|").replace("<", r"\<").replace("*", r"\*")
