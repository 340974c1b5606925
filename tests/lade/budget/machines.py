"""Made-up machines, on which seconds are learned and chosen by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SIZES = np.arange(1.0, 65.0)  # of steps, in tokens


@dataclass(frozen=True)
class Kind:
    """What steps of the sizes `SIZES` take, in seconds, and how far off measurements are.

    Attributes:
        noise: standard deviation of logarithms, half of it of a load that comes and goes slowly.
        doubled: share of measurements that are twice as long.
        first: times as long are measurements of a size that has not run.
        load: in every other 60 steps, all sizes take so many times as long.
        compute_load: the same of what they take beyond one token.
    """

    sec: Floats
    noise: float = 0.03
    doubled: float = 0.005
    first: float = 2.0
    load: float = 1.0
    compute_load: float = 1.0


def through(points: Mapping[int, float]) -> Floats:
    """Return the seconds of all sizes from milliseconds of some."""
    return np.asarray(np.interp(SIZES, [*points], [*points.values()])) / 1000


# The whole steps of SmolLM2-135M by a job on two Zen 5 cores, and by torch on two Zen 3 cores.
JOB_BFLOAT16 = through({1: 10, 4: 12, 8: 14.3, 12: 16.5, 16: 18, 24: 24, 32: 29.5, 64: 49})
JOB_FLOAT32 = through({1: 16.2, 4: 18.5, 8: 20.5, 12: 23, 16: 25, 24: 31, 32: 37, 64: 63})
TORCH_BFLOAT16 = through({1: 32, 4: 32, 8: 35.5, 12: 41, 16: 43.5, 24: 50.5, 32: 52, 64: 91})
TORCH_FLOAT32 = through({1: 45, 2: 72, 4: 64.5, 8: 66, 16: 75, 24: 88, 32: 100, 48: 138, 64: 160})
CLIFF = np.where(SIZES < 2, 10.0, 16.5 + 0.35 * SIZES) / 1000

KINDS = {
    "a job in bfloat16": Kind(JOB_BFLOAT16),
    "a job in float32": Kind(JOB_FLOAT32),
    "torch in bfloat16": Kind(TORCH_BFLOAT16),
    "torch in float32": Kind(TORCH_FLOAT32),
    "flat as a GPU": Kind((10 + 0.01 * SIZES) / 1000),
    "steep": Kind((2 + 8 * SIZES) / 1000),
    "half as steep": Kind((6 + 4 * SIZES) / 1000),
    "a cliff at the second token": Kind(CLIFF),
    "steps of four": Kind((7 + 3 * np.ceil(SIZES / 4)) / 1000),
    "noise": Kind(JOB_BFLOAT16, noise=0.3, doubled=0.05),
    "a cliff in noise": Kind(CLIFF, noise=0.3, doubled=0.05),
    "a load that comes and goes": Kind(JOB_BFLOAT16, load=2.0),
    "a load beside a cliff": Kind(CLIFF, load=2.0),
    "a load on computing": Kind(JOB_BFLOAT16, compute_load=3.0),
    "first runs ten times as long": Kind(JOB_BFLOAT16, first=10.0),
    "first runs beside a cliff": Kind(CLIFF, first=10.0),
}


class Machine:
    """A machine of a kind, at one step after the other."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self._kind, self._rng = kind, np.random.default_rng(seed)
        self._seen: set[int] = set()
        self._slow, self._num_steps = 0.0, 0

    def sec(self) -> Floats:
        """Return what sizes take in the present step."""
        kind, is_loaded = self._kind, self._num_steps // 60 % 2 == 1
        if not is_loaded:
            return kind.sec
        first: float = kind.sec.item(0)
        return kind.load * (first + kind.compute_load * (kind.sec - first))

    def measure(self, size: int) -> float:
        """Return what the step of a size seems to take, and go on to the next."""
        kind, rng = self._kind, self._rng
        self._slow = 0.9 * self._slow + 0.3 * kind.noise * rng.normal()
        sec = self.sec().item(size - 1) * float(np.exp(self._slow + kind.noise * rng.normal()))
        sec *= 2.0 if rng.random() < kind.doubled else 1.0
        sec *= 1.0 if size in self._seen else kind.first
        self._seen.add(size)
        self._num_steps += 1
        return sec


def gains(num_steps: int, seed: int) -> Floats:
    """Return the tokens to expect of each size in steps with drafts of all qualities.

    Steps with good drafts come in runs, as in texts.
    """
    rng = np.random.default_rng(seed)
    quality = np.repeat(rng.uniform(0.05, 1.0, num_steps // 8 + 1), 8)[:num_steps, None]
    quality = np.clip(quality + rng.normal(0.0, 0.15, quality.shape), 0.02, 1.0)
    probs = 0.95 * quality * SIZES[:-1] ** -(2.0 - 1.2 * quality)
    return np.cumsum(np.hstack([np.ones((num_steps, 1)), probs]), axis=1)


def rates(
    kind: Kind, choose: Callable[[Machine, Floats], int], expected: Floats, seed: int
) -> Floats:
    """Return tokens a second, of the first 100 steps and of those after.

    Args:
        choose: returns the size of a step, of a machine and what to expect of each size.
        expected: by step.
    """
    machine, done = Machine(kind, seed), list[tuple[float, float]]()
    for of_step in expected:
        sec = machine.sec()
        size = choose(machine, of_step)
        done.append((of_step.item(size - 1), sec.item(size - 1)))
    tokens, sec = np.array(done).T
    parts = [slice(0, 100), slice(100, None)]
    return np.array([tokens[part].sum() / sec[part].sum() for part in parts])
