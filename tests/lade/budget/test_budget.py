"""Budgets against made-up machines and drafters: what they decide, and what that costs.

Rates are tokens per second of the machine without its noise, over those of plain decoding. The
figures of "the earlier budget" in the docstrings are those of the one that this one replaced: sums
over rows, one factor for all promises, every 16 steps a detour; they were measured with this file.
"""

import copy
import dataclasses
import functools
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from statistics import harmonic_mean
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import lade
from lade.budget import _kernels
from lade.budget.budget import Budget, MeasuredBudget, PricedBudget, Probs
from lade.budget.calibration import Outcome
from lade.budget.costs import Costs, ForwardCosts
from lade.config import Config
from lade.drafting.drafts import chain, draft_of
from lade.probing.profile import profile_of
from ngram_pool import Draft
from tests.grids import thinned
from tests.lade.both import answered
from tests.lade.tiny import BatchDrafter, tiny_model

# SmolLM2-135M on two cores, context of 300: ms of a forward by its tokens.
BFLOAT16 = {1: 30.9, 2: 29.5, 4: 30.3, 6: 32.0, 8: 34.2, 12: 39.3, 16: 41.9}
BFLOAT16 |= {24: 48.9, 32: 50.4, 48: 72.3, 64: 89.1, 512: 560.0}
FLOAT32 = {1: 43.7, 2: 70.4, 4: 62.9, 6: 61.0, 8: 64.6, 12: 67.7, 16: 73.7}
FLOAT32 |= {24: 86.9, 32: 98.8, 48: 136.5, 64: 158.9, 512: 900.0}
FREE = {1: 30.0, 512: 30.0}
NUM_TOKENS = 128  # of an answer


class Machine:
    """Forwards that take what they take: noisy, now and then three times as long, at first twice.

    Attributes:
        slower: factor on all forwards; with more than one token, by `slower_drafts` besides.
        is_shared: whether, for some dozens of forwards at a time, another process is busy too.
    """

    def __init__(
        self, costs: dict[int, float], seed: int, noise: float = 0.05, is_shared: bool = False
    ) -> None:
        self.slower = self.slower_drafts = 1.0
        sizes = sorted(costs)
        self._msec = np.interp(np.arange(513), sizes, [costs[size] for size in sizes]).tolist()
        self._noise = noise
        self._load = 0.0
        self._is_shared, self._is_busy = is_shared, False
        self._rng = np.random.default_rng(seed)
        self._seen: set[tuple[int, int]] = set()

    def cost(self, num_rows: int, size: int) -> float:
        """Return seconds without noise; attention costs more in batches, see ARCHITECTURE.md."""
        msec: float = self._msec[num_rows * size]
        msec += (num_rows - 1) * (0.8 if size == 1 else 2.1)
        return msec / 1000 * self.slower * (self.slower_drafts if size > 1 else 1.0)

    def measure(self, num_rows: int, size: int) -> float:
        """Return seconds with all the noise."""
        rng = self._rng
        self._load = 0.9 * self._load + 0.4 * self._noise * rng.normal()
        factor = np.exp(self._load + self._noise * rng.normal())
        if self._noise and rng.random() < 0.01:
            factor *= 3
        if self._is_shared and rng.random() < 0.05:
            self._is_busy = not self._is_busy
        if self._is_busy:
            factor *= 1.6
        if (num_rows, size) not in self._seen:
            self._seen.add((num_rows, size))
            factor *= 2
        return self.cost(num_rows, size) * float(factor)


class FakeDrafter:
    """Drafts a chain of ten, tokens 1 to 10, and three other guesses at the next token, 101 to 103.

    Args:
        promised: the least and the greatest probability given to each token of the chain.
        true: what that probability really is, by what was promised.
    """

    def __init__(
        self, promised: tuple[float, float], true: Callable[[float], float], seed: int
    ) -> None:
        self._promised = promised
        self._true = true
        self._rng = np.random.default_rng(seed)

    def step(self) -> tuple[Draft, list[int]]:
        """Return a draft and how the text really goes on."""
        prob = round(self._rng.uniform(*self._promised), 2)
        true = self._true(prob)
        length = int(np.argmax(self._rng.random(11) >= [*[true] * 10, 0.0]))
        text = [*range(1, length + 1), 0, 0]
        if length == 0 and self._rng.random() < 0.3 * true:
            text = [101, 0, 0]
        return chain_and_guesses(prob), text


@functools.cache
def chain_and_guesses(prob: float) -> Draft:
    """Return the draft each token of whose chain has this probability."""
    nodes = [(prob**depth, depth, depth) for depth in range(1, 11)]
    nodes += [(0.6 * (1 - prob) * 0.5**i, 100 + i, 1) for i in (1, 2, 3)]
    nodes.sort(key=lambda node: -node[0])
    places = {token_id: place for place, (_, token_id, _) in enumerate(nodes)}
    parents = [places[token_id - 1] if depth > 1 else -1 for _, token_id, depth in nodes]
    return draft_of([token_id for _, token_id, _ in nodes], parents, [prob for prob, *_ in nodes])


