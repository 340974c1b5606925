"""Seconds of a model's forwards by their size, measured before its first text."""

from collections.abc import Sequence
from time import perf_counter

import numpy as np
import torch

from lade.compat import Model
from lade.probing.factory import VerificationPlan
from lade.probing.profile import Profile
from lade.probing.selfcheck import check_tokens, plain_of, unchanged_random_state
from lade.products.linear import Products
from lade.targets.base import Target
from lade.transfer import Launched
from lade.tree import Tree
from ngram_pool import Draft

# Sizes to measure, those that say most first, and for how long: a second is as long as some dozens
# of tokens of a small model on two cores. For large models that is the first sizes alone.
_SIZES = (1, 8, 2, 16, 4, 32)
_MAX_SEC = 1.0
_MOST_TURNS = 8
# Forwards of smaller models take a few milliseconds, and a step without drafts says as much.
_MIN_PARAMETERS = 20_000_000


def time_forwards(
    model: Model,
    profile: Profile,
    chosen: VerificationPlan,
    sizes: Sequence[int] = _SIZES,
    max_sec: float = _MAX_SEC,
) -> dict[int, list[float]]:
    """Return the seconds of forwards by their tokens; empty if it is not worth measuring.

    All sizes are measured in turn, at least twice, the shortest time of each first: so a busy
    machine slows none of them more than the others, and times that differ show that it was busy.

    Args:
        model: the target.
        profile: of the model.
        chosen: how the model verifies drafts, by tree.
        sizes: in tokens, those that say most first.
        max_sec: how long to measure; the first two sizes take what they take.
    """
    if sum(parameter.numel() for parameter in model.parameters()) < _MIN_PARAMETERS:
        return {}
    found: dict[int, list[float]] = {}

    def run(target: Target) -> None:
        products = profile.products_for(model) if chosen.products else None
        found.update(_in_turn(model, target, sizes, max_sec, products))

    longest = 8 * max(sizes)  # each forward leaves one token
    with unchanged_random_state(model, profile), torch.no_grad():
        plain_of(model, "dynamic", is_padded=False).run_target(profile, chosen, longest, run)
    return found


def _in_turn(
    model: Model,
    target: Target,
    sizes: Sequence[int],
    max_sec: float,
    products: Products | None,
) -> dict[int, list[float]]:
    """Measure as many sizes, and as often, as there is time for; the first two at least."""
    found: dict[int, list[float]] = {}
    end = perf_counter() + max_sec
    for size in (*sizes,) * _MOST_TURNS:
        if perf_counter() > end and len(found) > 1:
            break
        # What does not count: libraries prepare kernels for a new size, and products are compared.
        is_ready = size in found
        while not is_ready:
            num_compared = 0 if products is None else products.num_compared
            _time_one(model, target, size)
            is_ready = products is None or products.num_compared == num_compared
            is_ready |= perf_counter() > end
        times = [_time_one(model, target, size) for _ in range(2)]
        found[size] = sorted(found.get(size, []) + times)
    return found


def _time_one(model: Model, target: Target, size: int) -> float:
    tokens = check_tokens(model)
    token_ids = np.resize(np.array(tokens, np.int32), size)
    nodes = np.arange(size - 1)
    parents = (nodes - 1) // 2
    depths = np.log2(nodes + 1).astype(np.int32) + 1
    draft = Draft(token_ids[1:], parents.astype(np.int32), depths, np.ones(size - 1))
    inputs = target.inputs([Tree.build(int(token_ids[0]), draft)])
    start = perf_counter()
    Launched(target.forward(inputs).logits).wait()
    sec = perf_counter() - start
    target.commit([[0]])
    return sec
