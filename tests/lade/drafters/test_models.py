"""Models that draft, another one or the first layers: the text is that of plain `generate`."""

import copy
import gc
import sys
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import lade
from lade.drafters import AssistantModel, CallPool, FirstLayers, Merged
from tests.grids import thinned
from tests.lade.both import ONE, THREE, answered, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import FAMILIES, tiny_model
from tests.support.tiny import VARIANTS, CannotBuild, causal_lm_types
from tests.support.tiny import tiny_model as tiny_architecture

EIGHT = lade.Config(max_draft_tokens=8, strict_drafter=True)
DRAWN = lade.Config(acceptance="rejection", strict_drafter=True)
# Trees, windows, chunks and experts; paths as rows; states, also in part.
ARCHITECTURES = ["llama", "gemma3_text", "llama4_text", "mixtral", "bloom", "mamba2", "bamba"]


def model_of(name: str, seed: int = 1) -> Any:
    if name in FAMILIES:
        return tiny_model(name, seed)
    return tiny_architecture(name, seed=seed, attention=None, dtype=torch.float64)


def stats_of(
    model: Any, prompt: torch.Tensor, drafter: Any, config: lade.Config = EIGHT, **options: Any
) -> lade.DecodeStats:
    """Return what was counted; text and random state are those of plain `generate`."""
    _, got = same_as_generate(model, prompt, drafter=drafter, config=config, **options)
    stats: lade.DecodeStats = got.stats
    return stats


# --- the text -------------------------------------------------------------------------------


# Each as a target and as an assistant.
PAIRS = [*zip(ARCHITECTURES, (ARCHITECTURES * 2)[2:], strict=False)]


@pytest.mark.filterwarnings("ignore:lade falls back:lade.PlainDecodingWarning")  # batches
@pytest.mark.parametrize("pair", thinned(PAIRS, ("bamba", "gemma3_text")), ids="-".join)
def test_any_architecture_drafts_for_any_other(pair: tuple[str, str]) -> None:
    target, assistant = pair
    model, drafter = model_of(target), AssistantModel(model_of(assistant), length=3)
    three = THREE.clamp(min=3) if target == "bloom" else THREE  # whose padding is NaN
    for prompt, do_sample in ((ONE, False), (three, True)):
        stats_of(model, prompt, drafter, do_sample=do_sample, max_new_tokens=16)
    stats_of(model, ONE, Merged([CallPool(), drafter]), max_new_tokens=16)


@pytest.mark.parametrize("name", thinned(ARCHITECTURES, "gemma3_text"))
def test_a_model_that_drafts_for_itself_is_always_right(name: str) -> None:
    """It has the logits of every path, whatever of a draft was accepted."""
    model = model_of(name)
    for length, most_steps in ((1, 20), (4, 18)):  # of 39, as the prefill has the first token
        drafter = AssistantModel(model, length=length)
        stats = stats_of(model, ONE, drafter, max_new_tokens=40, eos_token_id=None)
        assert stats.num_steps <= most_steps


def test_processors_apply_to_the_drafts_too() -> None:
    """A penalty, n-grams that may not come again, a temperature: the model alone would be wrong."""
    model = shared_model("llama", seed=1)
    drafter = AssistantModel(model, length=1)
    options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None}
    options |= {"repetition_penalty": 1.6, "no_repeat_ngram_size": 2, "bad_words_ids": [[5, 6]]}
    for prompt in (ONE, THREE):  # whose rows differ in what was said before
        assert stats_of(model, prompt, drafter, **options).num_steps <= 22


def test_the_assistants_own_length_is_its_limit() -> None:
    """Beyond its positions it cannot run; the rest of the text goes on without it."""
    model, drafted = shared_model("llama", seed=1), []
    for num in (24, 64):
        limited = tiny_model("gpt2", seed=1, n_positions=num, max_position_embeddings=num)
        stats = stats_of(model, ONE, AssistantModel(limited, length=3), max_new_tokens=40)
        drafted.append(stats.sources["assistant"].num_draft_tokens)
    assert 0 < drafted[0] < 0.6 * drafted[1]


# --- the first layers ----------------------------------------------------------------------------


