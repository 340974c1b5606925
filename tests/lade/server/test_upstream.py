"""What lade relies on in transformers' serving code is there, in every supported version."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import BaseHandler, GenerateManager, GenerationState

from lade.batcher import Batcher
from lade.server import upstream
from lade.server.limits import RequestLimits
from lade.server.options import ServerOptions
from tests.lade.server.serving import NAME, loaded_model


@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        (
            upstream._OneModel,
            ModelManager,
            ("process_model_name", "load_model_and_processor", "get_gen_models", "shutdown"),
        ),
        (upstream._State, GenerationState, ("get_manager",)),
        (
            upstream._Manager,
            GenerateManager,
            ("generate_streaming", "generate_non_streaming", "async_submit"),
        ),
        (upstream._Chat, BaseHandler, ()),
    ],
    ids=["model", "state", "manager", "handler"],
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
    assert callable(GenerateManager.submit)


@pytest.mark.parametrize("missing", [(), ("systemone_handler",)])
def test_handlers_that_some_versions_lack_are_left_out(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    parameters = inspect.signature(build_server).parameters
    kept = {name: each for name, each in parameters.items() if name not in missing}
    given: dict[str, Any] = {}

    def build(*args: Any, **options: Any) -> None:
        given.update(options)

    build.__signature__ = inspect.Signature([*kept.values()])  # type: ignore[attr-defined]
    monkeypatch.setattr(upstream, "build_server", build)
    loaded = loaded_model()
    pieces: Callable[[], list[bytes]] = list
    limits = RequestLimits(loaded.model, ServerOptions())
    upstream.build_app(loaded, NAME, limits, pieces, Batcher(loaded.model))
    assert given.keys() | {"model_manager", "enable_cors"} == kept.keys()
    assert given["chat_handler"].pieces is pieces


def test_the_model_cannot_be_unloaded() -> None:
    loaded = loaded_model()
    models = upstream._OneModel(loaded, NAME)
    models.shutdown()
    assert models.load_model_and_processor(NAME) == (loaded.model, loaded.tokenizer)
    assert models.loaded_models == {}
