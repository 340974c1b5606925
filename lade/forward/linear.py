"""Linear layers that run by the fastest product on this machine, torch's or lade's.

torch's products of a few rows are far slower than memory and cores allow: in float32 they pack the
weights anew in each call, and in 16 bits without AVX-512, n rows take n times as long as one.
lade's products, which are jobs of no layers, read the weights where they are. Without AMX, torch is
faster at many rows in float32 than in 16 bits, so that widening the weights pays. The first calls
measure the fastest product, by dtype, size and number of rows: layers of one size run them in turn.
"""

import ctypes
import math
import os
import platform
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from types import MethodType, ModuleType
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import linear

from lade.compat import Model
from lade.compat.closeness import float32_precision, limit_of
from lade.compat.view import viewed
from lade.forward import words
from lade.forward.comparing import Forward, why_wrong
from lade.forward.workers import Run, most_threads, run_job

MOST_TOKENS = 128  # of one job; a longer prompt runs as several

# Smaller weights are multiplied faster than a thread wakes.
_MIN_ELEMENTS = 2**16
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TENSORS = (Tensor, nn.Parameter)
# Weights are widened to float32 from so many rows on, and so many elements at once: they take
# little memory, and the second cache holds most of them.
_MANY_ROWS, _NUM_WIDENED = 65, 2**20

# Seconds to choose a product, for each layer, with its share of making the view.
_ASKING_SEC = 10e-6
_NUM_TIMES = 2  # that each product runs before the fastest one is known


_TORCHS, _OURS, _WIDENED = range(3)  # products
_MOST_ROWS = 64  # of a job: the second cache holds the inputs of so many rows
# A job has no layers here, but looks at the numbers of one; those of its two phases are behind.
_JOB_SIZE = max(words.JOB_SIZE, words.LAYER_SIZE)
_Job = ctypes.c_int64 * (_JOB_SIZE + 64)
_EVERY = np.arange(_MOST_ROWS)


class _FastestProduct:
    """Which of some products of a size is the fastest; each runs a few times, in turn, first."""

    def __init__(self, num_ways: int) -> None:
        self._sec = [math.inf] * num_ways  # the shortest of each
        self._num_left = _NUM_TIMES * num_ways

    @property
    def saved_sec(self) -> float:
        """Seconds that a call saves beside torch's product; infinite if not known yet."""
        return math.inf if self._num_left > 0 else self._sec[_TORCHS] - min(self._sec)

    def run(self, by: Callable[[int], Tensor], scale: float) -> Tensor:
        """Return a product by the fastest way, or by the next to be timed.

        `scale` is what times are multiplied by, so that they can be held against others'.
        """
        if self._num_left <= 0:
            return by(self._sec.index(min(self._sec)))
        self._num_left -= 1
        which, begin = self._num_left % len(self._sec), perf_counter()
        result = by(which)
        self._sec[which] = min(self._sec[which], scale * (perf_counter() - begin))
        return result


