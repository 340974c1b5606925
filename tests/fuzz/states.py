"""Models whose state changes between calls and within them: `python -m tests.fuzz.states`.

A session has one model with one or two kinds of state (`tests/lade/states.py`), one pool and one
assistant, and makes calls of lade one after another; before each, and in the middle of some, the
state is set anew. Every call is a case: its text must be that of plain `generate`, token for token,
and so must the random state that it leaves.

Two things are not asked, as docs/exactness.md promises neither. After a change in the middle of a
call, only the text up to the step of the change is compared; the next call must be right again.
And each change is followed by `lade.release(model)`, as users who keep prefixes have to do for what
neither hooks nor weights show.
"""

import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

import lade
from tests.about import about
from tests.fuzz.parts import ScriptDrafter
from tests.fuzz.run import deterministic, sessions, sessions_parser
from tests.lade import states
from tests.lade.states import KINDS, SIZE, Kind, Set
from tests.lade.tiny import VOCAB_SIZE, tiny_model

CALLS_PER_SESSION = 50
FAMILIES = ("llama", "mistral", "qwen3")
MOE_FAMILIES = ("qwen3_moe", "mixtral")
ALPHAS = (0.0, 0.0, 0.3, 1.0, 2.0)
_HOOKS = [kind for kind in KINDS[: KINDS.index(states.attribute)] if kind is not states.on_the_head]
_SHOWN = KINDS[KINDS.index(states.scaling) :]
_KNOWN: list[Kind] = [*dict.fromkeys((*_SHOWN, states.weights))]
_OTHERS = [kind for kind in KINDS if kind not in _HOOKS and kind not in _KNOWN]
_CONFIGS = ("", "max_draft_tokens=4", "max_draft_tokens=8", "max_draft_tokens=8")
_VERIFICATIONS = ("", "", "", "", "verification='chain'", "verification='chain'")


class Outcome(NamedTuple):
    """What came of one call."""

    session: int
    number: int
    told: str  # what was drawn
    wrong: str  # in what lade differs from plain; empty if in nothing
    num_drafted: int = 0
    num_accepted: int = 0
    num_reused: int = 0
    is_refused: bool = False


class _Counting(BaseStreamer):  # type: ignore[misc]
    """Sets a state once so many tokens have come."""

    def __init__(self, put: Set, alpha: float, at: int) -> None:
        self._put, self._alpha, self._left = put, alpha, at

    def put(self, value: Tensor) -> None:
        if self._left == 0:  # the prompt comes first
            self._put(self._alpha)
        self._left -= 1

    def end(self) -> None:
        """Nothing is left to do."""


class _Remembered:
    """What sets a state, and the value that was set last."""

    def __init__(self, put: Set, model: Any) -> None:
        self._put, self._model = put, model
        self.alpha = 0.0

    def __call__(self, alpha: float) -> None:
        self.alpha = alpha
        self._put(alpha)
        lade.release(self._model)


