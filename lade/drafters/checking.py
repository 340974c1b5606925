"""`check`: what is wrong with a drafter of one's own, before a call finds out."""

import gc
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from lade.drafting.drafter import Drafter, DraftingCall, num_successors_of
from lade.drafting.drafts import checked_tokens
from lade.drafting.pool_drafter import PoolDrafter
from lade.drafting.successors import Successors
from lade.errors import LadeError, in_one_line
from ngram_pool import Draft, NGramPool, SampledDraft

_T = TypeVar("_T")

_NUM_PROMPT = 24
_NUM_ROUNDS = 4
_MOST_KEPT = 256  # bytes that a sequence may leave behind each time; a count or two
_MOST_DRAWS = 2500  # drafts, or tokens, whichever come first
_NUM_BINS = 20
_FALSE_ALARM = 1e-6  # chance that drafts drawn as they should be are called otherwise
_TOLERANCE = 1e-9


class DrafterError(LadeError):
    """A drafter has flaws; the message lists them.

    Attributes:
        flaws: One line each.
    """

    def __init__(self, name: str, flaws: Sequence[str]) -> None:
        self.flaws = tuple(flaws)
        count = "1 flaw" if len(flaws) == 1 else f"{len(flaws)} flaws"
        super().__init__("\n".join([f"{name} has {count}:", *(f"- {flaw}" for flaw in flaws)]))


def check(
    drafter: Any,
    *,
    vocab_size: int = 1000,
    max_draft_tokens: int = 16,
    num_steps: int = 2000,
    model: Any = None,
    seed: int = 0,
) -> None:
    """Let a drafter draft for texts made up here, and raise if it does anything that it must not.

        lade.drafters.check(MyDrafter())

    It is asked for all that it offers: drafts of one sequence and of two at once, drafts drawn at
    random if it draws, harvesting, exploring, n-grams. What it says of tokens' probabilities is
    not judged, for no model is asked; whether drawn tokens come as often as it says, is.

    Args:
        drafter: a `lade.Drafter`.
        vocab_size: token ids are below this.
        max_draft_tokens: the most that it is asked for at once.
        num_steps: steps during which its state must not grow.
        model: what `for_call` is told is the target's model.
        seed: of the texts.

    Raises:
        DrafterError: lists every flaw found.
    """
    checking = _Checking(drafter, vocab_size, max_draft_tokens, num_steps, model, seed)
    checking.run()
    if checking.flaws:
        raise DrafterError(type(drafter).__name__, [*checking.flaws.values()])


class _BrokenError(Exception):
    """A method failed in a way that ends this part of the check."""


