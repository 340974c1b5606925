"""What a call drafts from, how much of it is verified, and how tokens are chosen."""

from functools import partial

from torch import Tensor

from lade.batch import Batch
from lade.budget.budget import Budget
from lade.drafters.merged import CallPool, Merged, sources_of
from lade.drafters.prediction import Prediction
from lade.drafting.drafter import Drafter, DraftingCall, ForcedTokens
from lade.drafting.sources import PoolDrafter, Source
from lade.drafting.speculator import Speculator
from lade.hf.call import Call
from lade.hf.stopping import Outputs
from lade.machine.garbage import without_collection
from lade.probing.rules import longest_draft
from lade.sampling.choice import Choice
from lade.sampling.exact import exact_choice
from lade.sampling.processors import Processors
from lade.sampling.rejection_choice import rejection_choice
from lade.targets.base import Target
from ngram_pool import NGramPool

CallPools = tuple[NGramPool | None, tuple[NGramPool, ...]]  # the one that learns, and the others


def set_up(
    call: Call, target: Target, pools: CallPools, batch: Batch, outputs: Outputs, overlaps: bool
) -> tuple[Speculator, Choice]:
    """Return what drafts for a call, and what chooses its tokens.

    Raises:
        LadeError: a drafter cannot draft for this call.
    """
    config, device, samples = call.config, call.input_ids.device, bool(call.options.do_sample)
    processors = Processors(call.processors, call.num_rows)
    rngs, chosen = None, None
    if samples and config.acceptance == "rejection":
        rngs, chosen = rejection_choice(call.num_rows, processors, device, outputs.on_choice)
    limits = (target.max_candidates, config.max_candidates)
    max_candidates = min((limit for limit in limits if limit is not None), default=None)
    drafting = DraftingCall(
        model=call.model,
        vocab_size=target.vocab_size,
        max_length=longest_draft(call.model, call.input_ids.shape[1], call.lengths),
        device=target.device,
        num_rows=call.num_rows,
        max_candidates=max_candidates,
        processors=call.processors,
        samples=samples,
        rngs=rngs,
        make_pool_drafter=partial(_pool_drafter, call, pools, max_candidates),
        record=target.record,
    )
    sources = _sources(call, drafting)
    choice: Choice = chosen or exact_choice(
        batch.rows,
        processors,
        samples,
        drafting.vocab_size,
        device,
        outputs.on_choice,
        num_ranked=max(source.num_successors for source in sources),
        ahead=overlaps,
    )
    batch.max_lead = choice.max_lead
    contexts = _contexts(call.input_ids, call.model_kwargs.get("attention_mask"))
    for row, context in zip(batch.rows, contexts, strict=True):
        row.context = context
    grammar, budget = _grammar(call, drafting), _budget(call, target)
    return Speculator(batch, sources, drafting, budget, target, grammar), choice


def _pool_drafter(call: Call, pools: CallPools, max_candidates: int | None) -> Drafter:
    """Return a drafter that uses the pools of the call and the table of its model."""
    learning, layers = pools
    if (table := call.profile.table_of(call.model)) is not None:
        layers = (*layers, table.pool)
    with without_collection():  # the first pool loads or compiles its kernels
        pool = NGramPool() if learning is None else learning
        return PoolDrafter(pool, max_candidates, layers)


def _sources(call: Call, drafting: DraftingCall) -> list[Source]:
    """Return the sources of drafts: the user's drafter and a prediction, or else the pools."""
    given, prediction = call.arguments.drafter, call.arguments.prediction
    given = CallPool() if given is None else given
    if isinstance(prediction, tuple):  # token ids, from `Arguments.checked`
        given = Merged([given, Prediction(prediction)])
    return sources_of(given, drafting, call.config.strict_drafter)


def _grammar(call: Call, drafting: DraftingCall) -> Source | None:
    """Return the source of the tokens that a logits processor forces, if one foresees any."""
    known = (each for each in call.processors if isinstance(each, ForcedTokens))
    if (grammar := next(known, None)) is None:
        return None
    return Source(grammar, type(grammar).__name__, drafting, call.config.strict_drafter)


def _budget(call: Call, target: Target) -> Budget:
    """Return what decides how many draft tokens a step verifies, within the user's limit."""
    config, options = call.config, call.options
    limits = (config.max_draft_tokens, options.prompt_lookup_num_tokens)
    limit = min((each for each in limits if each is not None), default=None)
    if config.max_draft_tokens is not None:
        return Budget(fixed=limit)
    temperature = 1.0 if options.temperature is None else options.temperature
    temperature = temperature if options.do_sample else 0.0
    costs = call.profile.step_costs(target.verification, target.execution, target.is_fast)
    return Budget(costs, temperature, limit)


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
