"""Loading a model and its tokenizer, including the embedded model from the package index.

For the command line, the examples and the benchmarks; decoding does not need it, and takes any
model, however loaded.
"""

from typing import TYPE_CHECKING, Any

from lade.models.embedded import embedded_model
from lade.models.loading import LoadedModel, load
from lade.models.prompts import encode, tool_calls

if TYPE_CHECKING:
    from lade.models.packing import pack

__all__ = ["LoadedModel", "embedded_model", "encode", "load", "pack", "tool_calls"]


def __getattr__(name: str) -> Any:
    if name != "pack":
        raise AttributeError(f"module 'lade.models' has no attribute {name!r}")
    from lade.models.packing import pack  # imports torch, which a command's help does not need

    return pack
