"""A model that most tests serve."""

from collections.abc import Iterator

import pytest

from lade.models import LoadedModel
from tests.lade.apps.server.client import Client
from tests.lade.apps.server.serving import loaded_model, serving


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """A model whose answers may end by themselves, as schemas want it."""
    return loaded_model(eos_token_id=93)


@pytest.fixture(scope="module")
def client(loaded: LoadedModel) -> Iterator[Client]:
    """A client of a server of that model with the usual options."""
    with serving(loaded) as client:
        yield client
