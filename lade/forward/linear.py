"""Products of a linear layer by lade's kernels, as jobs of no layers; where kernels can run."""

import ctypes
import os
import platform
from types import ModuleType
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from torch import Tensor, nn

from lade.compat.closeness import float32_precision
from lade.forward import words
from lade.forward.blocks import Blocks
from lade.forward.workers import Run, most_threads, run_job

MOST_TOKENS = 128  # of one job; a longer prompt runs as several
#: Formats of numbers, as kernels count them.
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TENSORS = (Tensor, nn.Parameter, Blocks)
_MOST_ROWS = 64  # of a job: the second cache holds the inputs of so many rows
# A job has no layers here, but looks at the numbers of one; those of its two phases are behind.
_JOB_SIZE = max(words.JOB_SIZE, words.LAYER_SIZE)
_Job = ctypes.c_int64 * (_JOB_SIZE + 64)
_EVERY = np.arange(_MOST_ROWS)


class Products:
    """Products by lade's kernels.

    Args:
        compiled: the kernels.
        run: calls a function on several threads.
    """

    def __init__(self, compiled: ModuleType, run: Run) -> None:
        self._kernels, self._run, self._kept = compiled, run, _EVERY.ctypes.data

    def product(
        self,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        packed: tuple[int, int, bool] | None = None,
    ) -> Tensor:
        """Return what `torch.nn.functional.linear` returns, up to rounding.

        Args:
            inputs: float32 [..., K].
            weight: float32 [N, K], or uint8 [N, bytes of a row].
            bias: float32 [N], or None.
            packed: the words PACKED and HALF of a weight of uint8 blocks, and whether it is
                multiplied by digits.
        """
        num_columns, num_inputs = len(weight), inputs.shape[-1]
        num_rows, given = inputs.numel() // num_inputs, inputs.contiguous()
        results = inputs.new_empty((*inputs.shape[:-1], num_columns))
        most, num_threads = min(num_rows, _MOST_ROWS), most_threads()
        size = self._kernels.scratch_size(most, num_inputs)
        of_inputs = (4 * num_inputs + words.DIGITS_APART) * most
        memory = inputs.new_empty(size * num_threads + 2 * of_inputs, dtype=torch.uint8)
        for start in range(0, num_rows, most):
            job = _Job()
            address = ctypes.addressof(job)
            job[words.NUM_TOKENS] = job[words.NUM_KEPT] = min(most, num_rows - start)
            job[words.HIDDEN], job[words.VOCAB_SIZE] = num_inputs, num_columns
            job[words.NUM_THREADS] = num_threads
            job[words.TILES] = self._kernels.run_tiles().address
            job[words.STATES] = given.data_ptr() + 4 * num_inputs * start
            job[words.LOGITS] = results.data_ptr() + 4 * num_columns * start
            job[words.SCRATCH], job[words.SCRATCH_SIZE] = memory.data_ptr(), size
            job[words.NORMED] = job[words.SCRATCH] + size * num_threads
            job[words.DIGITS] = of_inputs if packed is not None and packed[2] else 0
            job[words.KEPT], job[words.LAYERS] = self._kept, address
            job[words.PHASES] = address + 8 * _JOB_SIZE
            job[words.HEAD + words.WEIGHT] = weight.data_ptr()
            job[words.HEAD + words.BIAS] = 0 if bias is None else bias.data_ptr()
            job[words.HEAD + words.NUM_COLUMNS] = num_columns
            if packed is not None:
                job[words.HEAD + words.PACKED], job[words.HEAD + words.HALF] = packed[:2]
                job[words.HEAD + words.ROW_BYTES] = weight.shape[1]
            self._run(self._kernels.run_forward().address, address, num_threads)
        return results


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
