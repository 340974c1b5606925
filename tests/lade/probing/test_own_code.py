"""Whatever code and state of the user's changes between two calls, the text is `generate`'s."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lade
from lade.probing.own_code import is_own_callback, own_code_around, own_code_of, places_of
from lade.probing.structure import Structure
from tests.grids import thinned
from tests.lade.states import (
    KINDS,
    SIZE,
    STEERING,
    Hook,
    Set,
    adapter_switch,
    closures,
    first_position,
    gate_by_data_in_place,
    global_hook,
    hook_attribute,
    mlp_of,
    patched_later,
    patched_method,
    registered_attention,
    rotary_scaling,
    scaling,
    variance,
    weights,
)
from tests.lade.tiny import tiny_model
from tests.ngram_pool.threads import in_threads
from tests.support.tiny import tiny_model as tiny_architecture

PROMPT = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6, 7, 5]])
OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
#: What the sweep sets: nothing at first, as steering code mostly begins.
ALPHAS = (0.0, 0.6, 2.0, 0.0, 1.0)


def model_of() -> Any:
    model = tiny_model("llama", seed=3, hidden_size=SIZE)
    model.generation_config.eos_token_id = None
    return model


CONFIGS = {
    "default": lade.Config(),
    "drafts": lade.Config(max_draft_tokens=6),
    "kept prefixes": lade.Config(max_draft_tokens=6, reuses_prefix=True),
}


# One of each sort. The exhaustive sweep takes the others, too; `python -m tests.fuzz.states` takes
# all of them in every way.
FEW_KINDS = [
    *(closures, first_position, hook_attribute, gate_by_data_in_place, patched_method),
    *(adapter_switch, scaling, registered_attention, global_hook),
]
NAME: Callable[[Any], str] = attrgetter("__name__")


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    hooks = nn.modules.module._global_forward_hooks
    before = {**hooks}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.PlainDecodingWarning)
        warnings.filterwarnings("ignore", "lade reuses no prefix", RuntimeWarning)
        yield
    hooks.clear()
    hooks.update(before)


def plain(model: Any, prompt: Tensor = PROMPT, **options: Any) -> list[int]:
    """Return the text of plain `generate`, of a wrapped model too."""
    made = type(model).generate(model, prompt, **OPTIONS | options)
    return made[0].tolist()  # type: ignore[no-any-return]


def knowing(*texts: list[int]) -> lade.NGramPool:
    pool = lade.NGramPool()
    for text in texts:
        pool.observe(text)
    return pool


def sweep(
    model: Any, put: Set, config: lade.Config, call: Callable[..., Tensor] | None = None
) -> list[float]:
    """Return for which values the text is another than plain's, with drafts that are right."""
    wrong = []
    pool = lade.NGramPool()
    for alpha in ALPHAS:
        put(alpha)
        expected = plain(model)
        pool.observe(expected)
        got = (call or partial(lade.generate, model))(PROMPT, pool=pool, config=config, **OPTIONS)
        if got[0].tolist() != expected:
            wrong.append(alpha)
    return wrong


@pytest.mark.parametrize("kind", thinned(KINDS, closures, *FEW_KINDS[5:7]), ids=NAME)
def test_a_sweep_over_state_has_the_text_of_generate(kind: Callable[[Any], Set]) -> None:
    model = model_of()
    assert sweep(model, kind(model), CONFIGS["kept prefixes"]) == []


@pytest.mark.parametrize("kind", thinned(FEW_KINDS[::2], hook_attribute), ids=NAME)
def test_a_sweep_over_state_of_a_wrapped_model_has_it_too(kind: Callable[[Any], Set]) -> None:
    model = lade.wrap(model_of())
    assert sweep(model, kind(model), CONFIGS["default"], model.generate) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", FEW_KINDS[::4], ids=NAME)
