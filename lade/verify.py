"""Walk down draft trees along the target's own choices."""

from collections.abc import Mapping, Sequence

from lade.batch import Batch
from lade.sampling.choice import Choice
from lade.stats import Step
from lade.tree import ROOT, Tree


def accepted_paths(trees: Mapping[int, Tree], choice: Choice, batch: Batch) -> dict[int, list[int]]:
    """Emit the target's choices down each tree, as long as the draft contains them.

    Each round emits one token in every row still walking, then asks which rows are finished. A
    row's last token is the bonus token, which is not in the draft at that node, unless the row was
    stopped before.

    Args:
        trees: trees by row, ascending.
        choice: the choice, which has looked at the step's logits.
        batch: the batch, whose text grows by the emitted tokens.

    Returns:
        For each row the nodes at which tokens were emitted, in order from the root.
    """
    paths: dict[int, list[int]] = {row: [] for row in trees}
    walking = {row: ROOT for row in trees if batch.may_emit(row)}
    while walking:
        asked, next_nodes = [*walking.items()], {}
        for (row, node), token_id in zip(asked, choice.tokens_at(asked), strict=True):
            batch.text.append(row, token_id)
            paths[row].append(node)
            child = trees[row].children.get((node, token_id))
            if child is not None:
                next_nodes[row] = child
        batch.limits.stop([*walking])
        walking = {}
        for row, node in next_nodes.items():
            if batch.may_emit(row):
                walking[row] = node
    return paths


def step_of(row: int, tree: Tree, path: Sequence[int], emitted: list[int]) -> Step:
    """Return the `Step` of a row that emitted tokens along a path of its tree."""
    # A stopped row may end on a draft token; otherwise its last token is the bonus token.
    last = len(emitted) - 1
    ends_on_draft = (path[last], emitted[last]) in tree.children
    return Step(emitted, len(tree) - 1, last + ends_on_draft, row)
