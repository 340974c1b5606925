"""Plant small faults in a copy of the checkout, one at a time: `python -m tests.faults`.

Each must be noticed by a test. `faults.txt` lists them, and says how they are written.
"""

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
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_COPIED = ("lade", "ngram_pool", "tests", "benchmarks", "docs", "examples", "pyproject.toml")
_TABLE = "tests/equality"  # tried before all others for texts
_CONTRACTS = "tests/lade/test_contracts.py::test_"
_TIMEOUT_SEC = 300
_PUBLIC = re.compile(r"(lade(\.(drafters|models|engines(\.\w+)*))?|ngram_pool)$")
_OURS = re.compile(r"(lade|ngram_pool)(\.\w+)*$")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", re.MULTILINE)


class Fault(NamedTuple):
    """A change of one place that makes the product wrong.

    Attributes:
        name: says what is wrong.
        file: path in the checkout.
        breaks: what a user would see.
        tests: files or ids of tests, run in order up to the first that fails.
        old, new: text that is there exactly once, and what takes its place.
    """

    name: str
    file: str
    breaks: str
    tests: list[str]
    old: str
    new: str

    def applied_to(self, text: str) -> str:
        """Return a file's text with the fault.

        Raises:
            ValueError: the text has not the old part exactly once, or the new one is no change.
        """
        found = text.count(self.old)
        if found != 1 or self.old == self.new:
            what = f"what {self.name!r} replaces once in {self.file}"
            raise ValueError(f"expected {what}, got it {found} times")
        return text.replace(self.old, self.new)


def planted() -> list[Fault]:
    """Return all faults."""
    _, *entries = re.split(
        r"^(?=text |other )", (ROOT / "tests/faults.txt").read_text(), flags=re.M
    )
    return [*map(_read, entries)]


def _read(entry: str) -> Fault:
    begin, *lines = entry.splitlines()
    kind, name, file = begin.split()
    parts = {mark: [line[1:] for line in lines if line[:1] == mark] for mark in ":-+"}
    breaks, _, ids = parts[":"][0].strip().rpartition(" ? ")
    tests = ids.replace("@", _CONTRACTS).split()
    if kind == "text" and _TABLE not in tests:
        tests.insert(0, _TABLE)
    return Fault(name, file, breaks, tests, "\n".join(parts["-"]), "\n".join(parts["+"]))


class Verdict(NamedTuple):
    """What came of a planted fault.

    Attributes:
        caught_by: id of the first test that fails; None if none does.
        is_private: whether its file imports names that are not public.
        problem: why it is not known whether a test notices the fault.
    """

    fault: Fault
    caught_by: str | None
    is_private: bool
    sec: float
    problem: str = ""

    def __str__(self) -> str:
        by = self.caught_by or f"SURVIVED {self.problem}"
        return f"{self.fault.name:<28} {self.sec:>6.1f} s  {by}{' (private)' * self.is_private}"


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

        Numba tells by a file's time and size whether what it compiled is of this one. So the time
        is put back with the text, and what is compiled of a file with a fault is thrown away.
        """
        path, cache = self.path / fault.file, self._kernels
        before, stat = path.read_text(), path.stat()
        path.write_text(fault.applied_to(before))
        if "numba" in before:
            cache = self.path / ".numba_of_fault"
            shutil.copytree(self._kernels, cache) if self._kernels.exists() else cache.mkdir()
        try:
            yield cache
        finally:
            path.write_text(before)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            if cache != self._kernels:
                shutil.rmtree(cache)

    def run(
        self, tests: Sequence[str], cache: Path | None = None, limit_sec: float | None = None
    ) -> tuple[int | None, str]:
        """Run tests up to the first that fails; return pytest's exit code, and what it prints.

        None is the code of tests that do not end in time.
        """
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.path),
            "NUMBA_CACHE_DIR": str(cache or self._kernels),
            "PYTHONDONTWRITEBYTECODE": "1",  # Python compares only its seconds and size
            "COLUMNS": "1000",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "--tb=short"]
        command += ["-p", "no:cacheprovider", *tests]
        if not all("::" in test for test in tests):  # else they were chosen one by one
            command += ["-m", "not exhaustive"]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=self.path,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit_sec)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            return code, output.read()

    def judged(self, fault: Fault) -> Verdict:
        """Plant a fault and run its tests."""
        start = time.perf_counter()
        with self.planted(fault) as cache:
            code, output = self.run(fault.tests, cache, _TIMEOUT_SEC)
        sec, found = round(time.perf_counter() - start, 1), _FAILED.search(output)
        if code is None:
            return Verdict(fault, f"no end within {_TIMEOUT_SEC} s", False, sec)
        if code == 1 and found is not None:
            return Verdict(fault, found[1], is_private(found[1].partition("::")[0]), sec)
        problem = "" if code == 0 else f"pytest ended with {code}: {output[-600:]}"
        return Verdict(fault, None, False, sec, problem)


def is_private(file: str) -> bool:
    """Return whether a file of tests imports or patches names that are not public.

    One that holds the pool against `tests/oracle.py` counts as public.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names if alias.name[0] == "_"}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value.rpartition(".")[0])  # of what is patched
    private = any(_OURS.match(name) and not _PUBLIC.match(name) for name in names)
    return private and "tests.oracle" not in names


def main() -> int:
    """Judge faults, print and write a table; return 1 unless all were caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these faults")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the checkout (2)")
    parser.add_argument("--out", type=Path, help="write results as JSON")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a fault")
    given = parser.parse_args()
    faults = [each for each in planted() if not given.only or each.name in given.only]
    for fault in faults:
        fault.applied_to((ROOT / fault.file).read_text())  # before anything is run
    copies: SimpleQueue[Copy] = SimpleQueue()

    def judge(fault: Fault) -> Verdict:
        copy = copies.get()
        try:
            verdict = copy.judged(fault)
        finally:
            copies.put(copy)
        print(verdict, flush=True)
        return verdict

    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        made = [Copy(Path(folder) / str(number)) for number in range(given.jobs)]
        if not given.trust:
            tests = [*dict.fromkeys(test for fault in faults for test in fault.tests)]
            code, output = made[0].run(tests)
            if code != 0:
                print(f"expected tests that pass without a fault, got {code}: {output[-3000:]}")
                return 1
        for copy in made:
            copies.put(copy)
        with ThreadPoolExecutor(given.jobs) as threads:
            verdicts = [*threads.map(judge, faults)]
    num_caught = sum(each.caught_by is not None for each in verdicts)
    num_private = sum(each.is_private for each in verdicts)
    print(f"{num_caught} of {len(verdicts)} caught, {num_private} by private names")
    if given.out is not None:
        given.out.write_text(json.dumps(_result(verdicts), indent=1) + "\n")
    return 0 if num_caught == len(verdicts) else 1


def _result(verdicts: Sequence[Verdict]) -> dict[str, object]:
    from tests.about import about

    return {
        "measurement": "planted faults",
        **about(),
        "caught_by": {each.fault.name: each.caught_by for each in verdicts},
        "caught_by_private": [each.fault.name for each in verdicts if each.is_private],
    }


if __name__ == "__main__":
    sys.exit(main())
