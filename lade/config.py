"""`Config`: what a user may fix by hand. Every default is automatic, none needs to be touched."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Acceptance = Literal["exact", "rejection"]
Verification = Literal["tree", "rows", "chain", "snapshot", "plain"]

Execution = Literal["eager", "fixed", "graphs", "compiled"]

VERIFICATIONS: tuple[Verification, ...] = get_args(Verification)  # of verifying drafts, best first
SPECULATING = VERIFICATIONS[:-1]

# Of a window; costs of steps are told apart up to about so many tokens (`lade.budget`).
_MAX_CELLS = 192


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Size of the Jacobi window of lookahead decoding (`lade.drafting.lookahead`).

    A step runs (N-1)·W - 1 tokens more. The defaults are those that the paper's authors name for
    models of 7B parameters.

    Raises:
        TypeError: a field is not an integer.
        ValueError: a field is out of its range.

    Source: Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
    ICML 2024, section 3 (arXiv 2402.02057).
    """

    #: W, the number of columns: n-grams that a step gives, at successive places.
    window_size: int = 7
    #: N, the number of tokens of each n-gram; each takes N-1 steps to come about.
    ngram_size: int = 5

    def __post_init__(self) -> None:
        for name, least in (("window_size", 1), ("ngram_size", 3)):
            _check_integer(f"Lookahead({name}=…)", getattr(self, name), least)
        if self.num_cells > _MAX_CELLS:
            raise ValueError(
                f"expected a Lookahead of at most {_MAX_CELLS} tokens more in a step, "
                f"got {self.num_cells}"
            )

    @property
    def num_cells(self) -> int:
        """Tokens that a step runs besides root and draft."""
        return (self.ngram_size - 1) * self.window_size - 1


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of the decoding; no text depends on them in exact arithmetic, but see `acceptance`.

    Raises:
        TypeError: a field is not an integer.
        ValueError: a field is out of its range.
    """

    #: G, the greatest number of candidates (root-to-leaf paths) in a draft; None for no limit.
    max_candidates: int | None = None
    #: The greatest number of draft tokens to verify in a step, and then every step verifies as many
    #: as the draft has. None lets the measured cost of a step decide (`lade.budget`). 0 drafts
    #: nothing.
    max_draft_tokens: int | None = None
    #: How sampled text is held against a draft. "exact" emits, seed for seed, the tokens that
    #: `generate(do_sample=True)` emits, and accepts a draft token where it is the same. "rejection"
    #: draws drafts from the pool's own probabilities and accepts or rejects them so that the text
    #: has the target's distribution (`lade.sampling.rejection`), with other tokens for the same
    #: seed. Greedy decoding is the same with both: its target distribution is one token.
    acceptance: Acceptance = "exact"
    #: How drafts are verified. "tree": all candidates in one forward, by a tree mask; "rows": as
    #: rows of a batch; "chain": the best one alone, the cache cropped behind what was accepted;
    #: "snapshot": the same, by a copy of the state from before the draft; "plain": not at all. None
    #: takes the best that a check of the model finds exact (`lade.probe`).
    verification: Verification | None = None
    #: How forwards that verify trees are executed. "eager": each as large as it has to be. "fixed":
    #: padded to a few shapes, on memory that is kept with the model between calls (`lade.release`).
    #: "graphs": those recorded as CUDA graphs and replayed, where the model allows it. "compiled":
    #: the same, of what `torch.compile` makes of the model, which takes minutes at the first calls
    #: and is not checked as the model itself is; on other devices without graphs. None is "graphs"
    #: on CUDA and "eager" elsewhere.
    execution: Execution | None = None
    #: Whether in half precision, too, a prompt gets the same text whatever the pool holds: all
    #: steps are of one width (8 tokens, on CUDA 32, more if `max_draft_tokens` says so) and
    #: attention sums in float64. Slower than without, and on text that nothing predicts slower than
    #: plain decoding; the text is no nearer to that of `generate`. For models verified by trees,
    #: without experts.
    stable_text: bool = False
    #: The window of lookahead decoding, run in every forward beside the draft: the pool learns
    #: n-grams from it that no text has had yet. Only for models that verify whole trees. None runs
    #: none.
    lookahead: Lookahead | None = None
    #: What a step costs, in any unit, by the number of tokens in its forward, all rows together:
    #: at least two sizes, 1 among them, as in `{1: 31.0, 8: 34.2, 16: 41.9}`; sizes between are
    #: interpolated. How much of a draft is verified then depends on the drafter's probabilities
    #: alone, and runs repeat exactly. Kept as a copy in order of size, which no hash counts; not to
    #: be changed. None measures costs as decoding goes.
    step_costs: Mapping[int, float] | None = field(default=None, hash=False)
    #: Whether the table that `lade.prewarm` made for the model is used, where there is one.
    uses_table: bool = True
    #: Whether what a drafter raises, or drafts wrongly, is raised: for those who write one. Else
    #: one warning tells of it, and the call goes on without drafts.
    strict_drafter: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_candidates", 1), ("max_draft_tokens", 0)):
            if getattr(self, name) is not None:
                _check_integer(f"Config({name}=…)", getattr(self, name), least)
        if not isinstance(self.lookahead, Lookahead | None):
            raise TypeError(
                f"expected Config(lookahead=…) to be a Lookahead, got {self.lookahead!r}"
            )
        if self.step_costs is not None:
            object.__setattr__(self, "step_costs", _checked_costs(self.step_costs))
            if self.max_draft_tokens is not None:
                raise ValueError(
                    "expected Config(step_costs=…) or Config(max_draft_tokens=…), got both"
                )
        for name in ("uses_table", "stable_text", "strict_drafter"):
            if not isinstance(getattr(self, name), bool):
                got = getattr(self, name)
                raise TypeError(f"expected Config({name}=…) to be a bool, got {got!r}")
        if self.stable_text:
            self._check_stable_text()
        for name, known in (
            ("acceptance", get_args(Acceptance)),
            ("verification", (*VERIFICATIONS, None)),
            ("execution", (*get_args(Execution), None)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"expected Config({name}=…) of {', '.join(map(repr, known))}, "
                    f"got {getattr(self, name)!r}"
                )

    def _check_stable_text(self) -> None:
        """Raise where other settings make text depend on drafts, or steps on what they cost."""
        for name, allowed in (
            ("acceptance", ("exact",)),
            ("verification", (None, "tree")),
            ("execution", (None, "fixed", "graphs")),
            ("step_costs", (None,)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"expected no Config({name}={getattr(self, name)!r}) beside stable_text=True"
                )


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected {name} to be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"expected {name} of at least {least}, got {value}")


def _checked_costs(step_costs: object) -> dict[int, float]:
    """Return the costs of steps in order of size."""
    if not isinstance(step_costs, Mapping):
        raise TypeError(
            f"expected Config(step_costs=…) to be a mapping of tokens to costs, got {step_costs!r}"
        )
    for size, cost in step_costs.items():
        _check_integer("each size in Config(step_costs=…)", size, 1)
        if not isinstance(cost, int | float) or isinstance(cost, bool):
            raise TypeError(f"expected Config(step_costs=…) to have numbers as costs, got {cost!r}")
        if not (math.isfinite(cost) and cost > 0):
            raise ValueError(
                f"expected Config(step_costs=…) to have positive, finite costs, got {cost}"
            )
    if 1 not in step_costs or len(step_costs) < 2:
        raise ValueError(
            "expected Config(step_costs=…) of at least two sizes, 1 among them, got "
            f"{sorted(step_costs)}"
        )
    return {size: float(step_costs[size]) for size in sorted(step_costs)}
