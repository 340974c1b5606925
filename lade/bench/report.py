"""Results as a table for a terminal and as JSON for a file."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from lade.bench.environment import environment
from lade.bench.run import Result, Summary, summarise

LOOPS = "ending in a loop"
OVERALL = "overall"


def groups(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return results by category, then all of them, then those that loop, kept apart."""
    clean = [result for result in results if not result.loops]
    by_name: dict[str, list[Result]] = {}
    for result in clean:
        by_name.setdefault(result.prompt.category, []).append(result)
    if clean:
        by_name[OVERALL] = clean
    if loops := [result for result in results if result.loops]:
        by_name[LOOPS] = loops
    return by_name


def table(results: Sequence[Result], methods: Sequence[str]) -> Table:
    """Return the table of all groups and methods."""
    made = Table(title="Greedy decoding, loops apart", title_justify="left")
    for heading in ("category", "method"):
        made.add_column(heading, no_wrap=True, min_width=11)
    for heading in ("prompts", "tokens/s", "speed-up", "MAT", "nodes/step", "same text"):
        made.add_column(heading, justify="right")
    for name, part in groups(results).items():
        for method in methods:
            made.add_row(
                name if method == methods[0] else "", method, *cells(summarise(part, method))
            )
        made.add_section()
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
    """Write a result file, one prompt a line."""
    prompts = content.pop("prompts", None)
    text = json.dumps(content, indent=1)
    if prompts is not None:
        lines = ",\n".join("  " + json.dumps(prompt) for prompt in prompts)
        text = f'{text[:-2]},\n "prompts": [\n{lines}\n ]\n}}'
    path.write_text(text + "\n", encoding="utf-8")


def _as_json(result: Result) -> dict[str, Any]:
    plain = result.answers.get("plain")
    entry: dict[str, Any] = {
        "id": result.prompt.id,
        "category": result.prompt.category,
        "pass": result.num_pass,
        "num_prompt_tokens": result.num_prompt_tokens,
        "loops": result.loops,
    }
    for method, answer in result.answers.items():
        entry[method] = {
            "num_tokens": len(answer.token_ids),
            "sec": round(answer.sec, 4),
            "num_steps": answer.num_steps,
            "num_draft_tokens": answer.num_draft_tokens,
        }
        if answer.stats is not None:
            entry[method]["overhead"] = round(answer.stats.overhead, 4)
        if plain is not None and method != "plain":
            entry[method]["same_text"] = answer.token_ids == plain.token_ids
    return entry


def _rounded(entry: dict[str, Any]) -> dict[str, Any]:
    def rounded(value: Any) -> Any:
        if isinstance(value, list):
            return [rounded(item) for item in value]
        return round(value, 4) if isinstance(value, float) else value

    return {name: rounded(value) for name, value in entry.items()}
