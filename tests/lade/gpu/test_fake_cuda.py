"""On a device, a step waits for nothing but what it says that it waits for."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import lade
from lade.hf.generation import Generation
from lade.transfer import HostCopy, Launched, arrays_on, integers_on
from tests.grids import thinned
from tests.lade.both import ONE, THREE
from tests.lade.gpu.fake_cuda import (
    DEVICE,
    DISPATCHING,
    OF_TREE,
    CudaTensor,
    FakeCuda,
    FakePolicy,
    Wait,
    fake_cuda,
    moved,
)
from tests.lade.tiny import IS_NEWEST, tiny_model


class Path(NamedTuple):
    """A way to choose tokens, in a batch or not, by steps that are executed in some way."""

    is_batch: bool
    options: dict[str, Any]
    config: dict[str, Any]
    most_awaited: int = 3  # events a step
    awaits_padding: bool = False  # where plain `generate` does: the model makes its own masks


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
    "processed-sampled": Path(False, {**_SAMPLED, **_PROCESSED}, {}, _ONE_BY_ONE),
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
    "lookahead": Path(False, _GREEDY, {"lookahead": lade.Lookahead(4, 3)}, 4),
    "chain": Path(True, _GREEDY, {"verification": "chain"}, awaits_padding=True),
}
QUICK = ("greedy-graphs-3", "lookahead")
# What a step may wait for: padding and positions of rows, in the first step and after rows have
# left; and the comparison of a new recording. A prefill may wait where transformers looks for
# padding, and to compare what it harvests.
ALLOWED = {
    "step": ("_show_rows", "distance"),
    "end": ("_show_rows",),
    "prefill": ("create_causal_mask", "successors"),
}
if not IS_NEWEST:  # older transformers look for padding themselves
    ALLOWED["step"] += ("_ignore_causal_mask_sdpa",)


@pytest.mark.parametrize("name", thinned(PATHS, *QUICK))
@pytest.mark.usefixtures("trusted")
def test_no_step_waits_in_secret(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = PATHS[name]
    prompt = THREE if path.is_batch else ONE
    options = {**path.options, "max_new_tokens": 16, "pad_token_id": 0}
    config = lade.Config(max_draft_tokens=7, **path.config)
    monkeypatch.setattr(Generation, "policy", FakePolicy())
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
    also = {"step": ("_ignore_causal_mask_sdpa",)} if path.awaits_padding else {}
    unexpected = [wait for wait in device.waits if not is_allowed(wait, also)]
    assert not unexpected
    awaited = [num for (phase, _), num in device.num_awaited.items() if phase == "step"]
    assert max(awaited) <= path.most_awaited
    if "acceptance" not in path.config:
        plain = tiny_model(dtype=torch.float32)
        torch.manual_seed(3)
        expected = plain.generate(prompt, attention_mask=(prompt != 0).long(), **options)
        assert torch.equal(got.held, expected)


# What a layer runs beside a plain one of one token: queries are packed by key head, and unpacked.
BESIDE_PLAIN = 2


@pytest.mark.exhaustive
@pytest.mark.usefixtures("trusted")
def test_a_layer_runs_hardly_more_than_a_plain_one_and_chooses_no_kernel_by_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels that are chosen by shape are built for each new one, on some cards."""
    monkeypatch.setattr(Generation, "policy", FakePolicy())
    of_lade, of_plain = (
        [num_operations(num_layers, is_plain) for num_layers in (2, 4)]
        for is_plain in (False, True)
    )
    beside = (of_lade[1] - of_lade[0] - (of_plain[1] - of_plain[0])) / 2
    assert beside == BESIDE_PLAIN
    assert of_lade[0] - of_plain[0] < 45  # what is done once a step


def num_operations(num_layers: int, is_plain: bool) -> float:
    """Return how many operations a step with a draft runs, the median, or a plain forward."""
    options: dict[str, Any] = {**_GREEDY, "max_new_tokens": 24, "pad_token_id": 0}
    with fake_cuda() as device:
        # Heads of 16 numbers, which the kernel takes; two for each key head.
        model = moved(tiny_model(dtype=torch.float32, num_hidden_layers=num_layers, head_dim=16))
        config = lade.Config(max_draft_tokens=7, verification="tree", execution="eager")
        lade.probe(model)
        device.num_run.clear()
        if is_plain:
            cache = transformers.DynamicCache(config=model.config)
            with torch.no_grad():
                for ids in (ONE, ONE[:, :1]):
                    device.num_run.clear()
                    model(CudaTensor(ids), past_key_values=cache, use_cache=True)
            return sum(device.num_run.values())
        lade.generate(model, CudaTensor(ONE), config=config, **options)
    steps: dict[int, Counter[str]] = defaultdict(Counter)
    for (phase, step, name), num in device.num_run.items():
        if phase == "step":
            steps[step][name] += num
    assert not any(step[DISPATCHING] for step in steps.values())
    of_trees = [step.total() for step in steps.values() if step[OF_TREE]]
    assert len(of_trees) > 3
    return float(np.median(of_trees))


def is_allowed(wait: Wait, also: Mapping[str, tuple[str, ...]] = MappingProxyType({})) -> bool:
    """Return whether a wait is before the decoding, or one of those that are known."""
    allowed = (*ALLOWED.get(wait.phase, ()), *also.get(wait.phase, ()))
    return wait.phase == "before" or any(
        each.startswith(name) for each in wait.where for name in allowed
    )