def accepted(draft: Draft, num_nodes: int, text: Sequence[int]) -> list[int]:
    """Return the accepted tokens and the bonus token."""
    node, depth = -1, 0
    nodes = zip(draft.parents[:num_nodes].tolist(), draft.token_ids.tolist(), strict=False)
    for place, (parent, token_id) in enumerate(nodes):
        if parent == node and token_id == text[depth]:
            node, depth = place, depth + 1
    return [*text[: depth + 1]]


def answer(
    budget: Budget,
    machine: Machine,
    drafters: Sequence[FakeDrafter],
    num_tokens: int = NUM_TOKENS,
    on_step: Callable[[int, int], None] = lambda num_nodes, num_emitted: None,
) -> float:
    """Answer with a row for each drafter, until the last one is done; return the rate."""
    emitted = dict.fromkeys(range(len(drafters)), 0)
    sec = plain_sec = 0.0
    while rows := [row for row in emitted if emitted[row] < num_tokens]:
        steps = [drafters[row].step() for row in rows]
        is_resting = budget.is_resting
        num_nodes = 0 if is_resting else budget.num_nodes([draft.probs for draft, _ in steps], 0)
        assert 0 <= num_nodes <= budget.max_draft_tokens
        before = min(emitted.values())
        outcomes = []
        for row, (draft, text) in zip(rows, steps, strict=True):
            outcomes.append(Outcome(row, draft, accepted(draft, num_nodes, text)))
            emitted[row] += len(outcomes[-1].token_ids)
        sec += machine.cost(len(rows), num_nodes + 1)
        # Plain decoding has all rows go on together.
        num_new = min(num_tokens, min(emitted.values())) - before
        plain_sec += num_new * machine.cost(len(drafters), 1)
        left = {row: num for row, num in emitted.items() if num < num_tokens}
        measured = machine.measure(len(rows), num_nodes + 1)
        budget.record(len(rows), num_nodes, measured, [] if is_resting else outcomes, left)
        on_step(num_nodes, min(emitted.values()))
    return plain_sec / sec


Text = tuple[tuple[float, float], Callable[[float], float]]  # promised, true

# What a pool says of random tokens: little, and all of it wrong. Or it is sure, and wrong.
RANDOM: Text = ((0.0, 0.5), lambda promised: 0.02)
DECEPTIVE: Text = ((0.9, 0.9), lambda promised: 0.0)
PREDICTABLE: Text = ((0.8, 0.8), lambda promised: promised)
MIXED: Text = ((0.2, 0.95), lambda promised: promised)
OVERRATED: Text = ((0.1, 0.9), lambda promised: promised**2)


Calls = Callable[[], Budget]  # returns the budget of the next call


def measuring() -> Calls:
    """Return what makes the budgets of calls that share what they measure."""
    costs = ForwardCosts()
    return lambda: MeasuredBudget(costs)


def rates(
    make: Callable[[], Calls],
    costs: dict[int, float],
    *texts: Text,
    num_answers: int = 5,
    num_machines: int = 6,
    is_shared: bool = False,
) -> list[float]:
    """Return for each machine the rate of some answers, after one that is not counted."""
    found = []
    for seed in range(num_machines):
        call, machine = make(), Machine(costs, seed, is_shared=is_shared)
        drafters = [FakeDrafter(*text, 100 * seed + row) for row, text in enumerate(texts)]
        answer(call(), machine, drafters)
        found.append(harmonic_mean([answer(call(), machine, drafters) for _ in range(num_answers)]))
    return found


