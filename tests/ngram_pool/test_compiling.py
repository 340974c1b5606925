"""A cache of compiled code that is broken costs a warning and the time to compile, no more."""

import ctypes
import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numba.core.caching import IndexDataCacheFile

from ngram_pool import NGramPool, _kernels
from ngram_pool.pool import is_first_run
from tests.grids import thinned

ROOT = Path(__file__).parents[2]

# Copies a sound cache, breaks it, and says what a pool then is: its drafts, and the warnings.
PROGRAM = """
import shutil, sys, warnings
from pathlib import Path
from ngram_pool import NGramPool, _kernels
from tests.ngram_pool.test_compiling import BREAKS, drafts
folder = Path(_kernels.rebase._cache.cache_path)
if sys.argv[2] in BREAKS:
    for file in Path(sys.argv[1]).glob("_kernels.*.nb?"):
        shutil.copy(file, folder)
    BREAKS[sys.argv[2]](folder)
for _ in range(2):  # the second one has nothing to complain of
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pool = NGramPool(100)
    print(drafts(pool), *(warning.message for warning in caught), sep="|")
"""


def drafts(pool: NGramPool) -> str:
    pool.observe([1, 2, 3, 1, 2, 4, 1, 2])
    draft = pool.draft([1, 2], 6)
    return repr((draft.token_ids.tolist(), draft.probs.tolist()))


def file_of_rebase(folder: Path, suffix: str) -> Path:
    """Return a file of one kernel, which is quick to compile."""
    line = _kernels.rebase.py_func.__code__.co_firstlineno  # type: ignore[attr-defined]
    (file,) = folder.glob(f"_kernels.rebase-{line}.*{suffix}")
    return file


def fill_with_noise(folder: Path) -> None:
    file = file_of_rebase(folder, ".nbc")
    file.write_bytes(random.Random(0).randbytes(len(file.read_bytes())))


def forbid_writing(folder: Path) -> None:
    """Let a file be neither read nor replaced, not even by root, who may write everywhere."""
    file = file_of_rebase(folder, ".nbi")
    file.unlink()
    file.mkdir()


def fill_the_disk(folder: Path) -> None:
    def save(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file_of_rebase(folder, ".nbi").unlink()
    files: Any = IndexDataCacheFile
    files._save_data = save


BREAKS: dict[str, Callable[[Path], None]] = {
    "code noise": fill_with_noise,
    "not to be written": forbid_writing,
    "disk full": fill_the_disk,
}


@pytest.mark.exhaustive  # compiles all kernels
@pytest.mark.parametrize("name", BREAKS)
def test_what_cannot_be_read_is_removed_and_all_is_compiled(name: str, tmp_path: Path) -> None:
    sound = _kernels.rebase._cache.cache_path  # type: ignore[attr-defined]
    expected = drafts(NGramPool(100))

    def run(break_it: str) -> list[list[str]]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, sound, break_it],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        return [line.split("|") for line in done.stdout.splitlines()]

    first, second = run(name)
    assert first[0] == second[0] == expected
    (warning,) = first[1:]
    assert warning.startswith(f"the cache of compiled code in {tmp_path}")
    assert not second[1:]
    if name == "code noise":
        assert run("as it is") == [[expected]] * 2


# Numba loads what compiling needs by this method.
WARM = """
from numba.core.cpu import CPUContext
from tests.ngram_pool.test_compiling import NGramPool, drafts
CPUContext.refresh = None
print(drafts(NGramPool(100)))
"""


def test_code_from_the_disk_does_without_what_compiling_needs() -> None:
    expected = drafts(NGramPool(100))
    ran = subprocess.run([sys.executable, "-c", WARM], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == expected


# --- beside the code ------------------------------------------------------------------------

ADDING = """
from ngram_pool._kernels import kernel

@kernel
def add(x, y):
    return x + y
"""
# Says whether a kernel was compiled before, and what was warned of.
ADD = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import adding
    assert adding.add(2, 3) == 5
print(bool(adding.add.stats.cache_hits), *(each.message for each in caught), sep="|")
"""


def add(home: Path, **variables: str) -> list[str]:
    """Run a kernel in a process that is bound by modes of folders, even if root owns it."""
    known = {name: each for name, each in os.environ.items() if "CACHE" not in name}
    done = subprocess.run(
        [sys.executable, "-c", ADD],
        env=known | {"HOME": str(home), "PYTHONPATH": f"{home.parent / 'code'}:{ROOT}"} | variables,
        preexec_fn=lambda: ctypes.CDLL(None).prctl(24, 1, 0, 0, 0),  # no longer CAP_DAC_OVERRIDE
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip().split("|")


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder of code, and homes of three users beside it; the last one is not writable."""
    for name, mode in (("code", 0o755), ("mine", 0o755), ("yours", 0o755), ("none", 0o555)):
        (tmp_path / name).mkdir(mode=mode)
    (tmp_path / "code" / "adding.py").write_text(ADDING)
    return tmp_path / "code"


def test_users_read_what_the_installer_compiled_and_compile_the_rest(code: Path) -> None:
    installer, other, homeless = (code.parent / name for name in ("mine", "yours", "none"))
    folder = code / "__pycache__"
    assert add(installer) == ["False"]
    assert add(installer) == ["True"]
    assert [*installer.rglob("*.nb?")] == []
    folder.chmod(0o555)
    assert add(other) == add(homeless) == ["True"]
    assert [*other.rglob("*.nb?")] == []
    for file in folder.glob("*.nbi"):  # as if it were of another kernel
        folder.chmod(0o755)
        file.unlink()
        folder.chmod(0o555)
    assert add(other) == ["False"]
    assert add(other) == ["True"]
    (said,) = add(homeless)[1:]
    assert "compiles anew in each process" in said
    assert "NUMBA_CACHE_DIR" in said


@pytest.mark.parametrize("opened", thinned(["code/__pycache__", "code"], "code"))
def test_what_others_can_write_to_is_neither_read_nor_written_and_named(
    code: Path, opened: str
) -> None:
    assert add(code.parent / "mine") == ["False"]
    before = sorted((code / "__pycache__").iterdir())
    (code.parent / opened).chmod(0o777)
    home = code.parent / "yours"
    was_read, said = add(home)
    assert was_read == "False"
    assert f"others can write to {code.parent / opened}, " in said
    assert add(home)[0] == "True"  # of its own
    assert sorted((code / "__pycache__").iterdir()) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_a_folder_of_a_stranger_is_not_read(code: Path) -> None:
    assert add(code.parent / "mine") == ["False"]
    os.chown(code / "__pycache__", 65_533, 65_533)
    was_read, said = add(code.parent / "yours")
    assert was_read == "False"
    assert str(code / "__pycache__") in said


def test_a_run_after_an_interrupted_one_is_a_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    NGramPool(100)
    assert not is_first_run()
    file = _kernels.rebase._cache._cache_file  # type: ignore[attr-defined]
    monkeypatch.setattr(file, "_index_path", f"{file._index_path} of another kernel")
    assert is_first_run()
