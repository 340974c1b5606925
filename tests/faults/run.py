"""Plant faults in a copy of the checkout, one at a time, and see which test notices each."""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from tests.about import about
from tests.faults.planted import Fault, planted

ROOT = Path(__file__).parents[2]
_COPIED = ("lade", "ngram_pool", "tests", "benchmarks", "docs", "examples", "pyproject.toml")
# Tried before all others where it exists.
_TABLE = "tests/equality"
_TIMEOUT_SEC = 300
_PUBLIC = re.compile(r"(lade(\.(drafters|models|engines(\.\w+)*))?|ngram_pool)$")
_OURS = re.compile(r"(lade|ngram_pool)(\.\w+)*$")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", re.MULTILINE)


class Verdict(NamedTuple):
    """What came of a planted fault.

    Attributes:
        caught_by: id of the first test that fails; None if none does.
        is_private: whether that test is in a file that imports names that are not public, and is
            none of those that hold the pool against its oracle.
        problem: why it is not known whether a test notices the fault.
    """

    fault: Fault
    caught_by: str | None
    is_private: bool
    sec: float
    problem: str | None = None


class Copy:
    """A copy of the checkout, in which one fault at a time is planted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in _COPIED:
            source, target = ROOT / name, path / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy2(source, target)
        self._kernels = path / ".numba"  # of the files as they are

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[Path]:
        """Plant a fault; yield the folder of compiled kernels that goes with it.

        Numba looks at a file's time and size to tell whether what it compiled is of this one. So
        the time is put back with the text, and what is compiled of a faulty file is thrown away.
        """
        path, cache = self.path / fault.file, self._kernels
        before, stat = path.read_text(), path.stat()
        path.write_text(fault.applied_to(before))
        if "numba" in before:
            cache = self.path / ".numba_of_fault"
            shutil.copytree(self._kernels, cache, dirs_exist_ok=True)
        try:
            yield cache
        finally:
            path.write_text(before)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            if cache != self._kernels:
                shutil.rmtree(cache)

    def run(self, tests: Sequence[str], cache: Path | None = None) -> tuple[int | None, str]:
        """Run tests up to the first that fails; return pytest's exit code, and what it prints.

        None is the code of tests that do not end.
        """
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.path),
            "NUMBA_CACHE_DIR": str(cache or self._kernels),
            "PYTHONDONTWRITEBYTECODE": "1",  # which is told from a new one by seconds and size
            "COLUMNS": "1000",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "--tb=short"]
        options = ["-p", "no:cacheprovider", "-m", "not exhaustive"]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [*command, *options, *tests],
                cwd=self.path,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(_TIMEOUT_SEC)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            return code, output.read()


def judged(copy: Copy, fault: Fault) -> Verdict:
    """Plant a fault and run its tests."""
    start = time.perf_counter()
    with copy.planted(fault) as cache:
        code, output = copy.run(tests_of(fault), cache)
    sec, found = round(time.perf_counter() - start, 1), _FAILED.search(output)
    if code is None:
        return Verdict(fault, f"no end within {_TIMEOUT_SEC} s", False, sec)
    if code == 1 and found is not None:
        caught_by = found[1]
        return Verdict(fault, caught_by, is_private(ROOT / caught_by.partition("::")[0]), sec)
    problem = None if code == 0 else f"pytest ended with {code}: {output[-600:]}"
    return Verdict(fault, None, False, sec, problem)


def tests_of(fault: Fault) -> list[str]:
    """Return the tests that must catch a fault, in order."""
    first = [_TABLE] if fault.changes_text and (ROOT / _TABLE).exists() else []
    return [*first, *fault.tests]


def is_private(path: Path) -> bool:
    """Return whether a file of tests imports or patches names that are not public.

    One that holds the pool against `tests/oracle.py` counts as public.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names if alias.name[0] == "_"}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value.rpartition(".")[0])  # of what is patched
    private = any(_OURS.match(name) and not _PUBLIC.match(name) for name in names)
    return private and "tests.oracle" not in names


def whole(copy: Copy, faults: Sequence[Fault]) -> str | None:
    """Return what the tests say without any fault; None if all pass."""
    tests = [*dict.fromkeys(test for fault in faults for test in tests_of(fault))]
    code, output = copy.run(tests)
    return None if code == 0 else f"{output[-3000:]}\npytest ended with {code}"


def main() -> int:
    """Judge faults, print and write a table; return 1 unless all were caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="of these faults")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the checkout (2)")
    parser.add_argument("--out", type=Path, help="write results as JSON")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a fault")
    given = parser.parse_args()
    faults = [each for each in planted() if not given.only or each.name in given.only]
    for fault in faults:
        fault.applied_to((ROOT / fault.file).read_text())  # before anything is run
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copies: SimpleQueue[Copy] = SimpleQueue()
        made = [Copy(Path(folder) / str(number)) for number in range(given.jobs)]
        for copy in made:
            copies.put(copy)
        if not given.trust and (said := whole(made[0], faults)) is not None:
            print(f"expected tests that pass without a fault, got:\n{said}")
            return 1

        def judge(fault: Fault) -> Verdict:
            copy = copies.get()
            try:
                verdict = judged(copy, fault)
            finally:
                copies.put(copy)
            print(_line(verdict), flush=True)
            return verdict

        with ThreadPoolExecutor(given.jobs) as threads:
            verdicts = [*threads.map(judge, faults)]
    missed = [each for each in verdicts if each.caught_by is None]
    private = sum(each.is_private for each in verdicts)
    print(f"{len(verdicts) - len(missed)} of {len(verdicts)} caught, {private} by private names")
    if given.out is not None:
        given.out.write_text(json.dumps(_result(verdicts), indent=1) + "\n")
    return 1 if missed else 0


def _line(verdict: Verdict) -> str:
    by = verdict.caught_by or f"SURVIVED {verdict.problem or ''}"
    mark = " (private)" if verdict.is_private else ""
    return f"{verdict.fault.name:<34} {verdict.sec:>6.1f} s  {by}{mark}"


def _result(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "measurement": "planted faults",
        **about(),
        "num_faults": len(verdicts),
        "num_caught": sum(each.caught_by is not None for each in verdicts),
        "num_caught_by_private": sum(each.is_private for each in verdicts),
        "faults": [
            {
                "name": each.fault.name,
                "file": each.fault.file,
                "breaks": each.fault.breaks,
                "tests": tests_of(each.fault),
                "caught_by": each.caught_by,
                "caught_by_private": each.is_private,
                "sec": each.sec,
            }
            for each in verdicts
        ],
    }
