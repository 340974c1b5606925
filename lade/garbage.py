"""Python's garbage collection, put off while much is made that stays.

Imports and compilation make hundreds of thousands of objects, and on the way each full collection
looks at all of the process: torch, transformers and the model's modules. Of the first call of a
process that is a third of what it takes beyond its forwards.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect no cycles of objects meanwhile, in any thread: collection belongs to the process.

    The first of several that are at it ends it for all, which costs the others time alone.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
