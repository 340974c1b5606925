"""What drafters are told of the target's own successors, and what they make of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, ElectraConfig

import lade
from lade.budget.budget import Budget
from lade.drafting.drafts import draft_of
from lade.drafting.pool_drafter import PoolDrafter
from lade.drafting.successors import PromptHarvester, Successors, first_of_highest, rank, with_probs
from lade.prewarming import tables
from lade.prewarming.tables import Effort, StoredTable, merge_table
from lade.probing import profile
from ngram_pool import Draft, NGramPool, SuccessorTable
from tests.grids import thinned
from tests.lade.both import same_as_generate
from tests.lade.tiny import VOCAB_SIZE, tiny_model

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}


class Listener(lade.Drafter):
    """Drafts two tokens side by side, one of them right now and then, and keeps what it is told."""

    num_successors = 3

    def __init__(self) -> None:
        self.told: list[tuple[list[int], list[int], list[int], Successors]] = []

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        return draft_of([committed[-1], 5, 6], [-1, -1, 1])

    def harvest(
        self,
        sequence: int,
        committed: Sequence[int],
        token_ids: Sequence[int],
        parents: Sequence[int],
        successors: Successors,
    ) -> None:
        assert committed[-1] == token_ids[0]
        self.told.append((list(committed), list(token_ids), list(parents), successors))


@torch.no_grad()
def true_successors(model: Any, text: list[int], k: int) -> tuple[list[int], list[float]]:
    top = model(torch.tensor([text])).logits[0, -1].softmax(-1).topk(k)
    return top.indices.tolist(), top.values.tolist()


@pytest.mark.parametrize(
    "family", thinned(["llama", "mistral", "gemma3_text"], "llama", "gemma3_text")
)
def test_every_node_is_told_with_the_targets_own_successors(family: str) -> None:
    model = tiny_model(family)
    prompt = torch.arange(2, 12)[None]
    listener = Listener()
    config = lade.Config(max_draft_tokens=3)
    lade.generate(model, prompt, drafter=listener, config=config, **GREEDY)
    num_rejected = num_in_prompt = 0
    for committed, token_ids, parents, successors in listener.told:
        num_in_prompt += len(committed) < prompt.shape[1]
        for node, parent in enumerate(parents):
            path = [token_ids[node]]
            while parent != -1:
                path.insert(0, token_ids[parent])
                parent = parents[parent]
            expected, probs = true_successors(model, [*committed[:-1], *path], 3)
            assert successors.token_ids[node].tolist() == expected
            assert successors.probs[node].tolist() == pytest.approx(probs, rel=0.3)
            num_rejected += node > 0
    assert num_in_prompt == 1
    assert num_rejected > 20


@pytest.mark.parametrize(("max_new_tokens", "most"), [(200, 64), (40, 20), (1, 0)])
@pytest.mark.parametrize("num_rows", thinned([1, 4], 4))
def test_of_a_prompt_half_the_answers_length_is_told_and_64_tokens_at_most(
    max_new_tokens: int, most: int, num_rows: int
) -> None:
    listener = Listener()
    prompts = torch.randint(2, 90, (num_rows, 100))
    options = GREEDY | {"max_new_tokens": max_new_tokens}
    lade.generate(tiny_model("llama"), prompts, drafter=listener, **options)
    # Those of a step are fewer: three draft tokens and their root.
    told = [len(token_ids) for _, token_ids, _, _ in listener.told if len(token_ids) > 4]
    assert told == [most // num_rows] * num_rows * (most > 0)


@torch.no_grad()
def test_prompts_that_run_without_padding_are_told_of_as_well() -> None:
    model = tiny_model("llama")
    texts = [[*range(2, 60)], [9, 8, 7], [*range(2, 60)], [30, 4, 30, 4, 30]]
    prompts = [torch.tensor([text]) for text in texts]
    logits = torch.cat([model(prompt).logits[:, -1:] for prompt in prompts])
    harvester = PromptHarvester(model, 4, VOCAB_SIZE, 64)
    different = [prompts[0], prompts[1], prompts[3]]
    harvester._states = torch.cat([model.model(prompt)[0] for prompt in different], dim=1)
    found = harvester.successors(logits, texts)
    assert found is not None
    for row, (text, num) in enumerate(zip(texts, [16, 2, 16, 4], strict=True)):
        expected = [true_successors(model, text[: i - num], 4)[0] for i in range(num)]
        assert found.last(row, num).token_ids.tolist() == expected
    harvester._states = torch.zeros(1, 65, 8)
    assert harvester.successors(logits, texts) is None  # of other prompts


def test_padding_and_masked_tokens_are_not_told_of() -> None:
    model = tiny_model("llama")
    prompts = torch.tensor([[0, 0, 0, 5, 6, 7], [9, 8, 7, 6, 5, 4]])
    listener = Listener()
    options = {**GREEDY, "attention_mask": (prompts != 0).long()}
    lade.generate(model, prompts, drafter=listener, **options)
    chains = [token_ids for committed, token_ids, _, _ in listener.told if len(committed) < 3]
    assert chains == [[5, 6], [9, 8, 7, 6, 5]]


def test_a_model_with_layers_behind_its_states_is_left_alone() -> None:
    """The output embeddings of Electra take other vectors than the hidden states are."""
    sizes = {"vocab_size": 100, "hidden_size": 32, "embedding_size": 16, "intermediate_size": 37}
    config = ElectraConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, is_decoder=True, pad_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    prompt = torch.arange(2, 12)[None]
    same_as_generate(model, prompt)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_end_no_generation(value: float) -> None:
    model = tiny_model("llama", dtype=torch.float32)
    lade.generate(model, torch.arange(2, 8)[None], **GREEDY)  # while it can be checked

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        output[..., 7] = value
        return output

    handle = model.lm_head.register_forward_hook(spoil)
    same_as_generate(model, torch.arange(2, 8)[None])
    handle.remove()


def test_steps_that_rest_have_no_draft_and_teach_the_drafter_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every other time, four steps rest; the drafter still sees all tokens, in order."""
    model = tiny_model("llama")
    prompt = torch.arange(2, 12)[None]

    class Tired(Budget):
        num_recorded = 0

        @property
        def is_resting(self) -> bool:  # type: ignore[override]
            return self.num_recorded % 8 >= 4

        def record(self, *args: Any, **kwargs: Any) -> None:
            if self.is_resting:
                assert (kwargs["num_nodes"], kwargs["outcomes"]) == (0, [])
            self.num_recorded += 1

    class Watched(Listener):
        def __init__(self) -> None:
            super().__init__()
            self.observed: list[int] = []
            self.num_drafts = 0

        def draft(self, *args: Any) -> Draft:
            self.num_drafts += 1
            return super().draft(*args)

        def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
            self.observed += token_ids

    lade.probe(model)
    budget, drafter = Tired(3), Watched()
    monkeypatch.setattr("lade.hf.generation.MeasuredBudget", lambda *_: budget)
    expected, _ = same_as_generate(model, prompt, drafter=drafter, max_new_tokens=60)
    assert drafter.observed == expected.sequences[0, 10:].tolist()
    num_steps = budget.num_recorded
    assert num_steps > 30
    num_awake = sum(step % 8 < 4 for step in range(num_steps))
    assert num_awake - 1 <= drafter.num_drafts <= num_awake  # nothing fits behind the last token
    # One for the prompt's end, one for its root, and one for each step.
    assert len(drafter.told) == 2 + num_steps


