"""Costs of forwards on disk: measured once, read later; of tiny models by private names alone."""

import math
from pathlib import Path
from typing import Any

import pytest

import lade
from lade.prewarming import costs
from lade.prewarming.costs import first_costs_of, read_costs, write_costs
from lade.probing.factory import VerificationPlan
from lade.probing.profile import profile_of
from tests.lade.both import ONE, same_as_generate
from tests.lade.tiny import tiny_model

BY_TREE = VerificationPlan("tree", None, {})
STEADY = {1: [0.030, 0.031, 0.090], 8: [0.035, 0.036]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of costs, where even tiny models are measured, and all times come again."""
    monkeypatch.setattr(costs, "_MIN_PARAMETERS", 0)
    monkeypatch.setattr(costs, "_MAX_SEC", 0.2)
    monkeypatch.setattr(costs, "costs_folder", lambda: tmp_path / "costs")
    monkeypatch.setattr(costs, "_STEADY", math.inf)
    monkeypatch.setattr(costs, "_LEAST_SHARE", 0.0)
    return tmp_path / "costs"


def test_costs_are_measured_once_and_read_by_the_next_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    same_as_generate(model, ONE)
    (path,) = folder.iterdir()
    found = read_costs(path)
    assert {1, 8} <= found.keys() <= {1, 2, 4, 8, 16, 32}
    assert all(0 < sec < 1 for sec in found.values())
    timed: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(costs, "_time_forwards", lambda *args: timed.append(args))
        lade.warm_up(tiny_model("llama"))
    assert not timed
    path.write_text("{")  # what is damaged is measured anew
    lade.warm_up(tiny_model("llama"))
    assert read_costs(path)


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
        b'{"format": 2, "seconds": {"1": 0.03, "8": NaN}}',
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
    write_costs(path / "costs.json", {1: 0.03, 8: 0.04})  # a folder that is none is no error
    write_costs(path, {1: 0.03, 8: 0.04})
    assert read_costs(path) == {1: 0.03, 8: 0.04}


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
    monkeypatch.setattr(costs, "costs_folder", lambda: tmp_path / "costs")
    monkeypatch.setattr(costs, "_time_forwards", lambda *_: times)
    model = tiny_model("llama")
    assert first_costs_of(model, profile_of(model), BY_TREE) == found
    assert (tmp_path / "costs").exists() == is_kept


def test_small_models_and_other_methods_are_not_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for config in (lade.Config(verification="chain"), lade.Config(execution="fixed")):
        same_as_generate(tiny_model("llama"), ONE, config=config)
    monkeypatch.setattr(costs, "_MIN_PARAMETERS", 10**9)
    same_as_generate(tiny_model("llama"), ONE)
    assert not folder.exists()
