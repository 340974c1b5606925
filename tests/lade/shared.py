"""Tiny models that tests share, since making and checking one takes longer than to answer with it.

A test that only lets a model answer takes `shared_model`. One that changes its model, hooks or
wraps it, sets its generation config, or asks what lade does the first time, takes a model of its
own, `tests.lade.tiny.tiny_model`. `conftest.py` looks after each test whether this was kept.
"""

import copy
from collections import OrderedDict
from typing import Any

from lade.probing.profile import Profile, Profiles
from lade.probing.structure import Structure
from tests.lade.tiny import tiny_model

_MOST = 64  # models; the one not used for longest goes first

_Key = tuple[Any, ...]


class _Shared:
    """A model, and what it was made of."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._structure = Structure(model)
        self._attributes = _attributes_of(model)
        self._generation_config = copy.deepcopy(vars(model.generation_config))
        self._num_writes = _num_writes(model)

    def changes(self) -> list[str]:
        """Name what is not as it was; costs a fraction of a millisecond."""
        model = self.model
        same = {
            "modules, hooks, config or training flags": self._structure.is_of(model),
            "attributes": _attributes_of(model) == self._attributes,
            "generation config": vars(model.generation_config) == self._generation_config,
            "values of weights": _num_writes(model) == self._num_writes,
            # A method found exact and then wrong: somebody planted a fault.
            "verdicts": not any(p.dropped or p.found_wrong for p in Profiles.of(model)),
        }
        return [name for name, is_same in same.items() if not is_same]

    def keep_verdicts(self) -> None:
        """Forget costs, memory, warnings given and tables, but not what checks found."""
        profiles = Profiles.of(self.model)
        profiles._profiles = [
            Profile(
                profile.setting,
                profile.structure,
                results=profile.results,
                usual_outputs=profile.usual_outputs,
                draws=profile.draws,
                values=profile.values,
                why_not_continued=profile.why_not_continued,
            )
            for profile in profiles
        ]


def _attributes_of(model: Any) -> dict[str, int]:
    return {name: id(value) for name, value in vars(model).items() if name != "_lade_profiles"}


def _num_writes(model: Any) -> int:
    """Count how often weights and buffers were written to in place."""
    return sum(each._version for each in (*model.parameters(), *model.buffers()))


_models: OrderedDict[_Key, _Shared] = OrderedDict()
_in_use: dict[_Key, _Shared] = {}  # by the test that runs


def shared_model(family: str = "llama", seed: int = 0, **options: Any) -> Any:
    """Return a `tiny_model` that other tests in this process use as well: only let it answer."""
    key = (family, seed, repr(sorted(options.items())))
    shared = (
        _in_use.get(key) or _models.pop(key, None) or _Shared(tiny_model(family, seed, **options))
    )
    _in_use[key] = _models[key] = shared
    _models.move_to_end(key)
    while len(_models) > _MOST:
        _models.popitem(last=False)
    return shared.model


def hand_back(are_verdicts_true: bool = True) -> list[str]:
    """End the use of models by a test; return what it changed, in models that nobody gets again.

    Args:
        are_verdicts_true: whether what was found out about the models holds for other tests.
    """
    told = []
    for key, shared in _in_use.items():
        changes = shared.changes()
        if changes:
            _models.pop(key, None)
            told.append(f"tiny_model{key}: {', '.join(changes)}")
        elif are_verdicts_true:
            shared.keep_verdicts()
        else:
            Profiles.of(shared.model).forget()
    _in_use.clear()
    return told


def forget_texts() -> None:
    """Drop the kept texts of all models, also of those that a fixture of a module has used."""
    for shared in _models.values():
        Profiles.of(shared.model).prefixes.clear()


def forget_verdicts() -> None:
    """Let all models be checked anew."""
    for shared in _models.values():
        Profiles.of(shared.model).forget()
