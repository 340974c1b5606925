"""Rejection sampling of drafts: emitted tokens have the target's distribution.

Exact acceptance, `lade.decoder`, compares a draft with the tokens that the target would emit
anyway, seed for seed. Rejection sampling accepts a draft token with a probability that preserves
the target's distribution, although the tokens differ from standard sampling. In exchange, a draft
drawn from nearly the target's distribution is nearly always accepted.

Terms: `target_probs` and `draft_probs` are p and q in most papers (some swap them). A node's draft
probability is the one that its token was *drawn* with, given its parent and the siblings before it;
a token that was chosen rather than drawn counts as drawn with certainty.

Sources: one draft token per position, Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding" (arXiv 2211.17192), and Chen et al., "Accelerating Large Language Model
Decoding with Speculative Sampling" (arXiv 2302.01318); several, as a tree, Miao et al., "SpecInfer"
(arXiv 2305.09781); siblings drawn without replacement, Jeon et al., "Recursive Speculative
Decoding" (arXiv 2402.14160).

Pure functions over tensors, independent of models, caches and pools.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NONE = -1  # "no child" inside tensors


class Trial(NamedTuple):
    """Outcome of trying the children of one node in each row."""

    accepted: Tensor  # int64 [rows], index of the accepted child, or NONE
    token_ids: Tensor  # int64 [rows], emitted token: the accepted child's, or one drawn instead


def try_children(
    target_probs: Tensor,
    child_token_ids: Tensor,
    draft_probs: Tensor,
    support_token_ids: Tensor,
    num_children: Tensor,
    counts: Sequence[int],
    generators: Sequence[torch.Generator] | None,
) -> Trial:
    """Accept one child of a node, or draw the token that is emitted instead.

    A child x is accepted with probability min(1, p(x) / q(x)); otherwise p becomes the normalised
    max(p - q, 0) and the next child is tried. After the last child, the token is drawn from the
    final p. A token of target probability 0 is never emitted. Without children, that is the bonus
    token.

    Values are not checked, because this runs at every node of every step.

    Args:
        target_probs: float32 or float64 [rows, vocab_size], the distribution after the node.
        child_token_ids: int64 [rows, num_children], in the order in which they were drawn.
        draft_probs: float [rows, num_children, support_size], the distribution that each child was
            drawn from; for siblings drawn without replacement, a later one's is conditioned on the
            earlier ones.
        support_token_ids: int64 [rows, num_children, support_size], the tokens that the last
            dimension of `draft_probs` refers to, all others having probability 0. Entries of
            probability 0 are padding, the others are distinct.
        num_children: int64 [rows], number of real children of each row; padding values do not
            matter.
        counts: the same numbers on the host, to avoid waiting for the device.
        generators: one per row; each gives one uniform number, plus one for each child. A row has
            the same result alone as in a batch. None for the device's default generator.
    """
    rows, width = child_token_ids.shape
    is_child = torch.arange(width, dtype=torch.int64, device=child_token_ids.device)
    is_child = is_child < num_children[:, None]
    uniforms = _uniforms([1 + count for count in counts], 1 + width, generators, target_probs)
    child_token_ids = child_token_ids.masked_fill(~is_child, 0)
    draft_probs = draft_probs.to(target_probs.dtype)
    weights = target_probs.clone()
    total = weights.sum(1, keepdim=True)
    accepted = torch.full((rows,), NONE, dtype=torch.int64, device=weights.device)
    for child in range(width):
        support, token_ids = support_token_ids[:, child], child_token_ids[:, child, None]
        scaled = total * draft_probs[:, child]  # q, scaled to the sum of p
        is_tried = (accepted == NONE) & is_child[:, child]
        # A product, not a quotient: p(x) = 0 is never accepted, and nothing is divided by 0.
        limits = uniforms[:, 1 + child] * torch.where(support == token_ids, scaled, 0).sum(1)
        is_accepted = limits < weights.gather(1, token_ids)[:, 0]
        accepted = torch.where(is_tried & is_accepted, child, accepted)
        is_rejected = is_tried & ~is_accepted
        # Only the support is touched, not the whole vocabulary.
        rejected = torch.where(is_rejected[:, None], scaled, 0)
        subtracted = torch.minimum(weights.gather(1, support), rejected)
        weights.scatter_add_(1, support, -subtracted)
        total = total - subtracted.sum(1, keepdim=True)
    # If q differs from p only by rounding, nothing may be left after a rejection (whose probability
    # is as small as the rounding); any token that the target allows will do.
    has_weight = weights.sum(1, keepdim=True) > 0
    drawn = _draw(torch.where(has_weight, weights, target_probs), uniforms[:, 0])
    choices = torch.cat([drawn[:, None], child_token_ids], dim=1)
    return Trial(accepted, choices.gather(1, accepted[:, None] + 1)[:, 0])


def _uniforms(
    counts: Sequence[int], width: int, generators: Sequence[torch.Generator] | None, like: Tensor
) -> Tensor:
    """Draw `counts[row]` numbers in [0, 1) for each row: [rows, width], of the dtype of `like`."""
    if generators is None:
        return torch.rand((len(counts), width), dtype=like.dtype, device=like.device)
    uniforms = like.new_zeros((len(counts), width))
    for row, (count, generator) in enumerate(zip(counts, generators, strict=True)):
        drawn = torch.rand(count, generator=generator, dtype=like.dtype, device=generator.device)
        uniforms[row, :count] = drawn
    return uniforms


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token per row, [rows], in proportion to `weights` [rows, vocab_size], by inversion.

    Uses one uniform number per row, while `torch.multinomial` takes one per vocabulary token.
    """
    # Parallel partial sums are not quite monotone; without the mask, a token of weight 0 at the
    # beginning of a part could be drawn.
    sums = weights.cumsum(1).masked_fill_(weights <= 0, 0)
    return (sums > uniforms[:, None] * sums.amax(1, keepdim=True)).max(1).indices