class _Checking:
    """One check; `flaws` has the first of each kind that was found."""

    def __init__(
        self,
        drafter: Any,
        vocab_size: int,
        max_draft_tokens: int,
        num_steps: int,
        model: Any,
        seed: int,
    ) -> None:
        self.flaws: dict[str, str] = {}
        self._given = drafter
        self._drafter: Drafter = drafter
        self._num_successors = 0
        self._draws = self._learns_ngrams = False
        self._vocab_size = vocab_size
        self._most = max_draft_tokens
        self._num_steps = num_steps
        self._rng = np.random.default_rng(seed)
        self._call = DraftingCall(
            model=model,
            target=None,
            vocab_size=vocab_size,
            num_rows=2,
            max_length=_NUM_PROMPT + 8 * num_steps,
            max_candidates=None,
            processors=(),
            samples=False,
            rngs=None,
            make_pool_drafter=_pool_drafter,
            is_strict=True,
        )

    def run(self) -> None:
        """Run all parts of the check, each with sequences of its own."""
        if not isinstance(self._given, Drafter):
            what = "it is a class" if isinstance(self._given, type) else "no subclass of it"
            self._note("base", f"it is no lade.Drafter: {what}")
            return
        for part in (self._check_drafts, self._check_two_at_once, self._check_size):
            self._run(part, self._call)
        rngs = [np.random.default_rng(each) for each in (1, 2)]
        drawing = replace(self._call, samples=True, rngs=rngs)
        if self._drafter is not self._given or self._draws:
            self._run(self._check_drawn, drawing)
        if self._drafter is not self._given:
            chain = replace(drawing, max_candidates=1, make_pool_drafter=partial(_pool_drafter, 1))
            self._run(self._check_chain, chain)

    def _run(self, part: Callable[[], None], call: DraftingCall) -> None:
        try:
            self._drafter = self._made(call)
            self._asked("looking at it", self._look)
            part()
        except _BrokenError:
            pass

    def _made(self, call: DraftingCall) -> Drafter:
        """Return the drafter of a call; what draws its drafts may refuse some calls by name."""

        def make() -> Drafter | None:
            try:
                made: Drafter = self._given.for_call(call)
            except LadeError:
                if call.rngs is None:
                    raise
                return None
            return made

        made = self._asked("for_call", make)
        if made is None:
            raise _BrokenError
        return made

    def _look(self) -> None:
        drafter = self._drafter
        self._num_successors = num_successors_of(drafter)
        self._draws, self._learns_ngrams = bool(drafter.draws), bool(drafter.learns_ngrams)
        bool(drafter.has_table)

    def _note(self, kind: str, text: str) -> None:
        self.flaws.setdefault(kind, text)

    def _asked(self, name: str, ask: Callable[[], _T]) -> _T:
        """Ask the drafter something, and look what it does besides."""
        before = _random_states()
        try:
            return ask()
        except Exception as error:  # the drafter is the user's
            self._note(f"{name} raises", f"{name} raises {in_one_line(error)}")
            raise _BrokenError from error
        finally:
            if _random_states() != before:
                self._note(
                    "random state",
                    f"{name} draws from a global random generator, which is that of all threads; "
                    "have one of your own",
                )

    def _called(self, method: str, *args: Any) -> Any:
        return self._asked(method, lambda: getattr(self._drafter, method)(*args))

    @contextmanager
    def _opened(self, prompt: Sequence[int]) -> Iterator[Any]:
        handle = self._called("open", [*prompt])
        try:
            yield handle
        finally:
            self._called("close", handle)

    # --- drafts -------------------------------------------------------------------------------

    def _check_drafts(self) -> None:
        """Follow one text, with all that a call may tell a drafter on the way."""
        text = self._text(64)
        with self._opened(text[:_NUM_PROMPT]) as handle:
            place, step = _NUM_PROMPT, 0
            while place < len(text):
                for most in (self._most, 1 + step % 3):
                    self._drafted(handle, text[:place], most)
                if self._num_successors:
                    self._explored(handle)
                num_new = 1 + step % 3
                emitted = text[place : place + num_new]
                self._called("observe", handle, emitted)
                if self._num_successors:
                    self._harvested(handle, text[:place], self._num_successors)
                if self._learns_ngrams:
                    ngrams = self._rng.integers(0, self._vocab_size, (2, 4)).astype(np.int32)
                    self._called("observe_ngrams", handle, ngrams)
                place, step = place + num_new, step + 1

    def _drafted(self, handle: Any, committed: list[int], most: int) -> Draft:
        seen = [*committed]
        draft: Draft = self._called("draft", handle, seen, most)
        if seen != committed:
            self._note("committed", "draft changes the list of committed tokens")
        self._check_draft(draft, most)
        if isinstance(draft, SampledDraft):
            self._note("drawn", "draft returns a SampledDraft where drafts are not drawn")
        return draft

    def _check_draft(self, draft: Any, most: int) -> None:
        """Note what is wrong with a draft; raise where nothing more can be said of it."""
        if not isinstance(draft, Draft):
            self._note("type", f"a draft is a {type(draft).__name__}, not a lade.Draft")
            raise _BrokenError
        kinds: dict[str, Any] = {
            "token_ids": np.int32,
            "parents": np.int32,
            "depths": np.int32,
            "probs": np.float64,
        }
        for name, kind in kinds.items():
            array = getattr(draft, name)
            if not isinstance(array, np.ndarray) or array.ndim != 1:
                self._note("shape", f"{name} is no array of one axis")
                raise _BrokenError
            if array.dtype != kind:
                self._note(f"dtype {name}", f"{name} is {array.dtype}, not {np.dtype(kind)}")
        lengths = {name: len(getattr(draft, name)) for name in kinds}
        if len({*lengths.values()}) > 1:
            self._note("lengths", f"the arrays of a draft differ in length: {lengths}")
            raise _BrokenError
        num = len(draft)
        if num > most:
            self._note("size", f"a draft has {num} nodes where {most} were asked for")
        parents, tokens = draft.parents.tolist(), draft.token_ids.tolist()
        if any(not -1 <= parent < node for node, parent in enumerate(parents)):
            self._note("parents", f"parents do not come before their children: {parents}")
            raise _BrokenError
        outside = [token for token in tokens if not 0 <= token < self._vocab_size]
        if outside:
            self._note("ids", f"a token id is not from 0 to {self._vocab_size - 1}: {outside[0]}")
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        if draft.depths.tolist() != depths:
            self._note("depths", f"depths are {draft.depths.tolist()}, not {depths}")
        if len({*zip(parents, tokens, strict=True)}) < num:
            self._note("siblings", "two children of one parent have the same token")
        self._check_probs(draft)

    def _check_probs(self, draft: Draft) -> None:
        if not ((draft.probs >= 0) & (draft.probs <= 1)).all():  # False for NaN
            self._note("probs", f"a probability is not from 0 to 1: {draft.probs.tolist()}")
        elif not isinstance(draft, SampledDraft) and (np.diff(draft.probs) > _TOLERANCE).any():
            self._note("order", "probabilities increase along a draft; the best node comes first")

    def _explored(self, handle: Any) -> None:
        excluded = np.array([0, 1, 2], np.int32)
        found = self._called("explore", handle, excluded, self._most)
        try:
            token_ids, _ = checked_tokens(*found)
        except (TypeError, ValueError) as error:
            self._note("explore", f"explore is wrong: {in_one_line(error)}")
            return
        if len(token_ids) > self._most:
            self._note("explore", f"explore names {len(token_ids)} tokens, not {self._most}")
        if np.isin(token_ids, excluded).any():
            self._note("excluded", "explore names tokens that it was told not to")

    def _harvested(self, handle: Any, committed: list[int], num_successors: int) -> None:
        ids = [self._rng.permutation(self._vocab_size)[:num_successors] for _ in range(3)]
        probs = np.sort(self._rng.dirichlet(np.ones(num_successors), 3))[:, ::-1]
        successors = Successors(np.array(ids, np.int32), probs.astype(np.float32))
        nodes = [committed[-1], *ids[0][:2].tolist()]
        nodes += [0] * (3 - len(nodes))
        parents = [-1, 0, 0]
        self._called("harvest", handle, committed, nodes, parents, successors)

    # --- several sequences ----------------------------------------------------------------------

    def _check_two_at_once(self) -> None:
        """Compare the drafts of a sequence alone with those beside one of other tokens."""
        alone = self._share_of_others(is_alone=True)
        beside = self._share_of_others(is_alone=False)
        if beside > alone + 0.2:
            self._note(
                "disturbed",
                f"two sequences disturb each other: {beside:.0%} of the tokens drafted for one are "
                f"only in the other, where {alone:.0%} are while it is not open",
            )

    def _share_of_others(self, *, is_alone: bool) -> float:
        """Return how many tokens drafted for a sequence are of a text that it has no part in."""
        shuffled = self._rng.permutation(self._vocab_size)
        num = max(2, min(12, self._vocab_size // 2))
        mine, others = self._text(48, shuffled[:num]), self._text(48, shuffled[num : 2 * num])
        of_others = {*others} - {*mine}
        drafted: list[int] = []
        with self._opened(mine[:_NUM_PROMPT]) as handle:
            beside = None
            if not is_alone:
                beside = self._called("open", others[:_NUM_PROMPT])
            for place in range(_NUM_PROMPT, len(mine)):
                drafted += self._drafted(handle, mine[:place], self._most).token_ids.tolist()
                if beside is not None:
                    self._drafted(beside, others[:place], self._most)
                self._called("observe", handle, [mine[place]])
                if beside is not None:
                    self._called("observe", beside, [others[place]])
                if beside is not None and place == len(mine) - 8:
                    self._called("close", beside)
                    beside = None
        return sum(token in of_others for token in drafted) / max(1, len(drafted))

    def _check_size(self) -> None:
        """Repeat the same text, and look whether anything of it is kept each time."""
        text = self._text(max(8, self._num_steps // _NUM_ROUNDS))
        sizes = []
        for _ in range(_NUM_ROUNDS):
            with self._opened(text[:_NUM_PROMPT]) as handle:
                for place in range(_NUM_PROMPT, len(text)):
                    self._drafted(handle, text[:place], self._most)
                    self._called("observe", handle, [text[place]])
            sizes.append(_size_of([self._given, self._drafter]))
        growth = np.diff(sizes)[1:]  # the first time, it may learn
        if (growth > _MOST_KEPT).all():
            self._note(
                "size of state",
                f"its state grows: by {int(growth.min())} bytes or more each time that the same "
                f"{len(text)} tokens were drafted for and closed",
            )

    # --- drawn drafts ---------------------------------------------------------------------------

    def _check_drawn(self) -> None:
        """Draw many drafts after the same text, and compare tokens with what they are drawn from.

        Each token is mapped to a number that is uniform if the token has the distribution that the
        draft says, whatever that is.
        """
        text = self._text(40)
        uniform: list[float] = []
        rng = np.random.default_rng(self._rng.integers(2**32))
        with self._opened(text[:_NUM_PROMPT]) as handle:
            self._called("observe", handle, text[_NUM_PROMPT:])
            for number in range(_MOST_DRAWS):
                draft = self._drawn(handle, text, self._most, np.random.default_rng(number))
                if isinstance(draft, SampledDraft):
                    self._check_supports(draft)
                    uniform += self._as_uniform(draft, rng)
                    self._check_first(handle, text, draft, number)
                if len(uniform) >= _MOST_DRAWS or (number > 100 and not uniform):
                    break
        if uniform and _chance_of_uniform(uniform) < _FALSE_ALARM:
            self._note(
                "distribution",
                f"of {len(uniform)} drawn tokens, some come more often and some less than "
                "support_probs says",
            )

    def _drawn(self, handle: Any, text: list[int], most: int, rng: np.random.Generator) -> Draft:
        """Return a draft as a call that draws would have it."""
        draft: Draft = self._called("draft", handle, [*text], most)
        is_drawn = isinstance(draft, SampledDraft) or not len(draft)
        if not is_drawn and self._draws:
            draft = self._called("sample", handle, [*text], len(draft), rng)
        self._check_draft(draft, most)
        return draft

    def _check_first(self, handle: Any, text: list[int], draft: SampledDraft, seed: int) -> None:
        """Look whether fewer tokens are the first of more, drawn with the same numbers."""
        if not self._draws or len(draft) < 2 or seed % 40:
            return
        few = len(draft) // 2
        rng = np.random.default_rng(seed)
        fewer = self._called("sample", handle, [*text], few, rng)
        same = draft.first(few)
        if fewer.token_ids.tolist() != same.token_ids.tolist():
            self._note(
                "first",
                f"sample draws others where {few} tokens are asked for than among the first {few} "
                f"of {len(draft)}: a node may depend only on the draws before it",
            )

    def _check_supports(self, draft: SampledDraft) -> None:
        ids, probs = np.asarray(draft.support_token_ids), np.asarray(draft.support_probs)
        if ids.ndim != 2 or ids.shape != probs.shape or len(ids) != len(draft):
            self._note(
                "supports",
                f"supports have the shapes {ids.shape} and {probs.shape}, not [{len(draft)}, n]",
            )
            raise _BrokenError
        if not ((probs >= 0) & (probs <= 1)).all() or (np.abs(probs.sum(axis=1) - 1) > 1e-6).any():
            self._note("support probs", "support_probs of a node are no distribution")
            raise _BrokenError
        is_own = (ids == draft.token_ids[:, None]) & (probs > 0)
        if (is_own.sum(axis=1) != 1).any():
            self._note("support", "a drawn token is not once in the support that it was drawn from")
            raise _BrokenError

    def _as_uniform(self, draft: SampledDraft, rng: np.random.Generator) -> list[float]:
        found = []
        for node, token in enumerate(draft.token_ids.tolist()):
            ids, probs = draft.support_token_ids[node], draft.support_probs[node]
            below = float(probs[ids < token].sum())
            found.append(below + rng.random() * float(probs[ids == token].sum()))
        return found

    def _check_chain(self) -> None:
        """Look whether drawn drafts have one path where only one can be verified."""
        text = self._text(40)
        with self._opened(text[:_NUM_PROMPT]) as handle:
            self._called("observe", handle, text[_NUM_PROMPT:])
            for number in range(8):
                draft = self._drawn(handle, text, self._most, np.random.default_rng(number))
                if isinstance(draft, SampledDraft) and len({*draft.parents.tolist()}) < len(draft):
                    self._note("paths", "a drawn draft has several paths where max_candidates is 1")

    def _text(self, num_tokens: int, alphabet: NDArray[Any] | None = None) -> list[int]:
        """Return a text whose n-grams repeat."""
        if alphabet is None:
            num = min(12, self._vocab_size)
            alphabet = self._rng.permutation(self._vocab_size)[:num]
        phrases = [
            self._rng.choice(alphabet, int(self._rng.integers(3, 7))).tolist() for _ in range(4)
        ]
        text: list[int] = []
        while len(text) < _NUM_PROMPT + num_tokens:
            text += phrases[int(self._rng.integers(len(phrases)))]
        return text[: _NUM_PROMPT + num_tokens]


def _pool_drafter(max_candidates: int | None = None) -> PoolDrafter:
    return PoolDrafter(NGramPool(), max_candidates)


def _random_states() -> bytes:
    """Return the states of all global random generators that text may be drawn with."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state().numpy()
    return pickle.dumps(states)


def _chance_of_uniform(numbers: Sequence[float]) -> float:
    """Return the chance that uniform numbers are spread so unevenly (chi-square)."""
    counts, _ = np.histogram(numbers, bins=_NUM_BINS, range=(0, 1))
    expected = len(numbers) / _NUM_BINS
    distance = float(((counts - expected) ** 2 / expected).sum())
    half = torch.tensor([(_NUM_BINS - 1) / 2, distance / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _size_of(roots: Sequence[Any]) -> int:
    """Return the bytes of all that objects hold.

    Pools are left out, whose size is limited, and so is code.
    """
    left_out = ModuleType | type | FunctionType | BuiltinFunctionType | NGramPool
    seen: set[int] = set()
    todo, size = [*roots], 0
    while todo:
        found = todo.pop()
        if id(found) in seen or isinstance(found, left_out):
            continue
        seen.add(id(found))
        size += sys.getsizeof(found)
        if isinstance(found, torch.Tensor):
            size += found.untyped_storage().nbytes()
            continue
        if isinstance(found, MethodType):
            todo.append(found.__self__)
            continue
        todo += gc.get_referents(found)
    return size