# --- ranks ----------------------------------------------------------------------------------


def test_the_first_of_equal_logits_is_found_as_argmax_finds_it() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 4, (200, 30), generator=generator).to(torch.bfloat16)
    for row in logits:
        found = first_of_highest(rank(row[None], 8))
        assert found is None or found.item() == row.float().argmax().item()
    assert sum(first_of_highest(rank(row[None], 8)) is not None for row in logits) > 100
    assert first_of_highest(rank(torch.full((1, 9), float("nan")), 3)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("scale", "shift", "vocab_size"),
    [(4.0, 0.0, 5000), (0.01, 0.0, 700), (3.0, -40.0, 5000), (0.02, -1.0, 300), (1.0, 0.0, 5)],
)
def test_equal_logits_are_ranked_in_the_order_of_their_ids(
    dtype: torch.dtype, scale: float, shift: float, vocab_size: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(2, 10, vocab_size, generator=generator) + shift).to(dtype)
    logits[0, :, ::7] = logits[0, :, ::7].round()  # zeros of both signs among them
    logits[1, :4, 1:] = -torch.inf
    ranked = rank(logits, 8)
    assert ranked.is_ordered
    order = logits.float().sort(dim=-1, descending=True, stable=True)
    num = min(8, vocab_size)
    assert torch.equal(ranked.token_ids, order.indices[..., :num])
    assert torch.equal(ranked.logits.float(), order.values[..., :num])
    first = first_of_highest(ranked)
    assert first is not None
    assert torch.equal(first, logits.float().argmax(dim=-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_left_to_torch(dtype: torch.dtype, value: float) -> None:
    for place in (0, 299, 511, 999):
        logits = torch.randn(2, 1000).to(dtype)
        logits[1, place] = value
        assert not rank(logits, 4).is_ordered
        assert torch.equal(rank(logits, 4).token_ids, logits.topk(4).indices)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_probabilities_are_about_those_of_the_softmax(dtype: torch.dtype) -> None:
    logits = 3 * torch.randn(20, 40000, generator=torch.Generator().manual_seed(0))
    logits = logits.to(dtype)
    ranked = rank(logits, 8)
    got = with_probs(ranked, logits).get()
    expected = logits.double().softmax(-1).gather(-1, ranked.token_ids)
    assert got.token_ids.tolist() == ranked.token_ids.tolist()
    assert np.abs(np.log(got.probs) - expected.log().numpy()).max() < 0.6
    few = logits[:, :40].contiguous()  # all of them are summed
    ranked = rank(few, 8)
    expected = few.double().softmax(-1).gather(-1, ranked.token_ids)
    assert with_probs(ranked, few).get().probs == pytest.approx(expected.numpy(), rel=0.04)


# --- the pool as a drafter ------------------------------------------------------------------


def test_the_pool_learns_nodes_under_pairs_and_single_tokens() -> None:
    pool = NGramPool()
    drafter = PoolDrafter(pool)
    sequence = drafter.open([1, 2, 3])
    successors = Successors(
        np.array([[10, 11], [12, 13]], np.int32), np.array([[0.9, 0.1], [0.8, 0.1]], np.float32)
    )
    drafter.observe(sequence, [20])
    drafter.harvest(sequence, [1, 2, 3], [3, 20], [-1, 0], successors)
    assert drafter.draft(sequence, [1, 2, 3, 20], 2).token_ids.tolist() == [12, 13]
    assert drafter.draft(sequence, [9, 9, 9, 20], 2).token_ids.tolist() == [12, 13]
    assert 10 in drafter.draft(sequence, [8, 2, 3], 8).token_ids.tolist()
    drafter.close(sequence)


def test_a_pool_that_harvests_drafts_what_no_text_has_had() -> None:
    """Token 7 was never followed by anything, but the target was asked what follows it."""
    model = tiny_model("llama")
    pool = NGramPool()
    # The prefill alone: later drafts may run 7 after 6 in another place.
    lade.generate(model, torch.tensor([[5, 6, 7]]), pool=pool, **GREEDY | {"max_new_tokens": 1})
    expected, _ = true_successors(model, [5, 6, 7], 1)
    sequence = pool.open_sequence()
    assert pool.draft([6, 7], 4, sequence=sequence).token_ids.tolist()[0] == expected[0]


# --- the table that was made before ---------------------------------------------------------


@pytest.fixture
def tabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model whose table knows the answer to everything: each token's likeliest successor."""
    model = tiny_model("llama")
    table = SuccessorTable(1024)
    with torch.no_grad():
        logits = model(torch.arange(VOCAB_SIZE)[:, None]).logits[:, -1]
    top = logits.softmax(-1).topk(4)
    contexts = np.stack([np.full(VOCAB_SIZE, -1), np.arange(VOCAB_SIZE)], axis=1)
    table.put(contexts, top.indices.numpy(), top.values.numpy())
    tmp_path.mkdir(exist_ok=True)
    path = tables.path_of_table(model, tmp_path)
    merge_table(path, model, StoredTable(table, Effort()))
    monkeypatch.setattr(tables, "tables_folder", lambda: tmp_path)
    return model


def test_a_table_is_used_unasked_and_can_be_left_out(tabled: Any) -> None:
    assert (
        len(tables.prewarmed_table_of(tabled, profile.profile_of(tabled)) or ()) > 0.9 * VOCAB_SIZE
    )
    prompt = torch.tensor([[3]])
    texts, num_drafted = [], []
    # With a limit to candidates nothing is explored: only what is known is drafted.
    for config in (lade.Config(4, 4), lade.Config(4, 4, uses_table=False)):
        output = lade.generate(
            tabled, prompt, config=config, return_dict_in_generate=True, **GREEDY
        )
        texts.append(output.sequences.tolist())
        num_drafted.append(output.stats.num_draft_tokens)
    assert texts[0] == texts[1] == tabled.generate(prompt, **GREEDY).tolist()
    assert num_drafted[0] > num_drafted[1]


def test_prewarming_is_noticed_by_the_next_call(tmp_path: Path, tabled: Any) -> None:
    before = tables.prewarmed_table_of(tabled, profile.profile_of(tabled))
    assert tables.prewarmed_table_of(tabled, profile.profile_of(tabled)) is before
    tables.forget_prewarmed_table(tabled)
    assert tables.prewarmed_table_of(tabled, profile.profile_of(tabled)) is not before


def test_a_folder_that_may_not_be_looked_into_has_no_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert tables.table_for(tiny_model("llama"), tmp_path) is None
