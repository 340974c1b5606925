"""Chats that do not prefill again: the text of plain `generate`, from what earlier calls left."""

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache, StaticCache

import lade
from lade.compat import CACHE, CHUNKS_GO_ON, MARKS_CACHES, decode_plainly
from lade.decoder import VerificationError
from lade.errors import VerificationWarning
from lade.probing.profile import Profiles
from lade.probing.values import switches_of
from lade.targets.prefixes import PrefixStore
from ngram_pool import PoolStore
from tests.grids import thinned
from tests.lade.both import answered, same_as_generate
from tests.lade.hf.test_outputs import assert_same
from tests.lade.shared import shared_model
from tests.lade.tiny import BatchDrafter, byte_tokenizer, tiny_model
from tests.ngram_pool.threads import in_threads
from tests.support.tiny import tiny_model as tiny_architecture

KEPT = lade.Config(reuses_prefix=True, max_draft_tokens=6)
OPENING = [5, 6, 7, 8, 9, 5, 6, 7, 8, 5, 3]
NEXT = [11, 12, 5, 6]


def kept_of(model: Any) -> PrefixStore:
    return Profiles.of(model).prefixes


def model_of(family: str = "llama", **options: Any) -> Any:
    model = tiny_model(family, seed=1, **options)
    model.generation_config.eos_token_id = None
    return model


class Chat:
    """A growing text; each turn is compared with plain `generate` from scratch, seed for seed."""

    def __init__(self, model: Any, config: lade.Config = KEPT, pool: Any = None, **options: Any):
        self.model = model
        self.config = config
        self.pool = lade.NGramPool() if pool is None else pool
        self.options = {"max_new_tokens": 9, "eos_token_id": None, **options}
        self.ids: list[int] = []
        self.num_calls = 0

    def say(self, *token_ids: int) -> int:
        """Add to the text and have it answered; return the number of reused tokens."""
        return self.ask([*self.ids, *token_ids])

    def ask(self, token_ids: list[int]) -> int:
        self.num_calls += 1
        options = {"seed": self.num_calls, "config": self.config, "pool": self.pool, **self.options}
        ids = torch.tensor([token_ids])
        # An answer may hold the token for padding, and which are drawn depends on the processor.
        options = {"attention_mask": torch.ones_like(ids), **options}
        expected, got = same_as_generate(self.model, ids, **options)
        assert_same(got.scores, expected.scores)
        self.ids = got.sequences[0].tolist()
        num_reused: int = got.stats.num_reused_tokens
        assert not num_reused or got.past_key_values is None  # lade keeps it
        return num_reused


# --- exact in every way of verifying ----------------------------------------------------------

WAYS: list[tuple[str, Any]] = [
    *(("llama", each) for each in ("tree", "chain", "snapshot", "plain")),
    *((name, "tree") for name in ("gpt2", "opt", "phi3", "qwen3", "deepseek_v3", "gpt_neox")),
    *((name, "tree") for name in ("mistral", "gemma3_text", "llama4_text")),
    *((name, each) for name in ("mistral", "gemma3_text") for each in ("chain", "snapshot")),
    *(("mistral", "plain"), ("gemma3_text", "chain"), ("bloom", "chain")),
]
QUICK = (("llama", "tree"), ("llama", "snapshot"), ("mistral", "chain"), ("gemma3_text", "tree"))


def _name(way: Any) -> str:
    return "-".join(way)


@pytest.mark.parametrize("is_sampled", thinned([False, True], True), ids=["greedy", "sampled"])
@pytest.mark.parametrize("way", thinned(WAYS, *QUICK), ids=_name)
def test_a_growing_chat_runs_only_what_is_new(way: tuple[str, Any], is_sampled: bool) -> None:
    family, verification = way
    attention = "eager" if family == "bloom" else "sdpa"
    model = shared_model(family, seed=1, attention=attention)
    config = lade.Config(reuses_prefix=True, max_draft_tokens=6, verification=verification)
    chat = Chat(model, config, do_sample=is_sampled)
    assert chat.say(*OPENING) == 0
    for _ in range(3):
        length = len(chat.ids)
        assert chat.say(*NEXT) == length - 1


@pytest.mark.parametrize("name", thinned(["bamba", "qwen3_next", "deepseek_v4"], "bamba"))
def test_models_with_states_go_on_from_whole_texts(name: str) -> None:
    model = tiny_architecture(name, seed=0, attention=None, dtype=torch.float64)
    chat = Chat(model, do_sample=True)
    assert chat.say(*OPENING) == 0
    length = len(chat.ids)
    assert chat.say(*NEXT) == length - 1
    assert chat.ask([*OPENING, 40, 41]) == 0  # no state can be taken back to there


