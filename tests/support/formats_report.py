"""Weight formats as JSON for a file, and all results as one document."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lade.bench.environment import environment
from tests.support import report
from tests.support.formats import NUM_COMPARED, NUM_REPEATS, TIMED, TINY, WIDTHS, FormatRow
from tests.support.report import as_json, in_cell, reason_of, row_of, short
from tests.support.run import CASES

_HEADINGS = (
    *("format", "activations", "one row", "batch", "MAT", "rounding", "text", "recorded"),
    "1 token, ms",
    *(f"{width}" for width in WIDTHS[1:]),
    "why no better method",
)
_INTRODUCTION = """\
## Weight formats

Written by `python -m tests.support --formats`: a tiny llama with random weights in each format,
decoded as above with its own `generate` and with lade. Each linear layer that is more than a
product with its weight is also run by itself, since a check of a dozen tokens may not see that it
picks outliers of all tokens at once, scales activations by the largest of a forward, or turns last
bits into whole steps. In half precision the last of these is a part of the rounding.

- **activations**: the dtype that the model computes in. In bfloat16 the text is not promised to be
  that of `generate` ([Exactness](exactness.md)), and calls that sample are left out.
- **rounding**: by how much of the largest logit the model's own logits move, without lade, from
  forwards over one token to a forward over {compared}. A first difference of texts is a *tie* where
  plain's best two logits are no further apart than both may have moved.
- **recorded**: whether steps can be recorded as CUDA graphs, as far as the weights decide.
- **1 token, ms**, **2** to **32**: milliseconds of a forward over one token, and how often as long
  one over more tokens takes: what drafts cost. Of a llama of 47 million weights, on one thread of a
  CPU; the least of {repeats} each.

Formats that transformers turns into plain weights as it loads them, such as GGUF, and MXFP4 and FP8
where there is no GPU, are plain models afterwards.
"""


def results_of(rows: Sequence[FormatRow], seed: int, stopped: bool) -> report.Results[FormatRow]:
    """Return rows with the environment and settings of their run."""
    settings = {
        "seed": seed,
        "cases": [case.name for case in CASES],
        "tiny": TINY,
        "timed": TIMED,
        "num_repeats": NUM_REPEATS,
        "num_compared": NUM_COMPARED,
        "interrupted": stopped,
    }
    return report.Results[FormatRow](environment(), settings, [*rows])


def counts(rows: Sequence[FormatRow]) -> dict[str, int]:
    """Return the numbers of formats, of models made, of those that speculate, and by verdict."""
    made = [row.check for row in rows if row.check is not None]
    verdicts = [row.verdict for row in rows]
    return {
        "formats": len({row.name for row in rows}),
        "models": len(made),
        "speculate": sum(check.speculates for check in made),
        **{name: verdicts.count(name) for name in ("exact", "tie", "wrong", "failed")},
    }


def summary(rows: Sequence[FormatRow]) -> str:
    """Return the counts in a line."""
    return ", ".join(f"{number} {name}" for name, number in counts(rows).items())


def cells(row: FormatRow) -> tuple[str, ...]:
    """Return the cells of a row as text."""
    check = row.check
    if check is None:
        nothing = [""] * (len(_HEADINGS) - 3)
        return (row.name, row.dtype or "", *nothing, row.why_not or "")
    found = [f"differs: {difference}" for difference in check.differences]
    found += [f"{case}: {short(error)}" for case, error in check.failures.items()]
    plain = dict.fromkeys(check.plain_failures.values())
    found += [f"plain generate fails ({short(error)})" for error in plain]
    return (
        row.name,
        row.dtype or "",
        check.kind,
        check.batch_verification or "",
        "" if check.mat is None else f"{check.mat:.2f}",
        "" if row.rounding is None else f"{row.rounding:.1%}",
        "; ".join([row.verdict, *found]),
        row.why_not_recorded or "yes",
        "" if row.sec is None else f"{1000 * row.sec:.1f}",
        *(f"{row.costs[width]:.2f}" if width in row.costs else "" for width in WIDTHS[1:]),
        reason_of(check),
    )


# --- JSON -----------------------------------------------------------------------------------


def content_of(results: report.Results[FormatRow]) -> dict[str, Any]:
    """Return what a result file has."""
    return {
        "environment": results.environment,
        "settings": results.settings,
        "summary": counts(results.rows),
        "formats": [*map(_entry_of, results.rows)],
    }


def read_json(path: Path) -> report.Results[FormatRow]:
    """Return what a file has of `content_of`."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = [_row_of(entry) for entry in content["formats"]]
    return report.Results[FormatRow](content["environment"], content["settings"], rows)


def _entry_of(row: FormatRow) -> dict[str, Any]:
    """Return the non-empty fields of a row that the page shows."""
    entry = {name: value for name, value in asdict(row).items() if value not in (None, {})}
    if row.check is not None:
        entry["check"] = as_json(row.check)
        if row.check.name == row.name:
            del entry["check"]["name"]
    if row.sec is not None:
        # Not rounded: a table of these numbers must say what the first one said.
        entry["sec"], entry["costs"] = row.sec, {**row.costs}
    return entry


def _row_of(entry: dict[str, Any]) -> FormatRow:
    known = {one.name: entry[one.name] for one in fields(FormatRow) if one.name in entry}
    if "check" in known:
        known["check"] = row_of({"name": known["name"], **known["check"]})
    known["costs"] = {int(width): cost for width, cost in known.get("costs", {}).items()}
    return FormatRow(**known)


# --- Markdown -------------------------------------------------------------------------------


def markdown(results: report.Results[FormatRow]) -> str:
    """Return the findings as a part of a document."""
    made = results.environment
    packages = sorted({row.package for row in results.rows if row.package})
    lines = [
        _INTRODUCTION.format(
            repeats=results.settings["num_repeats"], compared=results.settings["num_compared"]
        ),
        f"With transformers {made['transformers']}, torch {made['torch']}, "
        f"{''.join(f'{package}, ' for package in packages)}and lade {made['lade']}; {made['cpu']}, "
        f"{made['date']}, seed {results.settings['seed']}."
        + (" Interrupted." if results.settings["interrupted"] else ""),
        "",
        _line(_HEADINGS),
        _line(
            [
                "---:" if name[:1].isdigit() or name in ("MAT", "rounding") else "---"
                for name in _HEADINGS
            ]
        ),
        *(_line(map(in_cell, cells(row))) for row in results.rows if row.check is not None),
    ]
    missing = [row for row in results.rows if row.check is None]
    if missing:
        lines += ["", "Not made there:", "", "| format | why |", "| --- | --- |"]
        named = [(f"{row.name}, {row.dtype}" if row.dtype else row.name, row) for row in missing]
        lines += [_line((name, in_cell(short(row.why_not or "")))) for name, row in named]
    return "\n".join([*lines, ""])


def document(folder: Path) -> str:
    """Return docs/SUPPORT.md, of the results in docs/support."""
    runs = [report.read_json(path) for path in sorted(folder.glob("transformers-*.json"))]
    formats = read_json(folder / "formats.json")
    return "\n".join([report.markdown(runs), markdown(formats)])


def _line(texts: Any) -> str:
    return f"| {' | '.join(texts)} |"
