"""`Recorded`: hidden states of the committed tokens, for drafters that read them."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lade.machine.transfer import integers_on


class Recorded:
    """What forwards of a target return besides logits, of tokens that were committed.

    Args:
        options: arguments of a forward that ask for it, such as `output_hidden_states`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self.output: Any = None  # of the last forward
        self._num_tokens = 0  # committed tokens that were recorded
        self._states: list[Sequence[Tensor | None]] = []  # of forwards, by layer: [1, num, size]
        self._shared: dict[str, tuple[Tensor, Tensor]] = {}  # keys and values of the whole text

    def commit(self, length: int, path: Sequence[int]) -> None:
        """Record the nodes of a path of the last forward, which ran after `length` tokens.

        A proof runs some tokens again that are recorded already.
        """
        output, states = self.output, self.output.hidden_states
        new = path[max(0, self._num_tokens - length) :]
        self._states.append([_at(each, 1, new) for each in states])
        self._num_tokens = max(self._num_tokens, length + len(path))
        num_run = next(each.shape[1] for each in states if each is not None)
        for name, pair in (getattr(output, "shared_kv_states", None) or {}).items():
            first = pair[0].shape[-2] - num_run  # slots before these tokens
            slots = [*range(first), *(first + node for node in path)]
            self._shared[name] = _at(pair[0], -2, slots), _at(pair[1], -2, slots)

    def take(self, num_tokens: int) -> Any:
        """Return the states of tokens that were committed since the last call.

        Returns:
            An output of transformers, with `num_tokens`; None if `num_tokens` tokens of text are
            not what was committed.
        """
        if self._num_tokens != num_tokens or not self._states:
            return None
        states = tuple(
            None if of_layer[0] is None else torch.cat(of_layer, dim=1)
            for of_layer in zip(*self._states, strict=True)
        )
        self._states = []
        num_new = next(each.shape[1] for each in states if each is not None)
        return SimpleNamespace(
            hidden_states=states, shared_kv_states=self._shared, num_tokens=num_new
        )


def _at(tensor: Tensor | None, dim: int, places: Sequence[int]) -> Any:
    return None if tensor is None else tensor.index_select(dim, integers_on(tensor.device, places))
