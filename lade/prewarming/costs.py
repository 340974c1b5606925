"""Costs of a model's forwards, measured before its first text and kept on disk."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter

import torch

from lade.attempts import Attempt
from lade.budget.costs import ForwardCosts
from lade.compat import Model, attention_of, device_of_inputs, mesh_of
from lade.drafting.drafts import draft_of
from lade.prewarming.fingerprint import fingerprint_of
from lade.prewarming.tables import cache_folder
from lade.probing.factory import VerificationPlan
from lade.probing.profile import Profile, autocast_of
from lade.probing.selfcheck import Plain, check_tokens, unchanged_random_state
from lade.targets.base import Target
from lade.transfer import Launched
from lade.tree import Tree
from ngram_pool.writing import write_whole

_FORMAT = 2  # of 1 were costs of forwards module by module
_MAX_LENGTH = _MAX_SIZE = 2**12  # of a file, and in tokens of a forward
# On a busy machine, one forward may take ten times as long as the next. What is kept decides the
# first steps of every process to come, so only times are kept that come again, to this factor, and
# none where more tokens take less than this share of the time of one.
_STEADY, _LEAST_SHARE = 1.25, 0.8
# Sizes to measure, those that say most first, and for how long: a second is as long as some dozens
# of tokens of a small model on two cores. For large models that is the first sizes alone.
_SIZES, _MAX_SEC, _MOST_TURNS = (1, 8, 2, 16, 4, 32), 1.0, 8
# Forwards of smaller models take a few milliseconds, and a step without drafts says as much.
_MIN_PARAMETERS = 20_000_000


def costs_folder() -> Path:
    """Return the folder of all costs in the user's cache; it need not exist."""
    return cache_folder("costs")


def costs_of(
    model: Model, profile: Profile, chosen: VerificationPlan, may_measure: bool = True
) -> ForwardCosts:
    """Return the costs of a model's steps; calls leave nothing else of what they learn.

    Args:
        may_measure: whether there is time to measure what new costs begin with.
    """
    key = ("costs", chosen.verification, chosen.execution, chosen.products)
    return profile.once(
        key, lambda: ForwardCosts(first_costs_of(model, profile, chosen) if may_measure else {})
    )


def first_costs_of(model: Model, profile: Profile, chosen: VerificationPlan) -> dict[int, float]:
    """Return the seconds of forwards by their tokens, from the disk, or measured and kept there.

    A first guess, which steps correct. Empty where steps are not eager trees, where it fails, and
    for models of several processes, which would measure different times.
    """
    if (chosen.verification, chosen.execution) != ("tree", "eager") or mesh_of(model) is not None:
        return {}
    costs: dict[int, float] = {}
    with Attempt(even_memory=True):  # without costs, steps will be measured
        fingerprint, path = fingerprint_of(model), None
        if fingerprint is not None:
            path = costs_folder() / f"{fingerprint}-{_setting_of(model, profile, chosen)}.json"
            costs = read_costs(path)
        if not costs:
            times = _time_forwards(model, profile, chosen)
            costs = _plausible({size: of_size[0] for size, of_size in times.items()})
            is_steady = all(of_size[1] <= _STEADY * of_size[0] for of_size in times.values())
            if path is not None and costs and is_steady:
                write_costs(path, costs)
    return costs


def _time_forwards(
    model: Model, profile: Profile, chosen: VerificationPlan
) -> dict[int, list[float]]:
    """Return the seconds of forwards by their tokens, sorted; none if it is not worth measuring.

    All sizes are measured in turn, at least twice: so a busy machine slows none of them more than
    the others, and times that differ show that it was busy.
    """
    if sum(parameter.numel() for parameter in model.parameters()) < _MIN_PARAMETERS:
        return {}
    found: dict[int, list[float]] = {}

    def run(target: Target) -> None:
        products = profile.products_for(model) if chosen.products else None
        end = perf_counter() + _MAX_SEC
        for size in _SIZES * _MOST_TURNS:
            if perf_counter() > end and len(found) > 1:
                break
            # Does not count: libraries prepare kernels for a new size, and products are compared.
            is_ready = size in found
            while not is_ready:
                num_compared = 0 if products is None else products.num_compared
                _time_one(model, target, size)
                is_ready = products is None or products.num_compared == num_compared
                is_ready |= perf_counter() > end
            times = [_time_one(model, target, size) for _ in range(2)]
            found[size] = sorted(found.get(size, []) + times)

    longest = 8 * max(_SIZES)  # each forward leaves one token
    with unchanged_random_state(model, profile), torch.no_grad():
        Plain(model, check_tokens(model)[:6]).run_target(profile, chosen, longest, run)
    return found


def _time_one(model: Model, target: Target, size: int) -> float:
    root, *drafted = islice(cycle(check_tokens(model)), size)
    draft = draft_of(drafted, [(node - 1) // 2 for node in range(size - 1)])
    inputs = target.inputs([Tree.build(root, draft)])
    start = perf_counter()
    Launched(target.forward(inputs).logits).wait()
    sec = perf_counter() - start
    target.commit([[0]])
    return sec


def read_costs(path: Path) -> dict[int, float]:
    """Return the costs in a file; empty if there is none, or it is not one of ours."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        with open(path, "rb") as file:
            described = json.loads(file.read(_MAX_LENGTH))
        costs = {int(size): float(sec) for size, sec in described["seconds"].items()}
        is_valid = described["format"] == _FORMAT and len(costs) > 1
        if is_valid and all(1 <= n <= _MAX_SIZE and 0 < sec < 3600 for n, sec in costs.items()):
            return _plausible(costs)
    return {}


def write_costs(path: Path, costs: Mapping[int, float]) -> None:
    """Write costs; a reader sees all of them or none. What cannot be written is left out."""
    seconds = {str(size): round(sec, 6) for size, sec in sorted(costs.items())}
    with suppress(OSError):
        write_whole(path, json.dumps({"format": _FORMAT, "seconds": seconds}).encode())


def _plausible(costs: dict[int, float]) -> dict[int, float]:
    """Return costs as they are, or none if more tokens take less time than one."""
    return costs if costs and min(costs.values()) >= _LEAST_SHARE * costs[1] else {}


def _setting_of(model: Model, profile: Profile, chosen: VerificationPlan) -> str:
    """Return a short digest of what the costs of a checkpoint depend on."""
    device = device_of_inputs(model)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    parts = (
        *(
            str(model.device),
            autocast_of(model),
            model.dtype,
            chosen.attention,
            attention_of(model),
            chosen.products,
        ),
        *(torch.__version__, torch.get_num_threads(), os.cpu_count(), platform.node(), name),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
