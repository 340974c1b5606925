"""Looking leaves no trace: lade changes nothing that a model remembers, but as `generate` does."""

import copy
import dataclasses
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lade
from tests.grids import thinned
from tests.lade.forward.families import READABLE, model_of
from tests.lade.tiny import tiny_model

TOKENS = torch.randint(3, 90, (1, 300), generator=torch.Generator().manual_seed(0))
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 4.0},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "factor": 4.0},
    "yarn": {"factor": 4.0},
}


def rope(kind: str) -> Any:
    parameters = {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]}
    if kind != "dynamic":
        parameters["original_max_position_embeddings"] = 40
    return tiny_model(
        dtype=torch.float32, head_dim=16, max_position_embeddings=40, rope_parameters=parameters
    )


def remembered(value: Any, path: str = "") -> dict[str, Any]:
    """Return all that a model, or something in it, remembers, by its path."""
    if isinstance(value, Tensor):
        return {path: (value.dtype, value.tolist())}
    is_ours = type(value).__module__ == __name__ or hasattr(value, "to_diff_dict")
    if isinstance(value, nn.Module) or is_ours:
        of_users = {name: each for name, each in vars(value).items() if "_lade" not in name}
        value = {type(value).__name__: of_users}
    if isinstance(value, dict | list | tuple | deque):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        found = [remembered(each, f"{path}.{name}") for name, each in pairs]
        return {path: len(value)} | {key: each for part in found for key, each in part.items()}
    is_plain = isinstance(value, str | int | float | set | torch.dtype | None)
    return {path: value if is_plain else type(value)}


def changes(before: dict[str, Any], model: Any) -> list[str]:
    now, nothing = remembered(model), object()
    names = {**before, **now}
    return [name for name in names if before.get(name, nothing) != now.get(name, nothing)]


def look(model: Any, folder: Path) -> None:
    """Let lade look at a model in every way."""
    lade.probe(model, num_rows=3)
    lade.warm_up(model)
    if lade.probe(model).verification != "plain":
        lade.prewarm(model, 10.0, max_tokens=8, folder=folder)


@pytest.mark.parametrize("family", thinned([*READABLE, *ROPES], *ROPES, "gpt_oss", "qwen3_next"))
def test_looks_and_calls_leave_what_generate_leaves(family: str, tmp_path: Path) -> None:
    model = rope(family) if family in ROPES else model_of(family)
    model.generate(TOKENS, do_sample=False, max_new_tokens=2)
    before, twin = remembered(model), copy.deepcopy(model)
    look(model, tmp_path)
    assert changes(before, model) == []
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
    config = lade.Config(reuses_prefix=True)
    for num in (20, 120, 121):
        expected = twin.generate(TOKENS[:, :num], **options)
        got = lade.generate(model, TOKENS[:, :num], config=config, **options)
        assert torch.equal(got, expected)
    assert changes(remembered(twin), model) == []


@dataclasses.dataclass
class Note:
    """An object of a module's file."""

    num: int = 0
    seen: list[int] = dataclasses.field(default_factory=list)


class Remembering(nn.Module):
    """A user's layer that remembers every call, in as many ways as there are."""

    count: Tensor
    longest: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.note, self.last = inner, Note(), torch.zeros(3)
        self.num, self.nested, self.recent = 0, {"of": {"sizes": [0]}}, deque([0], 4)
        self.names, self.tensors = {"start"}, [torch.zeros(2), torch.zeros(2)]
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("longest", torch.zeros(4), persistent=False)

    def forward(self, states: Tensor) -> Tensor:
        size = states.shape[1]
        self.num, self.note.num = self.num + 1, self.note.num + 1
        self.last[0] = size
        self.tensors[1].add_(size)
        self.nested["of"]["sizes"].append(size)
        self.note.seen.append(size)
        self.recent.append(size)
        self.names.add(str(size))
        self.count.add_(1)
        self.longest = self.longest.clamp(min=size)
        made: Tensor = self.inner(states)
        return made


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_looks_leave_no_trace_in_what_a_users_module_remembers(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, attention="eager")
    inner = next(each for name, each in model.named_modules() if name.endswith(("mlp", "mixer")))
    name, linear = next(each for each in inner.named_children() if type(each[1]) is nn.Linear)
    setattr(inner, name, Remembering(linear))
    before = remembered(model)
    look(model, tmp_path)
    assert changes(before, model) == []
    model.generate(TOKENS, do_sample=False, max_new_tokens=2)
    assert len(changes(before, model)) > 10