class Session:
    """The calls of one model, drawn from the seed and the number of the session alone."""

    def __init__(self, seed: int, number: int) -> None:
        self.rng = rng = Random(f"{seed} {number}")
        self.number = number
        kinds: list[Kind] = []
        if rng.random() < 0.6:
            kinds = rng.sample(_KNOWN, rng.choice([1, 2]))
        else:
            kinds = [rng.choice(_OTHERS)] if rng.random() < 0.6 else []
            if not kinds or rng.random() < 0.3:
                kinds.append(rng.choice(_HOOKS))
        # Other kinds know the MLP of a Llama.
        on_experts = kinds == [states.adapter_on_parameters] and rng.random() < 0.7
        self.model = _model_of(rng, MOE_FAMILIES if on_experts else FAMILIES)
        self.names = [kind.__name__ for kind in kinds]
        self.puts = [_Remembered(kind(self.model), self.model) for kind in kinds]
        self.assistant = _model_of(rng, FAMILIES) if rng.random() < 0.2 else None
        self.pool = lade.NGramPool()
        self.is_wrapped = rng.random() < 0.3
        self.verification = rng.choice(_VERIFICATIONS)  # each is a check of its own
        self.chat = [rng.randrange(2, 90) for _ in range(rng.randint(1, 8))] * 2
        for put in self.puts:
            put(0.0)

    def calls(self) -> Iterator[Outcome]:
        """Make the calls one after another."""
        for number in range(CALLS_PER_SESSION):
            yield self._call(number)

    def _call(self, number: int) -> Outcome:
        rng = self.rng
        if rng.random() < 0.06:  # what was found wrong at once is believed anew
            for put in self.puts:
                put(0.0)
            lade.probe(self.model, anew=True)
        if rng.random() < 0.5:
            rng.choice(self.puts)(rng.choice(ALPHAS))
        ids = self._prompt()
        options: dict[str, Any] = {
            "attention_mask": (ids != 0).long(),
            "pad_token_id": 0,
            "max_new_tokens": rng.randint(1, 14),
            "do_sample": rng.random() < 0.3,
            "return_dict_in_generate": True,
        }
        seed = rng.randrange(1000)
        parts = [rng.choice(_CONFIGS), self.verification]
        parts += ["reuses_prefix=True"] * (rng.random() < 0.6)
        told = ", ".join(part for part in parts if part)
        config: lade.Config = eval(f"lade.Config({told})")
        # In the middle of a call, of one row, where plain decoding is at the same token.
        changed = rng.choice(self.puts) if len(ids) == 1 and rng.random() < 0.3 else None
        alpha, at_least = rng.choice(ALPHAS), rng.randint(1, 8)
        expected = self._expected(ids, options, seed)
        given: dict[str, Any] = {"config": config}
        drafter = self._drafter(expected.sequences, ids)
        given |= {"pool": self.pool} if drafter is None else {"drafter": drafter}
        what = f"{self.names} {told} {ids.tolist()} {options} seed={seed} {type(drafter).__name__}"
        if drafter is None and rng.random() < 0.7:
            for row in expected.sequences.tolist():
                self.pool.observe([token for token in row if token])
        lengths: list[int] = []

        def on_step(step: Any) -> None:
            before = lengths[-1] if lengths else 0
            lengths.append(before + len(step.token_ids))
            if changed is not None and before < at_least <= lengths[-1]:
                changed(alpha)

        if changed is not None:
            what += f" changed to {alpha} at {at_least}"
            given["on_step"] = on_step
        kept = [put.alpha for put in self.puts]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(seed)
                got = self._through(rng.random(), ids, options | given)
        except lade.UnsupportedModelError:
            return Outcome(self.number, number, what, "", is_refused=True)
        after = torch.get_rng_state()
        if changed is not None:
            for put, before in zip(self.puts, kept, strict=True):
                put(before)
            at = next((each for each in lengths if each >= at_least), None)
            streamer = None if at is None else _Counting(changed, alpha, at)
            expected = self._expected(ids, options | {"streamer": streamer}, seed)
        wrong = ""
        if changed is not None and lengths and lengths[-1] >= at_least:
            known = ids.shape[1] + next(each for each in lengths if each >= at_least)
            got_ids, expected_ids = (each.sequences[:, :known] for each in (got, expected))
            if got_ids.tolist() != expected_ids.tolist():
                wrong = f"expected {expected_ids.tolist()}, got {got_ids.tolist()}"
        elif got.sequences.tolist() != expected.sequences.tolist():
            wrong = f"expected {expected.sequences.tolist()}, got {got.sequences.tolist()}"
        elif not torch.equal(after, torch.get_rng_state()):
            wrong = "another random state"
        self.chat = got.sequences[0].tolist()[-60:]
        stats = got.stats
        nums = (stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_reused_tokens)
        return Outcome(self.number, number, what, wrong, *nums)

    def _expected(self, ids: Tensor, options: dict[str, Any], seed: int) -> Any:
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return type(self.model).generate(self.model, ids, **options)

    def _through(self, chance: float, ids: Tensor, given: dict[str, Any]) -> Any:
        if self.is_wrapped:
            lade.wrap(self.model)
            try:
                return self.model.generate(ids, **given)
            finally:
                lade.unwrap(self.model)
        if chance < 0.3:
            return self.model.generate(ids, custom_generate=lade.decode, **given)
        return lade.generate(self.model, ids, **given)

    def _prompt(self) -> Tensor:
        rng = self.rng
        if rng.random() < 0.5:  # a turn that goes on from the last answer
            return torch.tensor([[token or 7 for token in self.chat] + [rng.randrange(2, 90)]])
        num_rows, length = rng.choice([1, 1, 1, 2, 3]), rng.randint(1, 12)
        few = [rng.randrange(2, 90) for _ in range(4)]
        rows = [[rng.choice(few) for _ in range(length)] for _ in range(num_rows)]
        for row in rows[1:]:
            num_padding = rng.randrange(length)
            row[:num_padding] = [0] * num_padding
        return torch.tensor(rows)

    def _drafter(self, texts: Tensor, ids: Tensor) -> Any:
        rng = self.rng
        chance = rng.random()
        if chance < 0.25:
            answers = [
                [token for token in row[: ids.shape[1]] if token] + row[ids.shape[1] :]
                for row in texts.tolist()
            ]
            return ScriptDrafter(answers, VOCAB_SIZE, rng.choice([0.5, 0.9, 1.0]), rng.randrange(9))
        if self.assistant is not None and chance < 0.6:
            drafter = lade.drafters.AssistantModel(self.assistant)
            together = lade.drafters.Merged([lade.drafters.CallPool(), drafter])
            return drafter if rng.random() < 0.5 else together
        return None


