"""Hold drafts against the target's own choices."""

from collections.abc import Mapping, Sequence

from lade.batch import Batch
from lade.sampling.choice import Choice
from lade.stats import Step
from lade.tree import ROOT, Tree

PADDING = -1  # what is given to a row that gets its padding token whatever it is given


def accepted_paths(trees: Mapping[int, Tree], choice: Choice, batch: Batch) -> dict[int, list[int]]:
    """Walk down each tree along the target's choices, as far as the draft has them, and emit.

    Each round emits one token in every row that still walks, and then asks which rows are finished.
    The last token of a row is the bonus token, which the draft did not have there, unless the row
    was stopped before. In lockstep, the first row that leaves its draft ends the walk of all.

    Args:
        trees: by row, ascending.
        choice: has looked at the step's logits.
        batch: its text grows by the emitted tokens.

    Returns:
        For each tree the nodes at which tokens were emitted, in order from the root.
    """
    paths: dict[int, list[int]] = {row: [] for row in trees}
    walking = {row: ROOT for row in trees if batch.may_emit(row)}
    while walking and not (batch.limits.is_lockstep and len(walking) < len(trees)):
        asked = [place for place in walking.items() if batch.must_choose(place[0])]
        chosen = dict(zip(asked, choice.tokens_at(asked), strict=True)) if asked else {}
        next_nodes = {}
        for row, node in walking.items():
            token_id = batch.text.append(row, chosen.get((row, node), PADDING))
            paths[row].append(node)
            child = trees[row].children.get((node, token_id))
            if child is not None:
                next_nodes[row] = child
        batch.limits.stop([*walking])
        walking = {row: node for row, node in next_nodes.items() if batch.may_emit(row)}
    return paths


def step_of(row: int, tree: Tree, path: Sequence[int], emitted: list[int]) -> Step:
    """Count what a step did for a row that emitted tokens along a path of its tree."""
    # A row that was stopped may end on a draft token; otherwise its last one is the bonus token.
    last = len(emitted) - 1
    ends_on_draft = (path[last], emitted[last]) in tree.children
    is_corrected = not ends_on_draft and path[last] - 1 in tree.draft.parents
    return Step(emitted, len(tree) - 1, last + ends_on_draft, row, is_corrected)
