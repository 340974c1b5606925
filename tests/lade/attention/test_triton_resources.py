"""What the Triton kernels take of a GPU, by the report of its assembler, which needs no GPU."""

import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

# KiB of shared memory that a program may have, and that a multiprocessor has, by compute
# capability; of the latter each program takes another KiB.
OF_PROGRAM = {80: 163, 86: 99, 90: 227, 120: 99}
OF_PROCESSOR = {80: 164, 86: 100, 90: 228, 120: 100}
REGISTERS_OF_PROCESSOR = 65_536
# Bytes that a thread stores and loads because its registers do not suffice. Triton 3.9 makes 132 at
# most, with 64 queries of 128 dims for 8.6, and 84 elsewhere; too few warps make hundreds.
MAX_SPILLED = 144


@pytest.fixture(autouse=True)
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile anew, or skip where there is no compiler."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    if not assembler(80).exists():
        pytest.skip(f"this triton has no {assembler(80)}")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


class Usage(NamedTuple):
    """What a program takes."""

    registers: int  # per thread
    spilled: int  # bytes stored and loaded, per thread
    shared: int  # bytes
    num_warps: int

    def flaws(self, capability: int, at_once: int) -> list[str]:
        """Return what keeps `at_once` programs from running well on a multiprocessor."""
        flaws = []
        if self.spilled > MAX_SPILLED:
            flaws.append("spills")
        if self.shared > OF_PROGRAM[capability] * 1024:
            flaws.append("shared memory of a program")
        if at_once * (self.shared + 1024) > OF_PROCESSOR[capability] * 1024:
            flaws.append("shared memory")
        of_thread = -(-self.registers // 8) * 8  # they are given out by eights
        if at_once * self.num_warps * 32 * of_thread > REGISTERS_OF_PROCESSOR:
            flaws.append("registers")
        return flaws


# Float16 takes what bfloat16 does, and 9.0 has more of everything than 8.0.
CASES = [
    *((80, "bfloat16", (64, 64)), (80, "bfloat16", (256, 256)), (80, "float32", (128, 128))),
    *((86, "bfloat16", (128, 128)), (86, "float32", (256, 256)), (90, "float32", (256, 256))),
    *((120, "bfloat16", (128, 128)), (120, "float16", (192, 128)), (120, "float32", (20, 48))),
]


@pytest.mark.exhaustive  # compiled for each card
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_many_programs_as_are_launched_fit_on_a_gpu(
    case: tuple[int, str, tuple[int, int]],
) -> None:
    from lade.attention import triton as triton_attention

    capability, dtype, dims = case
    flaws: dict[Any, Any] = {}
    for num_packed in (1, 32, 128):
        blocks, at_once = triton_attention._blocks(num_packed, *dims, getattr(torch, dtype))
        usage = usage_of("_attend_to_split", blocks, dtype, capability, dims)
        flaws[blocks] = usage, usage.flaws(capability, at_once)
    merging = usage_of("_merge_splits", blocks._replace(num_warps=4), dtype, capability, dims)
    flaws["merge"] = merging, merging.flaws(capability, at_once=2)
    assert not {what: (usage, some) for what, (usage, some) in flaws.items() if some}


def usage_of(name: str, blocks: Any, dtype: str, capability: int, dims: tuple[int, int]) -> Usage:
    """Compile a kernel with all that it can do, and return what it takes.

    Args:
        name: of the kernel.
        blocks: of a program.
        dtype: of queries, keys and values.
        capability: compute capability, times 10.
        dims: of keys and of values.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile

    from lade.attention import triton as triton_attention

    constants = {
        **dict.fromkeys(("has_softcap", "has_sinks"), True),
        **dict.fromkeys(("query_dim", "key_dim", "value_dim_"), 1),  # strides
        "head_dim": dims[0],
        "value_dim": dims[1],
        "block_s": triton_attention._MAX_SPLITS,
        **blocks._asdict(),
    }
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    compiled = compile(
        source_of(getattr(triton_attention, name), constants, dtype),
        target=GPUTarget("cuda", capability, 32),
        options={**options, "enable_fp_fusion": True},
    )
    assert compiled.asm["cubin"]
    report = report_of(compiled.asm["ptx"], capability)
    registers, *spilled = (
        sum(int(number) for number in re.findall(pattern, report))
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill (?:stores|loads)")
    )
    assert registers
    return Usage(registers, sum(spilled), compiled.metadata.shared, blocks.num_warps)


def assembler(capability: int) -> Path:
    """Return the assembler that Triton brings along; newer GPUs have one of their own."""
    from triton.backends.nvidia import compiler

    try:
        return Path(compiler.get_ptxas(capability).path)
    except (AttributeError, TypeError):  # before Triton 3.5
        return Path(compiler.__file__).parent / "bin" / "ptxas"


def report_of(code: str, capability: int) -> str:
    """Assemble a kernel as Triton does, and return what the assembler says about it."""
    target = f"sm_{capability}" + "a" * (capability >= 90)
    path = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.ptx"
    path.write_text(code)
    done = subprocess.run(
        [str(assembler(capability)), "-v", f"--gpu-name={target}", str(path), "-o", os.devnull],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stderr


def source_of(kernel: Any, constants: dict[str, int], dtype: str) -> Any:
    """Return what a launch has compiled: pointers and most strides are multiples of 16."""
    import triton
    from packaging.version import Version
    from triton.backends import compiler
    from triton.compiler import ASTSource

    of_model = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}[dtype]
    types = {
        **dict.fromkeys(("query", "key", "value", "sinks", "attended"), of_model),
        **dict.fromkeys(("num_cached", "starts"), "*i32"),
        **dict.fromkeys(("summed_of_all", "totals_of_all", "peaks_of_all"), "*fp32"),
        **dict.fromkeys(("scaling", "softcap"), "fp32"),
        "ancestors": "*u8",
    }
    names: list[str] = kernel.arg_names
    fixed = {name: constants[name] for name in names if name in constants}
    signature = {name: types.get(name, "i32") for name in names if name not in fixed}
    aligned = [
        names.index(name)
        for name, type_ in signature.items()
        if type_.startswith("*") or name.startswith(("query_", "key_", "value_"))
    ]
    if Version(triton.__version__) < Version("3.3"):
        hints = compiler.AttrsDescriptor.from_hints(dict.fromkeys(aligned, 16))
        return ASTSource(kernel, signature, fixed, hints)
    signature = {name: signature.get(name, "constexpr") for name in names}
    return ASTSource(kernel, signature, fixed, {(i,): [["tt.divisibility", 16]] for i in aligned})