@pytest.mark.parametrize("is_sampled", thinned([False, True], True), ids=["greedy", "sampled"])
def test_in_float32_the_text_is_the_same_too(is_sampled: bool) -> None:
    for family in ("llama", "gemma3_text"):
        chat = Chat(shared_model(family, seed=1, dtype=torch.float32), do_sample=is_sampled)
        reused = [chat.say(*OPENING), *(chat.say(*NEXT) for _ in range(3))]
        assert reused == [0, 19, 32, 45]


@pytest.mark.parametrize("why", thinned(["goes on wrongly", "draws"], "goes on wrongly"))
@pytest.mark.filterwarnings("ignore::lade.PlainDecodingWarning")
def test_a_model_that_cannot_go_on_is_asked_anew(why: str) -> None:
    if why == "draws":
        model = model_of(attention_dropout=0.5).train()
    else:
        model = tiny_architecture("recurrent_gemma", seed=0, attention=None, dtype=torch.float64)
    chat = Chat(model)
    assert [chat.say(*OPENING), chat.say(*NEXT)] == [0, 0]
    if why == "goes on wrongly":
        (profile,) = Profiles.of(model)
        assert "differ from those of the whole text" in str(profile.why_not_continued)
    assert len(kept_of(model)) == 0


def test_positions_whose_angles_follow_the_length_are_not_reused_beyond_their_limit() -> None:
    factors = [1.0] * 4
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": factors}
    parameters |= {"long_factor": [2.0] * 4, "original_max_position_embeddings": 40}
    model = model_of("phi3", rope_parameters=parameters, original_max_position_embeddings=40)
    chat = Chat(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.PlainDecodingWarning)
        reused = [chat.say(*OPENING), chat.say(*NEXT), chat.say(*NEXT), chat.say(*NEXT)]
    assert reused == [0, 19, 0, 0]


# --- branches, chats side by side, and what stays ---------------------------------------------


def test_an_edited_turn_goes_on_from_where_it_was_edited() -> None:
    model = shared_model(seed=1)
    chat = Chat(model)
    chat.say(*OPENING)
    first = [*chat.ids]
    chat.say(*NEXT)
    chat.say(*NEXT)
    whole = [*chat.ids]
    assert chat.ask([*first, 40, 41, 42]) == len(first)
    assert chat.ask([*whole, *NEXT]) == len(whole) - 1  # the other branch is still there
    assert len(kept_of(model)) == 2


def test_windows_go_on_from_whole_texts_and_answer_again_from_the_turn_before() -> None:
    model = shared_model("mistral", seed=1)  # a window of 8 tokens
    chat = Chat(model)
    chat.say(*OPENING)
    first = [*chat.ids]
    chat.say(*NEXT)
    whole = [*chat.ids]
    assert chat.ask([*first, 40, 41, 42]) == len(first) - 1
    assert chat.ask(whole[:-3]) == len(first) - 1
    assert chat.ask([*OPENING, 40]) == 0  # what had left the window is gone


def test_chats_side_by_side_keep_a_text_each() -> None:
    model = shared_model(seed=1)
    pool = lade.NGramPool()
    chats = [Chat(model, pool=pool) for _ in range(3)]
    for number, chat in enumerate(chats):
        # Later ones go on from the opening they share.
        assert chat.say(*OPENING, 20 + number, 30) == (len(OPENING) if number else 0)
    for _ in range(3):
        for chat in chats:
            length = len(chat.ids)
            assert chat.say(*NEXT) == length - 1
    assert len(kept_of(model)) == 3


@pytest.mark.exhaustive
def test_many_chats_stay_within_the_budget() -> None:
    model = model_of()
    first = Chat(model)
    first.say(*OPENING)
    most = 3 * kept_of(model).num_bytes
    config = lade.Config(reuses_prefix=True, max_draft_tokens=6, max_prefix_bytes=most)
    chats = [Chat(model, config, first.pool) for _ in range(8)]
    for number, chat in enumerate(chats):
        chat.say(20 + number, *OPENING)
        assert kept_of(model).num_bytes <= most
    assert 2 <= len(kept_of(model)) <= 3
    assert chats[-1].say(*NEXT) > 0
    assert chats[0].say(*NEXT) == 0


