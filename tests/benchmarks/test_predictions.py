"""Predicted outputs are measured on answers that every method gives in full."""

import pytest
import torch

from benchmarks.predictions import CODE, EDITS, measured
from lade.models.loading import LoadedModel
from tests.lade.tiny import byte_tokenizer, tiny_model


@pytest.mark.exhaustive
def test_an_edit_takes_fewest_steps_with_the_text_as_the_prediction() -> None:
    model = tiny_model(vocab_size=256, dtype=torch.float32)
    edit = EDITS[1]
    assert edit.text == CODE
    short = edit._replace(answer=edit.answer[:160])
    found = measured(LoadedModel(model, byte_tokenizer(), "tiny"), short, 1)
    assert found["num_tokens"] == 160
    assert found["request"].keys() == {"lade", "prediction", "wrong_prediction"}
    assert found["text"].keys() == {"lade", "prediction", "prompt_lookup"}
    for methods in (found["request"], found["text"]):
        assert methods["prediction"]["num_steps"] <= methods["lade"]["num_steps"] < 160
