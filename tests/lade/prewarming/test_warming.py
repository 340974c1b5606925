"""`lade.warm_up`: afterwards, a limit of time is for decoding alone; before it, all is plain."""

from itertools import product
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration

import lade
from tests.grids import thinned_rows
from tests.lade.both import EIGHT, ONE, same_as_generate
from tests.lade.tiny import BLOOM, MAMBA2, tiny_model

TIMED: dict[str, Any] = {"max_time": 600.0, "max_new_tokens": 24, "eos_token_id": None}
NO_TIME = r"max_time leaves no time to compile kernels and check the model; call lade\.warm_up"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "bloom": {**BLOOM, "attention": "eager"},
    "mamba2": {**MAMBA2, "attention": "eager"},
}


@pytest.mark.parametrize(
    ("family", "do_sample"),
    thinned_rows(
        product(FAMILIES, (False, True)), ("llama", True), ("bloom", False), ("mamba2", True)
    ),
)
def test_a_call_with_max_time_drafts_once_a_model_is_warm(family: str, do_sample: bool) -> None:
    model = tiny_model(family, seed=1, **FAMILIES[family])
    options = {**TIMED, "do_sample": do_sample}
    _, got = same_as_generate(model, ONE, plainly=NO_TIME, **options)
    assert got.stats.num_draft_tokens == 0
    same_as_generate(model, ONE, config=EIGHT, **options)  # said once
    before = torch.get_rng_state()
    lade.warm_up(model, num_rows=2)
    assert torch.equal(torch.get_rng_state(), before)
    _, got = same_as_generate(model, ONE, accept=0.8, config=EIGHT, **options)
    assert got.stats.num_draft_tokens > 0


@pytest.mark.usefixtures("trusted")
def test_before_a_call_with_max_time_nothing_else_runs() -> None:
    model = tiny_model(seed=1)
    expected, calls = model.generate(ONE, do_sample=False, **TIMED), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.warns(lade.PlainDecodingWarning, match=NO_TIME):
        got = lade.generate(model, ONE, do_sample=False, **TIMED)
    assert torch.equal(got, expected)
    assert len(calls) == 24


def test_so_it_is_for_calls_of_a_batcher() -> None:
    model = tiny_model(seed=1)
    expected = model.generate(ONE, do_sample=False, **TIMED).tolist()

    def texts() -> list[Any]:
        with lade.Batcher(model) as batcher:
            requests = [batcher.submit(ONE, do_sample=False, **TIMED) for _ in range(3)]
            return [request.result().tolist() for request in requests]

    with pytest.warns(lade.PlainDecodingWarning, match=NO_TIME):
        assert texts() == [expected] * 3


def test_an_earlier_call_without_a_limit_warms_a_model_and_so_does_a_wrapper() -> None:
    for warm in (
        lambda model: lade.generate(model, ONE, do_sample=False, max_new_tokens=8),
        lambda model: lade.warm_up(torch.compile(model, backend="eager")),
    ):
        model = tiny_model(seed=1)
        warm(model)
        _, got = same_as_generate(model, ONE, accept=0.8, config=EIGHT, **TIMED)
        assert got.stats.num_draft_tokens > 0


def test_what_a_config_cannot_do_without_is_set_up_nevertheless() -> None:
    config = lade.Config(verification="chain", max_draft_tokens=8)
    got = lade.generate(
        tiny_model(seed=1), ONE, config=config, return_dict_in_generate=True, **TIMED
    )
    assert got.stats.num_steps > 0


def test_models_that_lade_does_not_run_are_refused() -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 97}
    config = BartConfig(**sizes, encoder_attention_heads=2, decoder_attention_heads=2)
    with pytest.raises(lade.UnsupportedModelError, match="encoder-decoder"):
        lade.warm_up(BartForConditionalGeneration(config))
    with pytest.raises(lade.UnsupportedModelError, match="cannot verify drafts by 'tree'"):
        lade.warm_up(
            tiny_model("mamba2", **FAMILIES["mamba2"]), config=lade.Config(verification="tree")
        )
