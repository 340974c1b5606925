"""Another model drafts: the text is that of plain `generate`, and K that of transformers."""

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from transformers.generation import candidate_generator
from transformers.generation.candidate_generator import AssistedCandidateGenerator

import lade
from lade.drafters import AssistantModel
from lade.drafters.model_drafter import ModelDrafter
from lade.drafters.runner import ModelRunner
from lade.drafting.drafter import DraftingCall
from tests.grids import thinned
from tests.lade.both import ONE, THREE, same_as_generate
from tests.lade.drafting.test_drafters import OPTIONS, SAMPLED, one_warning
from tests.lade.drafting.test_drafters import compared as compared_with_plain
from tests.lade.shared import shared_model
from tests.lade.tiny import IS_NEWEST, tiny_model
from tests.support.tiny import tiny_model as tiny_architecture

EIGHT = lade.Config(max_draft_tokens=8, strict_drafter=True)
# Trees, windows, chunks and experts; paths as rows; states, also in part.
ARCHITECTURES = ["llama", "gemma3_text", "llama4_text", "mixtral", "bloom", "mamba2", "bamba"]


def model_of(name: str, seed: int = 1) -> Any:
    if name in ("mixtral", "bloom", "mamba2", "bamba"):
        return tiny_architecture(name, seed=seed, attention=None, dtype=torch.float64)
    return tiny_model(name, seed)


def compared(
    model: Any, prompt: torch.Tensor, drafter: Any, config: lade.Config = EIGHT, **options: Any
) -> lade.DecodeStats:
    """Return what was counted; text and random state are those of plain `generate`."""
    _, got = same_as_generate(model, prompt, drafter=drafter, config=config, **options)
    stats: lade.DecodeStats = got.stats
    return stats


def nearly(model: Any, noise: float) -> Any:
    """Return a copy of a tiny llama that often finds other tokens likely."""
    twin = tiny_model("llama", seed=1)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            size = noise * theirs.std() if theirs.dim() > 1 else 0.0
            mine.copy_(theirs + size * torch.randn(theirs.shape, generator=generator))
    return twin


# --- the text -------------------------------------------------------------------------------


@pytest.mark.parametrize("expansion", ["tree", "chain"])
@pytest.mark.parametrize(
    "noise", thinned([0.0, 0.1, 3.0], 0.1), ids=["always", "sometimes", "never"]
)
def test_the_text_is_that_of_generate(expansion: Any, noise: float) -> None:
    do_sample = (expansion == "tree") == (noise == 0.1)  # each of the three in both ways
    model = shared_model("llama", seed=1)
    assistant = nearly(model, noise)
    total = lade.DecodeStats()
    several: dict[str, Any] = {"num_return_sequences": 3} if do_sample else {}
    measured: Any = AssistantModel(assistant, expansion=expansion)
    confident: Any = AssistantModel(assistant, length="confidence", expansion=expansion)
    of_four: Any = AssistantModel(assistant, length=4, expansion=expansion)
    for drafter, prompt in ((measured, ONE), (measured, THREE), (confident, THREE)):
        total.add(compared(model, prompt, drafter, do_sample=do_sample))
    total.add(compared(model, ONE, of_four, do_sample=do_sample, **several))
    rate = total.num_accepted_tokens / total.num_committed_tokens
    low, high = {0.0: (0.2, 1.0), 0.1: (0.1, 1.0), 3.0: (0.0, 0.12)}[noise]
    assert low * (0.2 if do_sample else 1.0) <= rate < high
    (source,) = total.sources.values()
    assert source.num_asked > 0
    assert source.num_draft_tokens >= total.num_draft_tokens
    assert source.num_accepted_tokens >= total.num_accepted_tokens
    assert source.sec > 0


# Each as a target and as an assistant, twice; `test_architectures.py` has more targets.
PAIRS = [*zip(ARCHITECTURES, (ARCHITECTURES * 2)[2:], strict=False)]
PAIRS += [*zip(ARCHITECTURES, (ARCHITECTURES * 2)[5:], strict=False)]


@pytest.mark.parametrize("pair", thinned(PAIRS, ("bamba", "gemma3_text")), ids="-".join)
def test_any_architecture_drafts_for_any_other(pair: tuple[str, str]) -> None:
    target, assistant = pair
    model, drafter = model_of(target), AssistantModel(model_of(assistant), length=3)
    three = THREE.clamp(min=3) if target == "bloom" else THREE  # whose padding is NaN
    for prompt, do_sample in ((ONE, False), (three, True)):
        compared(model, prompt, drafter, do_sample=do_sample, max_new_tokens=16)


