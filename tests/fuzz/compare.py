"""Run a case plain and through lade, and say in what the two differ."""

import inspect
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from io import StringIO
from types import CodeType
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache, StaticLayer, StaticSlidingWindowLayer

import lade
from tests.fuzz import events, parts
from tests.fuzz.cases import Case
from tests.fuzz.inside import CACHE, CACHE_NAMES, does_nothing, noting_verification
from tests.support.tiny import CannotBuild

# A tree sums in another order than a single token does.
RELATIVE_TOLERANCE = 1e-4
ABSOLUTE_TOLERANCE = 1e-4
# Scores, hidden states, cached keys and values lie behind recurrences and routers that many
# architectures compute in float32 whatever the dtype, in another order for several tokens than for
# one: logits of qwen3_5_moe in float64 differ by 3.6e-4 between a text that is run as one prompt
# and the same text run token by token, both without lade. A wrong one is off by tenths.
STATE_TOLERANCE = 1e-3
# A token so many nats below the likeliest is drawn once in 10^9 times; below that, watermarks that
# multiply probabilities by 1 minus nearly 1 keep no digit of a float32. How far below is not
# compared, but where a score is infinite is.
NEGLIGIBLE = 20.0
# Relative distance of the two best tokens below which another choice is no mistake. Norms, routers
# and softmax of many architectures compute in float32 whatever the dtype.
TIE = {"float64": 1e-6, "float32": 1e-5, "any architecture": 1e-5}

_WARNED = "lade warned:"

Door = Callable[..., Any]  # (model, door, call arguments, lade's arguments) -> output
Kind = Literal["same", "tie", "rounding", "refused", "unsteady", "not built", "mismatch"]


@dataclass
class Run:
    """What a call returned or raised, and what it did on the way."""

    output: Any = None
    error: Exception | None = None
    random_state: Tensor | None = None  # torch's, after the call
    log: parts.Log = field(default_factory=dict)
    cache: Any = None  # the one that was passed, as it is after the call
    faults: list[str] = field(default_factory=list)  # what no call may do
    padding: Tensor | None = None  # bool [rows, prompt], what need not be compared in caches

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
    verification: str = ""  # of verifying, as lade chose it


# --- running --------------------------------------------------------------------------------


def call_plain(model: Any, door: str, arguments: dict[str, Any], given: dict[str, Any]) -> Any:
    """Call transformers' own `generate`; the same signature as `call_lade`."""
    return parts.whole_of(model).generate(*_by_place(arguments), **arguments)


def call_lade(model: Any, door: str, arguments: dict[str, Any], given: dict[str, Any]) -> Any:
    """Call lade through one of its entry points."""
    place = _by_place(arguments)
    if door == "itself":  # as lade has loaded it
        return model.generate(*place, **arguments)
    if door == "batcher":
        return _call_batcher(model, place, arguments, given)
    if door == "custom_generate":
        return model.generate(*place, custom_generate=lade.decode, **arguments, **given)
    if door == "generate":
        return lade.generate(model, *place, **arguments | given)
    given = dict(given)
    for name in ("on_step", "prediction"):  # of one call
        if name in given:
            arguments[name] = given.pop(name)
    lade.wrap(model, **given)
    try:
        return model.generate(*place, **arguments)
    finally:
        lade.unwrap(model)


def _call_batcher(
    model: Any, place: list[Any], arguments: dict[str, Any], given: dict[str, Any]
) -> Any:
    """Submit a call beside a greedy one of another prompt, so that both share forwards."""
    seed = torch.initial_seed()  # before the batcher's threads set their own
    given = dict(given)
    of_batcher = {name: given.pop(name) for name in ("config", "pool") if name in given}
    with lade.Batcher(model, max_batch_size=2, **of_batcher) as batcher:
        neighbour = batcher.submit(
            torch.tensor([[5, 6, 5, 6, 7]]),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            tokenizer=parts.fuzz_tokenizer(),  # the model's config may have stop strings
        )
        if place:
            arguments["input_ids"] = place[0]
        elif "inputs" in arguments:
            arguments["input_ids"] = arguments.pop("inputs")
        output = batcher.submit(seed=seed, **arguments, **given).result()
        neighbour.result()
    return output


