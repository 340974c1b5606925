"""The target's own choice at a node of the tree, the one function that the verifier asks.

Next file: `verify.py`.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


class Choice(Protocol):
    """Chooses the token that the target itself emits at a node."""

    def look_at(self, logits: Tensor) -> None:
        """Take in the logits of a step, [num_nodes, vocab_size]; waits for the device."""

    def token_at(self, node: int, committed: list[int]) -> int:
        """Return the token that follows `committed`, which ends with the token of `node`.

        Called once per emitted token, in order of emission.
        """


class GreedyChoice:
    """The likeliest token, the first of equals, as `generate(do_sample=False)` takes it."""

    def look_at(self, logits: Tensor) -> None:
        """Find the likeliest token of all nodes at once."""
        self._token_ids = logits.argmax(dim=-1).tolist()

    def token_at(self, node: int, committed: list[int]) -> int:
        """Return the likeliest token at a node."""
        token_id: int = self._token_ids[node]
        return token_id


class ProcessedGreedyChoice:
    """The likeliest token after logits processors, which see the true prefix of each node.

    Processors run only where a token is emitted, once for each and in order, because some count
    their calls and all may look at the whole prefix.
    """

    def __init__(self, processor: LogitsProcessor, device: torch.device) -> None:
        self._processor = processor
        self._device = device

    def look_at(self, logits: Tensor) -> None:
        """Keep the logits."""
        self._logits = logits

    def token_at(self, node: int, committed: list[int]) -> int:
        """Process the logits of a node under its prefix and return the likeliest token."""
        prefix = torch.tensor([committed], device=self._device)
        scores = self._logits[node : node + 1].to(self._device, torch.float32, copy=True)
        return int(self._processor(prefix, scores).argmax(dim=-1))
