"""Caches, inputs and lengths of one call leave some ways of verifying open, and not others."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DynamicCache,
    MaxLengthCriteria,
    QuantizedCache,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)

import lade
from lade.drafting.drafts import chain
from lade.probing.profile import profile_of
from lade.probing.values import Values
from tests.grids import thinned
from tests.lade.both import answered, same_as_generate
from tests.lade.hf.test_outputs import assert_same, assert_same_cache
from tests.lade.shared import shared_model
from tests.lade.tiny import IS_NEWEST, MAMBA2, ScriptedDrafter, random_prompt, tiny_model
from tests.support.tiny import tiny_model as architecture

SEVEN = lade.Config(max_draft_tokens=7)


def both(
    model: Any, prompt: torch.Tensor, verification: Any = None, **options: Any
) -> tuple[Any, Any]:
    """Run plain `generate` and lade, whose drafts are mostly right."""
    config = replace(SEVEN, verification=verification)
    options = {"accept": 0.8, "max_new_tokens": 30, **options}
    return same_as_generate(model, prompt, config=config, **options)


PROMPTS = [torch.tensor([[5, 6, 7, 5, 6]]), torch.arange(2, 30)[None]]


# --- caches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "long"])
@pytest.mark.parametrize(
    "family", thinned(["llama", "gemma3_text", "llama4_text", "mamba2"], "llama", "gemma3_text")
)
def test_a_static_cache_is_verified_in_itself(family: str, prompt: torch.Tensor) -> None:
    recurrent = family == "mamba2"
    options: dict[str, Any] = MAMBA2 if recurrent else {}
    model = tiny_model(family, seed=1, attention="eager" if recurrent else "sdpa", **options)
    try:
        model.generate(prompt, max_new_tokens=2, cache_implementation="static")
    except TypeError as failure:  # of llama4, in the oldest supported transformers
        pytest.skip(f"plain generate itself fails: {failure}")
    _, got = both(model, prompt, cache_implementation="static")
    assert got.stats.mean_accepted_tokens > 1.1
    if recurrent:
        return
    assert isinstance(got.past_key_values, StaticCache)

    def cache() -> dict[str, Any]:
        return {"past_key_values": StaticCache(config=model.config, max_cache_len=80)}

    expected, got = both(model, prompt, fresh=cache)
    assert got.stats.mean_accepted_tokens > 1.1
    lengths = [int(out.past_key_values.get_seq_length()) for out in (expected, got)]
    assert lengths[0] == lengths[1]
    layers = [out.past_key_values.layers for out in (expected, got)]
    for theirs, mine in zip(*layers, strict=True):
        held = min(lengths[0], theirs.keys.shape[2])
        torch.testing.assert_close(mine.keys[:, :, :held], theirs.keys[:, :, :held])


@pytest.mark.exhaustive
@pytest.mark.skipif(not IS_NEWEST, reason="hrm_text came with transformers 5.23")
def test_token_types_that_show_later_tokens_are_decoded_plainly_without_a_cache() -> None:
    """Of type 1 are tokens that see each other; the next one has the type of the last."""
    model, prompt = architecture("hrm_text"), torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
    types = {"token_type_ids": torch.tensor([[1, 0, 1, 0, 0, 1, 1]])}
    both(model, prompt, plainly="may let tokens see later ones", use_cache=False, **types)
    _, got = both(model, prompt, **types)
    assert got.stats.num_draft_tokens > 0


def test_where_generate_compiles_what_has_a_static_cache_so_does_lade(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does on CUDA, where a forward that is not compiled takes twice as long or more."""
    model, prompt = tiny_model("llama", seed=1), PROMPTS[0]
    there = torch.device("cuda")
    monkeypatch.setattr("lade.probing.requirements.device_of_inputs", lambda model: there)
    static: dict[str, Any] = {"cache_implementation": "static"}
    both(model, prompt, plainly="leave the cache to lade", **static)
    _, got = both(model, prompt, disable_compile=True, **static)
    assert got.stats.num_accepted_tokens > 0


def test_a_batch_in_a_static_cache() -> None:
    model = tiny_model("llama", seed=1)
    prompt = torch.tensor([[0, 0, 5, 6, 7, 5], [4, 9, 9, 4, 9, 9], [0, 8, 3, 8, 3, 8]])
    _, got = both(model, prompt, cache_implementation="static", accept=1.0)
    assert got.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_caches_of_other_kinds_are_decoded_plainly_and_say_so(family: str) -> None:
    model = shared_model(family, seed=1)

    class Own(DynamicCache):  # type: ignore[misc]
        """Of the caller's; nobody knows what it does."""

    fresh = lambda: {"past_key_values": Own(config=model.config)}  # noqa: E731
    both(model, PROMPTS[0], fresh=fresh, plainly="Own")


