"""What `make gpu` needs: an environment around a CUDA build of torch, also without a package index.

    python -m benchmarks.gpu.prepare environment FOLDER [--wheels FOLDER]
    python -m benchmarks.gpu.prepare check [--device cpu]
    python -m benchmarks.gpu.prepare bundle FILE [--python 3.12]

`bundle` packs the project's committed files and the wheels of what is missing beside torch and
transformers, for a machine without a package index: unpack it there, then
`make gpu-right WHEELS=wheels`. Only the standard library is imported where nothing is installed.
"""

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

_PROJECT = "lade-decoding"
_TESTING = ("hypothesis", "pytest", "pytest-xdist")
#: What is there already, with all that it needs: gigabytes, and of one make with the driver.
_THERE = ("torch", "transformers")
MAX_BUNDLE_BYTES = 60_000_000
_PLATFORMS = ("2_28", "2_27", "2_17", "2014")


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line asks for; end with what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    environment = commands.add_parser("environment")
    environment.add_argument("folder", type=Path)
    environment.add_argument("--wheels", type=Path)
    check = commands.add_parser("check")
    check.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    bundle = commands.add_parser("bundle")
    bundle.add_argument("file", type=Path)
    bundle.add_argument("--python", default="3.12")
    chosen = parser.parse_args(arguments)
    if chosen.command == "environment":
        make_environment(chosen.folder, chosen.wheels)
    elif chosen.command == "bundle":
        print(f"{make_bundle(chosen.file, chosen.python) / 1e6:.1f} MB in {chosen.file}")
    elif missing := what_is_missing(chosen.device):
        sys.exit("make gpu cannot run here:\n" + "\n".join(f"- {each}" for each in missing))


def make_environment(folder: Path, wheels: Path | None) -> None:
    """Make a virtual environment; torch is that of this Python, if it has a CUDA build.

    Args:
        folder: the environment's.
        wheels: of what is missing beside torch; without it a package index is asked.
    """
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    if wheels is not None or _has_cuda_torch():
        # The old release that Python 3.11 brings would hide the one that torch needs.
        subprocess.run(
            [python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"],
            capture_output=True,
        )
        # Also where this Python's packages are those of another virtual environment.
        there = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = subprocess.check_output([python, "-c", code], text=True).strip()
        Path(site, "beside.pth").write_text("\n".join(there) + "\n")
    wanted = ["--editable", ".[dev]"]
    if wheels is not None:
        wanted = ["--no-index", "--find-links", str(wheels), f"{_PROJECT}[cli]", *_TESTING]
    done = subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted])
    if done.returncode:
        sys.exit(f"expected pip to install {' '.join(wanted)}; what it said stands above")


def what_is_missing(device: str) -> list[str]:
    """Return all that tests and benchmarks on a device lack, each as a sentence."""
    import torch

    missing = []
    if device == "cuda" and torch.version.cuda is None:
        missing.append(
            f"torch {torch.__version__} was not built for CUDA; with another Python that has such "
            "a build: make gpu PYTHON=…"
        )
    elif device == "cuda" and not torch.cuda.is_available():
        missing.append(f"torch {torch.__version__} finds no CUDA device; does nvidia-smi?")
    if device == "cuda" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        missing.append("Triton needs a C compiler: cc, gcc or clang")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if device == "cuda" and not header.exists():
        missing.append(f"Triton needs Python's headers ({header}): python3-dev")
    return missing


def make_bundle(file: Path, python: str) -> int:
    """Write committed files and wheels to a tar file, compressed; return its size in bytes.

    Raises:
        RuntimeError: it is larger than a bundle may be.
    """
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder) / "wheels"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        run = subprocess.check_call
        run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), "."])
        platforms = [f"--platform=manylinux{each}_x86_64" for each in _as_tags()]
        run(
            [
                *pip,
                *("download", "--quiet", "--no-deps", "--only-binary=:all:"),
                *("--dest", str(wheels), "--python-version", python, "--implementation", "cp"),
                *platforms,
                *("--constraint", "constraints.txt", *needed_beside_torch()),
            ]
        )
        project, archive = Path(folder) / "project.tar", Path(folder) / "bundle.tar.xz"
        run(["git", "archive", "--output", str(project), "HEAD"])
        for wheel in wheels.iterdir():
            _decompress(wheel)
        with tarfile.open(archive, "w:xz") as packed, tarfile.open(project) as of_project:
            for member in of_project:
                packed.addfile(member, of_project.extractfile(member) if member.isfile() else None)
            packed.add(wheels, "wheels")
        num_bytes = archive.stat().st_size
        if num_bytes > MAX_BUNDLE_BYTES:
            raise RuntimeError(
                f"expected a bundle of at most {MAX_BUNDLE_BYTES / 1e6:.0f} MB, got "
                f"{num_bytes / 1e6:.1f} MB"
            )
        shutil.move(archive, file)
    return num_bytes


def _decompress(wheel: Path) -> None:
    """Store what a wheel has: compressed all together, wheels take a third less."""
    stored = wheel.with_suffix(".stored")
    with zipfile.ZipFile(wheel) as given, zipfile.ZipFile(stored, "w") as made:
        for each in given.infolist():
            content = given.read(each)
            each.compress_type = zipfile.ZIP_STORED
            made.writestr(each, content)
    stored.replace(wheel)


def needed_beside_torch() -> list[str]:
    """Return the names of all packages that the project needs and its tests on a GPU."""
    from packaging.requirements import Requirement  # not there where nothing is installed

    wanted = [f"{_PROJECT}[cli]", *_TESTING]
    # What the project names itself may be too old there, and is small.
    named = {each.name for each in map(Requirement, _needs_of(wanted[0]))} - {*_THERE, "numpy"}
    return sorted((_closure(wanted) - _closure(_THERE) - {_PROJECT}) | named)


def _closure(wanted: Sequence[str]) -> set[str]:
    """Return some packages and all that they need, by what is installed here."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    names: set[str] = set()
    left = [Requirement(each) for each in wanted]
    while left:
        needed = left.pop()
        name = canonicalize_name(needed.name)
        if name in names and not needed.extras:
            continue
        names.add(name)
        left += map(Requirement, _needs_of(str(needed)))
    return names


def _needs_of(wanted: str) -> list[str]:
    """Return what a package with its extras needs directly."""
    from packaging.requirements import Requirement

    needed = Requirement(wanted)
    extras = [{"extra": extra} for extra in needed.extras] or [{"extra": ""}]
    needs = [(text, Requirement(text).marker) for text in metadata.requires(needed.name) or ()]
    return [text for text, mark in needs if mark is None or any(map(mark.evaluate, extras))]


def _as_tags() -> list[str]:
    return [each if re.fullmatch(r"\d{4}", each) else f"_{each}" for each in _PLATFORMS]


def _has_cuda_torch() -> bool:
    code = "import sys, torch; sys.exit(torch.version.cuda is None)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


if __name__ == "__main__":
    main()
