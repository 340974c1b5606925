"""The target's likeliest tokens after every node that it ran, for drafters that harvest."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lade.drafting import _kernels
from lade.machine.threads import alone
from lade.machine.transfer import HostCopy


class Successors(NamedTuple):
    """The target's likeliest next tokens after each of several nodes, likeliest first."""

    token_ids: NDArray[np.int32]  # [..., num_successors]
    probs: NDArray[np.float32]  # [..., num_successors], of the softmax over the whole vocabulary

    @classmethod
    def sent(cls, copy: HostCopy) -> "Successors":
        """Return the successors that `with_others` sent to the host, once they are there."""
        token_ids, *parts = copy.get()
        highest, others = (part.numpy() for part in parts)
        with np.errstate(invalid="ignore"):
            powers = np.exp(highest - highest[..., :1])
            # The ranked ones may be among the others, as the least of them: they are subtracted.
            of_others = others - highest.shape[-1] * powers[..., -1:]
            probs = powers / (powers.sum(-1, keepdims=True) + np.maximum(of_others, 0.0))
        # A drafter must neither learn from NaN nor fail because of it.
        return cls(token_ids.to(torch.int32).numpy(), np.where(np.isnan(probs), 0.0, probs))

    def of_tree(self, start: int, num_nodes: int, num: int) -> "Successors":
        """Return `num` successors of a tree's nodes; its root is at `start` of the only row."""
        nodes = slice(start, start + num_nodes)
        return Successors(self.token_ids[0, nodes, :num], self.probs[0, nodes, :num])


class Ranked(NamedTuple):
    """The highest logits of each of several nodes, highest first."""

    logits: Tensor  # [..., num_ranked]
    token_ids: Tensor  # int64 [..., num_ranked]
    is_ordered: bool = False  # whether of equal logits the lowest token id comes first


_INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def rank(logits: Tensor, num_ranked: int) -> Ranked:
    """Return the highest logits and their token ids, on the device.

    Args:
        logits: [..., vocab_size].
        num_ranked: how many; at most the size of the vocabulary is returned.
    """
    num_ranked = min(num_ranked, logits.shape[-1])
    dtype = _INTEGERS.get(logits.dtype)
    if dtype is not None and logits.device.type == "cpu" and logits.is_contiguous():
        bits = logits.detach().view(-1, logits.shape[-1]).view(dtype).numpy()
        shift = 32 - 8 * bits.itemsize
        least, infinity = -(1 << (31 - shift)), 0x7F800000 >> shift  # bits of -0, and of infinity
        found = np.empty((2, len(bits), num_ranked), np.int64)
        unsigned = bits.view(f"u{bits.itemsize}")
        if _kernels.rank_rows(bits, unsigned, least, infinity, found[0], found[1]):
            ids = torch.from_numpy(found[1]).view(*logits.shape[:-1], num_ranked)
            return Ranked(logits.gather(-1, ids), ids, is_ordered=True)
    return Ranked(*logits.topk(num_ranked, dim=-1))


def compile_kernels() -> None:
    """Compile the kernels of drafting, so that no step waits for them or fails by them."""
    for dtype in _INTEGERS:
        logits = torch.zeros((1, 2), dtype=dtype, device="cpu")
        with_others(rank(logits, 1), logits)


def first_of_highest(ranked: Ranked) -> Tensor | None:
    """Return the lowest of the token ids that share the highest logit, as `argmax` does.

    Returns:
        int64 [...]; None where the ranks do not tell, because more tokens than were ranked may
        share it, or it is NaN.
    """
    if ranked.is_ordered:
        return ranked.token_ids[..., 0]
    is_highest = ranked.logits == ranked.logits[..., :1]
    if bool((is_highest[..., -1] | ~is_highest[..., 0]).any()):
        return None
    return ranked.token_ids.where(is_highest, torch.iinfo(torch.int64).max).amin(dim=-1)


# Estimate the softmax sum from every 16th logit. Log-probabilities differ by about 0.2 from those
# with all logits, which take four times as long.
_SAMPLED = 16


def with_others(ranked: Ranked, logits: Tensor) -> HostCopy:
    """Send ranked tokens, their logits and about the softmax sum of all others to the host."""
    highest = ranked.logits.float()
    step = _SAMPLED if logits.shape[-1] > 4 * _SAMPLED * highest.shape[-1] else 1
    top, least = highest[..., :1], highest[..., -1:]
    others = alone(
        lambda: logits[..., ::step].float().minimum(least).sub_(top).exp_().sum(-1, keepdim=True)
    )
    return HostCopy(ranked.token_ids, highest, others.mul_(step))
