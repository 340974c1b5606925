"""The pool and rejection sampling again: slow, plain Python, obvious. Shares only constants."""

import math
from collections.abc import Iterable, Sequence

from ngram_pool import Draft, _kernels


class OraclePool:
    """Keeps the newest `capacity` arrivals and searches them from end to end."""

    def __init__(self, capacity: int, max_ngram_size: int) -> None:
        self.capacity = capacity
        self.max_ngram_size = max_ngram_size
        self.arrivals: list[tuple[int, int]] = []  # (sequence, token id)
        self.open: dict[int, int] = {0: 0}  # handle -> a number no other sequence ever had
        self.num_sequences = 1

    def open_sequence(self, handle: int) -> None:
        self.open[handle] = self.num_sequences
        self.num_sequences += 1

    def close_sequence(self, handle: int) -> None:
        del self.open[handle]
        if handle == 0:
            self.open_sequence(0)

    def observe(self, token_ids: Sequence[int], handle: int = 0) -> None:
        self.arrivals += [(self.open[handle], token_id) for token_id in token_ids]

    def held(self) -> list[tuple[int, int]]:
        return self.arrivals[-self.capacity :]

    def occurrences(self, context: Sequence[int]) -> list[tuple[int, int, int]]:
        """(arrival of its last token, length of the match, token that followed), newest first."""
        found = []
        sequences: dict[int, list[tuple[int, int]]] = {}
        for arrival, (sequence, token_id) in enumerate(self.held()):
            sequences.setdefault(sequence, []).append((arrival, token_id))
        for held in sequences.values():
            tokens = [token_id for _, token_id in held]
            for end in range(1, len(tokens)):
                length = 0
                while length < min(len(context), end) and (
                    tokens[end - 1 - length] == context[-1 - length]
                ):
                    length += 1
                found.append((held[end - 1][0], length, tokens[end]))
        return sorted(found, reverse=True)

    def successors(self, context: Sequence[int], path_prob: float) -> dict[int, float]:
        n = self.max_ngram_size
        limit, reach = _kernels.MAX_OCCURRENCES, max(_kernels.MAX_MATCH, n)
        if path_prob <= _kernels.UNLIKELY:
            limit, reach = limit // 2, n
        occurrences = self.occurrences(context[-reach:])
        counts: dict[int, int] = {}
        probs: dict[int, float] = {}
        mass_left = 1.0
        num_read = num_counted = 0
        for order in range(min(n, len(context)), 0, -1):
            # Of order N are all that match at least so far, of a shorter one just its length.
            read = [(m, t) for _, m, t in occurrences if m == order or (order == n and m > n)]
            read = read[: limit - num_read]
            num_read += len(read)
            for length in sorted({m for m, _ in read}, reverse=True):
                known = set(counts)
                for token_id in [t for m, t in read if m == length]:
                    counts[token_id] = counts.get(token_id, 0) + 1
                    num_counted += 1
                added = [token_id for token_id in counts if token_id not in known]
                if not known:
                    mass_left = self.escape_prob(length, len(counts), num_counted)
                    for token_id in added:
                        probs[token_id] = (1.0 - mass_left) * counts[token_id] / num_counted
                else:
                    share = _kernels._BACKOFF_SHARE * mass_left
                    for token_id in added:
                        probs[token_id] = share * counts[token_id] / num_counted
                        mass_left -= probs[token_id]
            if counts and (num_read == limit or mass_left * path_prob < _kernels.READ_ON):
                break
        return probs

    @staticmethod
    def escape_prob(length: int, num_successors: int, num_occurrences: int) -> float:
        if num_successors > 1:
            share = [*_kernels._ESCAPE_DIVIDED, *[_kernels._ESCAPE_DIVIDED[-1]] * 100][length - 1]
        else:
            share = {1: 0.75, 2: 0.6}.get(length, 1.5 / length)
        return share * math.sqrt(num_successors / num_occurrences)

    def draft(
        self, context: Sequence[int], max_nodes: int, max_candidates: int
    ) -> list[tuple[int, int, int, float]]:
        """(token id, parent, depth, prob) of every node, best first."""
        nodes: list[tuple[int, int, int, float]] = []
        paths: dict[int, list[int]] = {-1: list(context)}
        waiting: list[tuple[float, int, int, int]] = []  # (-prob, age, token id, parent)
        num_made = 0
        node, depth, path_prob = -1, 0, 1.0
        leaves: set[int] = set()
        while True:
            successors = self.successors(paths[node], path_prob)
            likeliest = max(successors, key=lambda token_id: successors[token_id], default=None)
            for token_id, prob in successors.items():
                if token_id == likeliest or path_prob * prob >= _kernels.MIN_PROB:
                    waiting.append((-path_prob * prob, num_made, token_id, node))
                    num_made += 1
            waiting.sort()
            while True:
                if not waiting:
                    return nodes
                negative, _, token_id, parent = waiting.pop(0)
                if parent in leaves or len(leaves) < max_candidates:
                    break
            leaves.discard(parent)
            node, path_prob = len(nodes), -negative
            leaves.add(node)
            depth = 1 if parent == -1 else nodes[parent][2] + 1
            nodes.append((token_id, parent, depth, path_prob))
            paths[node] = [*paths[parent], token_id]
            if len(nodes) == max_nodes:
                return nodes

    def sample(
        self,
        context: Sequence[int],
        max_nodes: int,
        max_candidates: int,
        uniforms: Sequence[float],
    ) -> list[tuple[int, int, int, float, dict[int, float]]]:
        """(token id, parent, depth, expectation, what it was drawn from) of every node."""
        nodes: list[tuple[int, int, int, float, dict[int, float]]] = []
        paths: dict[int, list[int]] = {-1: list(context)}
        left: dict[int, dict[int, float]] = {}  # node -> path probabilities of successors not drawn
        waiting: list[tuple[float, int, int]] = []  # (-expectation, age, parent) of every slot
        num_slots = 0

        def open_slot(parent: int, floor: float) -> None:
            nonlocal num_slots
            probs = left[parent].values()
            if probs and (expected := plain_sum(p * p for p in probs) / plain_sum(probs)) >= floor:
                waiting.append((-expected, num_slots, parent))
                num_slots += 1

        node, path_prob = -1, 1.0
        leaves: set[int] = set()
        while True:
            successors = self.successors(paths[node], path_prob)
            left[node] = {token_id: path_prob * prob for token_id, prob in successors.items()}
            open_slot(node, 0.0)
            waiting.sort()
            while True:
                if not waiting:
                    return nodes
                negative, _, parent = waiting.pop(0)
                if parent in leaves or len(leaves) < max_candidates:
                    break
            leaves.discard(parent)
            node = len(nodes)
            leaves.add(node)
            total = plain_sum(left[parent].values())
            support = {token_id: prob / total for token_id, prob in left[parent].items()}
            token_id = inverse(support, uniforms[node])
            path_prob = left[parent].pop(token_id)
            depth = 1 if parent == -1 else nodes[parent][2] + 1
            nodes.append((token_id, parent, depth, -negative, support))
            paths[node] = [*paths[parent], token_id]
            if len(nodes) == max_nodes:
                return nodes
            open_slot(parent, _kernels.MIN_PROB)


