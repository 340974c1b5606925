"""An assistant that goes on while the target verifies, as one on a device of its own can."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from threading import Event
from typing import NamedTuple

import torch
from torch import Tensor

from lade.drafters.model_drafter import ModelDrafter, OpenScorer, Scorer
from lade.stats import SourceStats
from ngram_pool import Draft

# Nodes that are run ahead after a draft at most; a draft has at most 20 levels.
_MAX_AHEAD = 24
# Nodes that are held at most, with their logits; then the text is committed.
_MAX_HELD = 64
# Types of devices that may compute in another dtype than that of the weights.
_DEVICE_TYPES = ("cpu", "cuda", "xpu")


class AheadScorer:
    """Scorer that also runs nodes which nobody asked for yet, and keeps what all nodes gave.

    As long as the text goes along nodes that were run, it is not committed: the tree grows on. What
    is asked for again, or was run ahead, needs no forward.

    Args:
        scorer: runs the nodes.
        max_length: maximum length of text and nodes.
        vocab_size: exclusive upper bound of the tokens of a text.
        ends: tokens that nothing follows.
    """

    def __init__(
        self, scorer: Scorer, max_length: int, vocab_size: int, ends: frozenset[int] = frozenset()
    ) -> None:
        self.is_chain = scorer.is_chain
        self._scorer = scorer
        self._max_length = max_length
        self._vocab_size = vocab_size
        self._ends = ends
        self._text: list[int] = []  # up to the scorer's root, which is node 0
        self._logits: list[Tensor] = []  # after each node [vocab]
        self._tokens: list[int] = []  # of each node
        self._depths: list[int] = []
        self._children: dict[tuple[int, int], int] = {}  # (node, token) -> node
        # Nodes that `follow` and `grow` were asked for, in this order: 0 is where the text ends.
        self._places: list[int] = []
        self._tip = 0  # node to go on after
        self._expected: list[int] = []  # tokens to go on with; then the likeliest
        self._num_ahead = 0

    def follow(self, committed: Sequence[int]) -> Tensor:
        """Go on along nodes that were run, or commit what was run of a text and run the rest."""
        node = self._node_of(committed)
        if node is None:
            self._begin(committed)
            node = 0
        self._places = [node]
        return self._logits[node]

    def grow(self, token_ids: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Return the logits after nodes [num_new, vocab]; run those that were not run."""
        num_held, first = len(self._tokens), len(self._places)
        places, tokens, of_tokens = [*self._places], list[int](), list[int]()
        for token_id, parent in zip(token_ids, parents, strict=True):
            place = self._children.get((places[parent], token_id))
            if place is None:
                place = num_held + len(tokens)
                tokens.append(token_id)
                of_tokens.append(places[parent])
            places.append(place)
        if tokens and self.is_chain and of_tokens[0] != num_held - 1:
            # The path went on elsewhere. Grown again from where the text ends, it is this one.
            path = [*(self._tokens[place] for place in self._places[1:]), *token_ids]
            self._begin(self._text + self._path_to(self._places[0]))
            tokens, of_tokens = path, [*range(len(path))]
            places = [*range(1 + len(path))]
        self._run(tokens, of_tokens)
        self._places = places
        return torch.stack([self._logits[place] for place in places[first:]])

    def expect(self, token_ids: Sequence[int]) -> None:
        """Begin to go ahead from where the text ends, along these tokens first."""
        self._tip, self._expected, self._num_ahead = self._places[0], [*token_ids], 0

    def go_ahead(self) -> bool:
        """Run the next node ahead, and return whether there was one to be run."""
        place: int | None = self._tip
        while place is not None:
            self._tip = place
            if self._expected:
                token_id = self._expected.pop(0)
            else:
                token_id = int(self._logits[place][: self._vocab_size].argmax())
            place = None if token_id in self._ends else self._children.get((place, token_id))
        if token_id in self._ends or not self._may_go_ahead():
            return False
        self._run([token_id], [self._tip])
        self._tip = len(self._tokens) - 1
        self._num_ahead += 1
        return True

    def close(self) -> None:
        """Free what is held."""
        self._text, self._logits = [], []
        self._scorer.close()

    def _may_go_ahead(self) -> bool:
        num_held = len(self._tokens)
        return (
            self._num_ahead < _MAX_AHEAD
            and num_held < _MAX_HELD
            and len(self._text) + self._depths[self._tip] + 1 < self._max_length
            and (not self.is_chain or self._tip == num_held - 1)
        )

    def _node_of(self, committed: Sequence[int]) -> int | None:
        """Return the node that a text ends with, if all after the scorer's root was run."""
        num = len(self._text)
        if num == 0 or len(self._tokens) >= _MAX_HELD or [*committed[:num]] != self._text:
            return None
        node = 0
        for token_id in committed[num:]:
            if (node, token_id) not in self._children:
                return None
            node = self._children[node, token_id]
        return node

    def _path_to(self, node: int) -> list[int]:
        """Return the tokens from the scorer's root, without it, to a node."""
        parents = {child: parent for (parent, _), child in self._children.items()}
        path = []
        while node:
            path.append(self._tokens[node])
            node = parents[node]
        return path[::-1]

    def _begin(self, committed: Sequence[int]) -> None:
        logits = self._scorer.follow(committed)
        self._text = [*committed]
        self._logits, self._tokens, self._depths = [logits], [committed[-1]], [0]
        self._children = {}

    def _run(self, token_ids: Sequence[int], parents: Sequence[int]) -> None:
        if not token_ids:
            return
        logits = self._scorer.grow(token_ids, parents)
        for token_id, parent in zip(token_ids, parents, strict=True):
            self._children[parent, token_id] = len(self._tokens)
            self._tokens.append(token_id)
            self._depths.append(self._depths[parent] + 1)
        self._logits += logits


