"""What is known about a model, for each state it has been in."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

from lade.attempts import Attempt
from lade.captures import free_unused
from lade.compat import Model, compiled_part_of, device_of_inputs, without_compiler
from lade.config import Verification
from lade.forward.job import forwards_for, why_by_torch
from lade.forward.linear import products_for
from lade.gpu.workspace import WorkspaceStore
from lade.probing.proof import Distances
from lade.probing.state import ModelState
from lade.probing.user_code import user_code_of
from lade.targets.layout import TreeLayout, tree_layout
from lade.targets.prefixes import PrefixStore
from lade.view import FastViews

_T = TypeVar("_T")
_UNKNOWN = object()

CacheKind = Literal["dynamic", "static", "none"]

# Widths of forwards, in tokens per row: None for any, a few, or one if the text must not depend on
# drafts.
Widths = tuple[int, ...] | None


class CheckResult(NamedTuple):
    """The result of checking one verification method."""

    reason: str | None  # why it is not exact, or None
    attention: str | None = None  # implementation to verify with, if not the model's own


class CheckKey(NamedTuple):
    """What is checked."""

    verification: Verification
    cache: CacheKind = "dynamic"
    is_padded: bool = False
    widths: Widths = None
    is_drafting: bool = False  # a model that only drafts: rough logits are enough


@dataclass(slots=True, eq=False)
class Profile:
    """What is known about a model in one state."""

    state: ModelState  # that it holds for
    #: What of the user's own code runs in forwards, or None.
    user_code: str | None = None
    #: Which part of the model is compiled by torch, or None.
    compiled: str | None = None
    #: When steps are proved next, by method.
    proofs: dict[Verification, Distances] = field(default_factory=dict)
    #: Methods whose verdict was dropped once, and those found wrong again, with the reason.
    dropped: set[Verification] = field(default_factory=set)
    found_wrong: dict[Verification, str] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    #: Whether what is done once was done for some call: a limit of time counts decoding alone.
    is_warm: bool = False
    #: Whether forwards draw random numbers; None as long as the random state was left as it was.
    draws: bool | None = None
    #: What was found out once, by name; the value may be that there is nothing.
    found: dict[Hashable, Any] = field(default_factory=dict)
    #: Memory of the last call, and steps recorded on it.
    workspace_store: WorkspaceStore = field(default_factory=WorkspaceStore)

    def once(self, name: Hashable, find: Callable[[], _T]) -> _T:
        """Return what was found out under a name, or find it out; what fails is tried again."""
        known = self.found.get(name, _UNKNOWN)  # at once: another thread may forget it
        if known is _UNKNOWN:
            known = self.found.setdefault(name, find())
        return cast(_T, known)

    def layout_of(self, model: Model) -> TreeLayout:
        """Return what the model's layers keep.

        Raises:
            UnsupportedModelError: nothing that trees can be kept in.
        """
        return self.once("layout", lambda: tree_layout(model))

    def fast_views_for(self, model: Model) -> FastViews | None:
        """Return what runs the model's forwards, or its products; None where lade's cannot run."""

        def find() -> FastViews | None:
            state, is_users = self.state, self._user_code_in_jobs(model)
            if state.settings is None:
                with Attempt():
                    state.watch(model)
            job = None if is_users else forwards_for(model, state.settings_hold)
            return job or products_for(model)

        return self.once("products", find)

    def why_by_torch(self, model: Model) -> str | None:
        """Return why forwards on a CPU are torch's; None where they may be compiled jobs."""

        def find() -> str | None:
            return self._user_code_in_jobs(model) or why_by_torch(model)

        return self.once("why_by_torch", find)

    def _user_code_in_jobs(self, model: Model) -> str | None:
        """Return what of the user's own code a job does not call: all but hooks of layers."""
        return self.user_code and user_code_of(model, self.state.functions, besides_hooks=True)

    def drop_verdict(self, verification: Verification, reason: str) -> None:
        """Drop the verdict on a method that was not exact, or failed, in the middle of a text.

        It is checked again at the next call; the second time, it is ruled out for good.
        """
        for key in [*self.found]:
            if isinstance(key, CheckKey) and key.verification == verification:
                del self.found[key]
        self.proofs.pop(verification, None)
        if verification in self.dropped:
            self.found_wrong[verification] = reason
        self.dropped.add(verification)


# Models that alternate between a few states, such as with and without a PEFT prefix, are checked
# once in each.
_MAX_PROFILES = 4


class Profiles:
    """The profiles of a model in its latest states; kept as `model._lade_profiles`.

    A copy of the model starts with none, since the copy has not been checked.
    """

    def __init__(self) -> None:
        self._profiles: list[Profile] = []  # latest first; never changed in place, for threads
        #: Texts whose keys and values are kept, of the model's present state alone.
        self.prefixes = PrefixStore()
        #: By the model that is drafted for, options and drafter by this model as an assistant.
        self.drafters: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle nothing."""
        return Profiles, ()

    @classmethod
    def of(cls, model: Model) -> "Profiles":
        """Return the profiles of a model."""
        known: Profiles | None = vars(model).get("_lade_profiles")
        if known is None:
            known = model.__dict__.setdefault("_lade_profiles", cls())
        return known

    def __iter__(self) -> Iterator[Profile]:
        """Iterate over the profiles, latest first."""
        return iter(self._profiles)

    def present(self, model: Model) -> Profile:
        """Return the profile of the model in its present state, new if it has none."""
        known = self._profiles
        held = (profile for profile in known if profile.state.holds(model))
        found = [*islice(held, 1)]
        if not found:
            state = ModelState(model)
            user_code: str | None = "code that cannot be looked at"
            with Attempt():
                user_code = user_code_of(model, state.functions)
            found = [Profile(state, user_code, compiled_part_of(model))]
        if found != known[:1]:
            others = [other for other in known if other not in found]
            self._profiles = [*found, *others][:_MAX_PROFILES]
        return found[0]

    def forget(self) -> None:
        """Drop all profiles, and what was computed with the model."""
        self._profiles = []
        self.prefixes.clear()


def profile_of(model: Model) -> Profile:
    """Return the profile of a model in its present state."""
    return Profiles.of(model).present(model)


def release(model: Model) -> None:
    """Free the memory that lade keeps with a model between calls.

    With `Config(execution=…)` other than "eager", these are keys and values, and recorded steps.
    The next call allocates them again. With `Config(reuses_prefix=True)`, they are the texts of
    earlier calls with their keys and values. The next call runs all of its prompt.
    """
    profiles: Profiles | None = vars(without_compiler(model)).get("_lade_profiles")
    if profiles is not None:
        for profile in profiles:
            profile.workspace_store.clear()
        profiles.prefixes.clear()
    free_unused(device_of_inputs(model))  # what recordings held
