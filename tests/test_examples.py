"""The scripts in examples/ run and say what they promise."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_every_example_is_tested() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {"pool_alone.py", "chat_with_memory.py", "wrap_pipeline.py"}


def test_pool_alone(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("pool_alone.py", capsys).splitlines()
    assert lines
    assert all(line.startswith("the cat ") for line in lines)
    assert any(line.startswith("the cat sat on") for line in lines)


@pytest.mark.model
@pytest.mark.usefixtures("real_model")
@pytest.mark.parametrize("name", ["chat_with_memory.py", "wrap_pipeline.py"])
def test_examples_with_the_default_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = run(name, capsys)
    assert len(output.split()) > 20
    if name == "chat_with_memory.py":
        first, second = (float(line.split()[1]) for line in output.splitlines() if "->" in line)
        assert second > first + 1  # the answer is in the pool by then
