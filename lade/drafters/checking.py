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

from lade.drafting.drafter import Abilities, Drafter, DraftingCall
from lade.drafting.drafts import checked, checked_tokens
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
    call = DraftingCall(
        model=model,
        vocab_size=vocab_size,
        max_length=_NUM_PROMPT + 8 * num_steps,
        num_rows=2,
        make_pool_drafter=_pool_drafter,
        is_strict=True,
    )
    checking = _Checking(drafter, call, max_draft_tokens, np.random.default_rng(seed))
    if isinstance(drafter, Drafter):
        checking.run(num_steps)
    else:
        what = "it is a class" if isinstance(drafter, type) else "no subclass of it"
        checking.note("base", f"it is no lade.Drafter: {what}")
    if checking.flaws:
        raise DrafterError(type(drafter).__name__, [*checking.flaws.values()])


class _BrokenError(Exception):
    """A method failed in a way that ends this part of the check."""


class _Checking:
    """One check; `flaws` has the first of each kind that was found."""

    def __init__(
        self, drafter: Any, call: DraftingCall, most: int, rng: np.random.Generator
    ) -> None:
        self.flaws: dict[str, str] = {}
        self._given = self._drafter = drafter
        self._able = Abilities()
        self._call = call
        self._vocab_size = call.vocab_size
        self._most = most
        self._rng = rng

    def run(self, num_steps: int) -> None:
        """Run all parts of the check, each with sequences of its own."""
        parts = (self._check_drafts, self._check_two_at_once, partial(self._check_size, num_steps))
        for part in parts:
            self._run(part, self._call)
        is_made = self._drafter is not self._given
        rngs = [np.random.default_rng(each) for each in (1, 2)]
        drawing = replace(self._call, samples=True, rngs=rngs)
        if is_made or self._able.draws:
            self._run(self._check_drawn, drawing)
        if is_made:
            chain = replace(drawing, max_candidates=1, make_pool_drafter=partial(_pool_drafter, 1))
            self._run(self._check_chain, chain)

    def note(self, kind: str, text: str) -> None:
        """Remember a flaw, if it is the first of its kind."""
        self.flaws.setdefault(kind, text)

    def _run(self, part: Callable[[], None], call: DraftingCall) -> None:
        try:
            self._asked("for_call", lambda: self._make(call))
            self._able = self._asked("looking at it", lambda: Abilities.of(self._drafter))
            part()
        except _BrokenError:
            pass

    def _make(self, call: DraftingCall) -> None:
        """Make the drafter of a call; what draws its drafts may refuse some calls by name."""
        try:
            self._drafter = self._given.for_call(call)
        except LadeError:
            if call.rngs is None:
                raise
            raise _BrokenError from None

    def _asked(self, name: str, ask: Callable[[], _T]) -> _T:
        """Ask the drafter something, and look what it does besides."""
        before = _random_states()
        try:
            return ask()
        except _BrokenError:
            raise
        except Exception as error:  # the drafter is the user's
            self.note(f"{name} raises", f"{name} raises {in_one_line(error)}")
            raise _BrokenError from error
        finally:
            if _random_states() != before:
                self.note(
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
                num_new = 1 + step % 3
                for most in (self._most, num_new):
                    self._drafted(handle, text[:place], most)
                if self._able.num_successors:
                    self._explored(handle)
                self._called("observe", handle, text[place : place + num_new])
                if self._able.num_successors:
                    self._harvested(handle, text[:place], self._able.num_successors)
                if self._able.learns_ngrams:
                    ngrams = self._rng.integers(0, self._vocab_size, (2, 4)).astype(np.int32)
                    self._called("observe_ngrams", handle, ngrams)
                place, step = place + num_new, step + 1

    def _drafted(self, handle: Any, committed: list[int], most: int) -> Draft:
        seen = [*committed]
        draft: Draft = self._called("draft", handle, seen, most)
        if seen != committed:
            self.note("committed", "draft changes the list of committed tokens")
        self._check_draft(draft, most)
        if isinstance(draft, SampledDraft):
            self.note("drawn", "draft returns a SampledDraft where drafts are not drawn")
        return draft

    def _check_draft(self, draft: Any, most: int) -> None:
        """Note what is wrong with a draft, also what a call would put up with."""
        try:
            sound = checked(draft, sys.maxsize)
        except (TypeError, ValueError) as error:
            self.note("draft", f"a draft is wrong: {error}")
            raise _BrokenError from error
        for name in ("token_ids", "parents", "depths", "probs"):
            given, due = np.asarray(getattr(draft, name)), getattr(sound, name)
            if given.dtype != due.dtype:
                self.note(f"dtype {name}", f"{name} is {given.dtype}, not {due.dtype}")
        num, tokens = len(draft), draft.token_ids.tolist()
        if num > most:
            self.note("size", f"a draft has {num} nodes where {most} were asked for")
        outside = [token for token in tokens if not 0 <= token < self._vocab_size]
        if outside:
            self.note("ids", f"a token id is not from 0 to {self._vocab_size - 1}: {outside[0]}")
        depths = draft.depths.tolist()
        if depths != sound.depths.tolist():
            self.note("depths", f"depths are {depths}, not {sound.depths.tolist()}")
        if len({*zip(draft.parents.tolist(), tokens, strict=True)}) < num:
            self.note("siblings", "two children of one parent have the same token")
        if not isinstance(draft, SampledDraft) and (np.diff(draft.probs) > _TOLERANCE).any():
            self.note("order", "probabilities increase along a draft; the best node comes first")

    def _explored(self, handle: Any) -> None:
        excluded = np.array([0, 1, 2], np.int32)
        found = self._called("explore", handle, excluded, self._most)
        try:
            token_ids, _ = checked_tokens(*found)
        except (TypeError, ValueError) as error:
            self.note("explore", f"explore is wrong: {in_one_line(error)}")
            return
        if len(token_ids) > self._most:
            self.note("explore", f"explore names {len(token_ids)} tokens, not {self._most}")
        if np.isin(token_ids, excluded).any():
            self.note("excluded", "explore names tokens that it was told not to")

    def _harvested(self, handle: Any, committed: list[int], num_successors: int) -> None:
        ids = [self._rng.permutation(self._vocab_size)[:num_successors] for _ in range(3)]
        probs = np.sort(self._rng.dirichlet(np.ones(num_successors), 3))[:, ::-1]
        successors = Successors(np.array(ids, np.int32), probs.astype(np.float32))
        nodes = [committed[-1], *ids[0][:2].tolist(), 0][:3]
        self._called("harvest", handle, committed, nodes, [-1, 0, 0][: len(nodes)], successors)

    # --- several sequences ----------------------------------------------------------------------

    def _check_two_at_once(self) -> None:
        """Compare the drafts of a sequence alone with those beside one of other tokens."""
        alone = self._share_of_others(is_alone=True)
        beside = self._share_of_others(is_alone=False)
        if beside > alone + 0.2:
            self.note(
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
            beside = None if is_alone else self._called("open", others[:_NUM_PROMPT])
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

    def _check_size(self, num_steps: int) -> None:
        """Repeat the same text, and look whether anything of it is kept each time."""
        text = self._text(max(8, num_steps // _NUM_ROUNDS))
        sizes = []
        for _ in range(_NUM_ROUNDS):
            with self._opened(text[:_NUM_PROMPT]) as handle:
                for place in range(_NUM_PROMPT, len(text)):
                    self._drafted(handle, text[:place], self._most)
                    self._called("observe", handle, [text[place]])
            sizes.append(_size_of([self._given, self._drafter]))
        growth = np.diff(sizes)[1:]  # the first time, it may learn
        if (growth > _MOST_KEPT).all():
            self.note(
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
            for seed in range(_MOST_DRAWS):
                draft = self._drawn(handle, text, seed)
                for node, token in enumerate(draft.token_ids.tolist()):
                    ids, probs = draft.support_token_ids[node], draft.support_probs[node]
                    below = float(probs[ids < token].sum())
                    uniform.append(below + rng.random() * float(probs[ids == token].sum()))
                if self._able.draws and len(draft) > 1 and seed % 40 == 0:
                    self._check_first(handle, text, draft, seed)
                if len(uniform) >= _MOST_DRAWS or (seed > 100 and not uniform):
                    break
        if uniform and _chance_of_uniform(uniform) < _FALSE_ALARM:
            self.note(
                "distribution",
                f"of {len(uniform)} drawn tokens, some come more often and some less than "
                "support_probs says",
            )

    def _check_chain(self) -> None:
        """Look whether drawn drafts have one path where only one can be verified."""
        text = self._text(40)
        with self._opened(text[:_NUM_PROMPT]) as handle:
            self._called("observe", handle, text[_NUM_PROMPT:])
            for seed in range(8):
                draft = self._drawn(handle, text, seed)
                if len({*draft.parents.tolist()}) < len(draft):
                    self.note("paths", "a drawn draft has several paths where max_candidates is 1")

    def _drawn(self, handle: Any, text: list[int], seed: int) -> SampledDraft:
        """Return a draft as a call that draws would have it, without one that is not drawn."""
        draft: Draft = self._called("draft", handle, [*text], self._most)
        if self._able.draws and len(draft) and not isinstance(draft, SampledDraft):
            draft = self._sampled(handle, text, len(draft), seed)
        self._check_draft(draft, self._most)
        if not isinstance(draft, SampledDraft):
            return SampledDraft.empty()
        probs = draft.support_probs
        if (np.abs(probs.sum(axis=1) - 1) > 1e-6).any():
            self.note("support probs", "support_probs of a node are no distribution")
            raise _BrokenError
        is_own = (draft.support_token_ids == draft.token_ids[:, None]) & (probs > 0)
        if (is_own.sum(axis=1) > 1).any():
            self.note("support", "a drawn token is twice in the support that it was drawn from")
            raise _BrokenError
        return draft

    def _sampled(self, handle: Any, text: list[int], num: int, seed: int) -> Draft:
        found: Draft = self._called("sample", handle, [*text], num, np.random.default_rng(seed))
        return found

    def _check_first(self, handle: Any, text: list[int], draft: Draft, seed: int) -> None:
        """Look whether fewer tokens are the first of more, drawn with the same numbers."""
        few = len(draft) // 2
        fewer = self._sampled(handle, text, few, seed)
        if fewer.token_ids.tolist() != draft.first(few).token_ids.tolist():
            self.note(
                "first",
                f"sample draws others where {few} tokens are asked for than among the first {few} "
                f"of {len(draft)}: a node may depend only on the draws before it",
            )

    def _text(self, num_tokens: int, alphabet: NDArray[Any] | None = None) -> list[int]:
        """Return a text whose n-grams repeat."""
        if alphabet is None:
            alphabet = self._rng.permutation(self._vocab_size)[:12]
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
