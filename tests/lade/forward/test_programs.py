"""Programs of rows: what they give is what torch's operators gave, token by token."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lade.compat import attention_of
from lade.forward import reading
from lade.forward._rows import address_of
from lade.forward.comparing import UnsupportedForwardError
from lade.forward.programs import TokenRows, Writer, Written
from lade.forward.trace import Trace, Value
from lade.forward.watching import watch
from tests.grids import thinned
from tests.lade.forward.families import READABLE, model_of


def results(
    rows: TokenRows, source: Written, outputs: list[Value], made_as: Mapping[Value, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return what a program gives of each token, beside what torch gave.

    Args:
        rows, source, outputs: the program.
        made_as: what tensors were before later operators wrote to them.
    """

    def of_token(value: Value, token: int) -> Any:
        layout = rows.layout(value)
        tensor = made_as.get(value, value.tensor)
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1).numpy()
        return flat[layout.rows[0 if layout.is_shared else token]]

    found = []
    for token in range(max(len(rows.layout(each).rows) for each in outputs)):
        inputs = [of_token(each, token) for each in source.inputs]
        constants = [each.tensor.detach().reshape(-1).numpy() for each in source.constants]
        wanted = [of_token(each, token) for each in outputs]
        made = [np.full(each.shape, np.nan, np.float32) for each in wanted]
        scratch = np.full(source.num_scratch, np.nan, np.float32)
        given = [*map(np.ascontiguousarray, (scratch, *inputs, *constants)), *made]
        kinds = ["integers" if each.dtype == np.int64 else "row" for each in given]
        pairs = zip(kinds, map(len, given), strict=True)
        taken = [f"{kind}(given[{i}], {size})" for i, (kind, size) in enumerate(pairs)]
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        run(address_of(source.text, taken, source.tables))(_addresses(given).ctypes.data)
        results = zip(made, wanted, strict=True)
        found += [(torch.tensor(x), torch.tensor(y).float()) for x, y in results]
    return found


def _addresses(arrays: list[Any]) -> Any:
    return np.array([each.ctypes.data for each in arrays], np.int64)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Writer, Written]]:
    """Return a list of all programs that will be written."""
    found, source = list[tuple[Writer, Written]](), Writer.source

    def noting(self: Writer) -> Written:
        found.append((self, source(self)))
        return found[-1][1]

    monkeypatch.setattr(Writer, "source", noting)
    return found


@pytest.mark.parametrize(
    "family",
    thinned(READABLE, "cohere2", "bamba", "qwen3_next"),
)
@torch.no_grad()
def test_programs_give_what_torch_gave(
    family: str, written: list[tuple[Writer, Written]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made_as, keep = model_of(family), dict[Value, Tensor](), Trace._keep

    def copying(self: Trace, value: Value) -> Value:
        made_as[value] = value.tensor.clone()
        return keep(self, value)

    monkeypatch.setattr(Trace, "_keep", copying)
    for is_other in (False, True):
        reading._Reader(watch(model, is_other=is_other), attention_of(model)).plan()
    assert len(written) > 6
    for writer, source in written:
        for mine, theirs in results(writer._rows, source, [*writer._outputs], made_as):
            assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


# --- what a program may be made of ----------------------------------------------------------------


def traced(function: Callable[[Tensor], Tensor], num_tokens: int = 3) -> Written:
    """Return the program of a function of states [1, num_tokens, 6]."""
    states = torch.randn(1, num_tokens, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), Trace() as trace:
        out = function(states)
    given, made = trace.value(states), trace.value(out)
    rows = TokenRows(num_tokens, lambda _: None)
    rows.give(given, 1)
    source = Writer(rows, [made], lambda each: each is given).source()
    for mine, theirs in results(rows, source, [made], {}):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    return source


def _in_place(states: Tensor) -> Tensor:
    made = torch.zeros_like(states)
    made[..., :4] = states[..., 2:]
    made[..., 4:].add_(states[..., :2])
    return made.mul_(2)


def _chosen(states: Tensor) -> Tensor:
    """Of two groups, that with the largest sum stays; then two numbers of each are chosen."""
    groups = states.view(1, -1, 2, 3)
    best = groups.sum(-1).topk(1, dim=-1)[1]
    left = torch.zeros_like(groups[..., 0]).scatter_(-1, best, 1)
    kept = groups.masked_fill(left[..., None] == 0, -9)
    chosen = kept.topk(2, dim=-1, sorted=False)[1]
    return torch.cat((groups.gather(-1, chosen), kept.max(dim=-1, keepdim=True)[0]), -1).flatten(2)


def _complex(states: Tensor) -> Tensor:
    pairs = torch.view_as_complex(states.view(1, -1, 3, 2))
    return torch.view_as_real(pairs * pairs).flatten(2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat((-x[..., 3:], x[..., :3]), dim=-1) * x,
        lambda x: (
            x.view(1, -1, 2, 3).transpose(1, 2).flip(-1).softmax(-1).transpose(1, 2).flatten(2)
        ),
        lambda x: torch.nn.functional.layer_norm(x, (6,)),
        lambda x: x.clamp(-0.5, 0.5).where(x > 0, x.abs().sqrt()),
        _in_place,
        _complex,
        _chosen,
    ],
)
def test_what_becomes_of_a_token_alone_is_a_program(function: Any) -> None:
    # A text of as many tokens as a row has numbers is no other program.
    assert traced(function).text == traced(function, 6).text


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.cumsum(1), "torch's cumsum is no operation on rows"),
        (lambda x: x.mean(1, keepdim=True).expand(x.shape), "torch's mean mixes tokens"),
        (lambda x: x * x.roll(1, 1), "numbers of several tokens are mixed"),
        (lambda x: x + x.flip(1), "numbers of several tokens are mixed"),
        (lambda x: x * torch.arange(3.0)[:, None], "arange makes numbers that are no parameters"),
        (lambda x: x.bfloat16().float(), "it computes in torch.bfloat16"),
        (lambda x: x @ x.mT @ x, "torch's bmm is no operation on rows"),
        (lambda x: x.topk(2, dim=-1, largest=False)[0], "torch's topk is called otherwise"),
        (lambda x: x.topk(3, dim=1)[0], "torch's topk is along another axis"),
    ],
)
def test_what_mixes_tokens_or_hides_something_is_refused(function: Any, reason: str) -> None:
    with pytest.raises(UnsupportedForwardError, match=reason):
        traced(function)


_ADDING = """
import ctypes, sys
import numpy as np
from lade.forward._rows import address_of
for number in sys.argv[1:]:
    lines = ["def program(numbers):", *["numbers[0] = silu(numbers[0])"] * 100]
    text = "\\n    ".join([*lines, f"numbers[0] += F({number})"]) + "\\n"
    numbers = np.zeros(1, np.float32)
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address_of(text, ["row(given[0], 1)"]))
    run(np.array([numbers.ctypes.data]).ctypes.data)
    print(numbers[0])
"""


def test_programs_from_the_disk_are_not_one_anothers(tmp_path: Path) -> None:
    """One was compiled by a process of its own; a second one compiles another and reads both.

    They are too long to become a part of what calls them.
    """
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command, root = [sys.executable, "-c", _ADDING], Path(__file__).parents[3]
    for numbers in (["1"], ["2", "1", "2"]):
        out = subprocess.check_output([*command, *numbers], cwd=root, env=environment, text=True)
        assert [*map(float, out.split())] == [*map(float, numbers)]
