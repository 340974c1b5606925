"""The Triton kernels against the version in plain torch, in float64.

On a GPU they run compiled. Everywhere they run in Triton's interpreter, which is chosen when
kernels are decorated, those of Triton's own library among them: with the first import of triton.
Torch may have imported it in this process, and a process that interprets compiles nothing any more.
So the interpreter is a process of its own: this file run as a program, one case a line.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import lade
from lade.attention import tree as tree_attention
from lade.attention.masks import Seen
from tests.lade.interpreter import Interpreted, answer_cases, interpreted_by
from tests.lade.tiny import tiny_model

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

TOLERANCES = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}


class Case(NamedTuple):
    dtype: str = "float32"
    head_dim: int = 64
    value_dim: int | None = None  # None for that of keys
    num_key_heads: int = 2
    num_sharing: int = 3
    num_nodes: int = 5
    lengths: tuple[int, ...] = (70, 0)  # of the prefixes
    num_slots: int = 300
    padding: int = 0  # slots of it in front of the first row
    window: int | None = None  # which each node has at another slot
    softcap: float | None = None
    has_sinks: bool = False
    is_tokens_first: bool = False  # keys lie in memory as [rows, num_slots, num_key_heads, dim]
    num_processors: int = 8


CASES = [
    # Head dimensions: powers of two and others, of values other than of keys, tiny ones.
    Case(),
    Case("bfloat16"),
    Case("float16", num_sharing=1),
    Case(head_dim=8, num_nodes=3),
    Case("bfloat16", head_dim=80, num_sharing=4, num_nodes=9),
    Case(head_dim=80, num_sharing=1, num_nodes=1),
    Case("bfloat16", head_dim=96, num_key_heads=1),
    Case(head_dim=96, num_sharing=8, num_nodes=7, lengths=(65,)),
    Case("bfloat16", head_dim=128, num_sharing=4, num_nodes=8, lengths=(257,)),
    Case(head_dim=128, num_sharing=4, num_nodes=1, lengths=(33, 128)),
    Case("bfloat16", head_dim=192, value_dim=128, num_sharing=1, num_key_heads=4),
    Case(head_dim=192, value_dim=128, num_sharing=1, num_nodes=3),
    Case("bfloat16", head_dim=256, num_sharing=8, num_nodes=2),
    Case(head_dim=256, num_key_heads=1, num_sharing=4, num_nodes=6),
    Case("bfloat16", head_dim=20, value_dim=48, num_nodes=2),
    # Trees of one and of several blocks, and lists of queries that end within a block.
    Case("bfloat16", num_nodes=64, num_key_heads=1, num_sharing=1, lengths=(5,)),
    Case(num_nodes=65, num_key_heads=1, num_sharing=3, lengths=(40,)),
    Case("bfloat16", num_nodes=70, num_key_heads=1, num_sharing=8, lengths=(130,)),
    # Lengths: empty, ragged, of exactly a split, far below the capacity, more splits than keys.
    Case(lengths=(0, 0, 0)),
    Case("bfloat16", lengths=(0,), num_nodes=1),
    Case(lengths=(1, 63, 64, 65, 127, 128, 129, 256)),
    Case("bfloat16", lengths=(900, 10), num_slots=1000, num_processors=132),
    Case(lengths=(901,), num_slots=1000, num_key_heads=1, num_nodes=2, num_processors=1),
    Case(lengths=(3,), num_slots=20_000, num_key_heads=1, num_nodes=2, num_processors=132),
    Case(lengths=(2_000,), num_slots=2_048, num_key_heads=1, num_nodes=1, num_processors=20),
    # Long trees behind the last of few splits, which has no slot of the prefix or only some.
    Case("bfloat16", num_nodes=64, num_key_heads=1, lengths=(1_100, 512, 513), num_slots=1_300),
    Case(num_nodes=40, num_key_heads=1, num_sharing=1, lengths=(255, 256, 216), num_processors=3),
    Case("bfloat16", num_nodes=33, num_key_heads=1, lengths=(700,), num_slots=800, padding=600),
    # Padding, windows, soft caps, sinks, and all of it at once.
    Case(padding=37),
    Case("bfloat16", padding=70, num_nodes=3),
    Case(window=16, lengths=(250, 3)),
    Case("bfloat16", window=1, lengths=(200, 40), num_nodes=8),
    Case(softcap=3.0),
    Case("bfloat16", softcap=30.0, head_dim=128),
    Case(has_sinks=True),
    Case("bfloat16", has_sinks=True, lengths=(0, 130)),
    Case("float16", has_sinks=True, softcap=5.0, window=9, padding=4, lengths=(100, 20)),
    Case("bfloat16", window=16, lengths=(250, 3), num_nodes=8),
    Case(window=1, padding=9, softcap=3.0, has_sinks=True, lengths=(200, 40)),
    Case(is_tokens_first=True),
    Case("bfloat16", is_tokens_first=True, head_dim=80, window=30, has_sinks=True),
    # What large models have, in blocks of 64 queries; nodes in multiples of 16 are compiled apart.
    Case("bfloat16", head_dim=128, num_sharing=4, num_nodes=16, lengths=(257, 900), num_slots=1000),
    Case("float16", head_dim=128, num_sharing=4, num_nodes=17, lengths=(700,), num_slots=800),
    Case("bfloat16", 128, None, 2, 4, 32, (600,), 700, softcap=30.0),
    Case("float16", head_dim=256, num_sharing=4, num_nodes=16, lengths=(257, 520), num_slots=600),
    Case("bfloat16", 256, None, 2, 2, 32, (600,), 700, softcap=30.0, window=100),
    Case(head_dim=128, num_sharing=2, num_nodes=16, lengths=(257, 33), num_slots=300),
]


def named(case: Case) -> str:
    """Return what is special in a case."""
    return "-".join(
        f"{name}={value}".replace(" ", "")
        for name, value in case._asdict().items()
        if value != Case._field_defaults[name]
    )


def worst_error(case: Case, device: str) -> float:
    """Return the greatest difference from the exact result, as a share of what is tolerated."""
    from lade.attention import triton as triton_attention

    made = inputs(case, device)
    num_processors = case.num_processors if device == "cpu" else None
    options = {"scaling": case.head_dim**-0.5, "softcap": case.softcap, "sinks": made.sinks}
    got = triton_attention.attend_by_kernels(
        made.query, made.key, made.value, made.seen, num_processors=num_processors, **options
    )
    exact = tree_attention.attend(
        made.query.double(), made.key.double(), made.value.double(), made.seen, **options
    )
    assert got.shape == exact.shape
    assert got.dtype == made.query.dtype
    assert got.is_contiguous()
    errors = (got - exact).abs() / (1 + exact.abs()) / TOLERANCES[case.dtype]
    return float(errors.nan_to_num(nan=torch.inf).max())


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    seen: Seen
    sinks: Tensor | None


def inputs(case: Case, device: str) -> Inputs:
    """Return random inputs; where no node looks, keys are NaN and values infinite."""
    generator = torch.Generator().manual_seed(len(repr(case)))
    rows, num_nodes, num_slots = len(case.lengths), case.num_nodes, case.num_slots
    num_heads = case.num_key_heads * case.num_sharing

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(getattr(torch, case.dtype))

    query = draw(rows, num_nodes, num_heads, case.head_dim).transpose(1, 2)
    key = draw(rows, case.num_key_heads, num_slots, case.head_dim)
    value = draw(rows, case.num_key_heads, num_slots, case.value_dim or case.head_dim)
    num_cached = torch.tensor(case.lengths, dtype=torch.int32)
    starts = torch.zeros(rows, num_nodes, dtype=torch.int32)
    starts[0] = case.padding
    if case.window is not None:
        depths = torch.randint(0, 2 * case.window, (rows, num_nodes), generator=generator)
        first = (num_cached[:, None] - case.window + depths).int()  # beyond the prefix for some
        starts = torch.maximum(starts, first)
    ancestors = torch.rand(rows, num_nodes, num_nodes, generator=generator) < 0.4
    ancestors = ancestors.tril() | torch.eye(num_nodes, dtype=torch.bool)
    for row, length in enumerate(case.lengths):
        unseen = torch.zeros(num_slots, dtype=torch.bool)
        unseen[: min(length, int(starts[row].min()))] = True
        unseen[length + num_nodes :] = True
        key[row, :, unseen], value[row, :, unseen] = torch.nan, torch.inf
    if case.is_tokens_first:
        key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))
    sinks = 2 * draw(num_heads) if case.has_sinks else None
    on_device = [x.to(device) for x in (query, key, value, num_cached, starts, ancestors)]
    query, key, value, *seen = on_device
    return Inputs(query, key, value, Seen(*seen), sinks if sinks is None else sinks.to(device))


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Interpreted]:
    """Run cases in a process of Triton's interpreter."""
    with interpreted_by("tests.lade.attention.test_triton_attention") as run:
        yield run


