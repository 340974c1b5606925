"""Exact choice: the tokens that `generate` would choose, greedy or seed for seed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lade.batch import Row
from lade.drafting.speculator import Plan
from lade.machine.generators import put_back, random_states
from lade.machine.transfer import HostCopy, integers_on
from lade.sampling.choice import (
    Choice,
    OnChoice,
    RowNode,
    ScoredChoice,
    is_distribution,
    raise_invalid,
    tokens_of,
)
from lade.sampling.greedy import GreedyChoice
from lade.sampling.processors import Processors

# The noise of positions that only some rows have reached is kept for the other rows, and this
# memory limits how far a row may run ahead. 64 MiB hold 42 positions of 8 rows of 49 152 tokens.
_MAX_NOISE_BYTES = 64 * 2**20
_MIN_LEAD = 8
# Nodes whose scores are sorted at once. By arithmetic, sorting 32 rows of 128 000 scores takes 1 to
# 3 ms on an A100, a wait some 50 us.
_MAX_SORTED = 16


class NoiseRace:
    """Sampling, seed for seed as in `generate(do_sample=True)`.

    `torch.multinomial(probs, 1)` is an exponential race: it draws one exponential variate for each
    token of each row and returns the argmax of probs / variates. `generate` calls it once for each
    new column of the batch. This class draws the same variates for the same column, in the same
    order, so the token at a node depends only on its scores. Drafts decide only how many columns,
    and so how many draws, a step takes.

    Args:
        num_rows: rows of the whole batch; as in `generate`, finished rows are drawn for, too.
        vocab_size: approximate size, used only to limit memory.
        device: device of the scores; its default generator is drawn from.
        ahead: whether tokens are also picked at nodes that may not be emitted. Variates then come
            from a private generator, and on closing, the default one draws as many as were used. It
            is shared: resetting it would also undo the draws of other threads.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, ahead: bool) -> None:
        self._num_rows = num_rows
        self._device = device
        self._ahead = ahead
        self._noise: dict[int, Tensor] = {}  # by time
        self._states: dict[int, list[Tensor]] = {}  # by time, of generators before that draw
        self._num_drawn = 0
        self._vocab_size = 0  # of the scores, once known
        self._generator: torch.Generator | None = None
        if ahead:
            self._generator = torch.Generator(device)
            self._generator.set_state(random_states(device)[-1])
        size = 4 * num_rows * vocab_size
        self.max_lead = max(_MIN_LEAD, _MAX_NOISE_BYTES // size) if num_rows > 1 else None

    def __call__(self, probs: Tensor, rows: Sequence[int], times: Sequence[int]) -> Tensor:
        """Pick a token for each row of probabilities, int64 [n].

        Args:
            probs: float32 [n, vocab_size].
            rows: [n], the row in the batch.
            times: [n], number of tokens that this row has emitted before.
        """
        return (probs / self._noise_of(rows, times, probs.shape[-1])).argmax(dim=-1)

    def begin_step(self, first_time: int) -> None:
        """Forget the noise of times before `first_time`: no more tokens are picked there."""
        for times in (self._noise, self._states):
            for time in [time for time in times if time < first_time]:
                del times[time]

    def close(self, num_times: int) -> None:
        """Leave the default generator where `generate` would after `num_times` columns.

        Without `ahead`, it has drawn more than that only if the call was interrupted.
        """
        if self._ahead:
            for _ in range(min(num_times, self._num_drawn)):
                self._draw(None)
        elif num_times in self._states:
            put_back(self._device, self._states[num_times])
        self._noise, self._states = {}, {}

    def _noise_of(self, rows: Sequence[int], times: Sequence[int], vocab_size: int) -> Tensor:
        """Return the noise of (row, time) pairs, [n, vocab_size]."""
        several = sorted({*times})
        if len(several) == 1 and list(rows) == list(range(self._num_rows)):
            return self._noise_at(several[0], vocab_size)
        if self._device.type == "cpu":
            pairs = zip(rows, times, strict=True)
            return torch.stack([self._noise_at(time, vocab_size)[row] for row, time in pairs])
        # On other devices, one operation per row would be as slow as drafting, at 64 nodes.
        of_times = [self._noise_at(time, vocab_size) for time in several]
        first = {time: index * self._num_rows for index, time in enumerate(several)}
        index = [first[time] + row for row, time in zip(rows, times, strict=True)]
        return torch.cat(of_times)[integers_on(self._device, index)]

    def _noise_at(self, time: int, vocab_size: int) -> Tensor:
        self._vocab_size = vocab_size
        while self._num_drawn <= time:
            if not self._ahead:
                self._states[self._num_drawn] = random_states(self._device)
            self._noise[self._num_drawn] = self._draw(self._generator)
            self._num_drawn += 1
        return self._noise[time]

    def _draw(self, generator: torch.Generator | None) -> Tensor:
        """Draw the noise of one column, [num_rows, vocab_size]; None is the default generator."""
        shape = (self._num_rows, self._vocab_size)
        noise = torch.empty(shape, dtype=torch.float32, device=self._device)
        return noise.exponential_(generator=generator)


class ProcessedChoice(ScoredChoice):
    """Tokens picked by processed scores, only at nodes where tokens are emitted.

    Processors that look only at the scores can run at all nodes at once: see `ChoiceAtOnce`.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        processors: Processors,
        race: NoiseRace | None,
        device: torch.device,
        on_choice: OnChoice | None = None,
    ) -> None:
        """`rows` are those of the batch; `race` picks at random, None for the likeliest."""
        super().__init__(processors, device, on_choice)
        self._rows = rows
        self.max_lead = None if race is None else race.max_lead
        self._race = race

    def look_at(self, logits: Tensor, plan: Plan) -> None:
        """Keep the logits until tokens are chosen."""
        super().look_at(logits, plan)
        if self._race is not None:
            self._race.begin_step(min(row.num_emitted for row in plan.trees))

    def tokens_at(self, nodes: Sequence[RowNode]) -> list[int]:
        """Process the scores and pick a token at each node."""
        scores = self._scores_at(nodes)
        rows = [row for row, _ in nodes]
        times = [row.num_emitted for row in rows]
        return tokens_of(*self._picked(scores, rows, times))

    def close(self) -> None:
        """Leave the random state where `generate` would."""
        if self._race is not None:
            self._race.close(max(row.num_emitted for row in self._rows))

    def _picked(
        self, scores: Tensor, rows: Sequence[Row], times: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return tokens, int64 [n], and whether their scores were valid, bool [n].

        In greedy decoding, they always are, as in `generate`.
        """
        if self._race is None:
            token_ids = scores.argmax(dim=-1)
            return token_ids, torch.ones_like(token_ids, dtype=torch.bool)
        probs = scores.softmax(dim=-1)
        return self._race(probs, [row.index for row in rows], times), is_distribution(probs)


class ChoiceAtOnce(ProcessedChoice):
    """The same choice, with all nodes of a step processed and picked in one batch.

    For processors that need no prefix, on a device where every read result is a wait. A CPU has no
    such wait, and work at nodes that are never reached is lost: there, top-p at 16 nodes with
    49 152 tokens took 25 ms and at one node 3 ms, in a step of 60 ms. If processors sort, batches
    of more than `_MAX_SORTED` nodes lose on any device; such a step waits for each token.
    """

    def look_at(self, logits: Tensor, plan: Plan) -> None:
        """Process the scores and pick a token at every node, or keep the logits."""
        self._is_at_once = logits.shape[1] <= _MAX_SORTED or not self._processors.sort
        if not self._is_at_once:
            super().look_at(logits, plan)
            return
        self._starts = plan.starts
        self._raw = logits[0].to(self._device, torch.float32, copy=True)
        self._scores = self._processors.without_prefix(self._raw)
        of_nodes, times = list[Row](), list[int]()
        for row, tree in plan.trees.items():
            of_nodes += [row] * len(tree)
            times += [row.num_emitted + depth for depth in tree.depths]
        if self._race is not None:
            self._race.begin_step(min(times))
        self._sent = HostCopy(*self._picked(self._scores, of_nodes, times))

    def wait(self) -> None:
        """Fetch the picked tokens."""
        if not self._is_at_once:
            super().wait()
            return
        self._token_ids, self._is_valid = (part.tolist() for part in self._sent.get())

    def tokens_at(self, nodes: Sequence[RowNode]) -> list[int]:
        """Return the picked tokens."""
        if not self._is_at_once:
            return super().tokens_at(nodes)
        token_ids = []
        for row, node in nodes:
            index = self._starts[row] + node
            if not self._is_valid[index]:
                raise_invalid()
            if self._on_choice is not None:
                self._on_choice(self._raw[index], self._scores[index])
            token_ids.append(self._token_ids[index])
        return token_ids


def exact_choice(
    rows: Sequence[Row],
    processors: Processors,
    do_sample: bool,
    vocab_size: int,
    device: torch.device,
    on_choice: OnChoice | None,
    num_ranked: int = 0,
    ahead: bool = False,
) -> Choice:
    """Return a `Choice` of the tokens that `generate` would choose.

    Args:
        rows: of the batch.
        processors: logits processors of the call.
        do_sample: whether tokens are sampled.
        vocab_size: approximate size, used only to limit memory.
        device: device of the scores.
        on_choice: called with the raw and processed scores of every emitted token.
        num_ranked: number of likeliest tokens to rank for drafters, if that is free.
        ahead: whether to choose at all nodes of a step at once, for devices where every read result
            is a wait.
    """
    if not do_sample and not processors and on_choice is None:
        return GreedyChoice(num_ranked)
    at_once = ahead and not processors.need_prefix
    race = NoiseRace(len(rows), vocab_size, device, at_once) if do_sample else None
    kind = ChoiceAtOnce if at_once else ProcessedChoice
    return kind(rows, processors, race, device, on_choice)
