"""Short convolutions in the place of attention, in jobs and in the cache."""

from typing import Any

import pytest
import torch

import lade
from tests.lade.forward.conftest import Ran
from tests.lade.forward.families import FORMATS, model_of
from tests.lade.forward.test_bits import Texts
from tests.lade.forward.test_job import TEXT, Apart, compared, with_drafts

__all__ = ["compared"]  # a fixture

WIDTHS = [
    {"conv_L_cache": width, "conv_bias": has_bias}
    for width in (1, 2, 5)
    for has_bias in (False, True)
]


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("options", WIDTHS, ids=str)
def test_convolutions_of_any_width(options: dict[str, Any], compared: list[Apart]) -> None:
    for dtype in FORMATS:
        model = model_of("lfm2", dtype, **options)
        with_drafts(model, TEXT)
        assert all(each.is_close for each in compared), compared
        assert TEXT.shape[1] in {each.num_tokens for each in compared}


@pytest.mark.parametrize("options", WIDTHS, ids=str)
def test_tokens_have_the_same_bits(options: dict[str, Any], ran: list[Ran]) -> None:
    for dtype in FORMATS:
        assert Texts(model_of("lfm2", dtype, **options)).differences(0) == []
    assert 3 in {each.num_parts for each in ran}


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 33, 300, 700])
def test_prompts_of_any_length(num_tokens: int, ran: list[Ran]) -> None:
    """Before the text are zeros, and of a long one the cache keeps the end."""
    goes_on(model_of("lfm2", max_position_embeddings=1024), num_tokens)
    assert num_tokens in {each.num_tokens for each in ran}


def test_a_static_cache_may_have_positions_beyond_its_slots() -> None:
    model, ids = model_of("lfm2", torch.float64), torch.tensor([[41, 22, 93] * 5])
    given: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    given |= {"return_dict_in_generate": True, "attention_mask": torch.ones_like(ids)}
    given |= {"output_logits": True, "cache_implementation": "static"}
    for first in (0, 2):
        given["position_ids"] = torch.arange(first, first + 15)[None]
        mine, theirs = lade.generate(model, ids, **given), model.generate(ids, **given)
        for own, other in zip(mine.logits, theirs.logits, strict=True):
            assert torch.allclose(own, other, atol=1e-9)


def goes_on(model: Any, num_tokens: int) -> None:
    """Compare texts after a prompt, and after caches that were handed over, with `generate`."""
    ids = torch.randint(2, 90, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    given |= {"return_dict_in_generate": True, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **given)
    mine = with_drafts(model, ids, return_dict_in_generate=False)
    assert torch.equal(mine, expected.sequences)
    got = lade.generate(model, ids, **given)
    assert torch.equal(got.sequences, expected.sequences)
    held = zip(got.past_key_values.layers, expected.past_key_values.layers, strict=True)
    for own, theirs in held:
        for name in {"conv_states", "recurrent_states"} & vars(theirs).keys():
            mine, other = getattr(own, name)[0], getattr(theirs, name)[0]
            assert mine is other is None or torch.allclose(mine, other, atol=5e-4)
    more = {**given, "past_key_values": got.past_key_values, "max_new_tokens": 9}
    longer = torch.cat([got.sequences, ids], dim=1)
    more["attention_mask"] = torch.ones_like(longer)
    later = lade.generate(model, longer, **more)
    whole = model.generate(longer, **{**more, "past_key_values": None})
    assert torch.equal(later.sequences, whole.sequences)
