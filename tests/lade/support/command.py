"""The command `lade support`, as tests run it."""

from typing import Any

from typer.testing import CliRunner

from lade.cli.app import app


def run(*args: str) -> Any:
    """Return the result of `lade support` with these arguments."""
    return CliRunner().invoke(
        app, ["support", *args], catch_exceptions=False, env={"COLUMNS": "160"}
    )
