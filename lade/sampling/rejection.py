"""Rejection sampling of drafts: emitted tokens have the target's distribution.

Exact acceptance, `lade.verify`, compares a draft with what the target would emit anyway, seed for
seed. Here a draft token is accepted with a probability such that emitted tokens have the target's
distribution, although they differ from those that plain sampling would give. In exchange, a draft
drawn from nearly the target's distribution is accepted nearly always.

Terms: `target_probs` and `draft_probs` are p and q in most papers (some swap them). A node's draft
probabilities are those that its token was *drawn* with, given its parent and the siblings before
it. If they are absent, every draft token counts as proposed with certainty.

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

Generators = Sequence[torch.Generator | None]

NONE = -1  # "no child" and "no node" inside tensors; as a parent, the root
# Largest deviation of a distribution's sum from 1: a float32 softmax over 150,000 tokens is off by
# less than 1e-5, a bfloat16 one by 1e-3 and more.
_SUM_TOLERANCE = 1e-4


class Trial(NamedTuple):
    """Outcome of trying the children of one node in each row."""

    accepted: Tensor  # int64 [rows], index of the accepted child, or NONE
    token_ids: Tensor  # int64 [rows], emitted token: the accepted child's, or one drawn instead


class AcceptedPath(NamedTuple):
    """Outcome of verifying a draft in each row."""

    num_accepted: Tensor  # int64 [rows], number of accepted draft tokens
    nodes: Tensor  # int64 [rows, num_draft], accepted nodes from the root down, then NONE
    token_ids: Tensor  # int64 [rows], token emitted after them, which ends the step


def verify_tree(
    target_probs: Tensor,
    draft_token_ids: Tensor,
    parents: Tensor | None,
    draft_probs: Tensor | None,
    generators: Generators | None,
    num_nodes: Tensor | None = None,
    support_token_ids: Tensor | None = None,
) -> AcceptedPath:
    """Accept a path of the draft and draw the token after it, with the target's distribution.

    From the root down, `try_children` either accepts a child and continues with its children, or
    draws another token, which ends the path. At a node without children that is the bonus token.

    Args:
        target_probs: float32 or float64 [rows, 1 + num_draft, vocab_size]; index 0 is the
            distribution after the root, i + 1 that after draft node i.
        draft_token_ids: int64 [rows, num_draft].
        parents: int64 [rows, num_draft], parents before children and NONE under the root; siblings
            are tried in index order. None for a chain.
        draft_probs: float32 or float64 [rows, num_draft, vocab_size], the distribution that each
            node was drawn from; for siblings drawn without replacement, a later one's is
            conditioned on the earlier ones. None if tokens were chosen rather than drawn.
        generators: one per row. A row draws only from its own, and only as much as its own path
            needs, so it has the same result alone as in a batch. None in place of one generator, or
            of all, is the default generator of the device.
        num_nodes: int64 [rows], number of real nodes of each row; the values of others do not
            matter. None for all.
        support_token_ids: int64 [rows, num_draft, support_size], the tokens that the last dimension
            of `draft_probs` refers to, all others having probability 0; `draft_probs` is then
            [rows, num_draft, support_size]. Entries of probability 0 are padding, the others are
            distinct. None for the whole vocabulary.

    Raises:
        TypeError: a tensor has a wrong dtype.
        ValueError: a shape does not fit, a distribution is invalid, a token id is outside the
            vocabulary, a parent does not precede its child, or a draft token has draft probability
            0.
    """
    rows, num_draft = _check_shapes(
        target_probs, draft_token_ids, parents, draft_probs, num_nodes, support_token_ids
    )
    if generators is not None and len(generators) != rows:
        raise ValueError(f"expected a generator for each of {rows} rows, got {len(generators)}")
    device = target_probs.device
    if parents is None:
        parents = torch.arange(NONE, num_draft - 1, device=device).expand(rows, num_draft)
    if num_nodes is None:
        num_nodes = torch.full((rows,), num_draft, device=device)
    _check_tree(parents, num_nodes)
    is_real = torch.arange(num_draft, device=device) < num_nodes[:, None]
    _check_target(target_probs, draft_token_ids, is_real)
    if draft_probs is not None:
        vocab_size = target_probs.shape[2]
        _check_draft(draft_token_ids, draft_probs, is_real, support_token_ids, vocab_size)

    nodes = torch.full((rows, num_draft), NONE, device=device)
    num_accepted = torch.zeros(rows, dtype=torch.int64, device=device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=device)
    going = torch.arange(rows, device=device)  # rows whose path still continues
    node = torch.full((rows,), NONE, device=device)  # the current node of each of them
    while len(going):
        children, num_children = _children(parents[going], is_real[going], node)
        trial = try_children(
            target_probs[going, node + 1],
            draft_token_ids[going].gather(1, children),
            None if draft_probs is None else draft_probs[going[:, None], children],
            None if generators is None else [generators[row] for row in going.tolist()],
            num_children,
            None if support_token_ids is None else support_token_ids[going[:, None], children],
        )
        token_ids[going] = trial.token_ids
        goes_on = trial.accepted != NONE
        going = going[goes_on]
        node = children[goes_on].gather(1, trial.accepted[goes_on, None])[:, 0]
        nodes[going, num_accepted[going]] = node
        num_accepted[going] += 1
    return AcceptedPath(num_accepted, nodes, token_ids)


def try_children(
    target_probs: Tensor,
    child_token_ids: Tensor,
    draft_probs: Tensor | None,
    generators: Generators | None,
    num_children: Tensor | None = None,
    support_token_ids: Tensor | None = None,
    counts: Sequence[int] | None = None,
) -> Trial:
    """Accept one child of a node, or draw the token that is emitted instead.

    A child x is accepted with probability min(1, p(x) / q(x)); otherwise p becomes the normalised
    max(p - q, 0) and the next child is tried. After the last child, the token is drawn from the
    final p. A token of target probability 0 is never emitted.

    For children that were not drawn, q(x) = 1, this equals drawing once from p and checking whether
    a child has that token, which is how it is done: the first child is accepted with p(x), the
    next, if that failed, with p(y) / (1 - p(x)), which is p(y) in total, and so on.

    Values are not checked, because this runs at every node of every step; `verify_tree` checks
    them.

    Args:
        target_probs: float32 or float64 [rows, vocab_size], the distribution after the node.
        child_token_ids: int64 [rows, num_children], in the order in which they were drawn.
        draft_probs: float [rows, num_children, vocab_size], or [rows, num_children, support_size]
            with `support_token_ids`; None for children that were not drawn.
        generators: one per row, or None, as for `verify_tree`. Each gives one uniform number, plus
            one for each child if children were drawn.
        num_children: int64 [rows], number of real children of each row; None for all.
        support_token_ids: int64 [rows, num_children, support_size], as for `verify_tree`.
        counts: `num_children` on the host; else a device is waited for.
    """
    rows, width = child_token_ids.shape
    assert target_probs.ndim == 2
    assert len(target_probs) == rows
    assert generators is None or len(generators) == rows
    assert num_children is None or num_children.shape == (rows,)
    is_child = torch.ones_like(child_token_ids, dtype=torch.bool)
    if num_children is not None:
        is_child = torch.arange(width, device=is_child.device) < num_children[:, None]
    if draft_probs is None:
        uniforms = _uniforms([1] * rows, 1, generators, target_probs)
        token_ids = _draw(target_probs, uniforms[:, 0])
        return Trial(_first((child_token_ids == token_ids[:, None]) & is_child), token_ids)
    assert draft_probs.shape[:2] == (rows, width)
    assert support_token_ids is None or support_token_ids.shape == draft_probs.shape
    assert support_token_ids is not None or draft_probs.shape[2] == target_probs.shape[1]
    if counts is None:
        counts = [width] * rows if num_children is None else num_children.tolist()
    uniforms = _uniforms([1 + count for count in counts], 1 + width, generators, target_probs)
    child_token_ids = child_token_ids.masked_fill(~is_child, 0)
    draft_probs = draft_probs.to(target_probs.dtype)
    accepted, weights = _try_drawn(
        target_probs, child_token_ids, is_child, draft_probs, support_token_ids, uniforms[:, 1:]
    )
    choices = torch.cat([_draw(weights, uniforms[:, 0])[:, None], child_token_ids], dim=1)
    return Trial(accepted, choices.gather(1, accepted[:, None] + 1)[:, 0])


def _try_drawn(
    target_probs: Tensor,
    child_token_ids: Tensor,
    is_child: Tensor,
    draft_probs: Tensor,
    support_token_ids: Tensor | None,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Try children one after another, with uniforms [rows, num_children].

    Returns:
        The accepted child of each row, or NONE, and the final p, not normalised.
    """
    rows, width = child_token_ids.shape
    weights = target_probs.clone()
    total = weights.sum(1, keepdim=True)
    accepted = torch.full((rows,), NONE, device=weights.device)
    for child in range(width):
        support = None if support_token_ids is None else support_token_ids[:, child]
        scaled = total * draft_probs[:, child]  # q, scaled to the sum of p
        is_tried = (accepted == NONE) & is_child[:, child]
        token_ids = child_token_ids[:, child]
        # A product, not a quotient: p(x) = 0 is never accepted, and nothing is divided by 0.
        limits = _at(token_ids, weights, None)
        is_accepted = uniforms[:, child] * _at(token_ids, scaled, support) < limits
        accepted = torch.where(is_tried & is_accepted, child, accepted)
        is_rejected = is_tried & ~is_accepted
        total = total - _subtract(weights, torch.where(is_rejected[:, None], scaled, 0), support)
    # If q differs from p only by rounding, nothing may be left after a rejection (whose probability
    # is as small as the rounding); any token that the target allows will do.
    has_weight = weights.sum(1, keepdim=True) > 0
    return accepted, torch.where(has_weight, weights, target_probs)


