"""Linear layers and embeddings that compute in float32, whatever their weights are stored in.

Weights stay in the blocks of a GGUF file, or in bfloat16 or float16. Results are those of weights
widened to float32: by this package's kernels (`_packed.py`) if they run, else by torch, some rows
at a time. Weights are never widened as a whole.
"""

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from lade.forward import words
from lade.forward.linear import FORMATS, is_plain, kernels, product

_NUM_CHECKED = 2**18  # numbers that are unpacked in both ways when a format is first used
_TOLERANCE = 2**-16  # of the largest result
_NUM_UNPACKED = 2**18  # numbers that are unpacked at once: they stay in the second cache


class _Packed(nn.Module):
    """A module whose weight is in blocks, or in 16 bits."""

    weight: Any
    _blocks_type: int

    @property
    def ggml_type(self) -> int:
        """GGML's number of the weight's format."""
        return FORMATS.get(self.weight.dtype, self._blocks_type)

    @property
    def blocks(self) -> Tensor:
        """The weight as uint8 [rows, bytes of a row]."""
        weight: Tensor = self.weight.detach()
        return weight if weight.dtype is torch.uint8 else weight.contiguous().view(torch.uint8)

    @property
    def computes_in(self) -> torch.dtype:
        """The dtype of its results."""
        return torch.float32