def test_a_quantized_cache_is_decoded_plainly_and_says_so() -> None:
    model = shared_model("llama", seed=1, dtype=torch.float32, head_dim=16)
    try:
        QuantizedCache(backend="quanto", config=model.config)
    except ImportError:
        pytest.skip("quanto is not installed")
    both(model, PROMPTS[0], cache_implementation="quantized", plainly="quantized")


@pytest.mark.parametrize("is_lazy", thinned([False, True], False), ids=["with config", "without"])
@pytest.mark.parametrize(
    ("family", "length"), [("llama", 4), ("gemma3_text", 25), ("mistral", 4), ("mistral", 25)]
)
def test_a_dynamic_cache_goes_on_over_turns(family: str, is_lazy: bool, length: int) -> None:
    """Past the window and before it, in the layers that the caller's cache has."""
    model = shared_model(family, seed=1)
    made = [DynamicCache() if is_lazy else DynamicCache(config=model.config) for _ in range(2)]
    turn = torch.randint(2, 90, (1, length), generator=torch.Generator().manual_seed(0))
    for number in range(3):
        fresh = partial(next, iter([{"past_key_values": each} for each in made]))
        expected, got = both(model, turn, fresh=fresh, max_new_tokens=12)
        assert got.past_key_values is made[1]
        assert got.stats.mean_accepted_tokens > 1.2
        for theirs, mine in zip(made[0].layers, made[1].layers, strict=True):
            assert mine.get_seq_length() == theirs.get_seq_length()
            torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-6, atol=1e-6)
        turn = torch.cat([expected.sequences, torch.full((1, 2), 7 + number)], dim=1)


def test_a_recurrent_cache_goes_on_over_turns() -> None:
    model = shared_model("mamba2", seed=1, attention="eager", **MAMBA2)
    ids, caches = PROMPTS[0], [DynamicCache(config=model.config) for _ in range(2)]
    for _ in range(2):
        fresh = partial(next, iter([{"cache_params": each} for each in caches]))
        expected, _ = same_as_generate(model, ids, fresh=fresh, max_new_tokens=9)
        ids = expected.sequences[:, -1:]


@pytest.mark.parametrize("family", thinned(["llama", "gpt2", "mpt"], "gpt2"))
def test_without_a_cache_paths_are_verified_in_the_whole_text(family: str) -> None:
    mpt = {"n_heads": 4, "d_model": 32, "n_layers": 2}
    options: dict[str, Any] = mpt if family == "mpt" else {}
    model = shared_model(
        family, seed=1, attention="eager" if family == "mpt" else "sdpa", **options
    )
    _, got = both(model, PROMPTS[0], use_cache=False)
    assert got.stats.mean_accepted_tokens > 1.2
    prompt = torch.tensor([[0, 0, 5, 6, 7, 5], [4, 9, 9, 4, 9, 9]])
    _, got = both(model, prompt, use_cache=False, accept=1.0)
    assert got.stats.num_accepted_tokens > 0


def test_a_batch_without_padding_is_checked_without_a_mask() -> None:
    """Whole texts without a mask are another thing to ProphetNet than with one."""
    ids = torch.tensor([[11, 8, 70], [19, 43, 80]])
    why = "its logits differ" if IS_NEWEST else None  # older transformers keep masks of ones
    same_as_generate(architecture("prophetnet"), ids, use_cache=False, plainly=why)


# --- inputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("verification", thinned(["tree", "chain", "snapshot"], "tree", "snapshot"))
def test_token_types_go_on_as_in_plain_decoding(verification: str) -> None:
    model = shared_model("gpt2", seed=1)
    types = torch.tensor([[3, 3, 4, 4, 4]])
    _, got = both(model, PROMPTS[0], verification=verification, token_type_ids=types)
    assert got.stats.mean_accepted_tokens > 1.2


@pytest.mark.parametrize("verification", ["chain", "snapshot"])
@pytest.mark.parametrize("do_sample", thinned([False, True], True))
def test_batches_stay_of_one_length_and_exact(verification: str, do_sample: bool) -> None:
    model = shared_model("llama", seed=3)
    prompt = torch.tensor([[0, 0, 5, 6, 7, 5], [4, 9, 9, 4, 9, 9], [0, 8, 3, 8, 3, 8]])
    free, _ = both(model, prompt, verification, accept=1.0)
    eos = [int(free.sequences[0, 12]), int(free.sequences[1, 20])]
    _, got = both(model, prompt, verification, accept=1.0, do_sample=do_sample, eos_token_id=eos)
    assert got.stats.num_accepted_tokens > 0


