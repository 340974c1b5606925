"""An online n-gram pool: learns token sequences as they are written, drafts how they go on.

It needs numpy and numba, and sortedcontainers and filelock for stores, never torch, and is usable
alone: an engine's draft proposer needs no more than `NGramPool.observe` and
`NGramPool.draft_chains`. Reading order:
`draft.py`, `pool.py`, `arrays.py`, `table.py`, `_kernels.py`; `files.py`, `store.py`.
"""

from ngram_pool.draft import Draft, DraftChains, SampledDraft
from ngram_pool.errors import NewerPoolFileError, PoolFileError, ReadOnlyPoolError
from ngram_pool.pool import NGramPool
from ngram_pool.store import NamedPool, PoolStore, StoreStats
from ngram_pool.table import DEFAULT_NUM_SUCCESSORS, SuccessorTable

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
    "SuccessorTable",
]
