"""Products for few rows: torch's numbers, whatever happens to weights; the faster one is used."""

import copy
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

import lade
from lade.forward import linear as file
from lade.forward.linear import Products, kernels, products_for
from lade.forward.workers import run_job
from lade.probing.profile import profile_of
from tests.grids import thinned
from tests.lade.both import ONE, same_as_generate
from tests.lade.forward.lanes import kernels_with
from tests.lade.tiny import tiny_model

FORMATS = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ((256, 256), (300, 1500), (577, 2049), (70_000, 1), (3, 30_001), (1, 65_536))

pytestmark = pytest.mark.xdist_group("products")  # compiled once


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no job run whole forwards in which these products have no part."""
    monkeypatch.setattr("lade.probing.profile.forwards_for", lambda *_: None)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use lade's products wherever there is a choice."""
    known = {"_num_left": 0, "_sec": [math.inf, 0.0, math.inf]}  # lade's are the second
    monkeypatch.setattr(
        file._FastestProduct, "__init__", lambda self, _: self.__dict__.update(known)
    )


def made() -> Products:
    found = kernels()
    assert found is not None
    return Products(*found)


def wide_model(**options: Any) -> Any:
    """A tiny model with linear layers of so many weights that products are chosen for them."""
    sizes = {"hidden_size": 256, "intermediate_size": 300, "vocab_size": 400}
    return tiny_model("llama", seed=1, **{"dtype": torch.float32, **sizes, **options})


def apart(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).abs().max() / exact.abs().max())


def exact_of(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(inputs.double(), weight.double(), None if bias is None else bias.double())


# --- the numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_results_are_as_exact_as_those_of_torch(
    dtype: torch.dtype, size: tuple[int, int], always: None
) -> None:
    num_columns, num_inputs = size
    weight, bias = (torch.randn(each).to(dtype) for each in (size, (num_columns,)))
    product, inputs = made().product, torch.randn(1, 9, num_inputs).to(dtype)
    for of_bias in (None, bias):
        exact = exact_of(inputs, weight, of_bias)
        errors = []
        for num_rows in (1, 2, 3, 4, 7, 9):
            rows = inputs[:, :num_rows].clone()
            got, theirs = product(rows, weight, of_bias), linear(rows, weight, of_bias)
            assert got.shape == theirs.shape
            assert got.dtype == dtype
            of_rows = exact[:, :num_rows]
            errors.append([float((each - of_rows).abs().max()) for each in (got, theirs)])
        most = exact.abs().max()  # of all rows: one sum alone may be nearly 0
        mine, torchs = (max(each) / float(most) for each in zip(*errors, strict=True))
        assert mine <= 2 * torchs + torch.finfo(dtype).eps


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_lanes", [8, 16])
def test_vectors_of_either_length_give_the_same(
    num_lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of this machine are one of the two, and rows need not end where a vector does."""
    products = Products(kernels_with(num_lanes, tmp_path, monkeypatch), run_job)
    for dtype, num_inputs, num_rows in itertools.product(
        FORMATS, (16, 31, 48, 592, 1040, 2049), (1, 3, 64, 130)
    ):
        inputs = torch.randn(num_rows, num_inputs).to(dtype)
        weight = torch.randn(50, num_inputs).to(dtype)
        exact = linear(inputs.double(), weight.double())
        limit = 4 * torch.finfo(dtype).eps
        assert apart(products.by_job(inputs, weight, None), exact) <= limit


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_inputs_may_lie_anywhere(dtype: torch.dtype, always: None) -> None:
    weight, many = torch.randn(300, 256).to(dtype), torch.randn(6, 5, 512).to(dtype)
    every_other = many.as_strided((6, 5, 256), (5 * 512, 512, 2))
    for inputs in (many[:, -1:, :256], many[..., 256:], every_other, many[:, :, :256].mT.mT):
        got = made().product(inputs, weight, None)
        assert torch.equal(got, made().product(inputs.clone().contiguous(), weight, None))
    last = many[:, -1:, :256]  # as a model's head takes them
    assert apart(made().product(last, weight, None), linear(last, weight).double()) < 0.02


@pytest.mark.parametrize("dtype", FORMATS[1:], ids=str)
def test_widened_products_are_as_exact_as_those_of_torch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "_NUM_WIDENED", 100 * 256)  # in four parts, and in one
    for num_columns, num_inputs in ((350, 256), (60, 70_000)):
        weight, bias = torch.randn(num_columns, num_inputs), torch.randn(num_columns)
        weight, bias = weight.to(dtype), bias.to(dtype)
        inputs = torch.randn(2, 40, num_inputs).to(dtype)
        for of_bias in (None, bias):
            exact = exact_of(inputs, weight, of_bias)
            got = file._widened(inputs, weight, of_bias)
            assert got.shape == exact.shape
            assert got.dtype == dtype
            assert apart(got, exact) <= apart(linear(inputs, weight, of_bias), exact)


def test_float16_has_every_number_that_there_is(always: None) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    weight = torch.stack([every, torch.zeros_like(every)], dim=1)
    got = made().product(torch.tensor([[1.0, 0.0]], dtype=torch.float16), weight, None)[0]
    assert torch.equal(got.isnan(), every.isnan())
    assert torch.equal(got[~every.isnan()], every[~every.isnan()])


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_infinity_and_nan_pass(dtype: torch.dtype, special: float, always: None) -> None:
    weight = torch.ones(256, 256, dtype=dtype)
    weight[3, 5] = special
    got = made().product(torch.ones(2, 256, dtype=dtype), weight, None)
    expected = linear(torch.ones(2, 256, dtype=dtype), weight)
    assert torch.equal(got.nan_to_num(1.5), expected.nan_to_num(1.5))


# --- which of them ----------------------------------------------------------------------------


class Clock:
    """Seconds that pass as products are run: so many for torch's, and so many for lade's."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, theirs: float, ours: float, widened: float = 0.0
    ) -> None:
        self.now, self.theirs, self.ours, self.widened = 0.0, theirs, ours, widened
        self.ran: list[str] = []
        own = Products.by_job
        monkeypatch.setattr(file, "perf_counter", lambda: self.now)
        monkeypatch.setattr(file, "_widened", lambda *args: self._run("widened", linear, args))
        monkeypatch.setattr(file, "linear", lambda *args: self._run("theirs", linear, args))
        monkeypatch.setattr(Products, "by_job", lambda *args: self._run("ours", own, args))

    def _run(self, name: str, product: Any, args: Any) -> Tensor:
        self.ran.append(name)
        self.now += getattr(self, name)
        result: Tensor = product(*args)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fastest", ["ours", "theirs", "widened"])
