"""A model that most tests serve, and limits that are small enough for tests."""

from collections.abc import Iterator

import pytest

from lade.models import LoadedModel
from tests.lade.server.client import Client
from tests.lade.server.serving import loaded_model, serving


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """A model whose answers may end by themselves, as schemas want it."""
    return loaded_model(eos_token_id=93)


@pytest.fixture(scope="module")
def client(loaded: LoadedModel) -> Iterator[Client]:
    """A client of a server of that model with the usual options."""
    with serving(loaded) as client:
        yield client


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make limits that are of seconds and megabytes small enough for tests."""
    monkeypatch.setattr("lade.server.connections.HEADER_SEC", 0.3)
    monkeypatch.setattr("lade.server.connections.END_SEC", 1.0)
    monkeypatch.setattr("lade.server.routes._BODY_SEC", 0.4)
    monkeypatch.setattr("lade.server.routes._MAX_BODIES_OF_KEY", 3)