def _by_place(arguments: dict[str, Any]) -> list[Any]:
    return [arguments.pop("place")] if "place" in arguments else []


def compare(
    case: Case, ours: Door = call_lade, *, theirs: Door = call_plain, anew: bool = False
) -> Verdict:
    """Run a case both ways.

    Args:
        case: to run.
        ours: the way that is tested.
        theirs: the way that is right.
        anew: let lade forget what it knows of the model, as in a process of its own.
    """
    verdict = _compared(case, ours, theirs, anew)
    if verdict.kind == "mismatch" and _may_be_rounding(case, verdict):
        precise = replace(case, model={**case.model, "dtype": "float64"})
        if _compared(precise, ours, theirs, anew).kind == "same":
            verdict.kind = "rounding"
    return verdict


def _may_be_rounding(case: Case, verdict: Verdict) -> bool:
    """Tell whether only numbers differ, of a model in float32: recurrences add up errors."""
    is_single = case.model.get("dtype") == "float32"
    return is_single and all("values differ" in each for each in verdict.differences)


def _compared(case: Case, ours: Door, theirs: Door, anew: bool) -> Verdict:
    with quiet():
        try:
            model = parts.model_of(case.model)
        except CannotBuild as error:
            return Verdict("not built", reason=str(error))
        if case.is_private:
            return _compare(case, deepcopy(model), ours, theirs)
        if anew:
            vars(model).pop("_lade_profiles", None)
        own_config = model.generation_config
        model.generation_config = deepcopy(own_config)
        try:
            return _compare(case, model, ours, theirs)
        finally:
            model.generation_config = own_config


def _compare(case: Case, model: Any, ours: Door, theirs: Door) -> Verdict:
    verdict = Verdict("same")
    names = {**vars(parts), **vars(events), "model": model}
    for event in case.events:
        try:
            with suppress(events.CannotHappenError):  # the case goes on without
                names["model"] = _evaluate(event, names)
        except Exception as error:
            return Verdict("mismatch", [f"{event} raised {_told(error)}"])
    try:
        _prepare(case, names)
    except Exception as error:  # lade has no part in an earlier turn
        return Verdict("refused", reason=f"plain refuses the earlier turn: {type(error).__name__}")
    plain = _run(case, names, theirs, {})
    answer = plain.sequences
    names["answer"] = answer.tolist() if answer is not None else [list(row) for row in case.rows]
    given: dict[str, Any] = {}
    try:
        for name, value in case.lade.items():
            names[name] = given[name] = _evaluate(value, names)
        settings = {name: _evaluate(value, names) for name, value in case.profile.items()}
    except Exception as error:
        if "Nested" in str(case.lade) and "Greedy methods" in str(error):
            # The model's own config, which a call cannot set back, leaves no greedy call.
            return Verdict("refused", reason="plain refuses the nested call")
        return Verdict("mismatch", [f"making {case.lade} raised {_told(error)}"])
    verdict.error = type(plain.error).__name__ if plain.error else ""
    if not settings:
        return _compare_calls(case, names, plain, given, ours, theirs, verdict)
    try:
        before = events.settle(names["model"], **settings)
    except Exception as error:
        return Verdict("mismatch", [f"looking at the model raised {_told(error)}"])
    try:
        return _compare_calls(case, names, plain, given, ours, theirs, verdict)
    finally:
        events.settle(names["model"], **before)


