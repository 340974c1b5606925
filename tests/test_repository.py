"""Workflows, hooks and releases agree with the Makefile and pyproject.toml."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from lade import __version__
from tests.release import faults

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCE = PROJECT["urls"]["Source"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    rules = re.findall(r"^([a-z][a-z -]*):", makefile, re.MULTILINE)
    return {target for rule in rules for target in rule.split()}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_nothing_but_targets_of_the_makefile(path: Path) -> None:
    jobs: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    for step in steps:  # actions are of a pinned major version
        assert re.search(r"@(v\d+|release/v\d+)$", step.get("uses", "@v1")), step
    commands = [shlex.split(step["run"]) for step in steps if "run" in step]
    assert commands
    for make, target, *variables in commands:
        assert make == "make"
        assert target in make_targets(), target
        assert all(re.match(r"[A-Z]+=", variable) for variable in variables)


def test_workflows_run_every_python_that_is_supported() -> None:
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    prefix = "Programming Language :: Python :: 3."
    supported = [name for name in PROJECT["classifiers"] if name.startswith(prefix)]
    expected = [name.rpartition(" ")[2] for name in supported]
    assert ci["jobs"]["test"]["strategy"]["matrix"]["python-version"] == expected
    assert PROJECT["requires-python"] == f">={expected[0]}"


def test_hooks_run_what_make_check_runs() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.split("\ncheck:")[1].split("\n\n")[0]
    checked = [
        line.split("$(VENV)/bin/")[1].split(" -")[0].split(" .")[0]
        for line in recipe.splitlines()[1:]
    ]
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (repo,) = config["repos"]
    assert repo["repo"] == "local"  # another would have versions of its own
    entries = [hook["entry"].split(" -")[0] for hook in repo["hooks"]]
    assert entries == [f".venv/bin/{command}" for command in checked]


def test_a_release_needs_its_version_its_entry_and_its_repository(tmp_path: Path) -> None:
    (tmp_path / "lade").mkdir()
    for name in ("lade/_version.py", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(f"## [Unreleased]\n\n## [{__version__}] - 2026-11-20\n", encoding="utf-8")
    tag = f"v{__version__}"
    assert list(faults(tag, SOURCE, tmp_path)) == []
    (fault,) = faults("v9.9.9", SOURCE, tmp_path)
    assert fault.startswith(f"expected the tag {tag}, ")
    (fault,) = faults(tag, "https://github.com/someone/fork", tmp_path)
    assert fault.startswith("expected the address https://github.com/someone/fork ")
    changelog.write_text("## [Unreleased]\n", encoding="utf-8")
    (fault,) = faults(tag, SOURCE, tmp_path)
    assert fault.endswith("it has Unreleased")


def test_what_leads_to_the_repository_leads_to_the_same_one() -> None:
    """A fork, or a move, is one line of pyproject.toml and what this test then names."""
    for name, url in PROJECT["urls"].items():
        assert url == SOURCE or url.startswith(f"{SOURCE}/") or "github.com" not in url, name


def test_the_recipe_of_conda_forge_wants_what_the_wheel_wants() -> None:
    text = (ROOT / ".github" / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    recipe = yaml.safe_load(text)
    assert recipe["context"]["version"] == __version__
    names = {"pytorch": "torch", "python-safetensors": "safetensors"}
    run = [each.replace(" ", "") for each in recipe["requirements"]["run"]]
    assert f"python{PROJECT['requires-python']}" == run[0]
    for given, ours in names.items():
        run = [each.replace(given, ours) if each.startswith(given) else each for each in run]
    assert sorted(run[1:]) == sorted(PROJECT["dependencies"])
    cli = [each.replace(" ", "") for each in recipe["requirements"]["run_constraints"]]
    assert {*cli} < {*PROJECT["optional-dependencies"]["cli"]}
