"""`lade.probe` and `lade.recheck`: report how drafts of a model are verified, and why."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lade.compat import Model, attention_of, without_compiler
from lade.config import Execution, Verification
from lade.probing.plan import WITHOUT_CACHE, choose_verification
from lade.probing.profile import CacheKind, Profiles
from lade.probing.rules import refuse_encoder_decoder


@dataclass(frozen=True, slots=True)
class Probe:
    """What `lade.probe` found.

    Attributes:
        model: Name of the model's class.
        verification: Method by which drafts are verified.
        attention: Attention implementation that verifies drafts.
        reasons: Why each better method was ruled out.
        execution: How forwards that verify drafts are executed.
    """

    model: str
    verification: Verification
    attention: str | None
    reasons: Mapping[Verification, str]
    execution: Execution = "eager"

    def __str__(self) -> str:
        how = f"attention: {self.attention}, execution: {self.execution}"
        lines = [f"{self.model} verifies drafts by: {self.verification} ({how})"]
        return "\n".join(
            [
                *lines,
                *(f"  not {verification}: {why}" for verification, why in self.reasons.items()),
            ]
        )


def probe(model: Model, *, num_rows: int = 1) -> Probe:
    """Report how lade verifies drafts of a model, and why better methods are ruled out.

    Runs the self-check of the first generation, unless that has already been run.

    Args:
        model: a transformers causal LM.
        num_rows: of the batch to decode. Several rows are assumed to have padding and different
            lengths.

    Raises:
        UnsupportedModelError: the model is an encoder-decoder.
    """
    model = without_compiler(model)
    refuse_encoder_decoder(model)
    config = model.generation_config
    cache: CacheKind = "static" if config.cache_implementation == "static" else "dynamic"
    excluded: dict[Verification, str] = {}
    if config.use_cache is False:
        cache, excluded = "none", dict(WITHOUT_CACHE)
    with torch.no_grad():
        chosen = choose_verification(model, num_rows=num_rows, cache=cache, excluded=excluded)
    attention = chosen.attention or attention_of(model)
    return Probe(
        type(model).__name__, chosen.verification, attention, chosen.reasons, chosen.execution
    )


def recheck(model: Model, *, num_rows: int = 1) -> Probe:
    """Forget what lade knows about a model, check it again, and report the result.

    A model that was quantized, moved, hooked, patched or given adapters is checked again
    automatically, and calls prove what cannot be seen. Call this to have a method back that was
    ruled out for a state that the model is no longer in.

    Args:
        model: a transformers causal LM.
        num_rows: as for `probe`.

    Raises:
        UnsupportedModelError: the model is an encoder-decoder.
    """
    Profiles.of(without_compiler(model)).forget()
    return probe(model, num_rows=num_rows)
