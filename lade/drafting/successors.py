"""The target's likeliest tokens after every node that it ran, for drafters that harvest."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lade.transfer import HostCopy


class Successors(NamedTuple):
    """The target's likeliest next tokens after each of several nodes, likeliest first."""

    token_ids: NDArray[np.int32]  # [..., num_successors]
    probs: NDArray[np.float32]  # [..., num_successors], of the softmax over the whole vocabulary

    @classmethod
    def sent(cls, copy: HostCopy) -> "Successors":
        """Return those that were sent to the host (`with_probs`), once they are there."""
        token_ids, probs = copy.get()
        return cls(token_ids.to(torch.int32).numpy(), probs.numpy())

    def of_tree(self, start: int, num_nodes: int) -> "Successors":
        """Return those of the nodes of one tree, whose root is at `start` of the only row."""
        nodes = slice(start, start + num_nodes)
        return Successors(self.token_ids[0, nodes], self.probs[0, nodes])


class Ranked(NamedTuple):
    """The highest logits of each of several nodes, highest first."""

    logits: Tensor  # [..., num_ranked]
    token_ids: Tensor  # int64 [..., num_ranked]


# Logits of a column. Of 29 rows of 49 152 in bfloat16, columns of 32 to 128 took 0.15 ms, `topk` of
# all logits 0.9.
_COLUMN = 64


def rank(logits: Tensor, num_ranked: int) -> Ranked:
    """Return the highest logits and their token ids, on the device.

    On a CPU, the highest are looked for in the columns that have the highest maxima, as integers,
    whose maxima vector instructions find: bits of positive numbers are in the order of the numbers,
    and those of negative ones are below.

    Args:
        logits: [..., vocab_size].
        num_ranked: how many; at most the size of the vocabulary is returned.
    """
    vocab_size, rows = logits.shape[-1], logits.detach().flatten(0, -2)
    num_ranked, num_columns = min(num_ranked, vocab_size), vocab_size // _COLUMN
    if logits.device.type == "cpu" and logits.is_contiguous() and num_columns >= num_ranked:
        bits = rows.view(getattr(torch, f"int{8 * rows.itemsize}"))
        unsigned = bits.numpy().view(f"u{rows.itemsize}")
        least = rows.new_full((1,), -torch.inf).view(bits.dtype).numpy().view(unsigned.dtype)
        columns = bits[:, : _COLUMN * num_columns].view(len(rows), _COLUMN, num_columns)
        best = columns.amax(1).topk(num_ranked)
        # Above the bits of -inf, as unsigned, are those of NaN, which would be the highest.
        if best.values.amin() >= 0 and unsigned.max() <= least:
            starts = torch.arange(0, _COLUMN * num_columns, num_columns)
            ids = (best.indices[:, None] + starts[:, None]).flatten(1)
            rest = torch.arange(_COLUMN * num_columns, vocab_size).expand(len(rows), -1)
            ids = torch.cat([ids, rest], dim=1)
            highest = rows.gather(1, ids).topk(num_ranked)
            shape = (*logits.shape[:-1], num_ranked)
            return Ranked(highest.values.view(shape), ids.gather(1, highest.indices).view(shape))
    return Ranked(*logits.topk(num_ranked, dim=-1))


def first_of_highest(ranked: Ranked) -> Tensor | None:
    """Return the lowest of the token ids that share the highest logit, as `argmax` does.

    Returns:
        int64 [...]; None where the ranks do not tell, because more tokens than were ranked may
        share it, or it is NaN.
    """
    is_highest = ranked.logits == ranked.logits[..., :1]
    if bool((is_highest[..., -1] | ~is_highest[..., 0]).any()):
        return None
    return ranked.token_ids.where(is_highest, torch.iinfo(torch.int64).max).amin(dim=-1)


# Estimate the softmax sum from every 16th logit. Log-probabilities differ by about 0.2 from those
# with all logits, which take four times as long.
_SAMPLED = 16


def with_probs(ranked: Ranked, logits: Tensor) -> HostCopy:
    """Send ranked tokens with their approximate probabilities to the host."""
    highest = ranked.logits.float()
    step = _SAMPLED if logits.shape[-1] > 4 * _SAMPLED * highest.shape[-1] else 1
    top, least = highest[..., :1], highest[..., -1:]
    powers = (highest - top).exp_()
    # The ranked ones may be among these: they are clamped to the least of them, and subtracted.
    others = logits[..., ::step].float().minimum(least).sub_(top).exp_().sum(-1, keepdim=True)
    least_powers = powers[..., -1:]
    of_others = step * others - highest.shape[-1] * least_powers
    # NaN becomes 0: a drafter must neither learn from it nor fail because of it.
    probs = (powers / (powers.sum(-1, keepdim=True) + of_others.clamp_(min=0.0))).nan_to_num_(0.0)
    return HostCopy(ranked.token_ids, probs)