@pytest.mark.parametrize("name", thinned(ARCHITECTURES, "gemma3_text", "bloom"))
def test_a_model_that_drafts_for_itself_is_always_right(name: str) -> None:
    model = model_of(name)
    drafter = AssistantModel(model, length=4, expansion="chain")
    stats = compared(model, ONE, drafter, max_new_tokens=40, eos_token_id=None)
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 25


def test_processors_apply_to_the_drafts_too() -> None:
    """A penalty, n-grams that may not come again, a temperature: the model alone would be wrong."""
    model = shared_model("llama", seed=1)
    drafter = AssistantModel(model, length=4, expansion="chain")
    options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None}
    options |= {"repetition_penalty": 1.6, "no_repeat_ngram_size": 2, "bad_words_ids": [[5, 6]]}
    stats = compared(model, ONE, drafter, **options)
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 25
    # Rows differ in what was said before.
    stats = compared(model, THREE, drafter, **options)
    assert stats.acceptance_rate > 0.9


def test_processors_of_the_user_never_see_a_draft() -> None:
    model = shared_model("llama", seed=1)
    lengths: list[int] = []

    def counting(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        lengths.append(input_ids.shape[1])
        return scores

    drafter = AssistantModel(model, length=4)
    out = lade.generate(
        model,
        ONE,
        attention_mask=torch.ones_like(ONE),
        max_new_tokens=20,
        eos_token_id=None,
        drafter=drafter,
        config=EIGHT,
        logits_processor=[counting],
    )
    assert lengths == [*range(ONE.shape[1], out.shape[1])]


def test_grammars_and_ends_are_heeded() -> None:
    model = shared_model("llama", seed=1)
    drafter = AssistantModel(model, length=4, expansion="chain")
    free = model.generate(ONE, attention_mask=torch.ones_like(ONE), max_new_tokens=20)
    ends = free[0, -3].item()
    compared(model, ONE, drafter, eos_token_id=ends)
    compared(model, ONE, drafter, max_new_tokens=1)
    compared(model, ONE, drafter, max_new_tokens=2)
    compared(model, ONE[:, :1], drafter)
    allowed = [3, 4]
    compared(model, ONE, drafter, prefix_allowed_tokens_fn=lambda row, ids: allowed)


def test_the_assistants_own_length_is_its_limit() -> None:
    """Beyond its positions it cannot run; the rest of the text goes on without it."""
    model = shared_model("llama", seed=1)
    drafted = []
    for num in (24, 64):
        limited = tiny_model("gpt2", seed=1, n_positions=num, max_position_embeddings=num)
        stats = compared(model, ONE, AssistantModel(limited, length=3), max_new_tokens=40)
        drafted.append(stats.sources["assistant"].num_draft_tokens)
    assert 0 < drafted[0] < 0.6 * drafted[1]


# --- calls ----------------------------------------------------------------------------------


def test_closing_frees_what_a_call_held(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", seed=1)
    runners: list[weakref.ref[Any]] = []
    drafters: list[weakref.ref[Any]] = []
    open_runner, open_drafter = ModelRunner.__init__, ModelDrafter.__init__

    def runner(self: Any, *args: Any) -> None:
        runners.append(weakref.ref(self))
        open_runner(self, *args)

    def drafter(self: Any, *args: Any) -> None:
        drafters.append(weakref.ref(self))
        open_drafter(self, *args)

    monkeypatch.setattr(ModelRunner, "__init__", runner)
    monkeypatch.setattr(ModelDrafter, "__init__", drafter)
    assistant = AssistantModel(model, length=3)
    compared(model, THREE, assistant)
    gc.collect()
    assert len(runners) == 3
    assert [ref() for ref in (*runners, *drafters)] == [None] * 4


def test_an_assistant_that_fails_fails_no_call() -> None:
    model, assistant = shared_model("llama", seed=1), tiny_model("llama", seed=2)
    drafter = AssistantModel(assistant, length=3)
    compared(model, ONE, drafter)
    left = [sys.maxsize]

    def fail(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("broken")

    assistant.register_forward_pre_hook(fail)
    lade.probe(assistant)  # checks it anew, as it has changed
    for num_forwards in (0, 1, 5):  # of the prompt, of the text, of a draft
        left[0] = num_forwards
        with pytest.warns(lade.DrafterWarning, match=r"'assistant': it failed \(RuntimeError: b"):
            compared(model, ONE, drafter, lade.Config(max_draft_tokens=8))


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [OPTIONS, SAMPLED], ids=["greedy", "sampled"])
def test_an_assistant_put_into_training_in_a_call_is_not_asked_again(
    options: dict[str, Any],
) -> None:
    """Its dropout would draw from the generator that the text is drawn from."""
    assistant, num_steps = tiny_model("opt", seed=2, dropout=0.5), 0
    drafter = AssistantModel(assistant, length=2)

    def train(step: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        assistant.model.decoder.layers[1].train(num_steps >= 4)  # a part of it is enough

    config = lade.Config(max_draft_tokens=4)
    options = {**options, "max_new_tokens": 30, "eos_token_id": None}
    with one_warning("failed .RuntimeError: OPTForCausalLM was put into another mode, of training"):
        compared_with_plain(drafter, options, on_step=train, config=config)
    with pytest.raises(lade.UnsupportedModelError, match="OPTForCausalLM cannot draft"):
        compared_with_plain(drafter, options, config=config)
    assistant.eval()
    compared_with_plain(drafter, options, config=config)


def test_other_vocabularies_are_refused_by_name() -> None:
    model, other = shared_model("llama", seed=1), tiny_model("gpt2", seed=1, vocab_size=101)
    with pytest.raises(
        lade.UnsupportedModelError,
        match="GPT2LMHeadModel cannot draft for LlamaForCausalLM: it has another vocabulary",
    ):
        compared(model, ONE, AssistantModel(other))


def test_equal_tokens_are_one_vocabulary_whatever_its_size() -> None:
    """Sizes are often rounded up."""

    class Words:
        def get_vocab(self) -> dict[str, int]:
            return {str(token_id): token_id for token_id in range(97)}

    model, larger = shared_model("llama", seed=1), tiny_model("llama", seed=1, vocab_size=128)
    drafter = AssistantModel(larger, Words(), target_tokenizer=Words(), length=3)
    stats = compared(model, ONE, drafter)
    assert stats.sources["assistant"].num_asked > 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": 5}, TypeError, "expected a causal LM of transformers, got int"),
        ({"length": "long"}, ValueError, "expected length to be 'measured'"),
    ],
)
def test_wrong_arguments_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        AssistantModel(**{"model": shared_model("llama", seed=1), **options})


# --- transformers as oracle -----------------------------------------------------------------


def drafts_of_transformers(
    monkeypatch: pytest.MonkeyPatch, model: Any, assistant: Any, **options: Any
) -> dict[tuple[int, ...], list[int]]:
    """Return by text, in order, what transformers drafts after it."""
    found: dict[tuple[int, ...], list[int]] = {}
    ask = AssistedCandidateGenerator.get_candidates

    def candidates(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = ask(self, input_ids, *args, **kwargs)
        found[tuple(input_ids[0].tolist())] = result[0][0, input_ids.shape[1] :].tolist()
        return result

    with monkeypatch.context() as patch:
        # It would tune the threshold where scikit-learn is installed.
        patch.setattr(candidate_generator, "is_sklearn_available", lambda: False)
        patch.setattr(AssistedCandidateGenerator, "get_candidates", candidates)
        model.generate(ONE, assistant_model=assistant, **options)
    return found


@pytest.mark.skipif(not IS_NEWEST, reason="its assisted decoding fails once a draft was cut")
@pytest.mark.parametrize(
    "noise", thinned([0.0, 0.1, 3.0], 0.1), ids=["always", "sometimes", "never"]
)
@pytest.mark.parametrize("schedule", ["constant", "confidence"])
def test_drafts_are_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch, schedule: str, noise: float
) -> None:
    """On the same models, after every text that transformers drafted from."""
    model = tiny_model("llama", seed=1)
    assistant = nearly(model, noise)
    own = assistant.generation_config
    own.num_assistant_tokens = 4
    own.num_assistant_tokens_schedule = "constant"
    own.assistant_confidence_threshold = 0.5 if schedule == "confidence" else 0.0
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ONE), "do_sample": False}
    options |= {"max_new_tokens": 60, "eos_token_id": None}
    drafter = {
        "constant": AssistantModel(assistant, length=4, expansion="chain"),
        "confidence": AssistantModel(
            assistant, length="confidence", confidence=0.5, max_draft_tokens=4, expansion="chain"
        ),
    }[schedule]
    theirs = drafts_of_transformers(monkeypatch, model, assistant, **options)  # changes K for good
    asked = drafter.for_call(DraftingCall(model, model.config.vocab_size, ONE.shape[1] + 60))
    sequence = asked.open(ONE[0].tolist())
    num_known = ONE.shape[1]
    assert len(theirs) > 5
    for text, expected in theirs.items():
        if len(text) > num_known:
            asked.observe(sequence, text[num_known:])
            num_known = len(text)
        assert asked.draft(sequence, [*text], 64).token_ids.tolist() == expected
    asked.close(sequence)
    if noise == 0.1:
        assert len({len(drafted) for drafted in theirs.values()}) > (schedule != "constant")
