"""What `make gpu` needs, and how it gets there without a package index."""

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import prepare


def test_a_cpu_lacks_nothing_and_all_that_a_gpu_needs_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert prepare.what_is_missing("cpu") == []
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    build, compiler, headers = prepare.what_is_missing("cuda")
    assert "was not built for CUDA" in build
    assert "C compiler" in compiler
    assert "/nowhere/Python.h" in headers
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in prepare.what_is_missing("cuda")[0]
    with pytest.raises(SystemExit, match="cannot run here:\n- torch"):
        prepare.main(["check"])
    prepare.main(["check", "--device", "cpu"])


def test_what_torch_and_transformers_bring_is_not_carried() -> None:
    needed = prepare.needed_beside_torch()
    assert {"numba", "llvmlite", "typer", "pytest", "hypothesis"} <= {*needed}
    assert not {"torch", "transformers", "numpy", "tokenizers", "triton", "lade-decoding"} & {
        *needed
    }


@pytest.mark.parametrize("has_wheels", [False, True])
def test_an_environment_takes_the_torch_that_is_there(
    has_wheels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: Any, **options: Any) -> Any:
        commands.append([*map(str, command)])
        return subprocess.CompletedProcess(command, 0, stdout=f"{tmp_path}\n")

    monkeypatch.setattr(venv, "create", lambda *args, **options: None)
    monkeypatch.setattr(subprocess, "run", run)
    prepare.make_environment(tmp_path / "environment", Path("wheels") if has_wheels else None)
    assert any(each[-1] == "setuptools" for each in commands)  # an old one hides torch's
    beside = (tmp_path / "beside.pth").read_text().splitlines()
    assert str(Path(torch.__file__).parents[1]) in beside
    index = ["--no-index", "--find-links", "wheels"]
    assert (commands[-1][5:8] == index) == has_wheels
    assert ("--editable" in commands[-1]) != has_wheels


def test_a_bundle_has_the_project_and_its_wheels_and_is_not_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_wheels(command: list[str]) -> None:
        if "wheel" in command:
            folder = Path(command[command.index("--wheel-dir") + 1])
            folder.mkdir()
            with zipfile.ZipFile(folder / "lade.whl", "w", zipfile.ZIP_DEFLATED) as made:
                made.writestr("lade.so", bytes(range(256)) * 100)
        elif "download" in command:
            assert command[command.index("--python-version") + 1] == "3.12"
            assert "numba" in command
        else:
            with tarfile.open(command[command.index("--output") + 1], "w") as packed:
                packed.add(__file__, "Makefile")

    monkeypatch.setattr(subprocess, "check_call", make_wheels)
    made = tmp_path / "bundle.tar.xz"
    prepare.main(["bundle", str(made)])
    with tarfile.open(made) as packed:
        assert {"Makefile", "wheels/lade.whl"} <= {*packed.getnames()}
        packed.extractall(tmp_path, filter="data")
    with zipfile.ZipFile(tmp_path / "wheels" / "lade.whl") as wheel:
        assert wheel.read("lade.so") == bytes(range(256)) * 100
    monkeypatch.setattr(prepare, "MAX_BUNDLE_BYTES", 100)
    with pytest.raises(RuntimeError, match="expected a bundle of at most 0 MB"):
        prepare.make_bundle(made, "3.12")


def test_only_the_standard_library_is_needed_to_begin() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "benchmarks.gpu.prepare", "--help"],
        capture_output=True,
        text=True,
        cwd=Path(prepare.__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
