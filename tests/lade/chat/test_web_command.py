"""`lade chat --web`: what it serves, to whom, and what it says where it cannot."""

import shutil
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lade.cli.app import app
from lade.errors import MissingExtraError
from ngram_pool import NGramPool
from tests.lade.chat.conftest import tokenizer_with
from tests.lade.chat.loops import in_loop
from tests.lade.tiny import tiny_model

pytestmark = pytest.mark.xdist_group("web")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved tiny model."""
    path = tmp_path_factory.mktemp("tiny")
    tokenizer_with().save_pretrained(path)
    tiny_model(dtype=torch.float32, vocab_size=256).save_pretrained(path)
    return str(path)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let commands end, as by Ctrl-C, once their page was read; return what was launched."""
    pytest.importorskip("gradio", reason='needs the extra: pip install "lade-decoding[web]"')
    from lade.chat.web import Page

    launched: list[Any] = []
    launch = Page.launch

    def noted(page: Page, host: str, *options: Any) -> str:
        address = launch(page, host, *options)
        launched.append((page, host, urllib.request.urlopen(address, timeout=30).read().decode()))
        return address

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Page, "launch", noted)
    monkeypatch.setattr("lade.cli.web._until_interrupted", interrupted)
    return launched


def run(*arguments: str) -> Any:
    command = ["chat", "--web", "--dtype", "float32", *arguments]
    wide = {"COLUMNS": "150"}
    return in_loop(lambda: CliRunner().invoke(app, command, catch_exceptions=False, env=wide))


def test_the_page_is_served_here_until_it_is_interrupted(
    folder: str, pages: list[Any], tmp_path: Path
) -> None:
    read = tmp_path / "read.pool"
    pool = NGramPool()
    pool.observe([*b"abcdefgh"])
    pool.save(read)
    result = run("--model", folder, "--pool", str(read), "--max-new-tokens", "7", "--system", "Hi")
    assert result.exit_code == 0
    ((page, host, text),) = pages
    assert host == "127.0.0.1"
    assert result.stdout.startswith("http://127.0.0.1:")
    assert "can use the model" not in result.stderr
    assert "lade: " in text
    setup = page.sessions._setup
    assert setup.settings.max_new_tokens == 7
    assert setup.system == "Hi"
    assert [len(each) for each in setup.pools] == [8]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(result.stdout.strip(), timeout=5)


def test_letting_others_in_is_said(folder: str, pages: list[Any]) -> None:
    result = run("--model", folder, "--host", "0.0.0.0")
    assert "note: whoever reaches this address can use the model" in result.stderr


def test_a_port_that_is_taken_is_refused(folder: str, pages: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen at 127.0.0.1:{port}: .*in use"):
            run("--model", folder, "--port", str(port))
    assert pages == []


def test_a_system_prompt_that_the_model_has_no_place_for_is_refused(
    folder: str, pages: list[Any], tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tokenizer_with(None).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        run("--model", str(tmp_path), "--system", "Hi")
    assert pages == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--web", "--save-pool", "x.pool"], "expected no --save-pool with --web"),
        (["--port", "8000"], "expected --host, --port, --share and --password only with --web"),
        (["--host", "::1"], "expected --host, --port, --share and --password only with --web"),
        (["--share"], "expected --host, --port, --share and --password only with --web"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(app, ["chat", *options], catch_exceptions=False)


def test_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "lade.cli.web", raising=False)
    monkeypatch.delitem(sys.modules, "lade.chat.web")
    monkeypatch.delattr("lade.chat.web")
    with pytest.raises(MissingExtraError) as error:
        CliRunner().invoke(app, ["chat", "--web", "--model", "/nowhere"], catch_exceptions=False)
    assert str(error.value) == (
        "this needs the package 'gradio', which is not installed; "
        'install it with: pip install "lade-decoding[web]"'
    )
