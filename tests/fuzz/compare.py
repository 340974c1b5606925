"""Run a case plain and through lade, and say in what the two differ."""

import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import lade
from tests.fuzz import parts
from tests.fuzz.cases import Case

# Scores are float32, and a tree sums in another order than a single token does.
RELATIVE_TOLERANCE = 1e-4
ABSOLUTE_TOLERANCE = 1e-4
# A token so many nats below the likeliest is drawn once in 10^9 times; below that, watermarks that
# multiply probabilities by 1 minus nearly 1 keep no digit of a float32. How far below is not
# compared, but where a score is infinite is.
NEGLIGIBLE = 20.0
# Relative distance of the two best tokens below which another choice is no mistake.
TIE = {"float64": 1e-6, "float32": 1e-5}

Door = Callable[..., Any]  # (model, door, call arguments, lade's arguments) -> output
Kind = Literal["same", "tie", "refused", "mismatch"]


@dataclass
class Run:
    """What a call returned or raised, and what it did on the way."""

    output: Any = None
    error: Exception | None = None
    random_state: Tensor | None = None  # torch's, after the call
    log: parts.Log = field(default_factory=dict)
    cache: Any = None  # the one that was passed, as it is after the call
    faults: list[str] = field(default_factory=list)  # what no call may do

    @property
    def sequences(self) -> Tensor | None:
        """Return the tokens, in whatever the call returned them."""
        if self.output is None or isinstance(self.output, Tensor):
            return self.output
        return self.output.sequences  # type: ignore[no-any-return]


@dataclass
class Verdict:
    """How a case ended."""

    kind: Kind
    differences: list[str] = field(default_factory=list)
    reason: str = ""  # of a refusal
    error: str = ""  # what both raised, if they did
    stats: Any = None  # lade's DecodeStats, where they were returned


# --- running --------------------------------------------------------------------------------


def call_plain(model: Any, door: str, arguments: dict[str, Any], given: dict[str, Any]) -> Any:
    """Call transformers' own `generate`; the same signature as `call_lade`."""
    return model.generate(*_by_place(arguments), **arguments)


def call_lade(model: Any, door: str, arguments: dict[str, Any], given: dict[str, Any]) -> Any:
    """Call lade through one of its three doors."""
    place = _by_place(arguments)
    if door == "custom_generate":
        return model.generate(*place, custom_generate=lade.decode, **arguments, **given)
    if door == "generate":
        return lade.generate(model, *place, **arguments | given)
    lade.wrap(model, **given)
    try:
        return model.generate(*place, **arguments)
    finally:
        lade.unwrap(model)


def _by_place(arguments: dict[str, Any]) -> list[Any]:
    return [arguments.pop("place")] if "place" in arguments else []


def compare(case: Case, ours: Door = call_lade) -> Verdict:
    """Run a case both ways."""
    with quiet():
        model = parts.fuzz_model(**case.model)
        own_config = model.generation_config
        model.generation_config = deepcopy(own_config)
        try:
            return _compare(case, model, ours)
        finally:
            model.generation_config = own_config


def _compare(case: Case, model: Any, ours: Door) -> Verdict:
    names = {**vars(parts), "model": model}
    if (turn := case.earlier_turn()) is not None:
        names["earlier"] = _evaluate(turn, names)
    for name, value in case.model_config.items():
        setattr(model.generation_config, name, _evaluate(value, names))
    plain = _run(case, names, call_plain, {})
    answer = plain.sequences
    names["answer"] = answer.tolist() if answer is not None else [list(row) for row in case.rows]
    try:
        given = {name: _evaluate(value, names) for name, value in case.lade.items()}
    except Exception as error:
        return Verdict("mismatch", [f"making {case.lade} raised {_told(error)}"])
    verdict = Verdict("same", error=type(plain.error).__name__ if plain.error else "")
    for call in range(case.num_calls):
        mine = _run(case, names, ours, given)
        if isinstance(mine.error, (lade.UnsupportedOptionError, lade.UnsupportedModelError)):
            return Verdict("refused", reason=re.sub(r"\d+", "N", str(mine.error)))
        verdict.stats = getattr(mine.output, "stats", None)
        verdict.differences = differences(plain, mine)
        drafter = given.get("drafter")
        if drafter is not None and drafter.open_texts:
            verdict.differences.append("the drafter was opened and not closed")
        is_last = call == case.num_calls - 1
        if is_last and not verdict.differences and case.follow_up:
            door = ours if case.follow_up == "lade" else call_plain
            verdict.differences = follow_up(model, plain, mine, door)
        if verdict.differences:
            verdict.kind = "tie" if _is_tie(case, names, plain, mine) else "mismatch"
            return verdict
    return verdict