@pytest.mark.parametrize(
    "verification", thinned(["tree", "chain", "snapshot", "plain"], "tree", "chain")
)
def test_outputs_are_those_of_plain_decoding_whatever_the_way(verification: str) -> None:
    model = shared_model("llama", seed=3)
    options = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    expected, got = both(model, PROMPTS[0], verification=verification, **options)
    assert len(got.scores) == 30
    for name in ("scores", "logits", "hidden_states"):
        assert_same(getattr(got, name), getattr(expected, name))
    assert_same_cache(got.past_key_values, expected.past_key_values, torch.ones_like(PROMPTS[0]))
    assert got.stats.num_tokens == 30


def test_attentions_come_from_ways_that_have_them() -> None:
    model = shared_model("llama", seed=3, attention="eager")
    for verification in ("tree", "chain"):
        expected, got = both(model, PROMPTS[0], verification=verification, output_attentions=True)
        assert_same(got.attentions, expected.attentions)
    windowed = shared_model("gemma3_text", seed=3, attention="eager")
    said = "attentions were asked for"
    expected, got = both(windowed, PROMPTS[1], output_attentions=True, plainly=said)
    assert got.attentions[-1][0].shape == expected.attentions[-1][0].shape


def test_rejection_sampling_takes_one_path_where_one_can_be_verified() -> None:
    model = shared_model("llama", seed=3)
    config = lade.Config(acceptance="rejection", verification="chain", max_draft_tokens=6)
    pool = lade.NGramPool()
    torch.manual_seed(0)
    for _ in range(3):
        output = answered(
            model,
            PROMPTS[0],
            do_sample=True,
            max_new_tokens=40,
            temperature=0.3,
            pool=pool,
            config=config,
        )
    assert output.stats.num_accepted_tokens > 0


def test_plain_decoding_streams_and_counts_like_the_others() -> None:
    model = shared_model("llama", seed=3)
    steps: list[Any] = []
    config = lade.Config(verification="plain")
    by = partial(lade.generate, on_step=steps.append)
    _, output = same_as_generate(model, PROMPTS[0], max_new_tokens=9, config=config, by=by)
    emitted = [token_id for step in steps for token_id in step.token_ids]
    assert emitted == output.sequences[0, 5:].tolist()
    assert output.stats.num_tokens == 9
    assert output.stats.num_steps == output.stats.num_row_steps == 8
    assert output.stats.forward_sec > 0
    assert isinstance(output, lade.GenerateOutput)


# --- found by the fuzzer --------------------------------------------------------------------


def test_token_types_that_a_model_drops_are_dropped() -> None:
    model = architecture("ctrl")
    both(model, torch.tensor([[87]]), token_type_ids=torch.tensor([[1]]), max_new_tokens=9)


