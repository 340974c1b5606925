"""Options of a pool inside of an engine, and what its workers are asked from outside."""

from types import SimpleNamespace
from typing import Any

import pytest

from lade.engines.extension import PoolExtension
from lade.engines.options import PoolOptions
from lade.engines.vllm import PoolProposer, options_from
from tests.lade.engines.fake_engine import config


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
        ({"seed": None}, TypeError, "seed"),
        ({"salts": ["a"]}, TypeError, "unexpected keyword argument .salts."),
    ],
)
def test_an_option_that_is_wrong_is_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        PoolOptions(**options)


@pytest.mark.parametrize("additional", [None, {}, {"other": 1}, object()])
def test_without_options_there_are_defaults(additional: Any) -> None:
    assert options_from(SimpleNamespace(additional_config=additional)) == PoolOptions()
    assert options_from(SimpleNamespace()) == PoolOptions()


def test_options_are_those_under_the_name_of_lade() -> None:
    given = SimpleNamespace(additional_config={"lade": {"sharing": "all", "seed": 5}, "x": 1})
    assert options_from(given) == PoolOptions(sharing="all", seed=5)
    given.additional_config["lade"] = [1]
    with pytest.raises(TypeError, match="additional_config"):
        options_from(given)


class Worker(PoolExtension):
    def __init__(self, **runner: object) -> None:
        self.model_runner = SimpleNamespace(**runner)


def test_a_worker_tells_what_its_proposer_counted_and_no_other_one() -> None:
    proposer = PoolProposer(config())
    stats = Worker(drafter=proposer).lade_stats()
    assert stats is not None
    assert stats == proposer.stats()
    assert stats["failures"] == 0
    assert Worker().lade_stats() is None
    assert Worker(drafter=object()).lade_stats() is None
    # VLLM refuses to add a method that its worker has.
    assert [name for name in dir(PoolExtension) if not name.startswith("__")] == ["lade_stats"]
