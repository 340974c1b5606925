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
        if logits.dtype == torch.float64:  # `generate` decides in float32, also between ties there
            logits = logits.float()
        self._token_ids = logits.argmax(dim=-1).tolist()

    def token_at(self, node: int, committed: list[int]) -> int:
        """Return the likeliest token at a node."""
        token_id: int = self._token_ids[node]
        return token_id


class Prefix:
    """Committed tokens as a tensor that grows with them, for those who ask after every token."""

    def __init__(self, device: torch.device) -> None:
        self._ids = torch.empty((1, 0), dtype=torch.int64, device=device)
        self._num_known = 0

    def of(self, committed: list[int]) -> Tensor:
        """Return all of `committed`, int64 [1, num_tokens]; it must have grown since last time."""
        new = committed[self._num_known :]
        if len(committed) > self._ids.shape[1]:
            larger = self._ids.new_empty((1, 2 * len(committed)))
            larger[:, : self._num_known] = self._ids[:, : self._num_known]
            self._ids = larger
        self._ids[0, self._num_known : len(committed)] = torch.tensor(new, device=self._ids.device)
        self._num_known = len(committed)
        return self._ids[:, : len(committed)]


class ProcessedGreedyChoice:
    """The likeliest token after logits processors, which see the true prefix of each node.

    Processors run only where a token is emitted, once for each and in order, because some count
    their calls and all may look at the whole prefix.
    """

    def __init__(self, processor: LogitsProcessor, device: torch.device) -> None:
        self._processor = processor
        self._device = device
        self._prefix = Prefix(device)

    def look_at(self, logits: Tensor) -> None:
        """Take the logits over in float32, as `generate` does."""
        self._scores = logits.to(self._device, torch.float32, copy=True)
        self._scores[0, 0].item()  # wait, or the time of the forward would be counted elsewhere

    def token_at(self, node: int, committed: list[int]) -> int:
        """Process the logits of a node under its prefix and return the likeliest token."""
        scores = self._processor(self._prefix.of(committed), self._scores[node : node + 1])
        return int(scores.argmax(dim=-1))
