"""The three entry points, what passes through them, and what is refused at the start."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

import lade
from lade.errors import UnsupportedOptionError
from tests.lade.both import EIGHT, ListStreamer, same_as_generate
from tests.lade.tiny import ScriptedDrafter, byte_tokenizer, tiny_model

PROMPT = torch.tensor([[5, 6, 7, 5, 6, 7, 5]])
MASK = torch.ones_like(PROMPT)
LENGTH = {"max_new_tokens": 25}


@pytest.fixture
def model() -> Any:
    return tiny_model("llama", seed=1)


def plain(model: Any, **options: Any) -> list[list[int]]:
    """Return the text of plain `generate`, of a wrapped model too."""
    options = {**LENGTH, "attention_mask": MASK, "do_sample": False, **options}
    ids: list[list[int]] = type(model).generate(model, PROMPT, **options).tolist()
    return ids


def ours(model: Any, **options: Any) -> Any:
    return lade.generate(
        model, PROMPT, attention_mask=MASK, **{**LENGTH, "do_sample": False, **options}
    )


def same(model: Any, prompt: torch.Tensor = PROMPT, **options: Any) -> Any:
    """Compare lade with plain `generate`; return lade's output."""
    return same_as_generate(model, prompt, **{**LENGTH, **options})[1]


# --- entry points ------------------------------------------------------------------------------


def test_all_entry_points_give_the_text_of_plain_generate(model: Any) -> None:
    expected = same(model).sequences.tolist()
    through = {"attention_mask": MASK, "do_sample": False, "max_new_tokens": 25}
    assert model.generate(PROMPT, custom_generate=lade.decode, **through).tolist() == expected
    pool = lade.NGramPool(100)
    config = lade.Config(max_draft_tokens=4)
    got = model.generate(PROMPT, custom_generate=lade.decode, pool=pool, config=config, **through)
    assert got.tolist() == expected
    assert len(pool) == len(expected[0])
    assert lade.wrap(model) is model
    assert model.generate(PROMPT, **through).tolist() == expected
    assert model.generate(inputs=PROMPT, **through).tolist() == expected
    assert model.generate(input_ids=PROMPT, **through).tolist() == expected
    greedy = GenerationConfig(do_sample=False, max_new_tokens=25)
    assert model.generate(PROMPT, greedy, attention_mask=MASK).tolist() == expected


def test_wrap_shares_one_pool_and_unwrap_leaves_no_trace(model: Any) -> None:
    attributes = set(vars(model))
    pool = lade.NGramPool(1000)
    lade.wrap(model, pool=pool)
    for calls in (1, 2):
        model.generate(PROMPT, attention_mask=MASK, do_sample=False, max_new_tokens=5)
        assert len(pool) == calls * 12
    lade.wrap(model, pool=lade.NGramPool(50))  # again: replaces the pool
    model.generate(PROMPT, attention_mask=MASK, do_sample=False, max_new_tokens=5)
    assert len(pool) == 24
    assert type(model).generate is transformers.GenerationMixin.generate
    assert lade.unwrap(model) is model
    assert set(vars(model)) - attributes == {"_lade_profiles"}
    with pytest.raises(
        ValueError, match=r"expected a model that lade\.wrap was called on, got Llama"
    ):
        lade.unwrap(model)


def test_a_pipeline_decodes_with_lade_after_wrap() -> None:
    model = tiny_model("llama", seed=2, vocab_size=256)
    model.generation_config.eos_token_id = None
    tokenizer = byte_tokenizer()
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"do_sample": False, "max_new_tokens": 20}
    expected = pipeline("abcabcabc", **options)
    pool = lade.NGramPool()
    lade.wrap(model, pool=pool)
    assert pipeline("abcabcabc", **options) == expected
    assert len(pool) == 29


