"""The scripts in examples/ run and say what they promise."""

import ast
import configparser
import json
import re
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.grids import thinned

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


def test_servers_are_deployed_by_files_that_parse_and_options_that_there_are() -> None:
    import yaml
    from typer.main import get_command

    from lade.apps.cli.app import app

    command: Any = get_command(app)
    known = {each for option in command.commands["serve"].params for each in option.opts}
    service = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]["lade"]
    unit = configparser.RawConfigParser(delimiters="=")
    unit.read_string((EXAMPLES / "lade.service").read_text())
    program, *words = shlex.split(unit["Service"]["ExecStart"])
    assert (Path(program).name, words[0]) == ("lade", "serve")
    nginx = re.sub("#.*", "", (EXAMPLES / "nginx.conf").read_text())
    assert nginx.count("{") == nginx.count("}") == 2
    statements = [each.split() for each in re.split("[;{}]", nginx) if each.strip()]
    found = {name: values for name, *values in statements}
    for given, stop in (
        (words, unit["Service"]["TimeoutStopSec"]),
        (service["command"], service["stop_grace_period"].removesuffix("s")),
    ):
        assert {word for word in given if word.startswith("-")} <= known
        assert [given[given.index("--allowed-host") + 1]] == found["server_name"]
        assert int(stop) > int(given[given.index("--grace-sec") + 1])
    assert found["proxy_buffering"] == ["off"]
    assert found["proxy_pass"] == ["http://lade:8000"]


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
        "deleted: True",
        "alice: my password is ->",
        "still kept: bob",
    ]


@pytest.mark.exhaustive  # a kernel of its own, and some hundred tokens
@pytest.mark.model
@pytest.mark.usefixtures("real_model")
def test_the_notebook_runs_from_top_to_bottom() -> None:
    import nbformat
    from nbclient import NotebookClient

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


def after_arrow(output: str) -> list[float]:
    """Return the number in each line that begins with an arrow or has one."""
    return [float(line.split()[1]) for line in output.splitlines() if "->" in line]


def check_stopping(output: str) -> bool:
    at_string, by_rule = map(ast.literal_eval, output.splitlines())
    ends = at_string.endswith("Monkeys") and by_rule.endswith("\n")
    return bool(ends and by_rule.count("\n") == 3)


def check_batch(output: str) -> bool:
    _, *answers = output.split("-> ")
    firsts = [answer.split()[0] for answer in answers]
    return firsts == ["Name", "Name", "Count", "Count"] and answers[0] != answers[1]


def check_json(output: str) -> bool:
    answer = json.loads(output)
    return list(answer) == ["capital_city", "continent"] and isinstance(answer["capital_city"], str)


def check_growing(output: str) -> bool:
    numbers = [line.split() for line in output.splitlines() if line.startswith("-> ran")]
    ran, lengths = ([int(each[place]) for each in numbers] for place in (2, 4))
    later = zip(ran[1:], lengths[1:], strict=True)
    return "Paris" in output and ran[0] == lengths[0] and all(0 < n < 25 < m for n, m in later)


def check_prediction(output: str) -> bool:
    without, predicted, *_ = (line.split() for line in output.splitlines())
    return without[0] == predicted[0] and int(predicted[-2]) <= int(without[-2])


def check_streaming(output: str) -> bool:
    from_a_thread, in_an_event_loop = output.split("\n---\n")
    return from_a_thread == in_an_event_loop and len(from_a_thread.split()) > 20


#: What each example prints with the default model.
CHECKS: dict[str, Callable[[str], bool]] = {
    "batch_of_samples.py": check_batch,
    # The answer is in the pool by then; how far, costs decide.
    "chat_with_memory.py": lambda output: float.__lt__(*after_arrow(output)),
    "constrained_json.py": check_json,
    "continue_chat.py": lambda output: "Paris" in output and "Rome" in output,
    "decode_from_folder.py": lambda output: len(output.split()) > 20,
    "growing_chat.py": check_growing,
    "many_at_once.py": lambda output: len(output.splitlines()) >= 3,
    "own_drafter.py": lambda output: output.count("SourceStats(num_asked=") == 2,
    "predicted_output.py": check_prediction,
    "rejection_sampling.py": lambda output: (
        re.findall(r"^-> (\w+):", output, re.MULTILINE) == ["exact", "rejection"]
    ),
    "repository_pool.py": lambda output: float.__lt__(*after_arrow(output)),
    "sampling.py": lambda output: "same tokens: True" in output,
    "stopping.py": check_stopping,
    "streaming.py": check_streaming,
    "wrap_pipeline.py": lambda output: len(output.split()) > 20,
}


@pytest.mark.model
@pytest.mark.usefixtures("real_model", "own_remote_code")
@pytest.mark.parametrize("name", thinned(CHECKS, "own_drafter.py"))
def test_with_the_default_model(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ("predicted_output.py", "repository_pool.py"):
        from lade.budget.budget import Budget

        # Times measured on a busy machine may say that no draft pays.
        monkeypatch.setattr("lade.hf.setup.Budget", lambda *_, **__: Budget(fixed=16))
    if name == "constrained_json.py":
        pytest.importorskip("xgrammar", reason="xgrammar has no wheel for this platform")
    output = run(name, capsys)
    assert CHECKS[name](output), output


@pytest.mark.exhaustive  # two replicas of a model
@pytest.mark.model
@pytest.mark.usefixtures("real_model")
def test_ray_serve(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="Ray is no dependency of lade or of its tests")
    runpy.run_path(str(EXAMPLES / "ray_serve.py"), run_name="__main__")
    first, *_, last = re.findall(r"-> tokens per forward: (.*)", capfd.readouterr().out)
    assert min(map(float, last.split())) > max(map(float, first.split()))


@pytest.mark.exhaustive  # minutes of training
@pytest.mark.model
@pytest.mark.usefixtures("real_model")
@pytest.mark.filterwarnings("error::lade.PlainDecodingWarning")
@pytest.mark.filterwarnings("ignore")  # by TRL and what it uses, of versions that nobody pins
def test_rollouts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", reason="TRL is no dependency of lade or of its tests")
    monkeypatch.chdir(tmp_path)
    assert "'reward': " in run("rollouts.py", capsys)
