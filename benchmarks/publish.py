"""What of a result file the pages show, for the repository: `python -m benchmarks publish`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import write_json
from lade.config import Config

_OVERALL = "overall"
_OF_CATEGORIES = ("num_prompts", "speedup")


def summarised(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result without the answers that its summary is of.

    Of answers to prompts, the median share of a step that was lade's own is kept; of categories,
    the speeds; of runs at several numbers of draft tokens, those of all prompts together; of
    `lade.Config`, what is not the default; of servers, what is of all turns; of stages and loads,
    what is not empty. Numbers are rounded to six digits.
    """
    made = {name: value for name, value in content.items() if name != "replies"}
    if "summary" in made and "prompts" in made:
        made["summary"] = shown(_with_overheads(made["summary"], made["prompts"]))
        del made["prompts"]
    if "runs" in made:
        made["runs"] = [run for run in made["runs"] if run.get("group", _OVERALL) == _OVERALL]
        made.pop("prompts", None)
    if "num_clients" in made.get("settings", {}):
        made["summary"] = _of_all_turns(made["summary"])
    as_is = ("environment", "settings")  # where None says that there is none
    if not {"summary", "runs"} & made.keys():
        made = _without_nothing(made) | {name: made[name] for name in as_is if name in made}
    settings = {**made.get("settings", {})}
    if isinstance(settings.get("methods"), dict):  # what each is stands in the code
        settings["methods"] = [*settings["methods"]]
    if "config" in settings:
        usual, config = asdict(Config()), settings["config"]
        settings["config"] = {name: v for name, v in config.items() if v != usual.get(name)}
    if settings:
        made["settings"] = settings
    return {name: v if name in as_is else _rounded(v) for name, v in made.items()}


def publish(source: Path, out: Path) -> None:
    """Write what the pages show of a result."""
    write_json(out, summarised(json.loads(source.read_text("utf-8"))))


def shown(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of each method, and of categories nothing but speeds."""
    return {
        group: {
            method: {
                name: value
                for name, value in entry.items()
                if (group == _OVERALL or name in _OF_CATEGORIES) and not _says_nothing(name, value)
            }
            for method, entry in methods.items()
        }
        for group, methods in summary.items()
    }


def _of_all_turns(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {
        num_clients: {
            server: {name: v for name, v in entry.items() if not name.startswith("last_turn")}
            for server, entry in servers.items()
        }
        for num_clients, servers in summary.items()
    }


def _without_nothing(value: Any) -> Any:
    """Return a value without what is None or empty in its dictionaries."""
    if isinstance(value, list):
        return [*map(_without_nothing, value)]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_nothing(each) for name, each in value.items() if each not in (None, [], {})
    }


def _says_nothing(name: str, value: Any) -> bool:
    return value is None or (name == "speedup_of_each_pass" and len(value) == 1)


def _with_overheads(
    summary: Mapping[str, Any], prompts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    def published(method: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        found = [prompt[method].get("overhead") for prompt in prompts if method in prompt]
        shares = [share for share in found if share is not None]
        return {**entry, "overhead": median(shares)} if shares else {**entry}

    overall = {method: published(method, entry) for method, entry in summary[_OVERALL].items()}
    return {**summary, _OVERALL: overall}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
