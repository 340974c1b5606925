"""Outputs for `return_dict_in_generate` besides the text, collected as tokens are emitted."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lade.sampling.choice import OnChoice


class Outputs:
    """Scores and logits of a single row, as `generate` returns them."""

    def __init__(self, wanted: Sequence[str]) -> None:
        """`wanted`: any of "scores" and "logits"."""
        # By kind, an entry for each emitted token.
        self._entries: dict[str, list[Any]] = {name: [] for name in wanted}

    @property
    def on_choice(self) -> OnChoice | None:
        """Callback for every emitted token; None if neither scores nor logits are wanted."""
        return self.add_choice if self._entries else None

    def add_choice(self, logits: Tensor, scores: Tensor) -> None:
        """Keep the logits and scores of one emitted token, float32 [vocab_size] each."""
        for name, values in (("logits", logits), ("scores", scores)):
            if name in self._entries:
                self._entries[name].append(values[None].clone())

    def get(self, name: str, num_tokens: int | None = None) -> tuple[Any, ...] | None:
        """Return one entry for each of the first emitted tokens; None if `name` is not wanted."""
        return tuple(self._entries[name][:num_tokens]) if name in self._entries else None
