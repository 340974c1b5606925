"""`lade compile`: nothing is left for the first answer to compile."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ngram_pool.compiling
from lade.cli.app import app
from tests.lade.tiny import byte_tokenizer, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A saved tiny model, large enough for products of lade's."""
    sizes: Any = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512}
    tiny_model("llama", dtype=torch.float32, **sizes).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_it_says_what_it_compiles_and_where_that_is_kept(folder: str) -> None:
    done = CliRunner().invoke(app, ["compile", "--model", folder], catch_exceptions=False)
    assert done.exit_code == 0
    kept = ngram_pool.compiling.cache_folder()
    assert kept is not None
    assert done.stdout == f"compiled; kept in {kept}\n"
    assert any(path.suffix == ".nbi" for path in kept.iterdir())
    for part in ("the pool", "whole forwards", "what LlamaForCausalLM takes"):
        assert f" s for {part}" in done.stderr


def test_without_a_folder_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ngram_pool.compiling.cache_folder", lambda: None)
    done = CliRunner().invoke(app, ["compile"])
    assert done.exit_code == 1
    assert "NUMBA_CACHE_DIR" in str(done.exception)


# Runs a command, and writes which kernels its process has, for which types.
_LISTING = """
import gc, json, sys
from numba.core.ccallback import CFunc
from numba.core.dispatcher import Dispatcher
from lade.cli.app import app

app(sys.argv[2:], standalone_mode=False)
kernels = [
    (of.py_func.__module__, of.py_func.__qualname__, str(signature))
    for of in gc.get_objects() if isinstance(of, Dispatcher) for signature in of.signatures
]
callbacks = [of for of in gc.get_objects() if isinstance(of, CFunc)]
kernels += [(of.__module__, of.__name__, str(of._sig)) for of in callbacks]
with open(sys.argv[1], "w") as file:
    json.dump(kernels, file)
"""


@pytest.mark.exhaustive
def test_after_it_the_first_answer_compiles_nothing(folder: str, tmp_path: Path) -> None:
    def kernels(*arguments: str) -> set[tuple[str, ...]]:
        command = [sys.executable, "-c", _LISTING, str(tmp_path / "kernels"), *arguments]
        subprocess.run(command, check=True, capture_output=True)
        return {(*map(str, of),) for of in json.loads((tmp_path / "kernels").read_text())}

    compiled = kernels("compile")
    assert len(compiled) > 15
    options = "--model", folder, "--dtype", "float32", "--max-new-tokens", "20"
    used = kernels("generate", "one two one two", "--raw", *options)
    assert len(used) > 15
    assert used <= compiled