def _children(parents: Tensor, is_real: Tensor, node: Tensor) -> tuple[Tensor, Tensor]:
    """Return the children of `node` [rows] in order, padded, and their number [rows]."""
    is_child = (parents == node[:, None]) & is_real
    num_children = is_child.sum(1)
    width = int(num_children.max()) if is_child.shape[1] else 0
    return (~is_child).to(torch.uint8).argsort(dim=1, stable=True)[:, :width], num_children


def _uniforms(counts: list[int], width: int, generators: Generators | None, like: Tensor) -> Tensor:
    """Draw `counts[row]` numbers in [0, 1) for each row: [rows, width], of the dtype of `like`."""
    if generators is None:
        return torch.rand((len(counts), width), dtype=like.dtype, device=like.device)
    uniforms = like.new_zeros((len(counts), width))
    for row, (count, generator) in enumerate(zip(counts, generators, strict=True)):
        device = like.device if generator is None else generator.device
        drawn = torch.rand(count, generator=generator, dtype=like.dtype, device=device)
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


def _first(hits: Tensor) -> Tensor:
    """Return the index [rows] of the first hit of each row of bool [rows, width], or NONE."""
    sentinel = hits.new_ones((len(hits), 1))
    index = torch.cat([hits, sentinel], dim=1).max(1).indices
    return index.masked_fill(index == hits.shape[1], NONE)


