"""The interface between the decoding loop and a model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lade.batch import Batch
from lade.config import Execution, Verification
from lade.engine.engine import EngineCall
from lade.errors import UnsupportedOptionError
from lade.targets.inputs import CONTINUED
from lade.tree import Tree


class Target(ABC):
    """A model during one generation, as the decoding loop uses it.

    Between steps, all committed tokens of a row but the last, its next root, have been run.
    """

    device: torch.device
    vocab_size: int  # exclusive upper bound on the token ids of drafts
    max_candidates: int | None = None  # paths of a draft that one forward can verify
    num_pending: int = 0  # committed tokens that the next forward runs again
    verification: Verification = "tree"  # the method by which it verifies drafts
    execution: Execution = "eager"
    why_eager: str | None = None  # why steps are not compiled that were to be
    is_fast: bool = False  # whether forwards may run by lade's kernels
    may_join: bool = False  # whether its forwards may run together with other calls
    is_untimed = False  # whether the last forward also ran other calls, or a compiler

    _model_kwargs: dict[str, Any]  # what `generate` prepared for the prompts
    _engine_call: EngineCall | None = None  # runs its forwards together with other calls

    @property
    def marginal_cost(self) -> float | None:
        """Tokens that a draft token must add to pay in a forward of several calls; else None."""
        return None if self._engine_call is None else self._engine_call.marginal_cost

    def join(self, call: EngineCall) -> None:
        """Run forwards together with other calls of the model, if that is exact."""
        if self.may_join:
            self._engine_call = call

    def ask(self, call: EngineCall, parts: Sequence[Any]) -> list[Any]:
        """Run parts of a forward together with parts of other calls; return their outputs."""
        self.is_untimed = call.has_batch_mates
        return call.run(parts)

    def extended(self, num_new: int) -> dict[str, Any]:
        """Return the model's arguments for the prompts followed by `num_new` tokens of text."""
        longer = dict(self._model_kwargs)
        for name in CONTINUED:
            known = longer.get(name)
            if known is None:
                continue
            last = known[..., -1:].expand(*known.shape[:-1], num_new)
            if name == "attention_mask":
                new = torch.ones_like(last)
            elif name == "mm_token_type_ids":
                new = torch.zeros_like(last)
            elif name == "token_type_ids":
                new = last
            else:
                new = last + torch.arange(1, num_new + 1, dtype=last.dtype, device=known.device)
            longer[name] = torch.cat([known, new], dim=-1)
        return longer

    def record(self, options: Mapping[str, Any]) -> Callable[[int], Any]:
        """Have forwards return hidden states; see `DraftingCall.record`.

        Raises:
            UnsupportedOptionError: they cannot.
        """
        raise UnsupportedOptionError(
            "a drafter reads hidden states of the target, which lade has for a single prompt of "
            "text without a cache, verified by trees"
        )

    @abstractmethod
    def prefill(self, *, is_plain: bool = False) -> Tensor:
        """Run the prompts; return logits of their last tokens, [1, num_rows, vocab_size].

        Args:
            is_plain: whether to run them exactly as `generate` does.
        """

    def width_of(self, num_tokens: int) -> int:
        """Return the padded width of a forward over `num_tokens`."""
        return num_tokens

    @abstractmethod
    def inputs(self, trees: Sequence[Tree]) -> Any:
        """Return the inputs of `forward` for one tree per row, after its committed tokens.

        Only `forward` of the same target reads them: a dict of the model's arguments, or a list of
        such dicts for several rows.
        """

    @abstractmethod
    def forward(self, inputs: Any) -> Tensor:
        """Run the model on the inputs; a device may still be computing when this returns.

        Returns:
            Logits [1, num_nodes, vocab_size], one tree after the other.
        """

    @abstractmethod
    def forward_roots(self, roots: Sequence[Tree]) -> Tensor:
        """Run one root per row as `generate` runs single tokens; may be discarded."""

    @abstractmethod
    def discard(self) -> None:
        """Discard the last forward."""

    @abstractmethod
    def go_back(self, num_tokens: int) -> bool:
        """Forget the last committed tokens of each row; the next forward begins with them.

        `forward_roots` has run the very last of them. Returns False, with nothing changed, if going
        back is not possible.
        """

    @abstractmethod
    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the nodes of the last forward on each row's accepted path, root first."""

    def hand_over(self, cache: Any) -> Any:
        """Fill a cache with the tokens of a single row; return it, or another that holds them."""
        return cache

    # The methods below do nothing unless rows leave a batch, or memory is shared with the caller.

    def select(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Continue with some rows of the batch only, given by their ascending indices."""

    def fill(self, batch: Batch) -> int:
        """Run the padding of rows that ended early, as `generate` does; return the forwards."""
        return 0

    def close(self) -> None:  # noqa: B027
        """Restore the settings of the caller's cache; called once, also after an error."""

    def undo(self) -> None:  # noqa: B027
        """Restore the caller's cache to its content before the prompts, after an error."""

    def release(self) -> None:  # noqa: B027
        """Leave reusable memory to later calls; called last, and not after an error."""
