"""A check on the model chooses how it verifies drafts; where nothing is exact, it is plain."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import lade
from lade.attention.packed import PACKED_SDPA
from lade.compat import CACHE
from lade.config import VERIFICATIONS
from lade.errors import UnsupportedModelError
from lade.probing.profile import profile_of
from tests.grids import thinned
from tests.lade.both import same_as_generate
from tests.lade.tiny import BLOOM, MAMBA2, random_prompt, tiny_model

MAMBA = {"state_size": 8}
NEO = {
    "attention_types": [[["global", "local", "local"], 1]],
    "num_layers": 3,
    "num_heads": 4,
    "window_size": 8,
}
EAGER = ("bloom", "mamba", "mamba2", "gpt_neo")


def model_of(family: str, seed: int = 1, **options: Any) -> Any:
    return tiny_model(family, seed, attention="eager" if family in EAGER else "sdpa", **options)


def check_text(
    model: Any, verification: Any, accept: float = 0.7, plainly: str | None = None
) -> lade.DecodeStats:
    """Compare greedy text of a few prompts with plain `generate`; return what was counted."""
    rng = np.random.default_rng(0)
    total = lade.DecodeStats()
    config = lade.Config(verification=verification, max_draft_tokens=9)
    for seed in range(3):
        options: dict[str, Any] = {"accept": accept, "seed": seed, "max_new_tokens": 40}
        if plainly is not None:  # which is said once
            options |= {"accept": None, "plainly": plainly if seed == 0 else None}
        _, got = same_as_generate(model, random_prompt(rng), config=config, **options)
        total.add(got.stats)
    return total


# --- what is chosen -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options", "verification", "reasons"),
    [
        ("llama", {}, "tree", {}),
        pytest.param("mistral", {}, "tree", {}, marks=pytest.mark.exhaustive),
        ("gemma3_text", {}, "tree", {}),
        pytest.param("llama4_text", {}, "tree", {}, marks=pytest.mark.exhaustive),
        ("bloom", BLOOM, "chain", {"tree": "forward fails"}),
        pytest.param(
            "gpt_neo", NEO, "chain", {"tree": "mask by cache slot"}, marks=pytest.mark.exhaustive
        ),
        (
            "falcon",
            {"alibi": True, "new_decoder_architecture": False},
            "chain",
            {"tree": "ALiBi bias"},
        ),
        (
            "mamba2",
            MAMBA2,
            "snapshot",
            {"tree": "recurrent state", "chain": "recurrent state"},
        ),
        (
            "mamba",
            MAMBA,
            "plain",
            {
                "tree": "recurrent state",
                "chain": "recurrent state",
                "snapshot": "logits differ",
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_best_exact_way_is_chosen_and_the_others_have_their_reason(
    family: str, options: dict[str, Any], verification: str, reasons: dict[str, str]
) -> None:
    model = model_of(family, **options)
    found = lade.probe(model)
    assert found.model == type(model).__name__
    assert found.verification == verification
    assert found.reasons.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert reason in found.reasons[name]  # type: ignore[index]
    assert str(found).startswith(f"{found.model} verifies drafts by: {verification}")
    if verification == "plain":
        stats = check_text(model, None, plainly="logits differ")
        assert stats.num_draft_tokens == 0
        assert stats.mean_accepted_tokens == 1.0
    else:
        assert check_text(model, None).mean_accepted_tokens > 1.1


@pytest.mark.parametrize(
    "verification", [verification for verification in VERIFICATIONS if verification != "plain"]
)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("llama", 1.0), marks=pytest.mark.exhaustive),
        ("gemma3_text", 0.6),
        pytest.param(("gemma3_text", 0.0), marks=pytest.mark.exhaustive),
        pytest.param(("llama4_text", 0.6), marks=pytest.mark.exhaustive),
    ],
    ids=["always", "sometimes", "never", "chunks"],
)
def test_every_way_gives_the_text_of_plain_decoding(
    case: tuple[str, float], verification: str
) -> None:
    family, accept = case
    model = model_of(family, seed=2)
    stats = check_text(model, verification, accept=accept)
    if accept == 1.0:
        assert stats.mean_accepted_tokens > 1.5
    assert lade.probe(model).verification == "tree"  # what was asked for is not remembered


def test_a_way_asked_for_is_taken_or_refused_with_the_reason() -> None:
    model = model_of("bloom", **BLOOM)
    prompt = torch.tensor([[5, 6, 7, 5, 6]])
    with pytest.raises(UnsupportedModelError, match=r"BloomForCausalLM .* by 'tree': its forward"):
        lade.generate(model, prompt, max_new_tokens=3, config=lade.Config(verification="tree"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what was asked for needs no warning
        assert check_text(model, "plain").mean_accepted_tokens == 1.0
    with pytest.raises(ValueError, match=r"expected Config\(verification=…\) of 'tree', 'chain'"):
        lade.Config(verification="twig")  # type: ignore[arg-type]


# --- models that are broken -----------------------------------------------------------------


def ignoring(name: str) -> Callable[[Any], None]:
    """Make a model's forward ignore an argument, where it has the form that trees need."""

    def broken(model: Any) -> None:
        forward = model.model.forward

        def ignores(*args: Any, **kwargs: Any) -> Any:
            value = kwargs.get(name)
            is_tree = isinstance(value, torch.Tensor) and value.dim() == 4
            if is_tree or name == "position_ids":
                kwargs[name] = None
            return forward(*args, **kwargs)

        model.model.forward = ignores

    return broken


