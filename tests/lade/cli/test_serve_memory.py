"""Memory of a server's threads, which share a few of glibc's arenas."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import ctypes, sys, threading
from lade.cli.serve import share_arenas

libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p


def num_arenas():
    barrier = threading.Barrier(30)

    def work():
        held = [bytes(1000) for _ in range(100)]
        barrier.wait()
        return held

    threads = [threading.Thread(target=work) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file = libc.fopen(sys.argv[1].encode(), b"w")
    libc.malloc_info(0, ctypes.c_void_p(file))
    libc.fclose(ctypes.c_void_p(file))
    return open(sys.argv[1]).read().count("<heap nr=")

share_arenas()
print(num_arenas())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has arenas")
@pytest.mark.parametrize("asked", [None, "5"])
def test_threads_share_arenas_unless_the_environment_says_how_many(
    asked: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if asked is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", asked)
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "info.xml")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == int(asked or 2)
