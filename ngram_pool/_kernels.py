"""Every Numba function of the pool, and nothing else.

They share one file because Numba's disk cache does not notice an edit in another one. They take
arrays and scalars that Python has checked, and they allocate nothing: the pool owns all buffers.

How the text is held. Each observed token gets the next *position*, 0, 1, 2, …; the token at
position `p` is in row `p % num_rows`, so that the newest `num_rows` tokens are held and the oldest
is overwritten first. `first` is the oldest position still held.

    text      [num_rows, 3]     token id, previous position, next position; NONE for none
    links     [num_rows, N]     by order: the next older position in the same bucket
    heads     [N, num_buckets]  by order: the newest position in each bucket
    counts    [4]               the next position, the sum by which positions were lowered so far,
                                and the hash's first state and multiplier, which are the pool's seed
    sequence  [3]               state of an open sequence: its last position, and the first ones of
                                its prompt and of its answer

The previous and the next position are those of the same sequence; they differ from p-1 and p+1 only
where sequences grow interleaved. The n-gram *ending* at `p` belongs to one bucket of its order,
found by hashing; links lead from a bucket's head to ever older positions, as in the hash chains of
LZ77 matchers. Old entries are not deleted: a position older than `first` ends a chain. Text and
links are separate arrays because matching often reads the text of neighbouring positions, never
their links.

Kernels get a pool, a table, a sequence and scratch by their *headers*: int64 rows with the address
and the shape of each of their arrays (`arrays.py`). So a kernel is compiled once for all of them, a
call costs as much as passing four arrays, and the headers of many pools form one array. The caller
must keep the arrays alive. A *layer* is a read-only pool that a sequence drafts from, too. The
*texts* of a sequence are that of its pool and those of its layers, its *tables* likewise, in this
order.

Arguments of one name mean the same in all kernels:

    pool, sequence, scratch, table  int64 headers, read by the functions of `_views`
    context    int64 [length], the tokens before the one to predict, newest first
    max_order  the longest n-gram of the context to look up, at most N
    path_prob  probability of the node whose context it is, along its whole path
    found, features  rows of scratch, one column or row for each candidate token
    num        number of candidates so far; the new number is returned
    position   of a token in the text; `first` is the oldest held one

No signal is noticed while a kernel runs. So one kernel makes all changes that belong together,
counts included: then the pool is consistent wherever Python is interrupted.

Next file: `pool.py`.
"""

import ctypes
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import types
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array
from numpy.typing import NDArray

from ngram_pool.caching import KernelCache

_F = TypeVar("_F", bound=Callable[..., Any])
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]


def kernel(function: _F, **options: Any) -> _F:
    """Compile at first call, to run without the GIL; keep the code on disk."""
    options |= {"nogil": True, "no_cfunc_wrapper": True}  # C never calls them
    # Kernels must allocate nothing and never divide by zero: then Numba counts no references, which
    # would be two atomic additions for each view of an array, and checks no division.
    options |= {"_nrt": False, "error_model": "numpy"}
    compiled = numba.njit(**options)(function)
    if isinstance(compiled, Dispatcher):
        dispatcher: Any = compiled
        with suppress(OSError, RuntimeError):  # no source files
            dispatcher._cache = KernelCache(function)
        # Otherwise Numba compiles a function again for each constant that a kernel passes to it,
        # and for each kind of integer: half of all compile time.
        template_of = compiled.get_call_template
        dispatcher.get_call_template = lambda args, kws: template_of((*map(_plain, args),), kws)
    return cast(_F, compiled)


def inlined(function: _F) -> _F:
    """Compile like `kernel`, into its callers: a call would cost as much as the work."""
    return kernel(function, forceinline=True)


def _plain(of: Any) -> Any:
    """Return the type by which kernels pass a value to each other."""
    of = types.unliteral(of)
    return types.int64 if isinstance(of, types.Integer) else of


MAX_TOKEN_ID = np.iinfo(np.int32).max  # also the largest hash
MAX_CAPACITY_TOKENS = 2**29  # int32 positions count four times as many before they are lowered
NONE = -1  # "no position" and "no node" inside arrays
TOKEN, PREVIOUS, NEXT = range(3)  # columns of `text`
NEXT_POSITION, LOWERED, SEED, MULTIPLIER = range(4)  # entries of `counts`
# Origins of text. PROMPT and ANSWER also index their first positions in `sequence`; the index that
# EARLIER would have is that of the last position, TAIL.
EARLIER, PROMPT, ANSWER = range(3)
TAIL = EARLIER
NEVER = 2**62  # first position of a prompt or an answer that has not begun
# An occurrence is written as its position plus this number times its source: 0 for the pool's text,
# 1, 2, … for the layers.
_SOURCE = MAX_TOKEN_ID + 1

# 31-bit states times a multiplier under 2**31 stay below 2**62: no overflow, compiled or not.
HASH_MULTIPLIER = 0x5851F42D  # of tables, and of the text of a pool whose seed is 0

# Probabilities of successors. All values below were fitted to recorded greedy answers of
# SmolLM2-135M-Instruct; the optimum is flat: 10 % either way costs less than 1 % of the mean
# accepted tokens.
#
# Share of the probability that the longest matching context leaves to unseen tokens, times
# sqrt(distinct successors / occurrences): the first, divided by 1 + the length, if all its
# occurrences had the same successor; the second if they differed.
_ESCAPE_UNANIMOUS, _ESCAPE_DIVIDED = 1.5, 0.6
# Share of the remaining probability that goes to successors added by a shorter context.
_BACKOFF_SHARE = 0.35
# Maximum number of occurrences of a node's contexts to read, newest first, and half as many where
# the node itself is unlikely. 16 accepted as many tokens as 8 in twice the time; 4 accepted 1.5 %
# fewer. Reading fewer for unlikely nodes lost nothing and took 17 % off a 32-node draft.
MAX_OCCURRENCES = 8
UNLIKELY = 0.1
# Shorter contexts are read while at least this much probability is left for their successors. At
# 0.004 as many tokens were accepted, at 0.08 up to 1 % fewer; a draft takes 35 % less time than at
# 0.004.
READ_ON = 0.03
# Matches are followed back for at most this many tokens, or N where the node is unlikely: a longer
# match is trusted more.
MAX_MATCH = 32
# Maximum number of entries of one bucket to read. On average a bucket holds one or two positions of
# other n-grams; this only bounds the rare context that shares its bucket with a very frequent one,
# and the cost of a text made so that its n-grams collide: a draft of 64 nodes took 0.16 ms instead
# of 0.05, and 2.0 with 4096. Of 4000 drafts for program text, none differs from those with 4096,
# and four do with 64. Without the pool's seed, nobody can make such a text. Drafts depend on the
# seed only through this limit, which counts all entries of a bucket. (Tables need no seed: a full
# bucket drops its oldest context, so none takes longer.)
MAX_CHAIN = 256
# A node less likely than this is drafted only as the best successor of its parent, so that a draft
# runs as deep as the text that it follows. Other such nodes gain less than they cost to verify.
MIN_PROB = 1e-3

