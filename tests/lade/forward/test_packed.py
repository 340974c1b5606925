"""Packed weights: products are those of GGML's own numbers, in one order, whatever runs beside."""

import ctypes
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import lade
from lade.forward import _amx, _digits, _packed
from lade.forward import packed as file
from lade.forward._tiles import FEATURES
from lade.forward.job import FusedForwards, forwards_for
from lade.forward.linear import kernels
from lade.forward.packed import PackedEmbedding, PackedLinear, made_whole
from lade.forward.words import BLOCKS, IN_BFLOAT16, NO_DIGITS
from lade.models.gguf import load_gguf
from tests.grids import thinned, thinned_rows
from tests.lade.forward.conftest import Ran
from tests.lade.forward.conftest import noted as noted_jobs
from tests.lade.forward.lanes import kernels_with
from tests.lade.forward.test_job import TEXT, Apart, Prefilled, compared, with_drafts  # noqa: F401
from tests.lade.models.gguf_files import blocks, whole, write
from tests.lade.tiny import tiny_model

pytestmark = pytest.mark.xdist_group("products")  # compiled once
NUMBERS = {name: number for number, (name, *_) in BLOCKS.items() if name != "F32"}
# More than a depth of inputs, columns that no tile has, and blocks by one, where there are such.
SIZES = ((9, 256), (37, 1536), (18, 1120), (10, 96))
NUM_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 15, 16, 17, 40, 63, 64, 65, 128)
BY_DIGITS = [BLOCKS[each][0] for each in _digits.FORMATS]  # by this CPU; none on some
DOTS = [each for each in ("avxvnni", "avx2") if FEATURES.get(each)]
OF_DOTS = [(name, dot) for name in BY_DIGITS for dot in DOTS]
QUICK = {*zip(("Q8_0", "Q6_K", "Q4_1", "MXFP4"), DOTS * 2, strict=False)} & {*OF_DOTS}


in_bytes = numba.njit(lambda *of: _digits.write_digits(of), error_model="numpy")
in_bfloat16 = numba.njit(lambda *of: _amx.write_digits(of), error_model="numpy")


