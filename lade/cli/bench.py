"""`lade bench`: answer prompts by every method, and print and write what came of it."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lade.bench.prompts import Prompt, read_prompts
from lade.cli.loading import load_beside
from lade.cli.options import DraftOptions, LoadOptions
from lade.cli.prompting import check_prompts
from lade.cli.results import ResultFiles, keeping, progress_bar
from lade.models.loading import LoadedModel
from lade.models.settings import Settings

if TYPE_CHECKING:
    from lade.bench.run import Result


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
    settings: Settings,
    drafting: DraftOptions,
    loading: LoadOptions,
    files: ResultFiles,
    prediction: str | None = None,
) -> None:
    """Run every method of `lade bench` for which there is what it takes."""
    from lade.bench.baselines import Given
    from lade.bench.methods import METHODS
    from lade.bench.report import as_json, table
    from lade.bench.run import Contest
    from lade.hf.predictions import predicted_ids
    from lade.probing.report import probe

    given = Given(drafting.config)
    if drafting.assistant is not None:
        other = load_beside(loaded, drafting.assistant, loading.trust_remote_code)
        given = given._replace(assistant=other, tokenizer=loaded.tokenizer)
    if prediction is not None:
        given = given._replace(prediction=predicted_ids(prediction, loaded.tokenizer))
    has = {
        "pools": drafting.pools,
        "prediction": given.prediction,
        "assistant": drafting.assistant,
    }
    infos = {name: i for name, i in METHODS.items() if i.takes is None or has[i.takes]}
    check_prompts(loaded, [prompt.text for prompt in chosen.prompts], settings.max_new_tokens)
    results: list[Result] = []
    with keeping(results) as stopped, drafting.open_pools(loaded) as (_, *read):
        given = given._replace(pools=read)
        methods = {name: partial(info.make, given) for name, info in infos.items()}
        with progress_bar() as bars:
            task = bars.add_task("answering", total=len(chosen.prompts))
            contest = Contest(loaded, methods, settings)
            for prompt in chosen.prompts:
                results.append(contest.answer(prompt))
                bars.advance(task)
    found = probe(loaded.model).verification
    described = {
        **describe_model(loaded),
        **asdict(settings),
        "prompts": chosen.described,
        "methods": {name: info.description for name, info in infos.items()},
        "pools": {
            "names": [path.name for path in drafting.pools or []],
            "num_tokens": sum(map(len, read)),
        },
        "interrupted": stopped.by is not None,
        "config": asdict(given.config),
        "verification": found,
    }
    stopped.tell(f"stopped after {len(results)} of {len(chosen.prompts)} prompts")
    sheet = table(results, [*methods], settings.describe(), f"verification: {found}")
    files.show(as_json(results, [*methods], described), sheet)
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