def test_a_deep_copy_of_a_wrapped_model_is_a_wrapped_model_of_its_own(model: Any) -> None:
    lade.wrap(model, shares_text=True)
    expected = plain(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    got = copied.generate(PROMPT, attention_mask=MASK, do_sample=False, max_new_tokens=25)
    assert got.tolist() == expected
    assert copied.generate.pool is not model.generate.pool
    lade.unwrap(copied)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_a_compiled_model_is_decoded_as_generate_would(model: Any) -> None:
    expected = plain(model)
    compiled: Any = torch.compile(model)  # compiles nothing before its own forward is called
    options: dict[str, Any] = {"attention_mask": MASK, "do_sample": False, "max_new_tokens": 25}
    assert lade.generate(compiled, PROMPT, **options).tolist() == expected
    lade.wrap(compiled)
    assert compiled.generate(PROMPT, **options).tolist() == expected
    lade.unwrap(compiled)


def test_a_pool_of_a_larger_vocabulary_cannot_break_a_smaller_model(
    model: Any, tmp_path: Path
) -> None:
    pool = lade.NGramPool()
    pool.observe([5, 6, 7, 50_000, 5, 6, 7, 2**31 - 1] * 20)
    contexts = [[-1, token_id] for token_id in range(100)]
    pool.harvest(contexts, [[2**31 - 1, 50_000]] * 100, [[0.9, 0.05]] * 100)
    pool.save(tmp_path / "large.pool")
    for each in (pool, lade.NGramPool.load(tmp_path / "large.pool")):
        same(model, pool=each, config=lade.Config(max_draft_tokens=12))


def test_dict_output_has_stats_and_a_cache_of_all_tokens_but_the_last(model: Any) -> None:
    output = ours(model, return_dict_in_generate=True)
    assert isinstance(output, lade.GenerateOutput)
    stats = output.stats
    num_new = output.sequences.shape[1] - PROMPT.shape[1]
    assert stats.num_tokens == num_new
    assert stats.num_committed_tokens == num_new - 1
    assert stats.num_accepted_tokens + stats.num_steps == stats.num_committed_tokens
    assert min(stats.prefill_sec, stats.draft_sec, stats.forward_sec, stats.commit_sec) > 0
    assert output.past_key_values.get_seq_length() == output.sequences.shape[1] - 1
    # Plain generate can go on from it.
    expected = plain(model, max_new_tokens=35)
    longer = model.generate(
        output.sequences,
        attention_mask=torch.ones_like(output.sequences),
        past_key_values=output.past_key_values,
        do_sample=False,
        max_new_tokens=10,
    )
    assert longer.tolist() == expected


def test_steps_are_reported_in_order_with_what_was_drafted(model: Any) -> None:
    expected = plain(model)[0]
    drafter = ScriptedDrafter(expected, np.random.default_rng(0), accept=1.0)
    steps: list[lade.Step] = []
    options = {"drafter": drafter, "config": lade.Config(max_draft_tokens=6)}
    ours(model, on_step=steps.append, **options)
    assert [token for step in steps for token in step.token_ids] == expected[PROMPT.shape[1] :]
    assert steps[0].num_draft_tokens == steps[0].num_accepted == 0
    assert any(step.num_accepted >= 2 for step in steps)
    assert all(step.num_accepted <= len(step.token_ids) for step in steps)


# --- what passes through --------------------------------------------------------------------


def test_streamers_get_the_prompt_each_token_once_and_the_end(model: Any) -> None:
    theirs, mine = ListStreamer(), ListStreamer()
    plain(model, streamer=theirs)
    ours(model, streamer=mine)
    assert mine.events == theirs.events
    options: dict[str, Any] = {"attention_mask": MASK, "do_sample": False, "max_new_tokens": 25}
    second, third = ListStreamer(), ListStreamer()
    model.generate(PROMPT, custom_generate=lade.decode, token_streamer=second, **options)
    assert second.events == theirs.events[1:]  # all but the prompt
    lade.wrap(model)
    model.generate(PROMPT, streamer=third, **options)
    assert third.events == theirs.events


def test_a_text_iterator_streamer_streams_from_a_thread(model: Any) -> None:
    class Tokenizer:
        def decode(self, token_ids: list[int], **options: Any) -> str:
            return " ".join(map(str, token_ids)) + " "

    streamer = TextIteratorStreamer(Tokenizer(), skip_prompt=True, timeout=30)
    thread = threading.Thread(target=ours, args=(model,), kwargs={"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert [int(word) for word in text.split()] == plain(model)[0][PROMPT.shape[1] :]


def test_stopping_criteria_are_asked_after_every_token(model: Any) -> None:
    class StopAt(StoppingCriteria):  # type: ignore[misc]
        def __init__(self, length: int) -> None:
            self.length = length
            self.asked: list[int] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            self.asked.append(input_ids.shape[1])
            return torch.tensor([input_ids.shape[1] >= self.length])

    free = plain(model)[0]
    for length in (8, 9, 13, 19):
        theirs, mine = StopAt(length), StopAt(length)
        criteria = [StoppingCriteriaList([theirs]), [mine]]
        fresh = partial(next, iter([{"stopping_criteria": each} for each in criteria]))
        drafter = ScriptedDrafter(free, np.random.default_rng(length), accept=1.0)
        same(model, fresh=fresh, drafter=drafter, config=EIGHT)
        assert mine.asked == theirs.asked


class Answering(StoppingCriteria):  # type: ignore[misc]
    """A criterion that answers what a function makes of whether to stop, and of how many rows."""

    def __init__(self, answer: Callable[[bool, int], Any]) -> None:
        self._answer = answer

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return self._answer(input_ids.shape[1] >= PROMPT.shape[1] + 4, len(input_ids))


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda ends, rows: torch.tensor([ends]), id="one for all"),
        pytest.param(lambda ends, rows: torch.tensor(ends), id="no dimension"),
        pytest.param(lambda ends, rows: torch.tensor([[ends]] * rows), id="column"),
        pytest.param(lambda ends, rows: ends, id="bool"),
        pytest.param(lambda ends, rows: -int(ends), id="lowest bit"),
        pytest.param(lambda ends, rows: 2 * int(ends), id="no lowest bit"),
        pytest.param(lambda ends, rows: torch.full((rows,), ends).to(torch.uint8), id="uint8"),
    ],
)
def test_what_generate_takes_for_an_answer_of_a_criterion_is_taken(
    model: Any, answer: Callable[[bool, int], Any], num_rows: int
) -> None:
    prompts = torch.cat([PROMPT + row for row in range(num_rows)])
    options: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": None}
    same(model, prompts, stopping_criteria=[Answering(answer)], **options)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (torch.tensor([False] * 2), ValueError, "one value a row from Answering, got 2 for 1 row$"),
        (torch.tensor([]).bool(), ValueError, "one value a row from Answering, got 0 for 1 row$"),
        (torch.tensor([1.0]), TypeError, r"a bool a row from Answering, got tensor\(\[1\.\]\)"),
        (None, TypeError, "a bool a row from Answering, got None"),
    ],
)
def test_another_answer_of_a_criterion_is_refused(
    model: Any, answer: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ours(model, stopping_criteria=[Answering(lambda ends, rows: answer)])


def test_max_time_is_asked_after_every_token(model: Any) -> None:
    """Time is over before the first token; `generate` emits one and stops."""
    lade.warm_up(model, num_rows=2)
    for num_rows in (1, 2):
        got = same(model, PROMPT.repeat(num_rows, 1), max_time=1e-9)
        assert got.sequences.shape == (num_rows, PROMPT.shape[1] + 1)


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 3}, "num_beams=3"),
        ({"custom_generate": lade.decode}, "custom_generate"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"cache_implementation": "paged"}, "cache_implementation='paged'"),
        ({"token_healing": True}, "token_healing"),
        ({"generation_config": GenerationConfig(token_healing=True)}, "token_healing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_options_are_refused_by_name(
    model: Any, options: dict[str, Any], named: str
) -> None:
    pool = lade.NGramPool(50)
    with pytest.raises(UnsupportedOptionError, match=named):
        ours(model, pool=pool, **options)
    assert len(pool) == 0
    with pytest.raises(ValueError, match=named):  # the same, for who does not know our errors
        ours(model, **options)


