"""`lade bench memory`: measure each method in processes of its own, and print their peaks."""

from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from lade.bench.settings import Settings
from lade.cli.bench import check_writable, progress_bar, write_result
from lade.cli.loading import console, fetch_with_progress, find_model
from lade.config import Config
from lade.models.embedded import DEFAULT_MODEL


def run(
    model: str | None,
    device: str | None,
    dtype: str | None,
    threads: int | None,
    trust_remote_code: bool,
    prompts_path: Path,
    methods: list[str],
    settings: Settings,
    limit: int | None,
    num_repeats: int,
    max_draft_tokens: int | None,
    json_path: Path | None,
) -> None:
    """Measure methods in turn; print and write the results, even after an interruption."""
    from lade.bench.batches import in_batches
    from lade.bench.memory import MemoryRun, as_json, measure_in_process, table
    from lade.bench.methods import METHODS
    from lade.bench.peak import Work
    from lade.bench.prompts import read_prompts
    from lade.bench.report import prompts_fingerprint

    # Here, not in the process: finding these out imports what a baseline should not hold.
    from lade.models.loading import device_of, native_dtype

    check_writable(json_path)
    prompts = read_prompts(prompts_path, limit)
    model = find_model(model)
    chosen_device = device_of(device)
    if chosen_device.type not in ("cpu", "cuda"):
        raise ValueError(f"expected --device cpu or cuda to measure memory, got {device!r}")
    chosen_dtype = dtype or str(native_dtype(chosen_device)).removeprefix("torch.")
    fetch_with_progress(model)
    num_batches = len(in_batches(prompts, settings.batch_size))
    runs: list[MemoryRun] = []
    stopped_by: BaseException | None = None
    with progress_bar() as bars:
        task = bars.add_task("", total=num_batches * len(methods) * num_repeats)
        try:
            for num_repeat in range(num_repeats):
                first = num_repeat % len(methods)
                for name in (*methods[first:], *methods[:first]):
                    bars.update(task, description=f"{name}, repeat {num_repeat + 1}")
                    work = Work(
                        method=name,
                        model=model,
                        device=str(chosen_device),
                        dtype=chosen_dtype,
                        threads=threads,
                        trust_remote_code=trust_remote_code,
                        texts=[prompt.text for prompt in prompts],
                        settings=settings,
                        max_draft_tokens=max_draft_tokens,
                    )
                    peak = measure_in_process(work, lambda: bars.advance(task))
                    runs.append(MemoryRun(name, num_repeat, peak))
        except BaseException as error:  # still show and write what was measured so far
            stopped_by = error
    if stopped_by is not None and not runs:
        raise stopped_by
    title = f"Peak memory of a process on {chosen_device} in {chosen_dtype}, {settings.describe()}"
    Console().print(table(runs, methods, title))
    if stopped_by is not None:
        console.print(f"stopped after {len(runs)} of {len(methods) * num_repeats} processes")
    described = {
        "model": Path(model or DEFAULT_MODEL).name,
        "dtype": chosen_dtype,
        "device": str(chosen_device),
        "threads": runs[0].peak.threads,
        **asdict(settings),
        "prompts": {**prompts_fingerprint(prompts_path), "limit": limit, "num": len(prompts)},
        "methods": {name: METHODS[name].description for name in methods},
        "repeats": num_repeats,
        "interrupted": stopped_by is not None,
        "config": asdict(Config(max_draft_tokens=max_draft_tokens)),
    }
    write_result(json_path, as_json(runs, methods, described))
    if stopped_by is not None:
        raise stopped_by
