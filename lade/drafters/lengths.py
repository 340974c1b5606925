"""Rules for K: how far a model's drafts are grown, level by level."""

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, get_args

LengthName = Literal["measured", "seed", "heuristic", "confidence"]

# Levels of a draft at most, by "confidence" and "measured": transformers has as many.
_MAX_LEVELS = 20
# Levels that a K that adapts may reach.
_MAX_ADAPTED_LEVELS = 64


class Level(NamedTuple):
    """What a level of a draft is: the nodes that one forward of the drafting model told."""

    mass: float  # sum of the path probabilities of the nodes kept
    token_prob: float  # of the best of these nodes, given its parent
    num_nodes: int  # kept


class Outcome(NamedTuple):
    """What became of a draft."""

    levels: Sequence[Level]
    num_right: int  # levels on the path of the text
    is_ended: bool  # whether the text left the draft, or went past its end


class Rule(Protocol):
    """A rule for K in one sequence."""

    def begin(self, num_behind: int) -> int:
        """Return how many levels the next draft may have at most; 0 for no draft.

        Args:
            num_behind: tokens of the text that the drafting model has not run yet.
        """

    def goes_on(self, levels: Sequence[Level]) -> bool:
        """Return whether another level is worth a forward, after these; at least one."""

    def learn(self, outcome: Outcome) -> None:
        """Learn what became of the last draft."""


class Constant:
    """The same K for all drafts."""

    def __init__(self, num_levels: int) -> None:
        self._num_levels = num_levels

    def begin(self, num_behind: int) -> int:
        """Return K."""
        return self._num_levels

    def goes_on(self, levels: Sequence[Level]) -> bool:
        """Go on."""
        return True

    def learn(self, outcome: Outcome) -> None:
        """Learn nothing."""


class Adaptive:
    """A K that grows where drafts are accepted whole, and shrinks where they are rejected.

    Args:
        first: K of the first draft.
        more: what is added after a draft that was right to its end.
        threshold: the lowest probability of a token to go on after.
        most: levels at most.
    """

    def __init__(self, first: int, more: int, threshold: float, most: int) -> None:
        self.num_levels = min(first, most)
        self._more = more
        self._threshold = threshold
        self._most = most

    def begin(self, num_behind: int) -> int:
        """Return K."""
        return self.num_levels

    def goes_on(self, levels: Sequence[Level]) -> bool:
        """Go on unless the last token is too unlikely."""
        return levels[-1].token_prob >= self._threshold

    def learn(self, outcome: Outcome) -> None:
        """Change K; a draft that was cut tells nothing if its beginning was right."""
        if not outcome.is_ended:
            return
        if outcome.num_right == len(outcome.levels):
            self.num_levels = min(self._most, self.num_levels + self._more)
        else:
            self.num_levels = max(1, self.num_levels - 1)


class Confidence:
    """Drafts that end with the first token of a low probability.

    Args:
        threshold: the lowest probability to go on after.
        most: levels at most.
    """

    def __init__(self, threshold: float, most: int) -> None:
        self._threshold = threshold
        self._most = most

    def begin(self, num_behind: int) -> int:
        """Return the maximum."""
        return self._most

    def goes_on(self, levels: Sequence[Level]) -> bool:
        """Go on unless the last token is too unlikely."""
        return levels[-1].token_prob >= self._threshold

    def learn(self, outcome: Outcome) -> None:
        """Learn nothing."""