def product(module: Any, function: Any, inputs: Any, weight: Any, num: int) -> Any:
    """Return products of rows [rows, inputs] and packed weights; of no row, the weights."""
    num_rows, num_inputs = inputs.shape
    memory = np.zeros((3, num_rows * (num_inputs + 32)), np.float32)
    memory[0, : inputs.size] = inputs.flatten()
    turned = np.zeros(192 * -(-num_rows // 16) * num_inputs + 128, np.int8)
    made = np.zeros((num_rows, len(weight)) if num_rows else (len(weight), num), np.float32)
    strip = np.zeros(_packed.STRIP + 16, np.float32)
    for row in range(num_rows):
        of_row = [each.ctypes.data + (4 * num_inputs + 128) * row for each in memory[1:]]
        write, num_areas = (in_bfloat16, 2) if module is _amx else (in_bytes, 1)
        of_inputs = memory[0].ctypes.data + 4 * num_inputs * row
        write(of_inputs, *of_row[:num_areas], num_inputs // 32)
    given = memory.ctypes.data if num_rows else 0, 4 * num_inputs, num_rows
    packed = weight.ctypes.data, weight.shape[1], len(weight)
    rest = num, -(-strip.ctypes.data // 64) * 64, memory.strides[0], turned.ctypes.data
    words = *given, *packed, made.ctypes.data, made.strides[0], *rest
    function((ctypes.c_int64 * len(words))(*words))
    return made


@pytest.mark.parametrize("lanes", thinned([None, 8], None))
@pytest.mark.parametrize("name", thinned(NUMBERS, "Q6_K"))
def test_products_are_exact_and_add_in_one_order(
    name: str, lanes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = kernels_with(lanes, tmp_path, monkeypatch, is_packed=True) if lanes else _packed
    check_products(name, module)


@pytest.mark.parametrize(("name", "dot"), thinned_rows(OF_DOTS, *QUICK))
def test_products_by_digits_are_exact_and_add_in_one_order(
    name: str, dot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the same bits by each of the instructions that CPUs have for it."""
    if dot == "avx2" and _digits.AROUND[NUMBERS[name]] == 128:
        pytest.skip("sums of two products do not fit into 16 bits")
    bits = check_products(name, _digits)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_digits, "_DOT", dot)
    assert check_products(name, _digits) == bits


@pytest.mark.skipif(not _amx.FORMATS, reason="the CPU has no tiles")
def test_products_by_tiles_are_exact_and_add_in_one_order() -> None:
    check_products("BF16", _amx)


def check_products(name: str, module: Any) -> list[bytes]:
    """Up to rounding; a row's last bit does not depend on how many are beside it."""
    function, bits = module.product_of(NUMBERS[name]).ctypes, []
    size = BLOCKS[NUMBERS[name]][1]
    rng = np.random.default_rng(1)
    for num_columns, num in ((n, k) for n, k in SIZES if k % size == 0):
        weight = blocks(name, num_columns, num)
        exact = whole(weight, name)
        nothing = np.zeros((0, num), np.float32)
        assert np.array_equal(product(module, function, nothing, weight, num), exact)
        inputs = rng.standard_normal((max(NUM_ROWS), num)).astype(np.float32)
        of_all = product(module, function, inputs, weight, num)
        right = inputs.astype(np.float64) @ exact.astype(np.float64).T
        assert np.abs(of_all - right).max() <= 1e-6 * np.abs(right).max()
        apart = (np.square(each - right).mean() for each in (of_all, inputs @ exact.T))
        assert next(apart) <= 1.5**2 * next(apart)
        for num_rows in NUM_ROWS:
            some = product(module, function, inputs[:num_rows], weight, num)
            assert np.array_equal(some, of_all[:num_rows]), (num_columns, num, num_rows)
        bits.append(of_all.tobytes())
    return bits


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 3.4e38, 1e-20])
def test_extreme_inputs_give_what_float32_gives(number: float) -> None:
    inputs = np.zeros((3, 256), np.float32)
    inputs[1, 77] = number
    modules = [("Q4_0", _packed), *[("Q4_0", _digits)] * bool(BY_DIGITS)]
    for name, module in (*modules, *[("BF16", _amx)] * bool(_amx.FORMATS)):
        weight = blocks(name, 16, 256)
        with np.errstate(invalid="ignore"):
            expected = inputs @ whole(weight, name).T
        function = module.product_of(NUMBERS[name]).ctypes
        made = product(module, function, inputs, weight, 256)
        one, other = (np.where(np.isfinite(each), each, np.nan) for each in (made, expected))
        np.testing.assert_allclose(one, other, 1e-6)


def layer_of(name: str, num: int = 256) -> PackedLinear:
    weight = nn.Parameter(torch.from_numpy(blocks(name, 64, num)), requires_grad=False)
    bias = nn.Parameter(torch.arange(64.0), requires_grad=False)
    return PackedLinear(weight, NUMBERS[name], num, bias)


def test_a_layer_gives_what_its_whole_weight_gives() -> None:
    layer = layer_of("Q4_K")
    exact = torch.from_numpy(whole(layer.weight.numpy(), "Q4_K"))
    inputs = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0))
    right = nn.functional.linear(inputs.double(), exact.double(), layer.bias.double())
    assert layer(inputs.requires_grad_()).requires_grad  # by torch
    with torch.no_grad():
        of_kernels = layer(inputs)
        with made_whole():
            of_torch = layer(inputs)
        assert layer(inputs.bfloat16()).dtype is torch.bfloat16
    for made in (of_kernels, of_torch, layer(inputs)):
        assert torch.allclose(made.double(), right, atol=1e-5, rtol=0)
    assert not torch.equal(of_kernels, of_torch)  # else one of them was not asked
    assert "format=Q4_K" in str(layer)


@pytest.mark.skipif(not BY_DIGITS, reason="the CPU has no such instruction")
def test_a_layer_reads_digits_if_the_cpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, inputs, made = layer_of("Q4_K"), torch.linspace(-1, 2, 768).view(3, 256), list[Any]()
    for formats, module in ((_digits.FORMATS, _digits), ((), _packed)):
        monkeypatch.setattr(_digits, "FORMATS", formats)
        monkeypatch.setattr(file, "_functions", {})
        with torch.no_grad():
            made.append(layer(inputs))
        function = module.product_of(NUMBERS["Q4_K"]).ctypes
        sums = product(module, function, inputs.numpy(), layer.weight.numpy(), 256)
        assert torch.equal(made[-1], torch.from_numpy(sums) + layer.bias)
    assert not torch.equal(*made)


def test_an_embedding_gives_rows_of_its_whole_table() -> None:
    weight = nn.Parameter(torch.from_numpy(blocks("Q6_K", 20, 256)), requires_grad=False)
    table = torch.from_numpy(whole(weight.numpy(), "Q6_K"))
    ids = torch.tensor([[3, 0], [19, 3]])
    assert torch.equal(PackedEmbedding(weight, NUMBERS["Q6_K"], 256)(ids), table[ids])
    scaled = PackedEmbedding(weight, NUMBERS["Q6_K"], 256, torch.tensor(16.0))
    assert torch.equal(scaled(ids), 16 * table[ids])


def test_where_kernels_cannot_run_or_are_wrong_torch_runs_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, inputs = layer_of("Q8_0"), torch.randn(3, 256)
    expected = layer._by_torch(inputs)
    monkeypatch.setattr(file, "_functions", {})
    by_reference = file._by_reference
    monkeypatch.setattr(file, "_by_reference", lambda *of: by_reference(*of) + 1e-7)
    with torch.no_grad():
        made = layer(inputs)
    assert {*file._functions.values()} == {None}
    assert torch.allclose(made, expected, atol=1e-4)
    assert file.unpacked(layer.weight[:0], NUMBERS["Q8_0"]).shape[0] == 0


MIXED = [f"{name} Q4_K+Q6_K" for name in ("llama", "qwen2_moe", "gemma4_text")]


@pytest.mark.parametrize(
    "kind",
    thinned(
        [*MIXED, *(f"{name} {each}" for name in ("llama", "qwen3_moe") for each in NUMBERS)], *MIXED
    ),
)
def test_a_job_runs_packed_weights(
    kind: str,
    tmp_path: Path,
    compared: list[Apart],  # noqa: F811
) -> None:
    """Each forward is held against torch's on weights made whole."""
    family, names = kind.split()
    formats = names.split("+")
    expected = write(tmp_path, family, *formats)
    model = load_gguf(tmp_path / "model.gguf")
    with_drafts(model, TEXT, max_new_tokens=16)
    assert [each for each in compared if not each.is_close] == []
    assert {1, TEXT.shape[1]} < {each.num_tokens for each in compared}
    assert file.formats_of(model) == sorted(formats)
    with torch.no_grad():
        assert torch.allclose(model(TEXT).logits, expected(TEXT).logits, atol=1e-4)


@pytest.mark.parametrize(("size", "has_digits"), [(64, True), (64, False), (48, True)])
def test_formats_and_sizes_of_heads_decide_what_reads_digits(
    size: int,
    has_digits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compared: list[Apart],  # noqa: F811
) -> None:
    """Digits of heads that are no whole blocks are not written."""
    monkeypatch.setattr(_digits, "FORMATS", _digits.FORMATS if has_digits else ())
    monkeypatch.setattr(file, "_functions", {})
    write(tmp_path, "llama", "Q4_0", "Q4_0", "Q8_0", head_dim=size)
    with_drafts(load_gguf(tmp_path / "model.gguf"), TEXT, max_new_tokens=20)
    assert [each for each in compared if not each.is_close] == []
    assert {1, TEXT.shape[1]} < {each.num_tokens for each in compared}
    plain = file._functions.get((NUMBERS["Q4_0"], NO_DIGITS))
    assert (plain is not None) == (size == 48 or not _digits.FORMATS)


@pytest.mark.skipif(not _amx.FORMATS, reason="the CPU has no tiles")
@pytest.mark.parametrize(("least", "kinds"), [(96, {NO_DIGITS, IN_BFLOAT16}), (64, {IN_BFLOAT16})])
def test_layers_with_many_inputs_run_by_tiles(
    least: int,
    kinds: set[int],
    monkeypatch: pytest.MonkeyPatch,
    compared: list[Apart],  # noqa: F811
) -> None:
    """The first parts of a long prompt have no logits: products of no rows."""
    monkeypatch.setattr(_amx, "LEAST_INPUTS", least)
    monkeypatch.setattr(file, "_functions", {})
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
    text = TEXT.repeat(1, 5)
    with_drafts(tiny_model("llama", dtype=torch.bfloat16, **sizes), text, max_new_tokens=20)
    assert [each for each in compared if not each.is_close] == []
    assert {*file._functions} == {(NUMBERS["BF16"], each) for each in kinds}


def test_a_job_is_never_held_against_packed_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If both were by the same kernels, one that is wrong would agree with itself."""
    write(tmp_path, "llama", "Q8_0")
    model = load_gguf(tmp_path / "model.gguf")
    by_torch, settle = list[tuple[int, bool]](), FusedForwards.settle

    def noting(self: FusedForwards, run: Any, timed: Any) -> None:
        def noted(num_tokens: int) -> Any:
            by_torch.append((num_tokens, file.is_whole()))
            return run(num_tokens)

        settle(self, noted, timed)

    monkeypatch.setattr(FusedForwards, "settle", noting)
    jobs = noted_jobs(monkeypatch)
    lade.warm_up(model)
    assert by_torch == [(15, True)]
    assert [each.num_tokens for each in jobs] in ([15, 8, 3, 1], [15, 8, 3, 1, 1, 8])


def test_a_prompt_in_pieces_is_that_of_the_model_made_whole(ran: list[Ran], tmp_path: Path) -> None:
    """The first pieces have no token whose logits are wanted."""
    whole_model, text = write(tmp_path, "llama", "Q4_0"), TEXT.repeat(1, 9)
    model = load_gguf(tmp_path / "model.gguf")
    options: Any = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(text)
    answer = lade.generate(model, text, **options)
    assert max(each.num_tokens for each in ran) == text.shape[1]
    assert torch.equal(answer, whole_model.generate(text, **options))


@pytest.mark.parametrize("mask", [[0, 0, 0], [1, 1, 0]])
def test_a_prompt_sees_what_it_sees_in_generate(mask: list[int], tmp_path: Path) -> None:
    """Where its last token is padding, too: what that one sees decides the text."""
    whole_model, text = write(tmp_path, "llama", "Q8_0"), TEXT[:, :3]
    model = load_gguf(tmp_path / "model.gguf")
    options: Any = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    options["attention_mask"] = torch.tensor([mask])
    assert torch.equal(lade.generate(model, text, **options), whole_model.generate(text, **options))


@pytest.mark.parametrize("family", thinned(["gemma2", "gpt_oss"], "gpt_oss"))
def test_a_prompt_longer_than_a_window_runs_by_a_job(
    family: str, ran: list[Ran], tmp_path: Path
) -> None:
    """By torch, each expert would be unpacked."""
    whole_model, text = write(tmp_path, family, "Q8_0", sliding_window=8), TEXT.repeat(1, 2)
    model = load_gguf(tmp_path / "model.gguf")
    options: Any = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(text)
    for _ in range(2):  # the first prompt is the check's
        ran.clear()
        answer = lade.generate(model, text, **options)
    assert ran[0] == Ran(text.shape[1], 1)
    assert torch.equal(answer, whole_model.generate(text, **options))


def test_hooked_layers_and_a_head_of_packed_weights_run(
    compared: list[Apart],  # noqa: F811
    tmp_path: Path,
) -> None:
    write(tmp_path, "llama", "Q8_0")
    model = load_gguf(tmp_path / "model.gguf")
    model.model.layers[1].register_forward_hook(lambda module, args, out: out * 1.5)
    with torch.no_grad():
        Prefilled(model, TEXT)
    assert [each.is_close for each in compared] == [True]


def test_activations_in_16_bits_leave_packed_weights_to_their_layers(tmp_path: Path) -> None:
    write(tmp_path, "llama", "Q8_0", "F32")
    model = load_gguf(tmp_path / "model.gguf").to(torch.bfloat16)
    assert kernels() is not None
    assert forwards_for(model) is None


def test_a_large_layer_is_unpacked_part_by_part_in_one_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory of its own for each part grew the heap by the whole weight."""
    weight = blocks("Q8_0", 9000, 1024)
    layer = PackedLinear(nn.Parameter(torch.from_numpy(weight), False), NUMBERS["Q8_0"], 1024)
    inputs, linear, places = torch.randn(3, 1024), functional.linear, set[int]()

    def noted(given: torch.Tensor, rows: torch.Tensor, *bias: Any) -> torch.Tensor:
        places.add(rows.data_ptr())
        return linear(given, rows, *bias)

    monkeypatch.setattr(functional, "linear", noted)
    with torch.no_grad(), made_whole():
        results = layer(inputs)
    assert len(places) == 1
    last = inputs @ torch.from_numpy(whole(weight[-9:], "Q8_0")).T
    assert torch.allclose(results[:, -9:], last, rtol=1e-4, atol=1e-5)


def test_weights_in_16_bits_may_lie_input_by_input() -> None:
    weight = nn.Parameter(torch.arange(320.0).sin().view(64, 5).bfloat16().T, False)
    inputs = torch.arange(192.0).cos().view(3, 64)
    with torch.no_grad():
        made = PackedLinear(weight, 0, 64)(inputs)
    torch.testing.assert_close(made, inputs @ weight.float().T)
