"""Linear layers that run by whichever is fastest on this machine, torch's product or lade's.

Torch's products of a few rows are far from what memory and cores allow: in float32 they pack the
weights anew in each call, and without AVX-512 those in 16 bits take as many times as there are
rows. Ours (`_kernels.py`) read the weights where they are. Without AMX, torch is faster at many
rows in float32 than in 16 bits, so that widening the weights pays. Which one is fastest is measured
with the first calls, by format, size and number of rows. Figures are in docs/internals/products.md.
"""

import ctypes
import platform
from collections import Counter
from types import MethodType
from typing import Any

import llvmlite.binding
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import linear

from lade.closeness import float32_precision
from lade.compat import Model
from lade.openmp import Run, runner
from lade.products.choice import Fastest, about
from lade.view import viewed

# Weights of fewer elements are done before a thread is told of them.
_MIN_ELEMENTS = 2**16
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TENSORS = (Tensor, nn.Parameter)
# Columns that a thread takes at once: so few that none waits long for another, and many enough that
# their inputs are read once for several.
_FEWEST, _MOST, _SHARES = 12, 240, 4

# So many rows are worth widening weights for, of which so many elements are widened at once: little
# memory, and the second cache holds most of it.
_MANY_ROWS, _NUM_WIDENED = 65, 2**20

# What asking which one is faster takes for each layer, with its share of making the view that asks.
# Where lade's products save less in a forward, only one such forward in so many asks.
_ASKING_SEC, _ASKED_EVERY = 10e-6, 64
# Both round; what differs by more than such a share of the largest result is wrong.
_TOLERANCE = {torch.float32: 256 * 2**-23, torch.bfloat16: 4 * 2**-7, torch.float16: 4 * 2**-10}


_TORCHS, _OURS, _WIDENED = range(3)  # products