# --- how sources are blended; see `estimate` ---
#
# Sources of successors: the text itself; the target's successors of the last two tokens and of the
# last one; what it found likely in place of the last token, and its successors of that; the tokens
# that it uses most. The evidence of a source for a candidate token is its log-probability minus
# LEAST_LOG_PROB, or 0 for none.
TEXT, HARVESTED_PAIR, HARVESTED_SINGLE, INSTEAD, AFTER_INSTEAD, UNIGRAM = range(6)
NUM_TABLE_SOURCES = INSTEAD  # the first sources, for which no evidence counts as silence
# Features of a candidate from the text: logarithms of the length of its longest match and of its
# number of occurrences, whether it followed the newest of the longest matches, and whether its
# nearest origin is the answer or the prompt.
LENGTH, COUNT, IS_NEWEST, IN_ANSWER, IN_PROMPT = range(6, 11)
NUM_FEATURES = IN_PROMPT + 1
SILENCE = NUM_FEATURES  # first of the weights for sources without evidence
FURTHER = SILENCE + NUM_TABLE_SOURCES  # weight of a candidate for which they all are silent
BIAS = FURTHER + 1
NUM_WEIGHTS = BIAS + 1
# Rows of weights. The weights of a context are the sum of three rows: by the match in the text; by
# the origin of its newest occurrence; by which table knows the last pair: none, the pool's, or a
# layer's. Each of the first layers has its own row among the origins; further layers share the last
# row.
ORIGIN_ROW, KNOWN_ROW, LAYER_ROW, NUM_WEIGHT_ROWS = 11, 14, 17, 21
LEAST_LOG_PROB = math.log(1e-4)
# Weights of evidence learn at a tenth of the rate, because evidence is ten times as large.
_OF_FEATURES = 0.1
_LOGS = np.array([-math.inf, *(math.log(number) for number in range(1, 64))])
# The most used tokens that are candidates at every node.
NUM_OFTEN = 32
# Maximum number of candidates without layers: from text; for a pair, for a single token and for
# those in place of the last token, each from one table, with the successors of the latter; and the
# most used ones. Each layer with text adds candidates from text.
MAX_FOUND = NUM_OFTEN + (4 + 8) * MAX_OCCURRENCES


@inlined
def row_of(position: int, num_rows: int) -> int:
    """Return the row of a position; a valid row even if arrays hold noise.

    A division takes longer than all other work with a position.
    """
    return position if 0 <= position < num_rows else position % num_rows


@inlined
def hash_with(state: int, token_id: int, multiplier: int) -> int:
    """Extend the hash of an n-gram by the token before it; the hash of no token is the seed."""
    product = ((state ^ token_id) & MAX_TOKEN_ID) * multiplier
    return (product ^ (product >> 29)) & MAX_TOKEN_ID


# --- headers: arrays by their addresses and shapes ---
#
# `_views` makes functions that return groups of the arrays of a header, in its order, by LLVM's
# builder: as Numba functions, they took a fifth of the pool's compile time. Constant lengths are
# given, so that the compiler knows them.

_Kind = tuple[Any, tuple[int | None, ...]]  # dtype and shape


def _views(*groups: tuple[_Kind, ...]) -> list[Any]:
    """Return for each group a function from a header to its arrays: one, or a tuple of several."""
    views = []
    column = 0
    for group in groups:
        columns = []
        for _, shape in group:
            columns.append(column)
            column += 1 + len(shape)
        views.append(_view([*zip(columns, group, strict=True)]))
    return views


if numba.config.DISABLE_JIT:

    def _view(arrays: list[tuple[int, _Kind]]) -> Any:
        def arrays_of(header: Int64Array) -> Any:
            found = []
            for column, (dtype, shape) in arrays:
                address, *lengths = header[column : column + 1 + len(shape)].tolist()
                kind = ctypes.POINTER(np.ctypeslib.as_ctypes_type(dtype))
                found.append(np.ctypeslib.as_array(ctypes.cast(address, kind), tuple(lengths)))
            return found[0] if len(found) == 1 else tuple(found)

        return arrays_of

