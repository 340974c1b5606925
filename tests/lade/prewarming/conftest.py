"""A table on disk, as `lade prewarm` leaves it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors

from lade.prewarming import tables
from lade.prewarming.tables import Effort, StoredTable, write_table
from ngram_pool import SuccessorTable
from tests.lade.tiny import tiny_model


@pytest.fixture
def written(tmp_path: Path) -> SimpleNamespace:
    """A model, the file of its table and what is in there."""
    model = tiny_model("llama")
    path = tables.path_of_table(model, tmp_path)
    table = SuccessorTable(64)
    table.put([[-1, 5], [4, 5]], [[6, 7], [8, 9]], [[0.5, 0.25], [0.75, 0.125]])
    effort = Effort(prefix_token_id=9, num_tokens=70, seconds=1.5)
    write_table(path, model, StoredTable(table, effort))
    with safetensors.safe_open(path, framework="numpy") as file:
        described = json.loads(file.metadata()["lade_table"])
    return SimpleNamespace(model=model, path=path, table=table, effort=effort, described=described)