def _run(case: Case, names: dict[str, Any], door: Door, given: dict[str, Any]) -> Run:
    def arguments(log: parts.Log) -> dict[str, Any]:
        inner = {**names, "log": log}
        return {name: _evaluate(value, inner) for name, value in case.arguments().items()}

    def call(arguments: dict[str, Any]) -> Any:
        if case.form == "place":
            arguments["place"] = arguments.pop("inputs")
        return door(names["model"], case.door, arguments, given)

    return record(names["model"], case.seed, arguments, call)


def record(
    model: Any,
    seed: int,
    make_arguments: Callable[[parts.Log], dict[str, Any]],
    call: Callable[[dict[str, Any]], Any],
) -> Run:
    """Call `generate` in some way from a seed, and keep all that is compared."""
    run = Run()
    try:
        arguments = make_arguments(run.log)
    except Exception as error:  # transformers refuses some options when a config is made
        run.error = error
        return run
    run.cache = arguments.get("past_key_values")
    before = _frozen(model, arguments)
    torch.manual_seed(seed)
    random.seed(1)
    np.random.seed(1)
    foreign = _foreign_state()
    try:
        with quiet():
            run.output = call(dict(arguments))
    except Exception as error:
        run.error = error
    run.random_state = torch.get_rng_state()
    if _foreign_state() != foreign:
        run.faults.append("the random state of Python or numpy was touched")
    after = _frozen(model, arguments)
    run.faults += [f"{name} was changed in place" for name in before if before[name] != after[name]]
    if "generate" in vars(model):
        run.faults.append("model.generate was replaced")
    return run


def _foreign_state() -> tuple[Any, ...]:
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), *state[2:]


def _frozen(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of what no call may change."""
    kept = {name: value.tolist() for name, value in arguments.items() if torch.is_tensor(value)}
    kept["model.generation_config"] = model.generation_config.to_dict()
    if "generation_config" in arguments:
        kept["generation_config"] = arguments["generation_config"].to_dict()
    return kept


def _evaluate(expression: str, names: dict[str, Any]) -> Any:
    return eval(_compiled(expression), names)


@cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<case>", "eval")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what transformers says of odd options: how often is not part of the comparison."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"transformers\.")
        yield


# --- comparing ------------------------------------------------------------------------------


def differences(plain: Run, mine: Run) -> list[str]:
    """Say in what two runs differ; an empty list if in nothing."""
    found = [fault for fault in mine.faults if fault not in plain.faults]
    if plain.error is not None or mine.error is not None:
        if plain.error is None or not _is_as_good(mine.error, plain.error):
            found.append(f"plain raised {_told(plain.error)}, lade raised {_told(mine.error)}")
        return found
    found += _output_differences(plain.output, mine.output)
    assert plain.random_state is not None
    assert mine.random_state is not None
    if not torch.equal(plain.random_state, mine.random_state):
        found.append("torch's random state differs after the call")
    for name in sorted(plain.log.keys() | mine.log.keys()):
        found += _log_differences(name, plain.log.get(name, []), mine.log.get(name, []))
    if plain.cache is not None:
        found += _cache_differences("the cache passed", plain.cache, mine.cache)
    return found


def _is_as_good(mine: Exception | None, plain: Exception) -> bool:
    """Tell whether an error is of plain's type, or says at the start what plain only runs into."""
    says_at_start = isinstance(mine, ValueError) and str(mine).startswith(
        "expected past_key_values"
    )
    runs_into = isinstance(plain, RuntimeError) and "Sizes of tensors must match" in str(plain)
    return isinstance(mine, type(plain)) or (says_at_start and runs_into)


def _told(error: Exception | None) -> str:
    if error is None:
        return "nothing"
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__} ({place}): {str(error)[:300]}"


