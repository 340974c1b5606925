"""`Profile`: what lade knows of a model, for each of the model's recent states."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch

from lade.budget.seconds import Seconds
from lade.compat import Model, device_of_inputs, dtype_of, unwrapped
from lade.compat.attempts import Attempt
from lade.config import Execution, Verification
from lade.drafting.tables import Table, table_for
from lade.forward.job import FusedForwards, forwards_for, why_by_torch
from lade.forward.widening import NARROW, WidenedModel, why_rounded
from lade.machine.generators import are_random_states, put_back, random_states
from lade.probing.proof import Distances
from lade.probing.state import ModelState, check_tokens
from lade.probing.user_code import user_code_of
from lade.targets.layout import TreeLayout, tree_layout
from lade.targets.prefixes import PrefixStore
from lade.targets.static import StaticSteps

_T = TypeVar("_T")
_UNKNOWN = object()

CacheKind = Literal["dynamic", "static", "none"]


class CheckResult(NamedTuple):
    """The result of checking one verification method."""

    reason: str | None  # why it is not exact, or None
    attention: str | None = None  # implementation to verify with, if not the model's own


class CheckKey(NamedTuple):
    """The subject of one check."""

    verification: Verification
    cache: CacheKind = "dynamic"
    is_padded: bool = False
    execution: Execution = "eager"
    is_drafting: bool = False  # a model that only drafts: rough logits are enough


@dataclass(slots=True, eq=False)
class Profile:
    """Everything that lade knows about a model in one state."""

    state: ModelState  # the state that it holds for
    #: The name of user code that runs in forwards, or None.
    user_code: str | None = None
    #: When steps are proved next, by method.
    proofs: dict[Verification, Distances] = field(default_factory=dict)
    #: Methods whose verdict was dropped once, and methods found wrong again, with the reason.
    dropped: set[Verification] = field(default_factory=set)
    found_wrong: dict[Verification, str] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    #: Whether the one-time work was done; `max_time` is meant for decoding alone.
    is_warm: bool = False
    #: Whether forwards draw random numbers; None as long as no forward changed the random state.
    draws: bool | None = None
    #: Results of one-time work, by name; a value may be None.
    found: dict[Hashable, Any] = field(default_factory=dict)
    static_steps: StaticSteps = field(default_factory=StaticSteps)

    def once(self, name: Hashable, find: Callable[[], _T]) -> _T:
        """Return the result kept under a name, computed once; a failure is tried again."""
        known = self.found.get(name, _UNKNOWN)  # at once: another thread may forget it
        if known is _UNKNOWN:
            known = self.found.setdefault(name, find())
        return cast(_T, known)

    def step_costs(
        self, verification: Verification, execution: Execution, is_fast: bool
    ) -> dict[int, Seconds]:
        """Return what steps of a method cost, by the bit length of the number of rows."""
        return self.once(("costs", verification, execution, is_fast), dict[int, Seconds])

    def table_of(self, model: Model) -> Table | None:
        """Return the model's prewarmed table, or None."""
        return self.once("prewarmed", lambda: table_for(model))

    def layout_of(self, model: Model) -> TreeLayout:
        """Return the cache layout of the model's layers.

        Raises:
            UnsupportedModelError: the layers cannot keep trees.
        """
        return self.once("layout", lambda: tree_layout(model))

    def fast_views_for(self, model: Model) -> FusedForwards | None:
        """Return the maker of views that run compiled forwards; None if they cannot run here."""

        def find() -> FusedForwards | None:
            state, is_users = self.state, self._user_code_in_jobs(model)
            if state.settings is None:
                with Attempt():
                    state.watch(model)
            if state.autocast is not None:
                return None  # jobs and products leave it to torch
            return None if is_users else forwards_for(model, state.settings_hold)

        return self.once("fast_views", find)

    def why_by_torch(self, model: Model) -> str | None:
        """Return why forwards on a CPU run by torch; None if they may be compiled."""

        def find() -> str | None:
            if dtype_of(model) in NARROW:
                widened = self.widened(model)
                return widened if isinstance(widened, str) else None
            if self.fast_views_for(model) is not None:
                return None  # known without reading the model again
            if self.state.autocast is not None:
                return f"its forward runs under autocast ({self.state.autocast})"
            return self._user_code_in_jobs(model) or why_by_torch(model)

        return self.once("why_by_torch", find)

    def widened(self, model: Model) -> WidenedModel | str:
        """Return what computes in float32 with the weights of a model in 16 bits, or why not."""

        def find() -> WidenedModel | str:
            dtype = dtype_of(model)
            offloads = any(hasattr(module, "_hf_hook") for module in model.modules())
            if dtype not in NARROW or device_of_inputs(model).type != "cpu" or offloads:
                return f"its weights are {dtype}"
            before = random_states(model.device)
            with Attempt(even_memory=True) as attempt:  # the model's code runs
                if self.state.settings is None:
                    self.state.watch(model)
                made = WidenedModel(model, dtype)
                made.view.__dict__["_lade_profiles"] = Profiles()
                if not made.is_small:
                    return "too many of its weights belong to no linear layer"
                why = why_rounded(made.view, check_tokens(model)[:4])
                if model.training and not are_random_states(model.device, before):
                    put_back(model.device, before)  # as dropout has drawn
                why = why or profile_of(made.view).why_by_torch(made.view)
                return made if why is None else why
            return str(attempt.failure)

        return self.once("widened", find)

    def _user_code_in_jobs(self, model: Model) -> str | None:
        """Return the name of user code that a compiled forward would not call, or None."""
        return self.user_code and user_code_of(model, self.state.functions, besides_hooks=True)


