"""Where the time of a step goes on the device: its kernels by what they do, and the gaps between.

Next file: `answers.py`.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.shapes import KnownModel, Shape, random_prompt
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.steps import Opened, commit_root, open_target, run_step, wrong_tree
from benchmarks.gpu.used import Tally, used_by
from lade.gpu.policy import DevicePolicy
from lade.tree import Tree

TREE_SIZES = (1, 32)  # nodes, the root included
_NUM_WARM_UPS = 3
_NUM_PROFILES = 3  # of which the median is told
_NUM_LONGEST = 8  # kernels to name
_MAX_NAME = 80  # characters of a kernel's name: templates have thousands
_GROUPS = {
    "attention": r"attend|merge_splits|flash|fmha|attention",
    "products": r"gemm|gemv|cutlass|cublas|nvjet|splitk|matmul|linear|::(add|b)?mm",
    "copies": r"memcpy|memset|copy",
}
_OTHERS = "other operations"


class Kernel(NamedTuple):
    """An operation of the device, in seconds since some moment."""

    name: str
    start: float
    end: float


def measure_kernels(
    known: KnownModel, shape: Shape, stage: Stage, policy: DevicePolicy | None = None
) -> None:
    """Profile steps behind a prompt, without their commit."""
    device = known.model.device
    prompt = random_prompt(shape, shape.prompt_length, seed=0).to(device)
    room = len(TREE_SIZES) * (_NUM_WARM_UPS + _NUM_PROFILES) + max(TREE_SIZES)
    with open_target(known.model, prompt, room, Tally(policy)) as opened:
        for size in TREE_SIZES:
            if stage.may_begin(f"{size} nodes"):
                tree = wrong_tree(known, int(prompt[0, -1]), size)
                for _ in range(_NUM_WARM_UPS):
                    run_step(opened.target, tree)
                    commit_root(opened.target)
                replayed = opened.tally.num_replayed
                profiles = [_profile(opened, tree, device) for _ in range(_NUM_PROFILES)]
                median = sorted(profiles, key=_span)[_NUM_PROFILES // 2]
                used = used_by(
                    *(known.model, opened.chosen, opened.target),
                    can_record=opened.tally.can_record(device),
                    num_replayed=opened.tally.num_replayed - replayed,
                )
                rows = rows_of(median)
                stage.add(*({"num_nodes": size, **row, **used._asdict()} for row in rows))


def _profile(opened: Opened, tree: Tree, device: torch.device) -> list[Kernel]:
    is_cuda = device.type == "cuda"
    kind = device.type.upper()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities, acc_events=True) as profiled:  # or torch 2.11 warns
        run_step(opened.target, tree)
    commit_root(opened.target)
    return [
        Kernel(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiled.events() or ()
        # On a CPU, operations call others, which are part of them.
        if event.device_type.name == kind and event.cpu_parent is None
    ]


def _span(kernels: Sequence[Kernel]) -> float:
    """Return the time from the start of the first kernel to the end of the last."""
    if not kernels:
        return 0.0
    return max(each.end for each in kernels) - min(each.start for each in kernels)


def rows_of(kernels: Sequence[Kernel]) -> Iterator[dict[str, Any]]:
    """Yield what the time of a step went to: kinds of kernels, gaps, all, and the longest kernels.

    Shares are of the time from the start of the first kernel to the end of the last. Kernels that
    run at once count each.
    """
    span = _span(kernels)
    groups: dict[str, list[Kernel]] = {name: [] for name in (*_GROUPS, _OTHERS)}
    names: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        groups[_group_of(kernel.name)].append(kernel)
        names.setdefault(kernel.name, []).append(kernel)

    def row(what: str, sec: float, num_kernels: int, is_kernel: bool = False) -> dict[str, Any]:
        share = sec / span if span else None
        return {
            "what": what,
            "is_kernel": is_kernel,
            "num_kernels": num_kernels,
            "sec": sec,
            "share": share,
        }

    for name, of_group in groups.items():
        yield row(name, _sum(of_group), len(of_group))
    yield row("gaps", span - _busy(kernels), 0)
    yield row("all", span, len(kernels))
    longest = sorted(names.items(), key=lambda item: -_sum(item[1]))[:_NUM_LONGEST]
    for name, of_name in longest:
        yield row(name[:_MAX_NAME], _sum(of_name), len(of_name), is_kernel=True)


def _group_of(name: str) -> str:
    found = (group for group, words in _GROUPS.items() if re.search(words, name, re.IGNORECASE))
    return next(found, _OTHERS)


def _sum(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.end - kernel.start for kernel in kernels)


def _busy(kernels: Sequence[Kernel]) -> float:
    """Return for how long any kernel ran."""
    busy, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        busy += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return busy
