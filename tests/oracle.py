"""The pool again: slow, plain Python, obvious. Shares only constants with the package."""

import math
from collections.abc import Sequence

from ngram_pool import _kernels


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