def test_the_fastest_one_is_used(
    fastest: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few rows there are two; of many in 16 bits there is a third."""
    times = {"ours": 1e-4, "theirs": 1e-4, "widened": 1e-4, fastest: 0.8e-4}
    clock = Clock(monkeypatch, **times)
    products, weight = made(), torch.randn(256, 256).to(dtype)
    for num_rows in (1, 8, 65):
        clock.ran.clear()
        has_third = num_rows > 64 and dtype == torch.bfloat16
        inputs = torch.randn(num_rows, 256).to(dtype)
        for _ in range(6 if has_third else 4):
            got = products.product(inputs, weight, None)
            assert apart(got, exact_of(inputs, weight, None)) < 0.02
        names = {"ours", "theirs", "widened"} if has_third else {"ours", "theirs"}
        assert {name: clock.ran.count(name) for name in clock.ran} == dict.fromkeys(
            names, len(clock.ran) // len(names)
        )
        clock.ran.clear()
        for _ in range(50):
            products.product(inputs, weight, None)
        if fastest in names:
            assert clock.ran == [fastest] * 50


@pytest.mark.parametrize(("ours", "pays"), [(1e-4 - 5e-6, False), (0.5e-4, True)])
def test_forwards_over_one_token_ask_where_it_pays(
    ours: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, theirs=1e-4, ours=ours)
    products = made()
    view = products.view(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 300)))
    for _ in range(4):
        assert products.pays(1)  # until it is known
        view(torch.randn(1, 256))
    assert products.pays(1) == pays


def test_wrong_products_are_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Products.by_job
    monkeypatch.setattr(Products, "by_job", lambda *args: own(*args) * 1.01)
    model = wide_model()
    with pytest.warns(RuntimeWarning, match="product is not used, as its logits differ"):
        lade.warm_up(model)
    products = profile_of(model).fast_views_for(model)
    assert products is not None
    assert products.view(model) is model


# --- a model's layers ---------------------------------------------------------------------------


def change(weight: Tensor, number: int) -> None:
    """Change weights in one of several ways; torch counts no write through `.data`."""
    row = number % weight.shape[0]
    if number % 4 == 0:
        weight.neg_()
    elif number % 4 == 1:
        weight.data.add_(0.01)
    elif number % 4 == 2:
        weight.data[row, number % weight.shape[1]] = 3.0
    else:
        weight[row].zero_()


def test_whatever_changes_weights_the_next_product_is_of_the_new_ones(always: None) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(256, 256), nn.Linear(256, 300, bias=False)
    model = nn.Sequential(*layers)
    view = made().view(model)
    inputs = torch.randn(2, 256)
    for number in range(1000):
        layer = layers[number % 2]
        if number % 10 == 9:
            layer.weight = nn.Parameter(torch.randn_like(layer.weight))
        elif number % 50 == 8:
            model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        else:
            change(layer.weight, number)
        assert apart(view(inputs), model(inputs).double()) < 1e-5


def test_layers_that_are_no_plain_matrix_stay_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(Products, "by_job", never)
    patched, of_hook = nn.Linear(256, 256), nn.Linear(256, 256)
    patched.__dict__["forward"] = lambda inputs: inputs
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(256, 256))
    transposed = nn.Linear(256, 256)
    transposed.weight = nn.Parameter(torch.randn(256, 256).T)
    others = (Conv1D(256, 256), patched, parametrized, transposed)
    model = nn.Sequential(*others, nn.Linear(256, 256).double(), nn.Linear(16, 16))
    view = made().view(model)
    inputs = torch.randn(3, 256)
    for mine, theirs in zip(view, model, strict=True):
        of_layer = inputs[:, :16].contiguous() if mine is view[-1] else inputs
        of_layer = of_layer.double() if theirs is model[-2] else of_layer
        assert torch.equal(mine(of_layer), theirs(of_layer))
    plain = made().view(of_hook)
    with torch.enable_grad():
        assert plain(inputs).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert plain(inputs).dtype == torch.bfloat16


def test_hooks_of_a_layer_are_called(always: None) -> None:
    layer = nn.Linear(256, 256)
    layer.register_forward_hook(lambda module, args, out: out + 1)
    view = made().view(nn.Sequential(layer))
    inputs = torch.randn(3, 256)
    torch.testing.assert_close(view(inputs), linear(inputs, layer.weight, layer.bias) + 1)
    assert "forward" not in vars(layer)


# --- calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sampled", thinned([False, True], True), ids=["greedy", "sampled"])
def test_the_text_is_that_of_generate(is_sampled: bool, always: None) -> None:
    model = wide_model()
    for seed in range(4):
        same_as_generate(model, ONE, accept=0.7, seed=seed, do_sample=is_sampled)
    products = profile_of(model).fast_views_for(model)
    assert isinstance(products, Products)
    assert {key[1:3] for key in products._choices} >= {
        (256, 256),
        (300, 256),
        (256, 300),
        (400, 256),
    }


def test_a_cpu_without_long_vectors_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", dict)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert products_for(wide_model()) is None
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert products_for(wide_model()) is not None


def test_what_does_not_fit_is_said_by_torch(always: None) -> None:
    weight, inputs = torch.randn(300, 256), torch.randn(4, 256)
    product = made().product
    for wrong in (
        (torch.randn(4, 128), weight, None),
        (torch.randn(2, 2, 512), weight, None),
        (inputs, weight, torch.randn(299)),
        (inputs, weight, torch.randn(300, dtype=torch.bfloat16)),
        (inputs.double(), weight, None),
    ):
        with pytest.raises(RuntimeError):
            product(*wrong)
    of_one = torch.randn(1)
    assert torch.equal(product(inputs, weight, of_one), linear(inputs, weight, of_one))
    assert product(torch.randn(256), weight, None).shape == (300,)
    assert product(torch.randn(0, 256), weight, None).shape == (0, 300)


# --- weights that are no plain matrices ---------------------------------------------------------


def sparse(weight: Tensor) -> Tensor:
    return weight.relu().to_sparse_csr()


def negated(tensor: Tensor) -> Tensor:
    """Return the opposite of a tensor, by its negative bit alone."""
    return torch._neg_view(tensor)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("change", [sparse, negated])
def test_a_model_with_such_weights_has_drafts_and_no_warning(change: Any, always: None) -> None:
    model = wide_model()
    for layer in model.model.layers:
        weight = layer.mlp.down_proj.weight.detach()
        layer.mlp.down_proj.weight = nn.Parameter(change(weight), requires_grad=False)
    for _ in range(2):
        _, got = same_as_generate(model, ONE, accept=0.8)
    assert got.stats.num_draft_tokens > 0
