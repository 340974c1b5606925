"""The decoding loop: read this first. One step is draft, tree, forward, verify, commit.

    prompt -> pool -> draft -> tree -> forward -> verify -> commit -> pool ...

Nothing here knows of generation options; `hf.py` translates those. Next file: `drafting.py`.
"""

from collections.abc import Callable, Sequence

import numpy as np

from lade.budget import Budget
from lade.choose import Choice
from lade.drafting import Drafter
from lade.stats import DecodeStats, Step
from lade.target import Target
from lade.tree import Tree
from lade.verify import accepted_path
from ngram_pool import Draft


def decode_row(
    prompt_ids: Sequence[int],
    target: Target,
    drafter: Drafter,
    choice: Choice,
    budget: Budget,
    max_length: int,
    is_finished: Callable[[list[int]], bool],
    on_step: Callable[[Step], None],
) -> tuple[list[int], DecodeStats]:
    """Decode one sequence to its end.

    Args:
        prompt_ids: at least one token.
        target: a model set up for this prompt, not yet run.
        drafter: proposes; is fed the prompt first and every committed token after.
        choice: the target's own token at a node.
        budget: how many nodes to verify.
        max_length: no draft reaches beyond so many tokens in all, prompt included; beyond them, and
            to end there is for `is_finished` to say, steps go on without a draft.
        is_finished: asked after every single token, with prompt and emitted tokens.
        on_step: told of every step after its commit, the prefill included.

    Returns:
        All committed tokens, prompt included, and the counts and times.
    """
    stats = DecodeStats(num_prefills=1)
    committed = list(prompt_ids)
    sequence = drafter.open(prompt_ids)

    def verify_and_commit(tree: Tree) -> tuple[Step, bool]:
        """Emit the accepted path and the bonus token, or as much as a stop condition lets pass."""
        nodes: list[int] = []
        finished = False
        with stats.timed("verify"):
            for node, token_id in accepted_path(tree, choice, committed):
                nodes.append(node)
                committed.append(token_id)
                if finished := is_finished(committed):
                    break
        with stats.timed("commit"):
            emitted = committed[-len(nodes) :]
            target.commit(nodes)
            drafter.observe(sequence, emitted)
        # A path that was cut may end on a draft token; otherwise its last one is the bonus token.
        ends_on_draft = (nodes[-1], emitted[-1]) in tree.children
        return Step(emitted, len(tree) - 1, len(emitted) - (not ends_on_draft)), finished

    try:
        with stats.timed("prefill"):
            choice.look_at(target.prefill())
        # The prompt's last token is the root of a first tree, one without a draft.
        step, finished = verify_and_commit(Tree.build(committed[-1], Draft.empty(), target.device))
        on_step(step)
        while not finished:
            with stats.timed("draft"):
                proposed = _propose(
                    drafter, sequence, committed, budget.max_nodes, max_length, target.vocab_size
                )
                draft = proposed.first(budget.num_nodes(proposed.probs.tolist()))
                tree = Tree.build(committed[-1], draft, target.device)
                inputs = target.inputs(tree)
            with stats.timed("forward") as forward:
                choice.look_at(target.forward(inputs))
            step, finished = verify_and_commit(tree)
            with stats.timed("commit"):
                stats.count_step(step)
                guesses = proposed.depths == 1
                budget.record(
                    num_nodes=len(draft),
                    forward_sec=forward.sec,
                    expected=float(proposed.probs[guesses].sum()),
                    came=bool((proposed.token_ids[guesses] == step.token_ids[0]).any()),
                )
            on_step(step)
        return committed, stats
    finally:
        drafter.close(sequence)


def _propose(
    drafter: Drafter,
    sequence: int,
    committed: Sequence[int],
    max_nodes: int,
    max_length: int,
    vocab_size: int,
) -> Draft:
    """Ask for a draft, and cut it before the first node that the target cannot run.

    That is one beyond the longest text, or, from a pool that learned from another model's text, a
    token that this model does not have.
    """
    room = max_length - len(committed) - 1  # the bonus token needs one place more
    if room < 1 or max_nodes < 1:
        return Draft.empty()
    draft = drafter.draft(sequence, committed, max_nodes)
    impossible = np.flatnonzero((draft.depths > room) | (draft.token_ids >= vocab_size))
    return draft.first(int(impossible[0])) if len(impossible) else draft
