"""An online n-gram pool: learns token sequences as they are written, and drafts continuations.

It needs numpy, numba and safetensors, for stores also sortedcontainers and filelock, and never
torch. It can be used alone (`README.md`): an engine's draft proposer needs only
`NGramPool.open_sequence` and `NGramPool.draft_chains`.
Reading order: `draft.py`, `pool.py`, `arrays.py`, `table.py`, `_kernels.py`; `files.py`,
`store.py`.
"""

from ngram_pool.draft import Draft, DraftChains, SampledDraft
from ngram_pool.errors import NewerPoolFileError, PoolFileError, ReadOnlyPoolError
from ngram_pool.pool import NGramPool
from ngram_pool.store import NamedPool, PoolStore, StoreStats
from ngram_pool.table import DEFAULT_NUM_SUCCESSORS

__all__ = [
    "DEFAULT_NUM_SUCCESSORS",
    "Draft",
    "DraftChains",
    "NGramPool",
    "NamedPool",
    "NewerPoolFileError",
    "PoolFileError",
    "PoolStore",
    "ReadOnlyPoolError",
    "SampledDraft",
    "StoreStats",
]
