"""Hold drafts against the target's own choices."""

from collections.abc import Callable, Mapping

from lade.batch import Text
from lade.sampling.choice import Choice
from lade.tree import ROOT, Tree

PADDING = -1  # what is given to a row that gets its padding token whatever it is given


def accepted_paths(
    trees: Mapping[int, Tree],
    choice: Choice,
    text: Text,
    may_emit: Callable[[int], bool],
    must_choose: Callable[[int], bool],
    stop: Callable[[list[int]], None],
    is_joint: bool,
) -> dict[int, list[int]]:
    """Walk down each tree along the target's choices, as far as the draft has them, and commit.

    Each round emits one token in every row that still walks. The last token of a row is the bonus
    token, which the draft did not have there, unless the row was stopped before.

    Args:
        trees: by row, ascending.
        choice: has looked at the step's logits.
        text: grows by the emitted tokens.
        may_emit: whether a row may emit one more token now.
        must_choose: whether the choice is to be asked for a row's token, though it be padding.
        stop: marks rows of `text` as finished; told after every round which rows emitted.
        is_joint: whether all rows must emit together; then the first that leaves its draft ends the
            walk of all.

    Returns:
        For each tree the nodes at which tokens were emitted, in order from the root.
    """
    paths: dict[int, list[int]] = {row: [] for row in trees}
    walking = {row: ROOT for row in trees if may_emit(row)}
    while walking and not (is_joint and len(walking) < len(trees)):
        asked = [place for place in walking.items() if must_choose(place[0])]
        chosen = dict(zip(asked, choice.tokens_at(asked), strict=True)) if asked else {}
        next_nodes = {}
        for row, node in walking.items():
            token_id = text.append(row, chosen.get((row, node), PADDING))
            paths[row].append(node)
            child = trees[row].children.get((node, token_id))
            if child is not None:
                next_nodes[row] = child
        stop([*walking])
        walking = {row: node for row, node in next_nodes.items() if may_emit(row)}
    return paths
