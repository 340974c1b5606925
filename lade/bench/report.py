"""Results as tables for a terminal, and as JSON for a file."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lade.bench.environment import environment
from lade.bench.run import Result, Summary, stats_of, summarise
from lade.bench.tables import Sheet

_COLUMNS = (
    *("tokens/s", "speed-up", "MAT", "draft tokens/step", "same text"),
    *("accepted", "corrected", "draft ms/step"),
)
_DIGITS = 6  # decimal places, in files
_LONG = 1000  # characters, of what is not on one line there

Summarise = Callable[[Sequence[Result], str], Summary]

LOOPS = "ending in a loop"
OVERALL = "overall"


class _Grouped(Protocol):
    @property
    def category(self) -> str: ...

    @property
    def loops(self) -> bool: ...


_G = TypeVar("_G", bound=_Grouped)


def groups(results: Sequence[_G]) -> dict[str, list[_G]]:
    """Return results without loops by category, then all of these, then those with loops.

    A batch counts as one with loops if one of its rows has one.
    """
    clean = [result for result in results if not result.loops]
    by_name: dict[str, list[_G]] = {}
    for result in clean:
        by_name.setdefault(result.category, []).append(result)
    if clean:
        by_name[OVERALL] = clean
    if loops := [result for result in results if result.loops]:
        by_name[LOOPS] = loops
    return by_name


def table(
    results: Sequence[Result],
    methods: Sequence[str],
    how: str,
    caption: str | None = None,
    summarise: Summarise = summarise,
) -> Sheet:
    """Return a table of all groups and methods; `how` says how all of it was decoded."""
    sections = []
    for group, part in groups(results).items():
        summaries = {method: summarise(part, method) for method in methods}
        sections.append(
            [
                (
                    *(group, f"{each.num_prompts} prompt{'s' * (each.num_prompts > 1)}", method),
                    *_cells(each),
                )
                for method, each in summaries.items()
            ]
        )
    words = how.replace("greedy", "greedy decoding", 1)
    title = f"{words[0].upper()}{words[1:]}, loops apart"
    return Sheet(title, ("category", "prompts", "method", *_COLUMNS), 3, sections, caption)


def _cells(summary: Summary) -> tuple[str, ...]:
    return (
        f"{summary.tokens_per_sec:.1f}",
        speedup_text(summary.speedup),
        f"{summary.mean_accepted_tokens:.2f}",
        f"{summary.draft_tokens_per_step:.1f}",
        share_text(summary.same_text),
        share_text(summary.acceptance_rate),
        share_text(summary.correction_rate),
        msec_text(summary.draft_sec_per_step),
    )


def _sources_of(results: Sequence[Result], method: str) -> Mapping[str, Any]:
    stats = stats_of(result.answers[method] for result in results)
    return {} if stats is None else stats.sources


def speedup_text(speedup: float | None) -> str:
    """Return a ratio as tables show it."""
    return "" if speedup is None else f"{speedup:.2f}x"


def share_text(share: float | None) -> str:
    """Return a share as tables show it."""
    return "" if share is None else f"{share:.0%}"


def msec_text(sec: float | None) -> str:
    """Return seconds as milliseconds, as tables show them."""
    return "" if sec is None else f"{1000 * sec:.3f}"


def as_json(
    results: Sequence[Result],
    methods: Sequence[str],
    settings: dict[str, Any],
    summarise: Summarise = summarise,
) -> dict[str, Any]:
    """Return everything that a reader needs to judge and check the numbers."""
    summary: dict[str, Any] = {}
    for group, part in groups(results).items():
        summary[group] = {}
        for method in methods:
            entry = rounded(summarise(part, method)._asdict())
            if sources := _sources_of(part, method):
                entry["sources"] = {name: rounded(asdict(each)) for name, each in sources.items()}
            summary[group][method] = entry
    return {
        "environment": environment(),
        "settings": settings,
        "summary": summary,
        "prompts": [_as_json(result) for result in results],
    }


def _as_json(result: Result) -> dict[str, Any]:
    plain = result.answers.get("plain")
    ids = [prompt.id for prompt in result.prompts]
    entry: dict[str, Any] = {"id": ids[0]} if len(ids) == 1 else {"ids": ids}
    entry |= {
        "category": result.category,
        "pass": result.num_pass,
        "num_prompt_tokens": result.num_prompt_tokens,
        "loops": result.loops,
    }
    for method, answer in result.answers.items():
        of_method = answer._asdict() | {"num_tokens": answer.num_tokens}
        del of_method["rows"], of_method["stats"]
        if len(answer.rows) == 1:
            del of_method["num_row_steps"]
        else:
            of_method["num_rows"] = len(answer.rows)
        if answer.stats is not None:
            names = (
                *("num_accepted_tokens", "num_drafted_row_steps", "num_corrected_row_steps"),
                *("draft_sec", "forward_sec", "overhead"),
            )
            of_method |= {name: getattr(answer.stats, name) for name in names}
        if plain is not None and method != "plain":
            same = [a == b for a, b in zip(answer.rows, plain.rows, strict=True)]
            of_method |= {"same_text": all(same), "num_same_text": sum(same)}
        entry[method] = {k: v for k, v in rounded(of_method).items() if v is not None}
    return entry


def rounded(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of a file with its floating-point numbers rounded."""
    return {
        name: round(value, _DIGITS) if isinstance(value, float) else value
        for name, value in entry.items()
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result file: each value on a line, or a long one with a line for each entry."""
    lines = (f" {json.dumps(name)}: {_as_text(value)}" for name, value in content.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _as_text(value: Any) -> str:
    text = json.dumps(value)
    if len(text) <= _LONG or not isinstance(value, dict | list):
        return text
    entries = [
        json.dumps(each, separators=(",", ":"))
        for each in (value.values() if isinstance(value, dict) else value)
    ]
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {entry}" for key, entry in zip(value, entries, strict=True)]
    return f"{text[0]}\n" + ",\n".join(f"  {entry}" for entry in entries) + f"\n {text[-1]}"
