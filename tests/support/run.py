"""Check every architecture of the installed transformers against plain `generate`.

Each one is a tiny model with random weights (`tiny.py`), decoded by `generate` and by lade with the
same options and seeds. What a model cannot do with `generate` itself is no failure of lade. Next
file: `report.py`.
"""

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from lade import Config, DecodeStats, generate, probe
from tests.lade.tiny import ScriptedDrafter
from tests.support.inside import (
    SPECULATING,
    Lengths,
    Verification,
    why_not_speculate,
)
from tests.support.tiny import (
    EOS_TOKEN_ID,
    PAD_TOKEN_ID,
    VARIANTS,
    CannotBuild,
    Model,
    NotText,
    causal_lm_types,
    error_line,
    tiny_model,
)

MAX_DRAFT_TOKENS = 7
RIGHT = 0.7  # probability that a next draft token is the answer's
# A first difference is a tie, not a wrong token, if plain's top two logits are this close.
_TIE = 1e-6


class Case(NamedTuple):
    """One call to compare."""

    name: str
    lengths: tuple[int, ...]  # of the prompts
    width: int  # of the batch, padded on the left
    is_sampled: bool
    num_new: int = 24  # tokens; three times the windows and chunks of the tiny models


CASES = [  # the windows are 8 tokens
    Case("greedy short", (4,), 4, False),
    Case("sampled short", (4,), 4, True),
    Case("greedy long", (21,), 21, False),
    Case("sampled long", (21,), 21, True),
    Case("greedy padded", (5,), 21, False),
    Case("greedy batch", (21, 5), 21, False),
    Case("sampled batch", (21, 5), 21, True),
]
#: For tests: fewer cases and shorter answers.
QUICK_CASES = [
    case._replace(num_new=10)
    for case in CASES
    if case.name in ("greedy long", "greedy padded", "sampled batch")
]


class Difference(NamedTuple):
    """Where lade's text first differs from that of plain `generate`."""

    case: str
    row: int
    token: int  # number of new tokens before it
    gap: float | None  # of plain's top two logits, relative to the larger; None if sampled

    @property
    def is_tie(self) -> bool:
        """Whether rounding alone may have changed the choice."""
        return self.gap is not None and self.gap < _TIE

    def __str__(self) -> str:
        gap = "" if self.gap is None else f", gap {self.gap:.2g}"
        return f"{self.case}, row {self.row}, token {self.token}{gap}"


Verdict = Literal["exact", "tie", "wrong", "failed", "not compared"]
Kind = Verification | Literal["not a text model", "cannot build"]


@dataclass(slots=True)
class Row:
    """Findings on one architecture."""

    name: str  # a model type or a variant of one
    model_type: str
    model: str  # the class
    kind: Kind = "cannot build"  # the verification chosen for one row, if it was built
    why_not: str | None = None  # why it was not built
    batch_verification: Verification | None = None
    #: Why no better verification was chosen.
    reasons: dict[Verification, str] = field(default_factory=dict)
    batch_reasons: dict[Verification, str] = field(default_factory=dict)
    compared: list[str] = field(default_factory=list)  # cases
    in_float32: list[str] = field(default_factory=list)  # of those, the ones float64 cannot run
    speculated: list[str] = field(default_factory=list)  # cases in which drafts were verified
    #: By case: why a call of these lengths falls back, whatever a short check finds.
    plain_by_rule: dict[str, str] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)  # the first of each case
    failures: dict[str, str] = field(default_factory=dict)  # by case: what lade raises
    plain_failures: dict[str, str] = field(default_factory=dict)  # by case: what plain raises
    num_drafted: int = 0
    num_accepted: int = 0
    mat: float | None = None  # mean accepted tokens, over all cases
    sec: float = 0.0

    @property
    def is_built(self) -> bool:
        """Whether there was a model to check."""
        return self.batch_verification is not None

    @property
    def is_variant(self) -> bool:
        """Whether this is another configuration of an architecture."""
        return self.name != self.model_type

    @property
    def speculates(self) -> bool:
        """Whether drafts were verified, and some of them accepted."""
        return self.mat is not None and self.mat > 1

    @property
    def should_speculate(self) -> bool:
        """Whether the chosen verification and the lengths of the calls let drafts be verified."""
        is_plain = self.kind not in SPECULATING or {*self.compared} <= self.plain_by_rule.keys()
        return not is_plain

    @property
    def verdict(self) -> Verdict:
        """The worst of the findings."""
        if self.failures:
            return "failed"
        if self.differences:
            return "tie" if all(one.is_tie for one in self.differences) else "wrong"
        return "exact" if self.compared else "not compared"

    @property
    def is_bad(self) -> bool:
        """Whether lade is at fault."""
        return self.verdict in ("wrong", "failed")

    def add(self, stats: DecodeStats) -> None:
        """Note what became of the drafts of all cases."""
        self.num_drafted, self.num_accepted = stats.num_draft_tokens, stats.num_accepted_tokens
        self.mat = stats.mean_accepted_tokens if stats.num_row_steps else None


def all_names() -> list[str]:
    """Return the model types of the installed transformers, then the variants of some."""
    return [*causal_lm_types(), *VARIANTS]


def run_all(names: Sequence[str], *, cases: Sequence[Case] = CASES, seed: int = 0) -> Iterator[Row]:
    """Check architectures of `all_names` in turn; whatever one of them does, the run goes on."""
    if unknown := [name for name in names if name not in all_names()]:
        raise ValueError(f"expected model types that transformers maps, got {', '.join(unknown)}")
    for name in names:
        yield run_one(name, cases=cases, seed=seed)