def failing_on_trees(model: Any) -> None:
    forward = model.model.forward

    def fragile(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("attention_mask") is not None:
            assert len(kwargs["attention_mask"].shape) == 2
        return forward(*args, **kwargs)

    model.model.forward = fragile


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (ignoring("attention_mask"), "logits differ"),
        (ignoring("position_ids"), "logits differ"),
        (failing_on_trees, "its forward fails (AssertionError"),
    ],
    ids=["mask", "positions", "fails"],
)
@pytest.mark.parametrize("dtype", thinned([torch.float64, torch.bfloat16], torch.bfloat16))
def test_a_model_that_breaks_trees_is_caught_and_verifies_chains(
    broken: Callable[[Any], None], reason: str, dtype: torch.dtype
) -> None:
    model = tiny_model("llama", seed=1, dtype=dtype)
    broken(model)
    found = lade.probe(model)
    assert found.verification == "chain"
    assert reason in found.reasons["tree"]
    if dtype == torch.float64:
        assert check_text(model, None).mean_accepted_tokens > 1.1


def test_a_state_that_starts_anew_in_every_longer_forward_is_caught() -> None:
    """As the selective scan of the first mamba does, and mamba2 did until it was mended."""
    model = model_of("mamba2", **MAMBA2)
    forward = model.backbone.forward

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache_params", kwargs.get("cache"))
        if args[0].shape[1] > 1 and cache is not None:
            for layer in cache.layers:
                for state in layer.recurrent_states.values():
                    if state is not None:
                        state.zero_()
        return forward(*args, **kwargs)

    model.backbone.forward = forgetful
    found = lade.probe(model)
    assert found.verification == "plain"
    assert "logits differ" in found.reasons["snapshot"]
    check_text(model, None, plainly="")


def test_a_state_kept_outside_of_the_cache_is_caught() -> None:
    """Nothing can take it back to where a draft began."""
    model = tiny_model("llama", seed=1)
    embed = model.model.embed_tokens
    table = torch.randn(97, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen: list[int] = []

    def with_memory(ids: torch.Tensor) -> torch.Tensor:
        states = []
        if ids.shape[1] >= 6:
            seen.clear()
        for token_ids in ids.T.tolist():
            seen.append(sum(token_ids))
            states.append(table[sum(seen) % 97].expand(len(token_ids), -1))
        made: torch.Tensor = type(embed).forward(embed, ids) + torch.stack(states, dim=1)
        return made

    embed.forward = with_memory
    assert lade.probe(model).verification == "plain"


def test_a_check_that_fails_altogether_never_loses_the_generation() -> None:
    """The model cannot run what is shorter than the caller's prompt."""
    model = tiny_model("llama", seed=1)
    forward = model.model.forward

    def wants_long_prompts(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[1] in range(2, 12):
            raise RuntimeError("too short for me")
        return forward(*args, **kwargs)

    model.model.forward = wants_long_prompts
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6, 7]])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            same_as_generate(model, prompt, max_new_tokens=9)
    said = [one for one in warned if one.category is lade.PlainDecodingWarning]
    assert len(said) == 1  # once
    assert "too short for me" in str(said[0].message)