def best_fixed(costs: dict[int, float], *texts: Text) -> float:
    """Return the mean rate of the best fixed number of nodes, known beforehand."""
    num_machines = max(2, 6 // len(texts))  # rows of a batch are as many texts
    found = [
        rates(lambda num=num: lambda: FixedUpTo(num), costs, *texts, num_machines=num_machines)  # type: ignore[misc]
        for num in (0, 1, 2, 3, 5, 7, 9, 11, 13)
    ]
    return max(map(float, map(np.mean, found)))


class FixedUpTo(Budget):
    """Verify so many nodes of drafts that are longer."""

    def num_nodes(self, probs: Probs, num_pending: int) -> int:
        return min(self.max_draft_tokens, super().num_nodes(probs, num_pending))


# --- what it costs --------------------------------------------------------------------------


@pytest.mark.parametrize("costs", thinned([BFLOAT16, FLOAT32], BFLOAT16))
@pytest.mark.parametrize("text", [RANDOM, DECEPTIVE])
def test_text_that_nothing_predicts_costs_nothing(costs: dict[int, float], text: Text) -> None:
    """The earlier budget: 0.980 to 1.033 on average, 0.973 in the worst case."""
    assert min(rates(measuring, costs, text)) >= 0.985  # each call is wrong at first


@pytest.mark.parametrize(
    ("costs", "text", "least"),
    [
        pytest.param(BFLOAT16, PREDICTABLE, 0.97, marks=pytest.mark.exhaustive),
        (BFLOAT16, MIXED, 1.02),
        pytest.param(BFLOAT16, OVERRATED, 0.98, marks=pytest.mark.exhaustive),
        pytest.param(FLOAT32, PREDICTABLE, 0.98, marks=pytest.mark.exhaustive),
        pytest.param(FLOAT32, MIXED, 1.02, marks=pytest.mark.exhaustive),
        (FLOAT32, OVERRATED, 1.08),
    ],
)
def test_text_that_is_predictable_runs_like_the_best_fixed_size(
    costs: dict[int, float], text: Text, least: float
) -> None:
    """Or faster: it need not be the same size each step.

    The earlier budget: 0.961, 1.040, 0.994 in bfloat16, 0.954, 1.009, 1.069 in float32.
    """
    found = rates(measuring, costs, text)
    assert np.mean(found) >= least * best_fixed(costs, text)


@pytest.mark.parametrize("costs", [BFLOAT16, FLOAT32])
def test_a_first_answer_is_not_slow(costs: dict[int, float]) -> None:
    """Most of the exploration is in it."""
    found = [
        answer(MeasuredBudget(), Machine(costs, seed), [FakeDrafter(*RANDOM, seed)])
        for seed in range(8)
    ]
    assert min(found) >= 0.94


@pytest.mark.parametrize("costs", [BFLOAT16, FLOAT32])
def test_text_that_becomes_predictable_is_noticed(costs: dict[int, float]) -> None:
    """Within 20 steps; the earlier budget took 71 and 40 in the worst of these cases."""
    for seed in range(8):
        budget, machine = MeasuredBudget(), Machine(costs, seed)
        answer(budget, machine, [FakeDrafter(*DECEPTIVE, seed)], num_tokens=600)
        sizes: list[int] = []
        predictable = FakeDrafter((0.9, 0.9), lambda promised: promised, seed)
        answer(budget, machine, [predictable], 400, lambda num, _: sizes.append(num))  # noqa: B023
        assert np.mean(np.array(sizes[20:40]) >= 4) >= 0.8


@pytest.mark.parametrize("costs", [BFLOAT16, FLOAT32])
def test_text_that_stops_being_predictable_is_noticed(costs: dict[int, float]) -> None:
    """The earlier budget: 0.88 and 0.70 of plain in the answer that is not."""
    found = []
    for seed in range(6):
        budget, machine = MeasuredBudget(), Machine(costs, seed)  # all of this is one text
        for _ in range(3):
            answer(budget, machine, [FakeDrafter(*PREDICTABLE, seed)])
        found.append(answer(budget, machine, [FakeDrafter(*DECEPTIVE, 50 + seed)]))
    assert np.mean(found) >= 0.91


EVEN: Text = ((0.5, 0.5), lambda promised: promised)


@pytest.mark.parametrize("costs", thinned([BFLOAT16, FLOAT32], BFLOAT16))
def test_costs_that_drift_are_followed(costs: dict[int, float]) -> None:
    """A long text slows all forwards, those with several tokens three times as much as one.

    The earlier budget: 0.945 and 0.898 of plain at the end of it, 0.84 and 0.72 of the best fixed
    size when the machine has been as it was for 500 tokens.
    """
    best = best_fixed(costs, EVEN)
    late, after = [], []
    for seed in range(8):
        call, machine, drafter = measuring(), Machine(costs, seed), FakeDrafter(*EVEN, seed)

        def grow(num_nodes: int, num_emitted: int, machine: Machine = machine) -> None:
            machine.slower = machine.slower_drafts = 1 + num_emitted / 1000

        answer(call(), machine, [drafter])
        answer(call(), machine, [drafter], 2000, grow)
        late.append(answer(call(), machine, [drafter], 500))
        machine.slower = machine.slower_drafts = 1.0
        answer(call(), machine, [drafter], 500)
        after.append(answer(call(), machine, [drafter]))
    assert np.mean(late) >= 0.97
    assert np.mean(after) >= 0.9 * best


@pytest.mark.parametrize("costs", thinned([BFLOAT16, FLOAT32], BFLOAT16))
def test_a_batch_does_not_lose_by_its_slowest_row(costs: dict[int, float]) -> None:
    """Of 8 rows some are random; they are done last, and what the others gain is of no use.

    The earlier budget: 0.904 and 0.929 with one such row, 0.938 and 0.912 with four. With equal
    weights of all rows: 0.88 and 0.93, 0.92 and 0.86.
    """
    for num_random, other in ((1, MIXED), (4, PREDICTABLE)):
        texts = [RANDOM] * num_random + [other] * (8 - num_random)
        assert np.mean(rates(measuring, costs, *texts, num_answers=2)) >= 0.96
    assert min(rates(measuring, costs, *[RANDOM] * 8, num_answers=2)) >= 0.985


@pytest.mark.parametrize("costs", thinned([BFLOAT16, FLOAT32], FLOAT32))
def test_a_batch_that_is_predictable_gains(costs: dict[int, float]) -> None:
    texts = [PREDICTABLE] * 8
    found = rates(measuring, costs, *texts, num_answers=2)
    assert np.mean(found) >= 0.95 * best_fixed(costs, *texts)


@pytest.mark.parametrize("costs", thinned([BFLOAT16, FLOAT32], BFLOAT16))
@pytest.mark.parametrize("text", thinned([PREDICTABLE, MIXED, OVERRATED, RANDOM], MIXED))
def test_a_busy_host_is_not_taken_for_cost(costs: dict[int, float], text: Text) -> None:
    """Every forward takes 1.6 times as long for some dozens of steps, and then does not."""
    of = functools.partial(rates, measuring, costs, text, num_machines=12)
    assert np.mean(of(is_shared=True)) >= 0.97 * np.mean(of())


# --- when it rests ----


def resting_share(costs: dict[int, float], text: Text) -> float:
    """Return the share of the last thousand steps that rest."""
    budget, machine = MeasuredBudget(), Machine(costs, 0)
    rests: list[bool] = []
    drafter = FakeDrafter(*text, 0)
    answer(budget, machine, [drafter], 4000, lambda *_: rests.append(budget.is_resting))
    return float(np.mean(rests[-1000:]))


def test_steps_rest_where_drafts_do_not_pay() -> None:
    assert resting_share(FLOAT32, DECEPTIVE) >= 0.8
    assert resting_share(FLOAT32, RANDOM) >= 0.7
    assert resting_share(FREE, RANDOM) <= 0.05
    assert resting_share(FLOAT32, PREDICTABLE) <= 0.02


def test_drafts_that_are_missing_are_no_reason_to_rest() -> None:
    """A pool that knows nothing yet learns from the steps that it has nothing to propose for."""
    budget = MeasuredBudget(ForwardCosts({1: 1.0, 64: 640.0}))
    for step in range(200):
        assert not budget.is_resting
        explored = [[], [0.01, 0.01]][step % 2]  # tokens to explore are no draft
        assert budget.num_nodes([explored], 0) == 0
        budget.record(1, 0, None, [Outcome(0, Draft.empty(), [1])], {0: 1})


def test_drafts_that_do_not_pay_are_asked_for_in_every_eighth_step_until_one_is_right() -> None:
    budget = MeasuredBudget(ForwardCosts({1: 1.0, 64: 640.0}))
    draft, drafted = draft_of([1], [-1], [0.5]), list[bool]()
    for step in range(60):
        drafted.append(not budget.is_resting)
        outcomes = []
        if drafted[-1]:
            assert budget.num_nodes([draft.probs], 0) == 0
            outcomes = [Outcome(0, draft, [1 if step == 40 - 1 else 9])]  # 1 is foreseen
        budget.record(1, 0, None, outcomes, {0: 1})
    refused = [step for step, is_drafted in enumerate(drafted) if is_drafted]
    assert refused == [*range(8), 15, 23, 31, 39, 40, 41, 42, 43, 51, 59]


# --- what a call leaves to the next ------------------------------------------------------------

SURE: Text = ((1.0, 1.0), lambda promised: promised)


@pytest.fixture
def constant_costs(monkeypatch: pytest.MonkeyPatch) -> ForwardCosts:
    """Costs of a process that has measured all sizes, which no forward changes any more."""

    def go_on(costs: Costs, turns: NDArray[np.int64], size: float, sec: float) -> None:
        turns[_kernels.STEPS] += 1

    costs, machine = ForwardCosts(), Machine(BFLOAT16, 0)
    of_one = costs.of(1)
    for size in _kernels.SIZES * 12:
        of_one.record(of_one.turns(0), size, machine.cost(1, size))
    monkeypatch.setattr(Costs, "record", go_on)
    return costs


def steps_of(budget: Budget, text: Text, num_tokens: int = 64) -> list[int]:
    """Return the nodes of each step of an answer."""
    steps: list[int] = []
    machine, drafter = Machine(BFLOAT16, 0), FakeDrafter(*text, 0)
    answer(budget, machine, [drafter], num_tokens, lambda num, _: steps.append(num))
    return steps


def test_an_answer_does_not_tell_what_was_asked_before(constant_costs: ForwardCosts) -> None:
    """An attacker asks the same 20 times, between the calls of a victim; an answer of one kind was
    twice as fast as one of the other where calls went on with the budget of the last."""
    for text in (SURE, PREDICTABLE, MIXED, RANDOM):
        seen = []
        for victim in (SURE, PREDICTABLE, DECEPTIVE, RANDOM):
            costs, steps = copy.deepcopy(constant_costs), list[list[int]]()
            for _ in range(20):
                steps_of(MeasuredBudget(costs), victim)
                steps.append(steps_of(MeasuredBudget(costs), text))
            seen.append(steps)
        assert seen == [seen[0]] * 4
        assert len({*map(tuple, seen[0])}) == 2  # every eighth call tries the other way


@pytest.mark.parametrize("is_shared", thinned([False, True], False))
def test_a_live_answer_does_not_tell_what_was_asked_before(
    is_shared: bool, constant_costs: ForwardCosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack succeeds where calls share a budget, so it would be seen."""
    model = tiny_model("llama", seed=1)
    ids = torch.tensor([[5, 6, 7, 8]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "eos_token_id": None}
    options |= {"do_sample": False, "max_new_tokens": 40}
    text = model.generate(ids, pad_token_id=0, **options)[0].tolist()
    seen = []
    for accept in (1.0, 0.0):
        costs = copy.deepcopy(constant_costs)
        profile_of(model).costs["tree", "eager", False] = costs
        if is_shared:
            shared = MeasuredBudget(costs)
            monkeypatch.setattr("lade.hf.generation.MeasuredBudget", lambda *_, of=shared: of)
        steps = list[list[int]]()
        for _ in range(4):
            for rate, told in ((accept, []), (0.8, steps)):
                drafter = BatchDrafter([text], np.random.default_rng(0), rate)
                nums = list[int]()
                lade.generate(
                    model,
                    ids,
                    drafter=drafter,
                    on_step=lambda step: nums.append(step.num_draft_tokens),  # noqa: B023
                    **options,
                )
                told.append(nums)
        seen.append(steps)
    assert max(map(max, seen[0])) > 0
    assert (seen[0] == seen[1]) != is_shared


def test_calls_at_once_share_no_calibration(constant_costs: ForwardCosts) -> None:
    """Two threads in turn, step by step: each takes the steps that it takes alone."""
    alone = [steps_of(MeasuredBudget(constant_costs), text) for text in (SURE, DECEPTIVE)]
    barrier = threading.Barrier(2)

    def in_turn(text: Text) -> list[int]:
        steps: list[int] = []

        def on_step(num_nodes: int, num_emitted: int) -> None:
            steps.append(num_nodes)
            with suppress(threading.BrokenBarrierError):  # the other one is done
                barrier.wait(10)

        budget, machine = MeasuredBudget(constant_costs), Machine(BFLOAT16, 0)
        answer(budget, machine, [FakeDrafter(*text, 0)], 64, on_step)
        barrier.abort()
        return steps

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(in_turn, (SURE, DECEPTIVE))] == alone


@pytest.mark.parametrize(
    ("costs", "text"),
    [pytest.param(BFLOAT16, PREDICTABLE, marks=pytest.mark.exhaustive), (FLOAT32, RANDOM)],
)
def test_calls_that_try_the_other_way_cost_next_to_nothing(
    costs: dict[int, float], text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of some 64 steps; simulated, trials in one call of eight cost 0.1 to 0.3 %."""
    num_tokens = 270 if text is PREDICTABLE else 64

    def mean_rate() -> float:
        found = []
        for seed in range(4):
            call, machine = measuring(), Machine(costs, seed)
            drafter = FakeDrafter(*text, seed)
            found += [answer(call(), machine, [drafter], num_tokens) for _ in range(25)][1:]
        return harmonic_mean(found)

    with_trials = mean_rate()
    monkeypatch.setattr("lade.budget.costs._CALLS_BETWEEN_PROBES", 10**9)
    assert with_trials >= 0.99 * mean_rate()


def test_costs_of_a_busy_time_do_not_end_drafts_for_ever() -> None:
    """All calls are short, and the last one before the load ended saw drafts that did not pay."""
    for seed in range(4):
        call, machine = measuring(), Machine(BFLOAT16, seed)
        drafter, sizes = FakeDrafter(*PREDICTABLE, seed), list[int]()
        machine.slower_drafts = 8.0
        for _ in range(10):
            answer(call(), machine, [drafter], 24, lambda num, _: sizes.append(num))  # noqa: B023
        assert np.mean(np.array(sizes[-48:]) > 0) <= 0.2
        machine.slower_drafts = 1.0
        for _ in range(16):
            answer(call(), machine, [drafter], 24)
        assert answer(call(), machine, [drafter], 24) >= 2.0


# --- what it decides ------------------------------------------------------------------------


def sizes_of(
    budget: Budget, costs: dict[int, float], text: Text, num_tokens: int = 2000, noise: float = 0
) -> list[int]:
    """Return the last hundred decisions."""
    sizes: list[int] = []
    machine = Machine(costs, 0, noise)
    answer(budget, machine, [FakeDrafter(*text, 0)], num_tokens, lambda num, _: sizes.append(num))
    return sizes[-100:]


def test_the_choice_has_the_best_ratio_of_tokens_to_time() -> None:
    """Of one row or several, with and without pending tokens, against the same in numpy."""
    rng = np.random.default_rng(0)
    chosen = []
    for num_rows in [1, 3] * 40:
        budget, slope = MeasuredBudget(), rng.uniform(0, 0.04)
        for size in rng.choice(30, 6, replace=False):
            for _ in range(int(rng.integers(2, 9))):
                budget.record(num_rows, int(size), rng.uniform(0.03, 0.04) + slope * size, [], {})
        likely = rng.random()
        probs = [-np.sort(-likely * rng.random(rng.integers(1, 20))) for _ in range(num_rows)]
        num_pending = int(rng.integers(0, 3))
        budget._calibration.worth[:] = rng.uniform(0.3, 1.5, _kernels.NUM_INTERVALS)
        costs, turns = budget._costs_of(num_rows)
        turns[_kernels.STEPS] = 0  # no trial is due
        doubts = (
            0.2 / np.maximum(1, costs._costs[_kernels.NUM]) ** 2 * (costs._costs[_kernels.NUM] > 0)
        )
        best, best_rate = 0, 0.0
        longest = max(map(len, probs))
        for num_nodes in range(longest + 1):
            size = 1 + num_pending + num_nodes
            if num_nodes and size not in _kernels.SIZES and num_nodes < longest:
                continue
            tokens = 1.0
            for of_row in probs:
                tokens += budget._calibration.believed(of_row)[:num_nodes].sum() / num_rows
            rate = tokens / np.interp(size, _kernels.KNOTS, costs.curve * (1 - doubts))
            if rate > best_rate:
                best, best_rate = num_nodes, rate
        chosen.append(best)
        assert budget.num_nodes(probs, num_pending) == best
    assert 5 <= sum(each == 0 for each in chosen) <= 75
    assert len({*chosen}) > 10


def test_all_is_verified_where_nodes_are_free() -> None:
    assert np.median(sizes_of(MeasuredBudget(), FREE, PREDICTABLE)) >= 10


def test_none_is_verified_where_nodes_cost_more_than_they_bring() -> None:
    sizes = sizes_of(MeasuredBudget(), {1: 10.0, 512: 5120.0}, EVEN, num_tokens=500)
    assert np.mean(np.array(sizes) > 0) <= 0.02


def test_a_cliff_is_stepped_over() -> None:
    """In float32 two tokens cost more than eight: verify several or none."""
    sizes = sizes_of(MeasuredBudget(), FLOAT32, PREDICTABLE, noise=0.05)
    assert 7 <= np.median(sizes) <= 13
    assert not {1, 2} & set(sizes)


def test_one_slow_measurement_is_forgiven() -> None:
    budget = MeasuredBudget()
    before = sizes_of(budget, BFLOAT16, PREDICTABLE, num_tokens=500)
    draft, text = FakeDrafter(*PREDICTABLE, 0).step()
    budget.record(1, round(np.median(before)), 10.0, [Outcome(0, draft, text)], {0: 9})
    assert np.median(sizes_of(budget, BFLOAT16, PREDICTABLE, num_tokens=100)) >= 5


def test_the_state_is_bounded() -> None:
    budget = MeasuredBudget()
    draft = draft_of([1] * 63, [-1] * 63, 0.5)
    for length in range(64):
        for _ in range(3):
            num_nodes = budget.num_nodes([[0.5] * length], 0)
            budget.record(1, num_nodes, 0.01, [Outcome(0, draft.first(length), [1])], {0: 1})
    assert budget.num_nodes([[]], 0) == 0
    for num_rows in (*range(1, 70), 128, 256, 999):
        budget.num_nodes([[0.5]] * num_rows, 0)
        for num_nodes in (0, 5, 1000):  # more than any draft has: pending tokens, a window's cells
            budget.record(num_rows, num_nodes, 0.01, [], dict.fromkeys(range(num_rows), 1))
    assert len(budget._costs._costs) == len(budget._turns) == 10
    assert max(costs._is_seen.size for costs in budget._costs._costs.values()) <= 257
    assert len(budget._num_emitted) == 999
    budget.record(3, 0, 0.01, [], {})
    assert not budget._num_emitted
    assert not budget._of_rows


def test_pending_tokens_and_cells_of_a_window_do_not_keep_it_from_drafting() -> None:
    """Then there is no forward of one token to measure."""
    budget, machine, drafter = MeasuredBudget(), Machine(BFLOAT16, 0), FakeDrafter(*PREDICTABLE, 0)
    sizes = []
    for _ in range(200):
        draft, text = drafter.step()
        num_nodes = budget.num_nodes([draft.probs.tolist()], 27)
        outcome = Outcome(0, draft, accepted(draft, num_nodes, text))
        budget.record(1, 27 + num_nodes, machine.measure(1, 28 + num_nodes), [outcome], {0: 1})
        sizes.append(num_nodes)
    assert np.median(sizes[-100:]) >= 4


def test_fewer_rows_than_were_ever_measured_are_drafted_for() -> None:
    """Of a batch whose finished rows stay in the forward, only the others are asked about."""
    budget = MeasuredBudget()
    sizes = []
    for _ in range(20):
        sizes.append(budget.num_nodes([[0.9] * 8] * 3, 0))
        budget.record(8, sizes[-1], 0.04, [], {})
    assert min(sizes[10:]) >= 4


def test_a_node_in_every_row_must_pay_for_the_whole_forward() -> None:
    """Rows without a draft gain nothing by those that have one."""
    rows: list[list[float]] = [[0.9] * 8] + [[]] * 7
    for drafting, expected in ((rows[:1] * 8, 8), (rows, 0)):
        budget = MeasuredBudget()
        sizes = []
        for _ in range(400):
            num_nodes = budget.num_nodes(drafting, 0)
            budget.record(8, num_nodes, 0.01 * (1 + 0.4 * num_nodes), [], {})
            sizes.append(num_nodes)
        assert np.median(sizes[-100:]) == expected


def test_what_came_is_told_of_nodes_that_were_not_verified() -> None:
    """Tokens 5 6 7 in a row; 8 beside 5, 9 under 8; 4 beside 6."""
    draft = draft_of([5, 6, 8, 7, 9, 4], [-1, 0, -1, 1, 2, 0], [0.8, 0.6, 0.2, 0.3, 0.1, 0.1])

    def came(*token_ids: int) -> list[float]:
        came = np.zeros(6)
        _kernels.look_at_outcome(
            draft.token_ids,
            draft.parents,
            draft.depths,
            draft.probs,
            np.array(token_ids),
            came,
        )
        found: list[float] = came.tolist()
        return found

    assert came(3) == [0, 0, 0, 0, 0, 0]
    assert came(8, 9) == [0, 0, 1, 0, 1, 0]
    assert came(5, 6, 1) == [1, 1, 0, 0, 0, 0]
    # Of 6, 7 and 4 nobody knows: 0.6 / 0.8, and so on; not 0, which would be held against them.
    assert came(5) == pytest.approx([1, 0.75, 0, 0.375, 0, 0.125])


@pytest.mark.parametrize(("temperature", "most"), [(0.7, 1.0), (1.0, 0.75), (1.5, 0.4)])
def test_sampled_calls_begin_with_less_calibration_and_win_it_back(
    temperature: float, most: float
) -> None:
    draft = chain([1, 2, 3], [0.8, 0.6, 0.4])
    before = MeasuredBudget()._calibration.believed(draft.probs).sum()
    budget = MeasuredBudget(temperature=temperature)
    begun = budget._calibration.believed(draft.probs).sum()
    assert begun < most * before
    for _ in range(12):
        budget.record(1, 3, None, [Outcome(0, draft, [1, 2, 3, 4])], {0: 1})
    assert budget._calibration.believed(draft.probs).sum() > before


# --- budgets that do not measure ------------------------------------------------------------


def test_fixed_budget_verifies_the_whole_draft() -> None:
    budget = Budget(5)
    assert budget.max_draft_tokens == 5
    assert budget.num_nodes([[0.1], [0.1, 0.1, 0.1]], 0) == 3
    budget.record(2, 3, 1.0, [], {})


@pytest.mark.parametrize(
    ("costs", "probs", "num_pending", "expected"),
    [
        ({1: 1.0, 2: 1.5}, [[0.6, 0.3]], 0, 1),  # 1.6 tokens at 1.5 beat 1.9 at 2.0
        ({1: 1.0, 2: 1.5}, [[0.6, 0.6]], 0, 2),  # 2.2 at 2.0: what lies beyond goes on as before
        ({1: 1.0, 2: 1.5}, [[0.4, 0.4]], 0, 0),
        ({1: 2.0, 5: 1.0}, [[0.0] * 8], 0, 4),  # and beyond them it is never cheaper
        ({1: 1.0, 9: 5.0}, [[0.4]], 0, 0),  # 1.4 at 1.5
        ({1: 1.0, 9: 5.0}, [[0.4]], 3, 1),  # 1.4 at 3.0, not 1 at 2.5
        ({1: 1.0, 9: 5.0}, [[0.6]] * 2, 0, 0),  # the forward has 2 or 4 tokens: 1.6 at 2.5 / 1.5
        ({1: 1.0, 9: 5.0}, [[0.9], [0.6]], 0, 1),
        ({1: 1.0, 9: 5.0}, [[0.9], []], 0, 0),
        ({1: 1.0, 2: 1.1}, [[]], 0, 0),
    ],
)
def test_given_costs_decide_with_the_promises_alone(
    costs: dict[int, float], probs: list[list[float]], num_pending: int, expected: int
) -> None:
    budget = PricedBudget(costs)
    for _ in range(3):
        assert budget.num_nodes(probs, num_pending) == expected
        budget.record(len(probs), expected, 99.0, [], {})


def test_rows_without_padding_get_what_their_own_nodes_are_worth() -> None:
    """A node costs 0.1: 1 + 1.5 / 3 tokens at 1.3 beat 1 at 1.1, 1.3 at 1.2 and 1.52 at 1.4."""
    budget = PricedBudget({1: 0.9, 11: 1.9})
    assert budget.nums_of_nodes([[0.9, 0.6], [0.05], []]) == [2, 0, 0]
    assert budget.nums_of_nodes([[0.05], []]) == [0, 0]
    assert budget.nums_of_nodes([[], []]) == [0, 0]
    assert Budget(5).nums_of_nodes([[0.1], [], [0.1] * 3]) == [1, 0, 3]


def test_a_node_is_not_verified_before_the_one_above_it() -> None:
    """Corrected probabilities may rise on the way down; the first nodes alone are a tree."""
    budget = PricedBudget({1: 1.0, 11: 1.0})
    assert budget.nums_of_nodes([[0.1, 0.9], [0.5]]) == [2, 1]


def test_measured_budget_gives_sure_rows_more() -> None:
    budget = MeasuredBudget()
    sure, unsure = [0.95] * 6, [0.03] * 6
    for _ in range(60):
        nums = budget.nums_of_nodes([sure, unsure, []])
        assert [num <= most for num, most in zip(nums, [6, 6, 0], strict=True)] == [True] * 3
        num_tokens = 3 + sum(nums)
        budget.record(3, num_tokens / 3 - 1, 0.04 + 0.001 * num_tokens, [], {})
    assert nums[0] >= 5
    assert nums[1] <= 1


def test_calls_with_given_costs_repeat_exactly() -> None:
    model = tiny_model("llama", seed=1)
    ids = torch.tensor(np.random.default_rng(0).integers(1, 9, (1, 40)))
    expected = model.generate(ids, do_sample=False, max_new_tokens=60)
    counts = []
    for costs in ({1: 1.0, 32: 1.01}, {1: 1.0, 32: 1.01}, {1: 1.0, 2: 9.0}):
        output = answered(model, ids, config=Config(step_costs=costs), max_new_tokens=60)
        assert output.sequences.tolist() == expected.tolist()
        counts.append((output.stats.num_steps, output.stats.num_draft_tokens))
    assert counts[0] == counts[1]
    assert counts[0][1] > 100
    assert counts[2] == (59, 0)


def test_step_costs_are_kept_in_order_and_ready_for_json() -> None:
    given: dict[int, float] = {16: 41.9, 1: 31}
    config = Config(step_costs=given)
    given[16] = -1.0
    assert config.step_costs == {1: 31.0, 16: 41.9}
    assert list(config.step_costs) == [1, 16]
    assert json.loads(json.dumps(dataclasses.asdict(config)))["step_costs"] == {
        "1": 31.0,
        "16": 41.9,
    }
    assert dataclasses.replace(config, max_candidates=3).step_costs == config.step_costs
    assert hash(config) == hash(Config(step_costs={1: 31.0, 16: 41.9}))
    assert config != Config(step_costs={1: 31.0, 16: 42.0})


@pytest.mark.parametrize(
    ("costs", "error", "message"),
    [
        ([(1, 2.0), (2, 3.0)], TypeError, "to be a mapping of tokens to costs, got"),
        ({1: 1.0, "2": 2.0}, TypeError, "expected each size in .* to be an integer, got '2'"),
        ({False: 1.0, 2: 2.0}, TypeError, "to be an integer, got False"),
        ({1: 1.0, 2: True}, TypeError, "to have numbers as costs, got True"),
        ({1: 1.0, 0: 2.0}, ValueError, "of at least 1, got 0"),
        ({1: 1.0, 2: "3"}, TypeError, "to have numbers as costs, got '3'"),
        ({1: 1.0, 2: 0.0}, ValueError, "to have positive, finite costs, got 0.0"),
        ({1: 1.0, 2: float("inf")}, ValueError, "finite costs, got inf"),
        ({1: 1.0, 2: float("nan")}, ValueError, "finite costs, got nan"),
        ({1: 1.0}, ValueError, r"of at least two sizes, 1 among them, got \[1\]"),
        ({2: 1.0, 3: 1.0}, ValueError, r"of at least two sizes, 1 among them, got \[2, 3\]"),
    ],
)
def test_step_costs_that_mean_nothing_are_refused(
    costs: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Config(step_costs=costs)


def test_step_costs_and_a_fixed_number_contradict_each_other() -> None:
    with pytest.raises(
        ValueError, match=r"step_costs=…\) or Config\(max_draft_tokens=…\), got both"
    ):
        Config(step_costs={1: 1.0, 2: 1.1}, max_draft_tokens=8)