class Products:
    """Which products are used for a model's layers, as measured so far.

    Args:
        run: calls a function on several threads.
        job: address of the function.
        most_rows: that it widens at once.
    """

    def __init__(self, run: Run, job: int, most_rows: int) -> None:
        self._run, self._job, self._most_rows = run, job, most_rows
        # By dtype and size of the weights, and about the number of rows.
        self._choices: dict[tuple[torch.dtype, int, int, int], Fastest] = {}
        self._num_layers: Counter[tuple[torch.dtype, int, int]] = Counter()  # of the last view
        self._num_apart = Counter[int]()  # forwards without them, by about their number of rows

    def view(self, model: Model) -> Model:
        """Return a view of a model whose large linear layers choose.

        Layers whose weights are not plain matrices, or whose forward is not torch's, stay as they
        are. What a layer holds is looked at in each call, so that a weight may be changed or
        replaced at any time.
        """
        if nn.Linear.forward is not _FORWARD:
            return model  # somebody wants to see every call

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
        """Return whether the next forward over so many rows is to run by a view.

        Where torch's products are about as fast, asking costs more than it saves: there only a few
        forwards ask, in case a busy machine made lade's look slow.
        """
        size = about(num_rows)
        saved = [
            number * self._choices[*layer, size].saved_sec
            for layer, number in self._num_layers.items()
            if (*layer, size) in self._choices
        ]
        if not saved or sum(saved) > _ASKING_SEC * self._num_layers.total():
            return True
        self._num_apart[size] += 1
        return self._num_apart[size] % _ASKED_EVERY == 0

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
        size = about(num_rows)
        key = weight.dtype, num_columns, num_inputs, size
        choice = self._choices.get(key)
        if choice is None:
            may_widen = num_rows >= _MANY_ROWS and weight.dtype is not torch.float32
            choice = self._choices[key] = Fastest(3 if may_widen else 2)
        if choice.best is None or choice.is_due():
            # What many rows take grows with them: torch's product gains on lade's, so that the few
            # of a class must not speak for the many.
            scale = 2**size / num_rows if num_rows >= _MANY_ROWS else 1.0
            return choice.compare(
                lambda which: self._by(which, inputs, weight, bias), _is_close, scale
            )
        return self._by(choice.best, inputs, weight, bias)

    def _by(self, which: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if which == _TORCHS:
            return linear(inputs, weight, bias)
        return (self._ours if which == _OURS else _widened)(inputs, weight, bias)

    def _ours(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        num_columns, num_inputs = weight.shape
        num_rows = inputs.numel() // num_inputs
        num_threads = torch.get_num_threads()
        dtype = inputs.dtype
        is_narrow = dtype is not torch.float32
        # Each of these lives until the job is done.
        given = (inputs.float() if dtype is torch.float16 else inputs).contiguous()
        of_bias = bias.float() if is_narrow and bias is not None else bias
        results = inputs.new_empty((*inputs.shape[:-1], num_columns), dtype=torch.float32)
        scratch = None
        if dtype is torch.bfloat16:
            size = num_threads * min(num_rows, self._most_rows) * num_inputs
            scratch = inputs.new_empty(size, dtype=torch.float32)
        share = num_columns // (_SHARES * num_threads) // _FEWEST * _FEWEST
        job = _Job(
            given.data_ptr(),
            weight.data_ptr(),
            0 if of_bias is None else of_bias.data_ptr(),
            results.data_ptr(),
            num_rows,
            num_inputs,
            num_columns,
            FORMATS[dtype],
            min(max(share, _FEWEST), _MOST),
            0,
            0 if scratch is None else scratch.data_ptr(),
        )
        self._run(self._job, ctypes.addressof(job), num_threads)
        return results.to(dtype) if is_narrow else results


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
_Job = ctypes.c_int64 * 12


def products_for(model: Model) -> Products | None:
    """Return products that nothing is known of yet; None where lade's cannot run, or no layer.

    The first time on a machine, they are compiled, for some seconds.
    """
    run = runner() if has_vectors() else None
    if run is None or not any(map(_is_candidate, model.modules())):
        return None
    # What is summed in less than float32 is what the user asked for.
    if float32_precision("cpu") != "highest":
        return None
    from lade.products._kernels import MOST_ROWS, run_job  # compiled as they are imported

    return Products(run, run_job.address, MOST_ROWS)


def has_vectors() -> bool:
    """Return whether the CPU converts float16, as those with long vectors all do."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return not is_x86 or bool(llvmlite.binding.get_host_cpu_features().get("f16c"))


def _is_candidate(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.dtype in FORMATS and weight.numel() >= _MIN_ELEMENTS


def _fits(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a product is of plain matrices in memory, of a format that we know."""
    dtype = inputs.dtype
    return (
        dtype in FORMATS
        and weight.dtype is dtype
        and type(weight) in _TENSORS
        and type(inputs) in _TENSORS
        and weight.is_cpu
        and inputs.is_cpu
        and weight.layout is torch.strided
        and weight.is_contiguous()
        and not (weight.is_neg() or inputs.is_neg())  # a bit says that the values are the opposite
        and weight.dim() == 2
        and inputs.shape[-1:] == weight.shape[1:]  # else torch says what is wrong
        and (bias is None or _fits_bias(bias, weight))
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and inputs.numel() > 0
    )


def _fits_bias(bias: Tensor, weight: Tensor) -> bool:
    return (
        type(bias) in _TENSORS
        and bias.is_cpu
        and bias.dtype is weight.dtype
        and bias.shape == weight.shape[:1]
        and bias.is_contiguous()
        and not bias.is_neg()
    )


def _is_close(mine: Tensor, theirs: Tensor) -> bool:
    """Return whether two results differ by rounding alone."""
    finite = theirs.isfinite()
    if not bool(finite.all()):
        if not torch.equal(mine.isfinite(), finite):
            return False
        mine, theirs = mine[finite], theirs[finite]
    if not theirs.numel():
        return True
    most = theirs.abs().max().double()
    apart = (mine.double() - theirs.double()).abs().max()
    return bool(apart <= _TOLERANCE[theirs.dtype] * most)
