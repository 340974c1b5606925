"""Greedy choice: the likeliest token, found on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lade.drafting.speculator import Plan
from lade.drafting.successors import first_of_highest, rank
from lade.machine.transfer import HostCopy
from lade.sampling.choice import Choice, RowNode


class GreedyChoice(Choice):
    """The likeliest token, the first of equals, as in `generate(do_sample=False)`.

    Args:
        num_ranked: number of likeliest tokens to rank for drafters. Only used on a CPU, where one
            shared ranking saves time; elsewhere it would delay the choice.
    """

    def __init__(self, num_ranked: int = 0) -> None:
        self._num_ranked = num_ranked

    def look_at(self, logits: Tensor, plan: Plan) -> None:
        """Find the likeliest tokens of all nodes at once."""
        # `generate` decides in float32, including ties there; and on a CPU, `argmax` of bfloat16
        # takes four times as long (9 rows of 49 152: 0.85 ms instead of 0.23).
        if logits.dtype == torch.float64:
            logits = logits.float()
        is_cpu = logits.device.type == "cpu"
        token_ids = None
        if self._num_ranked > 1 and is_cpu:
            self.ranked = rank(logits, self._num_ranked)
            token_ids = first_of_highest(self.ranked)
        if token_ids is None:
            token_ids = (logits.float() if is_cpu else logits).argmax(dim=-1)
        self._starts = plan.starts
        self._sent = HostCopy(token_ids[0])

    def wait(self) -> None:
        """Fetch the tokens of all nodes."""
        (token_ids,) = self._sent.get()
        self._token_ids: list[int] = token_ids.tolist()

    def tokens_at(self, nodes: Sequence[RowNode]) -> list[int]:
        """Return the likeliest token at each node."""
        return [self._token_ids[self._starts[row] + node] for row, node in nodes]
