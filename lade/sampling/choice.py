"""The target's own token behind each node: what every way of choosing it has."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lade.batch import Text
from lade.drafting.successors import Ranked
from lade.sampling.processors import Processors
from lade.tree import Tree

Place = tuple[int, int]  # row, and node of the row's tree
# Told what a token was chosen from: row, raw and processed scores, float32 [vocab_size] each.
OnChoice = Callable[[int, Tensor, Tensor], None]


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


class ScoredChoice:
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


def is_distribution(probs: Tensor) -> Tensor:
    """Tell which softmaxes [n, vocab_size] are distributions, bool [n].

    One infinity or NaN among the scores makes the whole softmax NaN.
    """
    return ~probs[:, 0].isnan()


def check_valid(scores: Tensor, is_valid: Tensor) -> None:
    """Raise for the first of `scores`, float32 [n, vocab_size], that is not valid."""
    for of_place, place_is_valid in zip(scores, is_valid.tolist(), strict=True):
        if not place_is_valid:
            raise_invalid(of_place)


def raise_invalid(scores: Tensor) -> None:
    """Raise what `torch.multinomial` raises for scores, float32 [vocab_size], it cannot sample."""
    torch.multinomial(scores.softmax(dim=-1), 1)
    raise AssertionError("expected torch.multinomial to refuse these scores")
