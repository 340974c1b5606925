"""Loading a model and its tokenizer, including embedded models from the package index.

For the command line, the examples and the benchmarks; decoding does not need it, and takes any
model, however loaded.
"""

from lade.models.embedded import embedded_model
from lade.models.loading import LoadedModel, load
from lade.models.prompts import encode, tool_calls

__all__ = ["LoadedModel", "embedded_model", "encode", "load", "tool_calls"]