@pytest.mark.exhaustive
def test_over_many_turns_memory_follows_the_text() -> None:
    model = model_of()
    chat = Chat(model)
    for _ in range(12):
        chat.say(*NEXT)
    (text,) = kept_of(model)
    per_token = 3 * 2 * 2 * 8 * 8  # layers, keys and values, heads, dimensions, bytes
    assert len(text.token_ids) == len(chat.ids) - 1
    assert text.num_bytes <= 1.6 * (per_token + 8) * len(text.token_ids)


def test_kept_memory_is_freed_with_the_model_and_by_release() -> None:
    model = model_of()
    chat = Chat(model)
    chat.say(*OPENING)
    tensor = weakref.ref(next(iter(kept_of(model)))._cache.layers[0].keys)
    lade.release(model)
    gc.collect()
    assert tensor() is None
    assert len(kept_of(model)) == 0
    chat = Chat(model)
    chat.say(*OPENING)
    tensor = weakref.ref(next(iter(kept_of(model)))._cache.layers[0].keys)
    del model, chat
    gc.collect()
    assert tensor() is None


# --- privacy ----------------------------------------------------------------------------------

SECRET = [*OPENING, 77, 78, 79, 80]


def test_a_secret_of_one_pool_is_found_by_no_other() -> None:
    model = shared_model(seed=1)
    alice, bob = Chat(model), Chat(model)
    alice.ask(SECRET)
    for pool in (lade.NGramPool().as_read_only(), [lade.NGramPool()]):
        assert Chat(model, pool=pool).ask(SECRET) == 0
    assert bob.ask(SECRET) == 0
    assert Chat(model, pool=alice.pool).ask(SECRET) == len(SECRET) - 1
    assert Chat(model, pool=[alice.pool, bob.pool.as_read_only()]).ask(SECRET) == len(SECRET) - 1


def test_calls_without_a_pool_of_their_own_share_what_is_kept() -> None:
    model = shared_model(seed=1)
    for expected in (0, len(SECRET) - 1):
        chat = Chat(model)
        chat.pool = None
        assert chat.ask(SECRET) == expected
    chat.pool = lade.NGramPool().as_read_only()
    assert chat.ask(SECRET) == len(SECRET) - 1


def test_named_pools_are_told_apart_by_folder_and_name(tmp_path: Path) -> None:
    model = shared_model(seed=1)
    with PoolStore(tmp_path / "a") as store, PoolStore(tmp_path / "b") as another:
        assert Chat(model, pool=store.named("alice")).ask(SECRET) == 0
        assert Chat(model, pool=store.named("bob")).ask(SECRET) == 0
        assert Chat(model, pool=another.named("alice")).ask(SECRET) == 0
        assert Chat(model, pool=store.named("alice")).ask(SECRET) == len(SECRET) - 1


def test_drafters_are_told_apart() -> None:
    model, prompt = model_of(), torch.tensor([SECRET])
    answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5)
    drafters = [BatchDrafter(answer.tolist() * 2, np.random.default_rng(0), 0.8) for _ in range(2)]
    reused = []
    for drafter in (drafters[0], drafters[1], drafters[0]):
        _, got = same_as_generate(model, prompt, drafter=drafter, config=KEPT, max_new_tokens=5)
        reused.append(got.stats.num_reused_tokens)
    assert reused == [0, 0, len(SECRET) - 1]


def test_a_text_goes_with_its_pool() -> None:
    model = shared_model(seed=1)
    chat = Chat(model)
    chat.ask(SECRET)
    other = Chat(model)
    other.ask(OPENING)
    chat.pool = None
    gc.collect()
    (left,) = kept_of(model)
    assert left.token_ids.tolist()[: len(OPENING)] == OPENING
    assert len(left.token_ids) == len(other.ids) - 1


def test_copies_of_a_model_carry_no_text() -> None:
    model = model_of()
    chat = Chat(model)
    chat.say(*OPENING)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(kept_of(other)) == 0
        assert Chat(other, pool=chat.pool).ask(chat.ids) == 0
    assert len(kept_of(model)) == 1


# --- models that change -----------------------------------------------------------------------


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3] += 0.5


def _through_data(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data += 0.05


def _loaded(model: Any) -> None:
    model.load_state_dict({name: 0.9 * each for name, each in model.state_dict().items()})


def _replaced(model: Any) -> None:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 0.9)


