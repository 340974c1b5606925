"""`lade prewarm`, and kernels that were compiled before a command."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import lade
from ngram_pool.caching import writable_by_others
from tests.lade.apps.cli.command import SHORT, run

PLAIN = lade.Probe("LlamaForCausalLM", "plain", None, {"tree": "trees do not grow here"})


@pytest.mark.filterwarnings("ignore:lade does not use its table")
def test_prewarm_makes_a_table_and_replaces_a_damaged_one(folder: str) -> None:
    options = ("--model", folder, "--dtype", "float32", "--seconds", 1)
    paths = set()
    for _ in range(2):  # the second run adds to it
        done = run("prewarm", *options)
        assert done.code == 0
        assert " contexts in " in done.out
        (kept,) = re.findall(r"kept in (.*), and used with", done.err)
        paths.add(kept)
    (path,) = map(Path, paths)
    path.write_bytes(b"no table")
    assert run("generate", "one", "--model", folder, *SHORT).code == 0
    with pytest.warns(UserWarning, match="begins anew"):
        assert run("prewarm", *options).code == 0
    assert path.stat().st_size > 1000


def test_a_table_is_written_beside_the_weights_and_the_demo_names_it(
    folder: str, tmp_path: Path
) -> None:
    copied, options = tmp_path / "checkpoint", ("--dtype", "float32", "--seconds", 1)
    shutil.copytree(folder, copied)
    done = run("prewarm", "--model", folder, *options, "--out", copied)
    assert done.code == 0
    path = copied / "lade.pool"
    assert f"kept in {path}, and used beside the model's weights" in done.err
    done = run("demo", "--model", copied, *SHORT, "--prompt", "one")
    assert f"drafts from the table {path}" in done.out
    assert "error: " in run("prewarm", "--model", folder, *options, "--out", path).error_line


def test_a_model_that_is_decoded_plainly_is_not_prewarmed(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lade.prewarming.run.plan_of_calls", lambda model: (model, PLAIN))
    said = "falls back to standard decoding for LlamaForCausalLM. tree: trees do not"
    assert said in run("prewarm", "--model", folder).error_line
    monkeypatch.setattr("lade.apps.cli.bench.probe", lambda model: PLAIN)
    done = run("demo", "--model", folder, *SHORT, "--prompt", "one")
    assert "verifies drafts by: plain" in done.out
    assert "  not tree: trees do not grow here" in done.out


# --- compiled kernels ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_run_compiles_beside_loading_in_processes_that_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    begun = list[subprocess.Popen[bytes]]()

    def begin(command: list[str], **streams: int) -> subprocess.Popen[bytes]:
        assert command[:2] == [sys.executable, "-c"]
        compile(command[2], "compiling", "exec")
        begun.append(subprocess.Popen(["sleep", "600"]))  # which a failure to load ends
        return begun[-1]

    monkeypatch.setattr("ngram_pool.pool.is_first_run", lambda: is_first)
    monkeypatch.setattr("lade.apps.cli.loading.Popen", begin)
    monkeypatch.setattr("lade.machine.threads.num_cores_allowed", lambda: 2)
    assert "no-model" in run("generate", "x", "--model", tmp_path / "no-model").error_line
    assert len(begun) == 2 * is_first
    assert all(process.returncode is not None for process in begun)


def test_all_users_share_what_no_other_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    (code / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr("ngram_pool._kernels.__file__", str(code / "_kernels.py"))
    kernel = SimpleNamespace(_cache=SimpleNamespace(cache_path=str(tmp_path)))
    monkeypatch.setattr("ngram_pool._kernels.row_of", kernel)
    assert f"got {tmp_path}: --shared needs no" in run("warm-up", "--shared").error_line
    kernel._cache.cache_path = str(code / "__pycache__")
    masks = list[int]()
    monkeypatch.setattr("os.umask", masks.append)
    monkeypatch.setattr("lade.prewarming.warming.warm_up", lambda _: masks.append(0))
    assert run("warm-up", "--shared").code == 0
    assert masks[-2:] == [0o022, 0]  # all may read what is compiled then
    code.chmod(0o777)
    writable_by_others.cache_clear()
    assert f"others can write to {code}, and so" in run("warm-up", "--shared").error_line


# Runs code, and writes which kernels its process has, for which types.
_LISTING = """
import gc, json, sys
from numba.core.ccallback import CFunc
from numba.core.dispatcher import Dispatcher
from lade.apps.cli import main
from lade import warm_up

out, sys.argv = sys.argv[1], ["lade", *sys.argv[2:]]
try:
    main() if sys.argv[1:] else warm_up()
except SystemExit as end:
    assert not end.code
kernels = [
    (of.py_func.__module__, of.py_func.__qualname__, str(signature))
    for of in gc.get_objects() if isinstance(of, Dispatcher) for signature in of.signatures
]
callbacks = [of for of in gc.get_objects() if isinstance(of, CFunc)]
kernels += [(of.__module__, of.__name__, str(of._sig)) for of in callbacks]
with open(out, "w") as file:
    json.dump(kernels, file)
"""


@pytest.mark.exhaustive  # processes that begin anew
def test_after_warm_up_the_first_answer_compiles_nothing(folder: str, tmp_path: Path) -> None:
    def kernels(*arguments: str) -> set[tuple[str, ...]]:
        command = [sys.executable, "-c", _LISTING, str(tmp_path / "kernels"), *arguments]
        subprocess.run(command, check=True, capture_output=True)
        return {(*map(str, of),) for of in json.loads((tmp_path / "kernels").read_text())}

    compiled = kernels()
    used = kernels("generate", "one two one two", "--raw", "--model", folder, *SHORT)
    assert len(compiled) > 15
    assert len(used) > 11
    assert used <= compiled
