"""Results as a table, for a terminal or as Markdown, and as JSON for a file.

Next file: `traces.py`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from lade.bench.environment import environment
from lade.bench.run import Result, Summary, passes_of, share_repeated, stats_of, summarise
from lade.bench.settings import Settings
from lade.bench.tables import Sheet
from lade.stats import SourceStats

_SUMMARY_COLUMNS = (
    *("tokens/s", "speed-up", "MAT", "draft tokens/step", "same text"),
    *("accepted", "corrected", "draft ms/step"),
)
_DIGITS = 6  # decimal places, in files

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
    settings: Settings,
    caption: str | None = None,
    *,
    keep: bool = False,
) -> Sheet:
    """Return a table of all groups and methods, with each pass apart if pools were kept.

    With several passes, the last column is the share of sequences with the same text in all of them
    or, for a pass apart, with the text of the first.
    """
    sections = []
    for name, part in groups(results).items():
        passes = passes_of(part)
        rows: list[tuple[str, ...]] = []
        for method in methods:
            if keep:
                for num_pass, each in enumerate(passes, start=1):
                    repeated = share_repeated([*passes[0], *each], method) if num_pass > 1 else None
                    summary = summarise(each, method)
                    words = (name, _prompts_text(summary), method, f"pass {num_pass}")
                    rows.append((*words, *cells(summary), share_text(repeated)))
            else:
                summary, repeated = summarise(part, method), share_repeated(part, method)
                rows.append(
                    (
                        *(name, _prompts_text(summary), method),
                        *(*cells(summary), share_text(repeated)),
                    )
                )
        sections.append(rows)
    columns: tuple[str, ...] = (*_SUMMARY_COLUMNS, "same each pass")
    if len(passes_of(results)) < 2:
        columns, sections = _SUMMARY_COLUMNS, [[row[:-1] for row in rows] for rows in sections]
    title = f"{_decoding(settings)}, loops apart"
    named = ("category", "prompts", "method", *["pass"] * keep)
    return Sheet(title, (*named, *columns), len(named), sections, caption)


def time_table(
    results: Sequence[Result], methods: Sequence[str], caption: str | None = None
) -> Sheet:
    """Return a table of where time goes, over all answers without loops if there are any."""
    by_name = groups(results)
    part = by_name.get(OVERALL, [*results])
    rows = []
    for method in methods:
        summary = summarise(part, method)
        rows.append(
            (
                method,
                msec_text(summary.draft_sec_per_step),
                msec_text(summary.target_sec_per_step),
                "" if summary.busy_cores is None else f"{summary.busy_cores:.2f}",
                share_text(summary.device_share),
            )
        )
    headings = ("method", "draft ms/step", "target ms/step", "busy cores", "busy device")
    return Sheet("Where time goes", headings, 1, [rows], caption)


def source_table(results: Sequence[Result], methods: Sequence[str]) -> Sheet | None:
    """Return a table of what each source of drafts did, or None where no drafter tells."""
    by_name = groups(results)
    sections = [
        [
            (
                method,
                name,
                f"{source.num_asked:,}",
                f"{source.num_draft_tokens:,}",
                f"{source.num_accepted_tokens:,}",
                share_text(source.acceptance_rate if source.num_draft_tokens else None),
                msec_text(source.sec / source.num_asked if source.num_asked else None),
                f"{source.sec:.2f}",
            )
            for name, source in sources_of(by_name.get(OVERALL, [*results]), method).items()
        ]
        for method in methods
    ]
    sections = [rows for rows in sections if rows]
    if not sections:
        return None
    headings = (
        *("method", "source", "asked", "drafted", "accepted", "accepted/drafted"),
        *("ms/draft", "seconds"),
    )
    caption = "Tokens that several sources drafted are counted for each."
    return Sheet("Sources of drafts", headings, 2, sections, caption)


def sources_of(results: Sequence[Result], method: str) -> dict[str, SourceStats]:
    """Return what each source of a method's drafts did, all passes together."""
    stats = stats_of(result.answers[method] for result in results)
    return {} if stats is None else stats.sources


