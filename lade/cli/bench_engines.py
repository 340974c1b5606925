"""`lade bench engines`: run each method in vLLM with a progress bar, print and write the tables."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lade.cli.bench import ResultFiles, describe_prompts, print_sheet, progress_bar
from lade.cli.loading import console, fetch_with_progress, find_model, load_tokenizer
from lade.cli.options import Dtype
from lade.errors import LadeError
from lade.models.embedded import DEFAULT_MODEL, EMBEDDED_MODELS, embedded_model

if TYPE_CHECKING:
    from rich.progress import Progress

    from lade.bench.engines.job import Job, PhaseResult
    from lade.bench.engines.plan import Plan
    from lade.bench.prompts import PromptFile


def choose_concurrency(text: str) -> list[int]:
    """Return numbers of requests at once from a comma-separated list.

    Raises:
        ValueError: one is no number of 1 or more, or stands twice.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    numbers = [int(part) for part in parts if part.isdecimal()]
    if not numbers or len({*numbers}) < len(parts) or min(numbers) < 1:
        raise ValueError(
            f"expected --concurrency to be different numbers of 1 or more, as 1,4,16; got {text!r}"
        )
    return numbers


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
    from lade.models.loading import device_of, native_dtype

    return str(native_dtype(device_of(None))).removeprefix("torch.")


def choose_options(text: str) -> dict[str, Any]:
    """Return options of lade's proposer from a JSON object.

    Raises:
        TypeError, ValueError: it is none, or an option is unknown, of the wrong type or out of
            range.
    """
    from lade.engines.options import PoolOptions

    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected --options to be a JSON object, got {text!r}: {error}") from None
    if not isinstance(options, dict):
        raise ValueError(f"expected --options to be a JSON object, got {text!r}")
    for name in ("sharing", "prewarmed"):
        if name in options:
            raise ValueError(f"expected --options without {name!r}, which the methods tell")
    PoolOptions.from_mapping(options)
    return options


def make_plan(
    model: str | None,
    chosen: Sequence["PromptFile"],
    trust_remote_code: bool,
    checks: bool,
    **settings: Any,
) -> "Plan":
    """Fetch the model if need be, and encode the prompts.

    Args:
        model: an id or a folder; None for the default model.
        chosen: the prompts.
        trust_remote_code: whether to run code that comes with the model.
        checks: whether answers are drawn, too.
        settings: the other fields of `Plan`.
    """
    from lade.bench.engines.agreement import QUESTIONS
    from lade.bench.engines.plan import Plan
    from lade.models.loading import encode

    name = find_model(model) or DEFAULT_MODEL
    fetch_with_progress(name)
    tokenizer = load_tokenizer(name, trust_remote_code)

    def tokens_of(texts: Sequence[str]) -> list[list[int]]:
        return [encode(tokenizer, text)["input_ids"][0].tolist() for text in texts]

    return Plan(
        model=str(embedded_model(name)) if name in EMBEDDED_MODELS else name,
        trust_remote_code=trust_remote_code,
        prompts=tokens_of([prompt.text for file in chosen for prompt in file.prompts]),
        questions=tokens_of(QUESTIONS) if checks else (),
        **settings,
    )


def run(
    plan: "Plan",
    chosen: Sequence["PromptFile"],
    methods: Sequence[str],
    left_out: Mapping[str, str],
    threads: int,
    files: ResultFiles,
) -> None:
    """Run all methods; show and write what they did, also when interrupted.

    Raises:
        LadeError: vLLM failed; or answers were drawn, and a method does not say what plain says.
    """
    from lade.bench.engines.agreement import compare_drawn
    from lade.bench.engines.methods import METHODS, PLAIN
    from lade.bench.engines.plan import DRAWS
    from lade.bench.engines.report import as_json, draws_table, rows_of, table, what_differs
    from lade.bench.environment import environment

    results: dict[str, list[PhaseResult]] = {}
    engine: dict[str, Any] = {}
    stopped_by: BaseException | None = None
    try:
        with progress_bar() as bars:
            for method in methods:
                results[method] = []
                engine |= _run_method(plan.job(method), method, threads, bars, results[method])
    except BaseException as error:  # still show and write what was measured so far
        stopped_by = error
    rows = rows_of(results)
    if stopped_by is not None and not rows:
        raise stopped_by
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
    sheets = [table(rows, title, caption)]
    if drawn:
        sheets.append(draws_table(drawn))
    for sheet in sheets:
        print_sheet(sheet)
    if stopped_by is not None:
        console.print(f"stopped in {[*results][-1]}")
    settings = {
        "model": Path(plan.model).name,
        "dtype": plan.dtype,
        "threads": threads,
        "prompts": [describe_prompts(each) for each in chosen],
        "num_prompts": len(plan.prompts),
        "max_new_tokens": plan.max_new_tokens,
        "num_speculative_tokens": plan.num_speculative_tokens,
        "seed": plan.seed,
        "passes": plan.num_passes,
        "methods": {method: METHODS[method].description for method in methods},
        "speculative_config": {
            method: METHODS[method].config(plan.num_speculative_tokens) for method in methods
        },
        "options": {name: _without_folder(value) for name, value in plan.options.items()},
        "left_out": {**left_out},
        "interrupted": stopped_by is not None,
    }
    described = {"environment": {**environment(), **engine}, "settings": settings}
    files.write({**described, **as_json(rows, drawn)}, *sheets)
    if stopped_by is not None:
        raise stopped_by
    if plan.questions and (differences := what_differs(rows, drawn)):
        raise LadeError("; ".join(differences))


def _without_folder(value: Any) -> Any:
    """Return an option as results, which are published, tell it."""
    return Path(value).name if isinstance(value, str) else value


def _run_method(
    job: "Job", method: str, threads: int, bars: "Progress", results: list["PhaseResult"]
) -> Mapping[str, Any]:
    """Run a method's engine, add what it did to the results, and return what it is."""
    from lade.bench.engines.job import PhaseResult
    from lade.bench.engines.process import run_job

    described: Mapping[str, Any] = {}
    total = sum(len(phase.prompts) for phase in job.phases)
    task = bars.add_task(f"{method}: starting vLLM", total=total)
    for message in run_job(job, threads):
        if "engine" in message:
            described = message["engine"]
            bars.update(task, description=method)
        elif "phase" in message:
            results.append(PhaseResult.from_message(message["phase"]))
        else:
            bars.advance(task)
    return described