class Products:
    """The products that a model's linear layers use, by the times measured so far.

    Args:
        compiled: the kernels.
        run: calls a function on several threads.
        limit: on the difference of logits, as `limit_of` returns it.

    Attributes:
        why_not: why they are not used any more; None if they may be.
    """

    has_one_way = False  # other numbers of rows may use other products
    is_packed = False

    def __init__(self, compiled: ModuleType, run: Run, limit: float = math.inf) -> None:
        self._kernels, self._run, self._kept = compiled, run, _EVERY.ctypes.data
        self.why_not: str | None = None
        self._limit = limit
        # By dtype and size of the weights, and about the number of rows.
        self._choices: dict[tuple[torch.dtype, int, int, int], _FastestProduct] = {}
        self._num_layers: Counter[tuple[torch.dtype, int, int]] = Counter()  # of the last view

    def settle(self, by_torch: Forward, by_products: Forward) -> None:
        """Compare forwards by these products with the model's own; see `FusedForwards.settle`."""
        self.why_not = why_wrong(
            *(by_torch, by_products, self._limit, "product"), is_rounded=True, may_choose=True
        )

    def view(self, model: Model) -> Model:
        """Return a view of a model whose large linear layers run by the fastest product.

        Layers whose weights are not plain matrices, or whose forward is not torch's, stay as they
        are. Each call reads the weight anew, so that it may be changed or replaced at any time.
        """
        if self.why_not is not None or nn.Linear.forward is not _FORWARD:
            return model  # wrong, or somebody wants to see every call

        def forward(layer: Any, inputs: Tensor) -> Tensor:
            return self.product(inputs, layer.weight, layer.bias)

        num_layers: Counter[tuple[torch.dtype, int, int]] = Counter()

        def change(module: nn.Module) -> dict[str, Any] | None:
            if not _is_candidate(module):
                return None
            weight: Any = module.weight
            num_layers[weight.dtype, *weight.shape] += 1
            return {"forward": MethodType(forward, module)}

        view = viewed(model, change)
        self._num_layers = num_layers
        return view

    def pays(self, num_rows: int) -> bool:
        """Return whether the next forward over so many rows should run by a view.

        Where torch's products are about as fast, asking costs more than it saves.
        """
        size = _about(num_rows)
        saved = [
            number * self._choices[*layer, size].saved_sec
            for layer, number in self._num_layers.items()
            if (*layer, size) in self._choices
        ]
        return not saved or sum(saved) > _ASKING_SEC * self._num_layers.total()

    def product(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return what `torch.nn.functional.linear` returns, up to rounding.

        Args:
            inputs: [..., K].
            weight: [N, K].
            bias: [N], or None.
        """
        if functional.linear is not _LINEAR or not _fits(inputs, weight, bias):  # it is patched
            return functional.linear(inputs, weight, bias)
        num_columns, num_inputs = weight.shape
        num_rows = inputs.numel() // num_inputs
        size = _about(num_rows)
        key = weight.dtype, num_columns, num_inputs, size
        choice = self._choices.get(key)
        if choice is None:
            may_widen = num_rows >= _MANY_ROWS and weight.dtype is not torch.float32
            choice = self._choices[key] = _FastestProduct(3 if may_widen else 2)
        # What many rows take grows with them: torch's product gains on lade's, so that the few of a
        # class must not speak for the many.
        scale = 2**size / num_rows if num_rows >= _MANY_ROWS else 1.0
        return choice.run(lambda which: self._by(which, inputs, weight, bias), scale)

    def _by(self, which: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if which == _TORCHS:
            return linear(inputs, weight, bias)
        return (self.by_job if which == _OURS else _widened)(inputs, weight, bias)

    def by_job(
        self,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        packed: tuple[int, int] | None = None,
        has_dots: bool = True,
    ) -> Tensor:
        """Return a product by lade's kernels.

        Args:
            inputs, weight, bias: as for `product`.
            packed: the words PACKED and HALF of a weight of uint8 blocks; inputs and results are
                float32 then.
            has_dots: whether the CPU's instruction for pairs of bfloat16 may be used.
        """
        num_columns, num_inputs = len(weight), inputs.shape[-1]
        num_rows, dtype = inputs.numel() // num_inputs, inputs.dtype
        given = (inputs if dtype is torch.float32 else inputs.float()).contiguous()
        results = inputs.new_empty((*inputs.shape[:-1], num_columns))
        most, num_threads = min(num_rows, _MOST_ROWS), most_threads()
        arranged = words.PAIRS if dtype is torch.bfloat16 else words.PLAIN
        if arranged == words.PAIRS and has_dots and self._kernels.may_dot(num_inputs):
            arranged = words.NARROW
        size = self._kernels.scratch_size(most, num_inputs)
        memory = inputs.new_empty(size * num_threads + 4 * num_inputs * most, dtype=torch.uint8)
        for start in range(0, num_rows, most):
            job = _Job()
            address = ctypes.addressof(job)
            job[words.NUM_TOKENS] = job[words.NUM_KEPT] = min(most, num_rows - start)
            job[words.HIDDEN], job[words.VOCAB_SIZE] = num_inputs, num_columns
            job[words.NUM_THREADS], job[words.FORMAT] = num_threads, FORMATS[dtype]
            job[words.ARRANGED], job[words.TILES] = arranged, self._kernels.run_tiles().address
            job[words.STATES] = given.data_ptr() + 4 * num_inputs * start
            job[words.LOGITS] = results.data_ptr() + dtype.itemsize * num_columns * start
            job[words.SCRATCH], job[words.SCRATCH_SIZE] = memory.data_ptr(), size
            job[words.NORMED] = job[words.SCRATCH] + size * num_threads
            job[words.KEPT], job[words.LAYERS] = self._kept, address
            job[words.PHASES] = address + 8 * _JOB_SIZE
            job[words.HEAD + words.WEIGHT] = weight.data_ptr()
            job[words.HEAD + words.BIAS] = 0 if bias is None else bias.data_ptr()
            job[words.HEAD + words.NUM_COLUMNS] = num_columns
            if packed is not None:
                job[words.HEAD + words.PACKED], job[words.HEAD + words.HALF] = packed
                job[words.HEAD + words.ROW_BYTES] = weight.shape[1]
            self._run(self._kernels.run_forward().address, address, num_threads)
        return results


def _widened(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a product in 16 bits that torch computes in float32, some columns at a time."""
    num_columns, num_inputs = weight.shape
    wide = inputs.float()
    results = inputs.new_empty((*inputs.shape[:-1], num_columns))
    step = max(_NUM_WIDENED // num_inputs, 1)
    for start in range(0, num_columns, step):
        part = slice(start, start + step)
        of_bias = None if bias is None else bias[part].float()
        results[..., part] = linear(wide, weight[part].float(), of_bias)
    return results


_FORWARD = nn.Linear.forward
_LINEAR = torch._C._nn.linear


def products_for(model: Model) -> Products | None:
    """Return products that nothing is known of yet; None where lade's cannot run, or no layer."""
    compiled = kernels() if any(map(_is_candidate, model.modules())) else None
    return None if compiled is None else Products(*compiled, limit_of(model))


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


def _is_candidate(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.dtype in FORMATS and weight.numel() >= _MIN_ELEMENTS


def _fits(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether inputs and weight are plain matrices in memory, of a dtype that runs."""
    dtype = inputs.dtype
    return (
        dtype in FORMATS
        and is_plain(weight, dtype)
        and type(inputs) in _TENSORS
        and inputs.is_cpu
        and not inputs.is_neg()
        and weight.dim() == 2
        and inputs.shape[-1:] == weight.shape[1:]  # else torch raises its own error
        and (bias is None or (is_plain(bias, dtype) and bias.shape == weight.shape[:1]))
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and inputs.numel() > 0
    )


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


def _about(num_rows: int) -> int:
    """Return the class of a number of rows: up to a power of two, or above 1,024."""
    return min((num_rows - 1).bit_length(), 11)