def test_threads_that_call_a_model_between_two_changes_have_it_too(
    kind: Callable[[Any], Set],
) -> None:
    model = model_of()
    put = kind(model)
    wrong: list[float] = []

    def ask(alpha: float, expected: list[int], config: lade.Config) -> None:
        with warnings.catch_warnings():
            got = lade.generate(model, PROMPT, pool=knowing(expected), config=config, **OPTIONS)
        if got[0].tolist() != expected:
            wrong.append(alpha)

    for alpha in ALPHAS:
        put(alpha)
        expected = plain(model)
        calls = [partial(ask, alpha, expected, config) for config in CONFIGS.values()]
        assert in_threads(*calls, seconds=None) == []
    assert wrong == []


FAMILIES = ["llama", "mistral", "gpt2", "mamba", "recurrent_gemma", "qwen2", "gemma3_text"]


CASES = [("llama", 1), ("mamba", 1), *((family, 3) for family in FAMILIES)]


@pytest.mark.parametrize("case", thinned(CASES, ("llama", 1), ("mamba", 3)))
@pytest.mark.parametrize("verification", thinned(["tree", "chain", "snapshot", None], "tree", None))
def test_every_way_to_verify_is_checked_before_it_is_believed(
    case: tuple[str, int], verification: Any
) -> None:
    family, num_rows = case
    attention = "eager" if family in ("mamba", "recurrent_gemma") else "sdpa"
    model = tiny_model(family, attention=attention, seed=1)
    model.generation_config.eos_token_id = 11
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5], [9, 9, 9, 9, 9, 9, 9], [0, 0, 5, 6, 5, 6, 5]])
    mask = (prompt[:num_rows] != 0).long()
    options: dict[str, Any] = OPTIONS | {"attention_mask": mask}
    alpha = 0.0

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        changed = output.clone()
        changed[:, -1] += alpha * 3 * output[:, -1].roll(1, -1)
        return changed

    model.get_output_embeddings().register_forward_hook(hook)
    config = lade.Config(max_draft_tokens=6, verification=verification)
    for alpha in (0.0, 1.0, 0.0, 0.5):
        expected = model.generate(prompt[:num_rows], **options)
        pool = knowing(*expected.tolist())
        try:
            got = lade.generate(model, prompt[:num_rows], pool=pool, config=config, **options)
        except lade.UnsupportedModelError:
            continue  # it was asked for, and found wrong
        assert got.tolist() == expected.tolist(), alpha


# --- in the middle of a call --------------------------------------------------------------------


def _changed_at(put: Set, num_tokens: int) -> Any:
    """Return a streamer that sets alpha once so many tokens have come."""

    class Changing:
        num_put = -1  # the prompt comes first

        def put(self, value: Tensor) -> None:
            self.num_put += 1
            if self.num_put == num_tokens:
                put(1.0)

        def end(self) -> None:
            """Nothing is left to do."""

    return Changing()


@pytest.mark.parametrize("kind", thinned(FEW_KINDS, *FEW_KINDS[3:6]), ids=NAME)
def test_a_change_between_two_steps_is_noticed_before_the_next(kind: Callable[[Any], Set]) -> None:
    for num_tokens in (1, 6):
        model = model_of()
        put = kind(model)
        put(0.0)
        lengths: list[int] = []  # of the text after each step

        def change(
            step: Any, put: Set = put, lengths: list[int] = lengths, at: int = num_tokens
        ) -> None:
            before = lengths[-1] if lengths else 0
            lengths.append(before + len(step.token_ids))
            if before < at <= lengths[-1]:
                put(1.0)

        # `on_step` comes between two steps; plain decoding has a streamer between two tokens.
        pool, config = knowing(plain(model)), lade.Config(max_draft_tokens=4)
        got = lade.generate(model, PROMPT, pool=pool, config=config, on_step=change, **OPTIONS)
        put(0.0)
        at = next(length for length in lengths if length >= num_tokens)
        assert got[0].tolist() == plain(model, streamer=_changed_at(put, at))