def state_of(model: Any) -> list[Any]:
    """Every attribute of every module, and the identity of what they refer to."""
    return [
        (
            name,
            {key: id(value) for key, value in vars(module).items() if key != "_lade_profiles"},
            [dict.copy(vars(module)[key]) for key in ("_modules", "_forward_hooks")],
        )
        for name, module in model.named_modules()
    ]


def test_first_layers_say_what_a_model_of_them_alone_says() -> None:
    model = tiny_model("llama", seed=1)
    smaller = copy.deepcopy(model)
    smaller.model.layers = smaller.model.layers[:2]
    smaller.config.num_hidden_layers = 2
    drafters: list[Any] = [FirstLayers(2, length=3), AssistantModel(smaller, length=3)]
    found = []
    for drafter in drafters:
        steps: list[Any] = []
        stats_of(model, ONE, drafter, by=partial(lade.generate, on_step=steps.append))
        found.append([(step.num_draft_tokens, step.token_ids) for step in steps])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", thinned([*causal_lm_types(), *VARIANTS], "gemma3_text", "mamba2"))
def test_first_layers_of_every_architecture_keep_its_text_and_the_model(name: str) -> None:
    try:
        model = tiny_architecture(name)
    except CannotBuild as reason:
        pytest.skip(str(reason))
    before, settings = state_of(model), copy.deepcopy(model.config.to_dict())
    options: dict[str, Any] = {"min_new_tokens": 6, "max_new_tokens": 12, "temperature": 0.8}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.PlainDecodingWarning)
        for do_sample in (False, True):
            drafter = FirstLayers(1, length=2)
            stats_of(model, ONE, drafter, do_sample=do_sample, **options)
    assert state_of(model) == before
    assert model.config.to_dict() == settings


# --- tokenizers and schedules ---------------------------------------------------------------


