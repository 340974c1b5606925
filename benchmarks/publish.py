"""What of a result file the pages show, for the repository: `python -m benchmarks publish`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lade.bench.report import write_json

_OVERALL = "overall"


def summarised(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result without the answers that its summary is of.

    Of answers to prompts, what each method spent in all is kept, apart for those that end in a
    loop, and the share of each that was lade's own; of runs at several numbers of draft tokens,
    those of all prompts together. Numbers are rounded to six digits.
    """
    made = {name: value for name, value in content.items() if name != "replies"}
    if "summary" in made and "prompts" in made:
        made["prompts"] = _totals(made["prompts"])
    if "runs" in made:
        made["runs"] = [run for run in made["runs"] if run.get("group", _OVERALL) == _OVERALL]
    as_is = ("environment", "settings")
    return {name: v if name in as_is else _rounded(v) for name, v in made.items()}


def publish(source: Path, out: Path) -> None:
    """Write what the pages show of a result."""
    write_json(out, summarised(json.loads(source.read_text("utf-8"))))


def _totals(prompts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    totals = []
    for loops in (False, True):
        chosen = [prompt for prompt in prompts if prompt.get("loops", False) == loops]
        if not chosen:
            continue
        total: dict[str, Any] = {"loops": loops, "num_prompts": len(chosen)}
        for method in (name for name, value in chosen[0].items() if isinstance(value, dict)):
            entries = [prompt[method] for prompt in chosen]
            names = [name for name, value in entries[0].items() if _is_sum(name, value)]
            total[method] = {
                name: round(sum(entry.get(name, 0) for entry in entries), 4) for name in names
            }
            if "overhead" in entries[0]:
                total[method]["overheads"] = [entry["overhead"] for entry in entries]
        totals.append(total)
    return totals


def _is_sum(name: str, value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (name.startswith("num_") or name.endswith("sec"))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
