"""The grid of settings: which there are, and what a cell holds."""

import json

import pytest
import torch

from lade.bench.grid import as_json, run_cell, settings_of, table
from lade.bench.prompts import Prompt
from lade.bench.settings import Settings
from lade.cli.grid import choose_dtypes, choose_numbers, choose_sizes
from lade.config import Config
from lade.models.loading import LoadedModel
from tests.lade.tiny import byte_tokenizer, tiny_model

PROMPTS = [Prompt(str(i), "a", text) for i, text in enumerate(("abab", "xyz", "hello", "q"))]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return LoadedModel(tiny_model("llama", vocab_size=256), byte_tokenizer(), "tiny")


def test_a_grid_combines_settings_and_samples_only_above_temperature_0() -> None:
    grid = settings_of([0, 1.5], [8], [1, 4], num_samples=3)
    assert [(s.temperature, s.batch_size, s.num_return_sequences) for s in grid] == [
        *((0, 1, 1), (0, 4, 1)),
        *((1.5, 1, 1), (1.5, 4, 1), (1.5, 1, 3)),
    ]
    assert len(settings_of([1], [8, 16], [1], num_samples=1)) == 2


def test_a_cell_counts_the_answers_of_lade(loaded: LoadedModel) -> None:
    asked = []
    cell = run_cell(
        loaded,
        PROMPTS,
        Settings(6, 1.0, num_return_sequences=2),
        Config(),
        num_passes=3,
        on_answer=lambda: asked.append(1),
    )
    assert cell.summary.num_prompts == 2  # half as many prompts as rows
    assert len(asked) == 3 * 2 * 2
    assert cell.summary.speedup is not None
    assert 0 < cell.lowest <= cell.summary.speedup
    assert not cell.loops


def test_answers_that_loop_are_shown_only_where_there_are_no_others() -> None:
    model = tiny_model("llama", vocab_size=256)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()  # always the same token
    loaded = LoadedModel(model, byte_tokenizer(), "tiny")
    cell = run_cell(loaded, PROMPTS[:1], Settings(32), Config())
    assert cell.loops
    assert table([cell]).sections[0][0][3].endswith("x*")


def test_lists_of_numbers_are_checked() -> None:
    assert choose_numbers("--temperatures", "0,0.7") == [0, 0.7]
    assert choose_sizes("--lengths", "32,8") == [32, 8]
    for text in ("", "a", "1,1", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match="expected --t to be different numbers"):
            choose_numbers("--t", text)
    for text in ("0", "1.5"):
        with pytest.raises(ValueError, match="expected --lengths to be whole numbers of 1 or more"):
            choose_sizes("--lengths", text)
    for text in ("int8", "float32,float32", ""):
        with pytest.raises(ValueError, match="expected --dtypes to be different ones of float32"):
            choose_dtypes(text)


def test_a_table_and_a_file_hold_each_cell(loaded: LoadedModel) -> None:
    cell = run_cell(loaded, PROMPTS, Settings(4, 1.0), Config())
    (row,) = table([cell]).sections[0]
    assert row[:3] == ("float64", "sampling at temperature 1", "4")
    (entry,) = as_json([cell])
    assert json.loads(json.dumps(entry))["max_new_tokens"] == 4
