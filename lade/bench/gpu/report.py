"""Stages as tables and as JSON."""

from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

from lade.bench.environment import environment
from lade.bench.gpu.stage import Stage
from lade.bench.report import share_text, speedup_text
from lade.bench.tables import Sheet

_Cell = tuple[str, Callable[[Mapping[str, Any]], str]]  # heading, and the text below it for a row


def as_json(stages: Sequence[Stage], settings: dict[str, Any]) -> dict[str, Any]:
    """Return all measurements so far, ready for JSON."""
    return {
        "environment": {**environment(), **_cuda_versions()},
        "settings": settings,
        "stages": [stage.as_json() for stage in stages],
    }


def _cuda_versions() -> dict[str, Any]:
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    return {"cuda": torch.version.cuda, "triton": triton}


def compare(stages: Sequence[Stage]) -> None:
    """Put speed-ups into the rows of whole answers, over `plain` and `static` where they ran."""
    rows = {
        (stage.shape, row["decoding"], row["num_rows"], row["method"]): row
        for stage in stages
        if stage.name in WHOLE_ANSWERS
        for row in stage.rows
    }
    for (*settings, _), row in rows.items():
        for name in ("plain", "static"):
            other = rows.get((*settings, name))
            row[f"speedup_over_{name}"] = None if other is None else other["sec"] / row["sec"]


def table(stage: Stage) -> Sheet:
    """Return the table of a stage, with what it left out listed below."""
    num_words, cells = _TABLES[stage.name]
    notes = [f"not run: {what}: {reason}" for what, reason in stage.left_out.items()]
    notes += [f"warned: {warning}" for warning in stage.warnings]
    notes += _reasons(stage.rows)
    if stage.failure is not None:
        notes += [f"failed: {stage.failure}", *stage.last_words]
    of_shape = "" if stage.shape is None else f", {stage.shape}"
    return _sheet(
        f"{_TITLES[stage.name]}{of_shape} ({stage.sec:.0f} s)",
        num_words,
        cells,
        stage.rows,
        "\n".join(notes) or None,
    )


def table_of_answers(stages: Sequence[Stage], shape: str) -> Sheet | None:
    """Return one table of all methods that answered with a shape, or None without any."""
    of_shape = [stage for stage in stages if stage.shape == shape and stage.name in WHOLE_ANSWERS]
    rows = [row for stage in of_shape for row in stage.rows]
    if not rows:
        return None
    cells: Sequence[_Cell] = (("decoding", _word("decoding")), *_ANSWERS)
    return _sheet(f"Whole answers, {shape}, all methods", 3, cells, rows, None)


def _sheet(
    title: str,
    num_words: int,
    cells: Sequence[_Cell],
    rows: Sequence[Mapping[str, Any]],
    caption: str | None,
) -> Sheet:
    headings = [heading for heading, _ in cells]
    texts = [[text_of(row) for _, text_of in cells] for row in rows]
    return Sheet(title, headings, num_words, [texts], caption)


