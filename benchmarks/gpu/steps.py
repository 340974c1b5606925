"""How long a step takes, by the size of its tree and the length of the text before it.

A step is what the decoding loop does between a draft and its verification: it makes the tree's
tensors, replays the recorded forward, ranks the likeliest tokens for the pool, and waits for the
target's choices on the host. Next file: `answers.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean, median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.drafter import ReplayedDrafter
from benchmarks.gpu.shapes import KnownModel, Shape, random_prompt
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.used import Tally, Used, recorded_or_fixed, used_by
from lade.bench.device import wait_for
from lade.compat import Model, device_of_inputs
from lade.config import Config
from lade.drafters.runner import prepared
from lade.drafting.successors import rank, with_probs
from lade.gpu.policy import DevicePolicy
from lade.probing.factory import VerificationPlan, make_target
from lade.probing.plan import choose_verification
from lade.sampling.greedy import GreedyChoice
from lade.targets.base import Target
from lade.tree import ROOT, Tree
from ngram_pool import DEFAULT_NUM_SUCCESSORS, Draft

_NUM_WARM_UPS = 3  # per size: kernels are chosen, compiled or captured
_MIN_ROUNDS = 5
_MAX_ROUNDS = 15
_MAX_SEC = 6.0  # of rounds per context, once _MIN_ROUNDS are done
_ROW = 0


class Opened(NamedTuple):
    """A model set up to verify drafts, the prompt already run."""

    target: Target
    chosen: VerificationPlan
    tally: Tally


@contextmanager
def open_target(
    model: Model, input_ids: Tensor, max_new_tokens: int, tally: Tally
) -> Iterator[Opened]:
    """Yield a model set up to verify drafts in recorded steps, the prompt already run.

    Steps of a device that records nothing have the same fixed shapes. Recordings outlast this and
    go on counting on the tally that they were made with: give the same one each time.

    Raises:
        UnsupportedModelError: whole trees cannot be verified here; says why.
    """
    config, model_kwargs = prepared(model, input_ids, max_new_tokens)
    execution = recorded_or_fixed(device_of_inputs(model), tally)
    with torch.no_grad():
        chosen = choose_verification(model, config=Config(verification="tree"), execution=execution)
        target = make_target(
            model, input_ids, model_kwargs, chosen, max_new_tokens, config, policy=tally
        )
        try:
            target.prefill()
            yield Opened(target, chosen, tally)
        finally:
            target.close()
        target.release()


class _Timing(NamedTuple):
    """The timing of one step."""

    sec: float
    host_sec: float  # until the forward was launched; the rest is waiting
    busy_sec: float  # until the device had also ranked tokens: the next forward starts no earlier
    num_cached: int  # tokens before its root
    is_replayed: bool
    used: Used


class _OfSize(NamedTuple):
    """What is known of steps of a size."""

    recording_sec: float  # of all that was recorded for it
    recording_bytes: int
    timings: list[_Timing]


_Timings = dict[int, _OfSize]  # by tree size
_Rows = list[dict[str, Any]]


def measure_steps(
    known: KnownModel,
    shape: Shape,
    bytes_per_sec: float | None,
    stage: Stage,
    policy: DevicePolicy | None = None,
) -> None:
    """Time steps of all tree sizes at all contexts; the prefills are not timed."""
    tally = Tally(policy)  # one, for a context replays what was recorded at another
    longest = shape.config["max_position_embeddings"]
    most = _num_most(len(shape.tree_sizes))
    for context in shape.contexts:
        what = f"context {context}"
        if context + most + max(shape.tree_sizes) > longest:
            stage.leave_out(what, f"the model has {longest} positions")
        elif stage.may_begin(what):
            with stage.part(what):
                # Half of the steps are run before the context is reached, half after it.
                prompt = random_prompt(shape, max(1, context - most // 2), seed=context)
                root = int(prompt[0, -1])
                trees = {size: wrong_tree(known, root, size) for size in shape.tree_sizes}
                others = [*stage.rows]

                def show(timings: _Timings, context: int = context, others: _Rows = others) -> None:
                    rows = _rows(known, context, timings, bytes_per_sec)
                    stage.replace([*others, *rows])

                show(_time_steps(known, context, prompt, trees, stage, show, tally))


def _time_steps(
    known: KnownModel,
    context: int,
    prompt: Tensor,
    trees: Mapping[int, Tree],
    stage: Stage,
    show: Callable[[_Timings], None],
    tally: Tally,
) -> _Timings:
    """Time steps of each tree size, taken in turn so that all see the same drift.

    Every step commits its root, so the text grows by a token per step. What is known of the sizes
    so far is shown as each is warmed up: the next one's recording may end the process.
    """
    prompt = prompt.to(known.model.device)
    while trees:
        room = _num_most(len(trees)) + max(trees)
        first: _Timings = {}
        with open_target(known.model, prompt, room, tally) as opened:
            for size, tree in trees.items():
                of_size = _warm_up(known.model, opened, tree, context, stage)
                if of_size is None:
                    break
                first[size] = of_size
                show(first)
            else:
                return _rounds(known.model, opened, trees, stage, first)
        # A step that ran out of memory leaves nothing to go on from: start again with what fits.
        del opened
        trees = {size: trees[size] for size in first}
    return {}


def _rounds(
    model: Model, opened: Opened, trees: Mapping[int, Tree], stage: Stage, first: _Timings
) -> _Timings:
    """Time steps of all sizes in turn; those of `first` were not in one round."""
    timings = {size: of_size._replace(timings=[]) for size, of_size in first.items()}
    start = perf_counter()
    for num_round in range(_MAX_ROUNDS):
        is_over = perf_counter() - start > _MAX_SEC or not stage.has_time
        if is_over and num_round >= _MIN_ROUNDS:
            break
        for size, tree in trees.items():
            timings[size].timings.append(_time_step(model, opened, tree))
    return timings


def _warm_up(
    model: Model, opened: Opened, tree: Tree, context: int, stage: Stage
) -> _OfSize | None:
    """Run steps of a size; keep the last, or None if there is no memory for it, and note that."""
    stage.say(f"{stage.title}: context {context}, {len(tree)} nodes")
    tally = opened.tally
    before = tally.recording_sec, tally.recording_bytes
    timings: list[_Timing] = []
    with stage.part(f"context {context}, {len(tree)} nodes or more"):
        while len(timings) < _NUM_WARM_UPS:
            timings.append(_time_step(model, opened, tree))
    if len(timings) < _NUM_WARM_UPS:
        return None
    recording = tally.recording_sec - before[0], tally.recording_bytes - before[1]
    return _OfSize(*recording, timings[-1:])


def _num_most(num_sizes: int) -> int:
    """Return the maximum number of steps at a context."""
    return (_NUM_WARM_UPS + _MAX_ROUNDS) * num_sizes


def wrong_tree(known: KnownModel, root: int, size: int) -> Tree:
    """Return a tree of wrong tokens with the shape of a draft."""
    if size == 1:
        return Tree.build(root, Draft.empty())
    drafter = ReplayedDrafter(known.successors, [0], size - 1)
    sequence = drafter.open([root])
    return Tree.build(root, drafter.draft(sequence, [root], size - 1))


def _time_step(model: Model, opened: Opened, tree: Tree) -> _Timing:
    """Time a step as in the decoding loop; the commit after it is waited for, untimed."""
    target, chosen, tally = opened
    (num_cached,) = target.num_cached
    num_replayed = tally.num_replayed
    start, launched, chosen_at, idle = run_step(target, tree)
    commit_root(target)
    is_replayed = tally.num_replayed > num_replayed
    can_record = tally.can_record(target.device)
    used = used_by(model, chosen, target, can_record=can_record, num_replayed=int(is_replayed))
    times = chosen_at - start, launched - start, idle - start
    return _Timing(*times, num_cached, is_replayed, used)


class Moments(NamedTuple):
    """When a step began and how far it was when; of `perf_counter`."""

    start: float
    launched: float  # the forward
    chosen: float  # the target's tokens were on the host
    idle: float  # the device was done with ranks for the pool, too


def run_step(target: Target, tree: Tree) -> Moments:
    """Verify a tree, and rank tokens for a pool beside that, as the decoding loop does."""
    choice = GreedyChoice(DEFAULT_NUM_SUCCESSORS)
    start = perf_counter()
    output = target.forward(target.inputs([tree]))
    launched = perf_counter()
    choice.look_at(output.logits, {_ROW: tree})
    with_probs(choice.ranked or rank(output.logits, DEFAULT_NUM_SUCCESSORS), output.logits)
    choice.wait()
    chosen = perf_counter()
    wait_for(target.device)
    return Moments(start, launched, chosen, perf_counter())


def commit_root(target: Target) -> None:
    """Commit the root of a tree that was verified, and wait for that."""
    target.commit([[ROOT]])
    wait_for(target.device)


def _rows(
    known: KnownModel,
    context: int,
    timings: _Timings,
    bytes_per_sec: float | None,
) -> _Rows:
    """Return the medians at a context, one row per tree size."""
    of_one = median(timing.sec for timing in timings[1].timings) if 1 in timings else None
    rows = []
    for size, (recording_sec, recording_bytes, of_size) in timings.items():
        sec = median(timing.sec for timing in of_size)
        num_cached = fmean(timing.num_cached for timing in of_size)
        read = known.weight_bytes + known.bytes_per_cached_token * (num_cached + size)
        rows.append(
            {
                "context": context,
                "num_nodes": size,
                "num_repeats": len(of_size),
                "mean_num_cached": num_cached,
                "sec": sec,
                "least_sec": min(timing.sec for timing in of_size),
                "busy_sec": median(timing.busy_sec for timing in of_size),
                "host_sec": median(timing.host_sec for timing in of_size),
                "share_replayed": fmean(timing.is_replayed for timing in of_size),
                **of_size[-1].used._asdict(),
                "recording_sec": recording_sec,
                "recording_bytes": recording_bytes,
                "ratio_to_one_node": None if of_one is None else sec / of_one,
                "read_bytes": int(read),
                "share_of_copy_bandwidth": (
                    None if bytes_per_sec is None else read / sec / bytes_per_sec
                ),
            }
        )
    return rows
