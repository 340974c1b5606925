"""A model as `torch.compile` makes it, one for each shape of a step."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lade.compat import Model
from lade.gpu.graphs import MAX_RECORDINGS


class CompiledModel:
    """A model compiled apart for each shape of its inputs.

    Told to compile one function for them all, torch would make its second version one of any
    width, with slower kernels, and none after the eighth. As many shapes are compiled as may be
    recorded; a further one is run as it is.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._of_shapes: dict[tuple[torch.Size, ...], Callable[..., Any]] = {}

    def __len__(self) -> int:
        """Return the number of shapes compiled for."""
        return len(self._of_shapes)

    def __call__(self, **inputs: Any) -> Any:
        """Run the model; the first time for a shape, compile it.

        In a dispatch mode, such as that of a rehearsal, the model runs as it is: torch compiles
        nothing there, and never again what it met there.
        """
        if _get_current_dispatch_mode() is not None:
            return self._model(**inputs)
        masks = inputs["attention_mask"]
        masks = [masks] if isinstance(masks, Tensor) else masks.values()
        shapes = (inputs["input_ids"].shape, *(mask.shape for mask in masks))
        if shapes not in self._of_shapes:
            if len(self) >= MAX_RECORDINGS:
                return self._model(**inputs)
            self._of_shapes[shapes] = torch.compile(_apart(self._model), dynamic=False)
        return self._of_shapes[shapes](**inputs)


def _apart(model: Model) -> Callable[..., Any]:
    """Return a function that runs a model, with code of its own: torch keeps results there."""

    def run(**inputs: Any) -> Any:
        return model(**inputs)

    return FunctionType(run.__code__.replace(), run.__globals__, "run", None, run.__closure__)