def _reasons(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why steps were not executed as asked for, each reason once."""
    reasons = [row["why_not_recorded"] for row in rows if row.get("why_not_recorded")]
    return [f"not recorded: {reason}" for reason in dict.fromkeys(reasons)]


def _number(name: str, digits: int = 2, scale: float = 1.0) -> Callable[[Mapping[str, Any]], str]:
    def text_of(row: Mapping[str, Any]) -> str:
        value = row.get(name)
        return "" if value is None else f"{value * scale:,.{digits}f}"

    return text_of


def _word(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: str(row[name])


def _share(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: share_text(row.get(name))


def _ratio(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: speedup_text(row.get(name))


def _used(row: Mapping[str, Any]) -> str:
    """Return execution and attention in words."""
    kernels = " in Triton" if row.get("in_triton") else ""
    attention = row.get("attention")
    return row["execution"] if attention is None else f"{row['execution']}, {attention}{kernels}"


_TITLES = {
    "bandwidth": "Copy bandwidth",
    "host": "Host between two forwards, with a model that costs nothing",
    "steps": "Steps",
    "plain": "Whole answers, generate",
    "static": "Whole answers, generate with a compiled static cache",
    "eager": "Whole answers, lade without fixed shapes, drafts replayed",
    "graphs": "Whole answers, lade, drafts replayed",
    "compiled": "Whole answers, lade compiled, drafts replayed",
    "sampled": "Whole answers, sampled, drafts replayed",
    "batches": "Whole answers, several at once, drafts replayed",
    "kernels": "Kernels of a step",
    "vllm": "Whole answers, vLLM with n-gram drafts",
    "chat": "Chat, its whole text as each prompt, drafts replayed",
    "real": "SmolLM2-135M-Instruct",
}
#: The stages whose rows are compared with each other.
WHOLE_ANSWERS = ("plain", "static", "eager", "graphs", "compiled", "sampled", "batches", "vllm")
_ANSWERS: Sequence[_Cell] = (
    ("method", _word("method")),
    ("steps", _used),
    ("at once", _number("num_rows", 0)),
    ("tokens/s", _number("tokens_per_sec", 1)),
    ("after prefill", _number("tokens_per_sec_after_prefill", 1)),
    ("over plain", _ratio("speedup_over_plain")),
    ("over static", _ratio("speedup_over_static")),
    ("MAT", _number("mean_accepted_tokens")),
    ("forward ms/step", _number("forward_sec_per_step", 3, 1e3)),
    ("other ms/step", _number("own_sec_per_step", 3, 1e3)),
    ("known text", _share("share_of_known_text")),
    ("warm-up s", _number("warm_up_sec", 1)),
    ("recordings", _number("num_recorded", 0)),
    ("peak GB", _number("peak_bytes", 1, 1e-9)),
    ("workspace GB", _number("workspace_bytes", 1, 1e-9)),
)
# By stage: the number of leading columns, which hold words, and all columns.
_TABLES: dict[str, tuple[int, Sequence[_Cell]]] = {
    **dict.fromkeys(WHOLE_ANSWERS, (2, _ANSWERS)),
    "bandwidth": (
        1,
        (
            ("what", lambda row: "read and written"),
            ("GB copied", _number("copied_bytes", 3, 1e-9)),
            ("GB/s", _number("bytes_per_sec", 1, 1e-9)),
        ),
    ),
    "host": (
        1,
        (
            ("tree tokens", _word("num_nodes")),
            ("draft tokens/step", _number("draft_tokens_per_step", 1)),
            ("MAT", _number("mean_accepted_tokens")),
            ("device waits, µs/step", _number("waited_for_sec", 0, 1e6)),
            ("deferred, µs/step", _number("deferred_sec", 0, 1e6)),
        ),
    ),
    "steps": (
        2,
        (
            ("context", _word("context")),
            ("steps", _used),
            ("tree tokens", _number("num_nodes", 0)),
            ("ms/step", _number("sec", 3, 1e3)),
            ("with ranks", _number("busy_sec", 3, 1e3)),
            ("of one token", _ratio("ratio_to_one_node")),
            ("of copy bandwidth", _share("share_of_copy_bandwidth")),
            ("host ms/step", _number("host_sec", 3, 1e3)),
            ("recorded in s", _number("recording_sec", 2)),
            ("recording MB", _number("recording_bytes", 1, 1e-6)),
        ),
    ),
    "kernels": (
        2,
        (
            ("steps", lambda row: f"{row['num_nodes']} tree tokens, {_used(row)}"),
            ("what", _word("what")),
            ("kernels", _number("num_kernels", 0)),
            ("µs", _number("sec", 1, 1e6)),
            ("of the step", _share("share")),
        ),
    ),
    "chat": (
        2,
        (
            ("turn", _word("turn")),
            ("steps", _used),
            ("prompt tokens", _number("prompt_length", 0)),
            ("tokens/s", _number("tokens_per_sec", 1)),
            ("MAT", _number("mean_accepted_tokens")),
            ("draft tokens/step", _number("draft_tokens_per_step", 1)),
            ("recorded", _number("num_recorded", 0)),
            ("lost so far", _number("num_lost", 0)),
            ("in s", _number("recording_sec", 2)),
            ("replayed", _number("num_replayed", 0)),
        ),
    ),
    "real": (
        4,
        (
            ("decoding", _word("decoding")),
            ("answers", _word("answers")),
            ("method", _word("method")),
            ("steps", _used),
            ("prompts", _number("num_prompts", 0)),
            ("tokens/s", _number("tokens_per_sec", 1)),
            ("speed-up", _ratio("speedup")),
            ("MAT", _number("mean_accepted_tokens")),
            ("draft tokens/step", _number("draft_tokens_per_step", 1)),
            ("same text", _share("same_text")),
        ),
    ),
}
