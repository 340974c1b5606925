"""Products of a linear layer by lade's kernels, as jobs of one phase; where kernels can run."""

import ctypes
import os
import platform
from types import ModuleType
from typing import Any

import llvmlite.binding
import torch
from torch import Tensor, nn

from lade.compat.closeness import float32_precision
from lade.forward import words
from lade.forward.blocks import Blocks
from lade.forward.workers import Run, most_threads, run_job

MOST_TOKENS = 128  # of one job; a longer prompt runs as several
#: GGML's numbers of formats that are no blocks.
FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
_TENSORS = (Tensor, nn.Parameter, Blocks)
_MOST_ROWS = 64  # of a job: the second cache holds the inputs of so many rows
# Two phases, digits and products, and the counters of each.
_Job = ctypes.c_int64 * (words.JOB_SIZE + 2 * (words.ROW_SIZE + 16))


def product(
    compiled: ModuleType,
    run: Run,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    packed: tuple[int, int] | None = None,
) -> Tensor:
    """Return what `torch.nn.functional.linear` returns, up to rounding.

    Args:
        compiled, run: as `kernels` gives them.
        inputs: float32 [..., K].
        weight: float32 [N, K], or uint8 [N, bytes of a row].
        bias: float32 [N], or None.
        packed: the word PACKED of a weight of uint8 blocks, and the kind of digits that it is
            multiplied by.
    """
    num_columns, num_inputs = len(weight), inputs.shape[-1]
    num_rows, given = inputs.numel() // num_inputs, inputs.contiguous()
    results = inputs.new_empty((*inputs.shape[:-1], num_columns))
    most, num_threads = min(num_rows, _MOST_ROWS), most_threads()
    scratch = size = compiled.scratch_size(most)
    digits = words.NO_DIGITS if packed is None else packed[1]
    if digits == words.IN_BFLOAT16:
        size += turned_size(most, num_inputs)
    # Inputs, and their digits behind them.
    of_digits = (4 * num_inputs + words.DIGITS_APART) * most if digits else 0
    memory = inputs.new_empty(size * num_threads + 3 * of_digits, dtype=torch.uint8)
    for start in range(0, num_rows, most):
        job = _Job()
        address = ctypes.addressof(job)
        job[words.NUM_TOKENS] = min(most, num_rows - start)
        job[words.NUM_PHASES] = 2 if digits else 1
        job[words.NUM_THREADS] = num_threads
        job[words.TILES] = compiled.run_tiles().address
        job[words.NORMED] = given.data_ptr() + 4 * num_inputs * start
        job[words.LOGITS] = results.data_ptr() + 4 * num_columns * start
        job[words.SCRATCH], job[words.SCRATCH_SIZE] = memory.data_ptr(), size
        row = words.JOB_SIZE
        job[words.PHASES] = address + 8 * (row + 2 * words.ROW_SIZE)
        job[words.LIST] = address + 8 * row
        if digits:
            copied = memory[size * num_threads :].view(torch.float32)[: num_inputs * most]
            rows = given.view(num_rows, num_inputs)[start : start + most]
            copied[: rows.numel()] = rows.flatten()
            job[words.NORMED] = copied.data_ptr()
            job[words.DIGITS], job[words.KIND] = of_digits, digits
            job[words.TURNED] = scratch if digits == words.IN_BFLOAT16 else 0
            job[row + words.RUN] = compiled.run_digits().address
            job[row + words.NUM_GIVEN] = num_inputs
            row += words.ROW_SIZE
        job[row + words.NUM_PRODUCTS] = 1
        job[row + words.GIVEN], job[row + words.NUM_GIVEN] = words.NORMED, num_inputs
        job[row + words.TARGET], job[row + words.NUM_MADE] = words.LOGITS, num_columns
        job[row + words.WEIGHT], job[row + words.NUM_COLUMNS] = weight.data_ptr(), num_columns
        job[row + words.NUM_INPUTS] = num_inputs
        job[row + words.BIAS] = 0 if bias is None else bias.data_ptr()
        if packed is not None:
            job[row + words.PACKED], job[row + words.ROW_BYTES] = packed[0], weight.shape[1]
        run(compiled.run_forward().address, address, num_threads)
    return results


def turned_size(num_rows: int, num_inputs: int) -> int:
    """Return the bytes for what `_amx.py` turns of so many rows, in whole tiles, and its header."""
    return 4096 + -(-6 * num_inputs * -(-num_rows // 16) * 16 // 4096) * 4096


def kernels() -> tuple[ModuleType, Run] | None:
    """Return the compiled kernels and the function that runs them; None if they cannot run.

    The first time on a machine, they are compiled, which takes some seconds.
    """
    # CPUs with long vectors all convert float16.
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    has_vectors = not is_x86 or llvmlite.binding.get_host_cpu_features().get("f16c")
    # The user may have asked torch for sums of less than float32.
    if os.name != "posix" or not has_vectors or float32_precision("cpu") != "highest":
        return None
    from lade.forward import _kernels, _tiles

    for compiled in (_tiles.run_tiles, _kernels.run_forward, _kernels.run_attention):
        compiled()
    return _kernels, run_job


def compile_kernels() -> None:
    """Compile what any model may need, but for packed weights; `kernels` is what all need."""
    compiled = kernels()
    if compiled is not None:
        from lade.forward._latents import run_latents
        from lade.forward._recurrence import run_recurrence

        of_some = compiled[0].run_convolution, compiled[0].run_experts, run_recurrence, run_latents
        for each in of_some:
            each()


def is_plain(weight: Any, dtype: torch.dtype) -> bool:
    """Return whether a weight is a plain matrix, or row, of a format in memory."""
    return (
        type(weight) in _TENSORS
        and weight.layout is torch.strided
        and weight.dtype is dtype
        and weight.is_cpu
        and weight.is_contiguous()
        and not weight.is_neg()  # torch's lazy negation
    )
