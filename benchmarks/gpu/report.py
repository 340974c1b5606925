"""Stages as tables and as JSON.

Next file: `command.py`.
"""

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

from benchmarks.gpu.stage import Stage
from lade.bench.environment import environment
from lade.bench.report import share_text, speedup_text
from lade.bench.tables import Sheet

_TITLES = {
    "bandwidth": "Copy bandwidth",
    "attention": "Attention to trees, of a new shape and of the same again",
    "host": "Host between two forwards, with a model that costs nothing",
    "steps": "Steps",
    "plain": "Whole answers, generate",
    "installed": "Whole answers, lade as installed, drafts replayed as the budget asks for them",
    "static": "Whole answers, generate with a compiled static cache",
    "eager": "Whole answers, lade without fixed shapes, drafts replayed",
    "graphs": "Whole answers, lade, drafts replayed",
    "compiled": "Whole answers, lade compiled, drafts replayed",
    "sampled": "Whole answers, sampled, drafts replayed",
    "batches": "Whole answers, several at once, drafts replayed",
}
#: The stages whose rows are compared with each other.
WHOLE_ANSWERS = (
    *("plain", "installed", "static", "eager", "graphs", "compiled", "sampled", "batches"),
)

_STEPS = ("execution", "attention")
_ANSWERS = (
    *("method", *_STEPS, "num_rows", "tokens_per_sec", "tokens_per_sec_after_prefill"),
    *("speedup_over_plain", "speedup_over_static", "mean_accepted_tokens", "forward_sec_per_step"),
    *("own_sec_per_step", "share_of_known_text", "warm_up_sec", "num_recorded", "peak_bytes"),
    "workspace_bytes",
)
# By stage: what is shown of its rows. The first columns, which are words, identify a row.
_COLUMNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(WHOLE_ANSWERS, _ANSWERS),
    "bandwidth": ("copied_bytes", "bytes_per_sec"),
    "attention": (
        *("attention", "dtype", "new_shape_sec", "longest_sec", "same_shape_sec"),
        "largest_difference",
    ),
    "host": (
        *("num_nodes", "draft_tokens_per_step", "mean_accepted_tokens", "waited_for_sec"),
        "deferred_sec",
    ),
    "steps": (
        *("context", *_STEPS, "num_nodes", "sec", "busy_sec", "ratio_to_one_node"),
        *("share_of_copy_bandwidth", "host_sec", "recording_sec", "recording_bytes"),
    ),
}


def as_json(stages: Sequence[Stage], settings: dict[str, Any]) -> dict[str, Any]:
    """Return all measurements so far, ready for JSON."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    return {
        "environment": {
            **environment(),
            "cuda": torch.version.cuda,
            # Its attention is planned by shape.
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "triton": triton,
        },
        "settings": settings,
        "stages": [stage.as_json() for stage in stages],
    }


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
    reasons = [row["why_not_recorded"] for row in stage.rows if row.get("why_not_recorded")]
    notes = [f"not run: {what}: {reason}" for what, reason in stage.left_out.items()]
    notes += [f"warned: {warning}" for warning in stage.warnings]
    notes += [f"not recorded: {reason}" for reason in dict.fromkeys(reasons)]
    if stage.failure is not None:
        notes += [f"failed: {stage.failure}", *stage.last_words]
    of_shape = "" if stage.shape is None else f", {stage.shape}"
    title = f"{_TITLES[stage.name]}{of_shape} ({stage.sec:.0f} s)"
    return _sheet(title, _COLUMNS[stage.name], stage.rows, "\n".join(notes) or None)


def table_of_answers(stages: Sequence[Stage], shape: str) -> Sheet | None:
    """Return one table of all methods that answered with a shape, or None without any."""
    of_shape = [stage for stage in stages if stage.shape == shape and stage.name in WHOLE_ANSWERS]
    rows = [row for stage in of_shape for row in stage.rows]
    title = f"Whole answers, {shape}, all methods"
    return _sheet(title, ("decoding", *_ANSWERS), rows, None) if rows else None


def _sheet(
    title: str, names: Sequence[str], rows: Sequence[Mapping[str, Any]], caption: str | None
) -> Sheet:
    texts = [[_text(name, row.get(name)) for name in names] for row in rows]
    return Sheet(title, [_heading(name) for name in names], 1, [texts], caption)


def _heading(name: str) -> str:
    """Return a field's name with its unit."""
    if name.endswith("_bytes"):
        return f"{name.removesuffix('_bytes').replace('_', ' ')} MB"
    if name == "bytes_per_sec":
        return "GB/s"
    return name.replace("tokens_per_sec", "tokens/s").replace("sec", "ms").replace("_", " ")


def _text(name: str, value: Any) -> str:
    """Return a value in the unit of its heading."""
    if value is None:
        return ""
    if name == "bytes_per_sec":
        return f"{value / 1e9:,.1f}"
    if name.endswith("_bytes"):
        return f"{value / 1e6:,.1f}"
    if name.startswith("share"):
        return share_text(value)
    if name.startswith(("speedup", "ratio")):
        return speedup_text(value)
    if "sec" in name and not name.startswith("tokens"):
        return f"{1e3 * value:,.3f}"
    if name == "largest_difference":
        return f"{value:.2g}"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
