"""Forwards by their number of tokens, by torch and by lade, beside reading weights: `forwards`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from time import perf_counter

import torch
from rich.table import Table
from transformers import GenerationConfig

from benchmarks.environment import environment
from benchmarks.report import progress_bar, sheet, show
from benchmarks.shapes import SHAPES, make_model
from lade.compat import Model
from lade.drafting.drafts import draft_of
from lade.forward.widening import NARROW
from lade.models import pack
from lade.models.loading import LoadedModel
from lade.probing.factory import make_target
from lade.probing.plan import choose_verification, ready
from lade.probing.profile import profile_of
from lade.targets.base import Target
from lade.tree import Tree

SIZES = (1, 2, 4, 8, 16, 32, 64)
_NUM_ROUNDS = 3  # of all ways in turn: a machine that is busy for a while slows down both
_NUM_WARM = 2  # forwards that lade compares ways in, of each size
_SEED = 0

#: Milliseconds by way, number of tokens before, and number of tokens.
Seconds = dict[str, dict[str, dict[str, float]]]


def run(loaded: LoadedModel, contexts: Sequence[int], file: Path | None) -> None:
    """Time forwards of a model, and print and write the shortest times.

    Args:
        loaded: a model on a CPU.
        contexts: numbers of tokens before.
        file: where results go.

    Raises:
        ValueError: lade has no forwards or products for the model.
    """
    model = loaded.model
    with torch.inference_mode(), progress_bar() as bar:
        seconds = _timed(model, bar.track(contexts, description="timing"))
        reading = min(_read(model) for _ in range(2 * _NUM_ROUNDS))
    described = {"model": loaded.name, "dtype": str(model.dtype).removeprefix("torch.")}
    threads = {"num_threads": torch.get_num_threads(), "reading": round(reading, 5)}
    content = {"environment": environment(), **described, **threads, "seconds": seconds}
    show(file, content, sheet_of(seconds, reading))


def shaped(name: str, dtype: str | None, threads: int | None) -> LoadedModel:
    """Return a model of a shape with random weights, of the threads and the format asked for."""
    if threads is not None:
        torch.set_num_threads(threads)
    model = make_model(SHAPES[name], torch.device("cpu")).model
    if dtype is not None:
        model = model.to(getattr(torch, dtype))
    if model.dtype in NARROW:
        pack(model)
    return LoadedModel(model, None, name)


def _timed(model: Model, contexts: Iterable[int]) -> Seconds:
    profile = profile_of(model)
    plan = choose_verification(model, profile=profile)
    plans = {"torch": plan, "lade": ready(plan, model, profile)}
    if not plans["lade"].is_fast:
        raise ValueError("expected a model on a CPU with large layers, verified by trees")
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(_SEED)
    seconds: Seconds = {name: {} for name in plans}
    for context in contexts:
        ids = torch.randint(vocab_size, (1, context), generator=generator)
        targets = {}
        for name, each in plans.items():
            options = GenerationConfig()
            target = make_target(model, ids, {}, each, max(SIZES) + 1, options, profile)
            target.prefill()
            targets[name] = target
        for _, size, (name, target) in product(range(_NUM_ROUNDS), SIZES, targets.items()):
            of_context = seconds[name].setdefault(str(context), {})
            sec = min(_time_one(target, size) for _ in range(_NUM_WARM + 2))
            of_context[str(size)] = round(min(sec, of_context.get(str(size), math.inf)), 5)
    return seconds


def _time_one(target: Target, size: int) -> float:
    """Return what a tree takes whose nodes have two children each."""
    draft = draft_of([*range(2, size + 1)], [(node - 1) // 2 for node in range(size - 1)])
    inputs = target.inputs([Tree.build(1, draft)])
    start = perf_counter()
    target.forward(inputs)
    sec = perf_counter() - start
    target.discard()
    return sec


def _read(model: Model) -> float:
    """Return the seconds that reading all weights takes, on all threads."""
    in_bytes = [each.detach().view(torch.uint8).flatten() for each in model.parameters()]
    weights = [each[: len(each) // 8 * 8].view(torch.int64) for each in in_bytes]
    start = perf_counter()
    for weight in weights:
        weight.sum()
    return perf_counter() - start


def sheet_of(seconds: Mapping[str, Mapping[str, Mapping[str, float]]], reading: float) -> Table:
    """Return the times in milliseconds, a column for each size."""
    sizes = [*next(iter(seconds["torch"].values()))]
    rows = [
        (f"{context} tokens before", name, *(f"{1000 * of_sizes[size]:.1f}" for size in sizes))
        for context in seconds["torch"]
        for name, of_sizes in ((name, each[context]) for name, each in seconds.items())
    ]
    headings = ["", "milliseconds by tokens", *sizes]
    title = f"Forwards (reading the weights once: {1000 * reading:.1f} ms)"
    return sheet(title, headings, [rows])
