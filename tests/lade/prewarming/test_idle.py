"""Prewarming in idle time: it gives way, keeps what it learned, and ends."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lade
from lade.drafting.tables import path_of_table
from lade.prewarming import idle as module
from lade.prewarming.idle import IdlePrewarming
from ngram_pool import NGramPool
from tests.lade.both import ONE
from tests.lade.tiny import tiny_model

SEC = 60  # that nothing here takes


def wait_until(is_so: Callable[[], Any]) -> None:
    end = time.monotonic() + SEC
    while not is_so():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find out often."""
    monkeypatch.setattr(module, "_LOOK_SEC", 0.01)


def test_it_works_while_nothing_else_is_to_be_done_and_keeps_what_it_learned() -> None:
    model, is_idle = tiny_model("llama"), threading.Event()
    idle = IdlePrewarming(model, is_idle.is_set)
    path = path_of_table(model)
    time.sleep(0.2)
    assert idle.minutes_left == module.MOST_MINUTES
    is_idle.set()
    wait_until(lambda: idle.minutes_left < module.MOST_MINUTES - 0.2 / 60)
    is_idle.clear()
    time.sleep(0.5)  # for the forward pass in progress
    left = idle.minutes_left
    time.sleep(0.3)
    assert idle.minutes_left == left
    assert not path.exists()
    idle.close()
    table = NGramPool.load(path)
    assert float(table.note) == pytest.approx(60 * (module.MOST_MINUTES - left))
    assert table.num_contexts > 50
    again = IdlePrewarming(model, is_idle.is_set)
    assert again.minutes_left == pytest.approx(left)
    again.close()


def test_calls_use_what_was_learned_before_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SAVE_SEC", 0.2)
    model = tiny_model("llama", seed=1)
    config = lade.Config(max_draft_tokens=4)

    def answer() -> Any:
        return lade.generate(
            model, ONE, max_new_tokens=24, config=config, return_dict_in_generate=True
        )

    want = answer()
    idle = IdlePrewarming(model, lambda: True)
    path = path_of_table(model)
    wait_until(path.exists)
    first = path.stat().st_ino
    wait_until(lambda: path.stat().st_ino != first)  # saved again: calls know of the first time
    got = answer()
    idle.close()
    assert got.sequences.tolist() == want.sequences.tolist()
    assert got.stats.num_draft_tokens > want.stats.num_draft_tokens


def test_seeded_calls_beside_it_give_the_same_text() -> None:
    model, sampled = tiny_model("llama"), {"do_sample": True, "max_new_tokens": 20}
    want = []
    for seed in range(5):
        torch.manual_seed(seed)
        want.append(model.generate(ONE, **sampled).tolist())
    idle = IdlePrewarming(model, lambda: True)
    with lade.Batcher(model) as batcher:
        got = [batcher.submit(ONE, seed=seed, **sampled).result(SEC).tolist() for seed in range(5)]
    assert idle.minutes_left < module.MOST_MINUTES
    idle.close()
    assert got == want


def test_it_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(module, "MOST_MINUTES", 0.5 / 60)
    idle = IdlePrewarming(model, lambda: True)
    wait_until(lambda: idle.minutes_left == 0)
    idle.close()
    assert 0.5 <= float(NGramPool.load(path_of_table(model)).note) < 5


def test_what_has_no_use_for_a_table_is_refused_and_a_failing_model_ends_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    idle = IdlePrewarming(model, lambda: True)
    monkeypatch.setattr(type(model), "generate", None)
    wait_until(lambda: "prewarming has ended" in caplog.text)
    idle.close()
    monkeypatch.setattr(model.config, "is_encoder_decoder", True)
    with pytest.raises(lade.UnsupportedModelError):
        IdlePrewarming(model, lambda: True)
