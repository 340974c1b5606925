"""How fast the device copies its own memory: the yardstick for all steps.

Next file: `attention.py`.
"""

from statistics import median
from time import perf_counter

import torch

from benchmarks.gpu.stage import Stage
from lade.bench.device import wait_for

# Much more than any cache holds; less on a smaller card.
_COPY_BYTES = {"cuda": 2**31, "cpu": 2**26}
_NUM_COPIES = 8  # in a row, so that launching them costs no extra time
_NUM_REPEATS = 9
_WARM_UP_SEC = 0.5  # clocks of an idle device rise with work


def measure_bandwidth(device: torch.device, stage: Stage) -> None:
    """Copy a large block within the device's memory; bytes read and bytes written both count.

    Raises:
        torch.OutOfMemoryError: there is no room for two blocks.
    """
    num_bytes = _COPY_BYTES[device.type]
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        num_bytes = min(num_bytes, free // 4)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    start = perf_counter()
    while perf_counter() - start < _WARM_UP_SEC:
        _time_copies(source, target)
    times = [_time_copies(source, target) for _ in range(_NUM_REPEATS)]
    sec = median(times) / _NUM_COPIES
    stage.add(
        {
            "copied_bytes": num_bytes,
            "num_repeats": len(times),
            "sec": sec,
            "bytes_per_sec": 2 * num_bytes / sec,
        }
    )


def _time_copies(source: torch.Tensor, target: torch.Tensor) -> float:
    wait_for(source.device)
    start = perf_counter()
    for _ in range(_NUM_COPIES):
        target.copy_(source)
    wait_for(source.device)
    return perf_counter() - start
