"""Calls beside each other, of every architecture: each has the text that it has alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

import lade
from tests.support.run import Difference, _first_difference, _gap, all_names, quiet
from tests.support.tiny import CannotBuild, tiny_model

pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]

LENGTHS = (4, 9, 21, 6)  # of the prompts; the windows are 8 tokens
NUM_NEW = 16


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 95, (1, length), generator=generator) for length in LENGTHS]


def options(place: int) -> dict[str, Any]:
    """Return those of a call: the last one samples."""
    is_last = place == len(LENGTHS) - 1
    return {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": is_last}


def answers(model: Any) -> list[Any]:
    """Return what `generate` gives for each call alone, with logits."""
    found = []
    for place, ids in enumerate(prompts()):
        torch.manual_seed(place)
        more = {"return_dict_in_generate": True, "output_logits": True, **options(place)}
        found.append(model.generate(ids, attention_mask=torch.ones_like(ids), **more))
        if not all(logits.isfinite().all() for logits in found[-1].logits):
            raise ArithmeticError("its logits are not finite")
    return found


def answering(name: str) -> tuple[Any, list[Any]]:
    """Return a model of an architecture and its answers, in float32 where float64 does not run."""
    for dtype in (torch.float64, torch.float32):
        why: Exception
        try:
            model = tiny_model(name, seed=1, dtype=dtype)
            model.generation_config.eos_token_id = None
            return model, answers(model)
        except CannotBuild as error:
            why = error
        except Exception as error:  # transformers' own limits, which are not lade's to judge
            why = error
    pytest.skip(f"generate does not run it: {' '.join(str(why).split())[:100]}")


@pytest.mark.parametrize("name", all_names())
def test_calls_of_any_architecture_have_their_own_texts(name: str) -> None:
    with quiet():
        model, expected = answering(name)
        pool = lade.NGramPool()
        for of_call in expected:
            pool.observe(of_call.sequences[0].tolist())
        config = lade.Config(max_draft_tokens=6)
        with lade.Batcher(model, pool=pool, config=config) as batcher:
            requests = [
                batcher.submit(
                    ids, attention_mask=torch.ones_like(ids), seed=place, **options(place)
                )
                for place, ids in enumerate(prompts())
            ]
            texts = [request.result() for request in requests]
        again = answers(model)
    wrong = []
    for place, (text, of_call) in enumerate(zip(texts, expected, strict=True)):
        found = _first_difference(of_call.sequences, text)
        if found is not None:
            token = found[1] - LENGTHS[place]
            gap = None if options(place)["do_sample"] else _gap(of_call.logits, 0, token)
            wrong.append(Difference(str(LENGTHS[place]), 0, token, gap))
    assert [str(each) for each in wrong if not each.is_tie or model.dtype != torch.float32] == []
    for before, after in zip(expected, again, strict=True):
        assert after.sequences.tolist() == before.sequences.tolist()
        assert all(map(torch.equal, after.logits, before.logits))
