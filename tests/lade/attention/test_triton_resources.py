"""What the Triton kernels take of a GPU, by the report of its assembler: no GPU is needed for that.

The interpreter, in which the kernels are tested elsewhere, takes Python that the compiler refuses.
"""

import os
import re
import subprocess
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from lade.attention.tree import Seen
from tests.grids import thinned

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
    *((80, "bfloat16", 64), (80, "bfloat16", 256), (80, "float32", 128), (86, "bfloat16", 128)),
    *((86, "float32", 256), (90, "float32", 256), (120, "bfloat16", 128), (120, "float32", 64)),
]


@pytest.mark.parametrize("case", thinned(CASES))
def test_as_many_programs_as_are_launched_fit_on_a_gpu(case: tuple[int, str, int]) -> None:
    from lade.attention import triton as triton_attention

    capability, dtype, head_dim = case
    flaws: dict[Any, Any] = {}
    for num_packed in (1, 32, 128):
        blocks = triton_attention._blocks(num_packed, head_dim, head_dim, getattr(torch, dtype))
        usage = usage_of("_attend_to_split", blocks, dtype, capability)
        flaws[blocks] = usage, usage.flaws(capability, blocks.per_processor)
    merging = usage_of("_merge_splits", blocks._replace(num_warps=4), dtype, capability)
    flaws["merge"] = merging, merging.flaws(capability, at_once=2)
    assert not {what: (usage, some) for what, (usage, some) in flaws.items() if some}


ODD = [("bfloat16", (80, 80)), ("float16", (192, 128)), ("float32", (20, 48))]


@pytest.mark.parametrize("case", thinned(ODD))
def test_so_do_programs_of_odd_dimensions(case: tuple[str, tuple[int, int]]) -> None:
    from lade.attention import triton as triton_attention

    dtype, dims = case
    blocks = triton_attention._blocks(128, *dims, getattr(torch, dtype))
    usage = usage_of("_attend_to_split", blocks, dtype, 120, dims)
    assert not usage.flaws(120, blocks.per_processor)


@pytest.mark.parametrize(
    ("change", "at_once", "expected"),
    [
        ({"num_warps": 4}, 1, "spills"),
        ({"num_stages": 5}, 1, "shared memory of a program"),
        ({}, 2, "registers"),
    ],
)
@pytest.mark.exhaustive
def test_blocks_that_are_too_large_are_noticed(
    change: dict[str, int], at_once: int, expected: str
) -> None:
    from lade.attention import triton as triton_attention

    blocks = triton_attention._blocks(128, 128, 128, torch.bfloat16)
    assert blocks.per_processor == 1
    usage = usage_of("_attend_to_split", blocks._replace(**change), "bfloat16", 120)
    assert expected in usage.flaws(120, at_once)


class Driver:
    """A driver of no device: what is compiled for one of compute capability 9.0 is never run."""

    num_launched = 0

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def utils(self) -> Any:
        return SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
            load_binary=lambda *args: (0, 0, 32, 0, 1024),
            unload_module=lambda module: None,
        )

    def launcher_cls(self, *compiled: Any) -> Any:
        def launch(*args: Any) -> None:
            self.num_launched += 1

        return launch


@pytest.mark.exhaustive
def test_trees_of_all_sizes_wait_for_no_compiler_after_what_was_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel takes some 5 s; there are three sizes of blocks, and two merges."""
    from triton.runtime import driver

    from lade.attention import triton as triton_attention

    def attend(num_nodes: int, num_slots: int) -> None:
        keys = torch.zeros(1, 2, num_slots, 64, dtype=torch.bfloat16)
        triton_attention.attend(
            keys.new_zeros(1, num_nodes, 8, 64).transpose(1, 2),
            keys,
            keys,
            Seen(
                torch.zeros(1, dtype=torch.int32),
                torch.zeros(1, num_nodes, dtype=torch.int32),
                torch.ones(1, num_nodes, num_nodes, dtype=torch.bool),
            ),
            scaling=1.0,
            num_processors=132,
        )

    stub = Driver()
    monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", stub)
    monkeypatch.setattr(triton_attention, "_ahead", {})
    keys = torch.zeros(1, 2, 80, 64, dtype=torch.bfloat16)
    query = keys.new_zeros(1, 1, 8, 64).transpose(1, 2)
    made = triton_attention.compile_ahead(query, keys, keys, num_processors=132)
    assert triton_attention.compile_ahead(query, keys, keys, num_processors=132) is made
    made.join()
    paths = [*tmp_path.rglob("*.cubin")]
    assert sorted(path.stem for path in paths) == ["_attend_to_split"] * 3 + ["_merge_splits"] * 2
    assert not stub.num_launched
    for num_nodes, num_slots in product((1, 3, 8, 16, 32, 64, 96), (64, 77, 4096, 5000)):
        attend(num_nodes, num_slots)
    for kernel in (triton_attention._attend_to_split, triton_attention._merge_splits):
        getattr(kernel, "device_caches", getattr(kernel, "cache", {})).clear()  # of no device
    assert [*tmp_path.rglob("*.cubin")] == paths
    assert stub.num_launched == 2 * 7 * 4


def usage_of(
    name: str, blocks: Any, dtype: str, capability: int, dims: tuple[int, int] | None = None
) -> Usage:
    """Compile a kernel with all that it can do, and return what it takes.

    Args:
        name: of the kernel.
        blocks: of a program.
        dtype: of queries, keys and values.
        capability: compute capability, times 10.
        dims: of keys and of values; None for those of the blocks.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile

    from lade.attention import triton as triton_attention

    head_dim, value_dim = dims or (blocks.key_dims, blocks.value_dims)
    constants = {
        **dict.fromkeys(("has_softcap", "has_visible", "has_sinks"), True),
        **dict.fromkeys(("query_dim", "key_dim", "value_dim_"), 1),  # strides
        "head_dim": head_dim,
        "value_dim": value_dim,
        "block_m": blocks.queries,
        "block_n": blocks.keys,
        "block_k": blocks.key_dims,
        "block_v": blocks.value_dims,
        "block_s": triton_attention._MAX_SPLITS,
        "min_slots": blocks.min_slots,
    }
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
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
        **dict.fromkeys(("ancestors", "visible"), "*u8"),
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
