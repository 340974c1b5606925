"""lade on a GPU: right texts, steps beside the speed of memory, and whole calls: `gpu`.

Models have real shapes and random weights, whose text is known (`shapes.py`). A prompt has pieces
of its answer, a few tokens each, between random ones: pools and prompt lookup find them, and every
piece ends. Each stage runs in a process of its own: an error leaves a process unable to use a GPU.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig

from benchmarks.alone import alone
from benchmarks.environment import environment
from benchmarks.methods import named
from benchmarks.report import Keeping, sheet, show, speedup_text, write_json
from benchmarks.shapes import SHAPES, KnownModel, Shape, make_model, random_prompt
from lade.apps.bench.methods import Answer, Method, by_lade, plain, prompt_lookup
from lade.apps.cli.loading import tell
from lade.compat import Model
from lade.config import Config
from lade.drafting.drafts import chain
from lade.errors import LadeError
from lade.probing.factory import make_target
from lade.probing.plan import choose_verification
from lade.probing.profile import profile_of
from lade.stats import DecodeStats
from lade.targets.base import Target
from lade.tree import Tree

_PIECE = 6  # tokens of an answer that stand together in its prompt
_NUM_PROMPTS, _NUM_WARM_UPS = 4, 2  # the first compiles, and records
_NUM_TIMED = 20  # forwards of a size
_SIZES = (1, 16, 64)  # tokens of a step
_CONTEXTS = (1900, 8000, 32_000)  # tokens before it
_COPIED_BYTES = 2**30
#: For where compiling a model takes minutes: graphs of torch's own kernels.
_CUDAGRAPHS = CompileConfig(backend="cudagraphs", fullgraph=True)


def _with(method: Method, **more: Any) -> Method:
    def answer(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Answer:
        return method(model, inputs, {**options, **more})

    return answer


_STATIC = by_lade(Config(execution="static"))
#: Ways to answer, by name.
WAYS: dict[str, Method] = {
    "plain": plain,
    "compiled": _with(plain, cache_implementation="static"),
    "prompt_lookup": prompt_lookup,
    "eager": by_lade(Config(execution="eager")),
    "static": _STATIC,
    "static_cudagraphs": _with(_STATIC, compile_config=_CUDAGRAPHS),
}


def prompt_of(known: KnownModel, shape: Shape, num_tokens: int, seed: int) -> Tensor:
    """Return a prompt with pieces of its own answer, int64 [1, num_tokens]."""
    ids = random_prompt(shape, num_tokens, seed)[0].tolist()
    answer, rng = known.answer(ids[-1], shape.max_new_tokens), Random(seed)
    starts = [*range(0, len(answer), _PIECE)]
    rng.shuffle(starts)
    for place, start in zip(range(0, num_tokens - 2 * _PIECE, 2 * _PIECE), starts, strict=False):
        piece = answer[start : start + _PIECE]
        ids[place : place + len(piece)] = piece
    return torch.tensor([ids])


def calls(way: str, known: KnownModel, shape: Shape, device: torch.device) -> dict[str, Any]:
    """Answer prompts of different lengths, and return medians and the share of right texts."""
    answers: list[Answer] = []
    right: list[bool] = []
    for number in range(-_NUM_WARM_UPS, _NUM_PROMPTS):
        ids = prompt_of(known, shape, shape.prompt_length - 3 * max(number, -1), number + 99)
        inputs = {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device)}
        options = {"do_sample": False, "max_new_tokens": shape.max_new_tokens}
        answer = WAYS[way](known.model, inputs, options)
        right.append(answer.rows == [known.answer(int(ids[0, -1]), shape.max_new_tokens)])
        answers += [answer] * (number >= 0)
    sec, total = median(answer.sec for answer in answers), DecodeStats()
    for answer in answers:
        total.add(answer.stats)
    found = {
        "tokens_per_sec": shape.max_new_tokens / sec,
        "right": fmean(right),
        "mean_accepted_tokens": total.mean_accepted_tokens,
    }
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_reserved(device)
    return found


def copying(device: torch.device) -> float:
    """Return the bytes a second that a copy reads and writes."""
    number = torch.empty(_COPIED_BYTES // 8, dtype=torch.int64, device=device)
    other = torch.empty_like(number)
    return 2 * _COPIED_BYTES / _timed(lambda: other.copy_(number), device)


def steps(execution: Any, known: KnownModel, shape: Shape, device: torch.device) -> dict[str, Any]:
    """Time steps of some sizes behind some contexts, beside what reads their bytes once."""
    model, speed = known.model, copying(device)
    options, profile = GenerationConfig(), profile_of(model)
    weights = sum(each.nbytes for each in model.parameters())
    weights -= model.get_input_embeddings().weight.nbytes
    found: dict[str, Any] = {"copy_bytes_per_sec": speed, "msec": {}, "of_copy": {}}
    longest = model.config.max_position_embeddings - max(_SIZES)
    with torch.no_grad():
        chosen = choose_verification(model, execution=execution, profile=profile)
        if chosen.execution != execution:
            raise LadeError(f"expected steps that are {execution}: {chosen.why_eager}")
        for context in [each for each in _CONTEXTS if each <= longest] or [longest // 2]:
            ids = random_prompt(shape, context, context).to(device)
            target = make_target(model, ids, {}, chosen, 2 * max(_SIZES), options, profile)
            target.prefill()
            for size in _SIZES:
                sec = _timed(partial(_step, target, size), device)
                held = weights + context * _bytes_of_token(model)
                found["msec"][f"{context}, {size}"] = 1000 * sec
                found["of_copy"][f"{context}, {size}"] = held / speed / sec
            target.release()
    return found


def _step(target: Target, size: int) -> None:
    target.forward(target.inputs([Tree.build(1, chain([*range(2, size + 1)]))]))
    target.discard()


def _bytes_of_token(model: Model) -> int:
    """Return the bytes of a token's keys and values."""
    config = model.config
    size: int = config.head_dim * config.num_key_value_heads * config.num_hidden_layers
    num_bytes: int = model.dtype.itemsize
    return 2 * size * num_bytes


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    """Return the median seconds of a run, the device included."""
    seconds: list[float] = []
    for _ in range(_NUM_TIMED + 4):  # compiled, recorded, replayed
        start = perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - start)
    return median(seconds[4:])


