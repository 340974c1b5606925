"""Peak memory of methods, each run in a fresh process so that no peak hides another.

The headline is the peak of the whole process while it generates, since that is what a machine must
have; the growth over the loaded and warmed-up model is shown beside it. Loading a model may take
more than generating with it, so the peak is reset after loading, as Linux and CUDA allow. The C
allocator returns freed memory at once: by default glibc keeps some of it, or not, by chance (the
same run of plain `generate` peaked at 1.4 or at 2.0 GiB). The process of plain decoding imports
neither numba nor the pool: their memory counts against lade alone.
"""

import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.alone import alone
from lade.models.settings import Settings

if TYPE_CHECKING:
    from benchmarks.prompts import Chosen

_MIB = 2**20
# For glibc; both fixed, so that neither grows with what was freed. Other systems ignore them.
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def measure(
    method: str, loading: Mapping[str, Any], texts: Sequence[str], new: int
) -> dict[str, Any]:
    """Load a model, warm up, answer all prompts and return the peak memory, in bytes.

    On a CPU, it is all resident memory of the process: weights, interpreter, libraries and what
    they allocated. On a GPU, it is what torch has allocated there.
    """
    import torch

    from lade.models import encode, load

    how = {**loading}
    loaded = load(how.pop("model"), **how)
    device = loaded.model.device
    if method == "plain":
        generate = loaded.model.generate
    else:
        from benchmarks.methods import METHODS, Given

        ours = METHODS[method].make(Given())

        def generate(max_new_tokens: int, **inputs: Any) -> Any:
            return ours(loaded.model, inputs, Settings(max_new_tokens).options())

    def answer(text: str, num_tokens: int) -> None:
        generate(**encode(loaded.tokenizer, text, device), max_new_tokens=num_tokens)

    answer(texts[0], 8)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        before = _resident("VmRSS")
    for text in texts:
        answer(text, new)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else _resident("VmHWM")
    named = {
        "model": Path(loaded.name).name,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(device),
        "threads": torch.get_num_threads(),
    }
    return {"method": method, "peak_bytes": peak, "growth_bytes": peak - before, "model": named}


def _resident(field: str) -> int:
    """Return resident memory of this process in bytes: current (VmRSS) or peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def run(
    loading: Mapping[str, Any],
    chosen: "Chosen",
    methods: Sequence[str],
    settings: Settings,
    num_repeats: int,
    file: Path | None,
) -> None:
    """Measure methods in turn; print and write the results, even after an interruption."""
    from benchmarks.environment import environment
    from benchmarks.report import Keeping, progress_bar, sheet, show, speedup_text

    texts = [prompt.text for prompt in chosen.prompts]
    os.environ.update(_GIVE_BACK)  # for the processes
    peaks: list[dict[str, Any]] = []
    with Keeping(peaks) as kept, progress_bar() as bars:
        task = bars.add_task("measuring", total=len(methods) * num_repeats)
        for _ in range(num_repeats):
            for name in methods:
                peaks.append(alone(measure, name, loading, texts, settings.max_new_tokens))
                bars.advance(task)
    described, summaries = peaks[0]["model"], dict[str, dict[str, Any]]()
    for name in dict.fromkeys(peak["method"] for peak in peaks):
        mine = [peak for peak in peaks if peak["method"] == name]
        names = ("peak_bytes", "growth_bytes")
        summary = {what: int(median(peak[what] for peak in mine)) for what in names}
        first = summaries.get(methods[0], summary)["peak_bytes"]
        summaries[name] = {**summary, "peak_ratio": round(summary["peak_bytes"] / first, 4)}
    rows = [
        (
            *("", name, f"{each['peak_bytes'] / _MIB:.0f}", speedup_text(each["peak_ratio"])),
            f"{each['growth_bytes'] / _MIB:.0f}",
        )
        for name, each in summaries.items()
    ]
    title = f"Peak memory of a process on {described['device']} in {described['dtype']}"
    headings = ("", "method", "peak, MiB", "of the first", "over loaded model, MiB")
    content = {
        "environment": environment(),
        "settings": {
            **described,
            **asdict(settings),
            "prompts": chosen.described,
            "repeats": num_repeats,
            "interrupted": kept.by is not None,
        },
        "summary": summaries,
    }
    show(file, content, sheet(title, headings, [rows]))
    kept.end(f"stopped after {len(peaks)} of {len(methods) * num_repeats} processes")
