"""The target's own token after each node: the interface of all ways to choose it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from lade.batch import Row
from lade.drafting.speculator import Plan
from lade.drafting.successors import Successors
from lade.machine.transfer import HostCopy, Launched
from lade.sampling.processors import Processors

RowNode = tuple[Row, int]  # row, and node of that row's tree
# Called for each chosen token of a single row: raw and processed scores, float32 [vocab_size] each.
OnChoice = Callable[[Tensor, Tensor], None]


class Choice(ABC):
    """Chooses the tokens that the target itself emits.

    Attributes:
        max_lead: maximum number of tokens a row may be ahead of another; None for no limit.
        ranked: the likeliest tokens of the last step's nodes, if choosing has ranked them.
    """

    max_lead: int | None = None
    ranked: Successors | None = None

    @abstractmethod
    def look_at(self, logits: Tensor, plan: Plan) -> None:
        """Receive the logits of a step.

        Args:
            logits: [1, num_nodes, vocab_size], one tree after the other; the device may still be
                computing them.
            plan: the step's trees, in the order of `logits`.
        """

    @abstractmethod
    def wait(self) -> None:
        """Wait until the device has computed what `tokens_at` needs."""

    @abstractmethod
    def tokens_at(self, nodes: Sequence[RowNode]) -> list[int]:
        """Return the next token after each node, whose token is the last one of its row.

        Called once per emitted token, in order of emission within a row.
        """

    def close(self) -> None:  # noqa: B027
        """Leave the random state as `generate` would; called once, also after an error."""


class ScoredChoice(Choice):
    """Base class that processes the scores only of nodes where tokens are emitted.

    Processors run once per emitted token, in order, with the true prefix: some count their calls,
    some draw random numbers, and any of them may look at the whole prefix.
    """

    def __init__(
        self,
        processors: Processors,
        device: torch.device,
        on_choice: OnChoice | None = None,
    ) -> None:
        self._processors = processors
        self._device = device
        self._on_choice = on_choice

    def look_at(self, logits: Tensor, plan: Plan) -> None:
        """Keep the logits until tokens are chosen."""
        self._logits = logits
        self._trees, self._starts = plan.trees, plan.starts
        self._launched = Launched(logits)

    def wait(self) -> None:
        """Wait for the logits, so that their time counts as that of the forward."""
        self._launched.wait()

    def _scores_at(self, nodes: Sequence[RowNode]) -> Tensor:
        """Return processed scores, float32 [len(nodes), vocab_size]."""
        rows = [row for row, _ in nodes]
        raw = torch.stack([self._logits[0, self._starts[row] + node] for row, node in nodes])
        raw = raw.to(self._device, torch.float32)
        scores = self._processors(rows, raw)  # may write in place, as in `generate`
        if self._on_choice is not None:
            self._on_choice(raw[0], scores[0])
        return scores


def is_distribution(probs: Tensor) -> Tensor:
    """Return which softmaxes [n, vocab_size] are distributions, bool [n].

    A single infinity or NaN among the scores makes the whole softmax NaN.
    """
    return ~probs[:, 0].isnan()


def tokens_of(token_ids: Tensor, is_valid: Tensor) -> list[int]:
    """Wait for chosen tokens and return them.

    Args:
        token_ids: int64 [n].
        is_valid: bool [n], whether their scores were valid.

    Raises:
        RuntimeError: scores are invalid, as `torch.multinomial` raises it.
    """
    on_host, are_valid = HostCopy(token_ids, is_valid).get()
    if not are_valid.all():
        raise_invalid()
    chosen: list[int] = on_host.tolist()
    return chosen


def raise_invalid() -> NoReturn:
    """Raise the error of `torch.multinomial` for scores that are no distribution.

    On CUDA, `torch.multinomial` would fail an assertion, after which the device is unusable.
    """
    raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