#: What each stage measures, by name, in the order they run.
STAGES: dict[str, Callable[..., dict[str, Any]]] = {
    **{name: partial(calls, name) for name in ("plain", "eager", "static")},
    **{f"steps_{name}": partial(steps, name) for name in ("eager", "static")},
    **{name: partial(calls, name) for name in WAYS if name not in ("plain", "eager", "static")},
}


def measured(stage: str, shape_name: str, device_name: str) -> dict[str, Any]:
    """Run one stage on a model made for it."""
    shape, device = SHAPES[shape_name], torch.device(device_name)
    found = STAGES[stage](make_model(shape, device), shape, device)
    return {"stage": stage, "shape": shape_name, **found}


def run(shapes: str, stages: str | None, device: str, minutes: float, file: Path | None) -> None:
    """Run stages until the time is up, and write each as soon as it is done.

    Raises:
        LadeError: a stage failed, or gave a wrong text; the others have been run.
        ValueError: a name is unknown, or there is no such device.
    """
    names, of_shapes = named(stages, [*STAGES]), named(shapes, [*SHAPES])
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError("expected a CUDA device, got none; --device cpu --shapes tiny tries it")
    end, made = perf_counter() + 60 * minutes, environment()
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    content = {"environment": made, "rows": rows, "failures": failures}
    with Keeping(rows) as kept:
        for name, shape in ((name, shape) for shape in of_shapes for name in names):
            if (left := end - perf_counter()) <= 0:
                failures[f"{name} {shape}"] = "there was no time left"
                continue
            tell(f"{name} {shape}")
            try:
                rows.append(alone(measured, name, shape, device, timeout=left))
            except LadeError as error:
                failures[f"{name} {shape}"] = str(error)
                continue
            if rows[-1].get("right", 1) < 1:
                failures[f"{name} {shape}"] = "its text is not that of generate"
            if file is not None:
                write_json(file, content)
    show(file, content, *_sheets(rows, device))
    kept.end(f"stopped after {len(rows)} stages")
    if failures:
        said = "; ".join(f"{name}: {why}" for name, why in failures.items())
        raise LadeError(f"{len(failures)} failed: {said}")


def _sheets(rows: list[dict[str, Any]], device: str) -> list[Any]:
    """Return a table of whole calls, and one of steps."""

    def speedup(row: Mapping[str, Any]) -> str:
        of_shape = [each for each in rows if each["shape"] == row["shape"]]
        base = next((each for each in of_shape if each["stage"] == "plain"), None)
        return speedup_text(row["tokens_per_sec"] / base["tokens_per_sec"] if base else None)

    whole = [
        (
            *(row["shape"], row["stage"], f"{row['tokens_per_sec']:.1f}", speedup(row)),
            *(f"{row['mean_accepted_tokens']:.2f}", f"{row['right']:.0%}"),
        )
        for row in rows
        if "right" in row
    ]
    of_steps = [
        (row["shape"], row["stage"], size, f"{msec:.2f}", f"{row['of_copy'][size]:.0%}")
        for row in rows
        for size, msec in row.get("msec", {}).items()
    ]
    headings = ("shape", "way", "tokens/s", "of plain's", "MAT", "right")
    of_size = ("shape", "way", "tokens before, of a step", "ms", "of the speed of a copy")
    return [
        sheet(f"Whole calls on {device}", headings, [whole]),
        sheet(f"Steps on {device}", of_size, [of_steps]),
    ]
