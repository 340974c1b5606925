"""Which times are learned as those of steps."""

from typing import Any

import pytest
import torch

from lade.budget.budget import Budget
from lade.config import Config
from lade.forward.job import FusedForwards
from lade.hf.api import generate
from lade.prewarming.warming import warm_up
from lade.probing.profile import profile_of
from lade.targets.trees import TreeTarget
from tests.lade.forward.families import model_of
from tests.lade.shared import shared_model


@pytest.mark.parametrize("is_untimed", [False, True])
def test_a_step_is_learned_unless_it_took_what_others_of_its_size_do_not_take(
    is_untimed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = list[float]()

    def record(self: Any, num_rows: int, num_nodes: float, sec: float) -> None:
        recorded.append(sec)

    monkeypatch.setattr(Budget, "record", record)
    monkeypatch.setattr(TreeTarget, "is_untimed", is_untimed)
    model = shared_model("llama")
    options: Any = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    stats = generate(model, torch.tensor([[5, 6, 7, 5, 6, 7]]), **options).stats
    if not is_untimed:
        # All of a step counts, not its forward alone; but for those that prove themselves.
        assert stats.num_steps - 4 <= len(recorded) <= stats.num_steps
        assert 0 < sum(recorded) <= stats.sec - stats.prefill_sec
    else:
        assert recorded == []


@pytest.mark.parametrize("uses_kernels", [True, False])
def test_the_first_step_of_a_process_knows_what_steps_cost(
    uses_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FusedForwards, "_are_slow", lambda *_: False)
    model = model_of("llama")
    warm_up(model, config=Config(uses_kernels=uses_kernels))
    costs = profile_of(model).step_costs("tree", "eager", is_fast=uses_kernels)[1]
    assert costs.is_known
    assert 0 < costs.at(1.0) < costs.at(64.0)
