"""The target's likeliest tokens after every node that it ran, for drafters that harvest."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lade.transfer import HostCopy
from lade.view import counterpart, keep_attributes, with_own_hooks


class Successors(NamedTuple):
    """The target's likeliest next tokens after each of several nodes, likeliest first."""

    token_ids: NDArray[np.int32]  # [..., num_successors]
    probs: NDArray[np.float32]  # [..., num_successors], of the softmax over the whole vocabulary

    def of_tree(self, start: int, num_nodes: int) -> "Successors":
        """Return those of the nodes of one tree, whose root is at `start` of the only row."""
        nodes = slice(start, start + num_nodes)
        return Successors(self.token_ids[0, nodes], self.probs[0, nodes])

    def last(self, num_nodes: int) -> "Successors":
        """Return those of the last nodes of the only row; all of them if there are fewer."""
        return Successors(self.token_ids[0, -num_nodes:], self.probs[0, -num_nodes:])

    @property
    def num_nodes(self) -> int:
        """Number of nodes, or of nodes per row."""
        return int(self.token_ids.shape[-2])


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


class SuccessorsCopy:
    """Successors on their way to the host."""

    def __init__(self, token_ids: Tensor, probs: Tensor) -> None:
        self._sent = HostCopy(token_ids, probs)

    def get(self) -> Successors:
        """Wait for the successors and return them."""
        token_ids, probs = self._sent.get()
        return Successors(token_ids.to(torch.int32).numpy(), probs.numpy())


def with_probs(ranked: Ranked, logits: Tensor, sampled: int = _SAMPLED) -> SuccessorsCopy:
    """Return ranked tokens with their approximate probabilities.

    Args:
        logits: [..., vocab_size].
        sampled: step between the logits summed, see `_SAMPLED`; with 1, probabilities are exact.
    """
    highest = ranked.logits.float()
    step = sampled if logits.shape[-1] > 4 * sampled * highest.shape[-1] else 1
    top, least = highest[..., :1], highest[..., -1:]
    powers = (highest - top).exp_()
    # The ranked ones may be among these: they are clamped to the least of them, and subtracted.
    others = logits[..., ::step].float().minimum(least).sub_(top).exp_().sum(-1, keepdim=True)
    least_powers = powers[..., -1:]
    of_others = step * others - highest.shape[-1] * least_powers
    # NaN becomes 0: a drafter must neither learn from it nor fail because of it.
    probs = (powers / (powers.sum(-1, keepdim=True) + of_others.clamp_(min=0.0))).nan_to_num_(0.0)
    return SuccessorsCopy(ranked.token_ids, probs)


# Maximum number of last prompt tokens whose successors are harvested.
# Harvesting all accepted 1 % more tokens in answers of 128 tokens (2 % without a prewarmed table),
# and took 4 % of the time.
_MAX_PROMPT_TOKENS = 64


def num_prompt_tokens(max_new_tokens: int) -> int:
    """Return how many last prompt tokens to harvest: half as many as the answer may have, or 64.

    They are run through the output embeddings alone, a large part of a small model, which a short
    answer does not pay for.
    """
    return min(_MAX_PROMPT_TOKENS, max_new_tokens // 2)


class PromptHarvester:
    """Harvest of a prompt's last tokens, taken along with the prefill.

    `generate` computes logits of the last token alone, and so does the prefill. Those of the tokens
    before it are computed from the last hidden states, which are there anyway, with the model's
    output embeddings. Where this does not give the last token's logits, because the model scales or
    transforms them afterwards, nothing is harvested.

    Args:
        model: the target; if its hidden states cannot be seen, nothing is harvested.
        num_successors: how many to harvest per token.
        vocab_size: exclusive upper bound of the token ids, though the embeddings may have more.
        max_tokens: maximum number of prompt tokens to harvest.
    """

    def __init__(self, model: Any, num_successors: int, vocab_size: int, max_tokens: int) -> None:
        self._model = model
        self.max_tokens = max_tokens
        self._num_successors = num_successors
        self._vocab_size = vocab_size
        self._head = model.get_output_embeddings()
        self._body = model.base_model if model.base_model is not model else None
        self._states: Tensor | None = None  # [1, num_tokens, hidden_size]

    @contextmanager
    def watching(self) -> Iterator[Any]:
        """Yield a view of the model whose hidden states are watched; None if they cannot be."""
        if self._head is None or self._body is None:
            yield None
            return
        view = with_own_hooks(self._model, [self._body])
        counterpart(view, self._model, self._body).register_forward_hook(self._see)
        yield view
        keep_attributes(view, self._model)

    @torch.no_grad()
    def successors(self, logits: Tensor) -> Successors | None:
        """Return the successors of the last tokens but the very last, and forget the states.

        Args:
            logits: of the prompt's last token, [1, 1, vocab_size], or of more of them, which are
                then harvested.

        Returns:
            [1, num_tokens, num_successors], at most `max_tokens` tokens; None where they cannot be
            computed.
        """
        (states, self._states), num_tokens = (self._states, None), self.max_tokens
        if logits.shape[1] > 1:
            return self._ranked(logits[:, -1 - num_tokens : -1])
        if states is None or min(num_tokens, states.shape[1] - 1) < 1:
            return None
        try:
            of_last = self._head(states[:, -1:]).to(logits.device)
            if of_last.shape != logits.shape:
                return None
            tolerance = 0.05 * logits.float().std()
            if not bool((of_last - logits).abs().max() <= tolerance):
                return None
            return self._ranked(self._head(states[:, -1 - num_tokens : -1]))
        except RuntimeError:  # more layers in between, of other sizes or dtypes, or out of memory
            return None

    def _ranked(self, logits: Tensor) -> Successors | None:
        known = logits[..., : self._vocab_size]
        return with_probs(rank(known, self._num_successors), known).get()

    def _see(self, module: Any, args: Any, output: Any) -> None:
        states = getattr(output, "last_hidden_state", None)
        self._states = states if isinstance(states, Tensor) and states.dim() == 3 else None
