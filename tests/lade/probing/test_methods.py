"""How drafts of a model are verified, and why; a model that cannot verify falls back to plain."""

import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import CausalLMOutputWithPast

import lade
from tests.grids import thinned, thinned_rows
from tests.lade.both import ONE, same_as_generate
from tests.lade.tiny import BLOOM, CACHE, MAMBA2, random_prompt, tiny_model

EAGER = ("bloom", "mamba", "mamba2", "gpt_neo")


def model_of(family: str, **options: Any) -> Any:
    return tiny_model(family, 1, attention="eager" if family in EAGER else "sdpa", **options)


def check_text(model: Any, plainly: str | None = None) -> lade.DecodeStats:
    """Compare greedy text of a few prompts with plain `generate`; return what was counted.

    Args:
        plainly: the reason in the one warning.
    """
    rng = np.random.default_rng(0)
    total = lade.DecodeStats()
    for seed in range(3):
        options: dict[str, Any] = {"accept": 0.7, "seed": seed, "max_new_tokens": 40}
        if plainly is not None:
            options |= {"accept": None, "plainly": plainly if seed == 0 else None}
        config = lade.Config(max_draft_tokens=9)
        _, got = same_as_generate(model, random_prompt(rng), config=config, **options)
        total.add(got.stats)
    return total


# --- what is chosen -------------------------------------------------------------------------------

STATE = "recurrent state"
NEO = {"attention_types": [[["global", "local", "local"], 1]], "num_layers": 3, "num_heads": 4}
CHOSEN: list[tuple[str, dict[str, Any], str, dict[str, str]]] = [
    *((family, {}, "tree", {}) for family in ("llama", "mistral", "gemma3_text", "llama4_text")),
    ("bloom", BLOOM, "chain", {"tree": "forward fails"}),
    ("gpt_neo", {**NEO, "window_size": 8}, "chain", {"tree": "mask by cache slot"}),
    (
        *("falcon", {"alibi": True, "new_decoder_architecture": False}),
        *("chain", {"tree": "ALiBi bias"}),
    ),
    ("mamba2", MAMBA2, "snapshot", {"tree": STATE, "chain": STATE}),
    (
        *("mamba", {"state_size": 8}, "plain"),
        {"tree": STATE, "chain": STATE, "snapshot": "logits differ"},
    ),
]