_NUM_BINS = 10
# Weight of what is believed of a bin before anything was seen, in drafts.
_PRIOR_WEIGHT = 4.0
# How often a level is right, as long as none was seen.
_PRIOR = 0.7
# What is left of the weight of levels after another one, of its own probability and of any.
_KEPT, _KEPT_OF_ANY = 0.99, 0.97
# Least weight of the newest time in a running mean, and how many times the mean it may be: others
# use the machine, too. Of the first few, the shortest counts: libraries prepare kernels.
_NEWEST, _MOST_TIMES = 0.1, 4.0
_NUM_FIRST = 3
# What is left of the weight of steps after another one. As if there had been steps before the first
# whose draft tokens took this share of a step each, with a sum of squares of their numbers.
_KEPT_OF_STEPS = 0.95
_PRIOR_SHARE, _PRIOR_SQUARES = 0.01, 20.0
# A step without draft tokens takes this share of the mean step, at least.
_LEAST_BASE = 0.25
# Share of the time without drafts that may be spent to see whether they pay by now; halved after
# each time that they did not, so often at most.
_TRIAL_SHARE, _MOST_HALVED = 0.02, 4
# Levels of a draft that is made to see whether drafts pay; and levels that must have been right or
# wrong before it is seen: two wrong ones, as there are in any text, say little.
_TRIAL_LEVELS, _LEAST_SEEN = 3, 6.0
# Tokens of the text that are run in about the time of one.
_FEW_BEHIND = 8


@dataclass
class Mean:
    """A running mean of times."""

    sec: float
    num: int = 1

    def add(self, sec: float) -> None:
        """Take a time into account."""
        self.num += 1
        if self.num <= _NUM_FIRST:
            self.sec = min(self.sec, sec)
        else:
            newest = min(sec, _MOST_TIMES * self.sec)
            self.sec += max(_NEWEST, 1 / self.num) * (newest - self.sec)


@dataclass
class StepSeconds:
    """Seconds of a step of the target by the number of its draft tokens: a line through the newest.

    Steps become slower as a text grows, so a line is fitted to those of late alone.

    Attributes:
        num, nodes, secs, squares, products: Decayed sums over steps: of 1, of draft tokens, of
            seconds, of squares of the former, and of products of both.
    """

    num: float = 0.0
    nodes: float = 0.0
    secs: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add(self, num_nodes: int, sec: float) -> None:
        """Learn from a step, or from the mean of several."""
        if self.num:
            sec = min(sec, _MOST_TIMES * (self.base + num_nodes * self.node))
        news = (1.0, num_nodes, sec, num_nodes**2, num_nodes * sec)
        old = (self.num, self.nodes, self.secs, self.squares, self.products)
        self.num, self.nodes, self.secs, self.squares, self.products = (
            _KEPT_OF_STEPS * before + new for before, new in zip(old, news, strict=True)
        )

    @property
    def node(self) -> float:
        """What a draft token adds."""
        if not self.num:
            return 0.0
        spread = max(0.0, self.squares - self.nodes**2 / self.num)
        together = self.products - self.nodes * self.secs / self.num
        prior = _PRIOR_SQUARES * _PRIOR_SHARE * self.secs / self.num
        return max(0.0, (together + prior) / (spread + _PRIOR_SQUARES))

    @property
    def base(self) -> float:
        """Of a step without draft tokens."""
        mean = self.secs / self.num
        return max(_LEAST_BASE * mean, mean - self.node * self.nodes / self.num)


