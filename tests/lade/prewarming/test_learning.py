"""Tables that grow after calls: what gets into them, and that no call fails because of it."""

import copy
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import lade
from lade.prewarming import learning, tables
from lade.prewarming.learning import Learner
from lade.prewarming.run import prewarm
from lade.probing.profile import profile_of
from tests.lade.tiny import tiny_model

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
SECRET = [90, 91, 92, 93]  # of no text but the user's


@pytest.fixture
def learn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learn after every call, the same in every run."""
    monkeypatch.setattr(learning, "_LEAST_SEC", 0.0)
    monkeypatch.setattr(
        learning, "prewarm", lambda model, sec: prewarm(model, 3600, max_tokens=3000)
    )
    rng = np.random.default_rng
    monkeypatch.setattr(
        np.random, "default_rng", lambda seed=None: rng(0 if seed is None else seed)
    )


def learned(prompt: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(tables, "tables_folder", lambda: folder)
    model = lade.wrap(tiny_model("llama"), learns=True)
    for _ in range(3):
        model.generate(torch.tensor([prompt]), **GREEDY)
    table = tables.prewarmed_table_of(model, profile_of(model))
    assert table is not None
    return table.arrays()


def test_a_table_is_the_same_whatever_the_user_wrote(
    learn_at_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = learned([5, 6, 7], tmp_path / "a", monkeypatch)
    second = learned(SECRET * 6, tmp_path / "b", monkeypatch)
    assert len(first["keys"]) > 20
    assert {name: part.tolist() for name, part in first.items()} == {
        name: part.tolist() for name, part in second.items()
    }


def test_what_is_learned_is_used_and_the_text_stays(learn_at_once: None) -> None:
    model = tiny_model("llama")
    prompt = torch.tensor([[5, 6, 7]])
    expected = model.generate(prompt, **GREEDY).tolist()
    lade.wrap(model, learns=True)
    texts = [model.generate(prompt, **GREEDY).tolist() for _ in range(4)]
    assert texts == [expected] * 4
    assert tables.table_for(model)


def test_calls_give_a_fiftieth_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def ask(model: Any, sec: float) -> Any:
        asked.append(sec)
        return SimpleNamespace(has_prefix=len(asked) > 2)

    monkeypatch.setattr(learning, "prewarm", ask)
    learner = Learner()
    for _ in range(185):
        learner.after_call(None, 5.0)
    # Longer each time until the prefix is found.
    assert asked == pytest.approx([2.0, 4.0, 8.0, 2.0, 2.0], rel=0.05)


@pytest.mark.parametrize("error", [OSError("full"), RuntimeError("mine"), MemoryError()])
def test_a_failure_is_told_once_and_fails_no_call(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def fail(*args: Any, **kwargs: Any) -> None:
        asked.append(1)
        raise error

    monkeypatch.setattr(learning, "_LEAST_SEC", 0.0)
    monkeypatch.setattr(learning, "prewarm", fail)
    model = lade.wrap(tiny_model("llama"), learns=True)
    prompt = torch.tensor([[5, 6, 7]])
    with pytest.warns(UserWarning, match="learns nothing more of LlamaForCausalLM"):
        got = model.generate(prompt, **GREEDY)
    model.generate(prompt, **GREEDY)
    assert got.tolist() == lade.unwrap(model).generate(prompt, **GREEDY).tolist()
    assert len(asked) == 1


def test_an_interrupt_ends_learning_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ask(*args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return SimpleNamespace(has_prefix=True)

    monkeypatch.setattr(learning, "prewarm", ask)
    learner = Learner()
    with pytest.raises(KeyboardInterrupt):
        learner.after_call(None, 1000.0)
    learner.after_call(None, 1000.0)
    assert len(asked) == 2


def test_one_thread_learns_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, may_end = threading.Event(), threading.Event()
    asked: list[int] = []

    def ask(*args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        inside.set()
        may_end.wait(10)
        return SimpleNamespace(has_prefix=True)

    monkeypatch.setattr(learning, "prewarm", ask)
    learner = Learner()
    thread = threading.Thread(target=learner.after_call, args=(None, 1000.0))
    thread.start()
    assert inside.wait(10)
    learner.after_call(None, 1000.0)  # returns at once
    may_end.set()
    thread.join()
    assert len(asked) == 1


def test_copies_learn_too_and_wrapping_anew_ends_it() -> None:
    model = lade.wrap(tiny_model("llama"), learns=True)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(copied.generate.learner, Learner)
        assert copied.generate.learner is not model.generate.learner
    assert lade.wrap(model).generate.learner is None


def test_learning_for_a_table_that_is_left_out_is_refused() -> None:
    with pytest.raises(ValueError, match="learns=True without"):
        lade.wrap(tiny_model("llama"), learns=True, config=lade.Config(uses_table=False))