def _compare_calls(
    case: Case,
    names: dict[str, Any],
    plain: Run,
    given: dict[str, Any],
    ours: Door,
    theirs: Door,
    verdict: Verdict,
) -> Verdict:
    make, call_ours = _calls(case, names, ours, given)
    for number in range(case.num_calls):

        def note(verification: str, is_asked: bool) -> None:
            verdict.verification = verification + (", as asked" if is_asked else "")

        with noting_verification(note):
            mine = record(names["model"], case.seed, make, call_ours, case.may_fail)
        if case.door == "batcher":
            mine.random_state = plain.random_state  # its calls draw from generators of their own
        if _is_refusal(case, mine.error):
            verdict.kind, verdict.reason = "refused", _refused(mine.error)
            return verdict
        if _drew_for_an_ended_row(plain, mine):
            verdict.kind, verdict.reason = "refused", "plain draws for a row that has ended"
            return verdict
        verdict.stats = getattr(mine.output, "stats", None)
        verdict.differences = differences(plain, mine) + leaks(given)
        is_last = number == case.num_calls - 1
        if is_last and not verdict.differences and case.follow_up:
            doors = (theirs, ours) if case.follow_up == "lade" else (call_plain, call_plain)
            verdict.differences = follow_up(names["model"], plain, mine, *doors)
        if verdict.differences:
            if _is_tie(case, names, plain, mine):
                verdict.kind = "tie"
            else:
                verdict.kind = "unsteady" if _is_unsteady(case, plain) else "mismatch"
            return verdict
    return verdict


def leaks(given: dict[str, Any]) -> list[str]:
    """Say what a call left open of what it was given."""
    pool, drafter = given.get("pool"), given.get("drafter")
    found = []
    if getattr(drafter, "open_texts", None):
        found.append("the drafter was opened and not closed")
    if pool is not None and pool.num_open_sequences:
        found.append(f"the pool has {pool.num_open_sequences} sequences open")
    return found


def _prepare(case: Case, names: dict[str, Any]) -> None:
    """Run the earlier turn, and set the model's own options."""
    if (turn := case.earlier_turn()) is not None:
        names["earlier"] = _evaluate(turn, names)
    for name, value in case.model_config.items():
        setattr(names["model"].generation_config, name, _evaluate(value, names))


def _is_refusal(case: Case, error: Exception | None) -> bool:
    """Tell whether lade refused by name: an option, or the only way that it was allowed.

    A strict drafter that is the model itself may be refused where that was made to fail.
    """
    if isinstance(error, lade.UnsupportedModelError):
        if case.may_fail and "cannot draft, for" in str(error):
            return True
        return "verification=" in case.lade.get("config", "") and "cannot verify drafts by" in str(
            error
        )
    return isinstance(error, lade.UnsupportedOptionError)


def _refused(error: Exception | None) -> str:
    """Return a refusal without what is particular to the case."""
    reason = re.sub(r"^\w+ (cannot)", r"… \1", str(error))
    return re.sub(r"\d[\d.e-]*", "N", reason)


def _run(case: Case, names: dict[str, Any], door: Door, given: dict[str, Any]) -> Run:
    make, call = _calls(case, names, door, given)
    return record(names["model"], case.seed, make, call)


def _calls(case: Case, names: dict[str, Any], door: Door, given: dict[str, Any]) -> tuple[Any, ...]:
    """Return what makes the arguments of a call, and the call through a door."""

    def arguments(log: parts.Log) -> dict[str, Any]:
        inner = {**names, "log": log}
        return {name: _evaluate(value, inner) for name, value in case.arguments().items()}

    def call(arguments: dict[str, Any]) -> Any:
        if case.form == "place":
            arguments["place"] = arguments.pop("inputs")
        return door(names["model"], case.door, arguments, given)

    return arguments, call


