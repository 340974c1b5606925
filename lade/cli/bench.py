"""`lade bench`: answer prompts by every method, and print and write what came of it."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lade.bench.prompts import Prompt, read_prompts
from lade.cli.prompting import encode_prompts
from lade.cli.results import Keeping, progress_bar, show
from lade.models.loading import LoadedModel
from lade.models.settings import Settings

if TYPE_CHECKING:
    from lade.bench.run import Result


class Chosen(NamedTuple):
    """The prompts of a run, and how they were chosen."""

    prompts: Sequence[Prompt]
    described: dict[str, Any]  # for result files, which do not hold their texts

    @classmethod
    def read(cls, path: Path | None) -> "Chosen":
        """Read a prompt file; without one, take the prompts of the demo."""
        if path is None:
            from lade.bench.demo_prompts import DEMO_PROMPTS

            return cls(DEMO_PROMPTS, {"name": "demo", "num": len(DEMO_PROMPTS)})
        prompts = read_prompts(path)
        return cls(prompts, {**fingerprint(path), "num": len(prompts)})


def compare(loaded: LoadedModel, chosen: Chosen, settings: Settings, file: Path | None) -> None:
    """Run every method of `lade bench`."""
    from lade.bench.methods import METHODS
    from lade.bench.report import as_json, table
    from lade.bench.run import Contest, warm_up
    from lade.probing.plan import probe

    inputs = encode_prompts(loaded, [each.text for each in chosen.prompts], settings.max_new_tokens)
    results: list[Result] = []
    with Keeping(results) as kept, progress_bar() as bars:
        task = bars.add_task("answering", total=len(inputs))
        warm_up(loaded, METHODS, settings)
        contest = Contest(loaded.model, METHODS, settings)
        for prompt, given in zip(chosen.prompts, inputs, strict=True):
            results.append(contest.answer([prompt], given))
            bars.advance(task)
    verification = probe(loaded.model).verification
    described = {
        **describe_model(loaded),
        **asdict(settings),
        "prompts": chosen.described,
        "methods": [*METHODS],
        "interrupted": kept.by is not None,
        "verification": verification,
    }
    content = as_json(results, [*METHODS], described)
    caption = f"verification: {verification}"
    show(file, content, table(results, [*METHODS], settings.describe(), caption))
    kept.end(f"stopped after {len(results)} of {len(inputs)} prompts")


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
