"""What the target itself finds likely after every node it ran, for drafters that learn from it.

Next file: `drafting.py`.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Successors(NamedTuple):
    """The target's likeliest next tokens behind each of several nodes, likeliest first."""

    token_ids: NDArray[np.int32]  # [..., num_successors]
    probs: NDArray[np.float32]  # [..., num_successors], of the softmax over the whole vocabulary

    def of_row(self, row: int, num_nodes: int) -> "Successors":
        """Return those of the first nodes of one row, where the first axis counts rows."""
        return Successors(self.token_ids[row, :num_nodes], self.probs[row, :num_nodes])


def top_successors(logits: Tensor, num_successors: int) -> Successors:
    """Return the likeliest tokens of each row of logits, on the host.

    Args:
        logits: [..., vocab_size].
        num_successors: how many; fewer come back from a smaller vocabulary.
    """
    top = logits.topk(min(num_successors, logits.shape[-1]), dim=-1)
    # A half-precision logarithm has two or three digits: enough for a guess at a probability.
    probs = (top.values.float() - logits.logsumexp(dim=-1, keepdim=True).float()).exp()
    return Successors(top.indices.to(torch.int32).cpu().numpy(), probs.cpu().numpy())