def test_unknown_arguments_are_refused_by_transformers(model: Any) -> None:
    with pytest.raises(ValueError, match="not_an_option"):
        ours(model, not_an_option=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.int32])
def test_prompts_have_the_types_that_embeddings_take(model: Any, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5}
    expected = ours(model, **options).tolist()  # and the model is checked
    if dtype == torch.int32:
        assert lade.generate(model, PROMPT.to(dtype), **options).tolist() == expected
        return
    with pytest.raises(RuntimeError):
        model.generate(PROMPT.to(dtype), **options)
    calls: list[Callable[[], Any]] = [
        lambda: lade.generate(model, PROMPT.to(dtype), **options),
        lambda: model.generate(PROMPT.to(dtype), custom_generate=lade.decode, **options),
        lambda: lade.wrap(model).generate(PROMPT.to(dtype), **options),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=f"input_ids of int64 or int32, got {dtype}"):
            call()


def test_conflicting_arguments_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="expected pool or drafter, got both"):
        ours(
            model,
            pool=lade.NGramPool(9),
            drafter=ScriptedDrafter([], np.random.default_rng(0), 1.0),
        )
    with pytest.raises(ValueError, match="it is a setting of the pool"):
        ours(
            model,
            drafter=ScriptedDrafter([], np.random.default_rng(0), 1.0),
            config=lade.Config(max_candidates=3),
        )


# --- models ---------------------------------------------------------------------------------


def test_a_generation_keeps_nothing_alive(model: Any) -> None:
    gc.disable()
    try:
        reference = weakref.ref(ours(model, return_dict_in_generate=True).past_key_values)
        assert reference() is None  # freed at once, without waiting for the cyclic collector
    finally:
        gc.enable()