def record(
    model: Any,
    seed: int,
    make_arguments: Callable[[parts.Log], dict[str, Any]],
    call: Callable[[dict[str, Any]], Any],
    may_fail: bool = False,
) -> Run:
    """Call `generate` in some way from a seed, and keep all that is compared.

    Args:
        model: that is called.
        seed: of torch's random state.
        make_arguments: returns those of the call, given a log to write to.
        call: the call.
        may_fail: whether drafts may turn out wrong after they were checked.
    """
    run = Run()
    try:
        arguments = make_arguments(run.log)
    except Exception as error:  # transformers refuses some options when a config is made
        run.error = error
        return run
    run.cache = next((arguments[name] for name in CACHE_NAMES if name in arguments), None)
    before = _frozen(model, arguments)
    torch.manual_seed(seed)
    random.seed(1)
    np.random.seed(1)
    foreign = _foreign_state()
    is_packed = any(each.dtype is torch.uint8 for each in model.parameters())
    is_other_padding = may_fail or is_packed or "cache_implementation" in arguments
    mask = arguments.get("attention_mask")
    if is_other_padding and isinstance(mask, Tensor) and mask.dim() == 2:
        # What padding attends to, alone, follows the length of the forward that ran it, which is
        # another one where drafts fail, and the whole cache's where that is static. Packed weights
        # run a padded prompt by masks, in which padding sees itself.
        run.padding = mask == 0
    try:
        with quiet(), _noting_doubts(run, may_fail):
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


@contextmanager
def _noting_doubts(run: Run, may_fail: bool) -> Iterator[None]:
    """Take it for a fault that lade cannot verify drafts any more, unless that was to be."""
    told: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", lade.VerificationWarning)
            if may_fail:  # first layers that draft are the model's own
                warnings.simplefilter("ignore", lade.DrafterWarning)
            yield
    finally:
        for each in told:
            if not issubclass(each.category, lade.VerificationWarning):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
            elif not may_fail:
                run.faults.append(f"{_WARNED} {each.message}")


def _foreign_state() -> tuple[Any, ...]:
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), *state[2:]


