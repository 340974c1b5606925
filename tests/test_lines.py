"""Tests have few lines, few of them in files that know what is not public; no file knows many."""

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST, MOST_PRIVATE = 32_700, 9_200  # lines: 2 % more than there are, so that a small test fits
MOST_IMPORTS = 20  # modules of ours that one module of the wheel may know
#: What users import: a name in these, or one of these. Of engines, any module.
PUBLIC = {"lade", "ngram_pool", "lade.drafters", "lade.models"}


def files() -> list[Path]:
    """Return all files of tests: those of the repository, or those that are there without one."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    listed = {ROOT / name for name in done.stdout.split()} or {*(ROOT / "tests").rglob("*")}
    return sorted(path for path in listed if path.suffix == ".py" and path.exists())


def is_private(name: str) -> bool:
    is_ours = name.split(".")[0] in ("lade", "ngram_pool")
    return is_ours and name not in PUBLIC and not f"{name}.".startswith("lade.engines.")


@cache
def modules_of(path: Path) -> frozenset[str]:
    """Return the modules, ours and others, that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            package = ROOT.joinpath(*node.module.split("."))
            names = [f"{node.module}.{a.name}" for a in node.names if _is_module(package / a.name)]
            found |= {*names} if len(names) == len(node.names) else {*names, node.module}
    return frozenset(found)


def private_names(path: Path) -> set[str]:
    """Return the modules of ours that a file imports and that are not public."""
    return {*filter(is_private, modules_of(path))}


def _is_module(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_tests_are_few_lines_and_know_little_of_insides() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files()}
    private = {path: num for path, num in lines.items() if private_names(path)}
    for found, most in ((lines, MOST), (private, MOST_PRIVATE)):
        largest = sorted(found, key=lambda path: -found[path])[:12]
        told = "\n".join(f"{found[path]:6,} {path.relative_to(ROOT)}" for path in largest)
        which = "private" if found is private else "all"
        total = sum(found.values())
        advice = "put a case into a table of these, or delete what another test finds as well"
        assert total <= most, (
            f"{total:,} lines in {which} of tests, at most {most:,}: {advice}\n{told}"
        )


def test_no_module_of_the_wheel_knows_more_than_twenty_others() -> None:
    paths = [path for name in ("lade", "ngram_pool") for path in (ROOT / name).rglob("*.py")]
    known = {
        path.relative_to(ROOT).as_posix(): len(
            [name for name in modules_of(path) if name.split(".")[0] in ("lade", "ngram_pool")]
        )
        for path in paths
    }
    assert {path: number for path, number in known.items() if number > MOST_IMPORTS} == {}
