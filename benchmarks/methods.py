"""All methods: those of `lade bench`, variants of lade, draft models alone, and rivals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.rivals.catalogue import RIVALS, Rival
from lade.apps.bench.methods import Method, assisted, by_lade, plain
from lade.config import Config
from lade.drafters import AssistantModel, CallPool, FirstLayers, Merged
from lade.drafting.drafter import Drafter
from ngram_pool import NGramPool


class Given(NamedTuple):
    """What the methods of a run are made with."""

    config: Config = Config()
    assistant: Any = None  # a copy of the model in 8 bits
    num_layers: int | None = None  # first layers that draft


class MethodInfo(NamedTuple):
    """What a method is, and how to make it for one pass."""

    make: Callable[[Given], Method]
    description: str
    is_default: bool = False  # else run only when named
    is_single_row: bool = False  # cannot decode a batch or several sequences per prompt
    takes: str | None = None  # "assistant" or "num_layers" of `Given`


def _alone(drafter_of: Callable[[Given], Drafter], description: str, takes: str) -> MethodInfo:
    return MethodInfo(
        lambda given: by_lade(given.config, drafter=drafter_of(given)), description, takes=takes
    )


def _beside_pool(
    drafter_of: Callable[[Given], Drafter], description: str, takes: str
) -> MethodInfo:
    def make(given: Given) -> Method:
        both = Merged([CallPool(), drafter_of(given)])
        return by_lade(given.config, NGramPool(seed=0), drafter=both)

    return MethodInfo(make, description, takes=takes)


def _drafting_as(rival: Rival) -> MethodInfo:
    """Return a rival's method, with its own budget unless one is set."""

    def make(given: Given) -> Method:
        asked = given.config.max_draft_tokens
        budget = rival.max_draft_tokens if asked is None else asked
        config = replace(given.config, max_draft_tokens=budget)
        return by_lade(config, drafter=rival.make_drafter())

    described = f"{rival.description}; {rival.max_draft_tokens} draft tokens, or max_draft_tokens"
    return MethodInfo(make, described)


def _assistant(given: Given) -> Drafter:
    return AssistantModel(given.assistant)


def _first_layers(given: Given) -> Drafter:
    assert given.num_layers is not None
    return FirstLayers(given.num_layers)


def _lookup(given: Given) -> Method:
    asked = given.config.max_draft_tokens
    if asked == 0:  # transformers refuses it; no draft is plain decoding
        return plain
    return assisted(prompt_lookup_num_tokens=asked or 10)


#: By name, in the order of tables.
METHODS: dict[str, MethodInfo] = {
    "plain": MethodInfo(lambda given: plain, "generate, one token a step", True),
    "prompt_lookup": MethodInfo(
        _lookup,
        "transformers' prompt_lookup_num_tokens=10, or as many as max_draft_tokens says",
        *(True, True),
    ),
    "no_drafts": MethodInfo(
        lambda given: by_lade(replace(given.config, max_draft_tokens=0)),
        "lade without drafts: one token a step, on a CPU with its own forwards",
        True,
    ),
    "lade": MethodInfo(
        lambda given: by_lade(given.config, NGramPool(seed=0)),
        "lade, one pool for all prompts of a pass",
        True,
    ),
    "lade_fresh": MethodInfo(
        lambda given: by_lade(given.config),
        "lade, a new and empty pool for each prompt or batch",
        True,
    ),
    "pool+assistant": _beside_pool(
        _assistant, "lade, a pool and a copy of the model in 8 bits draft one tree", "assistant"
    ),
    "pool+first_layers": _beside_pool(
        _first_layers,
        "lade, a pool and the model's own first layers draft one tree",
        "num_layers",
    ),
    "hf_assistant": MethodInfo(
        lambda given: assisted(assistant_model=given.assistant),
        "transformers' assistant_model, as its generation config says",
        is_single_row=True,
        takes="assistant",
    ),
    "hf_early_exit": MethodInfo(
        lambda given: assisted(assistant_early_exit=given.num_layers),
        "transformers' assistant_early_exit",
        is_single_row=True,
        takes="num_layers",
    ),
    "assistant": _alone(_assistant, "lade, a copy of the model in 8 bits drafts", "assistant"),
    "first_layers": _alone(_first_layers, "lade, the model's own first layers draft", "num_layers"),
    **{name: _drafting_as(rival) for name, rival in RIVALS.items()},
}


def named(text: str | None, known: Mapping[str, MethodInfo] | Sequence[str]) -> list[str]:
    """Return the names in a comma-separated list, or all known ones.

    Raises:
        ValueError: one is unknown or named twice, or there is none.
    """
    if text is None:
        return [*known]
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len({*names}) < len(names) or not {*names} <= {*known}:
        raise ValueError(f"expected different ones of {', '.join(known)}, got {text!r}")
    return names


def numbers(text: str, least: int = 1) -> list[int]:
    """Return the numbers in a comma-separated list.

    Raises:
        ValueError: one is not that, or stands twice, or there is none.
    """
    parts = [part.strip() for part in text.split(",")]
    found = [int(part) for part in parts if part.isdecimal()]
    if len({*found}) < len(parts) or min(found) < least:
        raise ValueError(f"expected different numbers above {least - 1}, got {text!r}")
    return found
