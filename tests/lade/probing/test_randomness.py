"""The random state is everybody's: nobody's draws come twice because lade looked at a model."""

import threading
from pathlib import Path

import pytest
import torch

import lade
from lade.probing.profile import profile_of
from tests.grids import thinned
from tests.lade.tiny import tiny_model
from tests.support.tiny import tiny_model as architecture


@pytest.mark.parametrize("what", thinned(["check", "prewarm"], "check"))
def test_draws_of_another_thread_do_not_come_twice(what: str, tmp_path: Path) -> None:
    drawn: list[int] = []
    done = threading.Event()

    def draw() -> None:
        while not done.is_set():
            drawn.append(int(torch.randint(2**62, (1,))))

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for seed in range(3):
            model = tiny_model("llama", seed=seed)
            if what == "check":
                lade.probe(model)
            else:
                lade.prewarm(model, 0.2, folder=tmp_path)
    finally:
        done.set()
        thread.join()
    assert len(drawn) > 100
    assert len({*drawn}) == len(drawn)


def test_a_model_that_draws_is_found_and_leaves_the_state_as_it_was() -> None:
    state = torch.get_rng_state()
    lade.probe(architecture("reformer"))
    assert torch.equal(torch.get_rng_state(), state)
    model = tiny_model("opt", dropout=0.5, attention_dropout=0.5).train()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    lade.probe(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert profile_of(model).draws is True
    model.eval()
    lade.probe(model)
    assert profile_of(model).draws is None  # nothing has changed the state
