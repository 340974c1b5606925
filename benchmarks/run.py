"""`run`: any methods over a file of prompts, also several times, with draft models and pools."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.methods import METHODS, named
from benchmarks.quantized import int8_copy
from lade.bench.baselines import Given
from lade.bench.prompts import Prompt
from lade.bench.report import groups
from lade.bench.run import Result
from lade.cli.bench import with_assistant
from lade.models.loading import LoadedModel

_INT8 = ":int8"
_SELF = "self"


def choose(
    text: str | None,
    has_pools: bool,
    assistant: str | None,
    num_layers: int | None,
    saves: bool = False,
) -> list[str]:
    """Return the methods to run.

    Raises:
        ValueError: a method is unknown or named twice, or lacks what it drafts by.
    """
    usual = [n for n, i in METHODS.items() if i.is_default and (has_pools or i.takes is None)]
    names = usual if text is None else named(text, METHODS)
    takes = {METHODS[name].takes for name in names}
    if "assistant" in takes and assistant is None:
        raise ValueError(
            "expected --assistant with a method of an assistant in --methods, got none"
        )
    if "pools" in takes and not has_pools:
        raise ValueError("expected --pool with lade_pool and lade_pool_fresh, got none")
    if "hf_early_exit" in names and num_layers is None:
        raise ValueError("expected --first-layers N with hf_early_exit in --methods, got no number")
    if saves and sum(METHODS[name].keeps_pool for name in names) != 1:
        raise ValueError("expected lade or lade_pool in --methods with --save-pool, and not both")
    given = {"assistant": assistant, "num_layers": num_layers, "pools": has_pools or None}
    for name, value in given.items():
        if value is not None and name not in takes:
            known = ", ".join(method for method, info in METHODS.items() if info.takes == name)
            raise ValueError(f"expected one of {known} in --methods, to take {name}")
    return names


def add_to(content: dict[str, Any], results: Sequence[Result], *, assistant: str | None) -> None:
    """Add an assistant's name, and the share of answers that are alike in all passes."""
    content["settings"]["assistant"] = None if assistant is None else Path(assistant).name
    for group, part in groups(results).items():
        for name, entry in content["summary"][group].items():
            entry["share_repeated"] = share_repeated(part, name)


def load_assistant(
    given: Given, loaded: LoadedModel, assistant: str, trust_remote_code: bool
) -> Given:
    """Load the assistant: another model, or the model itself, or a copy in 8 bits of either."""
    name = assistant.removesuffix(_INT8)
    if name == _SELF:
        given = given._replace(assistant=loaded.model)
    else:
        given = with_assistant(given, loaded, name, trust_remote_code)
    if assistant.endswith(_INT8):
        given = given._replace(assistant=int8_copy(given.assistant))
    return given


def share_repeated(results: Iterable[Result], method: str) -> float | None:
    """Return the share of sequences with the same text in all passes; None for a single pass.

    A pass that was interrupted, or whose other answers end in loops, says nothing of what it lacks.
    """
    texts: dict[tuple[tuple[Prompt, ...], int], list[list[list[int]]]] = {}
    num_seen: Counter[tuple[int, tuple[Prompt, ...]]] = Counter()  # a file may have a prompt twice
    for result in results:
        prompts = tuple(result.prompts)
        number = num_seen[result.num_pass, prompts]
        num_seen[result.num_pass, prompts] += 1
        texts.setdefault((prompts, number), []).append(result.answers[method].rows)
    of_rows = [
        row for of_one in texts.values() if len(of_one) > 1 for row in zip(*of_one, strict=True)
    ]
    if not of_rows:
        return None
    return sum(all(text == of_row[0] for text in of_row) for of_row in of_rows) / len(of_rows)
