"""`lade bench`: answer prompts by every method, and print and write what came of it.

What other commands share is here, too: tables, progress, result files, and keeping what was found
when a measurement is broken off.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lade.bench.prompts import Prompt, read_prompts
from lade.bench.settings import BenchSettings
from lade.cli.loading import console
from lade.cli.prompting import check_prompts
from lade.config import Config
from lade.models.loading import LoadedModel

if TYPE_CHECKING:
    from lade.bench.baselines import Given, MethodInfo
    from lade.bench.run import Result
    from lade.bench.tables import Sheet
    from lade.cli.drafting import Drafting

_SINGLE_ROW = "transformers runs it on one prompt and for one sequence at a time"


class Chosen(NamedTuple):
    """The prompts of a run, and how they were chosen."""

    prompts: Sequence[Prompt]
    described: dict[str, Any]  # for result files, which do not hold their texts

    @classmethod
    def read(cls, path: Path | None, limit: int | None) -> "Chosen":
        """Read a prompt file; without one, take the prompts of the demo."""
        if path is None:
            from lade.cli.demo_prompts import DEMO_PROMPTS

            prompts = [Prompt(title, title, text) for title, text in DEMO_PROMPTS][:limit]
            return cls(prompts, {"name": "demo", "num": len(prompts)})
        prompts = read_prompts(path, limit)
        return cls(prompts, {**fingerprint(path), "limit": limit, "num": len(prompts)})


def compare(
    loaded: LoadedModel,
    chosen: Chosen,
    settings: BenchSettings,
    config: Config,
    drafting: "Drafting",
    pool_paths: Sequence[Path],
    files: "ResultFiles",
    prediction: str | None = None,
) -> None:
    """Run every method of `lade bench` for which there is what it takes."""
    from lade.bench.baselines import Given
    from lade.bench.methods import METHODS
    from lade.hf.predictions import predicted_ids

    given = Given(config, num_layers=drafting.first_layers)
    if drafting.assistant is not None:
        given = with_assistant(given, loaded, drafting.assistant, drafting.trust_remote_code)
    if prediction is not None:
        given = given._replace(prediction=predicted_ids(prediction, loaded.tokenizer))
    has = {
        "pools": bool(pool_paths),
        "prediction": bool(given.prediction),
        "assistant": drafting.assistant is not None,
        "num_layers": drafting.first_layers is not None,
    }
    methods = {name: i for name, i in METHODS.items() if i.takes is None or has[i.takes]}
    run(loaded, chosen, methods, settings, given, files, pool_paths=pool_paths)


def with_assistant(
    given: "Given", loaded: LoadedModel, name: str, trust_remote_code: bool
) -> "Given":
    """Load an assistant, to be used with both tokenizers where its vocabulary is another."""
    from lade.cli.drafting import load_beside

    other = load_beside(loaded, name, trust_remote_code)
    given = given._replace(assistant=other.model)
    if other.tokenizer.get_vocab() == loaded.tokenizer.get_vocab():
        return given
    return given._replace(tokenizer=other.tokenizer, target_tokenizer=loaded.tokenizer)


def run(
    loaded: LoadedModel,
    chosen: Chosen,
    methods: "Mapping[str, MethodInfo]",
    settings: BenchSettings,
    given: "Given",
    files: "ResultFiles",
    *,
    pool_paths: Sequence[Path] = (),
    save_path: Path | None = None,
    num_passes: int = 1,
    add: "Callable[[dict[str, Any], Sequence[Result]], None]" = lambda content, results: None,
) -> None:
    """Run methods over prompts; print and write the results, even after an interruption.

    Args:
        loaded: the model.
        chosen: the prompts.
        methods: by name; those that cannot decode batches are left out where there are some.
        settings: of all methods.
        given: what methods are made with, but for the pools.
        files: where to write.
        pool_paths: of pools to read.
        save_path: of a pool to learn into.
        num_passes: how often to repeat everything.
        add: adds to the content of the result file.
    """
    from lade.bench.plots import plot_speedups
    from lade.bench.report import as_json, source_table, table
    from lade.bench.run import run_methods, warm_up_methods
    from lade.cli.pool import open_pools
    from lade.probing.report import probe

    prompts = chosen.prompts
    check_prompts(loaded, [prompt.text for prompt in prompts], settings.max_new_tokens)
    left_out = {
        name: _SINGLE_ROW
        for name, info in methods.items()
        if info.is_single_row and settings.num_rows > 1
    }
    methods = {name: info for name, info in methods.items() if name not in left_out}
    results: list[Result] = []
    num_batches = -(-len(prompts) // settings.batch_size)
    with keeping(results) as stopped, open_pools(loaded, pool_paths, save_path) as (own, *read):
        given = given._replace(pools=read, own=None if save_path is None else own)
        left_out |= warm_up_methods(loaded, methods, settings, given)
        methods = {name: info for name, info in methods.items() if name not in left_out}
        with progress_bar() as bars:
            task = bars.add_task("answering", total=num_batches * num_passes * len(methods))
            run_methods(
                *(loaded, prompts, methods, settings, given),
                num_passes=num_passes,
                results=results,
                on_answer=lambda name, answer: bars.advance(task),
            )
    num_done, config = len(results), given.config
    # Passes are compared: an unfinished one is dropped, unless it is the only one.
    results = results[: num_done // num_batches * num_batches] or results
    notes = [f"{name} is left out: {reason}" for name, reason in left_out.items()]
    target = config.verification or probe(loaded.model, num_rows=settings.num_rows).verification
    notes.append(f"verification: {target}")
    described = {
        **describe_model(loaded),
        **asdict(settings),
        "prompts": chosen.described,
        "methods": {name: info.description for name, info in methods.items()},
        "left_out": left_out,
        "passes": num_passes,
        "first_layers": given.num_layers,
        "pools": {"names": [path.name for path in pool_paths], "num_tokens": sum(map(len, read))},
        "interrupted": stopped.by is not None,
        "config": asdict(config),
        "verification": target,
    }
    sheets = [table(results, [*methods], settings, "\n".join(notes))]
    if (sources := source_table(results, [*methods])) is not None:
        sheets.append(sources)
    content = as_json(results, [*methods], described)
    add(content, results)
    stopped.tell(f"stopped after {num_done} of {num_batches * num_passes} prompts or batches")
    files.show(content, *sheets)
    if files.plot is not None and {"plain"} < {*methods}:
        say_written(plot_speedups(files.plot, "speedup", content["summary"]))
    stopped.pass_on()


def describe_model(loaded: LoadedModel) -> dict[str, Any]:
    """Return what result files say of a model and how it is run."""
    import torch

    return {
        "model": Path(loaded.name).name,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(loaded.model.device),
        "threads": torch.get_num_threads(),
    }


def fingerprint(path: Path) -> dict[str, str]:
    """Return name and digest of a file that results depend on but do not include."""
    return {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


class Stopped:
    """What broke a measurement off, if anything did."""

    by: BaseException | None = None

    def tell(self, text: str) -> None:
        """Print how far it came."""
        if self.by is not None:
            console.print(text)

    def pass_on(self) -> None:
        """Raise it now, the findings being written."""
        if self.by is not None:
            raise self.by


@contextmanager
def keeping(found: Sized) -> Iterator[Stopped]:
    """Hold back what breaks the block off, if something was found, until that is shown."""
    stopped = Stopped()
    try:
        yield stopped
    except BaseException as error:  # raised again by `pass_on`
        if not found:
            raise
        stopped.by = error


@dataclass(frozen=True)
class ResultFiles:
    """Where to write results besides the terminal; all are optional."""

    json: Path | None = None
    markdown: Path | None = None
    plot: Path | None = None  # a folder

    def check(self) -> None:
        """Raise now, before any work is done, if the results could not be written later."""
        for path in (self.json, self.markdown):
            check_writable(path)
        if self.plot is not None:
            from lade.bench.plots import check_folder

            check_folder(self.plot)

    def show(self, content: dict[str, Any], *sheets: "Sheet") -> None:
        """Print tables, and write them as Markdown, and the content as JSON, where asked for."""
        from lade.bench.report import write_json

        for sheet in sheets:
            print_sheet(sheet)
        if self.json is not None:
            write_json(self.json, content)
            say_written([self.json])
        if self.markdown is not None:
            text = "\n".join(sheet.as_markdown() for sheet in sheets)
            self.markdown.write_text(text, encoding="utf-8")
            say_written([self.markdown])


def print_sheet(sheet: "Sheet") -> None:
    """Print a table uncropped; lines may wrap on a narrow terminal."""
    Console(highlight=False).print(sheet, crop=False)


def progress_bar() -> Progress:
    """Return a progress bar with a count and the time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)


def say_written(paths: Sequence[Path]) -> None:
    """Print where results were written."""
    for path in paths:
        console.print(f"[dim]written to {path}[/dim]")


def check_writable(json_path: Path | None) -> None:
    """Raise now, before any work is done, if a result file could not be written later."""
    if json_path is not None:
        with json_path.open("a", encoding="utf-8"):
            pass