def words(ids: list[int]) -> Any:
    """Return a tokenizer of 97 words with these ids."""
    tokenizer = Tokenizer(models.WordLevel({f"w{word}": id_ for word, id_ in enumerate(ids)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


MINE, THEIRS = words([*range(97)]), words([*reversed(range(97))])


def reversed_twin(model: Any) -> Any:
    """Return a copy whose tokens are those of `THEIRS`."""
    twin = copy.deepcopy(model)
    for layer in (twin.get_input_embeddings(), twin.get_output_embeddings()):
        layer.weight.data = layer.weight.data.flip(0).clone()
    return twin


def test_an_assistant_may_have_other_tokens() -> None:
    """It is the same model, so all that it drafts is right."""
    model = shared_model("llama", seed=1)
    options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": None, "config": EIGHT}
    assistant = reversed_twin(model)
    drafter = AssistantModel(assistant, THEIRS, target_tokenizer=MINE, length=4)
    _, got = same_as_generate(model, ONE, drafter=drafter, **options)
    assert got.stats.num_steps < 15
    for name in ("assistant_lookbehind", "target_lookbehind"):
        given: dict[str, Any] = {"assistant_tokenizer": THEIRS, "tokenizer": MINE, name: 5}
        given |= {"assistant_model": assistant, "do_sample": False}
        out = lade.generate(model, ONE, **options, **given)
        assert torch.equal(out, got.sequences)


@pytest.mark.parametrize(("schedule", "nums"), [("heuristic", {2, 4, 6}), ("constant", {0, 1, 2})])
def test_a_schedule_of_transformers_is_followed(schedule: str, nums: set[int]) -> None:
    """Drafts that are right become longer, or not; those at the end are cut."""
    drafted = set[int]()

    class Noting(AssistantModel):
        def draft(self, *given: Any) -> Any:
            draft = super().draft(*given)
            drafted.add(int(draft.depths.max(initial=0)))
            return draft

    options: dict[str, Any] = {"num_assistant_tokens_schedule": schedule, "num_assistant_tokens": 2}
    model, options["assistant_confidence_threshold"] = shared_model("llama", seed=1), 0.0
    config = lade.Config(max_draft_tokens=40, strict_drafter=True)
    wanted: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": None, "config": config}
    same_as_generate(model, ONE, drafter=Noting(model, options=options), **wanted)
    assert nums <= drafted if schedule == "heuristic" else drafted <= nums


# --- calls ----------------------------------------------------------------------------------


def test_closing_frees_what_a_call_held() -> None:
    model, assistant = tiny_model("llama", seed=1), tiny_model("llama", seed=2)
    drafter = AssistantModel(assistant, length=3)
    stats_of(model, THREE, drafter)
    gc.collect()
    before = sum(type(each) is torch.Tensor for each in gc.get_objects())
    stats_of(model, THREE, drafter)
    gc.collect()
    assert sum(type(each) is torch.Tensor for each in gc.get_objects()) <= before


def test_an_assistant_that_fails_fails_no_call() -> None:
    model, assistant = shared_model("llama", seed=1), tiny_model("llama", seed=2)
    drafter, left = AssistantModel(assistant, length=3), [sys.maxsize]

    def fail(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("broken")

    assistant.register_forward_pre_hook(fail)
    stats_of(model, ONE, drafter)
    for left[0] in (0, 1, 5):  # of the prompt, of the text, of a draft
        with pytest.warns(lade.DrafterWarning, match=r"'assistant', .*\(RuntimeError: b"):
            stats_of(model, ONE, drafter, lade.Config(max_draft_tokens=8))


# --- what is refused -------------------------------------------------------------------------


def test_vocabularies_must_be_one_whatever_their_size() -> None:
    """Sizes are often rounded up."""
    model, larger = shared_model("llama", seed=1), tiny_model("llama", seed=1, vocab_size=128)
    tokenizers = words([*range(97)]), words([*range(97)])
    drafter = AssistantModel(larger, tokenizers[0], target_tokenizer=tokenizers[1], length=3)
    assert stats_of(model, ONE, drafter).sources["assistant"].num_asked > 0
    told = "LlamaForCausalLM cannot draft for LlamaForCausalLM: it has another vocabulary, of 128"
    with pytest.raises(lade.UnsupportedModelError, match=told):
        stats_of(model, ONE, AssistantModel(larger))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: AssistantModel(5), TypeError, "expected a model of transformers, got int"),
        (lambda: FirstLayers("2"), TypeError, "expected num_layers to be an integer, got '2'"),  # type: ignore[arg-type]
        (lambda: FirstLayers(0), ValueError, "expected num_layers of at least 1, got 0"),
        (lambda: FirstLayers(1, length=True), TypeError, "expected length to be an integer"),
        (lambda: FirstLayers(1, length=0), ValueError, "expected length of at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_models_that_cannot_draft_are_refused_by_name() -> None:
    model = shared_model("llama")
    with pytest.raises(lade.UnsupportedOptionError, match="expected num_layers from 1 to 2 for Ll"):
        stats_of(model, ONE, FirstLayers(3))
    listless = tiny_model("llama")
    listless.model.layers = torch.nn.Sequential(*listless.model.layers)
    with pytest.raises(lade.UnsupportedModelError, match="LlamaForCausalLM cannot draft by its fi"):
        stats_of(listless, ONE, FirstLayers(1))
    drawing = tiny_model("opt", dropout=0.5).train()
    with pytest.raises(lade.UnsupportedModelError, match="OPTForCausalLM cannot draft"):
        stats_of(model, ONE, AssistantModel(drawing))
    states = tiny_architecture("mamba", seed=0, attention=None, dtype=torch.float64)
    small = tiny_model("llama", vocab_size=states.config.vocab_size)
    with pytest.raises(lade.UnsupportedModelError, match="MambaForCausalLM cannot draft, for"):
        stats_of(small, ONE, AssistantModel(states))


# --- drawn drafts ----------------------------------------------------------------------------


def test_drawn_from_the_same_model_drafts_are_always_right() -> None:
    """p = q, whatever temperature, top-p and penalties make of both; and a seed repeats a call."""
    model = shared_model("llama", seed=1)
    drafter = AssistantModel(model, length=4)
    options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3}
    options |= {"do_sample": True, "max_new_tokens": 30, "eos_token_id": None, "config": DRAWN}
    for prompt in (ONE, THREE):
        texts = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            out = answered(model, prompt, drafter=drafter, **options)
            assert out.stats.num_steps <= 15
            texts.append(out.sequences.tolist())
        assert texts[0] == texts[1] != texts[2]