def run_one(name: str, *, cases: Sequence[Case] = CASES, seed: int = 0) -> Row:
    """Check one architecture in float64, and in float32 for what it cannot do in float64."""
    started = perf_counter()
    model_type = VARIANTS.get(name, (name,))[0]
    row = Row(name, model_type, str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]))
    stats = DecodeStats()
    with quiet(), torch.random.fork_rng(devices=[]):
        for dtype in (torch.float64, torch.float32):
            left = [case for case in cases if case.name not in (*row.compared, *row.failures)]
            if not left or row.kind == "not a text model":
                continue
            try:
                model = tiny_model(name, seed=seed, dtype=dtype)
            except CannotBuild as error:
                if row.why_not is None and not row.is_built:
                    row.kind = "not a text model" if isinstance(error, NotText) else "cannot build"
                    row.why_not = str(error).removeprefix(f"{name}: ")
            else:
                check_model(row, model, left, seed, stats)
    row.add(stats)
    row.sec = perf_counter() - started
    return row


def check_model(
    row: Row,
    model: Model,
    cases: Sequence[Case],
    seed: int,
    stats: DecodeStats,
) -> None:
    """Compare cases with a model that was built; write the findings into the row."""
    try:
        one, batch = probe(model), probe(model, num_rows=2)
    except Exception as error:  # a check that raises is lade's fault, but no reason to stop
        row.failures["probe"] = error_line(error)
        return
    if not row.is_built:
        row.kind, row.batch_verification, row.why_not = one.verification, batch.verification, None
        row.reasons, row.batch_reasons = dict(one.reasons), dict(batch.reasons)
    for case in cases:
        _compare(model, case, seed, row, stats)


def _compare(model: Model, case: Case, seed: int, row: Row, stats: DecodeStats) -> None:
    """Compare lade with plain `generate` in one case; write the findings into the row."""
    options = _inputs(case, seed)
    # A single row runs to full length, past every window; rows of a batch may end early.
    model.generation_config.eos_token_id = EOS_TOKEN_ID if len(case.lengths) > 1 else None
    try:
        torch.manual_seed(seed)
        expected = type(model).generate(model, **options, output_logits=True)
        if not all(logits.isfinite().all() for logits in expected.logits):
            raise ArithmeticError("its logits are not finite")
    except Exception as error:  # transformers' own limits, which are not lade's to judge
        row.plain_failures.setdefault(case.name, error_line(error))
        return
    prompts = zip(options["input_ids"], options["attention_mask"], strict=True)
    new = expected.sequences[:, case.width :].tolist()
    answers = [
        [*ids[mask.bool()].tolist(), *rest] for (ids, mask), rest in zip(prompts, new, strict=True)
    ]
    options["drafter"] = ScriptedDrafter(answers, np.random.default_rng(seed), RIGHT)
    options["config"] = Config(max_draft_tokens=MAX_DRAFT_TOKENS)
    try:
        torch.manual_seed(seed)
        output = generate(model, **options)
    except Exception as error:
        row.failures[case.name] = error_line(error)
        return
    row.compared.append(case.name)
    longest, is_padded = max(case.lengths), min(case.lengths) < case.width
    lengths = Lengths(longest, case.width, case.num_new, is_padded)
    if (reason := why_not_speculate(model, lengths)) is not None:
        row.plain_by_rule[case.name] = reason
    row.plain_failures.pop(case.name, None)
    if model.dtype == torch.float32:
        row.in_float32.append(case.name)
    if output.stats.num_draft_tokens:
        row.speculated.append(case.name)
    stats.add(output.stats)
    place = _first_difference(expected.sequences, output.sequences)
    if place is not None:
        which, token = place[0], place[1] - case.width
        gap = None if case.is_sampled else _gap(expected.logits, which, token)
        row.differences.append(Difference(case.name, which, token, gap))


def _inputs(case: Case, seed: int) -> dict[str, Any]:
    """Return prompts and options for `generate`."""
    rng = np.random.default_rng([seed, *case.lengths])
    input_ids = torch.full((len(case.lengths), case.width), PAD_TOKEN_ID)
    mask = torch.zeros_like(input_ids)
    for which, length in enumerate(case.lengths):
        prompt = rng.integers(2, EOS_TOKEN_ID - 1, length)
        input_ids[which, case.width - length :] = torch.from_numpy(prompt)
        mask[which, case.width - length :] = 1
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "max_new_tokens": case.num_new,
        "do_sample": case.is_sampled,
        "return_dict_in_generate": True,
    }


def _first_difference(expected: Tensor, found: Tensor) -> tuple[int, int] | None:
    """Return row and column of the first token that differs, the earliest of all rows."""
    length = min(expected.shape[1], found.shape[1])
    differs = (expected[:, :length] != found[:, :length]).nonzero()
    if len(differs):
        which, column = min(differs.tolist(), key=lambda place: (place[1], place[0]))
        return which, column
    return None if expected.shape == found.shape else (0, length)


def _gap(logits: Sequence[Tensor], which: int, token: int) -> float | None:
    """Return the gap of the top two logits, relative to the larger; None past the end."""
    if token >= len(logits):
        return None
    first, second = logits[token][which].double().topk(2).values.tolist()
    return float((first - second) / max(abs(first), abs(second)))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what models and transformers print and warn of, and their progress bars."""
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