def _at(token_ids: Tensor, probs: Tensor, support: Tensor | None) -> Tensor:
    """Return the probability [rows] of each row's token under its distribution."""
    if support is None:
        return probs.gather(-1, token_ids[..., None])[..., 0]
    return torch.where(support == token_ids[..., None], probs, 0).sum(-1)


def _subtract(weights: Tensor, probs: Tensor, support: Tensor | None) -> Tensor:
    """Subtract `probs` from `weights` [rows, vocab_size] in place, clamped at 0.

    Returns:
        The amount subtracted, [rows, 1].
    """
    held = weights if support is None else weights.gather(1, support)
    subtracted = torch.minimum(held, probs)
    if support is None:
        weights.sub_(subtracted)
    else:  # only the support is touched, not the whole vocabulary
        weights.scatter_add_(1, support, -subtracted)
    return subtracted.sum(1, keepdim=True)


def _check_shapes(
    target_probs: Tensor,
    draft_token_ids: Tensor,
    parents: Tensor | None,
    draft_probs: Tensor | None,
    num_nodes: Tensor | None,
    support_token_ids: Tensor | None,
) -> tuple[int, int]:
    """Check dtypes and shapes; return the numbers of rows and of draft nodes."""
    floats, ints = (torch.float32, torch.float64), (torch.int64,)
    _check_tensor("draft_token_ids", draft_token_ids, ints, ("rows", "num_draft"))
    rows, num_draft = draft_token_ids.shape
    _check_tensor("target_probs", target_probs, floats, (rows, 1 + num_draft, "vocab_size"))
    if parents is not None:
        _check_tensor("parents", parents, ints, (rows, num_draft))
    if num_nodes is not None:
        _check_tensor("num_nodes", num_nodes, ints, (rows,))
    if support_token_ids is not None:
        if draft_probs is None:
            raise ValueError("expected draft_probs along with support_token_ids, got None")
        _check_tensor("support_token_ids", support_token_ids, ints, (rows, num_draft, "support"))
    if draft_probs is not None:
        last = target_probs.shape[2] if support_token_ids is None else support_token_ids.shape[2]
        _check_tensor("draft_probs", draft_probs, floats, (rows, num_draft, last))
    return rows, num_draft