def _frozen(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of what no call may change."""
    kept = {name: value.tolist() for name, value in arguments.items() if torch.is_tensor(value)}
    kept["the model's attention"] = model.config.get_text_config(decoder=True)._attn_implementation
    kept["model.generation_config"] = model.generation_config.to_dict()
    kept["the model's config"] = model.config.to_dict()
    modules = [*model.modules()]
    kept["the training flag of a module"] = [module.training for module in modules]
    # transformers puts its own in at the first forward that collects outputs, and leaves them.
    kept["a hook of the model"] = [
        [id(hook) for hook in hooks.values() if not does_nothing(hook)]
        for module in modules
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
    ]
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
    """Silence what transformers says of odd options: how often is not part of the comparison.

    Nor is what lade says of plain decoding; how often it does is counted. One model prints.
    """
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.filterwarnings("ignore", category=UserWarning, module=r"(transformers|peft)\.")
        warnings.simplefilter("ignore", lade.PlainDecodingWarning)
        warnings.filterwarnings("ignore", "lade runs steps of", RuntimeWarning)
        warnings.simplefilter("error", lade.DrafterWarning)
        warnings.filterwarnings("error", "lade's (kernels|compiled)", RuntimeWarning)
        # A change of the model may leave no compiled forward.
        warnings.filterwarnings("ignore", ".* no longer runs", RuntimeWarning)
        yield


# --- comparing ------------------------------------------------------------------------------


def differences(plain: Run, mine: Run) -> list[str]:
    """Say in what two runs differ; an empty list if in nothing."""
    found = [fault for fault in mine.faults if fault not in plain.faults]
    if plain.error is not None:  # the model cannot run the call at all, drafts or not
        found = [fault for fault in found if not fault.startswith(_WARNED)]
    if plain.error is not None or mine.error is not None:
        if plain.error is None or not _is_as_good(mine.error, plain.error):
            found.append(f"plain raised {_told(plain.error)}, lade raised {_told(mine.error)}")
        return found
    for run in (plain, mine):
        _clear_unseen(getattr(run.output, CACHE, None))
        _clear_unseen(run.cache)
    if mine.padding is not None:
        for run in (plain, mine):
            _clear_padding(getattr(run.output, CACHE, None), mine.padding)
            _clear_padding(run.cache, mine.padding)
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
    says_at_start = isinstance(mine, ValueError) and str(mine).startswith(f"expected {CACHE}")
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
        if key == CACHE:
            found += _cache_differences(key, plain[key], mine[key])
        else:
            found += _value_differences(key, plain[key], mine[key])
    return found


def _value_differences(name: str, plain: Any, mine: Any) -> list[str]:
    """Compare tensors, in containers of any depth: integers exactly, others closely."""
    if type(plain) is not type(mine):
        return [f"{name}: {type(plain).__name__} in plain, {type(mine).__name__} in lade"]
    if isinstance(plain, dict):
        return _mapping_differences(name, plain, mine)
    if isinstance(plain, (tuple, list)):
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
    is_state = ".layers[" in name or name.startswith(("hidden_states", "logits", "scores"))
    absolute = STATE_TOLERANCE if is_state else ABSOLUTE_TOLERANCE
    close = torch.isclose(plain, mine, rtol=RELATIVE_TOLERANCE, atol=absolute, equal_nan=True)
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


def _mapping_differences(name: str, plain: Any, mine: Any) -> list[str]:
    if plain.keys() != mine.keys():
        return [f"{name}: {[*plain]} in plain, {[*mine]} in lade"]
    for key in plain:
        if found := _value_differences(f"{name}[{key}]", plain[key], mine[key]):
            return found
    return []


def _clear_padding(cache: Any, padding: Tensor) -> None:
    """Write zeros where layers hold padding; those with windows hold the last tokens alone."""
    for layer in getattr(cache, "layers", []):
        for name in ("keys", "values"):
            held = getattr(layer, name, None)
            if isinstance(held, Tensor) and held.dim() == 4:
                num = held.shape[2]
                first = 0 if num >= padding.shape[1] else layer.get_seq_length() - num
                slots = torch.zeros(len(held), num, dtype=torch.bool)
                hidden = padding[:, first : first + num]
                slots[:, : hidden.shape[1]] = hidden.repeat_interleave(len(held) // len(padding), 0)
                setattr(layer, name, held.masked_fill(slots[:, None, :, None], 0))


def _clear_unseen(cache: Any) -> None:
    """Write zeros where full static layers hold the token that the next one moves out of sight."""
    for layer in getattr(cache, "layers", []):
        is_windowed = isinstance(layer, StaticSlidingWindowLayer) and layer.is_initialized
        if is_windowed and layer.cumulative_length_int >= layer.max_cache_len:
            layer.keys[:, :, 0] = layer.values[:, :, 0] = 0


def _cache_differences(name: str, plain: Any, mine: Any) -> list[str]:
    """Say in what two caches differ: objects with tensors, in layers or not."""
    if type(plain) is not type(mine):
        return [f"{name}: {type(plain)} in plain, {type(mine)} in lade"]
    lengths = _length(plain), _length(mine)
    if lengths[0] != lengths[1]:
        return [f"{name}: {lengths[0]} tokens in plain, {lengths[1]} in lade"]
    if not hasattr(plain, "__dict__") or isinstance(plain, Tensor):
        return _value_differences(name, plain, mine)
    if isinstance(plain, EncoderDecoderCache):
        plain, mine = plain.self_attention_cache, mine.self_attention_cache
    parts = _contents(plain), _contents(mine)
    layers = [part.pop("layers", []) for part in parts]
    if len(layers[0]) != len(layers[1]):
        return [f"{name}: {len(layers[0])} layers in plain, {len(layers[1])} in lade"]
    for number, (a, b) in enumerate(zip(*layers, strict=True)):
        label = f"{name}.layers[{number}]"
        if type(a) is not type(b):
            return [f"{label}: {type(a)} in plain, {type(b)} in lade"]
        if found := _mapping_differences(label, _contents(a), _contents(b)):
            return found
    return _mapping_differences(name, *parts)


def _length(cache: Any) -> int | None:
    """Return how many tokens a cache holds, where it counts them."""
    try:
        return int(cache.get_seq_length())
    except Exception:  # of a class that does not, or of one without any layer that does
        return None


def _contents(holder: Any) -> dict[str, Any]:
    """Return what a cache or one of its layers holds, as far as it will be read."""
    kinds = (Tensor, bool, int, tuple, list, dict, type(None))
    held: dict[str, Any] = {
        name: value
        for name, value in vars(holder).items()
        if isinstance(value, kinds) and not name.startswith("_")
    }
    if "cumulative_length_int" in held:
        del held["cumulative_length"]  # a tensor that is not kept up to date once a window is full
    if type(holder) is StaticLayer and holder.is_initialized:
        num_tokens = int(holder.cumulative_length)
        held |= {name: held[name][:, :, :num_tokens] for name in ("keys", "values")}
    return held


def follow_up(model: Any, plain: Run, mine: Run, theirs: Door, ours: Door) -> list[str]:
    """Compare how the text goes on from the caches that were returned."""
    first = _continued(model, plain, theirs)
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
    cache = getattr(run.output, CACHE, None)
    if cache is None or run.sequences is None:
        return None
    last = run.sequences[:, -1:]
    length = _length(cache)
    if length is None:
        length = run.sequences.shape[1] - 1
    takes = inspect.signature(model.forward).parameters
    name = next((name for name in CACHE_NAMES if name in takes), CACHE)

    def arguments(log: parts.Log) -> dict[str, Any]:
        return {
            "input_ids": last,
            "attention_mask": torch.ones(len(last), length + 1, dtype=torch.long),
            name: cache,
            "max_new_tokens": 4,
            "do_sample": False,
            "num_return_sequences": 1,
        }

    return record(model, 0, arguments, lambda given: door(model, "generate", given, {}))


# --- what is no mistake of lade -----------------------------------------------------------------


def _is_unsteady(case: Case, plain: Run) -> bool:
    """Tell whether plain alone, in a model of its own, does something else after other calls.

    A model may keep its state in its modules, and not start anew with every prompt.
    """
    if not case.architecture or "on_step" in case.lade:
        return False
    names = {
        **vars(parts),
        **vars(events),
        "model": parts.architecture.__wrapped__(**case.model),
    }
    _prepare(case, names)
    num_rows = len(case.rows) * int(case.setting("num_return_sequences") or 1)
    if case.events or case.follow_up:  # this model has seen none; that cache went on
        plain = _run(case, names, call_plain, {})
    for before in ([5, 6, 7], [60, 50, 40, 30]):
        names["model"].generate(torch.tensor([before] * num_rows), max_new_tokens=4)
        again, once_more = (_run(case, names, call_plain, {}) for _ in range(2))
        if differences(plain, again) or differences(plain, once_more):
            return True
        if case.follow_up and follow_up(names["model"], again, once_more, call_plain, call_plain):
            return True
    return False


def _drew_for_an_ended_row(plain: Run, mine: Run) -> bool:
    """Tell whether plain alone failed, where it draws for rows that have ended, from no token."""
    if mine.error is not None or "probability tensor contains" not in str(plain.error):
        return False
    return mine.sequences is not None and bool((mine.sequences[:, -1] == 0).any())


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
    limit = TIE["any architecture" if case.architecture else case.dtype]
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
        if scores.dtype == torch.float32 and scores.shape[-1] == case.vocab_size:
            margins.append(ahead(scores))
        return argmax(scores, *args, **kwargs)

    sampling = patch.object(torch, "multinomial", recording_multinomial)
    with sampling, patch.object(torch, "argmax", recording_argmax):
        _run(case, names, call_plain, {})
    return margins
