"""The interface between the decoding loop and a model."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lade.batch import Text
from lade.compat import Model
from lade.drafting.drafts import chain
from lade.tree import Tree


class Forward(Protocol):
    """Output of a forward; transformers' own output classes conform."""

    @property
    def logits(self) -> Tensor:
        """[rows, num_nodes, vocab_size]; of a prefill, only those of the last tokens."""

    @property
    def hidden_states(self) -> tuple[Tensor, ...] | None:
        """Of every layer, [rows, num_nodes, hidden_size], if requested."""

    @property
    def attentions(self) -> tuple[Tensor | None, ...] | None:
        """Of every layer, [rows, heads, num_nodes, num_keys], if requested."""


class Alone(NamedTuple):
    """Result of a forward over a single token per row, as in plain decoding."""

    nodes: list[int]  # for each row, the node of the last step whose token was run
    logits: Tensor  # [rows, vocab_size], after that token


class Target(Protocol):
    """A model during one generation, as the decoding loop uses it.

    Between steps, all committed tokens of a row but the last, its next root, have been run.
    """

    device: torch.device
    vocab_size: int  # exclusive upper bound on the token ids of drafts
    max_candidates: int | None  # paths of a draft that one forward can verify; None for no limit
    is_lockstep: bool  # whether all rows must be of equal length between steps

    @property
    def is_timing_valid(self) -> bool:
        """Whether the last forward's time is representative of its size."""

    @property
    def num_cached(self) -> list[int]:
        """Number of tokens before the root, for each row in use."""

    @property
    def num_pending(self) -> int:
        """Number of committed tokens that the next forward runs again."""

    @property
    def must_catch_up(self) -> bool:
        """Whether the next forward should have no draft, as when `num_pending` is too large."""

    @property
    def packs_rows(self) -> bool:
        """Whether a forward costs what its tokens cost, however they are divided among rows."""

    def prefill(self, view: Model | None = None) -> Forward:
        """Run the prompts, through a view of the model if one is given."""

    def width_of(self, num_tokens: int) -> int:
        """Return the padded width of a forward over `num_tokens` per row."""

    def inputs(self, trees: Sequence[Tree]) -> Any:
        """Return the inputs of `forward` for one tree per row, after its committed tokens."""

    def forward(self, inputs: Any) -> Forward:
        """Run the model on the inputs; a device may still be computing when this returns."""

    def discard(self) -> None:
        """Discard the last forward, and request no more drafts (`must_catch_up`)."""

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the nodes of the last forward on each row's accepted path, root first."""

    def commit_and_look(self, paths: Sequence[Sequence[int]]) -> Alone | None:
        """Commit, and run one committed token of each row again, alone, without side effects.

        Returns:
            None if that is not possible without side effects; the paths are committed anyway.
        """

    def select(self, places: Sequence[int]) -> None:
        """Continue with some rows only, given as ascending indices into the rows in use."""

    def rejoin(self) -> None:
        """Take all deselected rows back into use."""

    def hand_over(self, cache: Any) -> Any:
        """Let a cache hold what was run and return the one that does; rows have equal length."""

    def close(self) -> None:
        """Restore the settings of the caller's cache; called once, also after an error."""

    def undo(self) -> None:
        """Restore the caller's cache to its content before the prompts, after an error."""

    def release(self) -> None:
        """Leave reusable memory to later calls; called last, and not after an error."""


_MOST_AT_ONCE = 64  # tokens per row in one forward


def fill_cache(target: Target, text: Text) -> int:
    """Run the padding that short rows lack, until the cache holds all rows at full length.

    Args:
        target: a target that has run the text of all rows, including deselected ones.
        text: the text, with all rows finished.

    Returns:
        The number of forwards.
    """
    target.rejoin()
    roots = [token_ids[-1] for token_ids in text.token_ids]
    missing = [text.longest - len(token_ids) for token_ids in text.token_ids]
    num_forwards = 0
    while any(missing):
        most = 1 if target.must_catch_up else _MOST_AT_ONCE
        nums = [min(num, most) for num in missing]
        padding = text.pad_token_id
        assert padding is not None  # without padding, all rows are of equal length
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