def _log_differences(name: str, plain: list[Any], mine: list[Any]) -> list[str]:
    if len(plain) != len(mine):
        return [f"{name}: {len(plain)} calls in plain, {len(mine)} in lade"]
    for number, (a, b) in enumerate(zip(plain, mine, strict=True)):
        if a != b:
            return [f"{name}: call {number} got {a} in plain, {b} in lade"]
    return []


def _output_differences(plain: Any, mine: Any) -> list[str]:
    """Say in what two outputs of `generate` differ."""
    if isinstance(plain, Tensor) or isinstance(mine, Tensor):
        return _value_differences("sequences", plain, mine)
    found = []
    keys = [key for key in mine if key != "stats"]
    if list(plain) != keys:
        found.append(f"plain returned the fields {list(plain)}, lade {keys}")
    for key in plain:
        if key not in mine:
            continue
        if key == "past_key_values":
            found += _cache_differences("past_key_values", plain[key], mine[key])
        else:
            found += _value_differences(key, plain[key], mine[key])
    return found


def _value_differences(name: str, plain: Any, mine: Any) -> list[str]:
    """Compare tensors, in tuples of any depth: integers exactly, others closely."""
    if type(plain) is not type(mine):
        return [f"{name}: {type(plain).__name__} in plain, {type(mine).__name__} in lade"]
    if isinstance(plain, tuple):
        if len(plain) != len(mine):
            return [f"{name}: {len(plain)} parts in plain, {len(mine)} in lade"]
        for number, (a, b) in enumerate(zip(plain, mine, strict=True)):
            if found := _value_differences(f"{name}[{number}]", a, b):
                return found
        return []
    if not isinstance(plain, Tensor):
        return [] if plain == mine else [f"{name}: {plain!r} in plain, {mine!r} in lade"]
    if plain.dtype != mine.dtype or plain.shape != mine.shape:
        return [
            f"{name}: {plain.dtype} {list(plain.shape)} in plain, "
            f"{mine.dtype} {list(mine.shape)} in lade"
            + (f": {plain.tolist()} and {mine.tolist()}" if name == "sequences" else "")
        ]
    if not plain.is_floating_point():
        if torch.equal(plain, mine):
            return []
        return [f"{name}: {plain.tolist()} in plain, {mine.tolist()} in lade"]
    if name.startswith("scores"):
        plain, mine = (_with_floor(scores) for scores in (plain, mine))
    close = torch.isclose(
        plain, mine, rtol=RELATIVE_TOLERANCE, atol=ABSOLUTE_TOLERANCE, equal_nan=True
    )
    if close.all():
        return []
    place = tuple((~close).nonzero()[0].tolist())
    return [
        f"{name}: {int((~close).sum())} of {close.numel()} values differ, first at {place}: "
        f"{plain[place].item()} in plain, {mine[place].item()} in lade"
    ]


def _with_floor(scores: Tensor) -> Tensor:
    """Raise finite scores [rows, vocab_size] that are negligible in their row."""
    floor = scores.amax(dim=-1, keepdim=True) - NEGLIGIBLE
    return torch.where(scores.isfinite() & (scores < floor), floor, scores)


