"""Results as a table for a terminal and as JSON for a file."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.table import Table

from lade.bench.environment import environment
from lade.bench.run import Result, Summary, summarise
from lade.bench.settings import Settings

_SUMMARY_COLUMNS = ("prompts", "tokens/s", "speed-up", "MAT", "nodes/step", "same text")

LOOPS = "ending in a loop"
OVERALL = "overall"


def groups(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return results by category, then all of them, then those that loop, kept apart.

    A batch is among those that loop if one of its rows does.
    """
    clean = [result for result in results if not result.loops]
    by_name: dict[str, list[Result]] = {}
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
    settings: Settings,
    caption: str | None = None,
) -> Table:
    """Return the table of all groups and methods."""
    title = f"{_decoding(settings)}, loops apart"
    made = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for heading in ("category", "method"):
        made.add_column(heading, no_wrap=True, min_width=11)
    for heading in _SUMMARY_COLUMNS:
        made.add_column(heading, justify="right")
    for name, part in groups(results).items():
        for method in methods:
            made.add_row(
                name if method == methods[0] else "", method, *cells(summarise(part, method))
            )
        made.add_section()
    return made


def table_of_files(paths: Sequence[Path]) -> Table:
    """Return one table of several result files of `run`, the answers without loops of each.

    Raises:
        ValueError: a file is no such result file.
    """
    made = Table(title="Loops left out", title_justify="left", caption_justify="left")
    for heading in ("results", "decoding", "method"):
        made.add_column(heading, no_wrap=heading == "method")
    for heading in _SUMMARY_COLUMNS:
        made.add_column(heading, justify="right")
    captions = []
    for path in paths:
        environment, settings, overall = _read_result(path)
        decoding = Settings(
            **{
                field.name: settings[field.name]
                for field in fields(Settings)
                if field.name in settings
            }
        ).describe()
        for number, (method, summary) in enumerate(overall.items()):
            names = (path.stem, decoding) if number == 0 else ("", "")
            made.add_row(*names, method, *cells(summary))
        made.add_section()
        hardware = environment["gpu"] if "cuda" in settings["device"] else environment["cpu"]
        parts = [settings["model"], settings["dtype"], hardware, f"{settings['threads']} threads"]
        if settings.get("target") is not None:  # older results do not know
            parts.append(f"lade by {settings['target']}")
        captions.append(f"{path.stem}: {', '.join(parts)}, {environment['date']}")
    made.caption = "\n".join(captions)
    return made


def cells(summary: Summary) -> tuple[str, ...]:
    """Return a summary's numbers as text."""
    return (
        str(summary.num_prompts),
        f"{summary.tokens_per_sec:.1f}",
        "" if summary.speedup is None else f"{summary.speedup:.2f}x",
        f"{summary.mean_accepted_tokens:.2f}",
        f"{summary.nodes_per_step:.1f}",
        "" if summary.same_text is None else f"{summary.same_text:.0%}",
    )


def as_json(
    results: Sequence[Result], methods: Sequence[str], settings: dict[str, Any]
) -> dict[str, Any]:
    """Return everything a reader needs to judge the numbers, and to check them."""
    num_passes = 1 + max(result.num_pass for result in results)
    summary: dict[str, Any] = {}
    for name, part in groups(results).items():
        summary[name] = {}
        for method in methods:
            entry = summarise(part, method)._asdict()
            each = [[r for r in part if r.num_pass == i] for i in range(num_passes)]
            entry["speedup_of_each_pass"] = [summarise(p, method).speedup for p in each if p]
            summary[name][method] = _rounded(entry)
    return {
        "environment": environment(),
        "settings": settings,
        "summary": summary,
        "prompts": [_as_json(result) for result in results],
    }


def prompts_fingerprint(path: Path) -> dict[str, str]:
    """Return the name and digest of a prompt file, which is not stored with results."""
    return {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a result file, one prompt, batch or run a line."""
    lists = {name: content[name] for name in ("prompts", "runs") if name in content}
    text = json.dumps({name: content[name] for name in content if name not in lists}, indent=1)
    for name, entries in lists.items():
        lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
        text = f'{text[:-2]},\n "{name}": [\n{lines}\n ]\n}}'
    path.write_text(text + "\n", encoding="utf-8")


def _decoding(settings: Settings) -> str:
    words = settings.describe()
    return "Greedy decoding" + words[6:] if words.startswith("greedy") else words.capitalize()


def _read_result(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Summary]]:
    """Return environment, settings and the summary of all answers without loops, by method."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        overall = {
            method: Summary(*(entry[field] for field in Summary._fields))
            for method, entry in content["summary"].get(OVERALL, {}).items()
        }
        return content["environment"], content["settings"], overall
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected {path.name} to be a result file of lade bench run: {error!r}"
        ) from None


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
        entry[method] = {
            "num_tokens": answer.num_tokens,
            "sec": round(answer.sec, 4),
            "num_steps": answer.num_steps,
            "num_draft_tokens": answer.num_draft_tokens,
        }
        if len(answer.rows) > 1:
            entry[method] |= {"num_rows": len(answer.rows), "num_row_steps": answer.num_row_steps}
        if answer.stats is not None:
            entry[method]["overhead"] = round(answer.stats.overhead, 4)
        if plain is not None and method != "plain":
            entry[method]["same_text"] = answer.rows == plain.rows
            if len(answer.rows) > 1:
                same = sum(a == b for a, b in zip(answer.rows, plain.rows, strict=True))
                entry[method]["num_same_text"] = same
    return entry


def _rounded(entry: dict[str, Any]) -> dict[str, Any]:
    def rounded(value: Any) -> Any:
        if isinstance(value, list):
            return [rounded(item) for item in value]
        return round(value, 4) if isinstance(value, float) else value

    return {name: rounded(value) for name, value in entry.items()}
