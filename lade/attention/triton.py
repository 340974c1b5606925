"""Attention over trees on a GPU, in Triton: `attend` of `tree.py` as fast kernels.

Flash decoding: the keys of a prefix are split among many programs. Each program holds the queries
of all heads that share these keys; a second kernel merges the results. A split's bounds follow from
the row's true length, which is read on the device, so a captured graph serves all lengths, each at
its own cost. The tree follows the last part of the prefix, in the same program.

Only `tree.py` imports this file, and only on a GPU: triton is not installed on every machine.
Scores are in units of log 2, because the device has exp2 but no exp.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lade.attention.masks import Seen

_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32; not -inf: -inf - -inf is NaN

# A smaller split would cost more to merge than to attend to. The partial results of 64 queries in
# float32, written and read, take as many bytes as the keys and values of 128 slots in 16 bits.
_MIN_SLOTS = 128
_MIN_SLOTS_OF_MANY_QUERIES = 512
_MAX_QUERIES = 64
_MAX_SPLITS = 64  # the merge holds the parts of all splits of a query in registers
_FEW_SPLITS = 16  # the merge is compiled for this number and for the most

# Sizes of trees must not compile a kernel again: for 1 and for multiples of 16, Triton would.
_jit: Callable[[Callable[..., Any]], Any] = triton.jit(
    do_not_specialize=("num_nodes", "num_packed", "num_splits")
)

# A process compiles one kernel at a time, at its launch; waiting threads cost nothing.
_COMPILING = threading.Lock()


class _Blocks(NamedTuple):
    """The block sizes that the first kernel is compiled for."""

    block_m: int  # queries
    block_n: int  # keys
    block_k: int  # dims of keys and of values, powers of two; excess dims are masked
    block_v: int
    min_slots: int  # of a split, if the prefix has as many
    num_warps: int
    num_stages: int  # blocks of keys and values in shared memory, including the one in use


def attend_by_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Seen,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    num_processors: int | None = None,
) -> Tensor:
    """Attend over prefixes and trees; nothing is read on the host.

    Args:
        query: [rows, num_heads, num_nodes, head_dim], float16, bfloat16 or float32.
        key, value: [rows, num_key_heads, num_slots, head_dim of each], views of any strides; slots
            before all starts, or after a row's own nodes, are never read.
        seen: where the prefix and the nodes lie, and which node sees what.
        scaling, softcap, sinks: as for `attend` of `tree.py`.
        num_processors: number of multiprocessors to split the work for; None for the device's own,
            a CPU (in Triton's interpreter) has none.

    Returns:
        [rows, num_nodes, num_heads, head_dim of values], in the dtype of the queries.

    Source: flash decoding; one softmax in parts: arXiv 2205.14135, section 3.1.
    """
    rows, num_heads, num_nodes, head_dim = query.shape
    num_key_heads, num_slots, value_dim = value.shape[1:]
    num_cached, starts, ancestors = seen
    num_lists, num_packed = rows * num_key_heads, num_heads // num_key_heads * num_nodes
    blocks, at_once = _blocks(num_packed, head_dim, value_dim, query.dtype)
    num_blocks = triton.cdiv(num_packed, blocks.block_m)
    of_nodes = ancestors.contiguous().view(torch.uint8)
    at_once *= num_processors or _num_processors(query.device)
    num_splits = _num_splits(num_lists * num_blocks, num_slots, at_once, blocks.min_slots)

    of_splits = (num_lists, num_splits, num_packed)
    summed = query.new_empty(*of_splits, value_dim, dtype=torch.float32)
    totals = query.new_empty(of_splits, dtype=torch.float32)
    peaks = torch.empty_like(totals)
    attended = query.new_empty(rows, num_nodes, num_heads, value_dim)
    with torch.cuda.device(query.get_device()):  # Triton launches on the current one
        _launch(
            _attend_to_split,
            (num_lists, num_blocks, num_splits),
            query,
            key,
            value,
            num_cached.contiguous(),
            starts.contiguous(),
            of_nodes,
            summed,
            totals,
            peaks,
            *query.stride(),
            *key.stride(),
            *value.stride(),
            num_key_heads,
            num_nodes,
            num_packed,
            scaling,
            1.0 if softcap is None else softcap,
            has_softcap=softcap is not None,
            head_dim=head_dim,
            value_dim=value_dim,
            **blocks._asdict(),
            enable_fp_fusion=True,  # explicit: Triton 3.9 warns that the default will change
        )
        _launch(
            _merge_splits,
            (num_lists, num_packed),
            summed,
            totals,
            peaks,
            peaks if sinks is None else sinks.contiguous(),
            attended,
            num_key_heads,
            num_nodes,
            num_splits,
            has_sinks=sinks is not None,
            value_dim=value_dim,
            block_s=_FEW_SPLITS if num_splits <= _FEW_SPLITS else _MAX_SPLITS,
            block_v=blocks.block_v,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return attended


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    with _COMPILING:
        kernel[grid](*args, **options)


def _blocks(
    num_packed: int, head_dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[_Blocks, int]:
    """Return blocks that fit the shared memory of every GPU of compute capability 8.0 or above.

    And how many such programs a multiprocessor runs at once, as far as that is useful.
    """
    key_dims, value_dims = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim, value_dim))
    is_wide = max(key_dims, value_dims) > 128
    queries = min(_MAX_QUERIES, max(16, triton.next_power_of_2(num_packed)))
    # Compiled for 8.0, 9.0 and 12.0, these keep nearly all in registers: four warps for 64 queries
    # of 128 dims spill 300 to 500 bytes per thread, and 32 keys in float32 spill two thousand. Two
    # programs per multiprocessor hide each other's latency; a large one has no room for another.
    if dtype == torch.float32:  # no tensor cores: all products and sums are in registers
        return _Blocks(16, 16, key_dims, value_dims, _MIN_SLOTS, 8, 1), 2
    num_warps = 8 if is_wide or queries == _MAX_QUERIES else 4
    per_processor = 1 if num_warps == 8 and queries > 16 else 2
    # As many as fit 100 KiB of shared memory (8.6, 8.9 and 12.0) also with the releases of Triton
    # that GPU builds of torch bring along: 3.9 would have room for twice as many in two cases.
    if is_wide:
        num_keys = 16 if queries == _MAX_QUERIES else 32
    else:
        num_keys = 32 if queries == 32 and max(key_dims, value_dims) == 128 else 64
    min_slots = _MIN_SLOTS_OF_MANY_QUERIES if queries == _MAX_QUERIES else _MIN_SLOTS
    blocks = _Blocks(queries, num_keys, key_dims, value_dims, min_slots, num_warps, 2)
    return blocks, per_processor


def _num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _num_splits(num_programs: int, num_slots: int, at_once: int, min_slots: int) -> int:
    """Return the number of splits; `num_programs` programs run each of them.

    At most as many as run at once: the remainder would take as long as all the others. It depends
    only on shapes and the device, so that a captured graph stays valid.
    """
    most = min(_MAX_SPLITS, triton.cdiv(num_slots, min_slots))
    return int(max(1, min(at_once // num_programs, most)))


@_jit
def _attend_to_split(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    num_cached: tl.tensor,
    starts: tl.tensor,
    ancestors: tl.tensor,
    summed_of_all: tl.tensor,
    totals_of_all: tl.tensor,
    peaks_of_all: tl.tensor,
    query_row: tl.tensor,  # strides, in elements
    query_head: tl.tensor,
    query_node: tl.tensor,
    query_dim: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    key_slot: tl.tensor,
    key_dim: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    value_slot: tl.tensor,
    value_dim_: tl.tensor,
    num_key_heads: tl.tensor,
    num_nodes: tl.tensor,
    num_packed: tl.tensor,
    scaling: tl.tensor,
    softcap: tl.tensor,
    has_softcap: tl.constexpr,
    min_slots: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    block_v: tl.constexpr,
) -> None:
    """Attend with a block of one key head's queries to one split of its keys.

    Program ids: row and key head, block of queries, split. The last split ends with the tree.
    """
    of_list = tl.program_id(0).to(tl.int64)
    row, key_head_id = of_list // num_key_heads, of_list % num_key_heads
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    packed = tl.program_id(1) * block_m + tl.arange(0, block_m)
    is_query = packed < num_packed
    node = packed % num_nodes
    key_dims, value_dims = tl.arange(0, block_k), tl.arange(0, block_v)

    # Equal parts of the prefix slots that any of these queries sees and of the nodes behind them;
    # the last split has all of the nodes, and so less of the prefix.
    end = tl.load(num_cached + row)
    start = tl.load(starts + row * num_nodes + node, mask=is_query, other=end)
    begin = tl.minimum(tl.min(start, axis=0), end)
    share = tl.cdiv(tl.cdiv(end - begin + num_nodes, num_splits), block_n) * block_n
    share = tl.maximum(share, min_slots)
    begin += split * share
    end_of_split = tl.minimum(begin + share, end)
    num_tree = tl.where(split == num_splits - 1, num_nodes, 0)
    num_used = tl.where(tl.maximum(end - begin, num_tree) > 0, num_packed, 0)

    head = key_head_id * (num_packed // num_nodes) + packed // num_nodes
    queries = tl.load(
        query
        + row * query_row
        + (head * query_head + node * query_node)[:, None]
        + (key_dims * query_dim)[None, :],
        mask=(packed < num_used)[:, None] & (key_dims < head_dim)[None, :],
        other=0.0,
    )
    keys = key + row * key_row + key_head_id * key_head + (key_dims * key_dim)[:, None]
    values = value + row * value_row + key_head_id * value_head + (value_dims * value_dim_)[None, :]
    is_key_dim, is_value_dim = key_dims < head_dim, value_dims < value_dim

    summed = tl.zeros([block_m, block_v], dtype=tl.float32)
    totals = tl.zeros([block_m], dtype=tl.float32)
    peaks = tl.full([block_m], _LOWEST, dtype=tl.float32)
    for first in range(begin, end_of_split, block_n):
        slots = first + tl.arange(0, block_n)
        is_there = slots < end_of_split
        some_keys = _loaded_keys(keys, slots, key_slot, is_key_dim, is_there)
        scores = _scores(queries, some_keys, scaling, softcap, has_softcap)
        sees = is_there[None, :] & (slots[None, :] >= start[:, None])
        scores = tl.where(sees, scores, float("-inf"))
        some_values = _loaded_values(values, slots, value_slot, is_value_dim, is_there)
        summed, totals, peaks = _folded(scores, some_values, summed, totals, peaks)
    of_tree = ancestors + row * num_nodes * num_nodes + (node * num_nodes)[:, None]
    for first in range(0, num_tree, block_n):
        others = first + tl.arange(0, block_n)
        is_there = others < num_nodes
        some_keys = _loaded_keys(keys, end + others, key_slot, is_key_dim, is_there)
        scores = _scores(queries, some_keys, scaling, softcap, has_softcap)
        is_pair = is_query[:, None] & is_there[None, :]
        sees = tl.load(of_tree + others[None, :], mask=is_pair, other=0)
        scores = tl.where(sees != 0, scores, float("-inf"))
        some_values = _loaded_values(values, end + others, value_slot, is_value_dim, is_there)
        summed, totals, peaks = _folded(scores, some_values, summed, totals, peaks)

    # Queries that saw nothing here store a total of 0; their sum is neither written nor read.
    at = (of_list * num_splits + split) * num_packed + packed
    tl.store(totals_of_all + at, totals, mask=is_query)
    tl.store(peaks_of_all + at, peaks, mask=is_query)
    tl.store(
        summed_of_all + at[:, None] * value_dim + value_dims[None, :],
        summed,
        mask=(is_query & (totals > 0.0))[:, None] & is_value_dim[None, :],
    )


@_jit
def _loaded_keys(
    keys: tl.tensor, slots: tl.tensor, stride: tl.tensor, is_dim: tl.tensor, is_there: tl.tensor
) -> tl.tensor:
    """Load a block [dims, keys]; offsets in a cache may exceed 2**31."""
    pointers = keys + (slots.to(tl.int64) * stride)[None, :]
    return tl.load(pointers, mask=is_dim[:, None] & is_there[None, :], other=0.0)


@_jit
def _loaded_values(
    values: tl.tensor, slots: tl.tensor, stride: tl.tensor, is_dim: tl.tensor, is_there: tl.tensor
) -> tl.tensor:
    """Load a block [keys, dims], without slots that may hold NaN: 0 * NaN is NaN."""
    pointers = values + (slots.to(tl.int64) * stride)[:, None]
    return tl.load(pointers, mask=is_there[:, None] & is_dim[None, :], other=0.0)


@_jit
def _scores(
    queries: tl.tensor,
    keys: tl.tensor,
    scaling: tl.tensor,
    softcap: tl.tensor,
    has_softcap: tl.constexpr,
) -> tl.tensor:
    """Return scores [queries, keys] in units of log 2, for keys [dims, keys]."""
    scores = tl.dot(queries, keys, input_precision="ieee") * scaling
    if has_softcap:
        # tanh, written so that overflow of the exponential yields the limit 1.
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2_E) / softcap) + 1.0))
    return scores * _LOG2_E


@_jit
def _folded(
    scores: tl.tensor, values: tl.tensor, summed: tl.tensor, totals: tl.tensor, peaks: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return sums, totals and peaks with one more block of keys."""
    higher = tl.maximum(peaks, tl.max(scores, axis=1))
    shrink = tl.exp2(peaks - higher)
    weights = tl.exp2(scores - higher[:, None])
    totals = totals * shrink + tl.sum(weights, axis=1)
    summed = summed * shrink[:, None]
    summed += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return summed, totals, higher


@_jit
def _merge_splits(
    summed_of_all: tl.tensor,
    totals_of_all: tl.tensor,
    peaks_of_all: tl.tensor,
    sinks: tl.tensor,
    attended: tl.tensor,
    num_key_heads: tl.tensor,
    num_nodes: tl.tensor,
    num_splits: tl.tensor,
    has_sinks: tl.constexpr,
    value_dim: tl.constexpr,
    block_s: tl.constexpr,
    block_v: tl.constexpr,
) -> None:
    """Merge the splits of one query; program ids: row and key head, query in that head's list."""
    of_list, packed, num_packed = (
        tl.program_id(0).to(tl.int64),
        tl.program_id(1),
        tl.num_programs(1),
    )
    row, num_sharing = of_list // num_key_heads, num_packed // num_nodes
    head = of_list % num_key_heads * num_sharing + packed // num_nodes
    splits, dims = tl.arange(0, block_s), tl.arange(0, block_v)
    at = (of_list * num_splits + splits) * num_packed + packed
    totals = tl.load(totals_of_all + at, mask=splits < num_splits, other=0.0)
    peaks = tl.load(peaks_of_all + at, mask=splits < num_splits, other=_LOWEST)
    summed = tl.load(
        summed_of_all + at[:, None] * value_dim + dims[None, :],
        mask=(totals > 0.0)[:, None] & (dims < value_dim)[None, :],
        other=0.0,
    )
    peak = tl.max(peaks, axis=0)
    if has_sinks:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2_E
        peak = tl.maximum(peak, sink)
    scales = tl.exp2(peaks - peak)
    total = tl.sum(totals * scales, axis=0)
    if has_sinks:
        total += tl.exp2(sink - peak)
    result = tl.sum(summed * scales[:, None], axis=0) / total  # total > 0: a node sees itself
    node = (row * num_nodes + packed % num_nodes) * (num_key_heads * num_sharing) + head
    tl.store(
        attended + node * value_dim + dims,
        result.to(attended.dtype.element_ty),
        mask=dims < value_dim,
    )
