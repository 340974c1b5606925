"""On a device, a step waits for nothing but what it says that it waits for."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import lade
from tests.grids import thinned
from tests.lade.both import ONE, THREE
from tests.lade.gpu.fake_cuda import DEVICE, CudaTensor, Wait, fake_cuda, moved
from tests.lade.tiny import tiny_model


class Path(NamedTuple):
    """A way to choose tokens, in a batch or not, by steps that are executed in some way."""

    is_batch: bool
    options: dict[str, Any]
    config: dict[str, Any]
    most_awaited: int = 3  # events a step


_GREEDY = {"do_sample": False}
_SAMPLED = {"do_sample": True, "top_p": 0.9, "top_k": 20, "temperature": 1.3}
_PROCESSED = {"repetition_penalty": 1.2}
# On purpose, a step waits for the chosen tokens, for what was harvested from the last one, and for
# the inputs that it sent; where tokens are chosen one by one, for logits and each token.
_ONE_BY_ONE = 3 + 8
_OF_TREES = {
    "greedy": Path(False, _GREEDY, {}),
    "sampled": Path(False, _SAMPLED, {}),
    "processed": Path(False, {**_GREEDY, **_PROCESSED}, {}, _ONE_BY_ONE),
    "rejection": Path(False, _SAMPLED, {"acceptance": "rejection"}, _ONE_BY_ONE),
}
PATHS = {
    f"{name}-{execution}-{3 if is_batch else 1}": path._replace(
        is_batch=is_batch,
        # Three rows have more nodes than top-p is run at together.
        most_awaited=_ONE_BY_ONE if name == "sampled" and is_batch else path.most_awaited,
        config={**path.config, "execution": execution, "verification": "tree"},
    )
    for name, path in _OF_TREES.items()
    for execution in ("eager", "fixed", "graphs")
    if execution != "fixed" or name == "greedy"  # how tokens are chosen does not know of shapes
    for is_batch in (False, True)
}
PATHS |= {
    "chain": Path(False, _GREEDY, {"verification": "chain"}),
}
QUICK = ("greedy-graphs-3",)
# What a step may wait for: padding and positions of rows, in the first step and after rows have
# left; the comparison of a new recording; and where transformers looks for padding. A prefill may
# wait for that as well, and to compare what it harvests.
ALLOWED = {
    "step": ("_of_prompt", "distance", "_ignore_causal_mask_sdpa"),
    "end": ("_of_prompt",),
    "prefill": ("create_causal_mask", "successors"),
}


@pytest.mark.parametrize("name", thinned(PATHS, *QUICK))
@pytest.mark.usefixtures("trusted")
def test_no_step_waits_in_secret(name: str) -> None:
    path = PATHS[name]
    prompt = THREE if path.is_batch else ONE
    options = {**path.options, "max_new_tokens": 16, "pad_token_id": 0}
    config = lade.Config(max_draft_tokens=7, **path.config)
    with fake_cuda() as device:
        model = moved(tiny_model(dtype=torch.float32))
        lade.probe(model)
        device.waits.clear()
        torch.manual_seed(3)
        mask = CudaTensor((prompt != 0).long())
        got = lade.generate(
            model, CudaTensor(prompt), attention_mask=mask, config=config, **options
        )
    assert device.step > 5
    assert got.device == DEVICE
    assert not [wait for wait in device.waits if not is_allowed(wait)]
    awaited = [num for (phase, _), num in device.num_awaited.items() if phase == "step"]
    assert max(awaited) <= path.most_awaited
    if "acceptance" not in path.config:
        plain = tiny_model(dtype=torch.float32)
        torch.manual_seed(3)
        expected = plain.generate(prompt, attention_mask=(prompt != 0).long(), **options)
        assert torch.equal(got.held, expected)


def is_allowed(wait: Wait) -> bool:
    """Return whether a wait is before the decoding, or one of those that are known."""
    allowed = ALLOWED.get(wait.phase, ())
    return wait.phase == "before" or any(each.startswith(allowed) for each in wait.where)


def pinned(size: int) -> Tensor:
    """Return memory of the host that can be copied in the background."""
    return torch.zeros(size, dtype=torch.int64, pin_memory=True)


# What the fake device has to notice, and not to notice, of 0 … 5 on it.
WAITING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "if": lambda x: 1 if x[0] else 2,
    "tolist": lambda x: x.tolist(),
    "to cpu": lambda x: x.to("cpu", torch.float64),
    "nonzero": lambda x: x.nonzero(),
    "by a mask": lambda x: x[x > 2],
    "by a number there": lambda x: x[x[1]],
    "by lists": lambda x: x.view(2, 3)[(0, 1), (1, 2)],
    "by an index of the host": lambda x: x[torch.tensor([1, 2])],
    "repeat_interleave": lambda x: x.repeat_interleave(x),
    "numbers like it": lambda x: x.new_tensor([1, 2]),
    "to without a wait": lambda x: torch.arange(2).to("cuda", non_blocking=True),
    "copy_ to the host without a wait": lambda x: torch.arange(6).copy_(x, non_blocking=True),
    "assignment": lambda x: x.__setitem__(slice(2), torch.arange(2)),
    "synchronize": lambda x: torch.cuda.synchronize(),
}
NOT_WAITING: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: (x + torch.tensor(1)).float().softmax(0).argmax(),
    "assigned by a mask": lambda x: x.__setitem__(x > 2, 0),
    "by an index there": lambda x: x[x.flip(0)][1:, None],
    "to, pinned": lambda x: pinned(2).to("cuda", non_blocking=True),
    "copy_ to pinned memory": lambda x: pinned(6).copy_(x, non_blocking=True),
    "made there": lambda x: torch.zeros(3, device=x.device) + torch.full_like(x, 2)[:3],
}


@pytest.mark.parametrize("name", [*WAITING, *NOT_WAITING])
def test_the_fake_device_notes_what_waits_and_nothing_else(name: str) -> None:
    run: Callable[[Tensor], Any] = {**WAITING, **NOT_WAITING}[name]
    with fake_cuda() as device:
        numbers = torch.arange(6, device="cuda")
        device.waits.clear()
        run(numbers)
        assert bool(device.waits) == (name in WAITING)


def test_what_is_under_way_is_not_there_and_must_not_be_written_to() -> None:
    with fake_cuda() as device:
        on_host, sent = pinned(6), pinned(6)
        on_host.copy_(torch.arange(6, device="cuda"), non_blocking=True)
        sent.to("cuda", non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        assert on_host.tolist() != [*range(6)]
        assert not device.waits
        sent[0] = 5
        event.synchronize()
        assert on_host.tolist() == [*range(6)]
    assert [wait.what for wait in device.waits] == [
        "pinned memory was written to before it had been sent"
    ]
