"""What is exported, in which direction imports point, and that what the README shows runs."""

import ast
import importlib
import os
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

import lade
import ngram_pool
from tests.test_lines import modules_of

ROOT = Path(__file__).parents[1]

# Lowest first: each module or package of the core may import those before it, and none after it.
ORDER = [
    *(
        "_version",
        "errors",
        "config",
        "compat",
        "machine",
        "tree",
        "stats",
        "budget",
        "engine",
        "batch",
    ),
    *(
        "drafting",
        "sampling",
        "targets",
        "forward",
    ),
    *("probing", "decoder", "prewarming", "drafters", "hf"),
    *("batcher", "models", "engines"),
    # What people start, which nothing above imports.
    *("apps.bench", "apps.chat", "apps.server", "apps.cli"),
]


@pytest.mark.parametrize("package", [lade, ngram_pool])
def test_all_is_sorted_and_complete(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert names == sorted(names, key=lambda name: (name.islower(), name))
    for name in names:
        assert getattr(package, name) is not None


def files_of(name: str) -> list[Path]:
    """Return the files of a module or package of lade."""
    folder = ROOT.joinpath("lade", *name.split("."))
    return [*folder.rglob("*.py")] if folder.is_dir() else [folder.with_suffix(".py")]


def test_the_core_imports_in_one_direction() -> None:
    found = {path.stem for path in (ROOT / "lade").iterdir() if path.suffix in ("", ".py")}
    known = {name.split(".")[0] for name in ORDER}
    assert found - {"__init__", "__main__", "__pycache__"} == known
    for number, name in enumerate(ORDER, 1):
        later = tuple(f"lade.{other}." for other in ORDER[number:])
        for path in files_of(name):
            assert not any(f"{each}.".startswith(later) for each in modules_of(path)), path


# Where any error is caught, and how often: at edges to code that is not ours, in threads, and to
# clean up. Elsewhere such code is run by `lade.compat.attempts`, or errors simply pass.
CATCHES_ANYTHING = {
    "lade/apps/chat/terminal.py": 1,
    "lade/apps/cli/__init__.py": 1,
    "lade/probing/proof.py": 1,
    "lade/drafting/sources.py": 2,
    "lade/engine/engine.py": 6,
    "lade/engines/vllm.py": 1,
    "lade/errors.py": 1,
    "lade/hf/api.py": 1,
    "lade/hf/generation.py": 1,
    "lade/models/embedded.py": 1,
    "lade/models/converted.py": 1,
    "lade/models/loading.py": 3,
    "lade/prewarming/idle.py": 1,
    "lade/drafting/tables.py": 1,
    "lade/apps/server/limits.py": 1,
    "lade/targets/joint.py": 1,
    "lade/engine/turns.py": 1,
    "ngram_pool/caching.py": 2,
}


def catches_anything(handler: ast.ExceptHandler) -> bool:
    caught = set() if handler.type is None else {*map(ast.unparse, ast.walk(handler.type))}
    return handler.type is None or bool(caught & {"Exception", "BaseException"})


def test_any_error_is_caught_at_named_edges_alone() -> None:
    found: Counter[str] = Counter()
    for path in (path for name in ("lade", "ngram_pool") for path in (ROOT / name).rglob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        handlers = [node for node in nodes if isinstance(node, ast.ExceptHandler)]
        found[path.relative_to(ROOT).as_posix()] += sum(map(catches_anything, handlers))
    assert +found == Counter(CATCHES_ANYTHING)


# Public with a long list of what it takes, which transformers passes by name.
TAKES_MUCH = {"lade/hf/api.py:decode"}


def num_taken(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many arguments a call may pass, of kernels and commands none."""
    exempt = {"_jit", "grouped"}
    if exempt & {*map(ast.unparse, function.decorator_list)}:
        return 0
    taken = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return len([each for each in taken if each.arg not in ("self", "cls")])


def test_no_class_name_means_two_things_and_no_function_takes_more_than_eight() -> None:
    names: Counter[str] = Counter()
    takes_much = set()
    for package in ("lade", "ngram_pool", "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            place = path.relative_to(ROOT).as_posix()
            nodes = [*ast.walk(ast.parse(path.read_text()))]
            names.update(node.name for node in nodes if isinstance(node, ast.ClassDef))
            functions = (
                node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            )
            if path.name not in ("_kernels.py", "kernels.py"):
                takes_much |= {f"{place}:{each.name}" for each in functions if num_taken(each) > 8}
    assert takes_much == TAKES_MUCH
    assert [name for name, number in names.items() if number > 1] == []


def test_the_pool_knows_nothing_of_torch_or_lade() -> None:
    for path in (ROOT / "ngram_pool").glob("*.py"):
        roots = {name.split(".")[0] for name in modules_of(path)}
        assert not roots & {"torch", "transformers", "lade"}, path.name


def test_nothing_of_the_wheel_imports_benchmarks_or_tests() -> None:
    for package in ("lade", "ngram_pool"):
        for path in (ROOT / package).rglob("*.py"):
            roots = {name.split(".")[0] for name in modules_of(path)}
            assert not roots & {"benchmarks", "tests"}, path


def test_lade_generate_runs_without_the_benchmark() -> None:
    for name in ("generate", "serve"):
        imported = modules_of(ROOT / "lade" / "apps" / "cli" / f"{name}.py")
        assert not any(each.startswith("lade.apps.bench") for each in imported), name


def test_importing_lade_is_light_and_knows_its_names() -> None:
    program = "import sys, lade; print(lade.models.load.__name__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["load", "False"]
    assert lade.generate.__module__ == "lade.hf.api"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        lade.nothing  # type: ignore[attr-defined]  # noqa: B018
    assert dir(lade) == sorted(lade.__all__)
    assert importlib.import_module("lade.decoder").Decoder


def test_the_older_lade_distribution_is_named_with_what_to_uninstall(tmp_path: Path) -> None:
    info = tmp_path / "lade-0.0.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lade\nVersion: 0.0.2\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", "import lade"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert "the distribution 'lade' 0.0.2 (Lookahead Decoding) is installed" in done.stderr
    assert "pip uninstall -y lade lade-decoding && pip install lade-decoding" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_wheel_carries_both_packages_and_their_types(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("lade_decoding-*.whl")
    folder = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", str(folder), str(wheel)], check=True)
    with zipfile.ZipFile(wheel) as archive:
        roots = {name.split("/")[0] for name in archive.namelist()}
    assert roots == {"lade", "ngram_pool", f"lade_decoding-{lade.__version__}.dist-info"}
    program = (
        "import importlib.metadata as m, pathlib, sys, lade\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "assert pathlib.Path(lade.__file__).is_relative_to(root), lade.__file__\n"
        "for name in ('lade/py.typed', 'ngram_pool/py.typed', 'lade/apps/cli/app.py',\n"
        "             'lade/__init__.pyi', 'lade/apps/bench/run.py',\n"
        "             'ngram_pool/_kernels.py'):\n"
        "    assert (root / name).is_file(), name\n"
        "print(m.version('lade-decoding'), lade.__version__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout.split() == [lade.__version__] * 2, done.stderr
