"""In half precision, too, drafts, pools and other calls change no bit of an answer on a CPU."""

import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

import lade
from tests.grids import thinned
from tests.lade.forward.families import READABLE, model_of

TEXT = torch.tensor([[5, 6, 7, 8, 9, 10] * 3 + [5, 6]])
SERVED = [family for family in READABLE if family != "mllama"]
ANSWER: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
ANSWER |= {"return_dict_in_generate": True, "output_logits": True}


def have_same_bits(mine: Tensor, theirs: Tensor) -> bool:
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in (mine, theirs)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", thinned(SERVED, "llama", "gemma2", "olmo2", "starcoder2"))
def test_drafts_pools_and_company_change_no_bit_of_an_answer_in_half_precision(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do proofs, which run the model's own forwards in between."""
    monkeypatch.setattr("lade.probing.proof.DISTANCE", 12)
    monkeypatch.setattr("lade.forward.job._CLEAR", 0.0)  # tiny models may be faster by torch
    model, used = model_of(family, dtype), lade.NGramPool()
    texts = [TEXT, TEXT.flip(1), (TEXT * 7 + 3) % 50]
    outputs: list[list[Any]] = []
    for num in (0, 3, 7, 15, None):
        config = lade.Config(max_draft_tokens=num)
        outputs.append([lade.generate(model, ids, config=config, **ANSWER) for ids in texts])
    outputs += [[lade.generate(model, ids, pool=used, **ANSWER) for ids in texts] for _ in range(2)]
    with lade.Batcher(model) as batcher:
        requests = [batcher.submit(ids, **ANSWER) for ids in texts]
        outputs.append([request.result(60) for request in requests])
    assert sum(each.stats.num_accepted_tokens for each in outputs[2]) > 0
    want, *others = outputs
    for got in others:
        for mine, theirs in zip(got, want, strict=True):
            assert mine.sequences.tolist() == theirs.sequences.tolist()
            assert all(map(have_same_bits, mine.logits, theirs.logits))
    given = {name: ANSWER[name] for name in ("max_new_tokens", "do_sample", "eos_token_id")}
    with warnings.catch_warnings(action="error"), suppress(lade.PlainDecodingWarning):
        rows = lade.generate(model, torch.cat(texts), **given)
        assert rows.tolist() == [each.sequences[0].tolist() for each in want]
