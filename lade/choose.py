"""The target's own choice at a node of a tree, the one thing that the verifier asks.

Next file: `verify.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lade.harvest import Ranked, first_of_highest, rank
from lade.processors import Processors
from lade.rejection import try_children
from lade.text import Text
from lade.transfer import Sent, integers_on
from lade.tree import Tree
from ngram_pool import SampledDraft

Place = tuple[int, int]  # row, and node of the row's tree
# Told what a token was chosen from: row, raw and processed scores, float32 [vocab_size] each.
OnChoice = Callable[[int, Tensor, Tensor], None]

# The noise of positions that only some rows have reached is kept for the others; no row may run
# further ahead than this memory holds. 64 MiB are 42 positions of 8 rows of 49 152 tokens.
_MAX_NOISE_BYTES = 64 * 2**20
_MIN_LEAD = 8


class Choice(Protocol):
    """Chooses the tokens that the target itself emits."""

    @property
    def max_lead(self) -> int | None:
        """How many tokens a row may be ahead of another; None for any number."""

    @property
    def ranked(self) -> Ranked | None:
        """The likeliest tokens of all nodes looked at last, if it ranked them to choose."""

    def look_at(self, logits: Tensor, trees: Mapping[int, Tree]) -> None:
        """Take in the logits of a step; not called where all is padding.

        Args:
            logits: [rows, width, vocab_size]; the device may still be at it.
            trees: by row, in the order of the rows of `logits`.
        """

    def wait(self) -> None:
        """Wait until the device has come so far that tokens can be asked for."""

    def tokens_at(self, places: Sequence[Place]) -> list[int]:
        """Return the next token of each place's row, whose last committed token is the node's.

        Called once for each emitted token, in order of emission within a row, and with all rows
        together where processors or stop conditions need that.
        """

    def close(self) -> None:
        """Leave everything as `generate` would; called once, also after an error."""


class GreedyChoice:
    """The likeliest token, the first of equals, as `generate(do_sample=False)` takes it.

    Args:
        num_ranked: how many of the likeliest tokens to rank for others to look at. Only on a CPU,
            where one ranking for both saves time; elsewhere it would keep the choice waiting.
    """

    max_lead = None

    def __init__(self, num_ranked: int = 0) -> None:
        self._num_ranked = num_ranked
        self.ranked: Ranked | None = None

    def look_at(self, logits: Tensor, trees: Mapping[int, Tree]) -> None:
        """Find the likeliest tokens of all nodes at once."""
        # `generate` decides in float32, also between ties there; and `argmax` of bfloat16 takes
        # four times as long on a CPU (9 rows of 49 152: 0.85 ms, not 0.23).
        if logits.dtype == torch.float64:
            logits = logits.float()
        is_cpu = logits.device.type == "cpu"
        token_ids = None
        if self._num_ranked > 1 and is_cpu:
            self.ranked = rank(logits, self._num_ranked)
            token_ids = first_of_highest(self.ranked)
        if token_ids is None:
            token_ids = (logits.float() if is_cpu else logits).argmax(dim=-1)
        self._rows = [*trees]
        self._sent = Sent(token_ids)

    def wait(self) -> None:
        """Fetch the tokens of all nodes."""
        (token_ids,) = self._sent.get()
        self._token_ids = dict(zip(self._rows, token_ids.tolist(), strict=True))

    def tokens_at(self, places: Sequence[Place]) -> list[int]:
        """Return the likeliest tokens."""
        return [self._token_ids[row][node] for row, node in places]

    def close(self) -> None:
        """Nothing was touched."""


class Picked(NamedTuple):
    """Tokens picked, and whether their scores allowed it; int64 and bool [n]."""

    token_ids: Tensor
    is_valid: Tensor


class Pick(Protocol):
    """Picks tokens by their processed scores."""

    @property
    def max_lead(self) -> int | None:
        """As of a `Choice`."""

    def __call__(self, scores: Tensor, rows: Sequence[int], times: Sequence[int]) -> Picked:
        """Pick one token for each of `scores`.

        Args:
            scores: processed, float32 [n, vocab_size].
            rows: each one's row.
            times: how many tokens each one's row has emitted before.
        """

    def begin_step(self, first_time: int) -> None:
        """Learn that no token of an earlier time will be picked any more."""

    def close(self, num_times: int) -> None:
        """Learn that tokens of so many times were emitted, and no more will be."""


class Likeliest:
    """Greedy picking, for scores that were processed."""

    max_lead = None

    def __call__(self, scores: Tensor, rows: Sequence[int], times: Sequence[int]) -> Picked:
        """Pick the first of the highest scores; `generate` takes any, valid or not."""
        token_ids = scores.argmax(dim=-1)
        return Picked(token_ids, torch.ones_like(token_ids, dtype=torch.bool))

    def begin_step(self, first_time: int) -> None:
        """Keep nothing."""

    def close(self, num_times: int) -> None:
        """Leave nothing."""


class Race:
    """Sampling, seed for seed as `generate(do_sample=True)` samples.

    `torch.multinomial(probs, 1)` is an exponential race: it draws one exponential variate for each
    token of each row and returns the argmax of probs / variates. `generate` calls it once for each
    new column of the batch. Drawing the same variates for the same column, in the same order, makes
    the token at a node a function of its scores: however many columns a step emits, each takes its
    own draw, and drafts decide nothing but how many that is.

    Args:
        num_rows: of the whole batch; finished rows are drawn for too, as `generate` does.
        vocab_size: about; only limits memory.
        device: of the scores; its default generator is drawn from.
        ahead: whether tokens are picked at nodes that may not be emitted. What is drawn for them
            comes from a generator of our own, and in the end the default one draws what was used:
            it is everybody's, and to put it back would take draws of other threads back, too.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, ahead: bool) -> None:
        self._num_rows = num_rows
        self._device = device
        self._ahead = ahead
        self._noise: dict[int, Tensor] = {}  # by time
        self._states: dict[int, Tensor] = {}  # by time, the default generator's before that draw
        self._num_drawn = 0
        self._vocab_size = 0  # of the scores, once there were some
        self._generator: torch.Generator | None = None
        if ahead:
            self._generator = torch.Generator(device)
            self._generator.set_state(self._state())
        size = 4 * num_rows * vocab_size
        self.max_lead = max(_MIN_LEAD, _MAX_NOISE_BYTES // size) if num_rows > 1 else None

    def __call__(self, scores: Tensor, rows: Sequence[int], times: Sequence[int]) -> Picked:
        """Pick at random."""
        probs = scores.softmax(dim=-1)
        is_valid = _is_distribution(probs)
        if not self._ahead and not bool(is_valid.all()):
            return Picked(torch.zeros_like(is_valid, dtype=torch.int64), is_valid)  # draw nothing
        noise = self._noise_of(rows, times, probs.shape[-1])
        return Picked((probs / noise).argmax(dim=-1), is_valid)

    def begin_step(self, first_time: int) -> None:
        """Forget the noise of earlier times."""
        for times in (self._noise, self._states):
            for time in [time for time in times if time < first_time]:
                del times[time]

    def close(self, num_times: int) -> None:
        """Leave the default generator where `generate` would.

        Only where a call was given up in the middle has it drawn more than that.
        """
        if self._ahead:
            for _ in range(min(num_times, self._num_drawn)):
                self._draw(None)
        elif num_times in self._states:
            self._restore(self._states[num_times])
        self._noise, self._states = {}, {}

    def _noise_of(self, rows: Sequence[int], times: Sequence[int], vocab_size: int) -> Tensor:
        """Return the noise of places, [n, vocab_size]."""
        several = sorted({*times})
        if len(several) == 1 and list(rows) == list(range(self._num_rows)):
            return self._noise_at(several[0], vocab_size)
        if self._device.type == "cpu":
            places = zip(rows, times, strict=True)
            return torch.stack([self._noise_at(time, vocab_size)[row] for row, time in places])
        # Elsewhere each row would be an operation of its own, at 64 nodes as long as the draft.
        of_times = [self._noise_at(time, vocab_size) for time in several]
        first = {time: place * self._num_rows for place, time in enumerate(several)}
        index = [first[time] + row for row, time in zip(rows, times, strict=True)]
        return torch.cat(of_times)[integers_on(self._device, index)]

    def _noise_at(self, time: int, vocab_size: int) -> Tensor:
        self._vocab_size = vocab_size
        while self._num_drawn <= time:
            if not self._ahead:
                self._states[self._num_drawn] = self._state()
            self._noise[self._num_drawn] = self._draw(self._generator)
            self._num_drawn += 1
        return self._noise[time]

    def _draw(self, generator: torch.Generator | None) -> Tensor:
        """Draw the noise of one column, [num_rows, vocab_size], by default from everybody's."""
        shape = (self._num_rows, self._vocab_size)
        noise = torch.empty(shape, dtype=torch.float32, device=self._device)
        return noise.exponential_(generator=generator)

    def _state(self) -> Tensor:
        if self._device.type == "cpu":
            return torch.get_rng_state()
        return torch.get_device_module(self._device).get_rng_state(self._device)  # type: ignore[no-any-return]

    def _restore(self, state: Tensor) -> None:
        if self._device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(self._device).set_rng_state(state, self._device)


class _ScoredChoice:
    """Processed scores of the nodes where tokens are emitted, and of no others.

    Processors run once for each emitted token, with the true prefix and in order: some count their
    calls, some draw random numbers, and any may look at the whole prefix.
    """

    ranked = None

    def __init__(
        self,
        text: Text,
        processors: Processors,
        device: torch.device,
        on_choice: OnChoice | None = None,
    ) -> None:
        self._text = text
        self._processors = processors
        self._device = device
        self._on_choice = on_choice

    def look_at(self, logits: Tensor, trees: Mapping[int, Tree]) -> None:
        """Keep the logits until they are asked for."""
        self._logits = logits
        self._trees = trees
        self._index = {row: index for index, row in enumerate(trees)}

    def wait(self) -> None:
        """Wait, or the time of the forward would be counted elsewhere."""
        self._logits[0, 0, 0].item()

    def _scores_at(self, places: Sequence[Place]) -> Tensor:
        """Return processed scores, float32 [len(places), vocab_size]."""
        rows = [row for row, _ in places]
        raw = torch.stack([self._logits[self._index[row], node] for row, node in places])
        raw = raw.to(self._device, torch.float32)
        scores = self._processors(self._text, rows, raw)  # may write in place, as in `generate`
        if self._on_choice is not None:
            for i, row in enumerate(rows):
                self._on_choice(row, raw[i], scores[i])
        return scores


class ProcessedChoice(_ScoredChoice):
    """Tokens picked by processed scores, where they are emitted and nowhere else.

    Processors that look at the scores alone could run at all nodes at once, see `ChoiceAtOnce`.
    """

    def __init__(
        self,
        text: Text,
        processors: Processors,
        pick: Pick,
        device: torch.device,
        on_choice: OnChoice | None = None,
    ) -> None:
        super().__init__(text, processors, device, on_choice)
        self.max_lead = pick.max_lead
        self._pick = pick

    def look_at(self, logits: Tensor, trees: Mapping[int, Tree]) -> None:
        """Keep the logits until they are asked for."""
        super().look_at(logits, trees)
        self._pick.begin_step(min(self._text.num_emitted(row) for row in trees))

    def tokens_at(self, places: Sequence[Place]) -> list[int]:
        """Process and pick."""
        scores = self._scores_at(places)
        rows = [row for row, _ in places]
        picked = self._pick(scores, rows, [self._text.num_emitted(row) for row in rows])
        token_ids: list[int] = picked.token_ids.tolist()
        _check_valid(scores, picked.is_valid)
        return token_ids

    def close(self) -> None:
        """Leave the random state where `generate` would."""
        self._pick.close(self._text.longest - self._text.num_prompt)


class ChoiceAtOnce(ProcessedChoice):
    """The same, with all nodes of a step processed and picked in one go.

    For processors that need no prefix, on a device that is waited for at every look at a result. On
    a CPU nobody waits, and the work at nodes never reached is lost: top-p at 16 nodes of 49 152
    tokens took 25 ms there, at one node 3 ms, in a step of 60 ms.
    """

    def look_at(self, logits: Tensor, trees: Mapping[int, Tree]) -> None:
        """Process and pick everywhere."""
        rows, width, vocab_size = logits.shape
        first_times = [self._text.num_emitted(row) for row in trees]
        self._pick.begin_step(min(first_times))
        self._index = {row: index for index, row in enumerate(trees)}
        self._raw = logits.to(self._device, torch.float32, copy=True)
        flat = self._raw.view(-1, vocab_size)
        scores = self._processors.without_prefix(flat)
        of_nodes, times = [], []
        for row, first_time, tree in zip(trees, first_times, trees.values(), strict=True):
            depths = [*tree.depths, *[0] * (width - len(tree))]  # padding nodes are never asked for
            of_nodes += [row] * width
            times += [first_time + depth for depth in depths]
        picked = self._pick(scores, of_nodes, times)
        self._scores = scores.view(rows, width, vocab_size)
        self._sent = Sent(*(part.view(rows, width) for part in picked))

    def wait(self) -> None:
        """Fetch what was picked."""
        self._token_ids, self._is_valid = (part.tolist() for part in self._sent.get())

    def tokens_at(self, places: Sequence[Place]) -> list[int]:
        """Return what was picked."""
        token_ids = []
        for row, node in places:
            index = self._index[row]
            if not self._is_valid[index][node]:
                _raise_invalid(self._scores[index, node])
            if self._on_choice is not None:
                self._on_choice(row, self._raw[index, node], self._scores[index, node])
            token_ids.append(self._token_ids[index][node])
        return token_ids


class RejectionChoice(_ScoredChoice):
    """Draft tokens accepted or rejected so that the text has the target's distribution.

    Takes one generator for each row, so that no row's tokens depend on another's.
    """

    max_lead = None

    def __init__(
        self,
        text: Text,
        processors: Processors,
        generators: Sequence[torch.Generator],
        device: torch.device,
        on_choice: OnChoice | None = None,
    ) -> None:
        super().__init__(text, processors, device, on_choice)
        self._generators = generators

    def tokens_at(self, places: Sequence[Place]) -> list[int]:
        """Try the children of each node; return the accepted one's token, or another."""
        scores = self._scores_at(places)
        probs = scores.softmax(dim=-1)
        _check_valid(scores, _is_distribution(probs))
        children = _pack([self._children_of(row, node) for row, node in places], self._device)
        trial = try_children(
            probs,
            children.token_ids,
            children.support_probs,
            [self._generators[row] for row, _ in places],
            children.num_children,
            children.support_token_ids,
        )
        emitted: list[int] = trial.token_ids.tolist()
        return emitted

    def close(self) -> None:
        """The generators are the caller's."""

    def _children_of(self, row: int, node: int) -> list["_Child"]:
        """Return the children of a node in the order of the draft."""
        draft = self._trees[row].draft
        children = []
        for child in np.flatnonzero(draft.parents == node - 1).tolist():  # draft nodes are one less
            token_id = int(draft.token_ids[child])
            if isinstance(draft, SampledDraft):
                support = draft.support_token_ids[child], draft.support_probs[child]
                children.append(_Child(token_id, *support))
            else:  # it was not drawn, so it was certain
                children.append(_Child(token_id, [token_id], [1.0]))
        return children


class _Child(NamedTuple):
    """A drafted token, and the tokens that it was drawn from with their probabilities."""

    token_id: int
    support_token_ids: Sequence[int]
    support_probs: Sequence[float]


class _Children(NamedTuple):
    """The children of several nodes, padded; as `try_children` takes them."""

    token_ids: Tensor  # int64 [nodes, children]
    num_children: Tensor  # int64 [nodes]
    support_token_ids: Tensor  # int64 [nodes, children, support]
    support_probs: Tensor  # float64 [nodes, children, support]


def _pack(of_nodes: Sequence[Sequence[_Child]], device: torch.device) -> _Children:
    width = max(map(len, of_nodes))
    size = max((len(c.support_probs) for children in of_nodes for c in children), default=1)
    token_ids = np.zeros((len(of_nodes), width), np.int64)
    support_token_ids = np.zeros((*token_ids.shape, size), np.int64)
    support_probs = np.zeros(support_token_ids.shape)
    for i, children in enumerate(of_nodes):
        for j, child in enumerate(children):
            token_ids[i, j] = child.token_id
            support_token_ids[i, j, : len(child.support_token_ids)] = child.support_token_ids
            support_probs[i, j, : len(child.support_probs)] = child.support_probs
    num_children = np.array([len(children) for children in of_nodes])
    arrays = (token_ids, num_children, support_token_ids, support_probs)
    return _Children(*(torch.from_numpy(array).to(device) for array in arrays))


def _is_distribution(probs: Tensor) -> Tensor:
    """Tell which softmaxes [n, vocab_size] are distributions, bool [n].

    One infinity or NaN among the scores makes the whole softmax NaN.
    """
    return ~probs[:, 0].isnan()


def _check_valid(scores: Tensor, is_valid: Tensor) -> None:
    """Raise for the first of `scores`, float32 [n, vocab_size], that is not valid."""
    for of_place, place_is_valid in zip(scores, is_valid.tolist(), strict=True):
        if not place_is_valid:
            _raise_invalid(of_place)


def _raise_invalid(scores: Tensor) -> None:
    """Raise what `torch.multinomial` raises for scores, float32 [vocab_size], it cannot sample."""
    torch.multinomial(scores.softmax(dim=-1), 1)
    raise AssertionError("expected torch.multinomial to refuse these scores")