@dataclass
class MeasuredCosts:
    """What is known of the seconds of drafting and verifying, and of how far drafts go.

    Attributes:
        forward: Of a forward over a level; None while unknown.
        token: Of a token of the text that is run together with others; None while unknown.
        step: Of steps of the target.
        tried, right: By the probability that a level has the right token: how often that was seen,
            and how often it had.
        newest_tried, newest_right: The same of the newest levels of any probability.
        resting_sec: Time without drafts since the last one.
        num_failed: Trials in turn after which drafts did not pay.
    """

    forward: Mean | None = None
    token: Mean | None = None
    step: StepSeconds = field(default_factory=StepSeconds)
    tried: list[float] = field(default_factory=lambda: [0.0] * _NUM_BINS)
    right: list[float] = field(default_factory=lambda: [0.0] * _NUM_BINS)
    newest_tried: float = 0.0
    newest_right: float = 0.0
    resting_sec: float = 0.0
    num_failed: int = 0

    def continuing(self, mass: float) -> float:
        """Return how often a level of this probability, given the one before, was right."""
        place = _bin_of(mass)
        right = self.right[place] + _PRIOR_WEIGHT * mass
        return right / (self.tried[place] + _PRIOR_WEIGHT)

    @property
    def mean_continuing(self) -> float:
        """How often a level was right, given the one before, of late."""
        right = self.newest_right + _PRIOR_WEIGHT * _PRIOR
        return right / (self.newest_tried + _PRIOR_WEIGHT)

    def record_draft(self, num_behind: int, first_sec: float, other_secs: Sequence[float]) -> None:
        """Learn the times of the forwards of a draft.

        Args:
            num_behind: tokens of the text that the first of them ran.
            first_sec: of the forward over the text.
            other_secs: of those over levels of the draft.
        """
        self.resting_sec = 0.0
        if num_behind > _FEW_BEHIND:
            self.token = _added(self.token, first_sec / num_behind)
        for sec in other_secs if num_behind > _FEW_BEHIND else (first_sec, *other_secs):
            self.forward = _added(self.forward, sec)

    def record_step(self, num_nodes: int, sec: float) -> None:
        """Learn the time between two drafts, in which up to `num_nodes` tokens were verified."""
        if num_nodes == 0:
            self.resting_sec += sec
        self.step.add(num_nodes, sec)

    def copy(self) -> "MeasuredCosts":
        """Return a copy that shares nothing."""
        return copy.deepcopy(self)


def _bin_of(mass: float) -> int:
    return min(_NUM_BINS - 1, max(0, int(mass * _NUM_BINS)))


class Measured:
    """As many levels as pay, by the seconds of forwards and by how often such levels were right.

    A level pays where the tokens that it adds come faster than those before it: the tokens expected
    per second of the step, drafting included, must grow. Where even the first levels do not pay,
    nothing is drafted, but for a trial whenever it costs a small share of the time since the last
    one.

    Args:
        costs: of all sequences of the call; learns.
        most: levels at most.
    """

    def __init__(self, costs: MeasuredCosts, most: int) -> None:
        self._costs = costs
        self._most = most
        self._is_trial = False

    def begin(self, num_behind: int) -> int:
        """Return the maximum, a few levels to try, or 0."""
        costs = self._costs
        self._is_trial = False
        is_known = (
            costs.forward is not None and costs.step.num and costs.newest_tried >= _LEAST_SEEN
        )
        if costs.forward is None or not is_known:
            self._is_trial = True
            return min(self._most, _TRIAL_LEVELS)
        if self._gain(costs.forward.sec, costs.step) > 1.0:
            costs.num_failed = 0
            return self._most
        token_sec = costs.forward.sec / _FEW_BEHIND if costs.token is None else costs.token.sec
        trial_sec = num_behind * token_sec + _TRIAL_LEVELS * costs.forward.sec
        share = _TRIAL_SHARE / 2 ** min(costs.num_failed, _MOST_HALVED)
        if trial_sec > share * costs.resting_sec:
            return 0
        self._is_trial = True
        costs.num_failed += 1
        return min(self._most, _TRIAL_LEVELS)

    def goes_on(self, levels: Sequence[Level]) -> bool:
        """Go on while that makes tokens come faster."""
        costs = self._costs
        if self._is_trial or costs.forward is None or not costs.step.num:
            return True
        node_sec = costs.step.node
        expected, alive, before = 1.0, 1.0, 1.0
        for level in levels:
            alive *= costs.continuing(level.mass / before if before else 0.0)
            expected += alive
            before = level.mass
        num_nodes = sum(level.num_nodes for level in levels)
        sec = costs.step.base + len(levels) * costs.forward.sec + num_nodes * node_sec
        more = alive * costs.mean_continuing
        more_sec = costs.forward.sec + levels[-1].num_nodes * node_sec
        return more * sec > expected * more_sec

    def learn(self, outcome: Outcome) -> None:
        """Learn how often levels of these probabilities were right."""
        costs, before = self._costs, 1.0
        num_seen = outcome.num_right + (
            outcome.is_ended and outcome.num_right < len(outcome.levels)
        )
        if outcome.num_right:
            costs.num_failed = 0
        for index, level in enumerate(outcome.levels[:num_seen]):
            place = _bin_of(level.mass / before if before else 0.0)
            is_right = index < outcome.num_right
            costs.tried[place] = costs.tried[place] * _KEPT + 1.0
            costs.right[place] = costs.right[place] * _KEPT + is_right
            costs.newest_tried = costs.newest_tried * _KEPT_OF_ANY + 1.0
            costs.newest_right = costs.newest_right * _KEPT_OF_ANY + is_right
            before = level.mass

    def _gain(self, forward_sec: float, step: StepSeconds) -> float:
        """Return how much faster tokens would come with drafts of the best number of levels."""
        costs, best = self._costs, 0.0
        right, expected, alive = costs.mean_continuing, 1.0, 1.0
        step_sec, level_sec = step.base, forward_sec + step.node
        for num_levels in range(1, self._most + 1):
            alive *= right
            expected += alive
            sec = step_sec + num_levels * level_sec
            best = max(best, expected * step_sec / sec)
        return best


