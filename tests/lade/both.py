"""Plain `generate` and lade side by side, with drafts that are often right."""

from typing import Any

import numpy as np
import torch

import lade
from lade.compat import device_of_inputs
from tests.lade.tiny import BatchDrafter

ONE = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
THREE = torch.tensor([[0, 0, 5, 6, 7, 5, 6], [5, 6, 7, 5, 6, 7, 5], [0, 9, 9, 9, 9, 9, 9]])


EIGHT = lade.Config(max_draft_tokens=8)


def both(
    model: Any,
    prompt: torch.Tensor,
    *,
    accept: float = 0.7,
    seed: int = 0,
    config: lade.Config = EIGHT,
    **options: Any,
) -> tuple[Any, Any]:
    """Run plain `generate` and lade with drafts that are often right; compare the random state."""
    device = device_of_inputs(model)
    prompt = prompt.to(device)
    options = {
        "do_sample": True,
        "max_new_tokens": 24,
        "pad_token_id": 0,
        "attention_mask": (prompt != 0).long(),
        "return_dict_in_generate": True,
        **options,
    }
    torch.manual_seed(seed)
    expected = model.generate(prompt, **options)
    state = random_state(device)
    repeats = options.get("num_return_sequences", 1)
    masks = options["attention_mask"].repeat_interleave(repeats, dim=0)
    answers = []
    for row, mask in zip(expected.sequences.tolist(), masks.tolist(), strict=True):
        answers.append([*(t for t, m in zip(row, mask, strict=False) if m), *row[len(mask) :]])
    drafter = BatchDrafter(answers, np.random.default_rng(seed), accept)
    torch.manual_seed(seed)
    got = lade.generate(model, prompt, drafter=drafter, config=config, **options)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert torch.equal(random_state(device), state)
    assert drafter.closed == len(answers)
    return expected, got


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of the generator that sampling on a device draws from."""
    is_cuda = device.type == "cuda"
    return torch.cuda.get_rng_state(device) if is_cuda else torch.get_rng_state()


class ListStreamer:
    """A streamer that records everything in order."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.events.append(value.tolist())

    def end(self) -> None:
        self.events.append("end")