def _converted(model: Any) -> None:
    model.float()


def _trained(model: Any) -> None:
    loss = model(torch.tensor([OPENING]), labels=torch.tensor([OPENING])).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def _told_otherwise(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 1.5


CHANGES = [_in_place, _through_data, _loaded, _replaced, _told_otherwise, _converted, _trained]


@pytest.mark.parametrize(
    "change",
    thinned(CHANGES, _in_place, _replaced, _told_otherwise),
    ids=lambda change: change.__name__,
)
def test_nothing_is_reused_of_a_model_that_was_changed(change: Callable[[Any], None]) -> None:
    model = model_of()
    chat = Chat(model)
    chat.say(*OPENING)
    change(model)
    assert chat.say(*NEXT) == 0  # and the text is that of plain
    length = len(chat.ids)
    assert chat.say(*NEXT) == length - 1
    assert len(kept_of(model)) == 1  # nothing is left of the model as it was


def test_each_adapter_has_texts_of_its_own() -> None:
    model = model_of()
    model._hf_peft_config_loaded = True
    layer = model.model.layers[0].mlp.up_proj
    layer._active_adapter, layer._disable_adapters = ["a"], False
    chat = Chat(model)
    chat.ask(OPENING)
    layer._active_adapter = ["b"]
    assert chat.ask(OPENING) == 0
    layer._active_adapter = ["a"]
    assert chat.ask(OPENING) == len(OPENING) - 1
    layer._disable_adapters = True
    assert chat.ask(OPENING) == 0


def test_rows_of_other_adapters_are_another_setting() -> None:
    model = model_of()
    model._hf_peft_config_loaded = True
    layer = model.model.layers[0].mlp.up_proj
    settings = []
    for names in (["a"], ["b"], ["a"]):
        hook = partial(_with_adapters, adapter_names=names)  # as PEFT does for a call
        handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
        settings.append(switches_of(model))
        handle.remove()
    assert settings[0] == settings[2] != settings[1]


def _with_adapters(module: Any, args: Any, kwargs: Any, adapter_names: list[str]) -> Any:
    return args, kwargs | {"adapter_names": adapter_names}


def test_peft_goes_on_from_no_other_adapters_keys() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model_of(), config, "first")
    model.add_adapter("second", config)
    model.double().eval()
    shared, num_reused = lade.NGramPool(), []
    for name in ("first", "first", "second", "__base__", "first"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lade.PlainDecodingWarning)
            chat = Chat(model, lade.Config(reuses_prefix=True), pool=shared, adapter_names=[name])
            num_reused.append(chat.ask(OPENING))
    assert num_reused == [0, len(OPENING) - 1, 0, 0, len(OPENING) - 1]


def test_a_new_check_begins_with_no_text() -> None:
    model = model_of()
    Chat(model).say(*OPENING)
    lade.recheck(model)
    assert len(kept_of(model)) == 0


# --- calls that fail, and threads -------------------------------------------------------------


def test_a_call_that_is_broken_off_takes_nothing_along() -> None:
    model = shared_model(seed=1)
    chat = Chat(model)
    chat.say(*OPENING)
    length, calls = len(chat.ids), 0

    def fail(_: lade.Step) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    prompt = torch.tensor([[*chat.ids, *NEXT]])
    for verification in ("tree", "chain", "snapshot", "plain"):
        config = lade.Config(reuses_prefix=True, max_draft_tokens=2, verification=verification)
        calls = 0
        with pytest.raises(KeyboardInterrupt):
            lade.generate(
                model,
                prompt,
                attention_mask=torch.ones_like(prompt),
                pool=chat.pool,
                config=config,
                on_step=fail,
                max_new_tokens=20,
                eos_token_id=None,
            )
        assert len(kept_of(model)) == 1
    assert chat.say(*NEXT) == length - 1


@pytest.mark.parametrize("verification", ["tree", "chain"])
def test_drafts_that_fail_on_the_way_leave_nothing(
    monkeypatch: pytest.MonkeyPatch, verification: Any
) -> None:
    from lade.decoder import Decoder

    config = lade.Config(reuses_prefix=True, max_draft_tokens=6, verification=verification)
    model = model_of()
    chat = Chat(model, config)
    chat.say(*OPENING)
    step = Decoder._step

    def fail(self: Decoder, emitting: Any) -> None:
        if self.stats.num_steps == 1:
            raise VerificationError("planted")
        step(self, emitting)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "_step", fail)
        with pytest.warns(VerificationWarning, match="planted"):
            num_reused = chat.say(*NEXT)
    assert num_reused == 0
    assert len(kept_of(model)) == 0
    chat.say(*NEXT)
    length = len(chat.ids)
    assert chat.say(*NEXT) == length - 1


