"""Functions under the names by which code finds them, and which of them somebody has exchanged.

lade runs kernels, masks and caches of its own in the place of functions of torch and transformers.
That is right only as long as these functions are what they were.
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
    """A name in a module or class, and the function that stands there."""

    holder: Any  # a module or a class
    name: str
    function: Any

    @property
    def path(self) -> str:
        """How code calls it."""
        parts = [self.name]
        if isinstance(self.holder, type):
            parts = [self.holder.__module__, self.holder.__qualname__, self.name]
        elif isinstance(self.holder, ModuleType):
            parts = [self.holder.__name__, self.name]
        return ".".join(parts)


class Slots:
    """The functions in some modules and classes, as they were when this was made.

    Args:
        holders: modules and classes.
        is_looked_at: whether a value is looked at; by default all that are callable.
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
                # The last name once more, so that one name alone makes a tuple, too.
                self._held.append((holder, itemgetter(*names, names[-1]), names))
        self._classes = [holder for holder, _, _ in self._held if isinstance(holder, type)]
        self._before = self._now()

    def are_same(self) -> bool:
        """Return whether each name stands for what it stood for, and no class has more of them."""
        return self._before == self._now()

    def __iter__(self) -> Iterator[Slot]:
        """Iterate over what stands there now; classes may have got new names."""
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
        except KeyError:  # one is gone
            return []
        return [functions, [len(vars(each)) for each in self._classes]]


def _is_function(value: Any) -> bool:
    return callable(value) or isinstance(value, property | staticmethod | classmethod)


def _classes_in(module: ModuleType) -> Iterator[type]:
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield value


class Replaced:
    """The functions of torch and transformers in whose place lade may run something else.

    Args:
        is_users: whether a function is the user's: one that was exchanged before this was made.
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
        self._layers, self._is_users = {**_layer_types()}, is_users
        self._usual = {
            (id(slot.holder), slot.name): _MISSING if is_users(slot.function) else slot.function
            for slot in self._all()
        }
        self._is_usual = _MISSING not in self._usual.values()

    def _all(self) -> Iterator[Slot]:
        yield from self._of_torch
        yield from self._others

    def exchanged(self) -> tuple[Slot, ...]:
        """Return those that are no more what they were."""
        slots: tuple[Slot, ...] = ()
        if not (self._of_torch.are_same() and self._others.are_same() and self._is_usual):
            slots = tuple(
                slot
                for slot in self._all()
                if self._usual.get((id(slot.holder), slot.name)) is not slot.function
            )
        # Files of transformers' models add layers of their own.
        for kind, layer in _layer_types().items():
            if self._layers.get(kind, layer) is not layer or self._is_users(layer):
                slots += (Slot(cache_utils, kind, layer),)
        return slots


def _layer_types() -> Any:
    """Return transformers' table of cache layers by type of layer, which models may add to."""
    return getattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", {})
