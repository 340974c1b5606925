"""The target's own first layers: the text is the same, and no layer runs a node twice."""

import copy
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lade
from lade.compat import INDEXERS_TAKE_MASKS
from lade.drafters import FirstLayers
from lade.drafters.exits import Cut, layers_of
from lade.drafters.first_layers import EarlyRunner
from lade.drafters.runner import prepared
from lade.drafting.drafts import chain, draft_of
from lade.errors import DrafterWarning, UnsupportedModelError
from lade.probing.factory import VerificationPlan, make_target
from lade.probing.plan import choose_verification
from lade.probing.profile import profile_of
from lade.probing.rules import Lengths, why_not_speculate
from lade.targets.trees import TreeTarget
from lade.tree import Tree
from ngram_pool import Draft
from tests.grids import thinned
from tests.lade.both import same_as_generate
from tests.lade.drafters.test_exits import REFUSED, state_of
from tests.lade.tiny import FAMILIES, random_prompt, tiny_model
from tests.support.tiny import VARIANTS, CannotBuild, causal_lm_types
from tests.support.tiny import tiny_model as tiny_architecture

# So that a busy machine does not decide how much of a draft is verified.
FLAT = {1: 1.0, 64: 1.0}
STRICT = lade.Config(step_costs=FLAT, strict_drafter=True)
PROMPT = [5, 6, 7, 8, 5, 6, 9, 10]


def ours(model: Any, prompt: Tensor, drafter: Any, config: Any = STRICT, **options: Any) -> Any:
    """Return what lade returns, whose text and random state are those of plain `generate`."""
    given = {"attention_mask": torch.ones_like(prompt), **options}
    return same_as_generate(model, prompt, drafter=drafter, config=config, seed=1, **given)[1]


def tree_target(model: Any, token_ids: Sequence[int] = PROMPT) -> TreeTarget:
    input_ids = torch.tensor([token_ids])
    config, model_kwargs = prepared(model, input_ids, 64)
    plan = VerificationPlan("tree", None, {})
    target = make_target(model, input_ids, model_kwargs, plan, 64, config)
    assert isinstance(target, TreeTarget)
    return target


def halve_of(model: Any, num_layers: int = 1) -> Any:
    layers = layers_of(model, profile_of(model))
    return partial(Cut, layers=layers, num_layers=num_layers)


def held(target: TreeTarget) -> list[Tensor]:
    """The keys and values of all layers."""
    return [each for layer in target.cache.held for each in (layer.keys, layer.values)]  # type: ignore[misc]


# --- the text ---------------------------------------------------------------------------------


