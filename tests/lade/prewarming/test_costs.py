"""Costs of forwards on disk: measured once, read later, and never in the way."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lade
from lade.budget.budget import MeasuredBudget
from lade.budget.costs import ForwardCosts
from lade.prewarming import costs
from lade.prewarming.costs import first_costs_of, read_costs, write_costs
from lade.probing.factory import VerificationPlan
from lade.probing.profile import profile_of
from tests.lade.tiny import tiny_model

BY_TREE = VerificationPlan("tree", None, {})
STEADY = {1: [0.030, 0.031, 0.090], 8: [0.035, 0.036]}
PROMPT = torch.tensor([[5, 6, 7]])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of costs, where even tiny models are measured, and all times come again."""
    monkeypatch.setattr(costs, "_MIN_PARAMETERS", 0)
    monkeypatch.setattr(costs, "_MAX_SEC", 0.2)
    monkeypatch.setattr(costs, "costs_folder", lambda: tmp_path / "costs")
    monkeypatch.setattr(costs, "_STEADY", math.inf)
    monkeypatch.setattr(costs, "_LEAST_SHARE", 0.0)
    return tmp_path / "costs"


def measured_never(*_: Any) -> dict[int, list[float]]:
    raise AssertionError("nothing is measured again")


def test_costs_are_measured_once_and_read_by_the_next_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    expected = model.generate(PROMPT, do_sample=False, max_new_tokens=4).tolist()
    found = first_costs_of(model, profile_of(model), BY_TREE)
    assert {1, 8} <= found.keys() <= {1, 2, 4, 8, 16, 32}
    assert all(0 < sec < 1 for sec in found.values())
    assert len([*folder.iterdir()]) == 1
    monkeypatch.setattr(costs, "time_forwards", measured_never)
    again = tiny_model("llama")
    assert first_costs_of(again, profile_of(again), BY_TREE) == pytest.approx(found, abs=1e-6)
    assert model.generate(PROMPT, do_sample=False, max_new_tokens=4).tolist() == expected


