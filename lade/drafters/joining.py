"""Joining the drafts of several sources to one tree."""

from collections.abc import Sequence

from lade.drafting.drafts import draft_of
from ngram_pool import Draft


def joined(drafts: Sequence[Draft], max_nodes: int) -> Draft:
    """Return one draft, best nodes first, out of several: equal tokens on equal paths are one node.

    Given its parent, a node comes unless all sources that propose it are wrong, as if they were
    wrong independently; siblings come with a probability of at most 1 together. Of simulated
    sources, that is off by 0.1 to 0.2 where sources err together; the budget, which calibrates
    joined drafts as it does all others, learns by how much.
    """
    if len(drafts) == 1:
        return drafts[0].first(max_nodes)
    places: dict[tuple[int, int], int] = {}  # of a parent's place and a token
    misses: list[float] = []  # probability that all sources are wrong, given the parent
    for draft in drafts:
        nodes = zip(
            draft.parents.tolist(), draft.token_ids.tolist(), draft.probs.tolist(), strict=True
        )
        mine = [(-1, 1.0)]  # place and probability of the root and of each node, at node + 1
        for parent, token_id, prob in nodes:
            above, most = mine[parent + 1]
            place = places.setdefault((above, token_id), len(places))
            if place == len(misses):
                misses.append(1.0)
            misses[place] *= 1.0 - min(1.0, prob / most if most > 0 else 0.0)
            mine.append((place, prob))
    sums = [0.0] * (1 + len(places))  # of siblings, by parent
    for (above, _), miss in zip(places, misses, strict=True):
        sums[above + 1] += 1.0 - miss
    probs = [1.0]  # the root's, then of each place
    for (above, _), miss in zip(places, misses, strict=True):
        probs.append(probs[above + 1] * (1.0 - miss) / max(1.0, sums[above + 1]))
    keys = [*places]
    # Of equals, parents stay first.
    order = sorted(range(len(keys)), key=lambda place: -probs[place + 1])[:max_nodes]
    new_place = {-1: -1} | {place: node for node, place in enumerate(order)}
    return draft_of(
        [keys[place][1] for place in order],
        [new_place[keys[place][0]] for place in order],
        [probs[place + 1] for place in order],
    )
