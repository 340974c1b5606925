"""A CUDA device without a card: what a call waits for is seen, and numbers are those of the CPU.

Tensors of the device are wrappers that hold a tensor of the CPU and say `cuda` when asked. Every
operation on them passes through here, where it is refused if CUDA would refuse it, and noted if the
host would wait for the device: because it reads a value, needs a size that depends on values, or
copies memory that is not pinned. So a call of lade runs as it does on CUDA, to its end, with the
tokens it has on a CPU; torch's own fake tensors have no values to go on from.
"""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lade.attention import tree as tree_attention
from lade.batch import Row
from lade.decoder import Decoder
from lade.gpu.graphs import CudaRecorder, Recording, StepCall
from lade.gpu.policy import DevicePolicy
from lade.hf.generation import Generation

DEVICE = torch.device("cuda", 0)


class Wait(NamedTuple):
    """A place where the host waits for the device."""

    phase: str  # "before", "prefill", "step" or "end"
    step: int
    what: str
    where: tuple[str, ...]  # functions outside torch, innermost first


class CudaTensor(Tensor):
    """A tensor that is said to be on the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "CudaTensor":
        made: CudaTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device("meta"),  # to torch's own code, which else wants a card
        )
        made.held = held
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return 0

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"expected the fake device to be there for {func}")


class CudaGenerator(torch.Generator):
    """A generator of the device; it draws what one of the CPU draws."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE


