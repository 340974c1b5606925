"""Chats that do not prefill again: the text of plain `generate`, from what earlier calls left."""

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lade
from ngram_pool import PoolStore
from tests.grids import thinned
from tests.lade.both import answered, same_as_generate
from tests.lade.shared import shared_model
from tests.lade.tiny import tiny_model
from tests.support.tiny import tiny_model as tiny_architecture

KEPT = lade.Config(reuses_prefix=True, max_draft_tokens=6)
OPENING = [5, 6, 7, 8, 9, 5, 6, 7, 8, 5, 3]
NEXT = [11, 12, 5, 6]


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
        _, got = same_as_generate(self.model, ids, **options)
        self.ids = got.sequences[0].tolist()
        num_reused: int = got.stats.num_reused_tokens
        assert not num_reused or got.past_key_values is None  # lade keeps it
        return num_reused


def num_keys() -> int:
    """Count tensors of the shape of keys and values that are alive."""
    gc.collect()
    alive = (each for each in gc.get_objects() if type(each) is Tensor)
    return sum(each.dim() == 4 and each.shape[1::2] == (2, 8) for each in alive)


# --- exact in every way of verifying ----------------------------------------------------------

WAYS: list[tuple[str, Any]] = [
    *(("llama", each) for each in ("tree", "chain", "snapshot", "plain")),
    *((name, "tree") for name in ("gpt2", "deepseek_v3", "mistral", "gemma3_text", "llama4_text")),
    *((name, each) for name in ("mistral", "gemma3_text") for each in ("chain", "snapshot")),
]
QUICK = (("llama", "snapshot"), ("mistral", "chain"), ("gemma3_text", "tree"))


@pytest.mark.parametrize("way", thinned(WAYS, *QUICK), ids="-".join)
def test_a_growing_chat_runs_only_what_is_new(way: tuple[str, Any]) -> None:
    family, verification = way
    is_sampled = verification in ("tree", "plain")
    model = shared_model(family, seed=1)
    config = lade.Config(reuses_prefix=True, max_draft_tokens=6, verification=verification)
    chat = Chat(model, config, do_sample=is_sampled)
    assert chat.say(*OPENING) == 0
    for _ in range(3):
        length = len(chat.ids)
        assert chat.say(*NEXT) == length - 1


@pytest.mark.parametrize("why", ["goes on wrongly", "draws"])
@pytest.mark.filterwarnings("ignore::lade.PlainDecodingWarning")
def test_a_model_that_cannot_go_on_is_asked_anew(why: str) -> None:
    if why == "draws":
        model = model_of(attention_dropout=0.5).train()
    else:
        model = tiny_architecture("recurrent_gemma", seed=0, attention=None, dtype=torch.float64)
    chat = Chat(model)
    assert [chat.say(*OPENING), chat.say(*NEXT)] == [0, 0]


# --- branches, chats side by side, and what stays ---------------------------------------------


def test_an_edited_turn_goes_on_from_where_it_was_edited() -> None:
    chat = Chat(shared_model(seed=1))
    chat.say(*OPENING)
    first = [*chat.ids]
    chat.say(*NEXT)
    chat.say(*NEXT)
    whole = [*chat.ids]
    assert chat.ask([*first, 40, 41, 42]) == len(first)
    assert chat.ask([*whole, *NEXT]) == len(whole) - 1  # the other branch is still there


def test_windows_go_on_from_whole_texts_and_answer_again_from_the_turn_before() -> None:
    chat = Chat(shared_model("mistral", seed=1))  # a window of 8 tokens
    chat.say(*OPENING)
    first = [*chat.ids]
    chat.say(*NEXT)
    whole = [*chat.ids]
    assert chat.ask([*first, 40, 41, 42]) == len(first) - 1
    assert chat.ask(whole[:-3]) == len(first) - 1
    assert chat.ask([*OPENING, 40]) == 0  # what had left the window is gone


def test_what_is_kept_stays_within_the_budget() -> None:
    model, pool = model_of(), lade.NGramPool()
    most = 3 * 2 * 2 * 8 * 8 * 60  # layers, keys and values, heads, dimensions, bytes, tokens
    config = lade.Config(reuses_prefix=True, max_draft_tokens=6, max_prefix_bytes=most)
    chats = [Chat(model, config, pool) for _ in range(4)]
    for number, chat in enumerate(chats):
        chat.say(20 + number, *OPENING)
    assert chats[-1].say(*NEXT) > 0
    assert chats[0].say(*NEXT) == 0


def test_kept_memory_is_freed_by_release_and_with_the_model() -> None:
    model, before = model_of(), num_keys()
    chat = Chat(model)
    chat.say(*OPENING)
    assert num_keys() > before
    lade.release(model)
    assert num_keys() == before
    assert chat.say(*NEXT) == 0
    del model, chat
    assert num_keys() == before


