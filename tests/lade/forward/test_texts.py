"""In half precision, neither drafts nor what runs beside a text changes it or its scores."""

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import lade
from tests.equality.table import case_of, cases
from tests.fuzz.compare import call_lade, compare
from tests.fuzz.run import deterministic
from tests.grids import thinned
from tests.lade.forward.conftest import Ran
from tests.lade.forward.families import model_of
from tests.lade.forward.test_bits import MIDDLE, same_bits
from tests.lade.forward.test_job import TEXT, Forgiving


def decoded(model: Any, ids: Tensor, num: int, answers: list[list[int]], **options: Any) -> Any:
    """Decode with so many draft tokens; seven in ten are right."""
    drafter = Forgiving(answers, np.random.default_rng(num), 0.7)
    given: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
    given |= {"attention_mask": torch.ones_like(ids), "return_dict_in_generate": True, **options}
    config = lade.Config(max_draft_tokens=num)
    return lade.generate(model, ids, drafter=drafter, config=config, **given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", thinned(["llama", "gemma2", "qwen3", "phi3"], "llama"))
def test_drafts_change_no_text_and_no_score(
    family: str, dtype: torch.dtype, ran: list[Ran]
) -> None:
    model = model_of(family, dtype, **MIDDLE)
    for ids in TEXT, torch.randint(5, 96, (1, 150)):
        plain = decoded(model, ids, 0, [[7] * 200], output_scores=True)
        for num in (3, 7, 15):
            ran.clear()
            got = decoded(model, ids, num, plain.sequences.tolist(), output_scores=True)
            assert got.sequences.tolist() == plain.sequences.tolist()
            assert all(map(same_bits, got.scores, plain.scores))
            assert max(each.num_tokens for each in ran[1:]) > 1


def padded(ids: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return a prompt after so much padding, and its mask."""
    return pad(ids, (num, 0)), pad(torch.ones_like(ids), (num, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", thinned(["llama", "gemma2", "mistral", "gpt2"], "mistral"))
def test_padding_windows_and_kept_prefixes_change_no_text(
    family: str, dtype: torch.dtype, ran: list[Ran]
) -> None:
    """Of a prompt longer than a window and than a piece, alone and beside others."""
    model = model_of(family, dtype, **({} if family == "gpt2" else MIDDLE))
    ids = torch.randint(5, 96, (1, 150))
    of_call: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None}
    alone = decoded(model, ids, 0, [[7] * 200], output_scores=True, **of_call)
    assert 150 in {each.num_tokens for each in ran}
    answer = alone.sequences.tolist()
    for num_padding, num in ((3, 0), (40, 7)):
        given, mask = padded(ids, num_padding)
        more: dict[str, Any] = {"attention_mask": mask, "output_scores": True, **of_call}
        padding = given[0, :num_padding].tolist()
        got = decoded(model, given, num, [[*padding, *answer[0]]], **more)
        assert got.sequences[:, num_padding:].tolist() == answer
        assert all(map(same_bits, got.scores, alone.scores))
    config = lade.Config(reuses_prefix=True, max_draft_tokens=5)
    kept: dict[str, Any] = {"pool": lade.NGramPool(), "config": config, "do_sample": False}
    lade.generate(model, ids[:, :20], max_new_tokens=1, **kept)
    assert lade.generate(model, ids, **kept, **of_call).tolist() == answer
    if family == "gemma2":
        return  # runs no rows
    short, mask = padded(ids[:, 11:], 11)
    rows, masks = torch.cat([ids, short]), torch.cat([torch.ones_like(ids), mask])
    got = decoded(model, rows, 3, answer * 2, attention_mask=masks, **of_call)
    assert got.sequences[:1].tolist() == answer
    with lade.Batcher(model) as batcher:
        requests = [batcher.submit(ids[:, start:], **of_call) for start in (0, 5, 9)]
        assert requests[0].result(60).tolist() == answer


def test_padding_enters_no_convolution(ran: list[Ran]) -> None:
    """Padding before a prompt leaves its logits as they are but for rounding, with drafts too."""
    model, ids = model_of("lfm2", torch.bfloat16), torch.randint(5, 96, (1, 30))
    more: dict[str, Any] = {"max_new_tokens": 8, "output_scores": True, "eos_token_id": None}
    alone = decoded(model, ids, 0, [[7] * 99], **more)
    given, mask = padded(ids, 9)
    answer = [[*given[0, :9].tolist(), *alone.sequences[0].tolist()]]
    got = decoded(model, given, 1, answer, attention_mask=mask, **more)
    torch.testing.assert_close(got.scores[0], alone.scores[0], rtol=0, atol=0.08)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_padding_that_a_template_has_in_its_middle_changes_no_text(
    dtype: torch.dtype, ran: list[Ran]
) -> None:
    """Without a mask, `generate` takes the padding token for padding wherever it is."""
    model = model_of("gemma2", dtype, **MIDDLE)
    ids = torch.randint(5, 96, (1, 30))
    ids[0, 4] = ids[0, 17] = 0
    more: dict[str, Any] = {"attention_mask": None, "output_scores": True}
    alone = decoded(model, ids, 0, [[7] * 99], **more)
    assert 30 in {each.num_tokens for each in ran}
    got = decoded(model, ids, 7, alone.sequences.tolist(), **more)
    assert got.sequences.tolist() == alone.sequences.tolist()
    assert all(map(same_bits, got.scores, alone.scores))


def undrafted(model: Any, door: str, arguments: dict[str, Any], given: dict[str, Any]) -> Any:
    """Call lade without drafts; the same signature as `call_lade`."""
    return call_lade(model, "generate", arguments, {"config": lade.Config(max_draft_tokens=0)})


@pytest.mark.parametrize("dtype", thinned(["bfloat16", "float16"], "bfloat16"))
@pytest.mark.parametrize("family", thinned(["llama", "gemma2", "qwen3", "mistral"], "llama"))
def test_of_a_call_with_any_options_drafts_change_nothing(
    family: str, dtype: str, ran: list[Ran]
) -> None:
    """In the cases of the equality table, by lade without drafts."""
    num = 0
    for number, (row, _) in enumerate(cases()):
        if row["model"] == "llama":
            found = row | {"model": f"{family} {dtype}", "method": "as found"}
            with deterministic():
                verdict = compare(case_of(found, Random(number)), theirs=undrafted)
            assert verdict.kind == "same", (found, verdict.differences)
            num += 1
    assert num > 10
    assert max(each.num_tokens for each in ran) > 8