def test_weights_that_cannot_be_read_cost_the_reuse_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: Any) -> None:
        raise NotImplementedError("no such values")

    monkeypatch.setattr("lade.probing.values._some_values_of", fail)
    chat = Chat(model_of())
    with pytest.warns(RuntimeWarning, match="reuses no prefix of this model .*no such values"):
        num_reused = chat.say(*OPENING)
    assert num_reused == 0
    assert chat.say(*NEXT) == 0  # and says so once


def test_what_cannot_be_kept_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    chat = Chat(model)
    chat.say(*OPENING)

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(PrefixStore, "keep", fail)
        chat.say(*NEXT)
    assert len(kept_of(model)) == 0


@pytest.mark.parametrize("execution", thinned(["eager", "fixed"], "eager"))
def test_threads_may_go_on_from_the_same_text(execution: Any) -> None:
    model = model_of()
    config = lade.Config(reuses_prefix=True, max_draft_tokens=6, execution=execution)
    chat = Chat(model, config)
    chat.say(*OPENING)
    begun = [*chat.ids]
    prompts = [torch.tensor([[*begun, 20 + number, *NEXT]]) for number in range(8)]
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    masks = [torch.ones_like(prompt) for prompt in prompts]
    expected = [
        model.generate(prompt, attention_mask=mask, **options).tolist()
        for prompt, mask in zip(prompts, masks, strict=True)
    ]
    found: dict[int, Any] = {}

    def answer(number: int) -> None:
        for _ in range(3):
            found[number] = lade.generate(
                model,
                prompts[number],
                attention_mask=masks[number],
                pool=chat.pool,
                config=config,
                return_dict_in_generate=True,
                **options,
            )

    assert in_threads(*(partial(answer, number) for number in range(8)), seconds=None) == []
    assert [found[number].sequences.tolist() for number in range(8)] == expected
    assert all(found[number].stats.num_reused_tokens >= len(begun) - 1 for number in range(8))