# Operations whose result, or its size, the host must wait for.
_READING = {
    *("_local_scalar_dense", "is_nonzero", "equal", "_is_all_true", "_is_any_true", "nonzero"),
    *("masked_select", "_unique", "_unique2", "unique_consecutive", "unique_dim", "bincount"),
    *("allclose", "histc", "_linalg_check_errors"),
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class FakeCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The device, as long as this mode is entered.

    Attributes:
        waits: what the host has waited for without saying so.
        num_awaited: how many events it has waited for, which it does on purpose, by phase and step.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[Wait] = []
        self.num_awaited: Counter[tuple[str, int]] = Counter()
        self.phase, self.step = "before", 0
        self._pinned: dict[int, Any] = {}  # by address; storages are kept, so that none comes again
        self._under_way: list[Callable[[], None]] = []  # copies, each in the order it was begun
        self._num_landed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the CPU's tensors, noting what it would wait for on CUDA."""
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_device = [each for each in tensors if isinstance(each, CudaTensor)]
        if name in ("_to_copy", "copy_"):
            return self._copy(func, name, args, kwargs)
        is_made_there = _is_there(kwargs.get("device")) or (
            bool(on_device) and kwargs.get("device") is None
        )
        if on_device:
            self._look_at(name, args, kwargs, tensors)
        if name == "_scaled_dot_product_efficient_attention":
            func = _efficient_attention
        is_pinned = bool(kwargs.pop("pin_memory", False))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        result = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        if name == "_local_scalar_dense":
            return result
        known = {id(each.held): each for each in on_device}
        if is_pinned:
            self.pin(result)
        if not is_made_there:
            return result
        return tree_map(lambda each: _on_device(each, known), result)

    def note(self, what: str) -> None:
        """Note that the host waits here."""
        self.waits.append(Wait(self.phase, self.step, what, _where()))

    # --- memory -------------------------------------------------------------------------------

    def pin(self, tensor: Tensor) -> None:
        """Take the memory of a tensor of the CPU for pinned."""
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the CPU lies in pinned memory."""
        return tensor.untyped_storage().data_ptr() in self._pinned

    def event(self) -> int:
        """Return how many copies were begun so far."""
        return self._num_landed + len(self._under_way)

    def wait_for(self, num_copies: int) -> None:
        """Finish the first copies: what they bring is not there before."""
        self.num_awaited[self.phase, self.step] += 1
        while self._num_landed < num_copies:
            self._under_way.pop(0)()
            self._num_landed += 1

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        is_async = bool(args[2] if args[2:] else kwargs.get("non_blocking", False))
        target, source = args[:2] if name == "copy_" else (None, args[0])
        was_there = isinstance(source, CudaTensor)
        if name == "copy_":
            is_there = isinstance(target, CudaTensor)
        else:
            device = kwargs.pop("device", None)
            kwargs.pop("pin_memory", None)
            is_there = was_there if device is None else _is_there(device)
        if was_there and not is_there:
            return self._bring(func, source, target, is_async, args, kwargs)
        if is_there and not was_there and source.numel():
            self._check_sending(source, is_async)
        result = func(*tree_map(_held, args), **kwargs)
        if target is not None:
            return target
        return CudaTensor(result) if is_there else result

    def _check_sending(self, source: Tensor, is_async: bool) -> None:
        """Note what is not sent in the background, and later what was overwritten on its way."""
        if not self.is_pinned(source):
            self.note(f"{list(source.shape)} of {source.dtype} are sent from pageable memory")
        elif not is_async:
            self.note("what is sent is waited for")
        else:
            sent = source.clone()

            def land() -> None:
                if not torch.equal(sent, source):
                    self.note("pinned memory was written to before it had been sent")

            self._under_way.append(land)

    def _bring(
        self, func: Any, source: Tensor, target: Any, is_async: bool, args: Any, kwargs: Any
    ) -> Any:
        """Copy to the host: at once, for which it waits, or later, into pinned memory."""
        if target is None or not is_async or not self.is_pinned(target):
            self.note(f"{list(source.shape)} of {source.dtype} are brought to the host")
            return func(*tree_map(_held, args), **kwargs)
        brought = source.held.clone()  # type: ignore[attr-defined]
        target.fill_(-77)  # until then
        self._under_way.append(lambda: target.copy_(brought))
        return target

    # --- rules --------------------------------------------------------------------------------

    def _look_at(self, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> None:
        """Note what an operation waits for.

        Raises:
            RuntimeError: it mixes devices.
        """
        elsewhere = [each for each in tensors if not isinstance(each, CudaTensor) and each.dim()]
        if name in _INDEXING:
            indices = [each for each in args[1] if each is not None]
            if any(not isinstance(index, CudaTensor) for index in indices):
                self.note(f"{name} sends indices from pageable memory")
            is_filled = name.startswith(("index_put", "_index_put")) and args[2].numel() == 1
            if any(index.dtype == torch.bool for index in indices) and not is_filled:
                self.note(f"{name} by a mask has a size that depends on values")
            elsewhere = [each for each in elsewhere if not any(each is index for index in indices)]
        if name in _READING:
            self.note(f"{name} reads a value")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.note("repeat_interleave has a size that depends on values")
        if elsewhere:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, "
                f"{DEVICE} and cpu! ({name})"
            )


class _Python(TorchFunctionMode):
    """What Python does to tensors without an operation: it reads, makes and pins them."""

    def __init__(self, device: FakeCuda) -> None:
        super().__init__()
        self._fake = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        mine = args[0] if args and isinstance(args[0], CudaTensor) else None
        if mine is not None and func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            if func is not Tensor.tolist:
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            self._fake.note(f"{list(mine.shape)} of {mine.dtype} are brought to the host by tolist")
            return mine.held.tolist()
        if mine is not None and func is Tensor.data_ptr:
            return mine.held.data_ptr()
        if mine is not None and func is Tensor.__getitem__:
            return _on_device(mine.held[self._indices(args[1])], {})
        if mine is not None and func is Tensor.__setitem__:
            return self._set(mine, args[1], args[2])
        if func is nn.functional.scaled_dot_product_attention and isinstance(args[0], CudaTensor):
            # It asks for the kind of device, and waits for nothing.
            return CudaTensor(func(*tree_map(_held, args), **tree_map(_held, kwargs)))
        if func is Tensor.is_pinned:
            return mine is None and self._fake.is_pinned(args[0])
        if func is Tensor.to:  # without a number, torch asks the driver which device is meant
            args, kwargs = tree_map(_numbered, args), tree_map(_numbered, kwargs)
        if func is Tensor.new_tensor and mine is not None:
            func, args = torch.tensor, args[1:]
            kwargs = {"device": DEVICE, "dtype": mine.dtype, **kwargs}
        if func in (torch.tensor, torch.as_tensor):
            return self._made(func, args, kwargs)
        return func(*args, **kwargs)

    def _indices(self, index: Any, is_filled: bool = False) -> Any:
        """Return indices on the CPU; torch sends those that are not on the device.

        Where a number is written by a mask, nothing has a size that depends on the mask.
        """
        parts = []
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, (list, tuple, np.ndarray)) or (
                isinstance(part, Tensor) and not isinstance(part, CudaTensor)
            ):
                self._fake.note("indices are sent from pageable memory")
            elif isinstance(part, CudaTensor) and part.dtype == torch.bool and not is_filled:
                self._fake.note("an index by a mask has a size that depends on values")
            elif isinstance(part, CudaTensor) and part.dim() == 0 and part.dtype != torch.bool:
                self._fake.note("an index reads a value")
            parts.append(_held(part))
        return tuple(parts) if isinstance(index, tuple) else parts[0]

    def _set(self, target: CudaTensor, index: Any, value: Any) -> None:
        """Write to a part of a tensor: a number, or what lies on the device or is sent there."""
        if isinstance(value, Tensor) and not isinstance(value, CudaTensor):
            self._fake.note(f"{list(value.shape)} of {value.dtype} are sent, and waited for")
        is_filled = not isinstance(value, Tensor) or value.numel() == 1
        target.held[self._indices(index, is_filled)] = _held(value)

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a tensor on the host, and send it: `torch.tensor` does both out of sight."""
        device, is_pinned = kwargs.pop("device", None), bool(kwargs.pop("pin_memory", False))
        if isinstance(args[0], CudaTensor):
            return args[0].to(device=device, dtype=kwargs.get("dtype"))
        made = func(*args, **kwargs)
        if is_pinned:
            self._fake.pin(made)
        if not _is_there(device):
            return made
        if made.dim() == 0:  # the host waits for a single number, too
            self._fake.note("a number is sent from pageable memory")
            return CudaTensor(made)
        return made.to(DEVICE)


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Pretend that there is a CUDA device."""
    device = FakeCuda()

    class Event:
        def record(self, stream: Any = None) -> None:
            self._num_copies = device.event()

        def synchronize(self) -> None:
            device.wait_for(self._num_copies)

    class Stream:
        cuda_stream = 0

        def __init__(self, *args: Any) -> None:
            pass

    def synchronize(*args: Any) -> None:
        device.note("torch.cuda.synchronize")
        device.wait_for(device.event())

    properties = SimpleNamespace(total_memory=2**34, multi_processor_count=132, major=9, minor=0)
    make_generator = torch.Generator
    replaced: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "current_stream": lambda *args: Stream(),
        "Event": Event,
        "Stream": Stream,
        "synchronize": synchronize,
        "device": lambda *args: nullcontext(),
        "empty_cache": lambda: None,
        "get_device_properties": lambda *args: properties,
        "get_device_capability": lambda *args: (9, 0),
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda state, *args: torch.set_rng_state(state),
        "mem_get_info": lambda *args: (2**33, 2**34),
    }

    def generator(where: Any = "cpu") -> Any:
        return CudaGenerator() if _is_there(where) else make_generator(where)

    lifts = torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch, "Generator", generator))
        stack.enter_context(patch.object(Generation, "policy", FakePolicy()))
        if find_spec("triton") is not None:
            stack.enter_context(
                patch("lade.attention.triton.attend_by_kernels", tree_attention.attend)
            )
        stack.enter_context(_followed(device))
        stack.enter_context(_Python(device))
        stack.enter_context(device)
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifts)
        yield device


def moved(model: Any) -> Any:
    """Move a model to the device, and return it."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                on_device = CudaTensor(weight.detach())
                module._parameters[name] = nn.Parameter(on_device, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = CudaTensor(buffer)
    return model


class OnlyRunning(CudaRecorder):
    """A recorder whose replays run the forward again."""

    def __init__(self) -> None:
        self.max_bytes = 10**9

    def record(self, run: StepCall) -> Recording:
        output = run(True)
        return Recording(lambda: output.copy_(run(True)), output)

    def num_bytes(self) -> int:
        return 0

    def begin_anew(self) -> None:
        pass


class FakePolicy(DevicePolicy):
    """That of CUDA, but for the recorder."""

    def recorder(self, device: torch.device) -> OnlyRunning:
        return OnlyRunning()


@contextmanager
def _followed(device: FakeCuda) -> Iterator[None]:
    """Tell the device which part of a call runs."""
    prefill, step = Decoder._prefill, Decoder._step

    def followed_prefill(self: Decoder) -> None:
        device.phase = "prefill"
        prefill(self)

    def followed_step(self: Decoder, emitting: Sequence[Row]) -> None:
        device.phase, device.step = "step", device.step + 1
        step(self, emitting)
        device.phase = "end"

    with (
        patch.object(Decoder, "_prefill", followed_prefill),
        patch.object(Decoder, "_step", followed_step),
    ):
        yield


def _efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *others: Any, **options: Any
) -> tuple[Tensor, ...]:
    """Stand in for the kernel, refusing what it refuses."""
    rows, num_heads, num_queries, _ = query.shape
    num_keys = key.shape[2]
    assert key.shape[:3] == value.shape[:3] == (rows, num_heads, num_keys)
    for each in (query, key, value):
        assert each.dtype == query.dtype != torch.float64
        assert each.stride(-1) == 1
        numbers = 16 // each.element_size()
        sizes = (each.shape[-1], *each.stride()[:3])
        assert not any(size % numbers for size in sizes), "(inputs) not correctly aligned"
    if bias is not None:
        assert bias.shape == (rows, num_heads, num_queries, num_keys)
        assert bias.dtype == query.dtype
        assert bias.stride(-1) == 1
        assert not any(stride % 16 for stride in bias.stride()[:3]), "(bias) not correctly aligned"
    attended = nn.functional.scaled_dot_product_attention(query, key, value, bias, **options)
    return attended, *(query.new_empty(0) for _ in range(3))


def _is_there(device: Any) -> bool:
    return device is not None and torch.device(device).type in ("cuda", "meta")


def _held(each: Any) -> Any:
    if isinstance(each, CudaTensor):
        return each.held
    return torch.device("cpu") if isinstance(each, torch.device) else each


def _numbered(each: Any) -> Any:
    if isinstance(each, (str, torch.device)) and str(each) == DEVICE.type:
        return DEVICE
    return each


def _on_device(each: Any, known: dict[int, CudaTensor]) -> Any:
    if not isinstance(each, Tensor) or isinstance(each, CudaTensor):
        return each
    return known[id(each)] if id(each) in known else CudaTensor(each)


def _where() -> tuple[str, ...]:
    """Return the innermost functions of the call that are not torch's or this file's."""
    frames = [
        f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"
        for frame in traceback.extract_stack()
        if "/torch/" not in frame.filename and frame.filename != __file__
    ]
    return tuple(frames[:-9:-1])