# Models that alternate between a few states, such as with and without a PEFT prefix, are checked
# once in each.
_MAX_PROFILES = 4


class Profiles:
    """The profiles of a model in its latest states; kept as `model._lade_profiles`.

    A copy of the model starts with none, since the copy has not been checked.
    """

    def __init__(self) -> None:
        self._profiles: list[Profile] = []  # latest first; never changed in place, for threads
        #: Kept texts with their KV caches, of the model's present state only.
        self.prefixes = PrefixStore()
        #: For this model as an assistant: options and drafter, by target.
        self.drafters: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as empty profiles."""
        return Profiles, ()

    @classmethod
    def of(cls, model: Model) -> "Profiles":
        """Return the profiles of a model."""
        known: Profiles | None = vars(model).get("_lade_profiles")
        if known is None:
            known = model.__dict__.setdefault("_lade_profiles", cls())
        return known

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of an autocast inside the model's forward, in its present state."""
        return self._profiles[0].state.autocast if self._profiles else None

    def __iter__(self) -> Iterator[Profile]:
        """Iterate over the profiles, latest first, and over those of their views in float32."""
        for profile in self._profiles:
            yield profile
            widened = profile.found.get("widened")
            if isinstance(widened, WidenedModel):
                yield from Profiles.of(widened.view)

    def present(self, model: Model) -> Profile:
        """Return the profile of the model in its present state, new if it has none."""
        known = self._profiles
        held = (profile for profile in known if profile.state.holds(model))
        found = [*islice(held, 1)]
        if not found:
            state = ModelState(model)
            user_code: str | None = "code that cannot be inspected"
            with Attempt():
                user_code = user_code_of(model, state.functions)
            found = [Profile(state, user_code)]
        if found != known[:1]:
            others = [other for other in known if other not in found]
            self._profiles = [*found, *others][:_MAX_PROFILES]
        return found[0]

    def end(self, profile: Profile, verification: Verification, reason: str) -> None:
        """Forget all that was found in a state in which a method was wrong, or failed, in a call.

        The model is read and checked again at the next call; the second time, the method is ruled
        out for good. Calls that run side by side go on by torch, and count as one.
        """
        if profile not in self._profiles:
            return
        views: FusedForwards | None = profile.found.get("fast_views")
        if views is not None:
            views.why_not = views.why_not or reason
        if verification in profile.dropped:
            profile.found_wrong[verification] = reason
        profile.dropped.add(verification)
        profile.state.settings = None
        fresh = replace(profile, proofs={}, found={})
        self._profiles = [fresh if each is profile else each for each in self._profiles]
        self.prefixes.clear()  # the same plan wrote their keys and values

    def forget(self) -> None:
        """Drop all profiles, and the kept texts."""
        self._profiles = []
        self.prefixes.clear()


def profile_of(model: Model) -> Profile:
    """Return the profile of a model in its present state."""
    return Profiles.of(model).present(model)


def computing(model: Model, profile: Profile | None = None) -> Model:
    """Return the view that computes in float32 what a model in 16 bits holds; else the model.

    There is one if its forwards are compiled (`FusedForwards`), which compute in float32 alone.

    Args:
        profile: of the model in its present state; looked up if None.
    """
    if dtype_of(model) not in NARROW:
        return model
    widened = (profile or profile_of(model)).widened(model)
    if isinstance(widened, str):
        return model
    widened.refresh()
    return widened.view


def release(model: Model) -> None:
    """Free the memory that lade keeps with a model between calls.

    With `Config(reuses_prefix=True)`, these are the texts of earlier calls with their KV caches;
    the next call runs its whole prompt. With `Config(execution="static")`, these are compiled steps
    and their static caches; the next call compiles them again.
    """
    model = unwrapped(model)
    profiles: Profiles | None = vars(model).get("_lade_profiles")
    if profiles is not None:
        profiles.prefixes.clear()
        for profile in profiles:
            profile.static_steps.clear()
            widened = profile.found.get("widened")
            if isinstance(widened, WidenedModel):
                release(widened.view)
