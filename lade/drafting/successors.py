"""The target's likeliest tokens after every node that it ran, for drafters that harvest."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lade.drafting import _kernels
from lade.machine.transfer import HostCopy


class Successors(NamedTuple):
    """The target's likeliest next tokens after each of several nodes, likeliest first."""

    token_ids: NDArray[np.int32]  # [..., num_successors]
    probs: NDArray[np.float32]  # [..., num_successors], of the softmax over the whole vocabulary

    def of_tree(self, start: int, num_nodes: int, num: int) -> "Successors":
        """Return `num` successors of a tree's nodes; its root is at `start` of the only row."""
        nodes = slice(start, start + num_nodes)
        return Successors(self.token_ids[0, nodes, :num], self.probs[0, nodes, :num])


def rank(logits: Tensor, num_ranked: int) -> Successors | None:
    """Return the likeliest tokens, the first of equals first, and about their probabilities.

    Args:
        logits: [..., vocab_size].
        num_ranked: how many; at most the size of the vocabulary is returned.

    Returns:
        None if the logits are not on a CPU, or some of them are infinite or NaN.
    """
    if logits.device.type != "cpu":
        return None
    rows = logits.detach().float().reshape(-1, logits.shape[-1]).numpy()
    shape = *logits.shape[:-1], min(num_ranked, logits.shape[-1])
    ids, probs = np.empty(shape, np.int32), np.empty(shape, np.float32)
    powers, keys = np.empty(rows.shape[1], np.float32), np.empty(shape[-1], np.int32)
    of_rows = rows, rows.view(np.int32), rows.view(np.uint32), powers, powers.view(np.int32), keys
    found = ids.reshape(-1, shape[-1]), probs.reshape(-1, shape[-1])
    return Successors(ids, probs) if _kernels.rank_rows(*of_rows, *found) else None


def ranked_on_device(logits: Tensor, num_ranked: int) -> Callable[[], Successors]:
    """Rank as `rank` does, on the device; return what gets the successors when they are there."""
    highest, ids = logits.topk(min(num_ranked, logits.shape[-1]), dim=-1)
    highest = highest.float()
    step = _kernels.SAMPLED if logits.shape[-1] > 4 * _kernels.SAMPLED * highest.shape[-1] else 1
    top, least = highest[..., :1], highest[..., -1:]
    others = logits[..., ::step].float().minimum(least).sub_(top).exp_().sum(-1, keepdim=True)
    copy = HostCopy(ids, highest, others.mul_(step))

    def get() -> Successors:
        token_ids, *parts = copy.get()
        highest, others = (part.numpy() for part in parts)
        with np.errstate(invalid="ignore"):
            powers = np.exp(highest - highest[..., :1])
            # The ranked ones may be among the others, as the least of them: they are subtracted.
            of_others = others - highest.shape[-1] * powers[..., -1:]
            probs = powers / (powers.sum(-1, keepdims=True) + np.maximum(of_others, 0.0))
        # A drafter must neither learn from NaN nor fail because of it.
        return Successors(token_ids.to(torch.int32).numpy(), np.where(np.isnan(probs), 0.0, probs))

    return get


def successors_of(logits: Tensor, num_ranked: int) -> Successors:
    """Return the likeliest tokens of logits [..., vocab_size], wherever they are."""
    found = rank(logits, num_ranked)
    return ranked_on_device(logits, num_ranked)() if found is None else found


def compile_kernels() -> None:
    """Compile the kernels of drafting, so that no step waits for them or fails by them."""
    rank(torch.zeros((1, 2), dtype=torch.float32, device="cpu"), 1)
