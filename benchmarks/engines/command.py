"""The command `engines`: run each method in vLLM, and print and write what it did."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.engines.agreement import QUESTIONS, compare_drawn
from benchmarks.engines.job import EngineJob, PhaseResult
from benchmarks.engines.methods import METHODS, PLAIN
from benchmarks.engines.plan import DRAWS, EnginePlan
from benchmarks.engines.process import run_job
from benchmarks.engines.report import as_json, draws_table, rows_of, table, what_differs
from lade.bench.environment import environment
from lade.cli.bench import Chosen
from lade.cli.loading import fetch_with_progress, load_tokenizer
from lade.cli.options import Dtype
from lade.cli.results import ResultFiles, keeping, progress_bar
from lade.engines.options import PoolOptions
from lade.errors import LadeError
from lade.models.embedded import DEFAULT_MODEL, EMBEDDED_MODELS, embedded_model
from lade.models.loading import device_of, find_model, native_dtype
from lade.models.prompts import encode


def choose_dtype(dtype: Dtype | None, checks: bool) -> str:
    """Return the number format to run in: by default, what the device computes in natively.

    Raises:
        ValueError: vLLM does not have it, or `checks`, which only float32 passes.
    """
    if checks:
        if dtype not in (None, Dtype.float32):
            raise ValueError(
                f"expected --dtype float32 with --check, got {dtype.value}: in half precision "
                "near-ties may fall the other way, whatever drafts"
            )
        return Dtype.float32.value
    if dtype is Dtype.float64:
        raise ValueError("expected --dtype float32, bfloat16 or float16 for vLLM, got float64")
    if dtype is not None:
        return dtype.value
    return str(native_dtype(device_of(None))).removeprefix("torch.")


def choose_options(text: str) -> dict[str, Any]:
    """Return options of lade's proposer from a JSON object.

    Raises:
        TypeError, ValueError: it is none, or an option is unknown, of the wrong type or out of
            range.
    """
    options = json.loads(text)
    if not isinstance(options, dict):
        raise ValueError(f"expected --options to be a JSON object, got {text!r}")
    for name in ("sharing", "prewarmed"):
        if name in options:
            raise ValueError(f"expected --options without {name!r}, which the methods tell")
    PoolOptions.from_mapping(options)
    return options


def make_plan(
    model: str | None, chosen: Sequence[Chosen], checks: bool, **settings: Any
) -> EnginePlan:
    """Fetch the model if need be, and encode the prompts."""
    name = find_model(model) or DEFAULT_MODEL
    fetch_with_progress(name)
    tokenizer = load_tokenizer(name)

    def tokens_of(texts: Sequence[str]) -> list[list[int]]:
        return [encode(tokenizer, text)["input_ids"][0].tolist() for text in texts]

    return EnginePlan(
        model=str(embedded_model(name)) if name in EMBEDDED_MODELS else name,
        prompts=tokens_of([prompt.text for each in chosen for prompt in each.prompts]),
        questions=tokens_of(QUESTIONS) if checks else (),
        **settings,
    )


def run(
    plan: EnginePlan,
    chosen: Sequence[Chosen],
    methods: Sequence[str],
    left_out: Mapping[str, str],
    threads: int | None,
    files: ResultFiles,
) -> None:
    """Run all methods; show and write what they did, also when interrupted.

    Raises:
        LadeError: vLLM failed; or answers were drawn, and a method does not say what plain says.
    """
    results: dict[str, list[PhaseResult]] = {}
    done: list[PhaseResult] = []
    engine: dict[str, Any] = {}
    threads = threads or os.cpu_count() or 1
    with keeping(done) as stopped, progress_bar() as bars:
        for method in methods:
            results[method] = []
            engine |= _run_method(plan.job(method), method, threads, bars, results[method], done)
    rows = rows_of(results)
    draws = {
        method: found[-1] for method, found in results.items() if found and found[-1].name == DRAWS
    }
    drawn = {
        method: compare_drawn(found, draws[PLAIN])
        for method, found in draws.items()
        if method != PLAIN and PLAIN in draws
    }
    title = (
        f"vLLM in {plan.dtype}, up to {plan.num_speculative_tokens} draft tokens, "
        f"{len(plan.prompts)} prompts, {plan.max_new_tokens} new tokens"
    )
    caption = "\n".join(
        [
            "MAT: tokens a request gains in a step, without answers that end in a loop.",
            "acceptance length: the same in steps with a draft, as vLLM counts it; loops included.",
            *(f"{name} is left out: {reason}" for name, reason in left_out.items()),
            *(f"vLLM was mended for this: {fault}" for fault in engine.get("mended", ())),
        ]
    )
    settings = {
        "model": Path(plan.model).name,
        "dtype": plan.dtype,
        "threads": threads,
        "prompts": [each.described for each in chosen],
        "num_prompts": len(plan.prompts),
        "max_new_tokens": plan.max_new_tokens,
        "num_speculative_tokens": plan.num_speculative_tokens,
        "passes": plan.num_passes,
        "methods": {method: METHODS[method].description for method in methods},
        "speculative_config": {
            method: METHODS[method].config(plan.num_speculative_tokens) for method in methods
        },
        "options": {name: _without_folder(value) for name, value in plan.options.items()},
        "left_out": {**left_out},
        "interrupted": stopped.by is not None,
    }
    described = {"environment": {**environment(), **engine}, "settings": settings}
    sheets = [table(rows, title, caption), *([draws_table(drawn)] if drawn else [])]
    stopped.tell(f"stopped in {[*results][-1]}")
    files.show({**described, **as_json(rows, drawn)}, *sheets)
    stopped.pass_on()
    if plan.questions and (differences := what_differs(rows, drawn)):
        raise LadeError("; ".join(differences))


def _without_folder(value: Any) -> Any:
    """Return an option as results, which are published, tell it."""
    return Path(value).name if isinstance(value, str) else value


def _run_method(
    job: EngineJob,
    method: str,
    threads: int,
    bars: Progress,
    results: list[PhaseResult],
    done: list[PhaseResult],
) -> Mapping[str, Any]:
    """Run a method's engine, add what it did to both lists, and return what it is."""
    described: Mapping[str, Any] = {}
    total = sum(len(phase.prompts) for phase in job.phases)
    task = bars.add_task(f"{method}: starting vLLM", total=total)
    for message in run_job(job, threads):
        if "engine" in message:
            described = message["engine"]
            bars.update(task, description=method)
        elif "phase" in message:
            results.append(PhaseResult.from_message(message["phase"]))
            done.append(results[-1])
        else:
            bars.advance(task)
    return described
