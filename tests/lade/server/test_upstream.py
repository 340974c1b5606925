"""What lade relies on in transformers' serving code is there, in every supported version."""

import inspect
from typing import Any

import pytest
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import DirectStreamer, GenerateManager, GenerationState

from lade.server import upstream


@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        (
            upstream._OneModel,
            ModelManager,
            ("process_model_name", "load_model_and_processor"),
        ),
        (upstream._State, GenerationState, ("get_manager",)),
        (
            upstream._Manager,
            GenerateManager,
            ("generate_streaming", "generate_non_streaming", "submit"),
        ),
    ],
    ids=["model", "state", "manager"],
)
def test_what_is_replaced_is_there(ours: Any, theirs: Any, names: tuple[str, ...]) -> None:
    assert issubclass(ours, theirs)
    for name in names:
        assert callable(getattr(theirs, name)), name
        assert name in vars(ours), name


def test_calls_of_the_manager_are_those_that_are_expected() -> None:
    for name in ("generate_streaming", "generate_non_streaming"):
        taken = [*inspect.signature(getattr(GenerateManager, name)).parameters]
        assert taken[:6] == ["self", "model", "processor", "inputs", "gen_config", "request_id"]
        assert taken[6:] in ([], ["response_parser"])
    taken = [*inspect.signature(DirectStreamer).parameters]
    assert taken == ["tokenizer", "loop", "queue", "response_parser"]
