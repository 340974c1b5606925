"""Drafters that are models, and what combines drafters: objects for `drafter=`.

`AssistantModel` is another causal LM, `FirstLayers` the target's own first layers. What both share
is in `model_drafter.py`: how far a draft goes and which tree it is, in `growing.py`.
`runner.py` runs a model with a cache of its own. `Merged` is a list of several drafters;
`prediction.py` is the argument `prediction` as one.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lade.drafters.assistant import AssistantModel as AssistantModel
    from lade.drafters.first_layers import FirstLayers as FirstLayers
    from lade.drafters.merged import CallPool as CallPool
    from lade.drafters.merged import Merged as Merged

# Imported at first use, as those of `lade` are.
_HOMES = {
    "AssistantModel": "lade.drafters.assistant",
    "CallPool": "lade.drafters.merged",
    "FirstLayers": "lade.drafters.first_layers",
    "Merged": "lade.drafters.merged",
}

__all__ = [*_HOMES]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'lade.drafters' has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
