"""The pool and rejection sampling again: slow, plain Python, obvious.

Shares with the package its constants, the first weights, and the hash (so as to know which n-grams
share a bucket, and the order of the most used tokens). Sums go in the same order, so
that probabilities can be compared exactly.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ngram_pool import _kernels
from ngram_pool import pool as pools
from ngram_pool.weights import first_weights
from tests.ngram_pool.table_oracle import OracleTable


class Spot(NamedTuple):
    """A held token."""

    arrival: int
    before: list[int]  # what is held of its sequence up to it
    after: list[int]  # and behind it
    indexed: list[int]  # what was held of its sequence up to it when it arrived


class InText(NamedTuple):
    """A successor that the text proposes."""

    prob: float
    occurrences: int
    length: int  # of the longest match
    origin: int


class OraclePool:
    """Keeps all arrivals and searches the newest `capacity` from end to end."""

    def __init__(self, capacity: int, max_ngram_size: int, seed: int = 0) -> None:
        self.hash_state = seed % 2**31
        self.multiplier = _kernels.HASH_MULTIPLIER ^ (seed // 2**31 * 2)
        self.capacity = capacity
        self.max_ngram_size = max_ngram_size
        self.max_match = max(_kernels.MAX_MATCH, max_ngram_size)
        self.arrivals: list[tuple[int, int]] = []  # (sequence, token id)
        self.open: dict[int | None, int] = {0: 0}  # handle -> a number no other sequence ever had
        self.num_sequences = 1
        self.starts: dict[int | None, list[float]] = {0: [math.inf] * 2, None: [math.inf] * 2}
        self.layers: dict[int | None, list[OraclePool]] = {}
        self.harvested = OracleTable(max(1, capacity // 16))
        self.unigrams: dict[int, float] = {}  # expected counts, in the order of their first harvest
        self.weights: list[list[float]] = first_weights().tolist()
        self.num_rows = min(pools._FIRST_NUM_ROWS, capacity)  # there are as many buckets
        self.cached_spots: list[Spot] | None = None

    def open_sequence(self, handle: int, layers: Sequence["OraclePool"] = ()) -> None:
        self.open[handle] = self.num_sequences
        self.num_sequences += 1
        self.starts[handle] = [math.inf] * 2
        self.layers[handle] = list(layers)

    def sources(self, handle: int | None) -> list["OraclePool"]:
        """This pool and the layers with text."""
        return [self, *(layer for layer in self.layers.get(handle, []) if layer.arrivals)]

    def close_sequence(self, handle: int) -> None:
        del self.open[handle]
        if handle == 0:
            self.open_sequence(0)

    def observe(self, token_ids: Sequence[int], handle: int = 0, is_answer: bool = False) -> None:
        while self.num_rows < min(len(self.arrivals) + len(token_ids), self.capacity):
            self.num_rows = min(2 * self.num_rows, self.capacity)
        for token_id in token_ids:
            starts = self.starts[handle]
            starts[0] = min(starts[0], len(self.arrivals))
            if is_answer:
                starts[1] = min(starts[1], len(self.arrivals))
                self.learn(token_id, handle)
            self.arrivals.append((self.open[handle], token_id))
            self.cached_spots = None

    def harvest(
        self,
        contexts: Sequence[Sequence[int]],
        token_ids: Sequence[Sequence[int]],
        probs: Sequence[Sequence[float]],
    ) -> None:
        self.harvested.put(contexts, token_ids, probs)
        for ids, likely in zip(token_ids, probs, strict=True):
            for token_id, prob in zip(ids, likely, strict=True):
                if token_id != -1:
                    self.unigrams[token_id] = self.unigrams.get(token_id, 0.0) + prob

    def held(self) -> list[tuple[int, int]]:
        return self.arrivals[-self.capacity :]

    def texts(self) -> list[list[int]]:
        """What is held, by sequence, in the order of their first tokens."""
        sequences: dict[int, list[int]] = {}
        for sequence, token_id in self.held():
            sequences.setdefault(sequence, []).append(token_id)
        return list(sequences.values())

    # --- the text ---------------------------------------------------------------------------

    def spots(self) -> list[Spot]:
        """Newest first."""
        if self.cached_spots is None:
            first = len(self.arrivals) - len(self.held())
            sequences: dict[int, list[tuple[int, int]]] = {}
            for arrival, (sequence, token_id) in enumerate(self.arrivals):
                # What came earlier nobody can know of.
                if arrival > first - self.capacity:
                    sequences.setdefault(sequence, []).append((arrival, token_id))
            spots = []
            for arrived in sequences.values():
                for i, (arrival, _) in enumerate(arrived):
                    before = [t for a, t in arrived[: i + 1] if a >= first]
                    indexed = [t for a, t in arrived[: i + 1] if a > arrival - self.capacity]
                    after = [t for _, t in arrived[i + 1 :]]
                    if arrival >= first:
                        spots.append(Spot(arrival, before, after, indexed))
            self.cached_spots = sorted(spots, reverse=True)
        return self.cached_spots

    def successors(
        self, context: Sequence[int], path_prob: float, handle: int | None
    ) -> tuple[dict[int, InText], int, int]:
        """What the text proposes, the row of weights for the newest occurrence, the match's length.

        The match that decides is the longest of the highest order at which anything is found. One
        in a layer that indexes shorter n-grams is found later, however long it is.
        """
        n = self.max_ngram_size
        limit = _kernels.MAX_OCCURRENCES
        if path_prob <= _kernels.UNLIKELY:
            limit, context = limit // 2, context[-n:]
        sources = self.sources(handle)
        occurrences = [
            [(match(spot.before, context), spot) for spot in source.spots() if spot.after]
            for source in sources
        ]
        num_read = [0] * len(sources)
        counts: dict[int, int] = {}
        lengths: dict[int, int] = {}
        origins: dict[int, int] = {}
        probs: dict[int, float] = {}
        newest_row = _kernels.ORIGIN_ROW + _kernels.EARLIER
        mass_left = 1.0
        num_counted = deciding = 0
        for order in range(min(n, len(context)), 0, -1):
            read: list[tuple[int, int, Spot]] = []  # length, source, spot
            for i, source in enumerate(sources):
                # Of the highest order are all that match at least so far, of others just as far.
                highest = min(n, source.max_ngram_size)
                found = [
                    (m, i, spot)
                    for m, spot in occurrences[i]
                    if order <= highest and (m == order or (order == highest and m > order))
                ][: limit - num_read[i]]
                num_read[i] += len(found)
                read += found
            if read and not num_counted:
                newest_row = self.origin_row(read[0][1], read[0][2], handle)
            for length in sorted({m for m, _, _ in read}, reverse=True):
                known = set(counts)
                for i, spot in [(i, spot) for m, i, spot in read if m == length]:
                    token_id = spot.after[0]
                    counts[token_id] = counts.get(token_id, 0) + 1
                    lengths.setdefault(token_id, length)
                    origin = _kernels.EARLIER if i else self.origin(spot, handle)
                    origins[token_id] = max(origins.get(token_id, origin), origin)
                    num_counted += 1
                added = [token_id for token_id in counts if token_id not in known]
                if not known:
                    deciding = length
                    mass_left = self.escape_prob(length, len(counts), num_counted)
                    for token_id in added:
                        probs[token_id] = (1.0 - mass_left) * counts[token_id] / num_counted
                else:
                    share = _kernels._BACKOFF_SHARE * mass_left
                    for token_id in added:
                        probs[token_id] = share * counts[token_id] / num_counted
                        mass_left -= probs[token_id]
            is_enough = num_read == [limit] * len(sources)
            if counts and (is_enough or mass_left * path_prob < _kernels.READ_ON):
                break
        return (
            {
                token_id: InText(
                    probs[token_id], counts[token_id], lengths[token_id], origins[token_id]
                )
                for token_id in counts
            },
            newest_row,
            deciding,
        )

    def origin_row(self, source: int, spot: Spot, handle: int | None) -> int:
        if source == 0:
            return _kernels.ORIGIN_ROW + self.origin(spot, handle)
        return _kernels.LAYER_ROW + [0, 1, 2, 3, *[3] * 100][source - 1]

    def origin(self, spot: Spot, handle: int | None) -> int:
        prompt, answer = self.starts[handle]
        if spot.arrival >= answer:
            return _kernels.ANSWER
        return _kernels.PROMPT if spot.arrival >= prompt else _kernels.EARLIER

    @staticmethod
    def escape_prob(length: int, num_successors: int, num_occurrences: int) -> float:
        share = 0.6 if num_successors > 1 else 1.5 / (1 + length)
        return share * math.sqrt(num_successors / num_occurrences)

    def bucket(self, tokens: Sequence[int]) -> int:
        state = self.hash_state
        for token_id in reversed(tokens):
            state = _kernels.hash_with(state, token_id, self.multiplier)
        num_buckets = 1
        while 2 * num_buckets <= self.num_rows:
            num_buckets *= 2
        return state % num_buckets

    # --- all sources ------------------------------------------------------------------------

    def estimate(
        self, context: Sequence[int], path_prob: float, handle: int | None
    ) -> tuple[dict[int, float], dict[int, list[float]], list[int]]:
        """Probabilities and features of all candidates, and the rows of weights in force."""
        context = context[-self.max_match :]
        in_text, newest_row, deciding = self.successors(context, path_prob, handle)
        most = _kernels.MAX_FOUND + _kernels.MAX_OCCURRENCES * (len(self.sources(handle)) - 1)
        features: dict[int, list[float]] = {}
        for token_id, found in in_text.items():
            says = features[token_id] = [0.0] * _kernels.NUM_FEATURES
            says[_kernels.TEXT] = math.log(found.prob) - _kernels.LEAST_LOG_PROB
            says[_kernels.LENGTH] = math.log(found.length) + 0.5
            says[_kernels.COUNT] = math.log(found.occurrences)
            says[_kernels.IS_NEWEST] = float(len(features) == 1)
            says[_kernels.IN_ANSWER] = float(found.origin == _kernels.ANSWER)
            says[_kernels.IN_PROMPT] = float(found.origin == _kernels.PROMPT)

        def add(token_id: int, source: int, value: float) -> None:
            if token_id in features or len(features) < most:
                says = features.setdefault(token_id, [0.0] * _kernels.NUM_FEATURES)
                says[source] = max(says[source], value)

        last, previous = context[-1], context[-2] if len(context) > 1 else None
        known = 0
        pools = [self, *self.layers.get(handle, [])]
        for before, source in (
            (previous, _kernels.HARVESTED_PAIR),
            (-1, _kernels.HARVESTED_SINGLE),
        ):
            if before is None:
                continue
            all_costs = [pool.harvested.get(before, last) for pool in pools]
            first = next((i for i, costs in enumerate(all_costs) if costs is not None), None)
            if first is None:
                continue
            if source == _kernels.HARVESTED_PAIR:
                known = 1 if first == 0 else 2
            for token_id, value in pools[first].likely(before, last):
                add(token_id, source, value)
        for other, value in self.likely(*context[-3:-1]) if len(context) > 2 else ():
            if other != last:
                add(other, _kernels.INSTEAD, value)
                for token_id, evidence in self.likely(-1, other):
                    add(token_id, _kernels.AFTER_INSTEAD, evidence)
        for token_id, value in self.often():
            add(token_id, _kernels.UNIGRAM, value)
        match_row = self.match_row(deciding, len(in_text))
        rows = [match_row, newest_row, _kernels.KNOWN_ROW + known]
        return self.blend(features, rows), features, rows

    def likely(self, previous: int, last: int) -> list[tuple[int, float]]:
        """What this pool harvested for a context, with evidence."""
        known = self.harvested.get(previous, last) or []
        evidence = [(t, -cost / _kernels.COST_STEPS - _kernels.LEAST_LOG_PROB) for t, cost in known]
        return [(token_id, value) for token_id, value in evidence if value > 0]

    def often(self) -> list[tuple[int, float]]:
        """The tokens that were likely most often, with evidence."""
        in_order = sorted(self.unigrams, key=slot)
        counts = [self.unigrams[token_id] for token_id in in_order]
        total = plain_sum([_kernels._UNSEEN_UNIGRAMS, *counts])
        found = sorted(zip(in_order, counts, strict=True), key=lambda each: -each[1])
        return [
            (token_id, math.log(count / total) - _kernels.LEAST_LOG_PROB)
            for token_id, count in found[: _kernels.NUM_OFTEN]
            if count > 0 and math.log(count / total) > _kernels.LEAST_LOG_PROB
        ]

    @staticmethod
    def match_row(length: int, num_in_text: int) -> int:
        if num_in_text == 0:
            return 0
        row = {1: 1, 2: 2, 3: 3, 4: 3}.get(length, 4 if length <= 8 else 5)
        return row if num_in_text == 1 else row + 5

    def blend(self, features: dict[int, list[float]], rows: list[int]) -> dict[int, float]:
        summed = [
            plain_sum(self.weights[row][j] for row in rows) for j in range(_kernels.NUM_WEIGHTS)
        ]
        scores = {}
        for token_id, says in features.items():
            score = summed[_kernels.BIAS] + (summed[_kernels.FURTHER] if is_further(says) else 0.0)
            for weight, value in zip(summed, says, strict=False):
                score += weight * value
            for j in range(_kernels.NUM_TABLE_SOURCES):
                if says[j] == 0.0:
                    score += summed[_kernels.SILENCE + j]
            scores[token_id] = score
        highest = max([0.0, *scores.values()])
        powers = {token_id: math.exp(score - highest) for token_id, score in scores.items()}
        total = plain_sum([math.exp(-highest), *powers.values()])
        return {token_id: power / total for token_id, power in powers.items()}

    def learn(self, token_id: int, handle: int) -> None:
        """Take one step against the gradient of the log-loss, each kind of weight at its rate."""
        context = [t for sequence, t in self.held() if sequence == self.open[handle]]
        if not context:
            return
        probs, features, rows = self.estimate(context, 1.0, handle)
        for candidate, says in features.items():
            came = 1.0 if candidate == token_id else 0.0
            error = pools._LEARNING_RATE * (came - probs[candidate])
            for weights in [self.weights[row] for row in rows]:
                weights[_kernels.BIAS] += error
                weights[_kernels.FURTHER] += error if is_further(says) else 0.0
                for j in range(_kernels.NUM_FEATURES):
                    weights[j] += _kernels._OF_FEATURES * error * says[j]
                for j in range(_kernels.NUM_TABLE_SOURCES):
                    weights[_kernels.SILENCE + j] += error if says[j] == 0.0 else 0.0

    # --- trees ------------------------------------------------------------------------------

    def draft(
        self,
        context: Sequence[int],
        max_draft_tokens: int,
        max_candidates: int,
        handle: int | None = None,
    ) -> list[tuple[int, int, int, float]]:
        """(token id, parent, depth, prob) of every node, best first."""
        nodes: list[tuple[int, int, int, float]] = []
        paths: dict[int, list[int]] = {-1: list(context)}
        waiting: list[tuple[float, int, int, int]] = []  # (-prob, age, token id, parent)
        num_made = 0
        node, depth, path_prob = -1, 0, 1.0
        leaves: set[int] = set()
        while True:
            successors, _, _ = self.estimate(paths[node], path_prob, handle)
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
            if len(nodes) == max_draft_tokens:
                return nodes

    def sample(
        self,
        context: Sequence[int],
        max_draft_tokens: int,
        max_candidates: int,
        uniforms: Sequence[float],
        handle: int | None = None,
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
            total = plain_sum(probs)
            if total and (expected := plain_sum(p * p for p in probs) / total) >= floor:
                waiting.append((-expected, num_slots, parent))
                num_slots += 1

        node, path_prob = -1, 1.0
        leaves: set[int] = set()
        while True:
            successors, _, _ = self.estimate(paths[node], path_prob, handle)
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
            support = {t: prob / total for t, prob in left[parent].items() if prob > 0}
            token_id = inverse(support, uniforms[node])
            path_prob = left[parent].pop(token_id)
            depth = 1 if parent == -1 else nodes[parent][2] + 1
            nodes.append((token_id, parent, depth, -negative, support))
            paths[node] = [*paths[parent], token_id]
            if len(nodes) == max_draft_tokens:
                return nodes
            open_slot(parent, _kernels.MIN_PROB)


def is_further(says: Sequence[float]) -> bool:
    """Return whether neither text nor harvested contexts name a candidate."""
    return not any(says[: _kernels.NUM_TABLE_SOURCES])


def slot(token_id: int) -> int:
    """Return the bucket of a token's unigram."""
    return int(_kernels.hash_with(0, token_id, _kernels.HASH_MULTIPLIER)) % (4096 // _kernels.WAYS)


def match(tokens: Sequence[int], context: Sequence[int]) -> int:
    """Return how many of the last tokens are those of the context."""
    length = 0
    while length < min(len(tokens), len(context)) and tokens[-1 - length] == context[-1 - length]:
        length += 1
    return length


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