@pytest.mark.parametrize(
    ("family", "options", "verification", "reasons"),
    thinned_rows(CHOSEN, *(CHOSEN[place] for place in (2, 4, 6, 7, 8))),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_best_exact_way_is_chosen_and_the_others_have_their_reason(
    family: str, options: dict[str, Any], verification: str, reasons: dict[str, str]
) -> None:
    model = model_of(family, **options)
    found = lade.probe(model)
    assert (found.model, found.verification) == (type(model).__name__, verification)
    assert bool(found.reasons) == bool(reasons)
    for name, reason in reasons.items():
        assert reason in found.reasons[name]  # type: ignore[index]
    assert str(found).startswith(f"{found.model} verifies drafts by: {verification}")
    if verification == "plain":
        assert check_text(model, "logits differ").num_draft_tokens == 0
    else:
        assert check_text(model).mean_accepted_tokens > 1.1


def test_a_way_asked_for_is_taken_or_refused_with_the_reason() -> None:
    model = model_of("bloom", **BLOOM)
    with pytest.raises(lade.UnsupportedModelError, match=r"BloomFor.* by 'tree': its forward"):
        lade.generate(model, ONE, max_new_tokens=3, config=lade.Config(verification="tree"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what was asked for needs no warning
        _, got = same_as_generate(model, ONE, config=lade.Config(verification="plain"), knows=True)
    assert got.stats.num_draft_tokens == 0
    assert lade.probe(model).verification == "chain"  # what was asked for is not remembered


def test_encoder_decoders_are_refused() -> None:
    small = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=97, decoder_start_token_id=0, **small))
    for call in (lade.probe, lambda model: lade.generate(model, ONE, max_new_tokens=2)):
        with pytest.raises(lade.UnsupportedModelError, match="is an encoder-decoder"):
            call(t5)


@pytest.mark.parametrize("num_rows", thinned([1, 3], 3))
@pytest.mark.parametrize(
    "dtype", thinned([torch.float32, torch.bfloat16, torch.float16], torch.bfloat16)
)
def test_rounding_is_no_fault_in_any_precision(dtype: torch.dtype, num_rows: int) -> None:
    for family in ("llama", "gpt2", "gemma3_text"):
        assert lade.probe(model_of(family, dtype=dtype), num_rows=num_rows).verification == "tree"


# --- models that are broken -----------------------------------------------------------------------


def around(part: Any, change: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> None:
    """Let a module's forward change its arguments first."""
    forward = part.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        change(args, kwargs)
        return forward(*args, **kwargs)

    part.forward = changed


def has_tree(kwargs: dict[str, Any]) -> bool:
    mask = kwargs.get("attention_mask")
    return isinstance(mask, Tensor) and mask.dim() == 4


def ignoring_masks(args: Any, kwargs: dict[str, Any]) -> None:
    if has_tree(kwargs):
        kwargs["attention_mask"] = None


def ignoring_positions(args: Any, kwargs: dict[str, Any]) -> None:
    kwargs["position_ids"] = None


def failing_on_trees(args: Any, kwargs: dict[str, Any]) -> None:
    if has_tree(kwargs):
        raise AssertionError("no such mask")


BROKEN: list[tuple[Any, str]] = [
    (ignoring_masks, "logits differ"),
    (ignoring_positions, "logits differ"),
    (failing_on_trees, "its forward fails (AssertionError"),
]


@pytest.mark.parametrize(("broken", "reason"), BROKEN)
@pytest.mark.parametrize("dtype", thinned([torch.float64, torch.bfloat16], torch.float64))
def test_a_model_that_breaks_trees_is_caught_and_verifies_chains(
    broken: Any, reason: str, dtype: torch.dtype
) -> None:
    model = model_of("llama", dtype=dtype)
    around(model.model, broken)
    found = lade.probe(model)
    assert found.verification == "chain"
    assert reason in found.reasons["tree"]
    if dtype == torch.float64:
        assert check_text(model).mean_accepted_tokens > 1.1


@pytest.mark.parametrize("number", [0.5, torch.nan])
def test_logits_that_tell_nothing_are_no_verdict(number: float) -> None:
    """A check that compares equal logits would pass what is wrong once weights are trained."""
    model = model_of("llama")
    around(model.model, ignoring_masks)
    weight = model.lm_head.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(number)
        check_text(model, plainly="no check can compare them")
        weight.copy_(kept)
    assert lade.probe(model).verification == "chain"


def test_a_state_kept_outside_of_the_cache_is_caught() -> None:
    """Nothing can take it back to where a draft began."""
    model = model_of("llama")
    embed = model.model.embed_tokens
    table = torch.randn(97, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen: list[int] = []

    def with_memory(ids: Tensor) -> Tensor:
        states = []
        if ids.shape[1] >= 6:
            seen.clear()
        for token_ids in ids.T.tolist():
            seen.append(sum(token_ids))
            states.append(table[sum(seen) % 97].expand(len(token_ids), -1))
        made: Tensor = type(embed).forward(embed, ids) + torch.stack(states, dim=1)
        return made

    embed.forward = with_memory
    assert lade.probe(model).verification == "plain"


def test_a_check_that_fails_altogether_never_loses_the_generation() -> None:
    """The model cannot run what is shorter than the caller's prompt; which is said once."""
    model = model_of("llama")

    def wants_long_prompts(args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[1] in range(2, 12):
            raise RuntimeError("too short for me")

    around(model.model, wants_long_prompts)
    prompt = torch.tensor([[5, 6, 7] * 4])
    for said in ("too short for me", None, None):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            same_as_generate(model, prompt, plainly=said, max_new_tokens=9)


def test_what_only_padding_shows_is_found_when_it_comes() -> None:
    """A model that sees padding in trees is fine without any, and must not be trusted with it."""
    model = model_of("llama")

    def sees_padding(args: Any, kwargs: dict[str, Any]) -> None:
        if has_tree(kwargs):
            mask = kwargs["attention_mask"] = kwargs["attention_mask"].clone()
            mask[..., : mask.shape[-1] - mask.shape[-2]] = True  # all that is cached

    around(model.model, sees_padding)
    config = lade.Config(max_draft_tokens=7)
    for prompt in (torch.tensor([[0, 0, 0, 5, 6, 7, 5, 6]]), ONE):
        _, got = same_as_generate(model, prompt, accept=0.8, config=config, max_new_tokens=30)
        assert got.stats.mean_accepted_tokens > 1.1
    assert lade.probe(model).verification == "tree"
    found = lade.probe(model, num_rows=2)
    assert (found.verification, "tree" in found.reasons) == ("plain", True)


# --- layers that look at other tokens, or turn last bits into steps -------------------------------


class Quantized(nn.Module):
    """A linear layer of int8 weights."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.in_features = linear.in_features
        whole = linear.weight.detach()
        self.scale: Tensor = whole.abs().amax(1, keepdim=True) / 127
        self.weight = (whole / self.scale).round().char()

    def forward(self, states: Tensor) -> Tensor:
        weight: Tensor = self.weight.to(states.dtype) * self.scale
        return self.quantized(states) @ weight.T

    def quantized(self, states: Tensor) -> Tensor:
        return states


def rounded(states: Tensor, largest: Tensor) -> Tensor:
    return (states / largest * 127).round() * largest / 127


class PerTensor(Quantized):
    def quantized(self, states: Tensor) -> Tensor:
        return rounded(states, states.abs().max())


class PerToken(Quantized):
    def quantized(self, states: Tensor) -> Tensor:
        return rounded(states, states.abs().amax(-1, keepdim=True))


@pytest.fixture
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("quietly")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((PerTensor, each) for each in (torch.float64, torch.float32, torch.bfloat16)),
        *product((PerToken, Quantized), (torch.float64, torch.float32)),
    ],
)
def test_layers_that_are_quantized_have_the_text_of_generate(kind: Any, dtype: torch.dtype) -> None:
    """Those that look at other tokens in any precision, the others where text is promised."""
    model = model_of("llama", dtype=dtype)
    model.model.layers[1].mlp.down_proj = kind(model.model.layers[1].mlp.down_proj)
    _, got = same_as_generate(model, ONE, knows=True, config=lade.Config(max_draft_tokens=6))
    assert (got.stats.num_draft_tokens > 0) == (kind is Quantized)


# --- code that is not part of transformers --------------------------------------------------------


class Counting(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Learned positions, counted by the cache; its attention knows no mask but the causal one."""

    config_class = PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed, self.core = nn.Embedding(97, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 97)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.4)

    def forward(self, input_ids: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        cache = kwargs[CACHE]
        start = cache.get_seq_length()
        places = torch.arange(start, start + input_ids.shape[1]) + 3
        states = self.embed(input_ids) + self.embed(places % 97)
        keys, _ = cache.update(self.core(states)[:, None], self.core(states)[:, None], 0)
        scores = states @ keys[:, 0].mT / 4
        seen = torch.ones_like(scores, dtype=torch.bool).tril(keys.shape[2] - states.shape[1])
        mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ keys[:, 0]
        return CausalLMOutputWithPast(logits=self.head(mixed), **{CACHE: cache})


def test_a_model_of_ones_own_is_checked_like_any_other() -> None:
    config = PretrainedConfig(num_hidden_layers=1, hidden_size=32, vocab_size=97)
    model = Counting(config).double().eval()
    assert check_text(model).mean_accepted_tokens > 1.1
    assert lade.probe(model).verification == "chain"


# --- attention implementations --------------------------------------------------------------------


def blind(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kw: Any) -> Any:
    """Attention that knows nothing but the causal order, as flash attention does."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    order = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    USED.append("blind")
    return sdpa_attention_forward(module, query, key, value, order[None, None], **kw)


USED: list[str] = []
AttentionInterface.register("blind", blind)
AttentionMaskInterface.register("blind", AttentionMaskInterface()["flash_attention_2"])


def test_attention_that_ignores_masks_prefills_and_another_one_verifies() -> None:
    model = model_of("llama")
    model.set_attn_implementation("blind")
    found = lade.probe(model)
    assert found.verification == "tree"
    assert found.attention != "blind"
    USED.clear()
    assert check_text(model).mean_accepted_tokens > 1.2
    assert USED
    assert model.config._attn_implementation == "blind"


# --- what a check leaves behind -------------------------------------------------------------------


def test_a_model_that_draws_is_plain_and_leaves_the_state_as_it_was() -> None:
    model = tiny_model("opt", dropout=0.5, attention_dropout=0.5).train()
    state = torch.get_rng_state()
    assert lade.probe(model).verification == "plain"
    assert torch.equal(torch.get_rng_state(), state)
    same_as_generate(model, ONE, plainly="", knows=True)