def _cache_differences(name: str, plain: Any, mine: Any) -> list[str]:
    if plain is None or mine is None:
        return [] if plain is mine else [f"{name}: {type(plain)} in plain, {type(mine)} in lade"]
    lengths = plain.get_seq_length(), mine.get_seq_length()
    if lengths[0] != lengths[1]:
        return [f"{name}: {lengths[0]} tokens in plain, {lengths[1]} in lade"]
    if len(plain.layers) != len(mine.layers):
        return [f"{name}: {len(plain.layers)} layers in plain, {len(mine.layers)} in lade"]
    for number, (a, b) in enumerate(zip(plain.layers, mine.layers, strict=True)):
        for part in ("keys", "values"):
            label = f"{name}.layers[{number}].{part}"
            if found := _value_differences(label, getattr(a, part), getattr(b, part)):
                return found
    return []


def follow_up(model: Any, plain: Run, mine: Run, ours: Door) -> list[str]:
    """Compare how the text goes on from the caches that were returned."""
    first = _continued(model, plain, call_plain)
    second = _continued(model, mine, ours)
    if first is None or second is None:
        return []
    if isinstance(second.error, lade.UnsupportedOptionError):
        return []
    if (first.error is None) != (second.error is None):
        return [f"going on: plain raised {_told(first.error)}, lade {_told(second.error)}"]
    if first.error is not None:
        return []
    assert first.sequences is not None
    assert second.sequences is not None
    return _value_differences("sequences of the follow-up", first.sequences, second.sequences)


def _continued(model: Any, run: Run, door: Door) -> Run | None:
    cache = getattr(run.output, "past_key_values", None)
    if cache is None or run.sequences is None:
        return None
    last = run.sequences[:, -1:]

    def arguments(log: parts.Log) -> dict[str, Any]:
        return {
            "input_ids": last,
            "attention_mask": torch.ones(len(last), cache.get_seq_length() + 1, dtype=torch.long),
            "past_key_values": cache,
            "max_new_tokens": 4,
            "do_sample": False,
            "num_return_sequences": 1,
        }

    return record(model, 0, arguments, lambda given: door(model, "generate", given, {}))


# --- ties -----------------------------------------------------------------------------------


def _is_tie(case: Case, names: dict[str, Any], plain: Run, mine: Run) -> bool:
    """Tell whether the texts part where plain's two best tokens were as good as equal."""
    if plain.sequences is None or mine.sequences is None or len(plain.sequences.shape) != 2:
        return False
    if plain.sequences.shape[0] != mine.sequences.shape[0]:
        return False
    length = min(plain.sequences.shape[1], mine.sequences.shape[1])
    differ = plain.sequences[:, :length] != mine.sequences[:, :length]
    if not differ.any():
        return False
    position = int(differ.any(0).nonzero()[0])
    margins = _margins(case, names)
    step = position - (plain.sequences.shape[1] - len(margins))
    if not 0 <= step < len(margins):
        return False
    limit = TIE[case.model.get("dtype", "float64")]
    return bool((margins[step][differ[:, position]] < limit).all())


def _margins(case: Case, names: dict[str, Any]) -> list[Tensor]:
    """Run plain once more; return for each step how far its best token is ahead, [rows]."""
    margins: list[Tensor] = []
    multinomial, argmax = torch.multinomial, torch.argmax

    def ahead(values: Tensor) -> Tensor:
        best, second = values.topk(2, dim=-1).values.unbind(-1)
        return (best - second) / best.abs().clamp_min(1e-30)

    def recording_multinomial(probs: Tensor, num_samples: int) -> Tensor:
        state = torch.get_rng_state()
        margins.append(ahead(probs / torch.empty_like(probs).exponential_(1)))
        torch.set_rng_state(state)
        return multinomial(probs, num_samples)

    def recording_argmax(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if scores.dtype == torch.float32 and scores.shape[-1] == case.model["vocab_size"]:
            margins.append(ahead(scores))
        return argmax(scores, *args, **kwargs)

    sampling = patch.object(torch, "multinomial", recording_multinomial)
    with sampling, patch.object(torch, "argmax", recording_argmax):
        _run(case, names, call_plain, {})
    return margins
