"""What lade finds out about a model, told."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lade.compat import Model, attention_of, device_of_inputs, without_compiler
from lade.config import Execution, Verification
from lade.gpu.policy import DevicePolicy
from lade.probing.plan import WITHOUT_CACHE, choose_verification
from lade.probing.profile import CacheKind, Profiles
from lade.probing.rules import refuse_encoder_decoder


@dataclass(frozen=True, slots=True)
class Probe:
    """What `lade.probe` found."""

    model: str  #: the model's class
    verification: Verification  #: how drafts are verified
    attention: str | None  #: the implementation that drafts are verified with
    reasons: Mapping[Verification, str]  #: why each better one fell out
    execution: Execution = "eager"  #: of the forwards that verify drafts

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
    """Tell how lade verifies drafts of a model, and why in no better way.

    Runs the self-check that the first generation would run, unless it has been run.

    Args:
        model: a transformers causal LM.
        num_rows: of the batch to decode. More than one are taken to have padding and different
            lengths, and one with padding is taken for more than one.

    Raises:
        UnsupportedModelError: it is an encoder-decoder.
    """
    model = without_compiler(model)
    refuse_encoder_decoder(model)
    config = model.generation_config
    cache: CacheKind = "static" if config.cache_implementation == "static" else "dynamic"
    excluded: dict[Verification, str] = {}
    if config.use_cache is False:
        cache, excluded = "none", dict(WITHOUT_CACHE)
    with torch.no_grad():
        chosen = choose_verification(
            model,
            is_padded=num_rows > 1,
            cache=cache,
            excluded=excluded,
            execution=DevicePolicy().execution(device_of_inputs(model)),
        )
    attention = chosen.attention or attention_of(model)
    return Probe(
        type(model).__name__, chosen.verification, attention, chosen.reasons, chosen.execution
    )


def recheck(model: Model, *, num_rows: int = 1) -> Probe:
    """Forget what lade knows of a model, check it anew, and tell what is found.

    A model that was quantized, moved, hooked or given adapters is checked anew by itself. Call this
    after a change that cannot be seen from outside, as a method edited in place or a plain
    attribute of a layer set to another value.

    Args:
        model: a transformers causal LM.
        num_rows: as of `probe`.

    Raises:
        UnsupportedModelError: it is an encoder-decoder.
    """
    Profiles.of(without_compiler(model)).forget()
    return probe(model, num_rows=num_rows)