def test_a_model_in_training_mode_is_told_so_and_checked_again_after() -> None:
    model = tiny_model("gpt2").train()
    assert "try model.eval()" in lade.probe(model).reasons["tree"]
    assert lade.probe(model.eval()).verification == "tree"


# --- code that is not part of transformers --------------------------------------------------

REMOTE = """
import torch
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class {name}Config(PretrainedConfig):
    model_type = "{name}"

    def __init__(self, vocab_size=97, hidden_size=32, num_hidden_layers=1, **kwargs):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**kwargs)


class {name}Model(PreTrainedModel, GenerationMixin):
    config_class = {name}Config

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.core = {core}
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def _init_weights(self, module):
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.4)

{forward}
"""
# Learned positions, counted by the cache; its attention knows no mask but the causal one.
COUNTING = """
    def forward(self, input_ids, past_key_values=None, attention_mask=None, **kwargs):
        start = 0 if past_key_values is None else past_key_values.get_seq_length()
        places = torch.arange(start, start + input_ids.shape[1]) + 3
        states = self.embed(input_ids) + self.embed(places % 97)
        keys = self.core(states)[:, None]
        if past_key_values is not None:
            keys, _ = past_key_values.update(keys, keys, 0)
        scores = states @ keys[:, 0].mT / 4
        seen = torch.ones_like(scores, dtype=torch.bool).tril(keys.shape[2] - states.shape[1])
        mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ keys[:, 0]
        return CausalLMOutputWithPast(logits=self.head(mixed), past_key_values=past_key_values)
"""
# No cache at all: every forward reads the whole text.
REREADING = """
    def forward(self, input_ids, attention_mask=None, use_cache=None, **kwargs):
        states, _ = self.core(self.embed(input_ids))
        return CausalLMOutputWithPast(logits=self.head(states))
"""