def _model_of(rng: Random, families: Sequence[str]) -> Any:
    """Return a model; half of them are in float32, with heads that compiled forwards take."""
    family, is_compiled = rng.choice(families), rng.random() < 0.5
    options: dict[str, Any] = {"head_dim": 16 if is_compiled else 8, "num_hidden_layers": 2}
    # In float64 transformers' own experts raise, or not, by where their weights lie in memory.
    is_single = is_compiled or families is MOE_FAMILIES
    options["dtype"] = torch.float32 if is_single else torch.float64
    model = tiny_model(family, seed=rng.randrange(5), hidden_size=SIZE, **options)
    if rng.random() < 0.7:
        model.generation_config.eos_token_id = None
    return model


def run_session(seed: int, number: int) -> list[Outcome]:
    """Return what came of a session's calls; an error ends it as a wrong one."""
    hooks: Any = nn.modules.module._global_forward_hooks
    before = {**hooks}
    with deterministic():
        session = Session(seed, number)
        outcomes: list[Outcome] = []
        try:
            outcomes.extend(session.calls())
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            outcomes.append(Outcome(number, len(outcomes), str(session.names), told))
        finally:
            hooks.clear()
            hooks.update(before)
            states.put_back()
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = sessions_parser("python -m tests.fuzz.states", __doc__, cases=50_000)
    parser.add_argument("--minutes", type=float, help="stop after so long, if not all are done")
    arguments = parser.parse_args(argv)
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    start = time.perf_counter()
    with sessions(run_session, arguments, CALLS_PER_SESSION) as found:
        for outcomes in found:
            for each in outcomes:
                counts["num_cases"] += 1
                counts["num_refused"] += each.is_refused
                counts["num_reusing"] += each.num_reused > 0
                counts["num_drafting"] += each.num_drafted > 0
                counts["num_accepting"] += each.num_accepted > 0
                counts["num_changed_in_call"] += " changed to " in each.told
                kinds.update(eval(each.told[: each.told.index("]") + 1]))
                if each.wrong:
                    wrong.append(each._asdict())
                    print(each, flush=True)
            if arguments.minutes and time.perf_counter() - start > 60 * arguments.minutes:
                break
    result = {
        "seed": arguments.seed,
        "seconds": round(time.perf_counter() - start, 1),
        **about(),
        **counts,
        "num_wrong": len(wrong),
        "kinds": dict(sorted(kinds.items())),
        "wrong": wrong,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: each for name, each in result.items() if name != "kinds"}, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