@pytest.mark.exhaustive  # the interpreter takes seconds to start
@pytest.mark.xdist_group("interpreter")
@pytest.mark.parametrize("case", CASES, ids=named)
def test_in_the_interpreter_it_attends_as_plain_torch_does(
    case: Case, interpreted: Interpreted
) -> None:
    report = interpreted(case)
    if "only 0-dimensional arrays" in report.get("raised", ""):
        pytest.skip("the interpreter of this old triton cannot loop with this new numpy")
    assert "raised" not in report, report["raised"]
    assert report["error"] < 1


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES, ids=named)
def test_compiled_it_attends_as_plain_torch_does(case: Case) -> None:
    assert worst_error(case, "cuda") < 1


def attended(made: Any, **options: Any) -> Tensor:
    """Return what a layer of a model gets for inputs of two rows, five nodes and 300 slots."""
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(2, 1, 5, 300)
    seen = tree_attention.with_seen(mask, made.seen)
    got, _ = tree_attention.tree_attention(
        torch.nn.Module(), made.query, made.key, made.value, seen, **options
    )
    return got


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Take the CPU for a GPU that no kernel was tried on yet; return where kernels have failed."""
    failed: set[Any] = set()
    monkeypatch.setattr(tree_attention, "_failed", failed)
    monkeypatch.setattr(tree_attention, "_has_kernels", lambda device: True)
    # What the operator is on a GPU.
    monkeypatch.setattr(tree_attention, "attend_at_once", tree_attention._attend_in_triton)
    return failed


def test_where_it_can_it_takes_the_place_of_plain_torch(
    monkeypatch: pytest.MonkeyPatch, failed: set[Any]
) -> None:
    made = inputs(Case(has_sinks=True), "cpu")
    attend = Mock(return_value=made.query + 1)
    monkeypatch.setattr("lade.attention.triton.attend_by_kernels", attend)
    got = attended(made, scaling=0.5, softcap=2.0, s_aux=made.sinks)
    assert torch.equal(got, made.query + 1)
    assert attend.call_args.args[4:] == (0.5, 2.0, made.sinks)
    attend.side_effect = torch.OutOfMemoryError("none left")
    with pytest.raises(torch.OutOfMemoryError):
        attended(made)
    assert not failed  # missing memory is no failure of kernels


def test_a_call_whose_kernels_fail_has_the_same_text_and_one_warning(failed: set[Any]) -> None:
    """Without a GPU, Triton fails by itself: no driver is active."""
    model = tiny_model(dtype=torch.float32)
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}
    config = lade.Config(execution="fixed", verification="tree")
    with pytest.warns(lade.KernelWarning, match="operations on cpu in torch.float32") as said:
        got = lade.generate(model, prompt, config=config, **options)
    assert len([each for each in said if each.category is lade.KernelWarning]) == 1
    assert failed == {(torch.device("cpu"), torch.float32)}
    assert torch.equal(got, model.generate(prompt, **options))
    assert torch.equal(got, lade.generate(model, prompt, config=config, **options))


def mend_interpreter() -> None:
    """Make products of bfloat16 what they are: the interpreter multiplies their bits."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16 or operand.data.dtype != np.uint16:
            return operand
        bits = operand.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot
    builder.create_dot = lambda self, a, b, *rest: create_dot(self, widened(a), widened(b), *rest)


if __name__ == "__main__":
    mend_interpreter()
    answer_cases(lambda case: worst_error(Case(*case), "cpu"))
