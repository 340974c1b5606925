"""Functions under the names by which code finds them, and which of them were replaced.

lade runs its own kernels, masks and caches in place of functions of torch and transformers. That is
right only as long as nobody replaces these functions.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import itemgetter
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import activations, cache_utils, masking_utils, modeling_rope_utils
from transformers.integrations import sdpa_attention

_MISSING = object()


class Slot(NamedTuple):
    """A name in a module or class, and the function under it."""

    holder: Any  # a module or a class
    name: str
    function: Any

    @property
    def path(self) -> str:
        """The full name of the function."""
        parts = [self.name]
        if isinstance(self.holder, type):
            parts = [self.holder.__module__, self.holder.__qualname__, self.name]
        elif isinstance(self.holder, ModuleType):
            parts = [self.holder.__name__, self.name]
        return ".".join(parts)


class Slots:
    """A snapshot of the functions in some modules and classes.

    Args:
        holders: modules and classes.
        is_looked_at: returns whether to include a value; by default, all callables are included.
    """

    def __init__(
        self, holders: Iterable[Any], is_looked_at: Callable[[Any], bool] | None = None
    ) -> None:
        self._held: list[tuple[Any, Any, tuple[str, ...]]] = []
        for holder in dict.fromkeys(holders):
            held = vars(holder)
            names = tuple(
                name for name, each in [*held.items()] if (is_looked_at or _is_function)(each)
            )
            if names:
                # The last name comes twice, so that a single name gives a tuple, too.
                self._held.append((holder, itemgetter(*names, names[-1]), names))
        self._classes = [holder for holder, _, _ in self._held if isinstance(holder, type)]
        self._before = self._now()

    def are_same(self) -> bool:
        """Return whether each name still has the same function, and no class has more names."""
        return self._before == self._now()

    def __iter__(self) -> Iterator[Slot]:
        """Iterate over the functions there now, new names of classes included."""
        for holder, _, names in self._held:
            held = vars(holder)
            more = [name for name in held if name not in names] if isinstance(holder, type) else ()
            for name in chain(names, more):
                function = held.get(name, _MISSING)
                if name in names or _is_function(function):
                    yield Slot(holder, name, function)

    def _now(self) -> list[Any]:
        """Return all functions, and how many names each class has."""
        try:
            functions = [get(vars(holder)) for holder, get, _ in self._held]
        except KeyError:  # a name was deleted
            return []
        return [functions, [len(vars(each)) for each in self._classes]]


def _is_function(value: Any) -> bool:
    return callable(value) or isinstance(value, property | staticmethod | classmethod)


def _classes_in(module: ModuleType) -> Iterator[type]:
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield value


class Replaced:
    """The functions of torch and transformers that lade may replace, and who replaced them.

    Args:
        is_users: returns whether a function is user code, and so replaced one before this was made.
    """

    def __init__(self, is_users: Callable[[Any], bool]) -> None:
        overridable = {
            id(each)
            for functions in torch.overrides.get_overridable_functions().values()
            for each in functions
        }
        self._of_torch = Slots((torch, functional), lambda each: id(each) in overridable)
        caches = (cache_utils, *_classes_in(cache_utils))
        others = (sdpa_attention, activations, modeling_rope_utils, *_classes_in(activations))
        self._others = Slots((torch.Tensor, *caches, masking_utils, *others))
        self._tables = [(file, table, {**table}) for file, table in _tables()]
        self._is_users = is_users
        self._usual = {
            (id(slot.holder), slot.name): _MISSING if is_users(slot.function) else slot.function
            for slot in self._all()
        }
        self._is_usual = _MISSING not in self._usual.values()

    def _all(self) -> Iterator[Slot]:
        yield from self._of_torch
        yield from self._others

    def exchanged(self) -> tuple[Slot, ...]:
        """Return the functions that were replaced."""
        slots: tuple[Slot, ...] = ()
        if not (self._of_torch.are_same() and self._others.are_same() and self._is_usual):
            slots = tuple(
                slot
                for slot in self._all()
                if self._usual.get((id(slot.holder), slot.name)) is not slot.function
            )
        # Models of transformers may add their own entries.
        for file, table, usual in self._tables:
            for kind, made in table.items():
                if usual.get(kind, made) is not made or self._is_users(made):
                    slots += (Slot(file, kind, made),)
        return slots


def _tables() -> Iterator[tuple[ModuleType, Any]]:
    """Yield transformers' tables of cache layers and masks by type of layer, with their files."""
    yield cache_utils, getattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", {})
    yield masking_utils, getattr(masking_utils, "LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING", {})
