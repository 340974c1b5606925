"""`METHODS`: what drafts in an engine, by name.

Next file: `job.py`.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from lade.errors import LadeError, MissingExtraError

PLAIN = "plain"


class EngineMethod(NamedTuple):
    """A way of decoding in vLLM."""

    description: str
    speculative_config: Mapping[str, Any] | None  # vLLM's, but for num_speculative_tokens
    needs: str | None = None  # a module beside vLLM
    sharing: str | None = None  # an option of lade's proposer; None for other drafters
    reads_table: bool = False  # of a prewarmed model

    def config(self, num_speculative_tokens: int) -> dict[str, Any] | None:
        """Return vLLM's `speculative_config`, or None for no speculation."""
        if self.speculative_config is None:
            return None
        return {**self.speculative_config, "num_speculative_tokens": num_speculative_tokens}

    def additional_config(self, options: Mapping[str, Any], table: str | None) -> dict[str, Any]:
        """Return vLLM's `additional_config`, with options of lade's proposer if it drafts."""
        if self.sharing is None:
            return {}
        prewarmed = {"prewarmed": table} if self.reads_table else {}
        return {"lade": {**options, **prewarmed, "sharing": self.sharing}}


def _lookup(shortest: int, longest: int) -> EngineMethod:
    return EngineMethod(
        f"vLLM's ngram: a copy of what followed the last {shortest} to {longest} tokens in the "
        "request's own text",
        {"method": "ngram", "prompt_lookup_min": shortest, "prompt_lookup_max": longest},
    )


_PROPOSER = {"method": "custom_class", "model": "lade.engines.vllm.PoolProposer"}

#: By name, in the order of tables.
METHODS: dict[str, EngineMethod] = {
    PLAIN: EngineMethod("vLLM without speculation", None),
    "ngram": _lookup(1, 4),
    "ngram_2": _lookup(2, 4),
    "ngram_5": _lookup(5, 5),  # vLLM's own setting where none is given
    "suffix": EngineMethod(
        "vLLM's suffix decoding, of the package arctic-inference: texts of all requests",
        {"method": "suffix"},
        "arctic_inference",
    ),
    "pool": EngineMethod("lade's pool, one for all requests", _PROPOSER, sharing="all"),
    "pool_private": EngineMethod("lade's pool, one for each request", _PROPOSER, sharing="none"),
    "pool_prewarmed": EngineMethod(
        "lade's pool, one for all requests, and the model's table",
        _PROPOSER,
        sharing="all",
        reads_table=True,
    ),
}

DEFAULT_METHODS = ("plain", "ngram", "suffix", "pool", "pool_private", "pool_prewarmed")


def why_not(name: str, has_table: bool) -> str | None:
    """Return why a method cannot run in this environment, or None."""
    method = METHODS[name]
    if method.reads_table and not has_table:
        return "no table of the model is given"
    if method.needs is None or find_spec(method.needs) is not None:
        return None
    return f"the package {method.needs.replace('_', '-')} is not installed"


def check_engine() -> None:
    """Raise unless vLLM can be imported.

    Raises:
        MissingExtraError: it is not installed.
    """
    if find_spec("vllm") is None:  # of the distribution vllm, or of a build for CPUs
        raise MissingExtraError("vllm", "vllm")


def choose_methods(text: str | None, has_table: bool) -> tuple[list[str], dict[str, str]]:
    """Return the methods to run, and those left out with the reasons.

    Raises:
        LadeError: a method that was asked for cannot run here.
        ValueError: a method is unknown or named twice.
    """
    if text is None:
        reasons = {name: why_not(name, has_table) for name in DEFAULT_METHODS}
        left_out = {name: reason for name, reason in reasons.items() if reason}
        return [name for name in DEFAULT_METHODS if name not in left_out], left_out
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len({*names}) < len(names) or not {*names} <= METHODS.keys():
        known = ", ".join(METHODS)
        raise ValueError(f"expected --methods to be different ones of {known}, got {text!r}")
    for name in names:
        if reason := why_not(name, has_table):
            raise LadeError(f"the method {name} cannot run here: {reason}")
    return names, {}