@pytest.mark.exhaustive
def test_other_settings_have_costs_of_their_own(folder: Path) -> None:
    model = tiny_model("llama", seed=1)
    first_costs_of(model, profile_of(model), BY_TREE)
    first_costs_of(model, profile_of(model), BY_TREE._replace(attention="eager"))
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads + 1)
        first_costs_of(model, profile_of(model), BY_TREE)
    finally:
        torch.set_num_threads(num_threads)
    other = tiny_model("llama", seed=2)
    first_costs_of(other, profile_of(other), BY_TREE)
    assert len([*folder.iterdir()]) == 4


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"format": 3, "seconds": {"1": 0.03, "8": 0.04}}',
        b'{"format": 2, "seconds": {"1": 0.03}}',
        b'{"format": 2, "seconds": {"2": 0.03, "8": 0.04}}',
        b'{"format": 2, "seconds": {"1": 0.03, "8": -0.04}}',
        b'{"format": 2, "seconds": {"1": 0.03, "8": NaN}}',
        b'{"format": 2, "seconds": {"1": 0.03, "x": 0.04}}',
        b'{"format": 2, "seconds": {"1": 0.03, "99999999": 0.04}}',
        b'{"format": 2, "seconds": {"1": 0.03, "8": null}}',
        b'{"format": 2, "seconds": {"1": 1.94, "8": 0.48}}',
        b"[" * 5000,
    ],
)
def test_a_file_that_is_none_of_ours_is_ignored(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "costs.json"
    assert read_costs(path) == {}
    path.write_bytes(content)
    assert read_costs(path) == {}


def test_a_damaged_file_is_measured_and_written_anew(folder: Path) -> None:
    model = tiny_model("llama")
    first_costs_of(model, profile_of(model), BY_TREE)
    (path,) = folder.iterdir()
    path.write_text("{")
    assert first_costs_of(model, profile_of(model), BY_TREE)
    assert json.loads(path.read_text())["format"] == 2


@pytest.mark.parametrize(
    ("times", "found", "is_kept"),
    [
        (STEADY, {1: 0.030, 8: 0.035}, True),
        ({**STEADY, 2: [0.027, 0.028]}, {1: 0.030, 2: 0.027, 8: 0.035}, True),
        ({**STEADY, 8: [0.035, 0.080]}, {1: 0.030, 8: 0.035}, False),
        ({**STEADY, 1: [0.060, 0.061]}, {}, False),  # slower than eight tokens
        ({}, {}, False),
    ],
)
def test_times_of_a_busy_machine_are_not_kept(
    times: dict[int, list[float]],
    found: dict[int, float],
    is_kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(costs, "time_forwards", lambda *_: times)
    model = tiny_model("llama")
    assert first_costs_of(model, profile_of(model), BY_TREE, tmp_path / "costs") == found
    assert (tmp_path / "costs").exists() == is_kept


def test_each_size_is_timed_as_often_and_its_shortest_time_is_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "_MOST_TURNS", 2)
    model = tiny_model("llama")
    found = costs.time_forwards(model, profile_of(model), BY_TREE, max_sec=math.inf)
    assert found.keys() == {1, 2, 4, 8, 16, 32}
    assert all(len(times) == 4 and times == sorted(times) for times in found.values())
    none = costs.time_forwards(model, profile_of(model), BY_TREE, max_sec=0.0)
    assert [*none] == [1, 8]  # as where a forward takes a second


def test_forwards_count_once_products_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    products: Any = SimpleNamespace(num_compared=0)
    run: list[int] = []

    def time_one(model: Any, target: Any, size: int) -> float:
        run.append(size)
        products.num_compared += len(run) < 4
        return float(len(run))

    monkeypatch.setattr(costs, "_time_one", time_one)
    monkeypatch.setattr(costs, "_MOST_TURNS", 1)
    nothing: Any = None
    assert costs._in_turn(nothing, nothing, (1, 8), 1e9, products) == {
        1: [5.0, 6.0],
        8: [8.0, 9.0],
    }
    run.clear()
    assert costs._in_turn(nothing, nothing, (1,), 0.0, products) == {1: [2.0, 3.0]}  # no time left
    assert costs._in_turn(nothing, nothing, (1,), 1e9, None) == {1: [5.0, 6.0]}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    write_costs(blocked / "costs.json", {1: 0.03, 8: 0.04})
    assert [*tmp_path.iterdir()] == [blocked]


def test_nothing_is_kept_of_models_without_a_fingerprint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "fingerprint_of", lambda model: None)
    model = tiny_model("llama")
    assert first_costs_of(model, profile_of(model), BY_TREE)
    assert not folder.exists()


def test_small_models_and_other_methods_are_not_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    assert first_costs_of(model, profile_of(model), VerificationPlan("chain", None, {})) == {}
    fixed = BY_TREE._replace(execution="fixed", widths=(8, 16))
    assert first_costs_of(model, profile_of(model), fixed) == {}
    monkeypatch.setattr(costs, "_MIN_PARAMETERS", 10**9)
    forwards: list[object] = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    assert first_costs_of(model, profile_of(model), BY_TREE) == {}
    assert not forwards
    assert not folder.exists()


def test_the_first_step_knows_the_costs(folder: Path) -> None:
    model = tiny_model("llama")
    config = lade.Config(verification="tree")
    lade.generate(model, PROMPT, config=config, do_sample=False, max_new_tokens=1)
    costs = profile_of(model).costs["tree", "eager", False].of(1)
    assert not costs.are_unknown
    assert costs._known.num[:10].sum() >= 4


def test_first_costs_decide_and_steps_correct_them() -> None:
    """Measured when the machine was twice as fast, and wrong about eight tokens."""
    budget = MeasuredBudget(ForwardCosts({1: 0.015, 8: 0.045, 32: 0.060}))
    sure = [[0.8] * 7]
    assert budget.num_nodes(sure, 0) == 7  # at once
    sizes = []
    for _ in range(150):
        sizes.append(budget.num_nodes(sure, 0))
        budget.record(1, sizes[-1], 0.200 if sizes[-1] else 0.030, [], {0: 1})
    assert sizes[-50:].count(0) >= 45  # 6.6 tokens, at nearly seven times the cost
