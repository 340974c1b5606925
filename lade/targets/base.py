"""What the decoding loop needs of a model."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lade.batch import Text
from lade.compat import Model
from lade.drafting.drafts import chain
from lade.tree import Tree


class Forward(Protocol):
    """What a forward gives back; transformers' own output classes do."""

    @property
    def logits(self) -> Tensor:
        """[rows, num_nodes, vocab_size]; of a prefill, those of the last tokens alone."""

    @property
    def hidden_states(self) -> tuple[Tensor, ...] | None:
        """Of every layer, [rows, num_nodes, hidden_size], where they were asked for."""

    @property
    def attentions(self) -> tuple[Tensor | None, ...] | None:
        """Of every layer, [rows, heads, num_nodes, num_keys], where they were asked for."""


class Alone(NamedTuple):
    """What a forward over a single token of each row, as in plain decoding, found behind it."""

    nodes: list[int]  # which of the nodes run last it was, in each row
    logits: Tensor  # [rows, vocab_size]


class Target(Protocol):
    """A model in the middle of one generation: what the decoding loop needs of it.

    Between steps every committed token of a row but the last, its next root, has been run.
    """

    device: torch.device
    vocab_size: int  # no token id of a draft may reach it
    max_candidates: int | None  # paths of a draft that one forward can verify; None for any number
    is_lockstep: bool  # whether all rows must be of one length between steps

    @property
    def is_timing_valid(self) -> bool:
        """Whether the last forward took as long as others of its size will."""

    @property
    def num_cached(self) -> list[int]:
        """Tokens before the root of each row there is now."""

    @property
    def num_pending(self) -> int:
        """Committed tokens that the next forward runs once more."""

    @property
    def must_catch_up(self) -> bool:
        """Whether the next forward should have no draft, because there are too many of those."""

    def prefill(self, view: Model | None = None) -> Forward:
        """Run the prompts, through a view of the model if one is given."""

    def width_of(self, num_tokens: int) -> int:
        """Return how many tokens of each row a forward runs for so many."""

    def inputs(self, trees: Sequence[Tree]) -> Any:
        """Return what `forward` takes for a tree behind each row's committed tokens."""

    def forward(self, inputs: Any) -> Forward:
        """Run the model on such inputs; a device may still be at it when this returns."""

    def discard(self) -> None:
        """Forget what was run last, and want no draft any more."""

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Of the nodes run last, keep those on each row's accepted path, the root first."""

    def commit_and_look(self, paths: Sequence[Sequence[int]]) -> Alone | None:
        """Commit, and run a committed token of each row once more, alone; nothing else changes.

        Returns:
            None where that cannot be done without a trace; committed is all the same.
        """

    def select(self, places: Sequence[int]) -> None:
        """Go on with some rows alone, given as ascending indices into those there are now."""

    def rejoin(self) -> None:
        """Take back the rows that were left out."""

    def hand_over(self, cache: Any) -> Any:
        """Let the caller's cache hold what was run, rows being of one length; return the cache."""

    def close(self) -> None:
        """Leave the caller's cache as it was made; called once, also after an error."""

    def undo(self) -> None:
        """Put the caller's cache back to what it held before the prompts, after an error."""

    def release(self) -> None:
        """Let a later call have what it can use; called last, and not after an error."""


_MOST_AT_ONCE = 64  # tokens of a row


def fill_cache(target: Target, text: Text) -> int:
    """Run the padding that rows lack behind their text, until the cache has all at full length.

    Args:
        target: has run the text of all rows, those that were left out included.
        text: whose rows are finished.

    Returns:
        How many forwards it took.
    """
    target.rejoin()
    roots = [token_ids[-1] for token_ids in text.token_ids]
    missing = [text.longest - len(token_ids) for token_ids in text.token_ids]
    num_forwards = 0
    while any(missing):
        most = 1 if target.must_catch_up else _MOST_AT_ONCE
        nums = [min(num, most) for num in missing]
        padding = text.pad_token_id
        assert padding is not None  # else no row is shorter than the others
        trees = [
            Tree.build(root, chain([padding] * max(0, num - 1)))
            for root, num in zip(roots, nums, strict=True)
        ]
        target.forward(target.inputs(trees))
        target.commit([[*range(num)] for num in nums])
        roots = [padding if num else root for root, num in zip(roots, nums, strict=True)]
        missing = [left - num for left, num in zip(missing, nums, strict=True)]
        num_forwards += 1
    return num_forwards
