"""What `generate` returns and takes besides the text: scores, states, caches, embeddings, masks."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, GenerationConfig

import lade
from lade.compat import CACHE
from tests.grids import thinned
from tests.lade.both import EIGHT, ONE, THREE, both, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import ScriptedDrafter, byte_tokenizer, tiny_model

SIX = lade.Config(max_draft_tokens=6)
ALL_OUTPUTS: dict[str, Any] = {
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


def assert_same(mine: Any, theirs: Any) -> None:
    """Same nesting of tuples, same shapes and dtypes, same numbers."""
    if isinstance(theirs, tuple):
        assert isinstance(mine, tuple)
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_same(one, other)
    elif theirs is None:
        assert mine is None
    else:
        assert mine.dtype == theirs.dtype
        # float64 models go through float32 inside their norms and softmax.
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def assert_same_cache(mine: DynamicCache, theirs: DynamicCache, mask: torch.Tensor) -> None:
    """Same keys and values wherever there is no padding."""
    assert type(mine) is type(theirs)
    assert mine.get_seq_length() == theirs.get_seq_length()
    seen = torch.ones((mask.shape[0], mine.get_seq_length()), dtype=torch.bool)
    seen[:, : mask.shape[1]] = mask.bool()
    for one, other in zip(mine.layers, theirs.layers, strict=True):
        for got, expected in ((one.keys, other.keys), (one.values, other.values)):
            assert got.shape == expected.shape
            torch.testing.assert_close(
                got.transpose(1, 2)[seen], expected.transpose(1, 2)[seen], rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("family", thinned(["llama", "gpt2", "gpt_neox"], "llama"))
@pytest.mark.parametrize("rows", ["one", "unpadded", "padded"])
def test_all_outputs_are_those_of_generate(family: str, rows: str) -> None:
    do_sample = (family == "gpt2") != (rows == "unpadded")
    # Left padding leaves rows that see nothing: in float64 eager attention makes NaN of them.
    dtype = torch.float32 if rows == "padded" else torch.float64
    model = shared_model(family, seed=1, attention="eager", dtype=dtype)
    prompt = {"one": ONE, "unpadded": ONE[:, [[0, 1, 2, 3], [1, 1, 1, 0], [2, 0, 2, 0]]][0]}.get(
        rows, THREE
    )
    expected, got = both(
        model,
        prompt,
        do_sample=do_sample,
        repetition_penalty=1.1,
        eos_token_id=[*range(0, 97, 9)],
        **ALL_OUTPUTS,
    )
    assert [*got] == [*expected]  # `stats` is no item
    assert got.stats.num_accepted_tokens > 0
    for name in ("scores", "logits", "hidden_states", "attentions"):
        assert_same(getattr(got, name), getattr(expected, name))
    assert_same_cache(got.past_key_values, expected.past_key_values, (prompt != 0).long())


def test_attention_that_gives_no_weights_gives_none_as_in_generate() -> None:
    model = shared_model("llama", seed=1, attention="sdpa")
    options: dict[str, Any] = {"output_hidden_states": True, "output_scores": True}
    expected, got = both(model, THREE, **options)
    assert got.attentions is None
    assert expected.attentions is None
    assert_same(got.hidden_states, expected.hidden_states)


def test_scores_are_not_kept_when_nobody_asks() -> None:
    _, got = both(shared_model("llama", seed=1), ONE, output_scores=False)
    assert got.scores is None
    assert got.logits is None
    assert got.hidden_states is None


def test_scores_reach_stopping_criteria() -> None:
    model = shared_model("llama", seed=1)
    seen: list[Any] = []

    def unsure(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(scores)
        return torch.full((input_ids.shape[0],), len(scores) >= 9 and bool(scores[-1].max() > 0))

    for prompt in (ONE, THREE):
        expected, got = both(model, prompt, stopping_criteria=[unsure], output_scores=True)
        assert_same(got.scores, expected.scores)
        assert len(got.scores) < 24
    assert [len(scores) for scores in seen[:3]] == [1, 2, 3]
    assert seen[1][0] is seen[2][0]  # and not made anew each time


# --- caches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [ONE, THREE], ids=["one row", "batch"])
@pytest.mark.parametrize(
    "whole", thinned([True, False], True), ids=["whole text", "new tokens alone"]
)
def test_a_chat_goes_on_from_the_cache_of_the_turn_before(
    prompt: torch.Tensor, whole: bool
) -> None:
    do_sample = whole == (prompt is ONE)
    model = tiny_model("llama", seed=3)
    model.generation_config.eos_token_id = None
    expected, got = both(model, prompt, do_sample=do_sample)
    mask = (prompt != 0).long()
    assert_same_cache(got.past_key_values, expected.past_key_values, mask)
    caches = [expected.past_key_values, got.past_key_values]
    sequences = expected.sequences
    for turn in range(3):
        new = torch.tensor([[8, 9 + turn, 8]] * prompt.shape[0])
        ids = torch.cat([sequences, new], dim=1)
        mask = torch.cat([mask, torch.ones(len(ids), ids.shape[1] - mask.shape[1]).long()], dim=1)
        passed = ids if whole else ids[:, caches[0].get_seq_length() :]
        options: dict[str, Any] = {"attention_mask": mask, "do_sample": do_sample}
        options |= {"max_new_tokens": 12}
        fresh = partial(next, iter([{"past_key_values": cache} for cache in caches]))
        outs = same_as_generate(model, passed, seed=turn, config=SIX, fresh=fresh, **options)
        assert outs[1].past_key_values is caches[1]  # filled in place, as `generate` does
        assert_same_cache(caches[1], caches[0], mask)
        sequences = torch.cat([ids[:, : ids.shape[1] - passed.shape[1]], outs[0].sequences], dim=1)
        caches = [caches[1], caches[0]]  # each goes on from what the other left


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("accept", thinned([0.0, 0.7, 1.0], 0.7))
def test_rows_that_finished_early_are_padded_in_the_cache(do_sample: bool, accept: float) -> None:
    """They left the forward; their padding is run in the end, in a few steps."""
    for seed in range(2):
        model = shared_model("llama", seed=seed)
        options: dict[str, Any] = {"eos_token_id": [*range(0, 97, 8)], "do_sample": do_sample}
        expected, got = both(model, THREE, accept=accept, seed=seed, **options)
        assert_same_cache(got.past_key_values, expected.past_key_values, (THREE != 0).long())


def test_a_cache_of_the_caller_is_filled_or_left_as_it_was() -> None:
    model = shared_model("llama", seed=1)
    for empty in (DynamicCache(), DynamicCache(config=model.config)):
        theirs = copy.deepcopy(empty)
        options: dict[str, Any] = {"attention_mask": torch.ones_like(ONE), "do_sample": False}
        model.generate(ONE, past_key_values=theirs, max_new_tokens=9, **options)
        lade.generate(model, ONE, past_key_values=empty, max_new_tokens=9, **options)
        assert_same_cache(empty, theirs, torch.ones_like(ONE))
    before = copy.deepcopy(theirs)

    class Interrupted:
        def put(self, value: torch.Tensor) -> None:
            if value.dim() == 1:
                raise KeyboardInterrupt

        def end(self) -> None: ...

    ids = torch.cat([ONE, torch.tensor([[4] * 12])], dim=1)
    with pytest.raises(KeyboardInterrupt):
        lade.generate(
            model,
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=theirs,
            streamer=Interrupted(),
            max_new_tokens=9,
        )
    assert_same_cache(theirs, before, torch.ones_like(ONE))


def test_an_empty_cache_is_filled_through_the_plain_door_too() -> None:
    model = shared_model("llama", seed=1)
    for prompt in (ONE, THREE):
        for returned in ("dict", "tokens"):
            cache = DynamicCache(config=model.config)
            out = model.generate(
                prompt,
                attention_mask=(prompt != 0).long(),
                past_key_values=cache,
                custom_generate=lade.decode,
                return_dict_in_generate=returned == "dict",
                do_sample=False,
                eos_token_id=[*range(0, 97, 6)],
                max_new_tokens=9,
            )
            sequences = out.sequences if returned == "dict" else out
            assert cache.get_seq_length() == sequences.shape[1] - 1


def test_caches_that_do_not_fit_are_refused() -> None:
    model = shared_model("llama", seed=1)
    cache = model.generate(
        THREE, attention_mask=(THREE != 0).long(), max_new_tokens=4, return_dict_in_generate=True
    ).past_key_values
    with pytest.raises(ValueError, match=f"expected {CACHE} of 1 rows, got 3"):
        lade.generate(model, ONE, past_key_values=cache, max_new_tokens=4)
    with pytest.raises(ValueError, match=f"tuple (of|for) `{CACHE}` is not supported"):
        lade.generate(model, ONE, past_key_values=((), ()), max_new_tokens=4)


# --- inputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_chunked_prefill_gives_the_same(chunk: int) -> None:
    model = shared_model("llama", seed=2)
    for prompt in (ONE, THREE):
        both(model, prompt, prefill_chunk_size=chunk)


@pytest.mark.parametrize("prompt", [ONE, THREE], ids=["one row", "batch"])
@pytest.mark.parametrize("with_ids", thinned([False, True], True))
def test_embeddings_give_the_tokens_of_generate(prompt: torch.Tensor, with_ids: bool) -> None:
    model = shared_model("llama", seed=2)
    embeds = model.get_input_embeddings()(prompt) * 1.01  # like no token's own
    options: dict[str, Any] = {"inputs_embeds": embeds, "attention_mask": (prompt != 0).long()}
    if with_ids:
        options |= {"input_ids": prompt, "repetition_penalty": 1.1}
    for do_sample in (False, True):
        pool = lade.NGramPool()
        for _ in range(2):  # a second time, with the whole answer in the pool
            _, got = same_as_generate(model, pool=pool, config=SIX, do_sample=do_sample, **options)
        assert got.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("attention", thinned(["sdpa", "eager"], "sdpa"))
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_masks_with_holes_are_continued(family: str, attention: str) -> None:
    model = shared_model(family, seed=3, attention=attention)
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 9], [3, 6, 2, 5, 6, 2, 5, 6]])
    mask = torch.tensor([[1, 0, 1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 0, 1, 1]])
    for rows in ([0], [1], [0, 1]):
        for do_sample in (False, True):
            both(model, prompt[rows], attention_mask=mask[rows], do_sample=do_sample)


def test_explicit_positions_are_continued() -> None:
    model = shared_model("llama", seed=3)
    positions = torch.tensor([[3, 4, 5, 9, 10, 11, 20]])
    both(model, ONE, position_ids=positions, do_sample=False)
    both(model, THREE, position_ids=positions.repeat(3, 1) + torch.tensor([[0], [5], [9]]))


def test_generation_configs_of_model_and_call_are_both_honoured() -> None:
    model = tiny_model("llama", seed=4)
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.7
    model.generation_config.repetition_penalty = 1.2
    model.generation_config.eos_token_id = [*range(0, 97, 12)]
    for of_call in (
        GenerationConfig(max_new_tokens=17),
        GenerationConfig(top_k=7, max_length=40, pad_token_id=0),
        GenerationConfig(do_sample=False, max_new_tokens=12, return_dict_in_generate=True),
    ):
        for prompt in (ONE, THREE):
            results = []
            for generate in (type(model).generate, partial(lade.generate, config=SIX)):
                torch.manual_seed(3)
                mask = (prompt != 0).long()
                out = generate(model, prompt, generation_config=of_call, attention_mask=mask)
                results.append(out if torch.is_tensor(out) else out.sequences)
            assert results[0].tolist() == results[1].tolist()


@pytest.mark.parametrize("place", thinned(["model", "call", "argument"], "call"))
@pytest.mark.parametrize("num_rows", [1, 3])
def test_stop_strings_are_honoured_wherever_they_stand(place: str, num_rows: int) -> None:
    model = tiny_model("llama", seed=2, vocab_size=256)
    model.generation_config.eos_token_id = None if num_rows == 1 else 255
    tokenizer = byte_tokenizer()
    prompt = (THREE + 60)[:num_rows]
    free = model.generate(prompt, max_new_tokens=30, do_sample=False, attention_mask=prompt * 0 + 1)
    letters = [c for c in tokenizer.decode(free[0, 12:]) if c.isascii() and c.isprintable()]
    stop = [letters[3], letters[5]]
    options: dict[str, Any] = {"attention_mask": prompt * 0 + 1, "tokenizer": tokenizer}
    options |= {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    if place == "model":
        model.generation_config.stop_strings = stop
    elif place == "call":
        options["generation_config"] = GenerationConfig(stop_strings=stop, do_sample=False)
    else:
        options["stop_strings"] = stop
    drafter = None
    if num_rows == 1:
        drafter = ScriptedDrafter(free[0].tolist(), np.random.default_rng(0), 1.0)
    expected, _ = same_as_generate(model, prompt, drafter=drafter, config=EIGHT, **options)
    assert expected.sequences.shape[1] < free.shape[1] or num_rows > 1
    own = stop if place == "model" else None
    assert model.generation_config.stop_strings == own
    seen = []

    def watch(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(model.generation_config.stop_strings)  # other threads may be using it now
        return scores

    lade.generate(model, prompt, logits_processor=[watch], **options)
    assert seen
    assert all(stop_strings == own for stop_strings in seen)
    del options["tokenizer"]
    with pytest.raises(ValueError, match="expected tokenizer="):
        lade.generate(model, prompt, **options)
