"""Stages as tables and as JSON."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lade.bench.environment import environment
from lade.bench.gpu.stage import Stage
from lade.bench.report import share_text, speedup_text
from lade.bench.tables import Sheet

_Cell = tuple[str, Callable[[Mapping[str, Any]], str]]  # heading, and the text below it for a row


def as_json(stages: Sequence[Stage], settings: dict[str, Any]) -> dict[str, Any]:
    """Return all measurements so far, ready for JSON."""
    return {
        "environment": environment(),
        "settings": settings,
        "stages": [stage.as_json() for stage in stages],
    }


def table(stage: Stage) -> Sheet:
    """Return the table of a stage, with what it left out listed below."""
    num_words, cells = _TABLES[stage.name]
    rows = [[text_of(row) for _, text_of in cells] for row in stage.rows]
    notes = [f"not run: {what}: {reason}" for what, reason in stage.left_out.items()]
    if stage.failure is not None:
        notes.append(f"failed: {stage.failure}")
    of_shape = "" if stage.shape is None else f", {stage.shape}"
    return Sheet(
        f"{_TITLES[stage.name]}{of_shape} ({stage.sec:.0f} s)",
        [heading for heading, _ in cells],
        num_words,
        [rows],
        "\n".join(notes) or None,
    )


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


_TITLES = {
    "bandwidth": "Copy bandwidth",
    "host": "Host between two forwards, with a model that costs nothing",
    "model": "Random weights",
    "steps": "Steps",
    "speed": "Whole answers, drafts replayed",
    "real": "SmolLM2-135M-Instruct",
}
# By stage: the number of leading columns, which hold words, and all columns.
_TABLES: dict[str, tuple[int, Sequence[_Cell]]] = {
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
    "model": (
        1,
        (
            ("verification", _word("verification")),
            ("billion weights", _number("num_parameters", 4, 1e-9)),
            ("GB read/step", _number("weight_bytes_of_step", 4, 1e-9)),
            ("KB cached/token", _number("cached_bytes_of_token", 1, 1e-3)),
            ("made in s", _number("making_sec", 1)),
        ),
    ),
    "steps": (
        1,
        (
            ("context", _word("context")),
            ("tree tokens", _number("num_nodes", 0)),
            ("ms/step", _number("sec", 3, 1e3)),
            ("of one token", _ratio("ratio_to_one_node")),
            ("of copy bandwidth", _share("share_of_copy_bandwidth")),
            ("host ms/step", _number("host_sec", 3, 1e3)),
        ),
    ),
    "speed": (
        1,
        (
            ("method", _word("method")),
            ("tokens/s", _number("tokens_per_sec", 1)),
            ("after prefill", _number("tokens_per_sec_after_prefill", 1)),
            ("over plain", _ratio("speedup_over_plain")),
            ("over static", _ratio("speedup_over_static")),
            ("MAT", _number("mean_accepted_tokens")),
            ("forward ms/step", _number("forward_sec_per_step", 3, 1e3)),
            ("other ms/step", _number("own_sec_per_step", 3, 1e3)),
            ("known text", _share("share_of_known_text")),
            ("warm-up s", _number("warm_up_sec", 1)),
        ),
    ),
    "real": (
        3,
        (
            ("decoding", _word("decoding")),
            ("answers", _word("answers")),
            ("method", _word("method")),
            ("prompts", _number("num_prompts", 0)),
            ("tokens/s", _number("tokens_per_sec", 1)),
            ("speed-up", _ratio("speedup")),
            ("MAT", _number("mean_accepted_tokens")),
            ("draft tokens/step", _number("draft_tokens_per_step", 1)),
            ("same text", _share("same_text")),
        ),
    ),
}