def waits_of(run: Callable[[Tensor], Any]) -> list[str]:
    """Return what is waited for while something is done with 0 … 5 on the device."""
    with fake_cuda() as device:
        numbers = torch.arange(6, device="cuda")
        device.waits.clear()
        run(numbers)
        return [wait.what for wait in device.waits]


WAITING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x.max()),
    "bool": lambda x: bool((x > 2).any()),
    "if": lambda x: 1 if x[0] else 2,
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu", torch.float64),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "where of one": lambda x: torch.where(x > 2),
    "unique": lambda x: torch.unique(x),
    "masked_select": lambda x: x.masked_select(x > 2),
    "by a mask": lambda x: x[x > 2],
    "by a number there": lambda x: x[x[1]],
    "by a list": lambda x: x[[0, 1]],
    "by lists": lambda x: x.view(2, 3)[(0, 1), (1, 2)],
    "by an index of the host": lambda x: x[torch.tensor([1, 2])],
    "repeat_interleave": lambda x: x.repeat_interleave(x),
    "numbers": lambda x: torch.tensor([1, 2], device="cuda"),
    "numbers like it": lambda x: x.new_tensor([1, 2]),
    "to": lambda x: torch.arange(2).to("cuda"),
    "to without a wait": lambda x: torch.arange(2).to("cuda", non_blocking=True),
    "to, pinned": lambda x: pinned(2).to("cuda"),
    "copy_": lambda x: x.copy_(torch.arange(6)),
    "copy_ to the host": lambda x: torch.arange(6).copy_(x),
    "copy_ to the host without a wait": lambda x: torch.arange(6).copy_(x, non_blocking=True),
    "assignment": lambda x: x.__setitem__(slice(2), torch.arange(2)),
    "synchronize": lambda x: torch.cuda.synchronize(),
}
NOT_WAITING: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: (x + 1).float().softmax(0).argmax(),
    "with a number of the host": lambda x: x + torch.tensor(1),
    "filled by a mask": lambda x: x.masked_fill(x > 2, 0),
    "assigned by a mask": lambda x: x.__setitem__(x > 2, 0),
    "by an index there": lambda x: x[x.flip(0)][1:, None],
    "to, pinned": lambda x: pinned(2).to("cuda", non_blocking=True),
    "copy_ to pinned memory": lambda x: pinned(6).copy_(x, non_blocking=True),
    "made there": lambda x: (
        torch.zeros(3, device=x.device) + x.new_ones(3) + torch.full_like(x, 2)[:3]
    ),
    "sorted": lambda x: x.sort().values.topk(2),
    "integers_on": lambda x: integers_on(x.device, [1, 2]) + x[:2],
    "Launched": lambda x: Launched(x[None, None]).wait(),
    "HostCopy": lambda x: HostCopy(x, x > 2).get(),
}


def pinned(size: int) -> Tensor:
    """Return memory of the host that can be copied in the background."""
    return torch.zeros(size, dtype=torch.int64, pin_memory=True)


@pytest.mark.parametrize("name", WAITING)
def test_the_fake_device_notes_what_waits(name: str) -> None:
    assert waits_of(WAITING[name])


@pytest.mark.parametrize("name", NOT_WAITING)
def test_and_nothing_else(name: str) -> None:
    assert waits_of(NOT_WAITING[name]) == []


def test_it_refuses_what_cuda_refuses() -> None:
    def refused(numbers: Tensor) -> None:
        for run in (
            lambda: numbers + torch.arange(6),
            lambda: torch.cat([numbers, torch.arange(6)]),
            lambda: torch.where(torch.arange(6) > 2, numbers, 0),
        ):
            with pytest.raises(RuntimeError, match="on the same device"):
                run()  # type: ignore[no-untyped-call]
        with pytest.raises(TypeError, match="to numpy"):
            numbers.numpy()

    assert waits_of(refused) == []


def test_what_is_brought_to_the_host_is_not_there_before_it_is_waited_for() -> None:
    with fake_cuda() as device:
        on_host = pinned(6)
        on_host.copy_(torch.arange(6, device="cuda"), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        assert on_host.tolist() != [*range(6)]
        event.synchronize()
        assert on_host.tolist() == [*range(6)]
    assert not device.waits


def test_pinned_memory_must_not_be_written_to_while_it_is_sent() -> None:
    with fake_cuda() as device:
        on_host = pinned(6)
        on_host.to("cuda", non_blocking=True)
        on_host[0] = 5
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        event.synchronize()
    assert [wait.what for wait in device.waits] == [
        "pinned memory was written to before it had been sent"
    ]


def test_arrays_of_any_dtype_go_in_one_copy() -> None:
    arrays = [
        np.array([[3, -1, 2**40]]),
        np.array([True, False, True]),
        np.array([[0.5], [float("nan")]]),
        np.zeros((2, 0, 3)),
        np.arange(10, dtype=np.int32)[::2],
    ]

    def check(device: FakeCuda) -> None:
        sent = arrays_on(DEVICE, *arrays)
        for got, array in zip(sent, arrays, strict=True):
            assert isinstance(got, CudaTensor)
            assert got.held.numpy().dtype == array.dtype
            np.testing.assert_array_equal(got.held.numpy(), array)
        assert device.event() == 1
        assert not device.waits

    with fake_cuda() as device:
        check(device)
    for got, array in zip(arrays_on(torch.device("cpu"), *arrays), arrays, strict=True):
        np.testing.assert_array_equal(got.numpy(), array)
