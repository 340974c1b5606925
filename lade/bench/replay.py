"""Replaying traces: what a drafter would have had accepted, without running a model.

The loop is that of `lade/decoder.py` for one row that takes the recorded tokens for the target's
choices, every step verifying all nodes that it may. One thing differs: a recording knows what the
target found likely along the answer, and not behind tokens that were drafted and rejected. Drafters
that harvest those, too, learn less here than they do live, and so their replayed numbers are too
low. Next file: `replay_report.py`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lade.bench.methods import METHODS
from lade.bench.traces import Trace, Traces
from lade.drafting.drafter import Drafter, num_successors_of
from lade.drafting.drafts import chain
from lade.drafting.pool_drafter import has_table
from lade.drafting.proposer import Proposer
from lade.drafting.successors import MAX_PROMPT_TOKENS, Successors
from lade.stats import DecodeStats, Step
from lade.tree import Tree
from ngram_pool import Draft, SuccessorTable

#: Of a prompt, the last tokens whose successors decoding harvests: the very last, and those before.
NUM_HARVESTED_PROMPT_TOKENS = MAX_PROMPT_TOKENS + 1

_ROW = 0


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


def replayable() -> list[str]:
    """Return the names of all methods whose drafters can be had without a model."""
    return [name for name, info in METHODS.items() if info.drafter is not None]


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
    """Replay all traces with every method and node count, appending to `replays` as they come.

    Each method begins anew with every node count, and goes on from what it has learned in further
    passes, but for those that begin anew with every prompt.

    Args:
        recorded: what to replay.
        methods: of `replayable`.
        node_counts: the greatest numbers of nodes in a draft.
        num_passes: how often to replay all of it.
        prewarmed: the table that `lade.prewarm` made for the target, for methods that use one.
        replays: gets the results.
        on_replay: told of each one.

    Raises:
        ValueError: a drafter wants to know more successors than were recorded.
    """
    for name in methods:
        for max_draft_tokens in node_counts:
            drafter = _make(name, prewarmed)
            _check_successors(name, drafter, recorded)
            for num_pass in range(num_passes):
                for trace in recorded.traces:
                    if METHODS[name].is_fresh:
                        drafter = _make(name, prewarmed)
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
    """Let a drafter draft along one answer; return what would have been accepted.

    Args:
        trace: of `recorded`.
        drafter: is fed the prompt and the answer.
        max_draft_tokens: the most that a draft may have; all that the drafter proposes are
            verified.
        recorded: has the limits of the recording.
        on_step: told of every step after prefill.
    """
    stats = DecodeStats(num_prefills=1)
    proposer = Proposer(drafter, recorded.vocab_size)
    harvests = proposer.num_successors > 0
    token_ids, num_prompt = trace.token_ids, trace.num_prompt_tokens
    max_length = num_prompt + recorded.max_new_tokens
    committed = token_ids[:num_prompt]
    try:
        proposer.open(_ROW, committed)
        committed.append(token_ids[num_prompt])  # the prefill's
        proposer.observe(_ROW, committed[-1:])
        if harvests:
            num_harvested = 1 if has_table(drafter) else NUM_HARVESTED_PROMPT_TOKENS
            _harvest(proposer, trace, max(0, num_prompt - num_harvested), num_prompt - 1)
            _harvest(proposer, trace, num_prompt - 1, num_prompt)
        while (length := len(committed)) < len(token_ids):
            with stats.timed("draft"):
                room = max_length - length - 1
                draft = proposer.propose(_ROW, committed, committed, room, max_draft_tokens)
            step = _verified(draft, token_ids, length)
            with stats.timed("commit"):
                committed += step.token_ids
                proposer.observe(_ROW, step.token_ids)
                if harvests:  # the root and what was accepted
                    _harvest(proposer, trace, length - 1, length + step.num_accepted)
            stats.num_steps += 1
            stats.count_row_step(step)
            on_step(step)
    finally:
        proposer.close_all()
    return stats


def _verified(draft: Draft, token_ids: Sequence[int], length: int) -> Step:
    """Walk down a draft along the answer; `length` tokens of it are committed."""
    parents = draft.parents.tolist()
    children = {
        place: node
        for node, place in enumerate(zip(parents, draft.token_ids.tolist(), strict=True))
    }
    node, stop = -1, length
    while stop < len(token_ids):
        child = children.get((node, token_ids[stop]))
        stop += 1
        if child is None:  # the bonus token
            emitted = [*token_ids[length:stop]]
            return Step(emitted, len(draft), len(emitted) - 1, is_corrected=node in parents)
        node = child
    emitted = [*token_ids[length:]]  # the answer ends on a draft token
    return Step(emitted, len(draft), len(emitted))


def _harvest(proposer: Proposer, trace: Trace, start: int, stop: int) -> None:
    """Tell the drafter of tokens `start` up to `stop` of a trace, all run in one forward."""
    if start == stop:
        return
    tree = Tree.build(trace.token_ids[start], chain(trace.token_ids[start + 1 : stop]))
    known = trace.successors
    num_successors = proposer.num_successors
    successors = Successors(
        known.token_ids[start:stop, :num_successors], known.probs[start:stop, :num_successors]
    )
    proposer.harvest(_ROW, trace.token_ids[: start + 1], tree, successors)


def _make(name: str, prewarmed: SuccessorTable | None) -> Drafter:
    make = METHODS[name].drafter
    assert make is not None
    return make(prewarmed)


def _check_successors(name: str, drafter: Drafter, recorded: Traces) -> None:
    """Raise if the drafter wants more of the target's likeliest tokens than are known."""
    wanted = num_successors_of(drafter)
    known = recorded.num_successors
    if wanted > known and known < recorded.vocab_size:
        raise ValueError(
            f"expected traces with {wanted} successors or more for {name} (bench record "
            f"--num-successors {wanted}), got {known}"
        )