@pytest.mark.parametrize(
    ("name", "prompt", "options"),
    [
        ("git", [17, 86, 84, 7, 17, 86, 84], {"attention_mask": [1, 1, 1, 1, 1, 0, 1]}),
        pytest.param(
            "deepseek_v4",
            [21] * 6,
            {"position_ids": [1, 2, 3, 4, 5, 6]},
            marks=pytest.mark.exhaustive,
        ),
        ("minimax_m3_vl_text-sparse", [0] * 5 + [9, 4, 9], {"attention_mask": [0] * 5 + [1] * 3}),
        ("gpt_neo", [0] * 9 + [*range(5, 18)], {"cache_implementation": "static"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore::lade.PlainDecodingWarning")
def test_masks_and_positions_of_single_rows_are_exact(
    name: str, prompt: list[int], options: dict[str, Any]
) -> None:
    model, pool = architecture(name, dtype=torch.float32), lade.NGramPool()
    made: dict[str, Any] = {"max_new_tokens": 10, "pool": pool}
    for key, value in options.items():
        made[key] = torch.tensor([value]) if isinstance(value, list) else value
    for config in (None, None, SEVEN):  # the pool knows the answer from the second time on
        same_as_generate(model, torch.tensor([prompt]), config=config, **made)


@pytest.mark.parametrize("name", ["gemma3n_text", "openai-gpt", "llama without a cache"])
@pytest.mark.filterwarnings("ignore::lade.PlainDecodingWarning")
def test_hidden_states_have_the_shape_that_plain_decoding_gives_them(name: str) -> None:
    model = architecture(name.split()[0])
    options: dict[str, Any] = {"use_cache": False} if "without" in name else {}
    options |= {"output_hidden_states": True, "max_new_tokens": 4}
    expected, got = same_as_generate(model, PROMPTS[0], config=SEVEN, **options)
    shapes = [[tuple(layer.shape) for layer in step] for step in expected.hidden_states]
    assert [[tuple(layer.shape) for layer in step] for step in got.hidden_states] == shapes


def test_a_cache_beside_use_cache_false_is_filled_as_plain_decoding_fills_it() -> None:
    model = shared_model("llama", seed=1)
    fresh = lambda: {"use_cache": False, "past_key_values": DynamicCache()}  # noqa: E731
    expected, got = both(model, PROMPTS[0], fresh=fresh, plainly="use_cache=False")
    lengths = [out.past_key_values.get_seq_length() for out in (expected, got)]
    assert lengths[0] == lengths[1]


class Blind(ScriptedDrafter):
    """Drafts sixteen nodes whatever comes, as far as it is let."""

    def draft(self, sequence: int, committed: Any, max_draft_tokens: int) -> Any:
        return chain([5] * min(16, max_draft_tokens))

    def observe(self, sequence: int, token_ids: Any) -> None:
        pass


@pytest.mark.parametrize("given", ["cache", "embeddings", "static cache"])
def test_drafts_end_where_learned_positions_or_a_static_cache_do(given: str) -> None:
    """Plain decoding stops in time; a draft must not reach for what is behind the end.

    By a criterion of transformers' own: one of the user's may look at a cache of theirs.
    """
    static = given == "static cache"
    model = shared_model("llama", seed=1) if static else architecture("bart")
    text = torch.randint(2, 90, (1, 20 if static else 496), generator=torch.Generator())
    ids = {"cache": text[:, -4:], "embeddings": None}.get(given, text)
    start = 0 if ids is None else ids.shape[1]

    def fresh() -> dict[str, Any]:
        if static:
            return {"past_key_values": StaticCache(config=model.config, max_cache_len=40)}
        if given == "embeddings":
            return {"inputs_embeds": model.get_input_embeddings()(text)}
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(text[:, :-4], past_key_values=cache)
        return {"past_key_values": cache, "attention_mask": torch.ones_like(text)}

    same_as_generate(
        model,
        ids,
        fresh=fresh,
        drafter=Blind([], np.random.default_rng(0), 0.0),
        config=lade.Config(max_draft_tokens=16),
        stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(start + 15)]),
        max_new_tokens=60,
    )


def test_plain_decoding_tells_nothing_of_rows_that_were_stopped() -> None:
    model = shared_model("llama", seed=3)

    class FirstEnds(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.tensor([input_ids.shape[1] >= 8, False])

    counts = []
    for verification in ("tree", "plain"):
        steps: list[Any] = []
        output = answered(
            model,
            torch.tensor([[5, 6, 7, 5, 6], [4, 9, 9, 4, 9]]),
            max_new_tokens=9,
            eos_token_id=96,
            stopping_criteria=StoppingCriteriaList([FirstEnds()]),
            on_step=steps.append,
            config=lade.Config(verification=verification),
        )
        of_first = [token for step in steps if step.row == 0 for token in step.token_ids]
        counts.append((of_first, output.stats.num_tokens))
    assert counts[0] == counts[1]
    assert len(counts[1][0]) == 3


def test_a_snapshot_leaves_a_callers_cache_without_rejected_tokens() -> None:
    model = shared_model("llama", seed=3)
    cache = DynamicCache(config=model.config)
    seen: list[Any] = []

    def interrupts(step: Any) -> None:
        seen.extend(step.token_ids)
        if len(seen) >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lade.generate(
            model,
            PROMPTS[0],
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=20,
            drafter=Blind([], np.random.default_rng(0), 0.0),
            config=lade.Config(verification="snapshot", max_draft_tokens=4),
            on_step=interrupts,
        )
    assert cache.get_seq_length() <= PROMPTS[0].shape[1] + len(seen)


def test_encoder_decoders_are_refused_by_the_probe_too() -> None:
    small = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=97, decoder_start_token_id=0, **small))
    for call in (lade.probe, lambda model: lade.generate(model, PROMPTS[0], max_new_tokens=2)):
        with pytest.raises(lade.UnsupportedModelError, match="is an encoder-decoder"):
            call(t5)


# --- lengths that a short check cannot see --------------------------------------------------


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1e4, **options}


