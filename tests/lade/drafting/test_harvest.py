"""What drafters receive of the target model's likely next tokens."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import lade
from ngram_pool import Draft
from tests.grids import thinned
from tests.lade.both import answered, same_as_generate
from tests.lade.drafting.made import chain_of, ints
from tests.lade.shared import shared_model
from tests.lade.tiny import tiny_model


class Listener(lade.Drafter):
    """Drafts two tokens side by side, one of them sometimes right, and keeps what it receives."""

    num_successors = 3

    def __init__(self) -> None:
        self.told: list[tuple[list[int], list[int], list[int], Any]] = []
        self.observed: list[int] = []
        self.num_drafts = 0

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        self.num_drafts += 1
        one = chain_of([committed[-1], 5, 6])
        return Draft(one.token_ids, ints(-1, -1, 1), ints(1, 1, 2), one.probs).first(
            max_draft_tokens
        )

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        self.observed += token_ids

    def harvest(
        self, sequence: int, committed: Sequence[int], ids: Any, parents: Any, successors: Any
    ) -> None:
        assert committed[-1] == ids[0]
        self.told.append((list(committed), list(ids), list(parents), successors))


@torch.no_grad()
def true_successors(model: Any, text: list[int], k: int) -> tuple[list[int], list[float]]:
    top = model(torch.tensor([text])).logits[0, -1].softmax(-1).topk(k)
    return top.indices.tolist(), top.values.tolist()


@pytest.mark.parametrize("family", thinned(["llama", "mistral", "gemma3_text"], "gemma3_text"))
def test_every_node_is_told_with_the_targets_own_successors(family: str) -> None:
    model, prompt, listener = shared_model(family), torch.arange(2, 12)[None], Listener()
    config = lade.Config(max_draft_tokens=3, strict_drafter=True)
    answered(model, prompt, drafter=listener, config=config, max_new_tokens=24)
    num_rejected = 0
    for committed, token_ids, parents, successors in listener.told:
        for node, parent in enumerate(parents):
            path = [token_ids[node]]
            while parent != -1:
                path.insert(0, token_ids[parent])
                parent = parents[parent]
            expected, probs = true_successors(model, [*committed[:-1], *path], 3)
            assert successors.token_ids[node].tolist() == expected
            assert successors.probs[node].tolist() == pytest.approx(probs, rel=0.3)
            num_rejected += node > 0
    assert num_rejected > 20


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_end_no_generation(value: float) -> None:
    model, prompt = tiny_model("llama", dtype=torch.float32), torch.arange(2, 8)[None]
    lade.probe(model)  # while it can be checked

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        output[..., 7] = value
        return output

    model.lm_head.register_forward_hook(spoil)
    same_as_generate(model, prompt)


def test_a_drafter_is_told_of_every_token_and_step_also_where_none_of_its_drafts_pays() -> None:
    """Promising little, it is not asked in every step: some of them rest."""

    class Unsure(Listener):
        def draft(self, *args: Any) -> Draft:
            draft = super().draft(*args)
            return Draft(draft.token_ids, draft.parents, draft.depths, 1e-6 * draft.probs)

    model, drafter, prompt = tiny_model("llama"), Unsure(), torch.arange(2, 12)[None]
    options: dict[str, Any] = {"eos_token_id": None, "max_new_tokens": 150}
    expected, got = same_as_generate(model, prompt, drafter=drafter, **options)
    assert drafter.observed == expected.sequences[0, 10:].tolist()
    assert 8 <= drafter.num_drafts <= got.stats.num_steps
    # One for the prompt's last token, and one for each step.
    assert len(drafter.told) == 1 + got.stats.num_steps