def table_of_files(paths: Sequence[Path]) -> Sheet:
    """Return one table of several result files of `lade bench run`, loops left out.

    Raises:
        ValueError: a file is not such a result file.
    """
    sections, captions = [], []
    for path in paths:
        environment, settings, overall = _read_result(path)
        decoding = Settings(
            **{
                field.name: settings[field.name]
                for field in fields(Settings)
                if field.name in settings
            }
        ).describe()
        sections.append(
            [
                (path.stem, decoding, _prompts_text(summary), method, *cells(summary))
                for method, summary in overall.items()
            ]
        )
        hardware = environment["gpu"] if "cuda" in settings["device"] else environment["cpu"]
        parts = [settings["model"], settings["dtype"], hardware, f"{settings['threads']} threads"]
        if settings.get("verification") is not None:  # older results lack it
            parts.append(f"verification: {settings['verification']}")
        captions.append(f"{path.stem}: {', '.join(parts)}, {environment['date']}")
    headings = ("results", "decoding", "prompts", "method", *_SUMMARY_COLUMNS)
    return Sheet("Loops left out", headings, 4, sections, "\n".join(captions))


def cells(summary: Summary) -> tuple[str, ...]:
    """Return a summary's numbers as text, except its number of prompts."""
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


def _prompts_text(summary: Summary) -> str:
    return "1 prompt" if summary.num_prompts == 1 else f"{summary.num_prompts} prompts"


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
    results: Sequence[Result], methods: Sequence[str], settings: dict[str, Any]
) -> dict[str, Any]:
    """Return everything that a reader needs to judge and check the numbers."""
    summary: dict[str, Any] = {}
    for name, part in groups(results).items():
        summary[name] = {}
        for method in methods:
            entry = rounded(summarise(part, method)._asdict())
            each = [rounded(summarise(p, method)._asdict()) for p in passes_of(part)]
            entry["speedup_of_each_pass"] = [of_pass["speedup"] for of_pass in each]
            entry |= rounded({"share_repeated": share_repeated(part, method)})
            if sources := sources_of(part, method):
                entry["sources"] = {
                    source: rounded(asdict(each)) for source, each in sources.items()
                }
            if settings.get("keep"):  # then passes are not repeats of each other
                entry["each_pass"] = each
            summary[name][method] = entry
    return {
        "environment": environment(),
        "settings": settings,
        "summary": summary,
        "prompts": [_as_json(result) for result in results],
    }


def rounded(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of a file with its floating-point numbers rounded."""
    return {
        name: round(value, _DIGITS) if isinstance(value, float) else value
        for name, value in entry.items()
    }


def prompts_fingerprint(path: Path) -> dict[str, str]:
    """Return name and digest of a file that results depend on but do not include."""
    return {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a result file, with one prompt, batch or run per line."""
    lists = {name: content[name] for name in ("prompts", "runs") if name in content}
    text = json.dumps({name: content[name] for name in content if name not in lists}, indent=1)
    for name, entries in lists.items():
        lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
        text = f'{text[:-2]},\n "{name}": [\n{lines}\n ]\n}}'
    path.write_text(text + "\n", encoding="utf-8")


def _decoding(settings: Settings) -> str:
    words = settings.describe()
    return "Greedy decoding" + words[6:] if words.startswith("greedy") else words.capitalize()


class _ResultFile(NamedTuple):
    environment: dict[str, Any]
    settings: dict[str, Any]
    overall: dict[str, Summary]  # over all answers without loops, by method or by method and pass


def _read_result(path: Path) -> _ResultFile:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        overall: dict[str, Summary] = {}
        for method, entry in content["summary"].get(OVERALL, {}).items():
            if "each_pass" in entry:
                for num_pass, of_pass in enumerate(entry["each_pass"], start=1):
                    overall[f"{method}, pass {num_pass}"] = _summary_from(of_pass)
            else:
                overall[method] = _summary_from(entry)
        return _ResultFile(content["environment"], content["settings"], overall)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected {path.name} to be a result file of lade bench run: {error!r}"
        ) from None


def _summary_from(entry: Mapping[str, Any]) -> Summary:
    defaults = Summary._field_defaults  # for what older files lack
    return Summary(
        *(
            entry.get(name, defaults[name]) if name in defaults else entry[name]
            for name in Summary._fields
        )
    )


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
            entry[method] |= {
                "num_accepted_tokens": answer.stats.num_accepted_tokens,
                "num_drafted_row_steps": answer.stats.num_drafted_row_steps,
                "num_corrected_row_steps": answer.stats.num_corrected_row_steps,
                "draft_sec": round(answer.stats.draft_sec, _DIGITS),
                "forward_sec": round(answer.stats.forward_sec, _DIGITS),
                "overhead": round(answer.stats.overhead, 4),
            }
        if answer.utilisation is not None:
            entry[method]["cpu_sec"] = round(answer.utilisation.cpu_sec, 4)
        if plain is not None and method != "plain":
            entry[method]["same_text"] = answer.rows == plain.rows
            if len(answer.rows) > 1:
                same = sum(a == b for a, b in zip(answer.rows, plain.rows, strict=True))
                entry[method]["num_same_text"] = same
    return entry
