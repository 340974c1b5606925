"""Hold a draft against the target's own choices.

Next file: `budget.py`.
"""

from collections.abc import Iterator

from lade.choose import Choice
from lade.tree import ROOT, Tree


def accepted_path(tree: Tree, choice: Choice, committed: list[int]) -> Iterator[tuple[int, int]]:
    """Walk down from the root along the target's choices, as far as the draft has them.

    Yields (node, token id): the token the target emits at that node. All but the last are draft
    tokens that were accepted; the last is the bonus token, which the draft did not have there. The
    caller appends each token to `committed` before it asks for the next, and may stop at any.
    """
    node: int | None = ROOT
    while node is not None:
        token_id = choice.token_at(node, committed)
        yield node, token_id
        node = tree.children.get((node, token_id))
