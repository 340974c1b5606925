"""What a call drafts from, how much of it is verified, and how tokens are chosen."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lade.batch import Batch
from lade.budget.budget import Budget
from lade.drafters.merged import CallPool, Merged, sources_of
from lade.drafters.prediction import Prediction
from lade.drafting.drafter import Drafter, DraftingCall, ForcedTokens
from lade.drafting.sources import PoolDrafter, Source
from lade.drafting.speculator import Speculator
from lade.hf.circumstances import Circumstances
from lade.hf.planning import Planned
from lade.hf.stopping import Outputs
from lade.machine.garbage import without_collection
from lade.prewarming.tables import prewarmed_table_of
from lade.sampling.choice import Choice
from lade.sampling.exact import exact_choice
from lade.sampling.processors import Processors
from lade.sampling.rejection_choice import rejection_choice
from ngram_pool import NGramPool

CallPools = tuple[NGramPool | None, tuple[NGramPool, ...]]  # the one that learns, and the others


class Setup(NamedTuple):
    """What decodes a call, besides its batch and its target."""

    speculator: Speculator
    choice: Choice
    budget: Budget


def set_up(
    seen: Circumstances,
    plan: Planned,
    pools: CallPools,
    batch: Batch,
    outputs: Outputs,
    overlaps: bool,
) -> Setup:
    """Set up what decodes a call.

    Raises:
        LadeError: a drafter cannot draft for this call.
    """
    call, config, device = seen.call, seen.call.config, seen.call.input_ids.device
    samples = bool(call.options.do_sample)
    processors = Processors(call.processors, call.num_rows)
    rngs, choice = None, None
    if samples and config.acceptance == "rejection":
        rngs, choice = rejection_choice(call.num_rows, processors, device, outputs.on_choice)
    drafting = _drafting(seen, plan, pools, rngs)
    sources = _sources(seen, drafting)
    budget = _budget(seen, plan)
    chosen: Choice = choice or exact_choice(
        batch.rows,
        processors,
        samples,
        drafting.vocab_size,
        device,
        outputs.on_choice,
        num_ranked=max(source.num_successors for source in sources),
        ahead=overlaps,
    )
    batch.max_lead = chosen.max_lead
    contexts = _contexts(call.input_ids, call.model_kwargs.get("attention_mask"))
    for row, context in zip(batch.rows, contexts, strict=True):
        row.context = context
    assert plan.target is not None
    grammar = _grammar(seen, drafting.device)
    speculator = Speculator(batch, sources, drafting, budget, plan.target, grammar)
    return Setup(speculator, chosen, budget)


def _drafting(
    seen: Circumstances,
    plan: Planned,
    pools: CallPools,
    rngs: Sequence[np.random.Generator] | None,
) -> DraftingCall:
    """Return the description of the call for drafters."""
    call, target = seen.call, plan.target
    assert target is not None
    limits = (target.max_candidates, call.config.max_candidates)
    max_candidates = min((limit for limit in limits if limit is not None), default=None)
    return DraftingCall(
        model=call.model,
        vocab_size=target.vocab_size,
        max_length=plan.max_length,
        device=target.device,
        num_rows=call.num_rows,
        max_candidates=max_candidates,
        processors=call.processors,
        samples=bool(call.options.do_sample),
        rngs=rngs,
        make_pool_drafter=partial(_pool_drafter, seen, pools, max_candidates),
        record=target.record,
    )


def _pool_drafter(seen: Circumstances, pools: CallPools, max_candidates: int | None) -> Drafter:
    """Return a drafter that uses the pools of the call and the table of its model."""
    learning, layers = pools
    table = prewarmed_table_of(seen.call.model, seen.profile)
    layers = layers if table is None else (*layers, table)
    with without_collection():  # the first pool loads or compiles its kernels
        pool = NGramPool() if learning is None else learning
        return PoolDrafter(pool, max_candidates, layers)


def _sources(seen: Circumstances, drafting: DraftingCall) -> list[Source]:
    """Return the sources of drafts: the user's drafter and a prediction, or else the pools."""
    config, arguments = seen.call.config, seen.call.arguments
    given, prediction = arguments.drafter, arguments.prediction
    if isinstance(prediction, tuple):  # token ids, from `Arguments.checked`
        given = Merged([CallPool() if given is None else given, Prediction(prediction)])
    if given is None:
        return [Source(drafting.make_pool_drafter()).make(drafting)]
    return sources_of(given, drafting, config.strict_drafter)


def _grammar(seen: Circumstances, device: torch.device) -> Source | None:
    """Return the source of the tokens that a logits processor forces, if one foresees any."""
    known = (each for each in seen.call.processors if isinstance(each, ForcedTokens))
    if (grammar := next(known, None)) is None:
        return None
    is_strict = seen.call.config.strict_drafter
    return Source(grammar, what="forced tokens", is_strict=is_strict, device=device)


def _budget(seen: Circumstances, plan: Planned) -> Budget:
    config, options, verification = seen.call.config, seen.call.options, plan.verification
    most_asked = options.prompt_lookup_num_tokens
    limits = [each for each in (config.max_draft_tokens, most_asked) if each is not None]
    asked = min(limits, default=None)
    if config.max_draft_tokens is not None and asked is not None:
        return Budget(fixed=asked)
    temperature = 1.0 if options.temperature is None else options.temperature
    temperature = temperature if options.do_sample else 0.0
    is_fast = verification.is_fast and not (plan.target is not None and plan.target.is_recording)
    costs = seen.profile.step_costs(verification.verification, verification.execution, is_fast)
    return Budget(costs, temperature, asked)


def _contexts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Return each prompt as the drafter sees it: all tokens that are not masked."""
    seen = input_ids >= 0  # negative ids are placeholders of passed embeddings
    if attention_mask is not None:
        # The mask also covers the cache of earlier turns, whose tokens may not have been passed.
        masks = attention_mask[:, attention_mask.shape[1] - input_ids.shape[1] :].bool()
        seen &= masks.to(input_ids.device)
    elif bool(seen.all()):
        return input_ids.tolist()
    return [ids[mask].tolist() for ids, mask in zip(input_ids, seen, strict=True)]