else:

    def _view(arrays: list[tuple[int, _Kind]]) -> Any:
        kinds = [
            types.Array(numba.from_dtype(np.dtype(of)), len(shape), "C")
            for _, (of, shape) in arrays
        ]
        result = kinds[0] if len(kinds) == 1 else types.Tuple(kinds)

        def arrays_of(typing_context: Any, header: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                columns = make_array(header)(context, builder, arguments[0]).data

                def constant(number: int) -> Any:
                    return context.get_constant(types.intp, number)

                def built(kind: Any, column: int, shape: tuple[int | None, ...]) -> Any:
                    """Build an array in place, without references that are counted."""
                    address, *lengths = (
                        builder.load(builder.gep(columns, [constant(column + i)]))
                        for i in range(1 + len(shape))
                    )
                    lengths = [
                        found if length is None else constant(length)
                        for found, length in zip(lengths, shape, strict=True)
                    ]
                    element = context.get_data_type(kind.dtype)
                    strides = [constant(context.get_abi_sizeof(element))]
                    for length in reversed(lengths[1:]):
                        strides.insert(0, builder.mul(strides[0], length))
                    array = make_array(kind)(context, builder)
                    data = builder.inttoptr(address, element.as_pointer())
                    populate_array(array, data, lengths, strides, strides[-1], meminfo=None)
                    return array._getvalue()

                made = [
                    built(kind, column, shape)
                    for kind, (column, (_, shape)) in zip(kinds, arrays, strict=True)
                ]
                return made[0] if len(made) == 1 else context.make_tuple(builder, result, made)

            return result(header), generate

        return intrinsic(arrays_of)


# Arrays of a pool: text and links; heads; counts; weights; tokens and their expected counts; the
# header of the table of harvested successors; the tokens of most counts with their evidence.
text_of, heads_of, counts_of, weights_of, unigrams_of, harvested_of, often_of = _views(
    ((np.int32, (None, 3)), (np.int32, (None, None))),
    ((np.int32, (None, None)),),
    ((np.int64, (4,)),),
    ((np.float64, (NUM_WEIGHT_ROWS, NUM_WEIGHTS)),),
    ((np.int32, (None,)), (np.float64, (None,))),
    ((np.int64, (None,)),),
    ((np.int32, (NUM_OFTEN,)), (np.float64, (NUM_OFTEN,))),
)
# Arrays of a sequence: its state; the headers of its layers with text; the headers of its layers'
# tables that hold anything.
state_of, layers_of, tables_of = _views(
    ((np.int64, (3,)),), ((np.int64, (None, None)),), ((np.int64, (None, None)),)
)
# Arrays of a table: keys, successors and their costs, and how often each row was put; the number of
# contexts held, in an array of length one.
rows_of, size_of = _views(
    ((np.int64, (None,)), (np.int32, (None, None)), (np.uint16, (None, None)), (np.int32, (None,))),
    ((np.int64, (1,)),),
)
# Arrays of scratch:
# - a context, newest token first, as long as the longest context that matters;
# - the successors found after a context, and their probabilities. Rows of the first: 0 occurrences,
#   1 token ids of successors, 2 their counts, 3 their nearest origin, 4 lengths of the occurrences,
#   or in the end the rows of weights used, 5 tokens after the occurrences, 6 lengths of the
#   successors' longest match; from 7 on, for each source, the positions that `look_up` finds;
# - the features of the successors, and the weights of a context;
# - the nodes of a tree, and their probabilities. Rows of the first: token, parent, depth, number of
#   children, length of the longest match;
# - candidates for nodes, and their probabilities. Rows of the first: token, parent, a heap of
#   candidates;
# - for a drawn tree: the successors of each node, the root's first; their path probabilities, 0
#   once drawn; and for each node, the distribution that it was drawn from, over its parent's
#   successors.
context_of, found_of, features_of, nodes_of, candidates_of, left_of = _views(
    ((np.int64, (None,)),),
    ((np.int64, (None, None)), (np.float64, (None,))),
    ((np.float64, (None, NUM_FEATURES)), (np.float64, (NUM_WEIGHTS,))),
    ((np.int64, (5, None)), (np.float64, (None,))),
    ((np.int64, (3, None)), (np.float64, (None,))),
    ((np.int64, (None, None)), (np.float64, (None, None)), (np.float64, (None, None))),
)


@inlined
def first_of(pool: Int64Array) -> int:
    """Return the oldest position that a pool holds."""
    return max(0, int(counts_of(pool)[NEXT_POSITION] - text_of(pool)[0].shape[0]))


@inlined
def index_position(pool: Int64Array, position: int, first: int) -> None:
    """Put the n-grams of every order that end at `position` at the head of their buckets."""
    (text, links), heads, counts = text_of(pool), heads_of(pool), counts_of(pool)
    num_rows = text.shape[0]
    bucket_mask = heads.shape[1] - 1
    row = row_of(position, num_rows)
    state, multiplier = int(counts[SEED]), int(counts[MULTIPLIER])
    reached = position
    for order in range(heads.shape[0]):
        if reached < first:  # the sequence, or its held part, is shorter than this order
            links[row, order] = NONE
            continue
        reached_row = row_of(reached, num_rows)
        state = hash_with(state, int(text[reached_row, TOKEN]), multiplier)
        bucket = state & bucket_mask
        links[row, order] = heads[order, bucket]
        heads[order, bucket] = position
        reached = int(text[reached_row, PREVIOUS])


@kernel
def append(
    pool: Int64Array,
    sequence: Int64Array,
    scratch: Int64Array,
    token_ids: Int32Array,
    learning_rate: float,
    learning_stride: int,
    num_before: int,
) -> None:
    """Append `token_ids` to a sequence: to its prompt, or with a rate above 0 to its answer.

    Args:
        token_ids: int32 [num_tokens].
        learning_rate: rate at which weights learn from tokens of an answer, before each is
            appended; 0 for a prompt.
        learning_stride: only every so many-th token teaches the weights.
        num_before: tokens to count for this stride before the first one.
    """
    (text, _), counts, state = text_of(pool), counts_of(pool), state_of(sequence)
    num_rows = text.shape[0]
    for i in range(token_ids.shape[0]):
        token_id, position, tail = int(token_ids[i]), int(counts[NEXT_POSITION]), int(state[TAIL])
        state[PROMPT] = min(state[PROMPT], position)
        if learning_rate > 0.0:
            state[ANSWER] = min(state[ANSWER], position)
            if (num_before + i + 1) % learning_stride == 0:
                learn(pool, sequence, scratch, tail, token_id, learning_rate)
        first = max(0, position - num_rows + 1)  # once this token has overwritten its row
        if tail < first:
            tail = NONE
        row = row_of(position, num_rows)
        text[row, TOKEN] = token_id
        text[row, PREVIOUS] = tail
        text[row, NEXT] = NONE
        if tail != NONE:
            text[row_of(tail, num_rows), NEXT] = position
        index_position(pool, position, first)
        state[TAIL] = position
        counts[NEXT_POSITION] = position + 1


@kernel
def reindex(pool: Int64Array) -> None:
    """Rebuild the links; links and heads must be empty."""
    first = first_of(pool)
    for position in range(first, int(counts_of(pool)[NEXT_POSITION])):
        index_position(pool, position, first)


@kernel
def rebase(pool: Int64Array) -> None:
    """Lower every held position, and forget older ones; the caller lowers those of sequences."""
    (text, links), heads, counts = text_of(pool), heads_of(pool), counts_of(pool)
    first = first_of(pool)
    shift = first // text.shape[0] * text.shape[0]  # so that every position keeps its row
    for table, first_column in ((text, PREVIOUS), (links, 0), (heads, 0)):
        for row in range(table.shape[0]):
            for column in range(first_column, table.shape[1]):
                value = int(table[row, column])
                table[row, column] = value - shift if value >= first else NONE
    counts[NEXT_POSITION] -= shift
    counts[LOWERED] += shift


@inlined
def log_of(number: int) -> float:
    """Return the logarithm of a positive integer, which is nearly always a small one."""
    return float(_LOGS[number]) if number < _LOGS.shape[0] else math.log(number)


@kernel
def match_length(text: Int32Array, position: int, first: int, context: Int64Array) -> int:
    """Return how many tokens up to `position` match `context`, which is newest first."""
    num_rows = text.shape[0]
    row = row_of(position, num_rows)
    for length in range(context.shape[0]):
        if position < first or text[row, TOKEN] != context[length]:
            return length
        previous = int(text[row, PREVIOUS])
        if previous == position - 1:  # nearly always; this saves a division
            row = row - 1 if row > 0 else num_rows - 1
        else:
            row = row_of(previous, num_rows)
        position = previous
    return len(context)


@inlined
def origin_of(occurrence: int, sequence: Int64Array) -> int:
    """Return whether an occurrence is in the sequence's answer, its prompt, or earlier text.

    A layer's text counts as earlier text; only its row of weights differs.
    """
    if occurrence >= _SOURCE:
        return EARLIER
    if occurrence >= sequence[ANSWER]:
        return ANSWER
    return PROMPT if occurrence >= sequence[PROMPT] else EARLIER


@inlined
def look_up(pool: Int64Array, context: Int64Array, max_order: int, newest: Int64Array) -> None:
    """Fill `newest` by order, from 1 on, with the newest position in the context's bucket.

    All orders at once, so that the cache misses overlap; NONE for orders that are not indexed.

    Args:
        newest: int64 [at least max_order + 1], filled; entry 0 is set to 0.
    """
    heads, counts = heads_of(pool), counts_of(pool)
    state, multiplier = int(counts[SEED]), int(counts[MULTIPLIER])
    newest[0] = 0  # how many occurrences were read
    for order in range(1, max_order + 1):
        if order > heads.shape[0]:
            newest[order] = NONE
            continue
        state = hash_with(state, int(context[order - 1]), multiplier)
        newest[order] = heads[order - 1, state & (heads.shape[1] - 1)]


@inlined
def read_bucket(
    pool: Int64Array,
    source: int,
    order: int,
    context: Int64Array,
    limit: int,
    num_counted: int,
    num_occurrences: int,
    found: Int64Array,
) -> int:
    """Read occurrences of a context in one text, newest first, up to the text's limit.

    Args:
        pool: the pool or layer whose text is read.
        source: its index among the sources.
        order: the length of the n-gram to look up.
        limit: maximum number of occurrences to read from one text, over all orders.
        num_counted: number of occurrences read for longer orders.
        num_occurrences: number of occurrences in `found`.

    Returns:
        The number of occurrences in `found`.
    """
    (text, links), first, newest = text_of(pool), first_of(pool), found[7 + source]
    occurrences, lengths, next_ids = found[0], found[4], found[5]
    num_rows = text.shape[0]
    position = int(newest[order])
    num_read = 0
    begin = num_occurrences
    most = num_occurrences + limit - int(newest[0])
    while position >= first and num_read < MAX_CHAIN and num_occurrences < most:
        row = row_of(position, num_rows)
        after = int(text[row, NEXT])
        if after != NONE:
            occurrence = source * _SOURCE + position
            is_new = True
            for i in range(num_counted):  # occurrences already read for a longer order
                is_new = is_new and occurrences[i] != occurrence
            length = match_length(text, position, first, context) if is_new else 0
            if length >= order:
                occurrences[num_occurrences] = occurrence
                lengths[num_occurrences] = length
                next_ids[num_occurrences] = text[row_of(after, num_rows), TOKEN]
                num_occurrences += 1
        position = int(links[row, order - 1])
        num_read += 1
    newest[0] += num_occurrences - begin
    return num_occurrences


@kernel
def successors(
    pool: Int64Array,
    sequence: Int64Array,
    scratch: Int64Array,
    context: Int64Array,
    max_order: int,
    path_prob: float,
) -> tuple[int, int]:
    """Estimate successors of a context from the text, by partial matching.

    The longest context that occurs decides (in a layer that indexes shorter n-grams, it is found
    after those of higher order): its successors share, by their counts, the probability that is not
    reserved for tokens not seen there. Shorter contexts are then read for occurrences not read yet;
    the successors that they add get a share of the reserve. Orders too short to matter for the tree
    are not read. At each order, the pool's text is read first, then the layers; each has its own
    limit, so that no text displaces another.

    Source: Cleary and Witten, "Data compression using adaptive coding and partial string matching",
    IEEE Transactions on Communications 32 (1984); escape by measured hit rates instead of theirs.

    Returns:
        The number of successors in `found_of(scratch)`, and the length of the match that decides (0
        for none).
    """
    (found, found_probs), state = found_of(scratch), state_of(sequence)
    occurrences, lengths, next_ids = found[0], found[4], found[5]
    found_ids, times, origins, longest_of = found[1], found[2], found[3], found[6]
    layers = layers_of(sequence)
    num_sources = 1 + layers.shape[0]
    limit = MAX_OCCURRENCES
    if path_prob <= UNLIKELY:
        limit //= 2
        context = context[:max_order]
    num_occurrences = num_found = longest = 0
    mass_left = 1.0
    for i in range(num_sources):
        look_up(layers[i - 1] if i > 0 else pool, context, max_order, found[7 + i])
    for order in range(max_order, 0, -1):
        num_counted = num_occurrences
        for i in range(num_sources):
            source = layers[i - 1] if i > 0 else pool
            num_occurrences = read_bucket(
                source, i, order, context, limit, num_counted, num_occurrences, found
            )
        # Count the occurrences just read, in order of their matches' length, longest first.
        begin = num_counted
        while num_counted < num_occurrences:
            length = 0
            for i in range(begin, num_occurrences):
                length = max(length, lengths[i])
            num_known = num_found
            for i in range(begin, num_occurrences):
                if lengths[i] == length:
                    index = 0
                    while index < num_found and found_ids[index] != next_ids[i]:
                        index += 1
                    if index == num_found:
                        found_ids[index], longest_of[index] = next_ids[i], length
                        times[index], origins[index] = 0, EARLIER
                        num_found += 1
                    times[index] += 1
                    origins[index] = max(origins[index], origin_of(occurrences[i], state))
                    lengths[i] = 0
                    num_counted += 1
            if longest == 0:
                longest = length
                share = _ESCAPE_DIVIDED if num_found > 1 else _ESCAPE_UNANIMOUS / (1 + length)
                mass_left = share * math.sqrt(num_found / num_counted)
                for i in range(num_found):
                    found_probs[i] = (1.0 - mass_left) * times[i] / num_counted
            elif num_found > num_known:
                share = _BACKOFF_SHARE * mass_left
                for i in range(num_known, num_found):
                    found_probs[i] = share * times[i] / num_counted
                    mass_left -= found_probs[i]
        is_enough = num_occurrences == limit * num_sources
        if longest > 0 and (is_enough or mass_left * path_prob < READ_ON):
            break
    return num_found, longest


@kernel
def add_candidate(
    token_id: int, source: int, evidence: float, found: Int64Array, features: Float64Array, num: int
) -> int:
    """Add a source's evidence for a token, keeping the maximum; return the candidate count."""
    found_ids = found[1]
    for i in range(num):
        if found_ids[i] == token_id:
            features[i, source] = max(features[i, source], evidence)
            return num
    if num == features.shape[0]:
        return num
    found_ids[num] = token_id
    features[num, :] = 0.0
    features[num, source] = evidence
    return num + 1


@kernel
def add_known(
    table: Int64Array,
    previous: int,
    last: int,
    source: int,
    found: Int64Array,
    features: Float64Array,
    num: int,
) -> tuple[int, bool]:
    """Add a table's successors of a context; return the candidate count and whether it is known."""
    row = find_context(table, previous, last)
    if row == NONE:
        return num, False
    _, successor_ids, costs, _ = rows_of(table)
    for j in range(successor_ids.shape[1]):
        token_id = int(successor_ids[row, j])
        if token_id == NONE:
            break
        evidence = costs[row, j] / -COST_STEPS - LEAST_LOG_PROB
        if evidence <= 0.0:  # so unlikely that it counts as silence; later ones are no likelier
            break
        num = add_candidate(token_id, source, evidence, found, features, num)
    return num, True


@kernel
def add_instead(
    table: Int64Array, context: Int64Array, found: Int64Array, features: Float64Array, num: int
) -> int:
    """Add what the target found likely in place of the last token, and its successors of that.

    What might have come often still comes, and like tokens have like successors.

    Returns:
        The candidate count.
    """
    row = find_context(table, int(context[2]), int(context[1]))
    if row == NONE:
        return num
    _, successor_ids, costs, _ = rows_of(table)
    for j in range(successor_ids.shape[1]):
        token_id = int(successor_ids[row, j])
        evidence = costs[row, j] / -COST_STEPS - LEAST_LOG_PROB
        if token_id == NONE or evidence <= 0.0:
            break
        if token_id != context[0]:
            num = add_candidate(token_id, INSTEAD, evidence, found, features, num)
            num, _ = add_known(table, NONE, token_id, AFTER_INSTEAD, found, features, num)
    return num


@kernel
def estimate(
    pool: Int64Array,
    sequence: Int64Array,
    scratch: Int64Array,
    context: Int64Array,
    max_order: int,
    path_prob: float,
) -> tuple[int, int]:
    """Estimate the successors of a context from all sources.

    A candidate's score is a weighted sum of the sources' evidence; its probability is the softmax
    over the candidates and "none of them", whose score is 0. This is a product of experts: sources
    that agree on a token raise it above the estimate of each.

    Source: log-linear interpolation of language models, Klakow (ICSLP 1998); weights that are
    learned online and chosen by context, as in the PAQ compressors (Mahoney 2005).

    Returns:
        The number of successors found, and the length of the match that decides (0 for none).
    """
    num_found, longest = successors(pool, sequence, scratch, context, max_order, path_prob)
    (found, found_probs), (features, summed) = found_of(scratch), features_of(scratch)
    weights, tables = weights_of(pool), tables_of(sequence)
    num_in_text = num_found
    for i in range(num_in_text):
        features[i, :] = 0.0
        features[i, TEXT] = math.log(found_probs[i]) - LEAST_LOG_PROB
        features[i, LENGTH] = log_of(int(found[6, i])) + 0.5
        features[i, COUNT] = log_of(int(found[2, i]))
        features[i, IS_NEWEST] = 1.0 if i == 0 else 0.0
        features[i, IN_ANSWER] = 1.0 if found[3, i] == ANSWER else 0.0
        features[i, IN_PROMPT] = 1.0 if found[3, i] == PROMPT else 0.0
    row_of_origin = ORIGIN_ROW + EARLIER
    if num_in_text > 0:
        newest = int(found[0, 0])
        row_of_origin = ORIGIN_ROW + origin_of(newest, state_of(sequence))
        if newest >= _SOURCE:
            row_of_origin = min(LAYER_ROW + newest // _SOURCE, NUM_WEIGHT_ROWS) - 1
    row = 0
    while row < 5 and longest > (1 << row) // 2:  # up to 0, 1, 2, 4, 8, or more
        row += 1
    row += 5 if num_in_text > 1 else 0
    row_of_known = KNOWN_ROW
    for is_single in range(1 if context.shape[0] == 1 else 0, 2):
        previous = NONE if is_single else int(context[1])
        source = HARVESTED_SINGLE if is_single else HARVESTED_PAIR
        for i in range(1 + tables.shape[0]):  # up to the first that knows the context
            num_found, is_known = add_known(
                tables[i - 1] if i > 0 else harvested_of(pool),
                previous,
                int(context[0]),
                source,
                found,
                features,
                num_found,
            )
            if is_known:
                row_of_known += 0 if is_single else min(i, 1) + 1
                break
    num_known = num_found
    if context.shape[0] > 2:
        num_found = add_instead(harvested_of(pool), context, found, features, num_found)
    often_ids, evidence = often_of(pool)
    for i in range(NUM_OFTEN):
        if evidence[i] > 0.0:
            token_id = int(often_ids[i])
            num_found = add_candidate(token_id, UNIGRAM, evidence[i], found, features, num_found)
    found[4, 0] = row
    found[4, 1] = row_of_origin
    found[4, 2] = row_of_known
    found[4, 3] = num_known
    for j in range(NUM_WEIGHTS):
        summed[j] = 0.0
        for i in range(3):
            summed[j] += weights[found[4, i], j]
    highest = 0.0
    for i in range(num_found):
        score = summed[BIAS] + (summed[FURTHER] if i >= num_known else 0.0)
        for j in range(NUM_FEATURES):
            score += summed[j] * features[i, j]
        for j in range(NUM_TABLE_SOURCES):
            if features[i, j] == 0.0:
                score += summed[SILENCE + j]
        found_probs[i] = score
        highest = max(highest, score)
    total = math.exp(-highest)
    for i in range(num_found):
        found_probs[i] = math.exp(found_probs[i] - highest)
        total += found_probs[i]
    for i in range(num_found):
        found_probs[i] /= total
    return num_found, longest


@kernel
def learn(
    pool: Int64Array,
    sequence: Int64Array,
    scratch: Int64Array,
    tail: int,
    token_id: int,
    learning_rate: float,
) -> None:
    """Move the weights towards predicting `token_id`, the token that follows position `tail`."""
    (text, _), first, context = text_of(pool), first_of(pool), context_of(scratch)
    (found, found_probs), (features, _) = found_of(scratch), features_of(scratch)
    weights = weights_of(pool)
    length = 0
    position = tail
    while position >= first and length < context.shape[0]:
        row = row_of(position, text.shape[0])
        context[length] = text[row, TOKEN]
        position = int(text[row, PREVIOUS])
        length += 1
    if length == 0:
        return
    max_order = min(length, heads_of(pool).shape[0])
    num_found, _ = estimate(pool, sequence, scratch, context[:length], max_order, 1.0)
    for i in range(num_found):
        came = 1.0 if found[1, i] == token_id else 0.0
        error = learning_rate * (came - found_probs[i])
        for k in range(3):
            row = found[4, k]
            weights[row, BIAS] += error
            if i >= found[4, 3]:
                weights[row, FURTHER] += error
            for j in range(NUM_TABLE_SOURCES):
                if features[i, j] == 0.0:
                    weights[row, SILENCE + j] += error
            for j in range(NUM_FEATURES):
                weights[row, j] += _OF_FEATURES * error * features[i, j]


@kernel
def push(
    queue: Int64Array, queue_length: int, candidate_probs: Float64Array, candidate: int
) -> None:
    """Add a candidate to a heap whose top is the likeliest, the oldest among equals.

    Args:
        queue: int64 [at least queue_length + 1], the heap: indices of candidates.
        queue_length: number of candidates in the heap.
        candidate_probs: float64, by candidate.
        candidate: index of the new one.
    """
    child = queue_length
    queue[child] = candidate
    while child > 0:
        parent = (child - 1) // 2
        if candidate_probs[queue[parent]] >= candidate_probs[candidate]:
            break
        queue[child] = queue[parent]
        child = parent
    queue[child] = candidate


@kernel
def pop(queue: Int64Array, queue_length: int, candidate_probs: Float64Array) -> int:
    """Remove the top of the heap and return it."""
    top = int(queue[0])
    last = int(queue[queue_length - 1])
    length = queue_length - 1
    parent = 0
    while True:
        child = 2 * parent + 1
        if child >= length:
            break
        if child + 1 < length:
            left, right = candidate_probs[queue[child]], candidate_probs[queue[child + 1]]
            if right > left or (right == left and queue[child + 1] < queue[child]):
                child += 1
        best = candidate_probs[queue[child]]
        mine = candidate_probs[last]
        if mine > best or (mine == best and last < queue[child]):
            break
        queue[parent] = queue[child]
        parent = child
    queue[parent] = last
    return top


@kernel
def read_context(
    nodes: Int64Array, node: int, root_context: Int32Array, context: Int64Array
) -> int:
    """Write the tokens up to `node`, newest first, to `context`; return their number."""
    length = 0
    while node != NONE and length < context.shape[0]:
        context[length] = nodes[0, node]
        node = nodes[1, node]
        length += 1
    i = root_context.shape[0]
    while i > 0 and length < context.shape[0]:
        i -= 1
        context[length] = root_context[i]
        length += 1
    return length


@kernel
def push_likely(
    scratch: Int64Array, node: int, path_prob: float, num_found: int, num: int, num_popped: int
) -> int:
    """Queue the successors of a node by their path probabilities; return the new `num`.

    Args:
        node: index of the node; NONE for the root.
        num_found: number of successors in `found_of(scratch)`.
        num: number of candidates queued so far.
        num_popped: number of these that were popped.
    """
    (found, found_probs), (candidates, candidate_probs) = found_of(scratch), candidates_of(scratch)
    likeliest = 0
    for i in range(1, num_found):
        if found_probs[i] > found_probs[likeliest]:
            likeliest = i
    for i in range(num_found):
        prob = path_prob * found_probs[i]
        if i == likeliest or prob >= MIN_PROB:
            candidates[0, num] = found[1, i]
            candidates[1, num] = node
            candidate_probs[num] = prob
            push(candidates[2], num - num_popped, candidate_probs, num)
            num += 1
    return num


@kernel
def push_slot(scratch: Int64Array, parent: int, floor: float, num: int, num_popped: int) -> int:
    """Queue the next child of `parent` by its expected probability before it is drawn.

    It is not queued if no successor is left to draw, or if the expectation is less than `floor`.

    Args:
        num, num_popped: as for `push_likely`; the new `num` is returned.
    """
    (candidates, candidate_probs), (_, left_probs, _) = candidates_of(scratch), left_of(scratch)
    total = squares = 0.0
    for i in range(left_probs.shape[1]):
        total += left_probs[parent + 1, i]
        squares += left_probs[parent + 1, i] * left_probs[parent + 1, i]
    if total == 0.0 or squares / total < floor:
        return num
    candidates[1, num] = parent
    candidate_probs[num] = squares / total
    push(candidates[2], num - num_popped, candidate_probs, num)
    return num + 1


@kernel
def draw_successor(left_probs: Float64Array, uniform: float, support_probs: Float64Array) -> int:
    """Draw one of the successors left; fill `support_probs` with the distribution drawn from.

    Args:
        left_probs: float64 [width], path probabilities of the successors; 0 for drawn ones.
        uniform: in [0, 1).
        support_probs: float64 [width], filled.
    """
    total = cumulative = 0.0
    for i in range(left_probs.shape[0]):
        total += left_probs[i]
    drawn = NONE
    for i in range(left_probs.shape[0]):
        support_probs[i] = left_probs[i] / total
        # A successor is taken if the uniform is beyond all earlier ones; the last one that can be
        # drawn also takes the share that rounding leaves below 1.
        if left_probs[i] > 0.0 and (drawn == NONE or uniform >= cumulative):
            drawn = i
        cumulative += support_probs[i]
    return drawn


@kernel
def grow_tree(
    pool: Int64Array,
    sequence: Int64Array,
    scratch: Int64Array,
    root_context: Int32Array,
    max_draft_tokens: int,
    max_candidates: int,
    uniforms: Float64Array,
    min_probability: float,
) -> int:
    """Grow a prefix tree of continuations of a context, likeliest or drawn; return its size.

    The tree of the likeliest grows best first: of all successors of the root and the nodes taken so
    far, the one with the likeliest path comes next. Growth ends at `max_draft_tokens` nodes, or
    when every path left would open a leaf beyond `max_candidates`.

    A drawn tree has *slots* instead: nodes whose token is not drawn yet. The slot with the highest
    expected probability is filled first; it opens the slots of its next sibling and its first
    child. So only the tokens of earlier slots decide a slot's existence and parent, before its
    token is drawn: otherwise no acceptance rule could be unbiased. Children of one parent are drawn
    without replacement.

    Source: drawing without replacement from Jeon et al., "Recursive Speculative Decoding"
    (arXiv 2402.14160); the order of the slots is new.

    Args:
        root_context: int32 [up to max_match], the tokens up to the root, oldest first, where
            max_match is the larger of MAX_MATCH and N.
        max_draft_tokens, max_candidates: at least 1.
        uniforms: float64 [max_draft_tokens] in [0, 1), to draw node i with uniforms[i]; empty for
            the tree of the likeliest.
        min_probability: growth ends once no path is this likely.

    Returns:
        The number of nodes in `nodes_of(scratch)`: with path probabilities, greatest first, or with
        the expected probabilities of the slots.
    """
    context, (nodes, node_probs) = context_of(scratch), nodes_of(scratch)
    (candidates, candidate_probs), (found, found_probs) = candidates_of(scratch), found_of(scratch)
    left_ids, left_probs, support_probs = left_of(scratch)
    is_drawn = uniforms.shape[0] > 0
    num_nodes = num_queued = num_popped = num_leaves = 0
    node, path_prob = NONE, 1.0
    # A node's match is at most one token longer than its parent's.
    num_orders, root_order = int(heads_of(pool).shape[0]), 0
    max_order = num_orders
    while True:
        length = read_context(nodes, node, root_context, context)
        order = min(length, max_order)
        num_found, longest = estimate(pool, sequence, scratch, context[:length], order, path_prob)
        if node == NONE:
            root_order = longest
        else:
            nodes[4, node] = longest
        if is_drawn:
            for i in range(left_ids.shape[1]):
                left_ids[node + 1, i] = found[1, i] if i < num_found else 0
                left_probs[node + 1, i] = path_prob * found_probs[i] if i < num_found else 0.0
            num_queued = push_slot(scratch, node, 0.0, num_queued, num_popped)
        else:
            num_queued = push_likely(scratch, node, path_prob, num_found, num_queued, num_popped)
        while True:  # take the likeliest candidate that does not exceed the number of leaves
            if num_popped == num_queued:
                return num_nodes
            best = pop(candidates[2], num_queued - num_popped, candidate_probs)
            num_popped += 1
            parent = candidates[1, best]
            extends_leaf = parent != NONE and nodes[3, parent] == 0
            if extends_leaf or num_leaves < max_candidates:
                break
        if candidate_probs[best] < min_probability:
            return num_nodes
        node = num_nodes
        if is_drawn:
            drawn = draw_successor(left_probs[parent + 1], uniforms[node], support_probs[node])
            nodes[0, node] = left_ids[parent + 1, drawn]
            path_prob = left_probs[parent + 1, drawn]
            left_probs[parent + 1, drawn] = 0.0
        else:
            nodes[0, node] = candidates[0, best]
            path_prob = candidate_probs[best]
        nodes[1, node] = parent
        nodes[2, node] = 1 if parent == NONE else nodes[2, parent] + 1
        nodes[3, node] = 0
        node_probs[node] = candidate_probs[best]
        num_leaves += 0 if extends_leaf else 1
        if parent != NONE:
            nodes[3, parent] += 1
        num_nodes += 1
        if num_nodes == max_draft_tokens:
            return num_nodes
        if is_drawn:
            num_queued = push_slot(scratch, parent, MIN_PROB, num_queued, num_popped)
        max_order = min(num_orders, 1 + (root_order if parent == NONE else nodes[4, parent]))


# --- chains: many sequences in one call ---


@kernel
def draft_rows(
    pools: Int64Array,
    sequences: Int64Array,
    scratch: Int64Array,
    token_ids: Int32Array,
    lengths: Int64Array,
    num_new: Int64Array,
    max_draft_tokens: Int64Array,
    learning_rate: float,
    learning_stride: int,
    min_probability: float,
    chain_ids: Int32Array,
    chain_probs: Float64Array,
    chain_lengths: Int64Array,
) -> int:
    """Append the last tokens of each row to its sequence's answer; then draft the likeliest path.

    Each chain is the tree that `grow_tree` grows for one leaf, until its probability falls below
    `min_probability`.

    Args:
        pools, sequences: int64 [num_rows, …], the headers of each text's pool and sequence.
        token_ids: int32 [num_rows, width]; the first `lengths[i]` tokens are row i's text.
        lengths: int64 [num_rows].
        num_new: int64 [num_rows], how many of a text's last tokens to append.
        max_draft_tokens: int64 [num_rows], at most the width of `chain_ids`.
        learning_rate, learning_stride: as for `append`, counted over the tokens of all rows.
        chain_ids, chain_probs: int32 and float64 [num_rows, width], filled with the tokens of each
            chain, and the probability that it is right up to there.
        chain_lengths: int64 [num_rows], filled.

    Returns:
        NONE; or the first row with a negative id among the tokens used, with nothing changed.
    """
    (nodes, node_probs), longest = nodes_of(scratch), context_of(scratch).shape[0]
    num_rows = token_ids.shape[0]
    for i in range(num_rows):
        for j in range(max(0, lengths[i] - max(num_new[i], longest)), lengths[i]):
            if token_ids[i, j] < 0:
                return i
    num_appended = 0
    for i in range(num_rows):
        if num_new[i] == 0:
            continue
        new = token_ids[i, lengths[i] - num_new[i] : lengths[i]]
        append(pools[i], sequences[i], scratch, new, learning_rate, learning_stride, num_appended)
        num_appended += num_new[i]
    for i in range(num_rows):
        num_nodes = 0
        if lengths[i] > 0 and max_draft_tokens[i] > 0:
            text = token_ids[i, max(0, lengths[i] - longest) : lengths[i]]
            of_tree = pools[i], sequences[i], scratch, text, max_draft_tokens[i], 1, node_probs[:0]
            num_nodes = grow_tree(*of_tree, min_probability)
        for node in range(num_nodes):
            chain_ids[i, node] = nodes[0, node]
            chain_probs[i, node] = node_probs[node]
        chain_lengths[i] = num_nodes
    return NONE


# Contexts per bucket of a `SuccessorTable`; beyond that, the least recently put one is dropped.
WAYS = 8
# Probabilities from 1 down to 1e-7 are held as -ln(prob) in steps of 1/4096, two bytes each.
COST_STEPS = 4096.0
MAX_COST = np.iinfo(np.uint16).max
# Where successors are averaged, new ones have a weight of at least 1 / MAX_COUNT.
MAX_COUNT = 10


@inlined
def bucket_of(table: Int64Array, previous: int, last: int) -> int:
    """Return the first row of a context's bucket."""
    state = hash_with(hash_with(0, last, HASH_MULTIPLIER), previous + 1, HASH_MULTIPLIER)
    return int(state & (rows_of(table)[0].shape[0] // WAYS - 1)) * WAYS


@kernel
def find_context(table: Int64Array, previous: int, last: int) -> int:
    """Return the row of a context in a table of successors, or NONE.

    Rows `WAYS * b` to `WAYS * b + WAYS - 1` are bucket b.

    Args:
        previous: the token before the last one; NONE for the context of the last one alone.
        last: the last token.
    """
    if size_of(table)[0] == 0:
        return NONE
    keys = rows_of(table)[0]
    key = (previous + 1) * (MAX_TOKEN_ID + 1) + last  # exact: ids have 31 bits
    begin = bucket_of(table, previous, last)
    for row in range(begin, begin + WAYS):
        if keys[row] == key:
            return row
    return NONE


@kernel
def open_front(table: Int64Array, begin: int, row: int) -> None:
    """Free a bucket's first row by moving the rows before `row` down by one, overwriting `row`."""
    keys, successor_ids, costs, times = rows_of(table)
    for other in range(row, begin, -1):
        keys[other] = keys[other - 1]
        times[other] = times[other - 1]
        for j in range(successor_ids.shape[1]):
            successor_ids[other, j] = successor_ids[other - 1, j]
            costs[other, j] = costs[other - 1, j]


@kernel
def rehash(old_table: Int64Array, table: Int64Array) -> None:
    """Copy the rows of a table to an empty one of another size."""
    old_keys, old_ids, old_costs, old_times = rows_of(old_table)
    keys, successor_ids, costs, times = rows_of(table)
    for old in range(old_keys.shape[0] - 1, -1, -1):  # so that the newest come first again
        if old_keys[old] == NONE:
            continue
        previous = old_keys[old] // (MAX_TOKEN_ID + 1) - 1
        begin = bucket_of(table, previous, old_keys[old] % (MAX_TOKEN_ID + 1))
        size_of(table)[0] += keys[begin + WAYS - 1] == NONE
        open_front(table, begin, begin + WAYS - 1)
        keys[begin] = old_keys[old]
        times[begin] = old_times[old]
        for j in range(successor_ids.shape[1]):
            successor_ids[begin, j] = old_ids[old, j]
            costs[begin, j] = old_costs[old, j]


@kernel
def find_tree_contexts(
    previous: int,
    nodes: Int64Array,
    parents: Int64Array,
    token_ids: Int32Array,
    probs: NDArray[np.float32],
    contexts: Int64Array,
) -> bool:
    """Write the contexts of a tree's nodes: first each behind its parent, then each alone.

    Args:
        previous: the token before the root, or NONE.
        nodes, parents: int64 [n], tokens and parents of the nodes.
        token_ids, probs: [n, k], successors of the nodes.
        contexts: int64 [2 * n, 2], written.

    Returns:
        Whether all arguments are in range.
    """
    is_valid, num = NONE <= previous <= MAX_TOKEN_ID, nodes.shape[0]
    for i in range(num):
        if not (NONE <= parents[i] < i and 0 <= nodes[i] <= MAX_TOKEN_ID):
            return False
        contexts[i, 0] = previous if parents[i] == NONE else nodes[parents[i]]
        contexts[num + i, 0] = NONE
        contexts[i, 1] = contexts[num + i, 1] = nodes[i]
        for j in range(token_ids.shape[1]):
            is_valid = is_valid and token_ids[i, j] >= NONE and 0.0 <= probs[i, j] <= 1.0
    return is_valid


@kernel
def put_successors(
    table: Int64Array,
    contexts: Int64Array,
    new_ids: Int32Array,
    new_probs: NDArray[np.float32],
    averages: bool,
    merged_ids: Int32Array,
    merged_probs: Float64Array,
) -> None:
    """Put a target's likely successors of contexts into a table.

    The newest context comes first in its bucket.

    Args:
        contexts: int64 [n, 2], newest first; the first token of each may be NONE.
        new_ids, new_probs: [m, k], likeliest first; NONE ends a row. Context i has row i % m.
        averages: whether a context's new successors are averaged with the known ones, or replace
            them.
        merged_ids, merged_probs: [k + num_successors], scratch.
    """
    keys, successor_ids, costs, times = rows_of(table)
    num_held = successor_ids.shape[1]
    for i in range(contexts.shape[0] - 1, -1, -1):
        of_context = i % new_ids.shape[0]
        previous, last = int(contexts[i, 0]), int(contexts[i, 1])
        row = find_context(table, previous, last)
        begin = bucket_of(table, previous, last)
        num_merged = 0
        share = 1.0
        count = 1
        if row == NONE:
            row = begin + WAYS - 1
            size_of(table)[0] += keys[row] == NONE
        elif averages:
            count = min(int(times[row]) + 1, MAX_COUNT)
            share = 1.0 / count
            for j in range(num_held):
                if successor_ids[row, j] == NONE:
                    break
                merged_ids[num_merged] = successor_ids[row, j]
                merged_probs[num_merged] = (1.0 - share) * math.exp(costs[row, j] / -COST_STEPS)
                num_merged += 1
        num_known = num_merged
        for j in range(new_ids.shape[1]):
            token_id = int(new_ids[of_context, j])
            if token_id == NONE:
                break
            index = 0
            while index < num_known and merged_ids[index] != token_id:
                index += 1
            if index == num_known:
                index = num_merged
                merged_ids[index] = token_id
                merged_probs[index] = 0.0
                num_merged += 1
            merged_probs[index] += share * float(new_probs[of_context, j])
        open_front(table, begin, row)
        keys[begin] = (previous + 1) * (MAX_TOKEN_ID + 1) + last
        times[begin] = count
        for j in range(num_held):
            best = NONE
            for m in range(num_merged):
                if merged_ids[m] != NONE and (best == NONE or merged_probs[m] > merged_probs[best]):
                    best = m
            if best == NONE:
                successor_ids[begin, j] = NONE
                costs[begin, j] = MAX_COST
                continue
            successor_ids[begin, j] = merged_ids[best]
            cost = -math.log(max(merged_probs[best], 1e-7)) * COST_STEPS
            costs[begin, j] = min(max(cost + 0.5, 0.0), MAX_COST)
            merged_ids[best] = NONE


# --- unigrams: how often the target would use a token, by all that was harvested ---

# Added to the count of all tokens, because the first counts say little. With 16, the first ten
# tokens of calls with a new pool took 1 % longer, by the costs of flat forwards.
_UNSEEN_UNIGRAMS = 64.0


@kernel
def count_unigrams(pool: Int64Array, token_ids: Int32Array, probs: NDArray[np.float32]) -> None:
    """Add harvested probabilities to the expected counts of tokens, and rank these.

    Tokens are in buckets of WAYS; a full bucket drops its token with the lowest count.

    Args:
        token_ids, probs: [n, k]; NONE ends a row.
    """
    unigram_ids, unigram_counts = unigrams_of(pool)
    for i in range(token_ids.shape[0]):
        for j in range(token_ids.shape[1]):
            token_id = int(token_ids[i, j])
            if token_id == NONE:
                break
            bucket = hash_with(0, token_id, HASH_MULTIPLIER) & (unigram_ids.shape[0] // WAYS - 1)
            begin = index = bucket * WAYS
            for row in range(begin, begin + WAYS):
                if unigram_ids[row] == token_id:
                    index = row
                    break
                if unigram_counts[row] < unigram_counts[index]:
                    index = row
            if unigram_ids[index] != token_id:
                unigram_ids[index] = token_id
                unigram_counts[index] = 0.0
            unigram_counts[index] += probs[i, j]
    # Rank: of equals, the one in the lower row comes first.
    often_ids, evidence = often_of(pool)
    total = _UNSEEN_UNIGRAMS
    evidence[:] = 0.0
    for row in range(unigram_ids.shape[0]):
        count = unigram_counts[row]
        total += count
        if count <= evidence[NUM_OFTEN - 1]:
            continue
        index = NUM_OFTEN - 1
        while index > 0 and evidence[index - 1] < count:
            often_ids[index] = often_ids[index - 1]
            evidence[index] = evidence[index - 1]
            index -= 1
        often_ids[index] = unigram_ids[row]
        evidence[index] = count
    for i in range(NUM_OFTEN):
        if evidence[i] > 0.0:
            evidence[i] = max(0.0, math.log(evidence[i] / total) - LEAST_LOG_PROB)


# --- texts ---


@kernel
def find_texts(pool: Int64Array, rows: Int32Array, bounds: Int32Array) -> int:
    """Find the text held, by sequence; return the number of sequences.

    Args:
        rows: int32 [at least as many as are held], filled with rows of the text.
        bounds: int32 [one more], filled: sequence i is in `rows[bounds[i] : bounds[i + 1]]`.
    """
    (text, _), end = text_of(pool), int(counts_of(pool)[NEXT_POSITION])
    first = first_of(pool)
    num_tokens = num_sequences = 0
    bounds[0] = 0
    for begin in range(first, end):
        row = begin % text.shape[0]
        if text[row, PREVIOUS] >= first:
            continue
        position = begin
        while position != NONE:
            row = position % text.shape[0]
            rows[num_tokens] = row
            num_tokens += 1
            # The next token must lead back, so that none is reached twice, whatever a file holds.
            after = int(text[row, NEXT])
            leads_back = (
                position < after < end and text[after % text.shape[0], PREVIOUS] == position
            )
            position = after if leads_back else NONE
        num_sequences += 1
        bounds[num_sequences] = num_tokens
    return num_sequences
