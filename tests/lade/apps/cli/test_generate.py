"""`lade generate`: text, options, figures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ngram_pool import NGramPool
from tests.lade.apps.cli.command import SHORT, Done, run
from tests.lade.apps.cli.conftest import TEMPLATE


def plain_text(folder: str, prompt: str, **options: Any) -> str:
    """Return what plain generate makes of a prompt, without any template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, tokenizer=tokenizer, max_new_tokens=12, **options)
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    return text


def answered(folder: str, *options: object, prompt: str = "abcabc", **given: Any) -> Done:
    done = run("generate", prompt, "--model", folder, *SHORT, *options, **given)
    assert done.code == 0, done.err
    return done


def test_the_answer_is_that_of_generate_with_its_speed_behind_it(folder: str) -> None:
    done = answered(folder, "--threads", 2)
    assert done.out == plain_text(folder, "abcabc", do_sample=False) + "\n"
    assert done.err.startswith("Loading torch and transformers …\n")
    assert "Checking how the model verifies drafts …\n12 tokens, " in done.err
    assert "accepted of drafted" not in done.err
    assert "seed" not in done.err
    lines = answered(folder, prompt="-", given="abc\nabc").out
    assert lines == answered(folder, prompt="abc\nabc").out != done.out


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_what_an_encoding_lacks_is_replaced(folder: str, encoding: str) -> None:
    expected = plain_text(folder, "abcabc", do_sample=False).encode(encoding, "replace")
    assert b"?" in expected
    assert answered(folder, encoding=encoding).out == expected.decode(encoding) + "\n"


def test_samples_are_those_of_generate_with_the_same_seed(folder: str) -> None:
    done = answered(folder, "--temperature", 1.5, "--top-p", 0.9, "--top-k", 50, "--seed", 7)
    torch.manual_seed(7)
    sampling = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 50}
    assert done.out == plain_text(folder, "abcabc", **sampling) + "\n"
    assert "a step, seed 7\n" in done.err


def test_prompts_go_into_the_chat_template_unless_they_are_raw(
    templated: Callable[[str], str],
) -> None:
    model = templated(TEMPLATE)
    for options, prompt in (
        ([], "<u>ab<a>"),
        (["--system", "be brief"], "<s>be brief<u>ab<a>"),
        (["--raw"], "ab"),
    ):
        expected = plain_text(model, prompt, do_sample=False)
        assert answered(model, *options, prompt="ab").out == expected + "\n"


def test_it_ends_with_the_first_of_several_stops(folder: str) -> None:
    whole = plain_text(folder, "abcabc", do_sample=False)
    stop = next(letter for letter in whole[2:] if letter.isascii())
    done = answered(folder, "--stop", "never there", "--stop", stop)
    assert done.out == whole[: whole.index(stop) + 1] + "\n"
    assert "12 tokens" not in done.err


def test_a_prediction_is_drafted_from(folder: str, tmp_path: Path) -> None:
    whole = plain_text(folder, "abcabc", do_sample=False)
    (tmp_path / "predicted.txt").write_bytes(whole.encode() + b"\r\n")
    done = answered(folder, "--prediction", tmp_path / "predicted.txt")
    assert done.out == whole + "\n"
    assert " tokens a step" in done.err  # which is said where there are drafts alone


def test_one_pool_learns_and_others_are_read(folder: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.pool"
    first = answered(folder, "--save-pool", mine)
    assert f"18 tokens kept in {mine}" in first.err
    before = mine.read_bytes()
    read = answered(folder, "--pool", mine)
    assert mine.read_bytes() == before
    second = answered(folder, "--save-pool", mine, "--pool", mine)
    assert len(NGramPool.load(mine)) == 36
    assert first.out == read.out == second.out
    other = NGramPool()
    other.tokenizer = "another"
    other.save(tmp_path / "other.pool")
    done = run("generate", "abc", "--model", folder, *SHORT, "--pool", tmp_path / "other.pool")
    assert "got text of 'another'" in done.error_line


def test_the_rate_shown_is_that_of_the_answer_alone(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr("lade.apps.cli.generate.perf_counter", lambda: float(next(ticks)))
    assert (
        "12 tokens, 12.0 tokens a second" in answered(folder).err
    )  # of a second, whatever came before
