"""Replay traces: what a drafter would have had accepted, without running a model.

The loop is that of `lade/decoder.py` for one row, with the recorded tokens as the target's choices
and every step verifying as many nodes as it may. One thing differs: a recording has the target's
successors along the answer, but not after draft tokens that were rejected. Drafters that harvest
those too learn less here than live, so their replayed numbers are too low. Next file:
`points.py`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.methods import METHODS
from benchmarks.points import as_json, points, table
from benchmarks.rivals.catalogue import RIVALS
from benchmarks.traces import Trace, Traces, read_traces
from lade.batch import Batch, Limits, Text
from lade.budget.budget import Budget
from lade.cli.bench import fingerprint
from lade.cli.results import Keeping, ResultFiles, progress_bar
from lade.drafting.drafter import Drafter
from lade.drafting.drafts import chain
from lade.drafting.pool_drafter import PoolDrafter
from lade.drafting.speculator import Speculator
from lade.drafting.successors import Successors, num_prompt_tokens
from lade.prewarming.tables import load_table
from lade.stats import DecodeStats, Step
from lade.tree import Tree
from ngram_pool import Draft, NGramPool, SuccessorTable

_ROW = 0


def _pool(prewarmed: SuccessorTable | None) -> Drafter:
    return PoolDrafter(NGramPool(seed=0), prewarmed=prewarmed)


#: By name, what makes the drafter of a method, given the prewarmed table if there is one. Only
#: methods whose drafters work without a model are here.
DRAFTERS: dict[str, Callable[[SuccessorTable | None], Drafter]] = {
    "lade": _pool,
    "lade_fresh": _pool,
    "lade_untabled": lambda prewarmed: _pool(None),
    **{
        name: lambda prewarmed, rival=rival: rival.make_drafter()  # type: ignore[misc]
        for name, rival in RIVALS.items()
    },
}
_FRESH = "lade_fresh"  # starts afresh with every prompt


class Replay(NamedTuple):
    """One trace replayed with one method."""

    trace: Trace
    method: str
    max_draft_tokens: int
    num_pass: int
    stats: DecodeStats

    @property
    def category(self) -> str:
        """The category of the prompt."""
        return self.trace.category

    @property
    def loops(self) -> bool:
        """Whether the answer ends in a loop."""
        return self.trace.loops


def replay(
    recorded: Traces,
    methods: Sequence[str],
    node_counts: Sequence[int],
    *,
    num_passes: int = 1,
    prewarmed: SuccessorTable | None = None,
    replays: list[Replay],
    on_replay: Callable[[Replay], None] = lambda replay: None,
) -> None:
    """Replay all traces with every method and draft size, appending to `replays`.

    Each method starts afresh with every draft size and keeps what it has learned from pass to pass,
    except for `lade_fresh`.

    Raises:
        ValueError: a drafter needs more successors than were recorded.
    """
    for name in methods:
        for max_draft_tokens in node_counts:
            drafter = DRAFTERS[name](prewarmed)
            _check_successors(name, drafter, recorded)
            for num_pass in range(num_passes):
                for trace in recorded.traces:
                    if name == _FRESH:
                        drafter = DRAFTERS[name](prewarmed)
                    stats = replay_trace(trace, drafter, max_draft_tokens, recorded)
                    replays.append(Replay(trace, name, max_draft_tokens, num_pass, stats))
                    on_replay(replays[-1])


def replay_trace(
    trace: Trace,
    drafter: Drafter,
    max_draft_tokens: int,
    recorded: Traces,
    on_step: Callable[[Step], None] = lambda step: None,
) -> DecodeStats:
    """Draft along one recorded answer; return what would have been accepted."""
    stats = DecodeStats(num_prefills=1)
    token_ids, num_prompt = trace.token_ids, trace.num_prompt_tokens
    max_length = num_prompt + recorded.max_new_tokens
    text = Text(torch.tensor([token_ids[:num_prompt]]), None)
    limits = Limits(max_length, stop=lambda rows: None)
    batch = Batch(text, [token_ids[:num_prompt]], limits)
    (committed,) = text.token_ids
    speculator = Speculator.alone(batch, drafter, Budget(fixed=max_draft_tokens), recorded)
    harvests = speculator.num_successors > 0
    try:
        speculator.open_all()
        committed.append(token_ids[num_prompt])  # the prefill's
        speculator.observe(_ROW, committed[-1:])
        if harvests:
            # The very last one besides, as in decoding.
            num_before = 0 if speculator.has_table else num_prompt_tokens(recorded.max_new_tokens)
            num_harvested = num_before + 1
            _harvest(speculator, trace, max(0, num_prompt - num_harvested), num_prompt - 1)
            _harvest(speculator, trace, num_prompt - 1, num_prompt)
        while (length := len(committed)) < len(token_ids):
            with stats.timed("draft"):
                draft = speculator.propose(_ROW, max_draft_tokens)
            step = _verified(draft, token_ids, length)
            with stats.timed("commit"):
                committed += step.token_ids
                speculator.observe(_ROW, step.token_ids)
                if harvests:  # the root and what was accepted
                    _harvest(speculator, trace, length - 1, length + step.num_accepted)
            stats.num_steps += 1
            stats.count_row_step(step)
            on_step(step)
    finally:
        speculator.close_all()
    return stats


def _verified(draft: Draft, token_ids: Sequence[int], length: int) -> Step:
    """Verify a draft against the recorded text, of which `length` tokens are committed."""
    places = zip(draft.parents.tolist(), draft.token_ids.tolist(), strict=True)
    children = {place: node for node, place in enumerate(places)}
    node, stop = -1, length
    while stop < len(token_ids):
        child = children.get((node, token_ids[stop]))
        stop += 1
        if child is None:  # the bonus token
            emitted = [*token_ids[length:stop]]
            return Step(emitted, len(draft), len(emitted) - 1)
        node = child
    emitted = [*token_ids[length:]]  # the answer ends on a draft token
    return Step(emitted, len(draft), len(emitted))


def _harvest(speculator: Speculator, trace: Trace, start: int, stop: int) -> None:
    """Feed the successors at tokens `start` up to `stop` of a trace, as if run in one forward."""
    if start == stop:
        return
    tree = Tree.build(trace.token_ids[start], chain(trace.token_ids[start + 1 : stop]))
    known = trace.successors
    num_successors = speculator.num_successors
    successors = Successors(
        known.token_ids[start:stop, :num_successors], known.probs[start:stop, :num_successors]
    )
    speculator.harvest(_ROW, trace.token_ids[: start + 1], tree, successors)


def _check_successors(name: str, drafter: Drafter, recorded: Traces) -> None:
    """Raise if the drafter needs more successors than were recorded."""
    wanted = drafter.num_successors
    known = recorded.num_successors
    if wanted > known and known < recorded.vocab_size:
        raise ValueError(
            f"expected traces with {wanted} successors or more for {name}, got {known}"
        )


def run(
    traces_path: Path,
    methods: Sequence[str],
    draft_sizes: Sequence[int],
    num_passes: int,
    table_path: Path | None,
    files: ResultFiles,
) -> None:
    """Replay traces; print and write the results, even after an interruption."""
    recorded = read_traces(traces_path)
    prewarmed = None if table_path is None else load_table(table_path, recorded.vocab_size)
    num_replays = len(methods) * len(draft_sizes) * num_passes * len(recorded.traces)
    replays: list[Replay] = []
    with Keeping(replays) as kept, progress_bar() as bars:
        task = bars.add_task("replaying", total=num_replays)
        replay(
            *(recorded, methods, draft_sizes),
            num_passes=num_passes,
            prewarmed=prewarmed,
            replays=replays,
            on_replay=lambda each: bars.advance(task),
        )
    described = {
        "traces": {**fingerprint(traces_path), "num": len(recorded.traces)},
        "recorded": {"settings": recorded.settings, "environment": recorded.environment},
        "methods": {name: METHODS[name].description for name in methods},
        "max_draft_tokens": [*draft_sizes],
        "passes": num_passes,
        "num_table_contexts": None if prewarmed is None else len(prewarmed),
        "interrupted": kept.by is not None,
    }
    measured = points(replays)
    caption = "Drafters that learn from the logits of rejected tokens do better live than here."
    files.show(as_json(measured, described), table(measured, caption))
    kept.end(f"stopped after {len(replays)} of {num_replays} replays")