def _added(mean: Mean | None, sec: float) -> Mean:
    if mean is None:
        return Mean(sec)
    mean.add(sec)
    return mean


class Heuristic(NamedTuple):
    """The rule "heuristic" with a K to begin with."""

    first_levels: int


class Length:
    """A rule for K as the user asks for it, and what is known of costs from one call to the next.

    Args:
        length: the rule, or a constant K.
        confidence: threshold of "confidence" and "heuristic".
        max_levels: levels at most, of all rules; None for what each has.
        first_levels: with which "heuristic" begins.

    Raises:
        ValueError: there is no such rule, or a number is out of range.
    """

    def __init__(
        self,
        length: LengthName | int | Heuristic = "measured",
        confidence: float = 0.4,
        max_levels: int | None = None,
        first_levels: int = _MAX_LEVELS,
    ) -> None:
        if isinstance(length, Heuristic):
            first_levels, length = length.first_levels, "heuristic"
        is_number = isinstance(length, int) and not isinstance(length, bool)
        if not is_number and length not in get_args(LengthName):
            names = ", ".join(map(repr, get_args(LengthName)))
            raise ValueError(f"expected length to be {names} or a number of tokens, got {length!r}")
        if isinstance(length, int) and length < 1:
            raise ValueError(f"expected length of at least 1, got {length}")
        if not 0 <= confidence <= 1:
            raise ValueError(f"expected confidence from 0 to 1, got {confidence!r}")
        self._length = length
        self._confidence = confidence
        self._max_levels = max_levels
        self._first_levels = first_levels
        self._costs = MeasuredCosts()
        self._lock = threading.Lock()

    def begin_call(self) -> MeasuredCosts:
        """Return a copy of what is known, for one call to go on measuring."""
        with self._lock:
            return self._costs.copy()

    def end_call(self, costs: MeasuredCosts) -> None:
        """Keep what a call knows in the end; of calls side by side, the last one's is kept."""
        with self._lock:
            self._costs = costs.copy()

    def rule(self, costs: MeasuredCosts) -> Rule:
        """Return the rule of one sequence of a call that measures these costs."""
        if isinstance(self._length, int):
            return Constant(min(self._length, self._max_levels or self._length))
        if self._length == "seed":
            return Adaptive(1, 1, 0.0, self._max_levels or _MAX_ADAPTED_LEVELS)
        if self._length == "heuristic":
            most = self._max_levels or _MAX_ADAPTED_LEVELS
            return Adaptive(self._first_levels, 2, self._confidence, most)
        most = self._max_levels or _MAX_LEVELS
        if self._length == "confidence":
            return Confidence(self._confidence, most)
        return Measured(costs, most)
