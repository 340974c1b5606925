"""`lade bench`: answer prompts by every method, and print and write what came of it."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lade.bench.prompts import Prompt, read_prompts
from lade.bench.settings import BenchSettings
from lade.cli.loading import load_beside
from lade.cli.options import DraftOptions, LoadOptions
from lade.cli.prompting import check_prompts
from lade.cli.results import ResultFiles, keeping, progress_bar
from lade.models.loading import LoadedModel

if TYPE_CHECKING:
    from lade.bench.baselines import Given, MethodInfo
    from lade.bench.run import Result

_SINGLE_ROW = "transformers runs it on one prompt and for one sequence at a time"


class Chosen(NamedTuple):
    """The prompts of a run, and how they were chosen."""

    prompts: Sequence[Prompt]
    described: dict[str, Any]  # for result files, which do not hold their texts

    @classmethod
    def read(cls, path: Path | None, limit: int | None) -> "Chosen":
        """Read a prompt file; without one, take the prompts of the demo."""
        if path is None:
            from lade.bench.demo_prompts import DEMO_PROMPTS

            prompts = [Prompt(title, title, text) for title, text in DEMO_PROMPTS][:limit]
            return cls(prompts, {"name": "demo", "num": len(prompts)})
        prompts = read_prompts(path, limit)
        return cls(prompts, {**fingerprint(path), "limit": limit, "num": len(prompts)})


def compare(
    loaded: LoadedModel,
    chosen: Chosen,
    settings: BenchSettings,
    drafting: DraftOptions,
    loading: LoadOptions,
    files: ResultFiles,
    prediction: str | None = None,
) -> None:
    """Run every method of `lade bench` for which there is what it takes."""
    from lade.bench.baselines import Given
    from lade.bench.methods import METHODS
    from lade.hf.predictions import predicted_ids

    given = Given(drafting.config)
    if drafting.assistant is not None:
        given = with_assistant(given, loaded, drafting.assistant, loading.trust_remote_code)
    if prediction is not None:
        given = given._replace(prediction=predicted_ids(prediction, loaded.tokenizer))
    has = {
        "pools": drafting.pools,
        "prediction": given.prediction,
        "assistant": drafting.assistant,
    }
    methods = {name: i for name, i in METHODS.items() if i.takes is None or has[i.takes]}
    run(loaded, chosen, methods, settings, given, files, drafting)


def with_assistant(
    given: "Given", loaded: LoadedModel, name: str, trust_remote_code: bool
) -> "Given":
    """Load an assistant, to be used with both tokenizers where they are not the same."""
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
    files: ResultFiles,
    drafting: DraftOptions,
    add: "Callable[[dict[str, Any], Sequence[Result]], None]" = lambda content, results: None,
) -> None:
    """Run methods over prompts; print and write the results, even after an interruption.

    Methods are made with `given` and the pools. Those that cannot decode batches are left out where
    there are some. `add` adds to the content of the result file.
    """
    from lade.bench.report import as_json, table
    from lade.bench.run import run_methods, warm_up_methods
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
    with keeping(results) as stopped, drafting.open_pools(loaded) as (own, *read):
        given = given._replace(pools=read, own=None if drafting.save_path is None else own)
        left_out |= warm_up_methods(loaded, methods, settings, given)
        methods = {name: info for name, info in methods.items() if name not in left_out}
        with progress_bar() as bars:
            task = bars.add_task("answering", total=num_batches * settings.passes * len(methods))
            run_methods(
                *(loaded, prompts, methods, settings, given),
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
        "first_layers": given.num_layers,
        "pools": {
            "names": [path.name for path in drafting.pools or []],
            "num_tokens": sum(map(len, read)),
        },
        "interrupted": stopped.by is not None,
        "config": asdict(config),
        "verification": target,
    }
    content = as_json(results, [*methods], described)
    add(content, results)
    stopped.tell(f"stopped after {num_done} of {num_batches * settings.passes} prompts or batches")
    files.show(content, table(results, [*methods], settings, "\n".join(notes)))
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
