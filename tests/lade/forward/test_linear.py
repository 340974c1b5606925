"""Products by lade's kernels: torch's numbers, wherever inputs lie, and of 16-bit weights."""

import itertools
import math
import platform
from pathlib import Path
from typing import Any

import llvmlite.binding
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from lade.forward.linear import kernels, product
from lade.forward.packed import PackedConv1D, PackedLinear
from lade.forward.workers import run_job
from tests.lade.forward.lanes import kernels_with

SIZES = ((256, 256), (300, 1500), (577, 2049), (70_000, 1), (3, 30_001), (1, 65_536))
NARROW = (torch.bfloat16, torch.float16)

pytestmark = pytest.mark.xdist_group("products")  # compiled once


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def made(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found = kernels()
    assert found is not None
    return product(*found, inputs, weight, bias)


def apart(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_results_are_as_exact_as_those_of_torch(size: tuple[int, int]) -> None:
    weight, bias, inputs = (torch.randn(each) for each in (size, (size[0],), (1, 9, size[1])))
    for of_bias in (None, bias):
        wide = None if of_bias is None else of_bias.double()
        exact = linear(inputs.double(), weight.double(), wide)
        errors = []
        for num_rows in (1, 2, 3, 4, 7, 9):
            rows = inputs[:, :num_rows].clone()
            pair = made(rows, weight, of_bias), linear(rows, weight, of_bias)
            assert pair[0].shape == pair[1].shape
            errors.append([float((each - exact[:, :num_rows]).abs().max()) for each in pair])
        most = exact.abs().max()  # of all rows: one sum alone may be nearly 0
        mine, torchs = (max(each) / float(most) for each in zip(*errors, strict=True))
        assert mine <= 2 * torchs + torch.finfo(torch.float32).eps


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_lanes", [8, 16])
def test_vectors_of_either_length_give_the_same(
    num_lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of this machine are one of the two, and rows need not end where a vector does."""
    of_lanes = kernels_with(num_lanes, tmp_path, monkeypatch)
    for num_inputs, num_rows in itertools.product((16, 31, 48, 592, 1040, 2049), (1, 3, 64, 130)):
        inputs, weight = torch.randn(num_rows, num_inputs), torch.randn(50, num_inputs)
        exact = linear(inputs.double(), weight.double())
        assert apart(product(of_lanes, run_job, inputs, weight, None), exact) <= 4 * 2**-23


def test_inputs_may_lie_anywhere() -> None:
    weight, many = torch.randn(300, 256), torch.randn(6, 5, 512)
    every_other = many.as_strided((6, 5, 256), (5 * 512, 512, 2))
    for inputs in (many[:, -1:, :256], many[..., 256:], every_other, many[:, :, :256].mT.mT):
        got = made(inputs, weight, None)
        assert torch.equal(got, made(inputs.clone().contiguous(), weight, None))
        assert apart(got, linear(inputs.double(), weight.double())) < 1e-5


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
def test_infinity_and_nan_pass(dtype: torch.dtype, special: float) -> None:
    layer = nn.Linear(64, 40, bias=False)
    layer.weight[3, 5] = special
    inputs = torch.randn(4, 64)
    if dtype is torch.float32:
        got = made(inputs, layer.weight, None)
    else:
        got = PackedLinear(nn.Parameter(layer.weight.to(dtype)), 0, 64)(inputs)
    wanted = linear(inputs, layer.weight.to(dtype).float())
    assert torch.equal(got.isfinite(), wanted.isfinite())
    assert torch.equal(got[~got.isfinite()].isnan(), wanted[~wanted.isfinite()].isnan())


def test_float16_has_every_number_that_there_is() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    weight = bits.view(torch.float16).nan_to_num(0.0, 0.0, 0.0).view(-1, 32)
    got = PackedLinear(nn.Parameter(weight), 0, 32)(torch.eye(32))
    assert torch.equal(got, weight.float().T)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_layer_of_gpt2_widens_its_weight(dtype: torch.dtype) -> None:
    layer, inputs = Conv1D(48, 96).to(dtype), torch.randn(2, 3, 96)
    wanted = inputs @ layer.weight.float() + layer.bias.float()
    layer.__class__, layer.bias = PackedConv1D, nn.Parameter(layer.bias.float())
    assert torch.allclose(layer(inputs), wanted, atol=1e-5)


def test_a_cpu_without_long_vectors_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("other CPUs all convert float16")
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: {"sse2": True})
    assert kernels() is None