def test_drafts_end_where_dynamic_rotary_embeddings_begin_to_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What the call before has set is no reason for a check, which takes the few steps there are.
    monkeypatch.setattr(Values, "may_be_news", lambda *_: False)
    model = tiny_model(
        "llama", seed=1, max_position_embeddings=24, rope_parameters=rope("dynamic", factor=2.0)
    )
    for length in (4, 20, 30):
        prompt = torch.randint(2, 90, (1, length), generator=torch.Generator().manual_seed(1))
        _, got = both(model, prompt, max_new_tokens=30, accept=1.0)
        assert (got.stats.num_accepted_tokens > 0) == (length < 22)
    prompt = torch.randint(2, 90, (2, 6), generator=torch.Generator().manual_seed(1))
    both(model, prompt, plainly=r"rotary embedding \(dynamic\)")
    _, got = both(model, prompt, max_new_tokens=12, accept=1.0)  # ends before
    assert got.stats.num_accepted_tokens > 0


def test_attention_that_hashes_at_random_is_plain_where_it_begins_to() -> None:
    model = architecture("reformer")
    chunk = model.config.lsh_attn_chunk_length
    prompt = PROMPTS[0]
    for room, is_plain in ((chunk - prompt.shape[1], False), (chunk, True)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            same_as_generate(model, prompt, max_new_tokens=room, use_cache=False)
        assert any("hashes tokens" in str(each.message) for each in told) == is_plain


def test_longrope_is_plain_where_it_would_be_crossed_and_speculates_elsewhere() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    model = tiny_model(
        "phi3",
        seed=1,
        max_position_embeddings=96,
        original_max_position_embeddings=24,
        rope_parameters=rope("longrope", original_max_position_embeddings=24, **factors),
    )
    for length, num_new in ((4, 12), (30, 20)):
        prompt = torch.randint(2, 90, (1, length), generator=torch.Generator().manual_seed(1))
        _, got = both(model, prompt, max_new_tokens=num_new, accept=1.0)
        assert got.stats.num_accepted_tokens > 0
    prompt = torch.randint(2, 90, (1, 20), generator=torch.Generator().manual_seed(1))
    both(model, prompt, max_new_tokens=20, plainly=r"\(longrope\) changes at 24")


def test_queries_scaled_by_slot_are_verified_in_chains_near_the_next_scale() -> None:
    model = tiny_model("llama4_text", seed=1, floor_scale=100, attn_temperature_tuning=True)
    for prompt in (torch.arange(2, 10)[None], torch.arange(2, 80)[None]):
        _, got = both(model, prompt, max_new_tokens=25, accept=0.7)
        assert got.stats.mean_accepted_tokens > 1.1
    choices = {key[0] for key in profile_of(model).results}
    assert choices == {"tree", "chain"}


def test_a_mask_that_follows_the_length_is_plain_beyond_it() -> None:
    options: dict[str, Any] = {"num_attention_heads": 4, "keep_window_size": 24, "head_dim": 8}
    model = shared_model("doge", seed=1, **options)
    _, got = both(model, torch.arange(2, 8)[None], max_new_tokens=12)
    assert got.stats.mean_accepted_tokens > 1.2
    said = "dynamic mask changes at 24 tokens"
    both(model, torch.arange(2, 20)[None], max_new_tokens=12, plainly=said)


def test_a_window_in_remote_code_is_not_trusted_with_trees() -> None:
    """It may be anything inside, and a short check sees none of it."""
    model = tiny_model("mistral", seed=1)

    class Elsewhere(type(model)):  # type: ignore[misc]
        pass

    model.__class__ = Elsewhere
    found = lade.probe(model)
    assert found.verification == "chain"
    assert "not part of transformers" in found.reasons["tree"]
    rng = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            both(model, random_prompt(rng))


def test_a_single_row_with_padding_is_judged_as_a_batch_is() -> None:
    """A model that sees padding in trees is fine without any, and must not be trusted with it."""
    model = tiny_model("llama", seed=1)
    forward = model.model.forward

    def sees_padding(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 4:
            mask = mask.clone()
            mask[..., : mask.shape[-1] - mask.shape[-2]] = True  # all that is cached
            kwargs["attention_mask"] = mask
        return forward(*args, **kwargs)

    model.model.forward = sees_padding
    prompt = torch.tensor([[0, 0, 0, 5, 6, 7, 5, 6]])
    _, got = both(model, prompt)
    assert got.stats.mean_accepted_tokens > 1.1
    results = profile_of(model).results
    assert results["tree", "dynamic", True, None].reason is not None
    both(model, PROMPTS[0])
    assert results["tree", "dynamic", False, None].reason is None
