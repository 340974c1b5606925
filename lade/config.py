"""`Config`, the settings that a user may set; every default is automatic."""

from dataclasses import dataclass, fields
from numbers import Integral
from typing import Literal, get_args

Acceptance = Literal["exact", "rejection"]
Arithmetic = Literal["float32", "model"]
Verification = Literal["tree", "chain", "snapshot", "plain"]

Execution = Literal["eager", "static"]

VERIFICATIONS: tuple[Verification, ...] = get_args(Verification)  # best first
SPECULATING = VERIFICATIONS[:-1]

# Draft tokens of a step, for which drafting reserves 470 MB, and of a compiled one.
_MOST, _MOST_STATIC = 2**16, 63


@dataclass(frozen=True, slots=True)
class Config:
    """Decoding settings; in exact arithmetic none changes the text, except `acceptance`.

    Args:
        max_candidates: G, the maximum number of candidates (root-to-leaf paths) in a draft; None
            for no limit.
        max_draft_tokens: Maximum number of draft tokens to verify per step, at most 65,536; if set,
            every step verifies as many as the draft has, up to this number. None lets the measured
            cost of a step decide (`lade.budget`). 0 disables drafting.
        acceptance: How draft tokens are accepted when sampling. "exact" emits the tokens that
            `generate(do_sample=True)` emits with the same seed, and accepts a draft token if it is
            that token. "rejection" draws drafts at random and accepts or rejects them so that the
            text has the target's distribution; the same seed gives other tokens. Greedy decoding
            is the same with both.
        verification: Verification method. "tree": all candidates in one forward pass, under a tree
            mask; "chain": only the best candidate, with the KV cache cropped after the accepted
            tokens; "snapshot": as "chain", restoring a copy of the state from before the draft;
            "plain": no drafts. None takes the best method that a check of the model finds exact
            (`lade.probe`).
        execution: How forward passes that verify trees are executed. "eager": at their exact size.
            "static": padded to a few shapes on transformers' static cache, and compiled by
            `torch.compile`, a graph for each shape: with `mode="reduce-overhead"` on CUDA, by
            inductor's defaults on a CPU, or as `generate(compile_config=…)` says;
            `disable_compile=True` compiles nothing. Only for models verified by trees, and one
            prompt; other calls run eagerly, with one warning. None is "static" on CUDA for calls
            with a static cache, which `generate` compiles, too, and else "eager".
        reuses_prefix: Whether to keep the KV cache after a call, and to run only the rest of a
            prompt that begins as an earlier text did (`stats.num_reused_tokens`). Only calls that
            learn into the same pool find a kept text; calls without a learning pool share theirs.
            Kept texts are dropped when the model changes, and by `lade.release`. The result has no
            cache then. Only for calls with one prompt of text alone.
        max_prefix_bytes: Memory for kept texts, in bytes, on the model's device; the least recently
            used texts go first. 0 keeps nothing.
        uses_kernels: Whether compiled forward passes may run models on a CPU, if they are faster
            than torch's.
        arithmetic: "float32": where a compiled forward pass runs a model on a CPU, calls compute in
            float32, whatever the weights are stored in; their text is that of
            `copy.deepcopy(model).float().generate(…)`. "model": models in bfloat16 or float16
            compute in that, by torch. Other models compute in their own dtype in any case.
        strict_drafter: Whether a drafter's errors and invalid drafts are raised, for authors of
            drafters. Otherwise one warning reports them, and the call continues without drafts.

    Raises:
        TypeError: a field is not an integer.
        ValueError: a field is out of its range.
    """

    max_candidates: int | None = None
    max_draft_tokens: int | None = None
    acceptance: Acceptance = "exact"
    verification: Verification | None = None
    execution: Execution | None = None
    reuses_prefix: bool = False
    max_prefix_bytes: int = 2**30
    uses_kernels: bool = True
    arithmetic: Arithmetic = "float32"
    strict_drafter: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_candidates", 1), ("max_draft_tokens", 0)):
            if getattr(self, name) is not None:
                check_integer(f"Config({name}=…)", getattr(self, name), least)
        is_static = self.execution == "static"
        most = f"{_MOST_STATIC} beside execution='static'" if is_static else f"{_MOST}"
        if (self.max_draft_tokens or 0) > (_MOST_STATIC if is_static else _MOST):
            got = self.max_draft_tokens
            raise ValueError(f"expected Config(max_draft_tokens=…) of at most {most}, got {got}")
        check_integer("Config(max_prefix_bytes=…)", self.max_prefix_bytes, 0)
        for each in fields(self):
            got = getattr(self, each.name)
            if each.type is bool and not isinstance(got, bool):
                raise TypeError(f"expected Config({each.name}=…) to be a bool, got {got!r}")
        for name, known in (
            ("acceptance", get_args(Acceptance)),
            ("arithmetic", get_args(Arithmetic)),
            ("verification", (*VERIFICATIONS, None)),
            ("execution", (*get_args(Execution), None)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"expected Config({name}=…) of {', '.join(map(repr, known))}, "
                    f"got {getattr(self, name)!r}"
                )


def check_integer(name: str, value: object, least: int) -> None:
    """Raise unless a value is an integer, Python's or numpy's, of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"expected {name} to be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"expected {name} of at least {least}, got {value}")