def plain_sum(values: Iterable[float]) -> float:
    """Add from left to right; `sum` corrects its rounding errors since Python 3.12."""
    total = 0.0
    for value in values:
        total += value
    return total


def inverse(probs: dict[int, float], uniform: float) -> int:
    """Return the first key at which the sum of probabilities exceeds `uniform`."""
    keys = [key for key, prob in probs.items() if prob > 0]
    reached = 0.0
    for key in keys:
        reached += probs[key]
        if uniform < reached:
            return key
    return keys[-1]


def try_children(
    target: Sequence[float],
    children: Sequence[int],
    drawn_with: Sequence[Sequence[float]],
    uniforms: Sequence[float],
) -> tuple[int, int]:
    """(index of the accepted child or -1, token emitted), by the rule as the papers write it.

    uniforms[0] draws what is emitted if no child is accepted, uniforms[1 + i] decides child i.
    """
    p = list(target)
    for child, (x, q) in enumerate(zip(children, drawn_with, strict=True)):
        if uniforms[1 + child] < min(1.0, p[x] / q[x]):
            return child, x
        p = [max(0.0, p_y - q_y) for p_y, q_y in zip(p, q, strict=True)]
        p = [p_y / sum(p) for p_y in p]
    return -1, inverse(dict(enumerate(p)), uniforms[0])


def check_tree(draft: Draft, max_nodes: int, max_candidates: int | None) -> None:
    """Assert that a draft is a prefix tree, parents before children, within its limits."""
    assert 0 < len(draft) <= max_nodes
    assert len(draft.candidates()) <= (max_candidates or max_nodes)
    parents = draft.parents.tolist()
    assert all(-1 <= parent < node for node, parent in enumerate(parents))
    depths = [0, *draft.depths.tolist()]
    assert all(depths[node + 1] == depths[parent + 1] + 1 for node, parent in enumerate(parents))
    siblings = list(zip(parents, draft.token_ids.tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)