# --- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"execution": "fixed"},
        {"lookahead": lade.Lookahead(2, 3)},
        pytest.param({"max_draft_tokens": 0}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"step_costs": {1: 1.0, 8: 1.1}, "max_draft_tokens": None}, marks=pytest.mark.exhaustive
        ),
        pytest.param({"uses_table": False, "max_candidates": 1}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_setting_goes_with_it(options: dict[str, Any]) -> None:
    config = lade.Config(**{"reuses_prefix": True, "max_draft_tokens": 6, **options})
    for family in ("llama", "gemma3_text"):
        chat = Chat(shared_model(family, seed=1), config, do_sample=True)
        assert [chat.say(*OPENING), *(chat.say(*NEXT) for _ in range(2))] == [0, 19, 32]


def test_drafts_accepted_at_random_go_with_it() -> None:
    config = lade.Config(reuses_prefix=True, acceptance="rejection", max_draft_tokens=4)
    model = shared_model(seed=1)
    pool, ids, reused = lade.NGramPool(), torch.tensor([OPENING]), []
    for _ in range(3):
        got = answered(
            model,
            ids,
            attention_mask=torch.ones_like(ids),
            config=config,
            pool=pool,
            do_sample=True,
            eos_token_id=None,
            max_new_tokens=6,
        )
        reused.append(got.stats.num_reused_tokens)
        ids = got.sequences
    assert reused == [0, 16, 22]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"prefill_chunk_size": 3}, marks=pytest.mark.exhaustive),
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        pytest.param({"output_scores": True, "output_logits": True}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"eos_token_id": [*range(30, 60)], "max_new_tokens": 30}, marks=pytest.mark.exhaustive
        ),
        {"min_new_tokens": 4, "temperature": 0.7, "top_k": 5, "do_sample": True},
        {"stop_strings": ["a", "e", "Q"], "tokenizer": byte_tokenizer(), "max_new_tokens": 40},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_generate_go_with_it(options: dict[str, Any]) -> None:
    chat = Chat(shared_model(seed=1, vocab_size=256), **options)
    chat.say(*OPENING)
    for _ in range(3):
        goes_on = CHUNKS_GO_ON or "prefill_chunk_size" not in options
        expected = len(chat.ids) - 1 if goes_on else 0
        assert chat.say(*NEXT) == expected


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_what_plain_decoding_ran_beyond_the_end_is_cut(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """As `generate` does on a device, where it looks for the end while the next token is run."""
    plainly = decode_plainly

    def beyond(model: Any, *args: Any) -> Any:
        output = plainly(model, *args)
        cache = args[-1][CACHE]
        with torch.no_grad():
            model(output.sequences[:, -1:], **{CACHE: cache})
        return output

    monkeypatch.setattr("lade.hf.generation.decode_plainly", beyond)
    model = model_of(family)
    chat = Chat(model, lade.Config(reuses_prefix=True, verification="plain"))
    chat.say(*OPENING)
    length = len(chat.ids)
    assert chat.say(*NEXT) == (length - 1 if family == "llama" else 0)


def test_without_the_option_nothing_is_kept() -> None:
    model = shared_model(seed=1)
    chat = Chat(model, lade.Config())
    assert [chat.say(*OPENING), chat.say(*NEXT)] == [0, 0]
    assert len(kept_of(model)) == 0


IDS = torch.tensor([OPENING])
# What is made anew for each call.
AS_EVER: dict[str, Callable[[Any], dict[str, Any]]] = {
    "two rows": lambda model: {"input_ids": IDS.repeat(2, 1), "attention_mask": None},
    "samples": lambda model: {"num_return_sequences": 2, "do_sample": True},
    "padding": lambda model: {
        "input_ids": torch.tensor([[0, 0, *OPENING]]),
        "attention_mask": torch.tensor([[0, 0, *(1 for _ in OPENING)]]),
    },
    "positions": lambda model: {"position_ids": torch.arange(len(OPENING))[None] + 2},
    "embeddings": lambda model: {
        "input_ids": None,
        "inputs_embeds": model.get_input_embeddings()(IDS).detach(),
    },
    "own cache": lambda model: {"past_key_values": DynamicCache(config=model.config)},
    "static cache": lambda model: {
        "past_key_values": StaticCache(config=model.config, max_cache_len=40)
    },
    "no cache": lambda model: {"use_cache": False},
    "hidden states": lambda model: {"output_hidden_states": True},
}


@pytest.mark.parametrize("asked", thinned(AS_EVER, "padding", "own cache", "static cache"))
def test_other_calls_are_decoded_as_without_the_option(asked: str) -> None:
    model, pool = shared_model(seed=1), lade.NGramPool()
    Chat(model, pool=None).ask(OPENING)
    Chat(model, pool=pool).ask(OPENING)
    expected, got = same_as_generate(
        model, IDS, fresh=lambda: AS_EVER[asked](model), pool=pool, config=KEPT, max_new_tokens=6
    )
    # Elsewhere a cache of the caller's cannot be told from one that generate made.
    if MARKS_CACHES or asked != "own cache":
        assert got.stats.num_reused_tokens == 0
        assert (got.past_key_values is None) == (expected.past_key_values is None)
    if expected.hidden_states is not None:
        shapes = [[layer.shape for layer in step] for step in expected.hidden_states]
        assert [[layer.shape for layer in step] for step in got.hidden_states] == shapes


def test_every_door_keeps_and_finds_texts() -> None:
    model, pool, prompt = model_of(), lade.NGramPool(), torch.tensor([OPENING])
    options: dict[str, Any] = {"max_new_tokens": 5, "return_dict_in_generate": True}
    options |= {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "do_sample": False}
    more: dict[str, Any] = {"pool": pool, "config": KEPT}
    first = lade.generate(model, prompt, **options, **more)
    second = model.generate(prompt, custom_generate=lade.decode, **options, **more)
    lade.wrap(model, **more)
    third = model.generate(prompt, **options)
    reused = [each.stats.num_reused_tokens for each in (first, second, third)]
    assert reused == [0, len(OPENING) - 1, len(OPENING) - 1]
    lade.unwrap(model)
    assert torch.equal(third.sequences, model.generate(prompt, **options).sequences)


def test_texts_kept_in_inference_mode_serve_outside_of_it() -> None:
    for family in ("llama", "gemma3_text"):
        chat = Chat(shared_model(family, seed=1))
        with torch.inference_mode():
            chat.say(*OPENING)
        length = len(chat.ids)
        assert chat.say(*NEXT) == length - 1
        with torch.inference_mode():
            assert chat.say(*NEXT) == length + 12