def _check_tensor(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int | str, ...]
) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"expected {name} of dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}"
        )
    if tensor.ndim != len(shape) or any(
        isinstance(size, int) and size != actual
        for size, actual in zip(shape, tensor.shape, strict=True)
    ):
        raise ValueError(
            f"expected {name} of shape [{', '.join(map(str, shape))}], got {list(tensor.shape)}"
        )


def _check_tree(parents: Tensor, num_nodes: Tensor) -> None:
    num_draft = parents.shape[1]
    if ((num_nodes < 0) | (num_nodes > num_draft)).any():
        raise ValueError(f"expected num_nodes from 0 to {num_draft}, got {num_nodes.tolist()}")
    index = torch.arange(num_draft, device=parents.device)
    is_wrong = ((parents < NONE) | (parents >= index)) & (index < num_nodes[:, None])
    if is_wrong.any():
        row, node = is_wrong.nonzero()[0].tolist()
        raise ValueError(
            f"expected parents before their children, got {int(parents[row, node])} "
            f"for node {node} of row {row}"
        )


def _check_target(target_probs: Tensor, draft_token_ids: Tensor, is_real: Tensor) -> None:
    """Check the target distributions that are read, and the draft's token ids."""
    has_root = is_real.new_ones((len(is_real), 1))
    _check_distributions("target_probs", target_probs[torch.cat([has_root, is_real], dim=1)])
    _check_token_ids("draft_token_ids", draft_token_ids[is_real], target_probs.shape[2])


def _check_draft(
    draft_token_ids: Tensor,
    draft_probs: Tensor,
    is_real: Tensor,
    support_token_ids: Tensor | None,
    vocab_size: int,
) -> None:
    """Check the draft distributions, and that the draft tokens have positive probability."""
    probs = draft_probs[is_real]
    support = None if support_token_ids is None else support_token_ids[is_real]
    _check_distributions("draft_probs", probs)
    if support is not None:
        _check_token_ids("support_token_ids", support, vocab_size)
    drawn_with = _at(draft_token_ids[is_real], probs, support)
    if (drawn_with <= 0).any():
        row, node = is_real.nonzero()[(drawn_with <= 0).nonzero()[0, 0]].tolist()
        raise ValueError(
            f"expected draft tokens of positive draft probability, got 0 for node {node} of "
            f"row {row}"
        )


def _check_distributions(name: str, probs: Tensor) -> None:
    """Check distributions [num_distributions, num_tokens]."""
    if not (probs >= 0).all():  # catches NaN, too
        raise ValueError(f"expected {name} of at least 0, got {probs.min().item()}")
    sums = probs.sum(-1)
    is_wrong = ~((sums - 1).abs() <= _SUM_TOLERANCE)
    if is_wrong.any():
        raise ValueError(f"expected {name} to sum to 1, got {sums[is_wrong][0].item()}")


def _check_token_ids(name: str, token_ids: Tensor, vocab_size: int) -> None:
    is_wrong = (token_ids < 0) | (token_ids >= vocab_size)
    if is_wrong.any():
        raise ValueError(
            f"expected {name} from 0 to {vocab_size - 1}, got {token_ids[is_wrong][0].item()}"
        )
