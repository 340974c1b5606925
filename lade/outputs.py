"""Outputs for `return_dict_in_generate` besides the text, collected as rows emit tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lade.sampling.choice import OnChoice
from lade.targets.base import Forward


class Outputs:
    """Scores, logits, hidden states and attentions, in the form `generate` returns them.

    Everything is kept per row and emitted token, because rows emit at their own pace, and arranged
    in columns at the end.
    """

    def __init__(self, num_rows: int, wanted: Sequence[str]) -> None:
        """`wanted`: any of "scores", "logits", "hidden_states", "attentions"."""
        self._prefill: dict[str, Any] = {}
        self._of_rows: dict[str, list[list[Any]]] = {
            name: [[] for _ in range(num_rows)] for name in wanted
        }
        # Complete columns of what stopping criteria may ask for after every token.
        self._columns: dict[str, list[Tensor]] = {"scores": [], "logits": []}

    def __len__(self) -> int:
        """Return the number of kinds wanted."""
        return len(self._of_rows)

    @property
    def on_choice(self) -> OnChoice | None:
        """Callback for every emitted token; None if neither scores nor logits are wanted."""
        return self.add_choice if self._columns.keys() & self._of_rows.keys() else None

    def add_choice(self, row: int, logits: Tensor, scores: Tensor) -> None:
        """Keep the logits and scores of one emitted token, float32 [vocab_size] each."""
        for name, values in (("logits", logits), ("scores", scores)):
            if name in self._of_rows:
                self._of_rows[name][row].append(values.clone())

    def add_prefill(self, output: Forward) -> None:
        """Keep the hidden states and attentions of the prefill, if wanted."""
        for name in ("hidden_states", "attentions"):
            if name in self._of_rows:
                self._prefill[name] = getattr(output, name)

    def add_step(
        self,
        output: Forward,
        rows: Sequence[int],
        num_cached: Sequence[int],
        paths: Sequence[list[int]],
    ) -> None:
        """Keep a step's hidden states and attentions at the nodes where tokens were emitted.

        Args:
            rows: the rows that took part, in the order of the forward's rows.
            num_cached: cached tokens of each row before the step.
            paths: emitting nodes of each row.
        """
        for name in self._prefill:
            of_rows, layers = self._of_rows[name], getattr(output, name)
            for index, (row, cached, path) in enumerate(zip(rows, num_cached, paths, strict=True)):
                for i, node in enumerate(path):
                    kept: slice | list[int] = slice(None)
                    if name == "attentions":
                        # Keys visible to a node: its row's cached tokens, its ancestors, itself.
                        kept = [*range(cached), *(cached + ancestor for ancestor in path[: i + 1])]
                    of_rows[row].append(_of_layers(layers, index, node, kept))

    def first_columns(self, name: str, num_columns: int) -> tuple[Any, ...]:
        """Return the entries of the first `num_columns` emitted tokens, which all rows have."""
        if name not in self._columns:
            num_steps = num_columns - 1  # besides the prefill
            self._of_rows[name] = [row[:num_steps] for row in self._of_rows[name]]
        return (self.columns(name) or ())[:num_columns]

    def columns(self, name: str) -> tuple[Any, ...] | None:
        """Return one entry per column of emitted tokens, or None if `name` is not wanted."""
        if name not in self._of_rows:
            return None
        of_rows = self._of_rows[name]
        if name in self._columns:
            columns = self._columns[name]
            for time in range(len(columns), min(map(len, of_rows))):
                columns.append(torch.stack([row[time] for row in of_rows]))
                for row in of_rows:
                    row[time] = None  # now in the column
            return tuple(columns)
        steps = [_stacked(column, name) for column in zip(*of_rows, strict=True)]
        return (self._prefill[name], *steps)


def _of_layers(
    layers: Sequence[Tensor | None] | None, row: int, node: int, kept: slice | list[int]
) -> list[Tensor | None] | None:
    """Copy a node's part of each layer; some attention implementations return no weights."""
    if layers is None:
        return None
    return [
        None if layer is None else layer[row][..., node, :][..., kept].clone() for layer in layers
    ]


def _stacked(column: Sequence[Any], name: str) -> Any:
    """Stack the rows of one step, for each layer: [rows, …], with one query."""
    if column[0] is None:
        return None
    query = -2 if name == "attentions" else 1
    return tuple(
        None if layer[0] is None else torch.stack(layer).unsqueeze(query)
        for layer in zip(*column, strict=True)
    )
