"""Tiny models that tests share, since making one takes longer than to answer with it.

A test that only lets a model answer takes `shared_model`. One that changes its model, hooks or
wraps it, or sets its generation config, takes a model of its own, `tests.lade.tiny.tiny_model`.
`conftest.py` looks after each test whether this was kept, and has lade forget all that it knows.
"""

from collections import OrderedDict
from typing import Any

from tests.lade.tiny import tiny_model

_MOST = 64  # models; the one not used for longest goes first

_Key = tuple[Any, ...]


class _Shared:
    """A model, and what it was made of."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._before = _state_of(model)

    def changes(self) -> list[str]:
        """Name what is not as it was; costs a fraction of a millisecond."""
        after = _state_of(self.model)
        return [name for name, state in self._before.items() if after[name] != state]


def _state_of(model: Any) -> dict[str, Any]:
    modules = [*model.modules()]
    hooks = [
        id(hook)
        for each in modules
        for hook in (*each._forward_hooks.values(), *each._forward_pre_hooks.values())
        # Which transformers leaves to collect outputs by.
        if not getattr(hook, "__module__", "").startswith("transformers.")
    ]
    weights = [*model.parameters(), *model.buffers()]
    return {
        "modules": [(id(each), type(each), each.training) for each in modules],
        "hooks": hooks,
        "config": repr(model.config),
        "generation config": repr(model.generation_config),
        "attributes": {name: id(each) for name, each in vars(model).items() if name[:5] != "_lade"},
        # How often they were written to in place.
        "weights": [(each.data_ptr(), each._version) for each in weights],
    }


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


def hand_back() -> list[str]:
    """End the use of models by a test; return what it changed, in models that nobody gets again."""
    told = []
    for key, shared in _in_use.items():
        changes = shared.changes()
        if changes:
            _models.pop(key, None)
            told.append(f"tiny_model{key}: {', '.join(changes)}")
    _in_use.clear()
    return told


def forget() -> None:
    """Let lade know nothing of any model, also of those that a fixture of a module has made."""
    for shared in _models.values():
        for name in [name for name in vars(shared.model) if name.startswith("_lade")]:
            delattr(shared.model, name)
