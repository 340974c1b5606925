"""Forwards that run by a job wherever they can, and what ran."""

from typing import Any, NamedTuple

import pytest
from torch import Tensor

from lade.forward import job as file


class Ran(NamedTuple):
    """A forward that a job has run."""

    num_tokens: int
    num_parts: int


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Ran]:
    """Use jobs wherever there is a choice; return what they will have run."""
    monkeypatch.setattr(file.FusedForwards, "settle", lambda *_: None)
    return noted(monkeypatch)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[Ran]:
    """Return a list that tells each forward that a job has run, or a piece of it."""
    runs: list[Ran] = []
    by_job = file.FusedForwards._by_job

    def noting(self: Any, request: Any) -> Tensor | None:
        logits = by_job(self, request)
        if logits is not None:
            runs.append(Ran(request.input_ids.shape[1], len(request.parts)))
        return logits

    monkeypatch.setattr(file.FusedForwards, "_by_job", noting)
    return runs
