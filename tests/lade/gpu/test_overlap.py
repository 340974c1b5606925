"""What the next draft does not wait for is learned while a device is at the next forward."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import lade
from lade.drafting.pool_drafter import PoolDrafter
from lade.drafting.successors import Successors
from lade.stats import Step
from lade.transfer import HostCopy
from ngram_pool import NGramPool
from tests.grids import thinned
from tests.lade.both import ONE, THREE, ListStreamer, both
from tests.lade.devices import CPU_AND_CUDA
from tests.lade.tiny import tiny_model

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0}


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("execution", thinned(["eager", "fixed"], "fixed"))
def test_the_text_is_that_of_generate(execution: Any) -> None:
    model = tiny_model("llama")
    config = lade.Config(execution=execution, max_draft_tokens=7)
    for prompt in (ONE, THREE):
        for do_sample in (False, True):
            for seed in range(3):
                both(model, prompt, config=config, do_sample=do_sample, seed=seed)
    both(model, THREE, config=config, num_return_sequences=2, temperature=1.5)
    both(model, THREE, config=config, do_sample=False, output_logits=True, output_scores=True)


class Watched(PoolDrafter):
    """Notes what it is told, and what the model does in between."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__(NGramPool())
        self.events = events

    def open(self, prompt_ids: Sequence[int]) -> int:
        self.events.append("open")
        return super().open(prompt_ids)

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Any:
        self.events.append("draft")
        return super().draft(sequence, committed, max_draft_tokens)

    def harvest(
        self,
        sequence: int,
        committed: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        successors: Successors,
    ) -> None:
        assert committed[-1] == token_ids[0] or len(token_ids) > 1
        self.events.append(("harvest", len(committed)))
        super().harvest(sequence, committed, token_ids, parents, successors)

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        self.events.append(("observe", len(token_ids)))
        super().observe(sequence, token_ids)


def events_of(model: Any, **options: Any) -> list[Any]:
    events: list[Any] = []
    handle = model.model.register_forward_hook(lambda *_: events.append("forward"))
    config = lade.Config(max_draft_tokens=3)
    lade.probe(model)
    events.clear()
    got = lade.generate(
        model,
        ONE,
        drafter=Watched(events),
        config=config,
        on_step=lambda step: events.append("told"),
        **{**GREEDY, **options},
    )
    handle.remove()
    assert torch.equal(got, model.generate(ONE, **{**GREEDY, **options}))
    return events


@pytest.mark.usefixtures("waits")
@pytest.mark.usefixtures("trusted")
def test_a_step_is_harvested_behind_the_next_forward_and_told_of_at_once() -> None:
    model = tiny_model("llama")
    lade.probe(model)
    events = events_of(model)
    first = ONE.shape[1]
    # The pool gets the prompt while the device is at it.
    assert events[:5] == ["forward", "open", ("observe", 1), ("harvest", 1), "told"]
    steps = events[5:]
    assert steps[:3] == ["draft", "forward", ("harvest", first)]
    harvests = [e for e in steps if isinstance(e, tuple) and e[0] == "harvest"]
    assert len(harvests) == steps.count("forward") + 1  # that of the prefill, and none is lost
    assert [length for _, length in harvests] == sorted(length for _, length in harvests)
    for place, event in enumerate(steps[:-2]):
        if isinstance(event, tuple) and event[0] == "harvest":
            assert steps[place - 1] == "forward"
            assert steps[place + 1][0] == "observe"
            assert steps[place + 2] == "told"
    assert steps.count("told") == steps.count("forward")


@pytest.mark.usefixtures("trusted")
def test_a_cpu_does_everything_at_once() -> None:
    model = tiny_model("llama")
    lade.probe(model)
    events = events_of(model)
    steps = events[events.index("told") + 1 :]
    assert steps[:2] == ["draft", "forward"]
    assert steps[2][0] == "observe"
    assert steps[3:5] == [("harvest", ONE.shape[1] + 1), "told"]


@pytest.mark.usefixtures("waits")
def test_streams_and_steps_are_told_of_everything_in_order() -> None:
    model = tiny_model("llama")
    told: list[Step] = []
    streamer = ListStreamer()
    got = lade.generate(model, ONE, streamer=streamer, on_step=told.append, **GREEDY)
    new = got[0, ONE.shape[1] :].tolist()
    assert [token for step in told for token in step.token_ids] == new
    assert [token for event in streamer.events[1:-1] for token in event] == new
    assert streamer.events[-1] == "end"


@pytest.mark.parametrize("device", CPU_AND_CUDA)
def test_what_is_sent_arrives(device: str) -> None:
    parts = (
        torch.tensor([[3, -1, 2**31 - 1]], device=device),
        torch.tensor([True, False], device=device),
        torch.tensor([[0.5], [float("nan")]], device=device),
        torch.zeros((0, 4), dtype=torch.int64, device=device),
    )
    sent = HostCopy(*parts)
    parts[0].fill_(0) if device == "cuda" else None  # it is on its way already
    token_ids, flags, numbers, nothing = sent.get()
    assert token_ids.tolist() == [[3, -1, 2**31 - 1]]
    assert flags.tolist() == [True, False]
    assert numbers[0, 0] == 0.5
    assert bool(numbers[1, 0].isnan())
    assert nothing.shape == (0, 4)
    assert all(isinstance(part, Tensor) and part.device.type == "cpu" for part in sent.get())