@pytest.mark.parametrize(
    ("name", "core", "forward", "verification"),
    [
        ("Counting", "nn.Linear(32, 32)", COUNTING, "chain"),
        ("Rereading", "nn.GRU(32, 32, batch_first=True)", REREADING, "chain"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # what loading remote code says
def test_remote_code_is_checked_like_any_other(
    tmp_path: Path, name: str, core: str, forward: str, verification: str
) -> None:
    code = REMOTE.format(name=name, core=core, forward=forward.replace("past_key_values", CACHE))
    (tmp_path / f"modeling_{name.lower()}.py").write_text(code)
    module = f"modeling_{name.lower()}"
    config = {
        "model_type": name,
        "architectures": [f"{name}Model"],
        "auto_map": {
            "AutoConfig": f"{module}.{name}Config",
            "AutoModelForCausalLM": f"{module}.{name}Model",
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(tmp_path, trust_remote_code=True), trust_remote_code=True
    )
    model = model.double().eval()
    model.generation_config.use_cache = name == "Counting"
    assert not type(model).__module__.startswith("transformers.models")
    assert check_text(model, None).mean_accepted_tokens > 1.1
    assert lade.probe(model).verification == verification


# --- the check itself -----------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", thinned([1, 3], 3))
@pytest.mark.parametrize(
    "dtype", thinned([torch.float32, torch.bfloat16, torch.float16], torch.float32, torch.bfloat16)
)
def test_the_check_passes_in_every_precision(dtype: torch.dtype, num_rows: int) -> None:
    for family in ("llama", "gpt2", "opt", "phi3", "gemma3_text"):
        for seed in range(2):
            model = tiny_model(family, seed=seed, dtype=dtype)
            assert lade.probe(model, num_rows=num_rows).verification == "tree"


def test_the_check_runs_once_and_leaves_no_trace() -> None:
    model = tiny_model("llama", seed=1)
    calls: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, inputs: calls.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    attributes = set(vars(model))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert lade.probe(model) == lade.probe(model)
    assert len(calls) <= 14
    assert sorted(calls)[-2] <= 6  # but for one, to find out whether forwards draw
    assert torch.equal(torch.get_rng_state(), state)
    assert set(vars(model)) - attributes == {"_lade_profiles"}
    assert len(model._forward_pre_hooks) == 1
    handle.remove()
    profile = profile_of(model)
    assert profile_of(model) is profile
    model.set_attn_implementation("eager")
    assert profile_of(model) is not profile  # another attention, another check


def test_a_batch_is_checked_when_it_comes() -> None:
    """A model that ignores the mask of padding in trees is fine for one row alone."""
    model = tiny_model("llama", seed=1)
    forward = model.model.forward

    def sees_padding(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 4 and mask.shape[0] > 1:
            kwargs["attention_mask"] = mask.clone().fill_(True)
        return forward(*args, **kwargs)

    model.model.forward = sees_padding
    assert lade.probe(model).verification == "tree"
    assert lade.probe(model, num_rows=2).verification == "chain"


# --- attention implementations --------------------------------------------------------------


def blind(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kw: Any) -> Any:
    """Attention that knows nothing but the causal order, as flash attention does."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    order = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    USED.append("blind")
    return sdpa_attention_forward(module, query, key, value, order[None, None], **kw)


USED: list[str] = []
AttentionInterface.register("blind", blind)
AttentionMaskInterface.register("blind", lambda *args, **kwargs: None)


@pytest.mark.usefixtures("trusted")
def test_attention_that_ignores_masks_prefills_and_another_one_verifies() -> None:
    model = tiny_model("llama", seed=3)
    model.set_attn_implementation("blind")
    found = lade.probe(model)
    assert (found.verification, found.attention) == ("tree", PACKED_SDPA)
    assert model.config._attn_implementation == "blind"
    USED.clear()
    forwards: list[str] = []
    model.register_forward_pre_hook(
        lambda module, args: forwards.append(module.config._attn_implementation)
    )
    assert check_text(model, None).mean_accepted_tokens > 1.2
    assert {*forwards} == {"blind", PACKED_SDPA}
    assert model.config._attn_implementation == "blind"

    def interrupts(step: Any) -> None:
        raise KeyboardInterrupt

    prompt = torch.tensor([[5, 6, 7, 5, 6]])
    with pytest.raises(KeyboardInterrupt):
        lade.generate(model, prompt, max_new_tokens=5, on_step=interrupts)
    assert model.config._attn_implementation == "blind"


@pytest.mark.filterwarnings("ignore")  # of torch, about flex attention that is not compiled
def test_flex_attention_prefills_and_another_one_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # two minutes
    model = tiny_model("llama", seed=3, head_dim=16, dtype=torch.float32)
    model.set_attn_implementation("flex_attention")
    prompt = torch.tensor([[5, 6, 7, 5, 6]])
    _, output = same_as_generate(model, prompt, accept=1.0, max_new_tokens=12)
    assert output.stats.num_accepted_tokens > 3
    assert lade.probe(model).attention == PACKED_SDPA
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.parametrize("vocab_size", thinned([2, 3, 19], 2, 3))
def test_few_tokens_are_enough_to_see_what_attention_does(vocab_size: int) -> None:
    """Attention to one and the same token would hide it."""
    model = tiny_model("llama", seed=1, vocab_size=vocab_size, eos_token_id=None, bos_token_id=None)
    assert lade.probe(model).verification == "tree"

    def change_last(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        changed = output.clone()
        changed[:, -1] *= 1.5
        return changed

    model.model.layers[0].self_attn.q_proj.register_forward_hook(change_last)
    found = lade.probe(model)
    assert found.verification == "plain"
    assert "differ" in found.reasons["tree"]
