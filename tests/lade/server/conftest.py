"""Limits that are small enough for tests."""

import pytest


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make limits that are of seconds and megabytes small enough for tests."""
    monkeypatch.setattr("lade.server.connections.HEADER_SEC", 0.3)
    monkeypatch.setattr("lade.server.connections.END_SEC", 1.0)
    monkeypatch.setattr("lade.server.routes._BODY_SEC", 0.4)
    monkeypatch.setattr("lade.server.routes._MAX_BODIES_OF_KEY", 3)