# --- privacy ----------------------------------------------------------------------------------

SECRET = [*OPENING, 77, 78, 79, 80]
WHOLE = len(SECRET) - 1


def test_a_secret_of_one_pool_is_found_by_no_other(tmp_path: Path) -> None:
    model = shared_model(seed=1)
    alice, bob = Chat(model), Chat(model)
    alice.ask(SECRET)
    for pool in (lade.NGramPool().as_read_only(), [lade.NGramPool()]):
        assert Chat(model, pool=pool).ask(SECRET) == 0
    assert bob.ask(SECRET) == 0
    assert Chat(model, pool=alice.pool).ask(SECRET) == WHOLE
    assert Chat(model, pool=[alice.pool, bob.pool.as_read_only()]).ask(SECRET) == WHOLE
    with PoolStore(tmp_path / "a") as store, PoolStore(tmp_path / "b") as another:
        for named in (store.named("alice"), store.named("bob"), another.named("alice")):
            assert Chat(model, pool=named).ask(SECRET) == 0
        assert Chat(model, pool=store.named("alice")).ask(SECRET) == WHOLE


def test_calls_without_a_pool_of_their_own_share_what_is_kept() -> None:
    model = shared_model(seed=1)
    for expected in (0, WHOLE):
        chat = Chat(model)
        chat.pool = None
        assert chat.ask(SECRET) == expected
    chat.pool = lade.NGramPool().as_read_only()
    assert chat.ask(SECRET) == WHOLE


def test_drafters_are_told_apart() -> None:
    model, prompt = model_of(), torch.tensor([SECRET])
    drafters, reused = [lade.Drafter(), lade.Drafter()], []
    for drafter in (drafters[0], drafters[1], drafters[0]):
        _, got = same_as_generate(model, prompt, drafter=drafter, config=KEPT, max_new_tokens=5)
        reused.append(got.stats.num_reused_tokens)
    assert reused == [0, 0, WHOLE]


def test_copies_of_a_model_carry_no_text_and_a_new_check_begins_with_none() -> None:
    model = model_of()
    chat = Chat(model)
    chat.say(*OPENING)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert Chat(other, pool=chat.pool).ask(chat.ids) == 0
    assert Chat(model, pool=chat.pool).ask(chat.ids) > 0
    lade.probe(model, anew=True)
    assert Chat(model, pool=chat.pool).ask(chat.ids) == 0


@pytest.mark.parametrize("names", [["second", "__base__"], [None, "second"]])
@pytest.mark.filterwarnings("ignore::lade.PlainDecodingWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_of_rows_keep_no_keys_and_use_none(names: list[str | None]) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model_of(dtype=torch.float32), config, "first")
    model.add_adapter("second", config)
    chat = Chat(model.eval())
    for number, name in enumerate([*names, *names]):
        chat.options.pop("adapter_names", None)
        if name is not None:
            chat.options["adapter_names"] = [name]
        reused = chat.ask(OPENING)
        # Calls of the model's own adapter go on from their own keys alone.
        assert bool(reused) == (name is None and number > 0)


# --- calls that fail, and threads -------------------------------------------------------------


@pytest.mark.parametrize("verification", thinned(["tree", "chain", "snapshot", "plain"], "tree"))
def test_a_call_that_is_broken_off_takes_nothing_along(verification: Any) -> None:
    chat = Chat(shared_model(seed=1))
    chat.say(*OPENING)
    length, calls = len(chat.ids), 0

    def fail(_: lade.Step) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    prompt = torch.tensor([[*chat.ids, *NEXT]])
    config = lade.Config(reuses_prefix=True, max_draft_tokens=2, verification=verification)
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": None, "on_step": fail}
    with pytest.raises(KeyboardInterrupt):
        answered(chat.model, prompt, pool=chat.pool, config=config, **options)
    assert chat.say(*NEXT) == length - 1


# --- options ----------------------------------------------------------------------------------


def test_without_the_option_nothing_is_kept() -> None:
    chat = Chat(shared_model(seed=1), lade.Config())
    assert [chat.say(*OPENING), chat.say(*NEXT)] == [0, 0]
    assert Chat(chat.model, pool=chat.pool).ask(chat.ids) == 0


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


def test_texts_kept_in_inference_mode_serve_outside_of_it() -> None:
    chat = Chat(shared_model("gemma3_text", seed=1))
    with torch.inference_mode():
        chat.say(*OPENING)
    length = len(chat.ids)
    assert chat.say(*NEXT) == length - 1
    with torch.inference_mode():
        assert chat.say(*NEXT) == length + 12
