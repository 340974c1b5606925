"""Step costs and numbers of draft tokens that the user gives."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

import lade
from tests.lade.both import same_as_generate
from tests.lade.shared import shared_model


def test_calls_with_given_costs_repeat_exactly() -> None:
    model, counts = shared_model("llama", seed=1), []
    ids = torch.tensor(np.random.default_rng(0).integers(1, 9, (1, 40)))
    for costs in ({1: 1.0, 32: 1.01}, {1: 1.0, 32: 1.01}, {1: 1.0, 2: 9.0}):
        config = lade.Config(step_costs=costs)
        _, output = same_as_generate(model, ids, config=config, max_new_tokens=60)
        counts.append((output.stats.num_steps, output.stats.num_draft_tokens))
    assert counts[0] == counts[1]
    assert counts[0][1] > 100
    assert counts[2] == (59, 0)


def test_step_costs_are_kept_in_order_and_ready_for_json() -> None:
    given: dict[int, float] = {16: 41.9, 1: 31}
    config = lade.Config(step_costs=given)
    given[16] = -1.0
    assert config.step_costs == {1: 31.0, 16: 41.9}
    assert list(config.step_costs) == [1, 16]
    told = json.loads(json.dumps(dataclasses.asdict(config)))["step_costs"]
    assert told == {"1": 31.0, "16": 41.9}
    assert dataclasses.replace(config, max_candidates=3).step_costs == config.step_costs
    assert hash(config) == hash(lade.Config(step_costs={1: 31.0, 16: 41.9}))
    assert config != lade.Config(step_costs={1: 31.0, 16: 42.0})


@pytest.mark.parametrize(
    ("costs", "error", "message"),
    [
        ([(1, 2.0), (2, 3.0)], TypeError, "to be a mapping of tokens to costs, got"),
        ({1: 1.0, "2": 2.0}, TypeError, "expected each size in .* to be an integer, got '2'"),
        ({False: 1.0, 2: 2.0}, TypeError, "to be an integer, got False"),
        ({1: 1.0, 2: True}, TypeError, "to have numbers as costs, got True"),
        ({1: 1.0, 0: 2.0}, ValueError, "of at least 1, got 0"),
        ({1: 1.0, 2: 0.0}, ValueError, "to have positive, finite costs, got 0.0"),
        ({1: 1.0, 2: float("nan")}, ValueError, "finite costs, got nan"),
        ({2: 1.0, 3: 1.0}, ValueError, r"of at least two sizes, 1 among them, got \[2, 3\]"),
    ],
)
def test_step_costs_that_mean_nothing_are_refused(
    costs: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        lade.Config(step_costs=costs)


def test_step_costs_and_a_fixed_number_contradict_each_other() -> None:
    with pytest.raises(ValueError, match=r"step_costs=…\) or Config\(max_draft_tokens=…\), got bo"):
        lade.Config(step_costs={1: 1.0, 2: 1.1}, max_draft_tokens=8)
