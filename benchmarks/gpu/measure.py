"""Whole answers: `generate`, `generate` with a compiled static cache, and lade by execution.

Drafts are replayed so that as many tokens are accepted as in recorded decoding; all else is the
work that lade does. Each stage runs in a process of its own: an error on a GPU leaves its process
unable to use it, and a static cache frees memory that recordings use.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch

import lade
from benchmarks.alone import alone
from benchmarks.environment import environment
from benchmarks.gpu.drafter import ReplayedDrafter, counts_for
from benchmarks.gpu.shapes import ON_CPU, SHAPES, make_model, random_prompt
from benchmarks.methods import named
from benchmarks.report import Keeping, rounded, sheet, show, speedup_text, write_json
from lade.bench.methods import Answer, Lade, Method, plain
from lade.cli.loading import tell
from lade.errors import LadeError
from lade.stats import DecodeStats

_NUM_NODES = 32  # of each tree, the root included
_MOST_PROMPTS, _LEAST_PROMPTS, _MAX_SEC = 6, 2, 20.0
_SHORTER = 3  # tokens that each prompt has less than the one before: no shape comes twice
_NUM_WARM_UPS = 2  # the first compiles or captures
_GREEDY: dict[str, Any] = {"do_sample": False}
_SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0}
_INSTALLED = lade.Config()
_ALL = replace(_INSTALLED, max_draft_tokens=_NUM_NODES - 1)
_CONFIGS = {
    "installed": _INSTALLED,
    "eager": replace(_ALL, execution="eager"),
    "graphs": replace(_ALL, execution="graphs"),
}
#: By name, in the order they run: what answers, how, and how many prompts at once.
STAGES: dict[str, tuple[str, Mapping[str, Any], int]] = {
    **{name: (name, _GREEDY, 1) for name in ("plain", "installed", "graphs", "static", "eager")},
    "plain_sampled": ("plain", _SAMPLED, 1),
    "graphs_sampled": ("graphs", _SAMPLED, 1),
    **{
        f"{name}_{rows}_rows": (name, _GREEDY, rows)
        for rows in (4, 8)
        for name in ("plain", "installed")
    },
}


def measured(stage: str, shape_name: str, device_name: str) -> dict[str, Any]:
    """Answer prompts, each of its own length, and return what that comes to; times are medians."""
    name, options, num_rows = STAGES[stage]
    shape, device = SHAPES[shape_name], torch.device(device_name)
    known = make_model(shape, device)
    method: Method
    if name == "plain":
        method = plain
    elif name == "static":
        method = _static
    else:
        counts = counts_for(shape.max_new_tokens)
        drafter = ReplayedDrafter(known.successors, counts, _NUM_NODES - 1)
        method = Lade(_CONFIGS[name], drafter=drafter)
    given = {**options, "max_new_tokens": shape.max_new_tokens}
    answers: list[Answer] = []
    right: list[bool] = []
    prefills: list[float] = []
    start = perf_counter()
    for number in range(-_NUM_WARM_UPS, _MOST_PROMPTS):
        if number >= _LEAST_PROMPTS and perf_counter() - start > _MAX_SEC:
            break
        length = shape.prompt_length - _SHORTER * max(number, -1)
        rows = [random_prompt(shape, length, num_rows * number + i + 99) for i in range(num_rows)]
        prompt = torch.cat(rows).to(device)
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        torch.manual_seed(number + _NUM_WARM_UPS)
        answer = method(known.model, inputs, given)
        if number < 0:
            start = perf_counter()
            continue
        prefills.append(plain(known.model, inputs, {**_GREEDY, "max_new_tokens": 1}).sec)
        answers.append(answer)
        ends = prompt[:, -1].tolist()
        right += [
            row == known.answer(last, shape.max_new_tokens)
            for row, last in zip(answer.rows, ends, strict=True)
        ]
    sec = median(answer.sec for answer in answers)
    found = {
        "stage": stage,
        "shape": shape_name,
        "num_rows": num_rows,
        "num_repeats": len(answers),
        "sec": sec,
        "tokens_per_sec": num_rows * shape.max_new_tokens / sec,
        "prefill_sec": median(prefills),
        "share_of_known_text": fmean(right),
    }
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_reserved(device)
    total = DecodeStats()
    for answer in answers:
        total.add(answer.stats)
    if total.forward_sec:  # of lade
        own_sec = total.draft_sec + total.verify_sec + total.commit_sec
        found |= {
            "mean_accepted_tokens": total.mean_accepted_tokens,
            "draft_tokens_per_step": total.draft_tokens_per_step,
            "forward_sec_per_step": total.forward_sec / total.num_steps,
            "own_sec_per_step": own_sec / total.num_steps,
            "probe": str(lade.probe(known.model)),
        }
    return rounded(found)


def _static(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Answer:
    return plain(model, inputs, {**options, "cache_implementation": "static"})


def _is_plain_for(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether a row is plain decoding of what another one decodes."""
    (name, *how), (_, *other_how) = STAGES[row["stage"]], STAGES[other["stage"]]
    return (name, row["shape"], how) == ("plain", other["shape"], other_how)


def run(shapes: str, stages: str | None, device: str, minutes: float, file: Path | None) -> None:
    """Run stages until the time is up, and write each as soon as it is done.

    Raises:
        LadeError: a stage failed; the others have been run.
        ValueError: a name is unknown, or the device cannot do it.
    """
    names, of_shapes = named(stages, [*STAGES]), named(shapes, [*SHAPES])
    if device == "cpu" and not {*of_shapes} <= {*ON_CPU}:
        raise ValueError(f"expected --shapes {' or '.join(ON_CPU)} with --device cpu, got {shapes}")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError("expected a CUDA device, got none; --device cpu --shapes tiny tries it")
    end = perf_counter() + 60 * minutes
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    made = environment()
    with Keeping(rows) as kept:
        for name, shape in ((name, shape) for shape in of_shapes for name in names):
            if (left := end - perf_counter()) <= 0:
                failures[f"{name} {shape}"] = "there was no time left"
                continue
            tell(f"{name} {shape}")
            try:
                row = alone(measured, name, shape, device, timeout=left)
            except LadeError as error:
                failures[f"{name} {shape}"] = str(error)
                continue
            base = next((each for each in rows if _is_plain_for(each, row)), row)
            row["speedup_over_plain"] = round(row["tokens_per_sec"] / base["tokens_per_sec"], 4)
            rows.append(row)
            if file is not None:
                write_json(file, {"environment": made, "rows": rows, "failures": failures})
    shown = [
        (
            *(row["shape"], row["stage"], f"{row['tokens_per_sec']:.1f}"),
            *(speedup_text(row["speedup_over_plain"]), f"{row['share_of_known_text']:.0%}"),
        )
        for row in rows
    ]
    headings = ("shape", "stage", "tokens/s", "of plain's", "known text")
    show(
        file,
        {"environment": made, "rows": rows, "failures": failures},
        sheet(f"Whole answers on {device}", headings, [shown]),
    )
    kept.end(f"stopped after {len(rows)} stages")
    if failures:
        said = "; ".join(f"{name}: {why}" for name, why in failures.items())
        raise LadeError(f"{len(failures)} failed: {said}")
