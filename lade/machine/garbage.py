"""Python's garbage collection, postponed while many lasting objects are made.

Imports and compilation make hundreds of thousands of objects. Meanwhile each full collection visits
all objects of the process: torch, transformers and the model's modules. In the first call of a
process, this is a third of the time outside of forward passes.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable the collection of cycles meanwhile, in all threads of the process.

    If several threads do so, the first one that ends enables it for all; this costs only time.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
