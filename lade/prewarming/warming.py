"""`lade.warm_up`: what lade does once for a process and a model, before the first request."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lade.budget.seconds import compile_kernels as compile_budgets
from lade.compat import Model, without_compiler
from lade.config import Config
from lade.drafting.successors import compile_kernels as compile_ranks
from lade.forward.linear import kernels as compile_forwards
from lade.gpu.policy import DevicePolicy
from lade.probing.plan import choose_verification, execution_of
from lade.probing.profile import profile_of
from lade.probing.rules import refuse_encoder_decoder
from lade.probing.selfcheck import with_fast_views
from ngram_pool import NGramPool


def warm_up(model: Model, *, num_rows: int = 1, config: Config | None = None) -> None:
    """Compile or load lade's kernels, and check a model.

    The first call does so otherwise, for some seconds, or a minute where nothing is compiled yet; a
    call with `max_time` never does, and is decoded plainly until another call has.

    Args:
        model: a transformers causal LM; it is left as it was.
        num_rows: of the batches to come. For calls of a `lade.Batcher`, which run together, pass 2.
        config: of the calls to come.

    Raises:
        UnsupportedModelError: the model is an encoder-decoder, or cannot verify drafts by the
            method that `config` asks for.
        UnsupportedOptionError: `config` asks for what the model or its device cannot do.
    """
    model, config = without_compiler(model), config or Config()
    refuse_encoder_decoder(model)
    for compile_part in kernels().values():
        compile_part()
    profile = profile_of(model)
    execution = execution_of(model, config, DevicePolicy())
    with torch.no_grad():
        for num in {1, num_rows}:
            chosen = choose_verification(
                model, config=config, num_rows=num, execution=execution, profile=profile
            )
            if config.uses_kernels and not config.stable_text:
                with_fast_views(chosen, model, profile)
    profile.is_warm = True


def kernels() -> Mapping[str, Callable[[], Any]]:
    """Return functions that compile the kernels of all models, or load them, by what these are."""
    return {
        "the pool": lambda: NGramPool(1),
        "the ranks of tokens": compile_ranks,
        "budgets": compile_budgets,
        "forwards": compile_forwards,
    }