@pytest.mark.parametrize("expansion", thinned(["tree", "chain"], "tree"))
@pytest.mark.parametrize("family", thinned(FAMILIES, "gemma3_text"))
def test_text_is_that_of_plain_decoding(family: str, expansion: Any) -> None:
    rng = np.random.default_rng(0)
    num_accepted = 0
    model = tiny_model(family)
    for number in range(8):
        length: Any = "confidence" if number % 2 else 2
        drafter = FirstLayers(1 + number % 2, length=length, expansion=expansion)
        prompt = random_prompt(rng)
        options: dict[str, Any] = {"max_new_tokens": 20}
        if number % 4 > 1:
            options |= {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
        output = ours(model, prompt, drafter, **options)
        num_accepted += output.stats.num_accepted_tokens
    assert num_accepted > 3


@pytest.mark.parametrize(
    "config",
    [
        lade.Config(verification="chain", step_costs=FLAT, strict_drafter=True),
        lade.Config(verification="snapshot", step_costs=FLAT, strict_drafter=True),
        lade.Config(execution="fixed", step_costs=FLAT, strict_drafter=True),
        lade.Config(lookahead=None, max_draft_tokens=3, strict_drafter=True),
        lade.Config(stable_text=True, strict_drafter=True),
    ],
    ids=["chain", "snapshot", "fixed", "cut", "stable"],
)
def test_text_is_the_same_however_it_is_verified(config: lade.Config) -> None:
    model = tiny_model("llama")
    prompt = torch.tensor([PROMPT])
    output = ours(model, prompt, FirstLayers(2, length=3), config, max_new_tokens=24)
    assert output.stats.num_accepted_tokens > 0
    assert output.stats.sources["first_layers"].num_asked > 0


def test_a_batch_has_the_rows_it_would_have_alone() -> None:
    model = tiny_model("llama")
    prompts = torch.tensor([PROMPT, [0, 0, *PROMPT[:6]]])
    mask = (prompts != 0).long()
    output = ours(model, prompts, FirstLayers(2, length=2), max_new_tokens=16, attention_mask=mask)
    assert output.stats.num_accepted_tokens > 0


def test_hidden_states_that_are_asked_for_are_those_of_all_layers() -> None:
    model = tiny_model("llama")
    prompt = torch.tensor([PROMPT])
    asked: dict[str, Any] = {"output_hidden_states": True, "max_new_tokens": 8}
    drafter = FirstLayers(1, length=2)
    expected, output = same_as_generate(model, prompt, drafter=drafter, config=STRICT, **asked)
    for mine, theirs in zip(output.hidden_states, expected.hidden_states, strict=True):
        for of_layer, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(of_layer, other)


def test_drawn_drafts_are_verified_by_rejection() -> None:
    model = tiny_model("llama")
    config = lade.Config(acceptance="rejection", strict_drafter=True)
    torch.manual_seed(1)
    output = lade.generate(
        model, torch.tensor([PROMPT]), drafter=FirstLayers(2, length=2), config=config,
        max_new_tokens=24, do_sample=True, return_dict_in_generate=True,
    )  # fmt: skip
    assert output.sequences.shape[1] == len(PROMPT) + 24
    assert output.stats.num_accepted_tokens > 0


def test_the_cache_that_is_handed_over_is_that_of_a_fresh_forward() -> None:
    for family in ("llama", "gemma3_text"):
        model = tiny_model(family)
        output = ours(model, torch.tensor([PROMPT]), FirstLayers(1, length=3), max_new_tokens=20)
        fresh = model(output.sequences[:, :-1]).past_key_values
        for mine, theirs in zip(output.past_key_values.layers, fresh.layers, strict=True):
            num = min(mine.keys.shape[2], theirs.keys.shape[2])
            torch.testing.assert_close(mine.keys[:, :, -num:], theirs.keys[:, :, -num:])
            torch.testing.assert_close(mine.values[:, :, -num:], theirs.values[:, :, -num:])


# --- keys and values are those of the target ---------------------------------------------------


def test_every_layer_runs_a_node_once() -> None:
    model = tiny_model("llama")
    target = tree_target(model)
    target.prefill()
    halve = halve_of(model, 2)
    counts = [0, 0, 0]

    def count(index: int, _: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        counts[index] += hidden.shape[1]

    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(partial(count, index), with_kwargs=True)
    target.run_early([11], [-1], halve)
    target.run_early([12, 13, 14], [0, 0, 0], halve)
    target.run_early([15], [2], halve)
    assert counts == [5, 5, 0]
    # Without 12 and 14, and with one more, in another order.
    tree = Tree.build(11, draft_of([20, 13, 15], [-1, -1, 1]))
    logits = target.forward(target.inputs([tree])).logits
    assert counts == [6, 6, 4]
    assert not target.is_timing_valid
    other = tree_target(tiny_model("llama"))
    other.prefill()
    torch.testing.assert_close(logits, other.forward(other.inputs([tree])).logits)
    for each in (target, other):
        each.commit([[0, 2, 3]])
    for mine, theirs in zip(held(target), held(other), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "llama4_text", "gpt2"])
@pytest.mark.parametrize("seed", thinned(range(3), 0))
def test_the_cache_stays_that_of_a_fresh_forward(family: str, seed: int) -> None:
    """Random trees, random parts of them run early, past every window."""
    rng = np.random.default_rng(seed)
    model = tiny_model(family)
    halve = halve_of(model, int(rng.integers(1, 3)))
    target, text = tree_target(model), [*PROMPT]
    target.prefill()
    for _ in range(12):
        root = int(rng.integers(2, 90))
        parents = [int(rng.integers(-1, i)) for i in range(int(rng.integers(0, 6)))]
        draft = draft_of(rng.permutation(np.arange(2, 90))[: len(parents)].tolist(), parents)
        tree = Tree.build(root, draft)
        early = sorted(rng.permutation(len(parents))[: int(rng.integers(0, 6))].tolist())
        if rng.random() < 0.8:
            target.run_early([root], [-1], halve)
            places = {-1: 0}
            for node in early:
                if parents[node] in places:
                    stray = int(rng.integers(90, 95))
                    target.run_early(
                        [stray, int(draft.token_ids[node])], [places[parents[node]]] * 2, halve
                    )
                    places[node] = 2 * len(places)
        target.forward(target.inputs([tree]))
        path = [0]
        while (below := [i + 1 for i, p in enumerate(parents) if p + 1 == path[-1]]) and (
            rng.random() < 0.7
        ):
            path.append(int(rng.choice(below)))
        target.commit([path])
        text += [tree.token_ids[node] for node in path]
    fresh = tree_target(model, text)
    fresh.prefill()
    for mine, theirs in zip(held(target), held(fresh), strict=True):
        num = min(mine.shape[2], theirs.shape[2])
        # Llama 4 rotates in float32.
        torch.testing.assert_close(mine[:, :, -num:], theirs[:, :, -num:], atol=1e-5, rtol=1e-5)


def test_what_was_run_early_is_dropped_with_the_step() -> None:
    model = tiny_model("llama")
    target, other = tree_target(model), tree_target(model)
    halve = halve_of(model)
    for each in (target, other):
        each.prefill()
    target.run_early([11], [-1], halve)
    target.drop_early()
    root = Tree.build(12, Draft.empty())
    logits = [each.forward(each.inputs([root])).logits for each in (target, other)]
    torch.testing.assert_close(*logits)
    for each in (target, other):
        each.discard()
        each.forward(each.inputs([root]))
        each.commit([[0]])
    for mine, theirs in zip(held(target), held(other), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("length", "expansion"),
    [
        pytest.param("confidence", "tree", marks=pytest.mark.exhaustive),
        ("measured", "chain"),
        (4, "tree"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_spot_checks_run_what_the_first_layers_have_run(length: Any, expansion: Any) -> None:
    model = tiny_model("llama", vocab_size=12)
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    config = lade.Config(max_draft_tokens=4, strict_drafter=True)
    for prompt in ([9], [1], PROMPT):
        drafter = FirstLayers(1, length=length, expansion=expansion)
        output = ours(model, torch.tensor([prompt]), drafter, config, max_new_tokens=30)
        assert output.stats.num_steps > 3


def test_a_root_that_is_run_plainly_runs_all_layers() -> None:
    model = tiny_model("llama")
    target = tree_target(model)
    target.prefill()
    target.run_early([11], [-1], halve_of(model))
    logits = target.forward(target.inputs([Tree.build(11, chain([12, 13]))])).logits
    target.discard()
    target.run_early([11], [-1], halve_of(model))  # of a draft that is not verified
    alone = target.forward_plainly([Tree.build(11, Draft.empty())]).logits
    torch.testing.assert_close(alone[:, 0], logits[:, 0])
    target.commit([[0]])
    assert target.num_cached == [len(PROMPT) + 1]


def test_tokens_that_a_grammar_forces_are_run_with_the_root() -> None:
    model = tiny_model("llama")
    target = tree_target(model)
    target.prefill()
    runner = EarlyRunner(target, halve_of(model, 2))
    runner.begin(len(PROMPT))
    text = [*PROMPT, 11, 12, 13]  # 12 and 13 are forced
    logits = runner.follow(text)
    after = runner.grow([20], [0])
    layers = layers_of(model, profile_of(model))
    view = layers.exit_view(model, 2)
    torch.testing.assert_close(logits, view(torch.tensor([text])).logits[0, -1])
    torch.testing.assert_close(after[0], view(torch.tensor([[*text, 20]])).logits[0, -1])
    tree = Tree.build(11, chain([12, 13, 20]))
    whole = target.forward(target.inputs([tree])).logits
    torch.testing.assert_close(whole[0], model(torch.tensor([[*text, 20]])).logits[0, -4:])


@pytest.mark.parametrize("num_good", [0, 1, 2, 7])
def test_a_drafter_that_fails_halfway_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, num_good: int
) -> None:
    model = tiny_model("llama")
    prompt = torch.tensor([PROMPT])
    drafter = FirstLayers(1, length=3)
    ours(model, prompt, drafter, max_new_tokens=4)  # checked and ready
    first, num_run = Cut.first, [0]

    def failing(self: Cut, inputs: Any) -> Any:
        output = first(self, inputs)
        num_run[0] += 1
        if num_run[0] > num_good:
            raise RuntimeError("broken")
        return output

    monkeypatch.setattr(Cut, "first", failing)
    with pytest.warns(DrafterWarning, match="broken"):
        output = ours(model, prompt, drafter, None, max_new_tokens=20)
    fresh = model(output.sequences[:, :-1]).past_key_values
    for mine, theirs in zip(output.past_key_values.layers, fresh.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys)
        torch.testing.assert_close(mine.values, theirs.values)


def test_a_verification_that_cannot_go_on_runs_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    prompt = torch.tensor([PROMPT])
    drafter = FirstLayers(1, length=3)
    ours(model, prompt, drafter, max_new_tokens=4)

    def failing(self: Cut, inputs: Any, hidden: Tensor) -> Any:
        self._rest(**{**inputs, "input_ids": inputs["input_ids"][:, :0]})

    monkeypatch.setattr(Cut, "rest", failing)
    with pytest.warns(DrafterWarning, match="could not go on"):
        ours(model, prompt, drafter, None, max_new_tokens=20)


@pytest.mark.parametrize("at_call", thinned([1, 2, 3, 5, 8], 2, 5))
def test_interrupted_in_a_layer_nothing_is_left(at_call: int) -> None:
    model = tiny_model("llama")
    prompt = torch.tensor([PROMPT])
    drafter = FirstLayers(1, length=3)
    expected = ours(model, prompt, drafter, max_new_tokens=12).sequences
    before, num_calls = state_of(model), [0]

    def interrupt(*_: Any) -> None:
        num_calls[0] += 1
        if num_calls[0] == at_call:
            raise KeyboardInterrupt

    handle = model.model.layers[0].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        lade.generate(model, prompt, drafter=drafter, config=STRICT, max_new_tokens=12)
    handle.remove()
    assert state_of(model) == before
    assert torch.equal(ours(model, prompt, drafter, max_new_tokens=12).sequences, expected)


def test_nothing_of_the_model_is_changed() -> None:
    model = tiny_model("gemma3_text")
    prompt = torch.tensor([PROMPT])
    ours(model, prompt, FirstLayers(1), max_new_tokens=4)
    before, settings = state_of(model), copy.deepcopy(model.config.to_dict())
    for config in (STRICT, lade.Config(verification="chain", strict_drafter=True)):
        ours(model, prompt, FirstLayers(1), config, max_new_tokens=12)
    assert state_of(model) == before
    assert model.config.to_dict() == settings


def test_the_model_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    prompt = torch.tensor([PROMPT])
    ours(model, prompt, FirstLayers(1, length=2), max_new_tokens=8)

    def unexpected(*_: Any, **__: Any) -> None:
        raise AssertionError("checked twice")

    for name in ("layers_of", "why_not_cut", "why_not_early"):
        monkeypatch.setattr(f"lade.drafters.first_layers.{name}", unexpected)
    output = ours(model, prompt, FirstLayers(1, length=2), max_new_tokens=8)
    assert output.stats.sources["first_layers"].num_asked > 0


# --- what is refused -----------------------------------------------------------------------------


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="expected num_layers to be an int, got '2'"):
        FirstLayers("2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected num_layers of at least 1, got 0"):
        FirstLayers(0)
    with pytest.raises(ValueError, match="expected max_draft_tokens of at least 1, got 0"):
        FirstLayers(1, max_draft_tokens=0)
    # Also a ValueError.
    told = "expected num_layers from 1 to 2 for LlamaForCausalLM"
    with pytest.raises(lade.UnsupportedOptionError, match=told):
        ours(tiny_model("llama"), torch.tensor([PROMPT]), FirstLayers(3), max_new_tokens=4)


def test_a_model_that_failed_as_it_was_checked_is_checked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("a fuse has blown")

    model, prompt = tiny_model("llama", seed=3), torch.tensor([PROMPT])
    with monkeypatch.context() as patch:
        patch.setattr(Cut, "rest", failing)
        with pytest.raises(UnsupportedModelError, match="a fuse has blown"):
            ours(model, prompt, FirstLayers(1), max_new_tokens=4)
    ours(model, prompt, FirstLayers(1), max_new_tokens=4)


def test_a_model_that_cannot_be_cut_is_refused_before_anything_is_generated() -> None:
    model = tiny_architecture("zaya")
    with pytest.raises(UnsupportedModelError, match="ZayaForCausalLM cannot draft by its first"):
        ours(model, torch.tensor([PROMPT]), FirstLayers(1), max_new_tokens=4)


EARLY: tuple[str, ...] = ("falcon", "gpt_oss", "mixtral", "olmo2", "qwen2_moe", "cohere2", "phi")
if INDEXERS_TAKE_MASKS:  # else trees cannot be verified
    EARLY = ("deepseek_v32", *EARLY)
OWN_CACHE = (
    "bloom",
    "gemma3n_text",
    "mamba2",
    "openai-gpt",
    "qwen3_next",
    "zamba2",
)


@pytest.mark.parametrize(
    "name", thinned([*causal_lm_types(), *VARIANTS], EARLY[0], "mamba2", "openai-gpt")
)
def test_every_architecture_keeps_its_text_or_is_refused(name: str) -> None:
    expected = {"early"} if name in EARLY else {"own cache"} if name in OWN_CACHE else None
    try:
        what = _text_is_kept(name)
    except CannotBuild as reason:
        pytest.skip(str(reason))
    except UnsupportedModelError as refusal:
        what = "refused" * ("cannot draft" in str(refusal))
    # rwkv can be cut, but its cache cannot go back.
    others = {"plain", "early", "own cache", *["refused"] * (name in (*REFUSED, "rwkv"))}
    assert what in (expected or others)


def _text_is_kept(name: str) -> str:
    """Compare a text for which first layers are asked; return how they were run."""
    model = tiny_architecture(name)
    prompt = torch.tensor([PROMPT])
    drafter = FirstLayers(1, length=2)
    num_asked = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.PlainDecodingWarning)
        for do_sample in (True, False):
            # At least 6, for what weights a seed gives differs between CPUs: some end at once.
            options = {"min_new_tokens": 6, "max_new_tokens": 12, "do_sample": do_sample}
            output = ours(model, prompt, drafter, **options)
            num_asked += sum(each.num_asked for each in output.stats.sources.values())
            if num_asked:
                break
    profile = profile_of(model)
    lengths = Lengths(1, len(PROMPT), len(PROMPT), 12)
    if choose_verification(model, profile=profile).verification == "plain":
        return "plain"
    if why_not_speculate(model, lengths) is not None:
        return "plain"
    assert name not in REFUSED
    assert num_asked > 0
    known = profile.of_drafters["first_layers"]
    return "own cache" if any(key[0] == "view" for key in known) else "early"
