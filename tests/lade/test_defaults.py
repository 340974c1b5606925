"""What a process has set as its defaults changes nothing: no tensor of lade's depends on them."""

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import lade
from tests.grids import thinned_rows
from tests.lade.both import EIGHT, ONE, same_as_generate
from tests.lade.forward.conftest import Ran, ran  # noqa: F401
from tests.lade.forward.families import model_of

ROOT = Path(lade.__file__).parents[1]
MAKE = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor"),
    *("tril_indices", "triu_indices", "zeros"),
}


@contextmanager
def dtype(name: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bfloat16": lambda: dtype("bfloat16"),
    "float16": lambda: dtype("float16"),
    "float64": lambda: dtype("float64"),
    "meta": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "grad": torch.enable_grad,
}
FAMILIES = ["qwen3_next", "gpt_oss", "gemma3_text", "youtu", "bamba", "llama", "phimoe", "lfm2"]


def test_every_tensor_of_ours_is_made_with_its_dtype_and_device() -> None:
    for path in (each for name in ("lade", "ngram_pool") for each in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                is_made = ast.unparse(node.func.value) == "torch" and node.func.attr in MAKE
                given = {each.arg for each in node.keywords}
                assert not is_made or given >= {"dtype", "device"}, f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    ("name", "family"),
    thinned_rows(
        product(DEFAULTS, FAMILIES),
        *(("bfloat16", "qwen3_next"), ("meta", "qwen3_next")),
        *(("inference", "gpt_oss"), ("grad", "gemma3_text")),
    ),
)
def test_defaults_of_a_process_change_nothing(name: str, family: str, ran: list[Ran]) -> None:  # noqa: F811
    model = model_of(family)
    model.requires_grad_(name == "grad")
    options: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None, "config": EIGHT}
    with DEFAULTS[name]():
        try:
            model.generate(ONE, max_new_tokens=1)
        except NotImplementedError as error:
            pytest.skip(f"transformers' cache needs a device: {error}")
    for default in (DEFAULTS[name], DEFAULTS["inference"], DEFAULTS[name]):
        with default():
            same_as_generate(model, ONE, knows=True, **options)
    same_as_generate(model, ONE, knows=True, **options)
    assert ran
