"""Options of a pool inside of an engine: what is refused, and where they come from."""

from types import SimpleNamespace
from typing import Any

import pytest

from lade.engines.options import PoolOptions
from lade.engines.vllm import options_from


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sharing": "salt"}, ValueError, "sharing"),
        ({"capacity_tokens": 0}, ValueError, "capacity_tokens"),
        ({"capacity_tokens": 2**29 + 1}, ValueError, "capacity_tokens"),
        ({"max_ngram_size": "5"}, TypeError, "max_ngram_size"),
        ({"max_step_tokens": True}, TypeError, "max_step_tokens"),
        ({"min_probability": 1.5}, ValueError, "min_probability"),
        ({"min_probability": "high"}, TypeError, "min_probability"),
        ({"min_probability": float("nan")}, ValueError, "min_probability"),
        ({"pool": 5}, TypeError, "pool"),
        ({"prewarmed": ["a"]}, TypeError, "prewarmed"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 1.0}, TypeError, "seed"),
        ({"salts": ["a"]}, ValueError, "expected options among sharing, .*, got 'salts'"),
    ],
)
def test_an_option_that_is_wrong_is_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        PoolOptions.from_mapping(options)


@pytest.mark.parametrize("additional", [None, {}, {"other": 1}, object()])
def test_without_options_there_are_defaults(additional: Any) -> None:
    assert options_from(SimpleNamespace(additional_config=additional)) == PoolOptions()
    assert options_from(SimpleNamespace()) == PoolOptions()


def test_options_are_those_under_the_name_of_lade() -> None:
    config = SimpleNamespace(additional_config={"lade": {"sharing": "all", "seed": 5}, "x": 1})
    assert options_from(config) == PoolOptions(sharing="all", seed=5)
    config.additional_config["lade"] = [1]
    with pytest.raises(TypeError, match="additional_config"):
        options_from(config)
