"""Forwards by their number of tokens, with torch's products and with lade's: `forwards`."""

import math
from collections.abc import Mapping

import torch

from lade.bench.environment import environment
from lade.bench.tables import Sheet
from lade.cli.results import ResultFiles, progress_bar
from lade.models.loading import LoadedModel
from lade.prewarming.costs import time_forwards
from lade.probing.factory import with_products
from lade.probing.plan import choose_verification
from lade.probing.profile import profile_of

SIZES = (1, 2, 4, 8, 16, 24, 32, 64)
_NUM_ROUNDS = 3  # of both products in turn: a machine that is busy for a while slows down both
_MAX_SEC = 20.0  # of each


def run(loaded: LoadedModel, files: ResultFiles) -> None:
    """Time forwards of a model, and print and write the shortest times.

    Raises:
        ValueError: no layer of the model has a choice.
    """
    model = loaded.model
    profile = profile_of(model)
    plan = choose_verification(model, profile=profile)
    plans = {"torch": plan, "lade": with_products(plan, model, profile)}
    if not plans["lade"].products:
        raise ValueError("expected a model on a CPU with large layers, verified by trees")
    seconds: dict[str, dict[int, float]] = {name: {} for name in plans}
    with progress_bar() as bar:
        for _ in bar.track(range(_NUM_ROUNDS), description="timing"):
            for name, each in plans.items():
                for size, sec in time_forwards(model, profile, each, SIZES, _MAX_SEC).items():
                    shortest = round(min(sec[0], seconds[name].get(size, math.inf)), 5)
                    seconds[name][size] = shortest
    described = {"model": loaded.name, "dtype": str(model.dtype).removeprefix("torch.")}
    threads = {"num_threads": torch.get_num_threads()}
    content = {"environment": environment(), **described, **threads, "seconds": seconds}
    files.show(content, sheet_of(seconds))


def sheet_of(seconds: Mapping[str, Mapping[int, float]]) -> Sheet:
    """Return the times in milliseconds, a column for each size that there was time for in both."""
    sizes = sorted(seconds["torch"].keys() & seconds["lade"].keys())
    rows = [
        (f"{name}'s products", *(f"{1000 * of_sizes[size]:.0f}" for size in sizes))
        for name, of_sizes in seconds.items()
    ]
    headings = ["milliseconds by tokens", *map(str, sizes)]
    return Sheet("Forwards", headings, 1, [rows])
