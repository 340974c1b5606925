"""`lade pool …`, `--pool` and `--save-pool`, on a tiny local model of bytes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import lade
from lade.cli import build, sources
from lade.cli.app import app
from lade.cli.forgetting import runs_with
from ngram_pool import NGramPool, PoolFileError
from tests.lade.tiny import byte_tokenizer

SHORT = ["--dtype", "float32", "--max-new-tokens", "24"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def run(*args: object) -> Any:
    wide = {"COLUMNS": "150"}
    return CliRunner().invoke(app, [*map(str, args)], catch_exceptions=False, env=wide)


def texts(path: Path) -> list[str]:
    """Return what a pool on disk holds."""
    pool = NGramPool.load(path, read_only=True)
    return [byte_tokenizer().decode(ids.tolist()) for ids in pool.texts()]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of three files, one of them binary."""
    path = tmp_path / "source"
    path.mkdir()
    (path / "a.py").write_text("def a(): return 1\n" * 3)
    (path / "b.txt").write_text("Grüße aus Wien\n")
    (path / "c.png").write_bytes(b"\x89PNG\0\0")
    return path


# --- build ----------------------------------------------------------------------------------


def test_a_pool_is_built_from_a_folder(folder: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "code.pool"
    result = run("pool", "build", source, "--out", out, "--model", folder)
    assert result.exit_code == 0
    assert "71 tokens of 2 files" in result.stdout
    assert "left out: binary: 1" in result.stderr
    assert texts(out) == ["def a(): return 1\n" * 3, "Grüße aus Wien\n"]
    assert out.stat().st_mode & 0o077 == 0
    told = run("pool", "info", out).stdout
    assert "71 of at most 16,777,216" in told
    assert "text alone" in told
    assert "2 files" in told
    assert str(source) not in out.read_bytes().decode("latin-1")


def test_only_what_has_changed_is_read_again(folder: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "code.pool"
    command = ["pool", "build", source, "--out", out, "--model", folder]
    run(*command)
    again = run(*command)
    assert "0 tokens of 0 files" in again.stdout
    assert "unchanged since they were read: 3 files" in again.stderr
    (source / "b.txt").write_text("Liebe Grüße\n")
    (source / "d.txt").write_text("new\n")
    assert "of 2 files" in run(*command).stdout
    assert texts(out)[2:] == ["Liebe Grüße\n", "new\n"]
    run("pool", "prune", out, "--capacity-tokens", "30")
    assert "0 tokens of 0 files" in run(*command).stdout  # what was pruned does not come back
    lade.save_pool(NGramPool(1000), out)  # by something that knows nothing of sources
    changed = run(*command)
    assert "has changed since it was built; all files are read again" in changed.stderr
    assert "of 3 files" in changed.stdout
    out.unlink()
    assert "of 3 files" in run(*command).stdout
    (tmp_path / "code.pool.sources").write_text("{")
    assert "code.pool.sources is damaged; all files are read again" in run(*command).stderr


@pytest.mark.exhaustive
def test_an_interrupted_build_goes_on_where_it_was(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_BATCH", 3)
    source = tmp_path / "source"
    source.mkdir()
    letters = np.random.default_rng(0).integers(97, 123, (12, 4000, 10))
    for number, lines in enumerate(letters):
        text = "\n".join("".join(map(chr, line)) for line in lines)
        (source / f"{number:02}.txt").write_text(text)
    whole, out = tmp_path / "whole.pool", tmp_path / "parts.pool"
    assert run("pool", "build", source, "--out", whole, "--model", folder).exit_code == 0
    encoder_of = build.encoder_of
    num_calls = 0

    def interrupted(tokenizer: Any) -> build.Encode:
        encode = encoder_of(tokenizer)

        def after_some(texts: Any) -> list[list[int]]:
            nonlocal num_calls
            num_calls += 1
            if num_calls % 5 == 0:
                raise KeyboardInterrupt
            return encode(texts)

        return after_some

    monkeypatch.setattr(build, "encoder_of", interrupted)
    results: list[Any] = []
    while not results or results[-1].exit_code == 130:
        assert len(results) < 10
        results.append(run("pool", "build", source, "--out", out, "--model", folder))
    assert len(results) > 3
    assert "stopped; the same command goes on from here" in results[0].stderr
    assert results[-1].exit_code == 0
    assert "".join(texts(out)) == "".join(texts(whole))
    assert len(texts(whole)) == 12


def test_a_long_build_is_saved_now_and_then(
    folder: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_BATCH", 1)
    monkeypatch.setattr(build, "_SAVE_EVERY_SEC", 0.0)
    monkeypatch.setattr(build, "_SAVE_SHARE", 0.0)
    out = tmp_path / "code.pool"
    seen = []
    save_pool = lade.save_pool

    def spied(*args: Any, **kwargs: Any) -> None:
        save_pool(*args, **kwargs)
        seen.append(len(NGramPool.load(out)))

    monkeypatch.setattr(lade, "save_pool", spied)
    run("pool", "build", source, "--out", out, "--model", folder)
    assert seen[0] < seen[-1] == 71


def test_a_full_pool_holds_the_newest_and_says_so(
    folder: str, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "code.pool"
    command = ["pool", "build", source, "--out", out, "--model", folder]
    result = run(*command, "--capacity-tokens", "20")
    assert "the oldest 51 tokens were forgotten" in result.stderr
    assert "".join(texts(out)).endswith("Grüße aus Wien\n")
    assert "delete code.pool and build it anew with a larger" in result.stderr
    with pytest.raises(ValueError, match=r"expected no --capacity-tokens, as code\.pool exists"):
        run(*command, "--capacity-tokens", "71")
    copy = Path(shutil.copy(out, tmp_path / "copy.pool"))
    shutil.copy(f"{out}.sources", f"{copy}.sources")
    out.unlink()
    assert run(*command, "--capacity-tokens", "71").exit_code == 0
    run("pool", "prune", copy, "--capacity-tokens", "71")
    run("pool", "build", source, "--out", copy, "--model", folder)
    whole = [(source / name).read_text() for name in ("a.py", "b.txt")]
    assert texts(out) == texts(copy) == whole  # what was forgotten is read again


@pytest.mark.parametrize("content", [b"", b"\x89PNG\0\0", b"\xff"])
def test_no_pool_is_built_of_no_text(content: bytes, folder: str, tmp_path: Path) -> None:
    path, out = tmp_path / "a.bin", tmp_path / "a.pool"
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"expected text for a\.pool in the files, got none"):
            run("pool", "build", path, "--out", out, "--model", folder)
        assert not out.exists()


def test_chats_are_read_in_the_template_of_the_model(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    )
    tokenizer.save_pretrained(tmp_path / "model")
    path, out = tmp_path / "chats.jsonl", tmp_path / "chats.pool"
    chats = [
        {"prompt": "Why?", "response": "Because."},
        {
            "messages": [
                {"role": "assistant", "content": "Hello"},
                {"role": "user", "content": "Hi"},
            ]
        },
    ]
    path.write_text("\n".join(map(json.dumps, chats)))
    result = run("pool", "build", path, "--out", out, "--model", tmp_path / "model")
    assert texts(out) == ["<user>Why?<assistant>Because.", "Hello\n\nHi"]
    assert "whose texts alone are kept: 1" in result.stderr


def test_a_file_that_is_gone_does_not_end_a_build(
    folder: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_files = sources.find_files

    def found_before(*args: Any) -> Any:
        found = find_files(*args)
        (source / "a.py").unlink()
        return found

    monkeypatch.setattr(build, "find_files", found_before)
    out = tmp_path / "code.pool"
    result = run("pool", "build", source, "--out", out, "--model", folder)
    assert result.exit_code == 0
    assert "not readable: 1" in result.stderr
    assert texts(out) == ["Grüße aus Wien\n"]


def test_a_tokenizer_in_python_builds_a_pool_too() -> None:
    class Slow:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [*text.encode()]

    assert build.encoder_of(Slow())(["ab", "c"]) == [[97, 98], [99]]


def test_what_a_tokenizer_file_cuts_or_pads_is_whole_in_a_pool() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert [len(row) for row in build.encoder_of(tokenizer)(["abcd", "e"])] == [4, 1]


# --- info, merge, prune, forget, export -----------------------------------------------------


@pytest.fixture
def pools(folder: str, tmp_path: Path) -> list[Path]:
    """Two pools of a text each."""
    paths = []
    for name, text in (("one", "the first text"), ("two", "the second text")):
        (tmp_path / f"{name}.txt").write_text(text)
        paths.append(tmp_path / f"{name}.pool")
        run("pool", "build", tmp_path / f"{name}.txt", "--out", paths[-1], "--model", folder)
    return paths


def test_pools_are_merged_in_order(pools: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "both.pool"
    result = run("pool", "merge", *pools, "--out", out)
    assert "29 of 29 tokens of 2 pools in both.pool" in result.stdout
    assert texts(out) == ["the first text", "the second text"]
    assert NGramPool.load(out).tokenizer == NGramPool.load(pools[0]).tokenizer
    assert run("pool", "merge", *pools, "--out", out, "--capacity-tokens", "5").exit_code == 0
    assert "".join(texts(out)) == " text"


def test_pools_of_different_tokenizers_are_not_merged(pools: list[Path], tmp_path: Path) -> None:
    other = NGramPool()
    other.tokenizer = "another"
    other.save(tmp_path / "other.pool")
    with pytest.raises(PoolFileError, match=r"tokenizer '256-.*', got text of 'another'"):
        run("pool", "merge", *pools, tmp_path / "other.pool", "--out", tmp_path / "all.pool")
    with pytest.raises(PoolFileError, match=r"tokenizer 'another', got text of '256-"):
        run("pool", "merge", tmp_path / "other.pool", *pools, "--out", tmp_path / "all.pool")
    assert not (tmp_path / "all.pool").exists()


def test_pruning_keeps_the_newest_text(pools: list[Path]) -> None:
    result = run("pool", "prune", pools[1], "--capacity-tokens", "11")
    assert "11 of 15 tokens left in two.pool" in result.stdout
    assert texts(pools[1]) == ["second text"]
    run("pool", "prune", pools[1], "--capacity-tokens", "1000")
    assert NGramPool.load(pools[1]).capacity_tokens == 1000


def test_text_is_forgotten_for_good(folder: str, tmp_path: Path) -> None:
    path, out = tmp_path / "a.txt", tmp_path / "a.pool"
    path.write_text("key: SECRET-1, key: SECRET-1; key: SECRET-2")
    command = ["pool", "build", path, "--out", out, "--model", folder]
    run(*command)
    result = run("pool", "forget", out, " SECRET-1 ", "nothing", "--model", folder)
    assert "2 of 'SECRET-1' removed from a.pool" in result.stdout
    assert "no 'nothing'" in result.stdout
    assert "may still hold the text" in result.stderr
    left = "".join(texts(out))
    assert "SECRET-1" not in left
    assert left.startswith("key: ")
    assert left.endswith("ECRET-2")
    ids = np.array([*b"SECRET-1"], "<i4").tobytes()
    assert ids not in out.read_bytes()
    assert "0 tokens of 0 files" in run(*command).stdout  # it is not read again
    with pytest.raises(ValueError, match="white space"):
        run("pool", "forget", out, " ", "--model", folder)


def test_a_text_is_found_however_it_was_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = {token: i for i, token in enumerate(["a", "b", "c", " ", "ab", "bc", "abc"])}
    merges = [("a", "b"), ("b", "c"), ("ab", "c")]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(tokens, merges)))

    class Joined:
        def decode(self, ids: list[int], **kwargs: Any) -> str:
            return "".join(tokenizer.convert_ids_to_tokens(ids))

    ids = [6, 3, 4, 2, 3, 0, 5, 3, 0, 1, 2, 0, 4]  # abc ab+c a+bc a+b+c a+ab
    assert [*runs_with(Joined(), ids, "abc")] == [(6,), (4, 2), (0, 5), (0, 1, 2)]
    assert [*runs_with(Joined(), ids, "ca")] == [(2, 0)]
    monkeypatch.setattr("lade.cli.forgetting._WINDOW", 64)
    assert [*runs_with(Joined(), [0, 1] * 500, "bab")][-1] == (1, 0, 1)
    assert len([*runs_with(Joined(), [0, 1] * 300, "ba")]) >= 299


def test_an_exported_pool_is_built_again(folder: str, pools: list[Path], tmp_path: Path) -> None:
    printed = run("pool", "export", pools[0], "--model", folder).stdout
    assert json.loads(printed.splitlines()[-1]) == {"text": "the first text"}
    lines, again = tmp_path / "lines.jsonl", tmp_path / "again.pool"
    run("pool", "export", pools[1], "--out", lines, "--model", folder)
    run("pool", "build", lines, "--out", again, "--model", folder)
    assert texts(again) == texts(pools[1])


def test_what_is_no_pool_is_told_in_a_line(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "no.pool"
    path.write_text("text")
    with pytest.raises(PoolFileError, match=r"no\.pool"):
        run("pool", "info", path)
    with pytest.raises(ValueError, match=r"no such folder: .*none"):
        run("pool", "build", path, "--out", tmp_path / "none" / "a.pool", "--model", folder)


# --- drafting from pools --------------------------------------------------------------------


def steps_of(result: Any) -> float:
    """Return the tokens a step that `lade generate` reports."""
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stderr.splitlines() if " a step" in line)
    return float(line.split(", ")[2].split()[0])


def test_generate_learns_in_one_pool_and_reads_others(folder: str, tmp_path: Path) -> None:
    options = ["--model", folder, *SHORT, "--max-draft-tokens", "4"]
    mine = tmp_path / "mine.pool"
    first = run("generate", "abcabc", *options, "--save-pool", mine)
    assert f"30 tokens kept in {mine}" in first.stderr
    before = mine.read_bytes()
    plain = run("generate", "abcabc", *options)
    read = run("generate", "abcabc", *options, "--pool", mine)
    assert mine.read_bytes() == before
    second = run("generate", "abcabc", *options, "--save-pool", mine, "--pool", mine)
    assert len(NGramPool.load(mine)) == 60
    assert len({result.stdout for result in (first, plain, read, second)}) == 1
    assert steps_of(plain) == steps_of(first) < min(steps_of(read), steps_of(second))
    with pytest.raises(ValueError, match=r"expected no .*--pool with --verification"):
        run("generate", "abcabc", *options, "--pool", mine, "--verification", "plain")
    other = NGramPool()
    other.tokenizer = "another"
    other.save(tmp_path / "other.pool")
    with pytest.raises(PoolFileError, match="got text of 'another'"):
        run("generate", "abcabc", *options, "--pool", tmp_path / "other.pool")


def test_ctrl_c_keeps_what_was_learned(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.pool"

    def interrupted(*args: Any, pool: Any = None, **kwargs: Any) -> Any:
        if pool is not None:
            pool[0].observe([1, 2, 3])
            raise KeyboardInterrupt

    monkeypatch.setattr(lade, "generate", interrupted)
    result = run("generate", "abc", "--model", folder, *SHORT, "--save-pool", mine)
    assert result.exit_code == 130
    assert len(NGramPool.load(mine)) == 3


def test_the_demo_takes_pools(folder: str, tmp_path: Path) -> None:
    mine, path = tmp_path / "mine.pool", tmp_path / "demo.json"
    options = ["--model", folder, *SHORT, "--prompt", "abcabc", "--no-prewarm"]
    options += ["--max-draft-tokens", "4", "--json", str(path)]
    run("demo", *options, "--save-pool", mine)
    (first,) = json.loads(path.read_text())["prompts"]
    run("demo", *options, "--pool", mine)
    content = json.loads(path.read_text())
    assert content["settings"]["pools"] == ["mine.pool"]
    (second,) = content["prompts"]
    assert second["stats"]["num_steps"] < first["stats"]["num_steps"]
