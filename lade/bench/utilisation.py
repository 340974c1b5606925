"""How busy processor and device are while something runs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch

_INTERVAL_SEC = 0.05  # NVML's own samples are a sixth of a second apart, or more


class Utilisation(NamedTuple):
    """Busy time of a processor and of a device, over a span of wall time."""

    sec: float
    cpu_sec: float  # of all threads of the process
    device_share: float | None  # of the time that kernels ran; None where nothing tells


class Meter:
    """A measurement that is under way; `utilisation` is set when it ends."""

    utilisation: Utilisation | None = None


@contextmanager
def measuring(device: torch.device) -> Iterator[Meter]:
    """Measure the block: the process's CPU time, and what NVML says of a CUDA device."""
    meter = Meter()
    read = device_reader(device)
    shares: list[int] = []
    is_over = threading.Event()

    def sample(read: Callable[[], int]) -> None:
        while not is_over.wait(_INTERVAL_SEC):
            shares.append(read())

    thread = None if read is None else threading.Thread(target=sample, args=(read,), daemon=True)
    start, cpu_start = perf_counter(), process_time()
    if thread is not None:
        thread.start()
    try:
        yield meter
    finally:
        sec, cpu_sec = perf_counter() - start, process_time() - cpu_start
        is_over.set()
        if thread is not None:
            thread.join()
        share = sum(shares) / len(shares) / 100 if shares else None
        meter.utilisation = Utilisation(sec, cpu_sec, share)


def device_reader(device: torch.device) -> Callable[[], int] | None:
    """Return what reads the utilisation of a device in percent; None where nothing can tell."""
    if device.type != "cuda":
        return None

    def read() -> int:
        return int(torch.cuda.utilization(device))

    try:
        read()
    except Exception:  # no NVML, or one that does not know this device
        return None
    return read


def why_no_device_share(device: torch.device) -> str | None:
    """Return why a device's utilisation is not measured, None where it is or there is no device."""
    if device.type == "cpu" or device_reader(device) is not None:
        return None
    return "how busy the device is was not measured: that needs the package nvidia-ml-py"


def total(of_calls: list[Utilisation | None]) -> Utilisation | None:
    """Return the utilisation over several calls; None if one was not measured."""
    known: list[Any] = [each for each in of_calls if each is not None]
    if not known or len(known) < len(of_calls):
        return None
    timed = [each for each in known if each.device_share is not None]
    share = None
    if timed and len(timed) == len(known):
        share = sum(each.device_share * each.sec for each in timed) / sum(e.sec for e in timed)
    return Utilisation(sum(e.sec for e in known), sum(e.cpu_sec for e in known), share)