class OverlappedDrafter:
    """A model's drafter whose model goes on, in a thread, from each draft to the next.

    It goes along the draft, as if all of it were right, and on with its own likeliest tokens. The
    next draft waits for the forward that is running, and finds there what fits the text.

    The thread stops when it has gone far enough, and ends with the last sequence. An error in it is
    raised by the next draft.

    Args:
        make_drafter: makes the drafter from what opens its scorers.
        open_scorer: returns the model for a sequence.
        max_length, vocab_size, ends: as `AheadScorer` has them.
    """

    def __init__(
        self,
        make_drafter: Callable[[OpenScorer], ModelDrafter],
        open_scorer: OpenScorer,
        max_length: int,
        vocab_size: int,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        self._open_scorer = open_scorer
        self._max_length = max_length
        self._vocab_size = vocab_size
        self._ends = ends
        self._drafter = make_drafter(self._open)
        self._scorers: dict[int, AheadScorer] = {}  # of the sequences that were drafted for
        self._num_open = 0
        self._asking = -1  # the sequence that is drafted for
        self._expected: dict[int, list[int]] = {}  # by sequence, since the model last went on
        self._worker = ThreadPoolExecutor(1, "lade-assistant")
        self._ahead: Future[None] | None = None
        self._stop = Event()

    @property
    def sources(self) -> Mapping[str, SourceStats]:
        """Counts and times of the drafter."""
        return self._drafter.sources

    def open(self, prompt_ids: Sequence[int]) -> int:
        """Begin a sequence."""
        sequence = self._drafter.open(prompt_ids)
        self._num_open += 1
        return sequence

    def draft(self, sequence: int, committed: Sequence[int], max_draft_tokens: int) -> Draft:
        """Stop the model, draft, and let it go on once all sequences were drafted for."""
        self._halt()
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            ahead.result()  # raises its error
        self._asking = sequence
        draft = self._drafter.draft(sequence, committed, max_draft_tokens)
        self._expected.pop(sequence, None)
        if len(draft):
            self._expected[sequence] = _first_path(draft)
        if len(self._expected) == self._num_open:
            self._go_on()
        return draft

    def observe(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Let the drafter see what became of its draft."""
        self._drafter.observe(sequence, token_ids)

    def close(self, sequence: int) -> None:
        """End a sequence, and with the last one the thread."""
        self._halt()
        self._num_open -= 1
        with ExitStack() as stack:
            if self._num_open == 0:
                stack.callback(self._worker.shutdown)
            self._scorers.pop(sequence, None)
            self._expected.pop(sequence, None)
            self._drafter.close(sequence)

    def _open(self, committed: Sequence[int]) -> Scorer:
        scorer = self._open_scorer(committed)
        ahead = AheadScorer(scorer, self._max_length, self._vocab_size, self._ends)
        self._scorers[self._asking] = ahead
        return ahead

    def _halt(self) -> None:
        """Wait until no forward is running, and none will be."""
        self._stop.set()
        if self._ahead is not None:
            wait([self._ahead])

    def _go_on(self) -> None:
        scorers = []
        for sequence, token_ids in self._expected.items():
            self._scorers[sequence].expect(token_ids)
            scorers.append(self._scorers[sequence])
        self._expected.clear()
        self._stop = Event()
        self._ahead = self._worker.submit(_go_ahead, scorers, self._stop, _Modes.now())


class _Modes(NamedTuple):
    """What torch keeps for each thread of how to compute."""

    is_inference: bool
    autocast: dict[str, torch.dtype]  # by type of device

    @classmethod
    def now(cls) -> "_Modes":
        """Return those of this thread."""
        names = [name for name in _DEVICE_TYPES if torch.is_autocast_enabled(name)]
        autocast = {name: torch.get_autocast_dtype(name) for name in names}
        return cls(torch.is_inference_mode_enabled(), autocast)

    @contextmanager
    def set(self) -> Iterator[None]:
        """Set them in this thread."""
        with ExitStack() as stack:
            if self.is_inference:
                stack.enter_context(torch.inference_mode())
            for name, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(name, dtype))
            yield


def _go_ahead(scorers: Sequence[AheadScorer], stop: Event, modes: _Modes) -> None:
    """Run nodes ahead, one of each sequence in turn, until there are no more or it is to stop."""
    with modes.set():
        while scorers:
            going = []
            for scorer in scorers:
                if stop.is_set():
                    return
                if scorer.go_ahead():
                    going.append(scorer)
            scorers = going


def _first_path(draft: Draft) -> list[int]:
    """Return the path of first children: the likeliest ones, or those that were drawn first."""
    path, node = list[int](), -1
    for child, parent in enumerate(draft.parents.tolist()):
        if parent == node:
            path.append(int(draft.token_ids[child]))
            node = child
    return path
