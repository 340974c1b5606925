"""What is known of a model, in each of the states that it was in."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from lade.budget.budget import Budget, MeasuredBudget
from lade.compat import Model, device_of_inputs, without_compiler
from lade.config import Execution, Verification
from lade.gpu.workspace import WorkspaceStore
from lade.probing.structure import Structure
from lade.probing.watch import Watch
from ngram_pool import SuccessorTable

CacheKind = Literal["dynamic", "static", "none"]

# Of forwards, in tokens of a row: any, a few, or one for text that must not depend on drafts.
Widths = tuple[int, ...] | None


class CheckResult(NamedTuple):
    """What the check of one way found."""

    reason: str | None  # why it is not exact, or None
    attention: str | None = None  # to verify with, where it is not the model's own
    is_lasting: bool = True  # whether another check would find the same


@dataclass(slots=True)
class Profile:
    """What is known of a model as it is, on its device; true for no other structure of it."""

    setting: tuple[object, ...]  # of the process that it is true for
    structure: Structure  # of the model that it is true for
    #: By way, kind of cache, whether rows are padded or of different lengths, and widths.
    results: dict[tuple[Verification, CacheKind, bool, Widths], CheckResult] = field(
        default_factory=dict
    )
    budgets: dict[tuple[Verification, Execution], Budget] = field(default_factory=dict)
    #: Ways whose verdict was dropped once, and those found wrong again, with the reason.
    dropped: set[Verification] = field(default_factory=set)
    found_wrong: dict[Verification, str] = field(default_factory=dict)
    usual_outputs: dict[str, bool] = field(default_factory=dict)  # by name
    warned: set[str] = field(default_factory=set)
    watch: Watch = field(default_factory=Watch)
    #: Whether its forwards draw random numbers, in a list once it was found out.
    draws: list[bool] = field(default_factory=list)
    #: The table that `lade.prewarm` made, if there is one, in a list once it was looked for.
    prewarmed: list[SuccessorTable | None] = field(default_factory=list)
    #: Memory of the last call, steps recorded on it, and the model compiled.
    workspace_store: WorkspaceStore = field(default_factory=WorkspaceStore)

    def budget(self, verification: Verification, execution: Execution) -> Budget:
        """Return what has been learned of the costs of steps."""
        return self.budgets.setdefault((verification, execution), MeasuredBudget())

    def drop_verdict(self, verification: Verification, reason: str) -> None:
        """Learn that a way was not exact, or failed, in the middle of a text.

        It is checked anew at the next call; what is found out a second time stays.
        """
        for key in [key for key in [*self.results] if key[0] == verification]:
            del self.results[key]
        if verification in self.dropped:
            self.found_wrong[verification] = reason
        self.dropped.add(verification)


# Models that alternate between a few states, as with and without a prefix of PEFT, are checked once
# in each.
_MAX_PROFILES = 4


class Profiles:
    """What is known of a model in the states that it was in; kept as `model._lade_profiles`.

    A copy of the model begins with nothing, for nothing was found out about the copy.
    """

    def __init__(self) -> None:
        self._profiles: list[Profile] = []  # the latest first; replaced whole, for other threads

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle nothing."""
        return Profiles, ()

    @classmethod
    def of(cls, model: Model) -> "Profiles":
        """Return those of a model."""
        known: Profiles | None = vars(model).get("_lade_profiles")
        if known is None:
            known = model.__dict__.setdefault("_lade_profiles", cls())
        return known

    def __iter__(self) -> Iterator[Profile]:
        """Go through them, the latest first."""
        return iter(self._profiles)

    def present(self, model: Model) -> Profile:
        """Return what is known of the model as it is now."""
        known, setting = self._profiles, _setting(model)
        for profile in known:
            if profile.setting == setting and profile.structure.is_of(model):
                break
        else:
            profile = Profile(setting, Structure(model))
        if not known or profile is not known[0]:
            others = [other for other in known if other is not profile]
            self._profiles = [profile, *others][:_MAX_PROFILES]
        return profile

    def forget(self) -> None:
        """Know nothing."""
        self._profiles = []


def _setting(model: Model) -> tuple[object, ...]:
    kind = device_of_inputs(model).type
    is_autocast = torch.is_autocast_enabled(kind)
    return str(model.device), is_autocast and torch.get_autocast_dtype(kind)


def profile_of(model: Model) -> Profile:
    """Return what is known of a model in its present state; compares all that it is made of."""
    return Profiles.of(model).present(model)


def release(model: Model) -> None:
    """Give back the memory that lade keeps with a model between calls.

    That is keys and values, and recorded steps, of `Config(execution=…)` other than "eager". The
    next call takes it anew.
    """
    for profile in vars(without_compiler(model)).get("_lade_profiles", ()):
        profile.workspace_store.clear()
    torch.cuda.empty_cache()  # what recordings held; does nothing where there is no GPU
