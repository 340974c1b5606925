"""Guards against waits in a forward, which would spoil a capture.

`lade.machine.captures` guards against other threads.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Warnings of torch's synchronisation debug mode, the second about the mode itself.
_WAITED = "called a synchronizing CUDA operation"
_PROTOTYPE = "Synchronization debug mode is a prototype"


class WaitError(RuntimeError):
    """A forward waits for its device, or moves tensors between it and the host."""


# Names of the operations whose result the host must wait for.
_WAITING = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "_is_all_true", "_is_any_true"),
    *("nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount"),
}


class NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that refuses operations a recording must not have, before a capture is spoiled.

    A failed capture leaves torch's streams, memory pools and random state inconsistent, differently
    in each release. Waits inside an operation are not seen here: see `refused_waits`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, or refuse it.

        Raises:
            WaitError: the operation would wait for the device.
        """
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        of_tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        kinds = {each.device.type for each in of_tensors}
        if name == "_to_copy":
            kinds.add(torch.device(kwargs.get("device") or of_tensors[0].device).type)
        is_moving = name in ("copy_", "_to_copy") and len(kinds) > 1
        if name in ("index", "index_put", "index_put_", "_unsafe_index"):
            masks = [each for each in args[1] if each is not None and each.dtype == torch.bool]
            is_moving = is_moving or bool(masks)
        if name in _WAITING or is_moving:
            raise WaitError(f"{name} waits for the device")
        return func(*args, **kwargs)


@contextmanager
def refused_waits() -> Iterator[None]:
    """Raise at the end if operations of this thread have waited inside.

    Only torch's debug mode sees into compiled code and kernels that copy sizes to the host. It
    belongs to the process: its warnings about other threads are passed on if it was on before.

    Raises:
        WaitError: something waited for the device.
    """
    thread, said = get_ident(), warnings.showwarning
    waited: list[str] = []

    def show(message: Any, *others: Any, **named: Any) -> None:
        is_of_mode = _WAITED in str(message)
        if is_of_mode and get_ident() == thread:
            waited.append(str(message))
        elif before or not is_of_mode:
            said(message, *others, **named)

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{_WAITED}")
        warnings.filterwarnings("ignore", message=f".*{_PROTOTYPE}")
        warnings.showwarning = show
        try:
            torch.cuda.set_sync_debug_mode("warn")
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    if waited:
        raise WaitError("an operation waits for the device inside")