class PackedLinear(_Packed, nn.Linear):
    """A linear layer whose weight is in blocks, uint8 [out_features, bytes of a row], or 16 bits.

    Args:
        weight: the blocks, kept as they are, such as a memory-mapped part of a file; or numbers of
            16 bits [out_features, in_features].
        ggml_type: GGML's number of the format, one of `words.BLOCKS`.
        in_features: numbers of a row, whole blocks.
        bias: float32 [out_features].
    """

    def __init__(
        self,
        weight: nn.Parameter,
        ggml_type: int,
        in_features: int,
        bias: nn.Parameter | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, len(weight)
        self._blocks_type, self.weight = ggml_type, weight
        self.register_parameter("bias", bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return float32 sums, rounded to the format of the inputs, [..., out_features]."""
        function, found = None, _kernels()
        if not is_whole() and _is_plain_call(inputs, self.weight):
            function = function_of(self.blocks, self.ggml_type)
        if function is None or found is None:
            return self._by_torch(inputs)
        packed = function.address, function.digits
        results = product(*found, inputs.float(), self.blocks, self.bias, packed)
        return results.to(inputs.dtype)

    def _by_torch(self, inputs: Tensor) -> Tensor:
        step, wide = max(_NUM_UNPACKED // self.in_features, 1), inputs.float()
        if self.weight.is_floating_point() and torch.is_grad_enabled():  # it may be trained
            return functional.linear(wide, self.weight.float(), self.bias).to(inputs.dtype)
        parts, blocks, rows = [], self.blocks, None
        if not torch.is_grad_enabled():  # gradients want the rows of each part
            # With memory of its own for each part, 2 GB for an 8B's head: the results of a part
            # lie where its rows were, and the next rows fit there no longer.
            shape = min(step, len(blocks)), self.in_features
            rows = torch.empty(shape, dtype=torch.float32, device="cpu")
        for start in range(0, self.out_features, step):
            packed = blocks[start : start + step]
            parts.append(functional.linear(wide, unpacked(packed, self.ggml_type, rows)))
        results = torch.cat(parts, dim=-1)
        return (results if self.bias is None else results + self.bias).to(inputs.dtype)

    def extra_repr(self) -> str:
        """Return the layer's sizes for `print`."""
        return f"{super().extra_repr()}, format={words.BLOCKS[self.ggml_type][0]}"


class PackedConv1D(_Packed, Conv1D):  # type: ignore[misc]
    """A layer of GPT-2 whose weight is in 16 bits [in_features, out_features]."""

    def forward(self, x: Tensor) -> Tensor:
        """Return float32 sums [..., out_features]."""
        step = max(_NUM_UNPACKED // len(self.weight), 1)
        parts = [x.float() @ each.float() for each in self.weight.split(step, dim=1)]
        sums: Tensor = torch.cat(parts, dim=-1) + self.bias  # type: ignore[operator]
        return sums


class PackedEmbedding(_Packed, nn.Embedding):
    """An embedding whose table is in blocks, uint8 [num_embeddings, bytes of a row], or in 16 bits.

    Args:
        weight, ggml_type: as of a `PackedLinear`.
        embedding_dim: numbers of a row.
        embed_scale: factor of the numbers.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        ggml_type: int,
        embedding_dim: int,
        embed_scale: Tensor | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.register_buffer("embed_scale", embed_scale, persistent=False)
        self.num_embeddings, self.embedding_dim = len(weight), embedding_dim
        self._blocks_type, self.weight = ggml_type, weight
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False

    def forward(self, input: Tensor) -> Tensor:
        """Return float32 [..., embedding_dim]."""
        rows = unpacked(self.weight.index_select(0, input.reshape(-1)), self.ggml_type)
        states = rows.view(*input.shape, self.embedding_dim)
        scale = self._buffers.get("embed_scale")
        return states if scale is None else states * scale


class PackedStack:
    """The matrices of a layer's experts, packed; that of one is unpacked when it is asked for.

    Args:
        parts: uint8 [num_experts, rows, bytes of a row] each; the rows of an expert's parts stand
            one behind the other. Or one stack of 16 bits [num_experts, rows, num_inputs].
        ggml_types: the format of each part of uint8.
        num_inputs: numbers of a row.
        lies: how the module wants matrices: `words.ALTERNATE` if rows of two parts alternate,
            `words.LIE_ACROSS` if inputs are rows.
    """

    def __init__(
        self, parts: Sequence[Tensor], ggml_types: Sequence[int], num_inputs: int, lies: int = 0
    ) -> None:
        self.parts, self._formats, self._lies = [*parts], [*ggml_types], lies
        #: Whether it is one stack in 16 bits, as a module has it.
        self.is_one = parts[0].is_floating_point()
        sizes = sum(each.shape[1] for each in parts), num_inputs
        sizes = sizes[::-1] if lies & words.LIE_ACROSS else sizes
        self.shape = torch.Size((len(parts[0]), *sizes))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, expert: Any) -> Tensor:
        """Return float32 [rows, num_inputs], or [num_inputs, rows]."""
        pairs = zip(self.parts, self.ggml_types, strict=True)
        made = [unpacked(part[int(expert)], format_) for part, format_ in pairs]
        alternates = len(made) > 1 and self._lies & words.ALTERNATE
        matrix = torch.stack(made, dim=1).flatten(0, 1) if alternates else torch.cat(made)
        return matrix.T if self._lies & words.LIE_ACROSS else matrix

    @property
    def ggml_types(self) -> list[int]:
        """GGML's number of the format of each part."""
        return [FORMATS[self.parts[0].dtype]] if self.is_one else self._formats

    def numel(self) -> int:
        """Return how many numbers there are."""
        return self.shape.numel()


def formats_of(model: nn.Module) -> list[str]:
    """Return the block formats of a model's weights."""
    return sorted(words.BLOCKS[format_][0] for format_ in formats_in(model.modules()))


def formats_in(modules: Iterable[nn.Module]) -> set[int]:
    """Return GGML's numbers of the formats of modules' weights."""
    found: set[int] = set()
    for module in modules:
        if isinstance(module, PackedLinear | PackedEmbedding):
            found.add(module.ggml_type)
        stacks = (each for each in vars(module).values() if type(each) is PackedStack)
        found.update(format_ for each in stacks for format_ in each.ggml_types)
    return found


def unpacked(weight: Tensor, format_: int, rows: Tensor | None = None) -> Tensor:
    """Return packed rows as float32 [rows, numbers of a row], in the memory of `rows` if it can."""
    if weight.is_floating_point():
        return weight.float()
    has_rows = is_plain(weight, torch.uint8) and weight.numel() > 0
    function = function_of(weight, format_) if has_rows else None
    if function is None:
        return _by_reference(weight, format_)
    return _by_function(weight, function, rows)


def _by_reference(weight: Tensor, format_: int) -> Tensor:
    """Return packed rows dequantized by GGML's own package; torch knows numbers of 16 bits."""
    for dtype, number in FORMATS.items():
        if number == format_:
            return weight.contiguous().view(dtype).float()
    from gguf import GGMLQuantizationType, dequantize

    rows = dequantize(weight.cpu().numpy(), GGMLQuantizationType(format_))
    return torch.from_numpy(np.ascontiguousarray(rows, np.float32)).to(weight.device)


def _by_function(weight: Tensor, function: "Function", rows: Tensor | None = None) -> Tensor:
    num = weight.shape[1] // function.bytes * function.numbers
    if rows is None:
        rows = torch.empty((len(weight), num), dtype=torch.float32, device="cpu")
    rows = rows[: len(weight)]
    packed, step = (weight.data_ptr(), weight.shape[1], len(weight)), 4 * num
    given = 0, 0, 0, *packed, rows.data_ptr(), step, num, 0, 0
    function.compiled((ctypes.c_int64 * len(given))(*given))
    return rows


# --- compiled -------------------------------------------------------------------------------------


class Function(NamedTuple):
    """The compiled kernel of a format."""

    address: int
    compiled: Any  # see `_packed.product_of`
    numbers: int  # in a block
    bytes: int
    digits: int  # that it reads of inputs: `words.NO_DIGITS`, IN_BYTES or IN_BFLOAT16


def has_digits(format_: int | None) -> bool:
    """Return whether this CPU multiplies weights of a format by digits in bytes (`_digits.py`)."""
    from lade.forward import _digits

    return format_ in _digits.FORMATS


_functions: dict[tuple[int, int], Function | None] = {}


def function_of(
    weight: Tensor, format_: int, there: Sequence[int] = (words.IN_BYTES, words.IN_BFLOAT16)
) -> Function | None:
    """Return the kernel of a format; None if it cannot run, or is wrong.

    The first time, some rows of this weight are also unpacked by GGML's own package. The kernel
    must give the same numbers, and the same products up to rounding. It reads digits of the inputs
    (`_digits.py`, `_amx.py`) if this CPU multiplies the format so, and such digits are there.
    """
    from lade.forward import _amx

    kind = words.NO_DIGITS
    if has_digits(format_):
        kind = words.IN_BYTES
    elif format_ in _amx.FORMATS and weight.shape[1] >= 2 * _amx.LEAST_INPUTS:
        kind = words.IN_BFLOAT16
    digits = kind if kind in there else words.NO_DIGITS
    if (format_, digits) not in _functions:
        _functions[format_, digits] = _compiled(weight, format_, digits)
    return _functions[format_, digits]


def _compiled(weight: Tensor, format_: int, digits: int) -> Function | None:
    found = _kernels()
    is_float = format_ == FORMATS[torch.float32]  # it has no blocks, so rows of any length
    if found is None or is_float:
        return None
    from lade.forward import _amx, _digits, _packed

    looks_up = format_ in (_packed.IQ4_NL, _packed.IQ4_XS, _packed.MXFP4)
    if looks_up and not _packed.HAS_IQ4:
        return None
    compiled = (_packed, _digits, _amx)[digits].product_of(format_)
    function = Function(compiled.address, compiled.ctypes, *words.BLOCKS[format_][1:], digits)
    per_row = weight.shape[1] // function.bytes * function.numbers
    rows = weight[: _NUM_CHECKED // per_row + 1].contiguous()
    mine, theirs = _by_function(rows, function), _by_reference(rows, format_)
    is_right = torch.allclose(mine, theirs, 0.0, 0.0, equal_nan=True)
    given = torch.arange(9 * per_row, dtype=torch.float32, device="cpu")
    given = given.sin().view(9, per_row)
    exact = given.double() @ theirs.double().T
    for num in (1, 4, 9) if bool(exact.isfinite().all()) else ():
        results = product(*found, given[:num], rows, None, (function.address, digits))
        apart = (results.double() - exact[:num]).abs().max()
        is_right = is_right and float(apart) <= _TOLERANCE * float(exact.abs().max())
    return function if is_right else None


_kernels = cache(kernels)


def _is_plain_call(inputs: Tensor, weight: Tensor) -> bool:
    return (
        inputs.is_cpu
        and is_plain(weight, weight.dtype)
        and inputs.numel() > 0
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


_whole = threading.local()


def is_whole() -> bool:
    """Return whether this thread runs by torch; see `made_whole`."""
    return bool(vars(_whole).get("is_on"))


@contextmanager
def made_whole() -> Iterator[None]:
    """Run forwards and packed layers by torch in this thread, as the reference of comparisons."""
    before = is_whole()
    _whole.is_on = True
    try:
        yield
    finally:
        _whole.is_on = before
