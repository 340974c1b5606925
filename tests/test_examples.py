"""The scripts in examples/ run and say what they promise."""

import ast
import json
import re
import runpy
import warnings
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from lade.budget.budget import Budget

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_every_example_is_tested() -> None:
    tests = "".join(
        (Path(__file__).parent / f"test_{name}.py").read_text()
        for name in ("examples", "serve", "chat_web")
    )
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in tests, path.name


def test_examples_are_short_and_say_what_they_do() -> None:
    table = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        source = path.read_text()
        assert len(source.splitlines()) < 40 or path.name == "chat_web.py", path.name
        assert ast.get_docstring(ast.parse(source)), path.name
        assert f"({path.name})" in table, path.name


def test_pool_alone(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("pool_alone.py", capsys).splitlines()
    assert lines
    assert all(line.startswith("the cat ") for line in lines)
    assert any(line.startswith("the cat sat on") for line in lines)


def test_pools_of_users(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("pools_of_users.py", capsys).splitlines()
    assert lines == [
        "alice: my password is -> swordfish",
        "bob: my password is -> green",
        "forgotten: 2",
        "alice: my password is -> called",
        "still kept: alice, bob",
    ]


@pytest.mark.model
@pytest.mark.usefixtures("real_model")
def test_the_notebook_runs_from_top_to_bottom() -> None:
    path = EXAMPLES / "lade.ipynb"
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    assert not any(cell.get("outputs") for cell in notebook.cells)  # it is kept without
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    printed = "".join(
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.get("name") == "stdout"
    )
    assert "the same text in " in printed
    assert re.search(r"^\d+ tokens in \d+ steps$", printed, re.MULTILINE)


@pytest.mark.model
@pytest.mark.usefixtures("real_model")
class TestWithTheDefaultModel:
    @pytest.mark.exhaustive
    def test_chat_with_memory(self, capsys: pytest.CaptureFixture[str]) -> None:
        output = run("chat_with_memory.py", capsys)
        first, second = (float(line.split()[1]) for line in output.splitlines() if "->" in line)
        assert second > first  # the answer is in the pool by then; how far, costs decide

    @pytest.mark.exhaustive
    def test_repository_pool(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Times measured on a busy machine may say that no draft pays.
        monkeypatch.setattr("lade.hf.generation.MeasuredBudget", lambda *_: Budget(16))
        output = run("repository_pool.py", capsys)
        empty, filled = (float(line.split()[1]) for line in output.splitlines() if "->" in line)
        assert filled > empty

    @pytest.mark.exhaustive
    def test_predicted_output(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lade.hf.generation.MeasuredBudget", lambda *_: Budget(16))
        without, predicted, *_ = run("predicted_output.py", capsys).splitlines()
        assert without.split()[0] == predicted.split()[0]
        assert int(predicted.split()[-2]) <= int(without.split()[-2])

    @pytest.mark.exhaustive
    def test_wrap_pipeline(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert len(run("wrap_pipeline.py", capsys).split()) > 20

    def test_own_drafter(self, capsys: pytest.CaptureFixture[str]) -> None:
        pool, phrases = run("own_drafter.py", capsys).splitlines()
        assert pool.startswith("('pool', SourceStats(num_asked=")
        assert phrases.startswith("('Phrases', SourceStats(num_asked=")
        assert "num_asked=0," not in phrases

    @pytest.mark.exhaustive
    def test_sampling(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "same tokens: True" in run("sampling.py", capsys)

    @pytest.mark.exhaustive
    def test_rejection_sampling(self, capsys: pytest.CaptureFixture[str]) -> None:
        output = run("rejection_sampling.py", capsys)
        named = [line.split()[1] for line in output.splitlines() if line.startswith("->")]
        assert named == ["exact:", "rejection:"]

    @pytest.mark.exhaustive
    def test_many_at_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert len(run("many_at_once.py", capsys).splitlines()) >= 3

    @pytest.mark.exhaustive
    def test_batch_of_samples(self, capsys: pytest.CaptureFixture[str]) -> None:
        output = run("batch_of_samples.py", capsys)
        _, *answers = output.split("-> ")
        assert [answer.split()[0] for answer in answers] == ["Name", "Name", "Count", "Count"]
        assert answers[0] != answers[1]

    @pytest.mark.exhaustive
    def test_streaming(self, capsys: pytest.CaptureFixture[str]) -> None:
        from_a_thread, in_an_event_loop = run("streaming.py", capsys).split("\n---\n")
        assert len(from_a_thread.split()) > 20
        assert from_a_thread == in_an_event_loop

    @pytest.mark.exhaustive
    def test_stopping(self, capsys: pytest.CaptureFixture[str]) -> None:
        at_string, by_rule = map(ast.literal_eval, run("stopping.py", capsys).splitlines())
        assert at_string.endswith("Monkeys")
        assert by_rule.endswith("\n")
        assert by_rule.count("\n") == 3

    @pytest.mark.exhaustive
    def test_constrained_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("xgrammar", reason="xgrammar has no wheel for this platform")
        answer = json.loads(run("constrained_json.py", capsys))
        assert list(answer) == ["name", "population", "capital_city", "continent"]
        assert isinstance(answer["population"], int)

    @pytest.mark.exhaustive
    @pytest.mark.filterwarnings("error::lade.PlainDecodingWarning")
    @pytest.mark.filterwarnings("ignore")  # by TRL and what it uses, of versions that nobody pins
    def test_rollouts(
        self,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        pytest.importorskip("trl", reason="TRL is no dependency of lade or of its tests")
        monkeypatch.chdir(tmp_path)
        assert "'reward': " in run("rollouts.py", capsys)

    @pytest.mark.exhaustive
    def test_continue_chat(self, capsys: pytest.CaptureFixture[str]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # of a name that will be gone
            output = run("continue_chat.py", capsys)
        assert "Paris" in output
        assert "Rome" in output

    @pytest.mark.exhaustive
    def test_growing_chat(self, capsys: pytest.CaptureFixture[str]) -> None:
        output = run("growing_chat.py", capsys)
        assert "Paris" in output
        numbers = [line.split() for line in output.splitlines() if line.startswith("-> ran")]
        ran, lengths = ([int(each[place]) for each in numbers] for place in (2, 4))
        assert ran[0] == lengths[0]
        assert all(0 < num < 25 < length for num, length in zip(ran[1:], lengths[1:], strict=True))

    @pytest.mark.exhaustive
    @pytest.mark.usefixtures("own_remote_code")
    def test_decode_from_folder(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert len(run("decode_from_folder.py", capsys).split()) > 20