# --- what it costs, and what is told apart ------------------------------------------------------


def test_a_hook_that_treats_all_tokens_alike_costs_few_steps() -> None:
    model = model_of()

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + 0.5 * STEERING

    mlp_of(model).register_forward_hook(hook)
    expected = plain(model, max_new_tokens=64)
    config = lade.Config(max_draft_tokens=6)
    result = lade.generate(
        model,
        PROMPT,
        pool=knowing(expected),
        config=config,
        **OPTIONS | {"max_new_tokens": 64, "return_dict_in_generate": True},
    )
    assert result.sequences[0].tolist() == expected
    assert result.stats.num_steps < 40  # 64 without drafts, some 12 without checks


def test_without_code_of_one_s_own_only_new_values_are_checked() -> None:
    model = model_of()
    config = lade.Config(max_draft_tokens=6)
    pool = knowing(plain(model))
    options = OPTIONS | {"return_dict_in_generate": True}
    first, second = (
        lade.generate(model, PROMPT, pool=pool, config=config, **options).stats.num_steps
        for _ in range(2)
    )
    assert first == second
    with torch.no_grad():
        mlp_of(model).up_proj.weight.mul_(1.0)
    third, fourth = (
        lade.generate(model, PROMPT, pool=pool, config=config, **options).stats.num_steps
        for _ in range(2)
    )
    assert third > first
    assert fourth == first


@pytest.mark.parametrize("kind", KINDS, ids=NAME)
def test_code_of_one_s_own_is_told_from_that_of_others(kind: Callable[[Any], Set]) -> None:
    model = model_of()
    assert Structure(model).own_code is None
    kind(model)(1.0)
    is_own = kind not in (scaling, variance, rotary_scaling, weights)
    assert ((Structure(model).own_code or own_code_around()) is not None) == is_own


@pytest.mark.exhaustive
def test_a_method_put_into_a_model_that_was_checked_is_seen() -> None:
    model = model_of()
    lade.generate(model, PROMPT, **OPTIONS)  # checked without it
    put = patched_later(model)
    assert sweep(model, put, CONFIGS["drafts"]) == []
    assert Structure(model).own_code == "_call_impl of model.layers.0.mlp"


def test_an_attribute_that_comes_to_hold_code_is_seen() -> None:
    model = model_of()
    mlp_of(model).empty = None
    structure = Structure(model)
    mlp_of(model).empty = 1
    assert structure.is_of(model)
    mlp_of(model).empty = Hook()
    assert not structure.is_of(model)
    assert Structure(model).own_code == "empty of model.layers.0.mlp"


def test_patched_functions_of_a_class_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    model = model_of()
    structure = Structure(model)
    own = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *args: own(*args))
    assert not structure.is_of(model)
    assert Structure(model).own_code == "the function apply_rotary_pos_emb"
    monkeypatch.undo()
    assert structure.is_of(model)
    monkeypatch.setattr(
        modeling_llama.LlamaMLP, "forward", lambda self, states: self.down_proj(states)
    )
    assert not structure.is_of(model)
    assert Structure(model).own_code == "the function forward"


def test_no_architecture_has_code_of_one_s_own() -> None:
    for name in ("llama", "gpt2", "mamba", "gemma3_text", "qwen3_moe", "deepseek_v3", "bloom"):
        model = tiny_architecture(name)
        assert own_code_of(model, places_of(dict.fromkeys(map(type, model.modules())))) is None


def test_callbacks_of_the_user_are_told_from_those_of_transformers() -> None:
    from transformers import PrefixConstrainedLogitsProcessor, TemperatureLogitsWarper

    assert not is_own_callback(None)
    assert not is_own_callback(TemperatureLogitsWarper(0.5))
    assert is_own_callback(PrefixConstrainedLogitsProcessor(lambda *_: [1], 1))
    assert is_own_callback(lambda step: None)
    assert is_own_callback(Hook())
