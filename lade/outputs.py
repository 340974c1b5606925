"""Outputs for `return_dict_in_generate` besides the text, collected as tokens are emitted."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lade.sampling.choice import OnChoice
from lade.targets.base import Forward


class Outputs:
    """Scores, logits, hidden states and attentions of a single row, as `generate` returns them."""

    def __init__(self, wanted: Sequence[str]) -> None:
        """`wanted`: any of "scores", "logits", "hidden_states", "attentions"."""
        self._wanted = [*wanted]
        # By kind, an entry for each emitted token; what layers give comes with the forward.
        self._entries: dict[str, list[Any]] = {name: [] for name in wanted}

    @property
    def on_choice(self) -> OnChoice | None:
        """Callback for every emitted token; None if neither scores nor logits are wanted."""
        return self.add_choice if {"scores", "logits"} & {*self._wanted} else None

    def add_choice(self, logits: Tensor, scores: Tensor) -> None:
        """Keep the logits and scores of one emitted token, float32 [vocab_size] each."""
        for name, values in (("logits", logits), ("scores", scores)):
            if name in self._entries:
                self._entries[name].append(values[None].clone())

    def add_prefill(self, output: Forward) -> None:
        """Keep the hidden states and attentions of the prefill, if wanted."""
        for name in {"hidden_states", "attentions"} & {*self._wanted}:
            self._entries[name].append(getattr(output, name))

    def add_step(self, output: Forward, num_cached: int, path: Sequence[int]) -> None:
        """Keep a step's hidden states and attentions at the nodes where tokens were emitted.

        Args:
            num_cached: cached tokens before the step.
            path: emitting nodes.
        """
        for name in {"hidden_states", "attentions"} & {*self._wanted}:
            for i, node in enumerate(path):
                kept: slice | list[int] = slice(None)
                if name == "attentions":
                    # Keys visible to a node: cached tokens, its ancestors, itself.
                    ancestors = (num_cached + ancestor for ancestor in path[: i + 1])
                    kept = [*range(num_cached), *ancestors]
                self._entries[name].append(_of_layers(getattr(output, name), node, kept))

    def get(self, name: str, num_tokens: int | None = None) -> tuple[Any, ...] | None:
        """Return one entry for each of the first emitted tokens; None if `name` is not wanted."""
        return tuple(self._entries[name][:num_tokens]) if name in self._entries else None


def _of_layers(
    layers: Sequence[Tensor | None] | None, node: int, kept: slice | list[int]
) -> tuple[Tensor | None, ...] | None:
    """Copy a node's part of each layer; some attention implementations return no weights."""
    if layers is None:
        return None
    return tuple(
        None if layer is None else layer[..., node : node + 1, :][..., kept].clone()
        for layer in layers
    )
