"""Process that generates and reports its peak memory: `python -m lade.bench.peak`.

It reads a `Work` as JSON from standard input and writes JSON lines to standard output: a line per
answered batch, and finally the `Peak` or an error. When measuring a baseline it imports neither
numba nor the pool: their memory counts against lade alone. Next file: `memory.py`, which starts
such processes.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lade.bench.settings import Settings
from lade.errors import LadeError


@dataclass(frozen=True)
class Work:
    """What to generate, in plain values that can be sent as JSON."""

    method: str
    model: str | None  # as for `lade.models.load`
    device: str
    dtype: str
    threads: int | None  # None: torch decides
    texts: Sequence[str]  # prompts
    settings: Settings
    max_draft_tokens: int | None
    trust_remote_code: bool = False

    def as_json(self) -> str:
        """Return this as a line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Work":
        """Return the work that `as_json` wrote."""
        values = json.loads(line)
        return cls(**{**values, "settings": Settings(**values["settings"])})


@dataclass(frozen=True)
class Peak:
    """Memory of a process, in bytes.

    On a CPU, it is all resident memory of the process: weights, interpreter, libraries and what
    they allocated. On a GPU, it is what torch has allocated there.
    """

    peak_bytes: int  # while answering the prompts, weights and all included
    resident_bytes: int  # before that, the model loaded and warmed up on one short sequence
    life_peak_bytes: int  # since the process began: loading may need more than generating
    includes_loading: bool  # whether `peak_bytes` includes loading, as the peak could not be reset
    num_tokens: int  # emitted
    threads: int

    @property
    def growth_bytes(self) -> int:
        """Bytes that answering added to the resident memory."""
        return self.peak_bytes - self.resident_bytes


def measure(work: Work, on_batch: Callable[[], None]) -> Peak:
    """Load the model, warm up, answer all prompts and return the peak memory."""
    import torch
    from transformers.utils import logging

    from lade.bench.baselines import warm_up
    from lade.bench.batches import encode_batch, find_pad_token_id, in_batches
    from lade.config import Config
    from lade.models.loading import load

    logging.disable_progress_bar()
    if work.threads is not None:
        torch.set_num_threads(work.threads)
    loaded = load(
        work.model,
        device=work.device,
        dtype=work.dtype,
        trust_remote_code=work.trust_remote_code,
    )
    memory = _Memory(loaded.model.device)
    config = Config(max_draft_tokens=work.max_draft_tokens)
    make = _maker(work.method)
    # With one row: what larger batches need on top must not be allocated before measuring begins.
    warm_up(loaded, make(config), replace(work.settings, batch_size=1, num_return_sequences=1))
    gc.collect()
    life_peak = memory.peak()
    forgot = memory.forget_peak()
    resident = memory.now()
    pad_token_id = find_pad_token_id(loaded)
    options = work.settings.options(pad_token_id)
    method = make(config)
    num_tokens = 0
    for number, texts in enumerate(in_batches(work.texts, work.settings.batch_size)):
        inputs = encode_batch(loaded, texts, pad_token_id)
        torch.manual_seed(work.settings.seed + number)
        num_tokens += method(loaded.model, inputs, options).num_tokens
        on_batch()
    peak = memory.peak()
    return Peak(
        peak_bytes=peak,
        resident_bytes=resident,
        life_peak_bytes=max(life_peak, peak),
        includes_loading=not forgot,
        num_tokens=num_tokens,
        threads=torch.get_num_threads(),
    )


def main() -> None:
    """Do the work described on standard input."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not come between the lines

    def tell(**message: Any) -> None:
        print(json.dumps(message), file=channel, flush=True)

    try:
        work = Work.from_json(sys.stdin.readline())
        tell(peak=asdict(measure(work, lambda: tell(batch=True))))
    except (LadeError, ValueError, OSError) as error:
        tell(error=str(error))
        sys.exit(1)


class _Memory:
    """Peak and current memory on one device."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def now(self) -> int:
        """Return the bytes held now."""
        if self._device.type == "cuda":
            import torch

            return torch.cuda.memory_allocated(self._device)
        return _resident("VmRSS")

    def peak(self) -> int:
        """Return the most bytes held at once since the process began or the peak was reset."""
        if self._device.type == "cuda":
            import torch

            return torch.cuda.max_memory_allocated(self._device)
        return _resident("VmHWM")

    def forget_peak(self) -> bool:
        """Reset the peak to what is held now; return False if the system cannot."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
            return True
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        except OSError:
            return False
        return True


def _resident(field: str) -> int:
    """Return resident memory of this process in bytes: current (VmRSS) or peak (VmHWM).

    Linux counts both for this program alone. `getrusage` does not: its peak starts at that of the
    process that started this one. On other systems, it is all there is, for both.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
        raise LadeError(f"expected {status} to have {field}, got none")
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _maker(name: str) -> Callable[[Any], Any]:
    from lade.bench.baselines import BASELINES

    if name in BASELINES:
        return BASELINES[name].make
    from lade.bench.methods import METHODS

    return METHODS[name].make


if __name__ == "__main__":
    main()
