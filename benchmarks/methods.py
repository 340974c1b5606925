"""All methods: those of `lade bench`, variants of lade, draft models alone, and rivals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.rivals.catalogue import RIVALS, Rival
from lade.bench.baselines import Answer, Given, Method, MethodInfo, TransformersAssisted, plain
from lade.bench.methods import METHODS as LADES
from lade.bench.methods import Lade, assistant_of, beside_pool, own_pool, with_pool
from lade.config import SPECULATING, Config, Lookahead, Verification
from lade.drafters import FirstLayers
from lade.drafting.drafter import Drafter


def _with(description: str, change: Callable[[Config], Config]) -> MethodInfo:
    """Return lade with another configuration."""
    return MethodInfo(
        lambda given: with_pool(given._replace(config=change(given.config))),
        f"as lade, {description}",
        is_default=False,
    )


def _verifying_by(verification: Verification) -> MethodInfo:
    info = _with(
        f"drafts verified by {verification}",
        lambda config: replace(config, verification=verification),
    )
    return info._replace(verification=verification)


def _alone(drafter_of: Callable[[Given], Drafter], description: str, takes: str) -> MethodInfo:
    return MethodInfo(
        lambda given: Lade(given.config, drafter=drafter_of(given)),
        description,
        is_default=False,
        takes=takes,
    )


def _drafting_as(rival: Rival) -> MethodInfo:
    """Return a rival's method, with its own budget unless one is set."""

    def make(given: Given) -> Lade:
        asked = given.config.max_draft_tokens
        budget = rival.max_draft_tokens if asked is None else asked
        config = replace(given.config, max_draft_tokens=budget, lookahead=None)
        return Lade(config, drafter=rival.make_drafter())

    described = f"{rival.description}; {rival.max_draft_tokens} draft tokens, or max_draft_tokens"
    return MethodInfo(make, described, is_default=False)


def _hf_assistant(given: Given) -> Method:
    assert given.assistant is not None
    model, tokenizer, _ = given.assistant
    options = {"assistant_model": model}
    if tokenizer.get_vocab() != given.tokenizer.get_vocab():
        options |= {"tokenizer": given.tokenizer, "assistant_tokenizer": tokenizer}
    return TransformersAssisted(options)


def _hf_early_exit(given: Given) -> Method:
    return TransformersAssisted({"assistant_early_exit": given.num_layers})


def _first_layers_of(given: Given) -> Drafter:
    assert given.num_layers is not None
    return FirstLayers(given.num_layers)


def _plain_twice(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> Answer:
    doubled = {name: tensor.repeat_interleave(2, dim=0) for name, tensor in inputs.items()}
    answer = plain(model, doubled, options)
    return answer._replace(rows=answer.rows[:1], num_row_steps=answer.num_steps)


#: By name, in the order of tables.
METHODS: dict[str, MethodInfo] = {
    **{n: info._replace(is_default=info.takes in (None, "pools")) for n, info in LADES.items()},
    "pool+first_layers": MethodInfo(
        beside_pool(_first_layers_of),
        "lade, a pool and the model's own first layers draft one tree",
        is_default=False,
        takes="num_layers",
    ),
    "plain_twice": MethodInfo(
        lambda given: _plain_twice,
        "generate on each prompt twice, as a batch of two: how far it agrees with itself",
        is_default=False,
        is_single_row=True,
    ),
    "hf_assistant": MethodInfo(
        _hf_assistant,
        "transformers' assistant_model, as its generation config says",
        is_default=False,
        is_single_row=True,
        takes="assistant",
    ),
    "hf_early_exit": MethodInfo(
        _hf_early_exit,
        "transformers' assistant_early_exit",
        is_default=False,
        is_single_row=True,
        takes="num_layers",
    ),
    "lade_untabled": _with(
        "without the table that lade prewarm made",
        lambda config: replace(config, uses_table=False),
    ),
    "lade_stable": _with(
        "with text that does not depend on the pool, even in half precision",
        lambda config: replace(config, stable_text=True),
    ),
    "lade_lookahead": _with(
        "with a lookahead window of W=7, N=5 in every forward",
        lambda config: replace(config, lookahead=Lookahead()),
    ),
    "pool": MethodInfo(
        lambda given: Lade(given.config, own_pool(given)),
        "lade by its name beside other drafters: one pool for all prompts of a pass",
        is_default=False,
    ),
    "assistant": _alone(assistant_of, "lade, the model of --assistant drafts", "assistant"),
    "first_layers": _alone(
        _first_layers_of, "lade, the model's own first layers draft", "num_layers"
    ),
    **{f"lade_{verification}": _verifying_by(verification) for verification in SPECULATING},
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


def numbers(text: str) -> list[int]:
    """Return the numbers above 0 in a comma-separated list.

    Raises:
        ValueError: one is not that, or stands twice, or there is none.
    """
    parts = [part.strip() for part in text.split(",")]
    found = [int(part) for part in parts if part.isdecimal()]
    if len({*found}) < len(parts) or min(found) < 1:
        raise ValueError(f"expected different numbers above 0, got {text!r}")
    return found
