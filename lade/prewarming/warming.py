"""`lade.warm_up`: the one-time work for a process and a model, before the first request."""

import torch

from lade.compat import Model, unwrapped
from lade.config import Config
from lade.drafting.successors import compile_kernels as compile_ranks
from lade.forward.linear import compile_kernels as compile_forwards
from lade.forward.linear import kernels
from lade.probing.plan import choose_verification, ready
from lade.probing.profile import computing, profile_of
from lade.probing.rules import refuse_encoder_decoder
from ngram_pool import NGramPool


def warm_up(model: Model | None = None, *, num_rows: int = 1, config: Config | None = None) -> None:
    """Compile or load lade's kernels, and check a model.

    Otherwise the first call does so, in some seconds, or in a minute if no kernel is compiled yet.
    A call with `max_time` never does: it falls back to standard decoding until another call has.

    Compiled code is kept for later processes on a CPU of the same kind, as in an image: beside the
    installed package, in the folder NUMBA_CACHE_DIR, or in the user's cache folder.

    Args:
        model: a transformers causal LM; it is not changed. None to compile kernels alone.
        num_rows: rows of later batches. For calls of a `lade.Batcher`, which run together, pass 2.
        config: settings of later calls.

    Raises:
        UnsupportedModelError: the model is an encoder-decoder, or cannot verify drafts by the
            method that `config` asks for.
        UnsupportedOptionError: the model or its device cannot do what `config` asks for.
    """
    model, config = unwrapped(model), config or Config()
    if model is not None:
        refuse_encoder_decoder(model)
    NGramPool(1)  # which compiles the pool's kernels
    compile_ranks()
    if model is None:
        compile_forwards()
        return
    kernels()
    if config.uses_kernels and config.arithmetic != "model" and config.execution != "static":
        profile_of(model).is_warm = True
        model = computing(model)
    profile = profile_of(model)
    with torch.no_grad():
        for num in {1, num_rows}:
            execution = config.execution or "eager"
            chosen = choose_verification(
                model, config=config, num_rows=num, execution=execution, profile=profile
            )
            ready(chosen, model, profile, uses_kernels=config.uses_kernels)
    profile.is_warm = True
