"""Generators of transformers as drafters, heads among them, beside transformers' own loop."""

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import candidate_generator as hf

import lade
from benchmarks.generators import Case, Sizes, cases, compared
from lade.drafters import AssistantModel, CallPool, Candidates, Heads, Merged
from tests.grids import thinned
from tests.lade.both import ONE, THREE, same_as_generate
from tests.lade.shared import shared_model

PROMPT = torch.randint(2, 97, (1, 24), generator=torch.Generator().manual_seed(1))
HEADS = ("SinglePositionMulti", "MTP", "DFlashToken")


@cache
def tiny_cases() -> dict[str, Case]:
    return cases(Sizes(64, 3, 97), torch.float64)


def case_of(name: str) -> Case:
    return next(case for each, case in tiny_cases().items() if each.startswith(name))


@pytest.mark.parametrize(
    "name",
    thinned(["Assisted", "Universal", "EarlyExit", *HEADS], "Assisted", "MTP"),
)
def test_a_generator_adds_as_many_tokens_as_in_transformers_loop(name: str) -> None:
    """`compared` holds the texts against each other and against plain `generate`."""
    case = case_of(name)
    case.drafter.is_measured = False  # type: ignore[attr-defined]
    by_transformers, by_lade = next(compared(case, PROMPT, 24))
    # The universal one reckons with its own tokens only, and not with those beside them.
    least = 1.0 if name == "Universal" else by_transformers.tokens_per_forward
    assert by_lade.tokens_per_forward >= least >= 1
    assert by_lade.tokens_per_forward > 1


def sampling(call: Any, input_ids: Any, processors: Any) -> Any:
    """Make a generator that draws from the generator that the text is drawn from."""
    assistant = copy.deepcopy(call.model)
    config = GenerationConfig(max_length=call.max_length, min_length=0, do_sample=True)
    return hf.AssistedCandidateGenerator(input_ids, assistant, config, {})


@pytest.mark.parametrize(
    "name",
    thinned(
        ["Assisted", "Universal", "EarlyExit", "PromptLookup", "sampling"], "Universal", "sampling"
    ),
)
def test_a_generator_changes_no_text_and_no_random_state(name: str) -> None:
    case, num_drafted = case_of("Assisted" if name == "sampling" else name), 0
    make = sampling if name == "sampling" else case.make
    for drafter in (Candidates(make), Merged([CallPool(), Candidates(make)])):
        for do_sample in (False, True):
            config = lade.Config(max_draft_tokens=8, strict_drafter=True)
            options: dict[str, Any] = {"do_sample": do_sample, "max_new_tokens": 30}
            _, got = same_as_generate(case.model, ONE, drafter=drafter, config=config, **options)
            num_drafted += got.stats.sources["candidates"].num_draft_tokens
    assert num_drafted > 5


class Noting:
    """Notes the tokens of a generator, and drafts those of an answer, or these beside others."""

    def __init__(self, seen: dict[Any, Any], answer: list[int], make: Any, *given: Any) -> None:
        self._seen, self._answer, self._generator = seen, answer, make(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def get_candidates(self, input_ids: Any, **given: Any) -> Any:
        found, _ = self._generator.get_candidates(input_ids, **given)
        start, new = input_ids.shape[1], found[0, input_ids.shape[1] :].tolist()
        if new:
            self._seen.setdefault(start, []).append(new[:3])  # all but the end of the last one
        right = self._answer[start : start + len(new)]
        drafted = [(each + ((start + i) % 6 < 2)) % 97 for i, each in enumerate(right)]
        logits = torch.zeros(1, len(right), 97)
        for i, (first, second) in enumerate(zip(drafted, right, strict=True)):
            logits[0, i, first], logits[0, i, second] = 9.0, 8.0 + (first == second)
        return torch.cat([input_ids, input_ids.new_tensor([drafted]).long()], dim=-1), logits


@pytest.mark.parametrize("name", HEADS[1:])  # transformers shows the first a rejected token's keys
def test_heads_draft_what_they_draft_in_transformers_loop(name: str) -> None:
    """They get the states of all accepted tokens, also of those beside a path, and of no others."""
    seen, case = dict[int, list[Any]](), case_of(name)
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    answer = case.model.generate(PROMPT, **options)[0].tolist()
    make = partial(Noting, seen, answer, case.make)
    drafter = Candidates(make)
    drafter.is_measured = False
    by_transformers, by_lade = next(
        compared(case._replace(make=make, drafter=drafter, is_replayed=False), PROMPT, 40)
    )
    assert by_lade.tokens_per_forward > by_transformers.tokens_per_forward
    common = [each for each in seen.values() if len(each) > 1]
    assert len(common) > 4
    assert all(first == second for first, second, *_ in common)


@pytest.mark.parametrize("name", thinned(HEADS, "MTP"))
@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
def test_heads_and_the_pool_are_one_tree(name: str, acceptance: Any) -> None:
    case = case_of(name)
    drafter = Merged([CallPool(), Candidates(case.make)])
    config = lade.Config(strict_drafter=True, max_draft_tokens=12, acceptance=acceptance)
    options: dict[str, Any] = {"drafter": drafter, "config": config, "max_new_tokens": 30}
    if acceptance == "rejection":
        options |= {"return_dict_in_generate": True, "pad_token_id": 0, "do_sample": True}
        out = lade.generate(case.model, PROMPT, **options)
    else:
        _, out = same_as_generate(case.model, PROMPT, **options)
    assert {*out.stats.sources} == {"pool", "candidates"}


def test_assistants_that_read_states_are_assistant_models() -> None:
    sharing = case_of("SinglePosition")
    call = lade.drafting.drafter.DraftingCall(sharing.model, 97, 50)
    generator = sharing.make(call, PROMPT, None)
    for options in ({}, {"num_assistant_tokens": 2}):
        drafter = AssistantModel(generator.assistant_model, options=options)
        config = lade.Config(strict_drafter=True)
        _, got = same_as_generate(sharing.model, PROMPT, drafter=drafter, config=config)
        assert got.stats.sources["assistant"].num_asked > 0
    diffusing = case_of("DFlash")
    blocks = diffusing.make(call, PROMPT, None).assistant_model
    given = {"assistant_model": blocks, "speculation_type": "dflash", "max_new_tokens": 12}
    out = lade.generate(diffusing.model, PROMPT, return_dict_in_generate=True, **given)
    assert {*out.stats.sources} == {"pool", "assistant"}


def test_where_states_cannot_be_had_heads_are_refused() -> None:
    case = case_of("MTP")
    given: dict[str, Any]
    for prompt in (THREE, PROMPT):
        given = {} if prompt is THREE else {"config": lade.Config(verification="chain")}
        with pytest.raises(lade.UnsupportedOptionError, match="a drafter reads hidden states of"):
            same_as_generate(case.model, prompt, drafter=Candidates(case.make), **given)
    for given in ({"drafter": Heads()}, {"by": partial(lade.generate, use_mtp=True)}):
        with pytest.raises(lade.UnsupportedModelError, match="LlamaForCausalLM has no heads to dr"):
            same_as_generate(shared_model("llama"), ONE, **given)
