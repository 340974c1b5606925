"""The Triton kernels of dense steps against what models do, written out in `lade.gpu.ops`.

As for attention, Triton's interpreter is a process of its own: this file run as a program, one case
a line.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lade.gpu import ops
from tests.grids import thinned
from tests.lade.interpreter import Interpreted, answer_cases, interpreted_by

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

DTYPES = ("float32", "bfloat16", "float16")
# Of a sum of 4096 squares in another order, and of 1 + erf(x) near 0 times some x; else of what was
# rounded to the one or the other neighbour. On a GPU, of what a weight makes of that, too.
LIMITS = {"float32": 16, "bfloat16": 1, "float16": 1}
LIMITS_ON_GPU = {**LIMITS, "bfloat16": 2, "float16": 2}
Case = tuple[str, str, dict[str, Any]]  # operator, dtype, what else

OPERATIONS: list[tuple[str, dict[str, Any]]] = [
    *(("rms_norm", {"size": size, "form": "rounded"}) for size in (8, 48, 4096)),
    ("rms_norm", {"size": 128, "form": "float"}),
    ("rms_norm", {"size": 640, "form": "offset"}),
    *(("add_rms_norm", {"size": 96, "form": form}) for form in ops.FORMS),
    *(("gated", {"activation": activation}) for activation in ops.ACTIVATIONS),
    *(("rotate", {"dim": dim, "rows": rows}) for dim in (8, 96, 128, 256) for rows in (1, 2)),
    *(("write_slots", {"dims": dims}) for dims in ((8, 8), (24, 16), (128, 128))),
]
CASES: list[Case] = [
    (operator, dtype, options) for dtype in DTYPES for operator, options in OPERATIONS
]


def named(case: Case) -> str:
    return "-".join([*case[:2], *(f"{k}={v}".replace(" ", "") for k, v in case[2].items())])


def worst_error(case: Case, device: str) -> float:
    """Return the greatest difference, in units of the last place of the larger of it and 1.

    Sums in another order and another exponential may be off by some of these units; what is only
    added, multiplied and copied must be the same.
    """
    from lade.gpu import kernels

    operator, name, options = case
    dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(len(repr(case)))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        match operator:
            case "rms_norm":
                x, weight = 3 * draw(3, 5, options["size"]), draw(options["size"])
                settings = (1e-6, options["form"])
                yield kernels.rms_norm(x, weight, *settings), written(x, weight, *settings)
            case "add_rms_norm":
                x, residual, weight = (draw(*shape, options["size"]) for shape in [(7,), (7,), ()])
                settings = (1e-5, options["form"])
                summed, normed = kernels.add_rms_norm(x, residual, weight, *settings)
                expected = written(x, residual, weight, *settings)
                assert torch.equal(summed, expected[0])
                yield normed, expected[1]
            case "gated":
                gate, up = 5 * draw(7, 333), draw(7, 333)
                gate[0, :4] = torch.tensor([-80.0, 80.0, 0.0, -1e4])
                activation = options["activation"]
                yield kernels.gated(gate, up, activation), written(gate, up, activation)
            case "rotate":
                query, key = (draw(2, 5, n, options["dim"]).transpose(1, 2) for n in (6, 2))
                cos, sin = (draw(options["rows"], 5, options["dim"]) for _ in "12")
                expected = written(query, key, cos, sin)
                for mine, theirs in zip(
                    kernels.rotate(query, key, cos, sin), expected, strict=True
                ):
                    assert torch.equal(mine, theirs)
                    assert mine.stride() == theirs.stride()
                    yield mine, theirs
            case "write_slots":
                slots = torch.tensor([[3, 4, 5, 6, 7], [40, 9, 42, 43, 49]], device=device)
                held = [[draw(4, 2, 3, 50, dim) * 0 for dim in options["dims"]] for _ in "12"]
                new = [draw(2, 5, 3, dim).transpose(1, 2) for dim in options["dims"]]
                kernels.write_slots(held[0][0][2], held[0][1][2], new[0], new[1], slots)
                written(held[1][0][2], held[1][1][2], *new, slots)
                for one, other in zip(*held, strict=True):
                    assert one.any()
                    assert torch.equal(one, other)
                    yield one, other

    written = getattr(ops, operator)._init_fn  # in plain torch, on a GPU, too
    worst = 0.0
    for got, expected in pairs():
        assert got.dtype == expected.dtype
        unit = torch.finfo(dtype).eps * expected.double().abs().clamp(min=1)
        error = (got.double() - expected.double()).abs() / unit
        worst = max(worst, float(error.nan_to_num(nan=torch.inf).max()))
    return worst


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Interpreted]:
    """Run cases in a process of Triton's interpreter."""
    with interpreted_by("tests.lade.gpu.test_kernels", "-W", "ignore") as run:
        yield run


