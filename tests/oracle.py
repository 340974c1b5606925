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

    def occurrences(self, context: Sequence[int]) -> list[tuple[int, int]]:
        """(arrival of the context's last token, token that followed), newest first."""
        found = []
        sequences: dict[int, list[tuple[int, int]]] = {}
        for arrival, (sequence, token_id) in enumerate(self.held()):
            sequences.setdefault(sequence, []).append((arrival, token_id))
        n = len(context)
        for sequence_held in sequences.values():
            tokens = [token_id for _, token_id in sequence_held]
            found += [
                (sequence_held[end - 1][0], tokens[end])
                for end in range(n, len(tokens))
                if tokens[end - n : end] == list(context)
            ]
        return sorted(found, reverse=True)

    def successors(self, context: Sequence[int], path_prob: float) -> dict[int, float]:
        limit = _kernels.MAX_OCCURRENCES
        if path_prob <= _kernels._UNLIKELY:
            limit //= 2
        read: set[int] = set()
        counts: dict[int, int] = {}
        probs: dict[int, float] = {}
        mass_left = 1.0
        for order in range(min(self.max_ngram_size, len(context)), 0, -1):
            known = set(counts)
            for arrival, token_id in self.occurrences(context[-order:]):
                if len(read) < limit and arrival not in read:
                    read.add(arrival)
                    counts[token_id] = counts.get(token_id, 0) + 1
            added = [token_id for token_id in counts if token_id not in known]
            if counts and not known:
                table = _kernels._ESCAPE_DIVIDED
                if len(counts) == 1:
                    table = _kernels._ESCAPE_UNANIMOUS
                escape = table[min(order, len(table)) - 1] * math.sqrt(len(counts) / len(read))
                mass_left = escape
                for token_id in added:
                    probs[token_id] = (1.0 - escape) * counts[token_id] / len(read)
            else:
                share = _kernels._BACKOFF_SHARE * mass_left
                for token_id in added:
                    probs[token_id] = share * counts[token_id] / len(read)
                    mass_left -= probs[token_id]
            if len(read) == limit or mass_left * path_prob < _kernels.MIN_PROB:
                break
        return probs

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
            for token_id, prob in self.successors(paths[node], path_prob).items():
                if path_prob * prob >= _kernels.MIN_PROB:
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
