"""Results as tables for a terminal, and as JSON for a file."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

from lade.bench.environment import environment
from lade.bench.run import Result, Summary, stats_of, summarise

_COLUMNS = ("tokens/s", "speed-up", "MAT", "draft tokens /step", "same text", "accepted")
_DIGITS = 6  # decimal places, in files

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


def sheet(
    title: str,
    headings: Sequence[str],
    sections: Sequence[Sequence[Sequence[str]]],
    caption: str | None = None,
) -> Table:
    """Return a table of sections of rows, which leaves out columns without any content.

    The first two columns are words, all others numbers. What rows next to each other have first in
    common is a line of its own above them, so that a terminal of 80 columns has room.
    """
    made = Table(
        title=Text(title, "italic"),
        caption=Text(caption, "dim") if caption else None,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    rows = [row for section in sections for row in section]
    shown = [n for n in range(2, len(headings)) if any(row[n] for row in rows)]
    made.add_column(headings[1], no_wrap=True)
    for n in shown:
        made.add_column(headings[n], justify="right", vertical="bottom")
    for section in sections:
        above = ""
        for row in section:
            if row[0] != above:
                made.add_row(Text(row[0], "bold"))
            above = row[0]
            made.add_row(Text(f"{'  ' * bool(above)}{row[1]}"), *(Text(row[n]) for n in shown))
        made.add_section()
    return made


def table(
    results: Sequence[Result],
    methods: Sequence[str],
    how: str,
    caption: str | None = None,
    summarise: Summarise = summarise,
) -> Table:
    """Return a table of all groups and methods; `how` says how all of it was decoded."""
    sections = []
    for group, part in groups(results).items():
        section = []
        for method in methods:
            each = summarise(part, method)
            cells = (
                f"{each.tokens_per_sec:.1f}",
                speedup_text(each.speedup),
                f"{each.mean_accepted_tokens:.2f}",
                f"{each.draft_tokens_per_step:.1f}",
                share_text(each.same_text),
                share_text(each.acceptance_rate),
            )
            prompts = f"{each.num_prompts} prompt{'s' * (each.num_prompts > 1)}"
            section.append((f"{group}, {prompts}", method, *cells))
        sections.append(section)
    words = how.replace("greedy", "greedy decoding", 1)
    title = f"{words[0].upper()}{words[1:]}, loops apart"
    return sheet(title, ("prompts", "method", *_COLUMNS), sections, caption)


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
            entry = summary[group][method] = rounded(summarise(part, method)._asdict())
            stats = stats_of(result.answers[method] for result in part)
            if stats is not None and stats.sources:
                entry["sources"] = {n: rounded(asdict(each)) for n, each in stats.sources.items()}
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
        if (stats := answer.stats) is not None:
            of_method["num_accepted_tokens"] = stats.num_accepted_tokens
            if stats.forward_sec:  # timed step by step
                names = ("draft_sec", "forward_sec", "overhead")
                of_method |= {name: getattr(stats, name) for name in names}
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
    """Write a result file."""
    path.write_text(f"{json.dumps(content, indent=1)}\n", encoding="utf-8")