@pytest.mark.parametrize("case", thinned(CASES, *CASES[::4]), ids=named)
def test_in_the_interpreter_they_do_what_models_do(case: Case, interpreted: Interpreted) -> None:
    report = interpreted(case)
    assert "raised" not in report, report["raised"]
    assert report["error"] <= LIMITS[case[1]]


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES, ids=named)
def test_compiled_they_do_what_models_do(case: Case) -> None:
    assert worst_error(case, "cuda") <= LIMITS_ON_GPU[case[1]]


OF_FLOATS = {
    *("x", "residual", "weight", "summed", "normed", "gate", "up", "out", "query", "key", "cos"),
    *("sin", "rotated", "rotated_key", "keys", "values", "new_keys", "new_values"),
}


@pytest.mark.parametrize("capability", thinned([80, 90, 120], 90))
@pytest.mark.parametrize("dtype", thinned(["bfloat16", "float32"], "bfloat16"))
def test_they_compile(
    dtype: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter takes Python that the compiler refuses; compiling needs no GPU."""
    from packaging.version import Version

    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from lade.gpu import kernels

    if Version(triton.__version__) < Version("3.7") and capability == 120:
        pytest.skip("this old triton does not know this capability")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    norm: dict[str, Any] = {
        "has_residual": True,
        "is_rounded_first": True,
        "is_offset": False,
        "block": 4096,
    }
    strides = ("query_dim", "key_dim", "to_dim", "to_key_dim", "value_dim", "new_key_dim")
    kernels_of: list[tuple[Any, dict[str, Any], int]] = [
        (kernels._rms_norm, norm, 8),
        (kernels._rms_norm, {**norm, "has_residual": False, "block": ops.MAX_NORMED}, 32),
        *((kernels._gated, {"activation": a, "block": 1024}, 4) for a in ops.ACTIVATIONS),
        (kernels._rotate, {"dim": 128, "block_h": 8, "block_d": 64}, 4),
        (kernels._rotate, {"dim": 96, "block_h": 8, "block_d": 64}, 4),
        (kernels._write_slots, {"block_h": 8, "block_d": 128}, 4),
    ]
    for kernel, constants, num_warps in kernels_of:
        names: list[str] = kernel.arg_names
        fixed = {**constants, **{name: 1 for name in strides if name in names}}
        types = {
            **dict.fromkeys(OF_FLOATS, {"bfloat16": "*bf16", "float32": "*fp32"}[dtype]),
            "slots": "*i64",
            "eps": "fp32",
        }
        signature = {name: types.get(name, "i32") for name in names if name not in fixed}
        if Version(triton.__version__) >= Version("3.3"):
            signature = {name: signature.get(name, "constexpr") for name in names}
        done = compile(
            ASTSource(kernel, signature, fixed),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": num_warps, "enable_fp_fusion": False},
        )
        assert done.asm["cubin"]


def mend_interpreter() -> None:
    """Make the interpreter round to bfloat16, as every device does: it cuts bits off."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    cut = builder.create_fp_trunc

    def create_fp_trunc(self: Any, source: Any, to: Any) -> Any:
        if to.scalar != tl.bfloat16 or source.dtype.scalar != tl.float32:
            return cut(self, source, to)
        bits = np.ascontiguousarray(source.data).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return interpreter.TensorHandle(rounded.astype(np.uint16), tl.bfloat16)

    builder.create_fp_trunc = create_fp_trunc


if __name__ == "__main__":
    mend_interpreter()
    answer_cases(lambda case: worst_error(tuple(case), "cpu"))
