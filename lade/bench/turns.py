"""A growing chat: how long each turn waits for its first token, with and without kept prefixes.

Every turn gets the whole conversation as its prompt, as chat front ends send it. Plain `generate`
runs all of it; lade, with `Config(reuses_prefix=True)`, what is new. Next file: `arena.py`.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from lade.bench.report import rounded
from lade.bench.tables import Sheet
from lade.config import Config
from lade.models.loading import LoadedModel

# Questions are made of these: what is asked does not change how long a prompt takes.
_WORDS = [
    *("the", "a", "this", "which", "some", "no", "about", "after", "before", "between", "model"),
    *("text", "token", "answer", "question", "turn", "memory", "key", "value", "number", "time"),
    *("river", "city", "letter", "small", "old", "new", "write", "read", "keep", "find", "give"),
]
_NUM_LAST_WORDS = 12  # of the last question, which follows the history

Message = dict[str, str]


class Turn(NamedTuple):
    """One turn, answered by plain `generate` and by lade after the same prompt."""

    turn: int
    num_prompt_tokens: int
    num_reused_tokens: int  # by lade
    plain_first_sec: float  # until the first token of the answer
    first_sec: float
    plain_sec: float  # until its end
    sec: float
    is_same: bool  # whether both answers have the same tokens

    @property
    def ratio(self) -> float:
        """How many times sooner the first token comes."""
        return self.plain_first_sec / self.first_sec


class _Clock:
    """A streamer that notes when the first token came."""

    def __init__(self) -> None:
        self._num_puts = 0
        self._start = perf_counter()
        self.first_sec = 0.0

    def put(self, _: Any) -> None:
        self._num_puts += 1
        if self._num_puts == 2:  # after the prompt
            self.first_sec = perf_counter() - self._start

    def end(self) -> None: ...


class _Answer(NamedTuple):
    token_ids: list[int]
    first_sec: float
    sec: float
    stats: Any  # None for plain decoding


def warm_up(loaded: LoadedModel, max_new_tokens: int, config: Config) -> None:
    """Answer a short chat, so that nothing is checked or compiled while it is measured."""
    measure_turns(loaded, 3, 3 * (max_new_tokens + 16), max_new_tokens, config)


def measure_turns(
    loaded: LoadedModel,
    num_turns: int,
    num_history: int,
    max_new_tokens: int,
    config: Config,
    *,
    seed: int = 0,
    on_turn: Callable[[], None] = lambda: None,
) -> list[Turn]:
    """Hold a chat whose last turn has about `num_history` tokens before it; greedy.

    Nothing is kept of earlier chats. The conversation goes on with lade's answers.

    Args:
        loaded: the model.
        num_turns: turns, at least 2.
        num_history: tokens before the last question.
        max_new_tokens: of each answer.
        config: of lade, with `reuses_prefix`.
        seed: of the questions.
        on_turn: called after each turn.
    """
    import lade

    lade.release(loaded.model)
    pool = lade.NGramPool()
    words = random.Random(seed)
    messages: list[Message] = []
    turns = []
    for number in range(1, num_turns + 1):
        question = " ".join(words.choices(_WORDS, k=_NUM_LAST_WORDS))
        if number < num_turns:
            share = num_history * number // (num_turns - 1) - max_new_tokens
            question = _extended(loaded, messages, question, share, words)
        messages.append({"role": "user", "content": question})
        inputs = _encoded(loaded, messages)
        plain = _answer(loaded.model.generate, inputs, max_new_tokens)
        mine = _answer(
            lambda *args, **kwargs: lade.generate(
                loaded.model, *args, pool=pool, config=config, **kwargs
            ),
            inputs,
            max_new_tokens,
        )
        turns.append(
            Turn(
                number,
                inputs["input_ids"].shape[1],
                mine.stats.num_reused_tokens,
                plain.first_sec,
                mine.first_sec,
                plain.sec,
                mine.sec,
                plain.token_ids == mine.token_ids,
            )
        )
        text = loaded.tokenizer.decode(mine.token_ids, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text})
        on_turn()
    lade.release(loaded.model)
    return turns


def _extended(
    loaded: LoadedModel, messages: Sequence[Message], question: str, share: int, words: Any
) -> str:
    """Return a question with words added until the prompt has so many tokens."""
    while True:
        inputs = _encoded(loaded, [*messages, {"role": "user", "content": question}])
        num_missing = share - inputs["input_ids"].shape[1]
        if num_missing <= 0:
            return question
        # A word may be several tokens.
        question += " " + " ".join(words.choices(_WORDS, k=max(1, num_missing // 8)))


def _encoded(loaded: LoadedModel, messages: Sequence[Message]) -> dict[str, Any]:
    """Return `input_ids` and `attention_mask` of a conversation, int64 [1, num_tokens]."""
    tokenizer = loaded.tokenizer
    if tokenizer.chat_template:
        encoded = tokenizer.apply_chat_template(
            [*messages], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer("\n".join(each["content"] for each in messages), return_tensors="pt")
    return {name: encoded[name].to(loaded.model.device) for name in ("input_ids", "attention_mask")}


def _answer(generate: Callable[..., Any], inputs: dict[str, Any], max_new_tokens: int) -> _Answer:
    clock, start = _Clock(), perf_counter()
    output = generate(
        **inputs,
        streamer=clock,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
    )
    sec = perf_counter() - start
    token_ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return _Answer(token_ids, clock.first_sec, sec, getattr(output, "stats", None))


class Chats(NamedTuple):
    """All chats in one number format."""

    dtype: str
    chats: list[list[Turn]]

    def medians(self) -> list[Turn]:
        """Return each turn with the medians of its times; texts are the same if all are."""
        found = []
        for same in zip(*self.chats, strict=False):
            times = {
                name: median(getattr(turn, name) for turn in same)
                for name in ("plain_first_sec", "first_sec", "plain_sec", "sec")
            }
            is_same = all(turn.is_same for turn in same)
            found.append(same[0]._replace(**times, is_same=is_same))
        return found


def table(measured: Iterable[Chats]) -> Sheet:
    """Return a row for every turn."""
    sections = [
        [
            (
                *(chats.dtype, str(turn.turn), str(turn.num_prompt_tokens)),
                *(str(turn.num_reused_tokens), f"{turn.plain_first_sec:.2f}"),
                *(f"{turn.first_sec:.2f}", f"{turn.ratio:.1f}x"),
                "yes" if turn.is_same else "no",
            )
            for turn in chats.medians()
        ]
        for chats in measured
    ]
    headings = ("number format", "turn", "prompt tokens", "reused", "generate, s", "lade, s")
    return Sheet(
        "Time to the first token of each turn",
        (*headings, "ratio", "same text"),
        2,
        sections,
        "Greedy; medians. Every turn gets the whole conversation as its prompt.",
    )


def as_json(measured: Iterable[Chats]) -> list[dict[str, Any]]:
    """Return medians and every chat for a file."""
    return [
        {
            "dtype": chats.dtype,
            "turns": [
                {
                    **rounded(turn._asdict()),
                    "ratio": round(turn.plain_first_sec / turn.first_sec, 3),
                }
                for turn in chats.medians()
            ],
            "chats": [[rounded(turn._asdict()) for turn in chat] for chat in chats.chats],
        }
        for chats in measured
    ]
