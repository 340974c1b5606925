"""Every Numba function of the pool, and nothing else.

They share one file because Numba's disk cache does not notice an edit in another one. They take
arrays and scalars that `pool.py` has checked, and they allocate nothing: the pool owns all buffers.

How the text is held. Each observed token gets the next *position*, 0, 1, 2, …; the token at
position `p` is in row `p % num_rows`, so that the newest `num_rows` tokens are held and the oldest
is overwritten first. `first` is the oldest position still held.

    text      [num_rows, 3]     token id, previous position, next position; NONE where forgotten
    links     [num_rows, N]     by order: the next older position in the same bucket
    heads     [N, num_buckets]  by order: the newest position in each bucket
    counts    [4]               the next position, by how much positions were lowered so far, and
                                the hash's first state and its multiplier, which are the pool's seed
    sequence  [4]               state of an open sequence: its last position, the first positions of
                                its prompt and of its answer, and by how much these were lowered

Previous and next run along the token's own sequence (they differ from p-1 and p+1 only where
sequences grow interleaved). The n-gram *ending* at `p` belongs to one bucket of its order, found by
hashing; links lead from a bucket's head to ever older positions, as in the hash chains of LZ77
matchers. Nothing is deleted as it gets old: a position older than `first` ends a chain. What is to
be forgotten leaves its row empty, in no bucket and no sequence. Text and links are separate arrays
because matching often reads the text of neighbouring positions, never their links.

A *layer* is a read-only pool that a sequence drafts from too. Kernels get all layers of a sequence
as one array of addresses and sizes, so that they are compiled once for any number.

No signal is noticed while a kernel runs. So whatever must change together, counts included, is
changed by one kernel: then the pool is consistent wherever Python is interrupted.

Next file: `pool.py`.
"""

import ctypes
import math
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba.extending import intrinsic
from numpy.typing import NDArray

_F = TypeVar("_F", bound=Callable[..., Any])
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]
# Keys, successors and costs of a `SuccessorTable`.
TableArrays = tuple[Int64Array, Int32Array, NDArray[np.uint16]]


# What is compiled so must allocate nothing and divide by no zero: then no array's references are
# counted, which is two atomic additions for each view of one, and no division is checked.
_BARE: dict[str, Any] = {"_nrt": False, "error_model": "numpy"}


def kernel(function: _F) -> _F:
    """Compile at first call, to run without the GIL; cache on disk if a folder is writable."""
    return _compiled(function, nogil=True, **_BARE)


def inlined(function: _F) -> _F:
    """Compile like `kernel`, into its callers: a call would cost as much as the work."""
    return _compiled(function, nogil=True, forceinline=True, **_BARE)


def view(function: _F) -> _F:
    """Compile like `inlined` what returns arrays that it makes of addresses."""
    return _compiled(function, nogil=True, forceinline=True, _nrt=True)


def kernel_with_gil(function: _F) -> _F:
    """Compile for calls so short that other threads may well wait; it may allocate."""
    return _compiled(function, nogil=False)


def _compiled(function: _F, **options: Any) -> _F:
    try:
        compiled: _F = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # Numba found no writable folder for its cache
        # The same text for all kernels, so that only one warning is shown.
        warnings.warn("ngram_pool compiles anew in each process: no cache folder", stacklevel=2)
        compiled = numba.njit(**options)(function)
    return compiled


MAX_TOKEN_ID = 2**31 - 1
NONE = -1  # "no position" and "no node" inside arrays
TOKEN, PREVIOUS, NEXT = 0, 1, 2  # columns of `text`
NEXT_POSITION, LOWERED, SEED, MULTIPLIER = range(4)  # of `counts`
# Origins of text. PROMPT and ANSWER also index their first positions in `sequence`; the index that
# EARLIER would have is that of the last position, TAIL.
EARLIER, PROMPT, ANSWER = range(3)
TAIL, LOWERED_THEN = 0, 3
NEVER = 2**62  # first position of a prompt or an answer that has not begun
# Columns of `layers`, int64 [num_layers, NUM_LAYER_COLUMNS]: addresses and sizes of a layer's text,
# links and heads, its next position, seed and multiplier, and the same of its harvested successors.
TEXT_AT, LINKS_AT, HEADS_AT, NUM_ROWS, NUM_ORDERS, NUM_BUCKETS = range(6)
LAYER_NEXT, LAYER_SEED, LAYER_MULTIPLIER = range(6, 9)
KEYS_AT, IDS_AT, COSTS_AT, NUM_KEYS, NUM_SUCCESSORS = range(9, 14)
NUM_LAYER_COLUMNS = 14
# Occurrences are noted as their position plus this many times their source: 0 for the own text,
# 1, 2, … for the layers.
_SOURCE = 2**32

# 31-bit states times a multiplier under 2**31 stay below 2**62: no overflow, compiled or not.
HASH_MASK = 2**31 - 1
HASH_MULTIPLIER = 0x5851F42D  # of tables, and of the text of a pool whose seed is 0

# Probabilities of successors. All values below were fitted to recorded greedy answers of
# SmolLM2-135M-Instruct (docs/notes/drafting.md); the optimum is flat: 10 % either way costs less
# than 1 % of the mean accepted tokens.
#
# Share of the probability that the longest matching context leaves to unseen tokens, by its length
# 1, 2, …: where all its occurrences had the same successor (from length 3 on, 1.5 / length), and
# where they differed (from length 6 on, the last value). Multiplied by sqrt(distinct successors /
# occurrences).
_ESCAPE_UNANIMOUS = (0.75, 0.6)
_ESCAPE_LONG = 1.5
_ESCAPE_DIVIDED = (0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
# Share of the remaining probability that goes to successors added by a shorter context.
_BACKOFF_SHARE = 0.35
# Maximum number of occurrences of a node's contexts to read, newest first, and half as many where
# the node itself is unlikely. 16 accepted as many tokens as 8 in twice the time; 4 accepted 1.5 %
# fewer. Reading fewer for unlikely nodes lost nothing and took 17 % off a 32-node draft.
MAX_OCCURRENCES = 8
UNLIKELY = 0.1
# Shorter contexts are read while at least this much probability is left for what they may add. At
# 0.004 as many tokens were accepted, at 0.08 up to 1 % fewer; a draft takes 35 % less time than at
# 0.004.
READ_ON = 0.03
# Matches are followed back for at most this many tokens, or N where the node is unlikely: their
# length tells how far to trust them.
MAX_MATCH = 32
# Maximum number of entries of one bucket to read. On average a bucket holds one or two positions of
# other n-grams; this only bounds the rare context that shares its bucket with a very frequent one,
# and the cost of a text made so that its n-grams collide: a draft of 64 nodes took 0.16 ms instead
# of 0.05, and 2.0 with 4096. Of 4000 drafts for program text, none differs from those with 4096,
# and four do with 64. Nobody can make such a text who does not know the pool's seed; drafts depend
# on the seed only through this limit and MAX_SKIPS_READ, which count entries of a bucket, whatever
# they are. (Tables need no seed: a full bucket drops its oldest context, and none takes longer.)
MAX_CHAIN = 256
# A node less likely than this is drafted only as the best successor of its parent, so that a draft
# runs as deep as the text it follows; no machine verifies other nodes for so little gain.
MIN_PROB = 1e-3

# --- how sources are blended; see `estimate` ---
#
# Sources of successors: the text itself; the target's own successors of the last two tokens and of
# the last one, both harvested and prewarmed; and the text with the last token exchanged for
# another. For each candidate token, a source gives its log-probability, counted from
# LEAST_LOG_PROB, or nothing (0); the last source gives the logarithm of its match's length.
TEXT, HARVESTED_PAIR, HARVESTED_SINGLE, PREWARMED_PAIR, PREWARMED_SINGLE, SKIP = range(6)
NUM_TABLE_SOURCES = 5  # those whose silence counts too: all but SKIP
# Features of a candidate from the text: logarithms of the length of its longest match and of its
# number of occurrences, whether it followed the newest of the longest matches, and whether its
# nearest origin is the answer or the prompt.
LENGTH, COUNT, IS_NEWEST, IN_ANSWER, IN_PROMPT = range(6, 11)
NUM_FEATURES = 11
SILENCE = NUM_FEATURES  # first of the weights for sources that give nothing
BIAS = SILENCE + NUM_TABLE_SOURCES
NUM_WEIGHTS = BIAS + 1
# Rows of weights. The weights of a context are the sum of three rows: by the match in the text and
# whether the last token is prewarmed; by the origin of its newest occurrence; by which tables know
# the last pair.
# Each of the first layers has a row of its own among the origins; further ones share the last.
MATCH_ROWS, ORIGIN_ROW, KNOWN_ROW, LAYER_ROW, NUM_WEIGHT_ROWS = 22, 22, 25, 29, 33
LEAST_LOG_PROB = math.log(1e-4)
FAINT = 0.01  # the least that a source gives for a token it knows
# Weights of log-probabilities learn at a tenth of the rate, because those are ten times as large.
_OF_LOG_PROBS, _OF_DETAILS = 0.1, 0.5
_LOGS = np.array([-math.inf, *(math.log(number) for number in range(1, 64))])
# Occurrences of a context before an exchanged token: maximum to take, and to read per order.
MAX_SKIPS = 3
MAX_SKIPS_READ = 16
# Room for candidates: from text, from skips, from four tables of 8, and some to spare; each layer
# adds room for its MAX_OCCURRENCES.
MAX_FOUND = 48


@inlined
def row_of(position: int, num_rows: int) -> int:
    """Return the row of a position, a row even where arrays hold noise.

    A division takes longer than all else that is done with a position.
    """
    return position if 0 <= position < num_rows else position % num_rows


@inlined
def hash_with(state: int, token_id: int, multiplier: int) -> int:
    """Extend the hash of an n-gram by the token before it; the hash of no token is the seed."""
    product = ((state ^ token_id) & HASH_MASK) * multiplier
    return (product ^ (product >> 29)) & HASH_MASK


@kernel
def hash_step(state: int, token_id: int) -> int:
    """Extend a hash without a seed, as tables use it; the hash of no token is 0."""
    return hash_with(state, token_id, HASH_MULTIPLIER)


# --- layers: arrays by their addresses ---

if numba.config.DISABLE_JIT:

    def _array_at(address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if num_bytes == 0:
            return np.empty(shape, dtype)
        buffer = (ctypes.c_char * num_bytes).from_address(int(address))
        return np.frombuffer(buffer, dtype).reshape(shape)

else:

    @intrinsic  # type: ignore[untyped-decorator]
    def _pointer(typing_context: Any, address: Any) -> Any:
        """Return an integer as a pointer, which `numba.carray` takes."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = context.get_value_type(numba.types.voidptr)
            return builder.inttoptr(arguments[0], pointer)

        return numba.types.voidptr(numba.types.int64), generate

    @view
    def _array_at(address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        array: NDArray[Any] = numba.carray(_pointer(address), shape, dtype)
        return array


@view
def text_of(layer: Int64Array) -> tuple[Int32Array, Int32Array]:
    """Return the text and the links of a layer, a row of `layers`."""
    num_rows = layer[NUM_ROWS]
    return (
        _array_at(layer[TEXT_AT], (num_rows, 3), np.int32),
        _array_at(layer[LINKS_AT], (num_rows, layer[NUM_ORDERS]), np.int32),
    )


@view
def heads_of(layer: Int64Array) -> Int32Array:
    """Return the heads of a layer."""
    return _array_at(layer[HEADS_AT], (layer[NUM_ORDERS], layer[NUM_BUCKETS]), np.int32)


@view
def table_of(layer: Int64Array) -> TableArrays:
    """Return the harvested successors of a layer."""
    shape = (layer[NUM_KEYS], layer[NUM_SUCCESSORS])
    return (
        _array_at(layer[KEYS_AT], (layer[NUM_KEYS],), np.int64),
        _array_at(layer[IDS_AT], shape, np.int32),
        _array_at(layer[COSTS_AT], shape, np.uint16),
    )


@kernel
def first_of(layer: Int64Array) -> int:
    """Return the oldest position that a layer holds."""
    return max(0, int(layer[LAYER_NEXT] - layer[NUM_ROWS]))


@kernel
def first_held(text: Int32Array, counts: Int64Array) -> int:
    """Return the oldest position still held."""
    first: int = max(0, int(counts[NEXT_POSITION]) - text.shape[0])
    return first


@kernel
def lower(sequence: Int64Array, counts: Int64Array) -> None:
    """Lower a sequence's positions by as much as those of the text were; see `rebase`."""
    shift = counts[LOWERED] - sequence[LOWERED_THEN]
    if shift == 0:
        return
    sequence[TAIL] = max(sequence[TAIL] - shift, NONE)
    for i in (PROMPT, ANSWER):
        if sequence[i] != NEVER:
            sequence[i] = max(sequence[i] - shift, 0)
    sequence[LOWERED_THEN] = counts[LOWERED]


@inlined
def index_position(
    text: Int32Array,
    links: Int32Array,
    heads: Int32Array,
    counts: Int64Array,
    position: int,
    first: int,
) -> None:
    """Put the n-grams of every order that end at `position` at the head of their buckets."""
    num_rows = text.shape[0]
    bucket_mask = heads.shape[1] - 1
    row = row_of(position, num_rows)
    state, multiplier = int(counts[SEED]), int(counts[MULTIPLIER])
    reached = position
    for order in range(heads.shape[0]):
        if reached < first:  # the sequence, or what is held of it, is shorter than this order
            links[row, order] = NONE
            continue
        reached_row = row_of(reached, num_rows)
        state = hash_with(state, int(text[reached_row, TOKEN]), multiplier)
        bucket = state & bucket_mask
        links[row, order] = heads[order, bucket]
        heads[order, bucket] = position
        reached = int(text[reached_row, PREVIOUS])


@inlined
def begin_appending(text: Int32Array, counts: Int64Array, sequence: Int64Array) -> None:
    """Lower a sequence's positions, and let it begin anew where its last token was forgotten."""
    lower(sequence, counts)
    tail = int(sequence[TAIL])
    if tail >= 0 and text[row_of(tail, text.shape[0]), TOKEN] == NONE:
        sequence[TAIL] = NONE


@inlined
def append_token(
    text: Int32Array,
    links: Int32Array,
    heads: Int32Array,
    counts: Int64Array,
    sequence: Int64Array,
    layers: Int64Array,
    token_id: int,
    learning_rate: float,
    harvested: TableArrays,
    prewarmed: TableArrays,
    weights: Float64Array,
    context: Int64Array,
    found: Int64Array,
    features: Float64Array,
    summed: Float64Array,
    found_probs: Float64Array,
) -> None:
    """Append one token; see `append`."""
    num_rows = text.shape[0]
    position, tail = int(counts[NEXT_POSITION]), int(sequence[TAIL])
    sequence[PROMPT] = min(sequence[PROMPT], position)
    if learning_rate > 0.0:
        sequence[ANSWER] = min(sequence[ANSWER], position)
        learn(
            text,
            links,
            heads,
            counts,
            sequence,
            layers,
            harvested,
            prewarmed,
            weights,
            learning_rate,
            tail,
            token_id,
            context,
            found,
            features,
            summed,
            found_probs,
        )
    first = max(0, position - num_rows + 1)  # once this token has overwritten its row
    if tail < first:
        tail = NONE
    row = row_of(position, num_rows)
    text[row, TOKEN] = token_id
    text[row, PREVIOUS] = tail
    text[row, NEXT] = NONE
    if tail != NONE:
        text[row_of(tail, num_rows), NEXT] = position
    index_position(text, links, heads, counts, position, first)
    sequence[TAIL] = position
    counts[NEXT_POSITION] = position + 1


@kernel
def append(
    text: Int32Array,
    links: Int32Array,
    heads: Int32Array,
    counts: Int64Array,
    sequence: Int64Array,
    layers: Int64Array,
    token_ids: Int64Array,
    learning_rate: float,
    harvested: TableArrays,
    prewarmed: TableArrays,
    weights: Float64Array,
    context: Int64Array,
    found: Int64Array,
    features: Float64Array,
    summed: Float64Array,
    found_probs: Float64Array,
) -> None:
    """Append `token_ids` to a sequence: to its prompt, or with a rate above 0 to its answer.

    The weights learn from each token of an answer before it is appended; the other arguments are
    those of `learn`.
    """
    begin_appending(text, counts, sequence)
    for i in range(token_ids.shape[0]):
        append_token(
            text,
            links,
            heads,
            counts,
            sequence,
            layers,
            int(token_ids[i]),
            learning_rate,
            harvested,
            prewarmed,
            weights,
            context,
            found,
            features,
            summed,
            found_probs,
        )


@kernel
def reindex(text: Int32Array, links: Int32Array, heads: Int32Array, counts: Int64Array) -> None:
    """Rebuild the links; links and heads must be empty."""
    first = first_held(text, counts)
    for position in range(first, int(counts[NEXT_POSITION])):
        if text[position % text.shape[0], TOKEN] != NONE:
            index_position(text, links, heads, counts, position, first)


@kernel
def rebase(text: Int32Array, links: Int32Array, heads: Int32Array, counts: Int64Array) -> None:
    """Lower every position that is held, and forget older ones.

    The positions of sequences are not known here; `lower` lowers them when they are next used.
    """
    first = first_held(text, counts)
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


@kernel
def escape_prob(length: int, num_successors: int, num_occurrences: int) -> float:
    """Estimate the probability of tokens not seen after the longest matching context."""
    if num_successors > 1:
        share = _ESCAPE_DIVIDED[min(length, len(_ESCAPE_DIVIDED)) - 1]
    elif length <= len(_ESCAPE_UNANIMOUS):
        share = _ESCAPE_UNANIMOUS[length - 1]
    else:
        share = _ESCAPE_LONG / length
    return share * math.sqrt(num_successors / num_occurrences)


@inlined
def origin_of(occurrence: int, sequence: Int64Array) -> int:
    """Return whether an occurrence is in the sequence's own answer, its prompt, or earlier text.

    A layer's text is earlier text; only its row of weights is another.
    """
    if occurrence >= _SOURCE:
        return EARLIER
    if occurrence >= sequence[ANSWER]:
        return ANSWER
    return PROMPT if occurrence >= sequence[PROMPT] else EARLIER


@kernel
def origin_row(occurrence: int, sequence: Int64Array) -> int:
    """Return the row of weights for the origin of an occurrence."""
    layer = occurrence // _SOURCE
    if layer == 0:
        return ORIGIN_ROW + origin_of(occurrence, sequence)
    return min(LAYER_ROW + layer, NUM_WEIGHT_ROWS) - 1


@kernel
def add_successor(
    token_id: int, length: int, origin: int, found: Int64Array, num_found: int
) -> int:
    """Count one more occurrence of a successor; return the number of distinct successors."""
    found_ids, counts, lengths, origins = found[1], found[2], found[6], found[7]
    for i in range(num_found):
        if found_ids[i] == token_id:
            counts[i] += 1
            origins[i] = max(origins[i], origin)
            return num_found
    found_ids[num_found] = token_id
    counts[num_found] = 1
    lengths[num_found] = length
    origins[num_found] = origin
    return num_found + 1


@inlined
def look_up(
    heads: Int32Array,
    seed: int,
    multiplier: int,
    context: Int64Array,
    max_order: int,
    newest: Int64Array,
) -> None:
    """Fill `newest` by order, from 1 on, with the newest position in the context's bucket.

    All orders at once, so that the cache misses overlap; NONE for orders that are not indexed.
    """
    state = seed
    newest[0] = 0  # how many occurrences were read
    for order in range(1, max_order + 1):
        if order > heads.shape[0]:
            newest[order] = NONE
            continue
        state = hash_with(state, int(context[order - 1]), multiplier)
        newest[order] = heads[order - 1, state & (heads.shape[1] - 1)]


@kernel
def look_up_layers(
    layers: Int64Array, context: Int64Array, max_order: int, found: Int64Array
) -> None:
    """Look a context up in each layer, and fill the layer's row of `found`; see `look_up`."""
    for i in range(layers.shape[0]):
        seed, multiplier = int(layers[i, LAYER_SEED]), int(layers[i, LAYER_MULTIPLIER])
        look_up(heads_of(layers[i]), seed, multiplier, context, max_order, found[8 + i])


@inlined
def read_bucket(
    text: Int32Array,
    links: Int32Array,
    first: int,
    source: int,
    newest: Int64Array,
    order: int,
    context: Int64Array,
    limit: int,
    num_counted: int,
    num_occurrences: int,
    found: Int64Array,
) -> int:
    """Read occurrences of a context in one text, newest first, up to the text's limit.

    Args:
        newest: as `look_up` filled it; the number of occurrences read is counted in it.
        num_counted: how many occurrences were read for a longer order.

    Returns:
        The number of occurrences in `found`.
    """
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
            for i in range(num_counted):  # those already read for a longer order
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
def read_layers(
    layers: Int64Array,
    order: int,
    context: Int64Array,
    limit: int,
    num_counted: int,
    num_occurrences: int,
    found: Int64Array,
) -> int:
    """Read occurrences of a context in each layer; see `read_bucket`."""
    for i in range(layers.shape[0]):
        text, links = text_of(layers[i])
        num_occurrences = read_bucket(
            text,
            links,
            first_of(layers[i]),
            1 + i,
            found[8 + i],
            order,
            context,
            limit,
            num_counted,
            num_occurrences,
            found,
        )
    return num_occurrences


@kernel
def successors(
    text: Int32Array,
    links: Int32Array,
    heads: Int32Array,
    counts: Int64Array,
    sequence: Int64Array,
    layers: Int64Array,
    context: Int64Array,
    max_order: int,
    path_prob: float,
    found: Int64Array,
    found_probs: Float64Array,
) -> tuple[int, int]:
    """Estimate from the text what follows a context, as prediction by partial matching does.

    The longest context that occurs decides (in a layer that indexes shorter n-grams, it is found
    after those of higher order): its successors share, by their counts, what
    `escape_prob` does not reserve. Shorter contexts are then read for occurrences not read yet; the
    successors they add get a share of the reserve. Orders too short to matter for the tree are not
    read. At each order the own text is read first, then the layers; each as far as if it were the
    only one, so that none takes another's place.

    Source: Cleary and Witten, "Data compression using adaptive coding and partial string matching",
    IEEE Transactions on Communications 32 (1984); escape by measured hit rates instead of theirs.

    Args:
        sequence: int64 [4], state of the context's sequence; `layers`: its layers.
        context: int64 [length], newest token first. `max_order`: the longest order to look up.
        path_prob: probability of the node whose context this is.
        found: int64 [8 + num_layers, at least N + 1 and MAX_FOUND + MAX_OCCURRENCES * num_layers];
            filled by row: 0 occurrences, 1 token ids, 2 their counts, 6 lengths of their longest
            match, 7 their nearest origin; the other rows are scratch.
        found_probs: float64 [of that length], filled with the successors' probabilities.

    Returns:
        The number of successors found, and the length of the match that decides (0 for none).
    """
    occurrences, times, newest = found[0], found[2], found[3]
    lengths, next_ids = found[4], found[5]
    first, num_layers = first_held(text, counts), layers.shape[0]
    limit = MAX_OCCURRENCES
    if path_prob <= UNLIKELY:
        limit //= 2
        context = context[:max_order]
    num_occurrences = num_found = longest = 0
    mass_left = 1.0
    look_up(heads, int(counts[SEED]), int(counts[MULTIPLIER]), context, max_order, newest)
    if num_layers > 0:
        look_up_layers(layers, context, max_order, found)
    for order in range(max_order, 0, -1):
        num_counted = num_occurrences
        num_occurrences = read_bucket(
            text,
            links,
            first,
            0,
            newest,
            order,
            context,
            limit,
            num_counted,
            num_occurrences,
            found,
        )
        if num_layers > 0:
            num_occurrences = read_layers(
                layers, order, context, limit, num_counted, num_occurrences, found
            )
        # Count the occurrences just read, those of the longest match first.
        begin = num_counted
        while num_counted < num_occurrences:
            length = 0
            for i in range(begin, num_occurrences):
                length = max(length, lengths[i])
            num_known = num_found
            for i in range(begin, num_occurrences):
                if lengths[i] == length:
                    origin = origin_of(occurrences[i], sequence)
                    num_found = add_successor(next_ids[i], length, origin, found, num_found)
                    lengths[i] = 0
                    num_counted += 1
            if longest == 0:
                longest = length
                mass_left = escape_prob(length, num_found, num_counted)
                for i in range(num_found):
                    found_probs[i] = (1.0 - mass_left) * times[i] / num_counted
            elif num_found > num_known:
                share = _BACKOFF_SHARE * mass_left
                for i in range(num_known, num_found):
                    found_probs[i] = share * times[i] / num_counted
                    mass_left -= found_probs[i]
        is_enough = num_occurrences == limit * (1 + num_layers)
        if longest > 0 and (is_enough or mass_left * path_prob < READ_ON):
            break
    return num_found, longest


@kernel
def add_candidate(
    token_id: int, source: int, says: float, found: Int64Array, features: Float64Array, num: int
) -> int:
    """Note what a source gives for a token, keeping the maximum; return the candidate count."""
    found_ids = found[1]
    for i in range(num):
        if found_ids[i] == token_id:
            features[i, source] = max(features[i, source], says)
            return num
    if num == features.shape[0]:
        return num
    found_ids[num] = token_id
    features[num, :] = 0.0
    features[num, source] = says
    return num + 1


@kernel
def add_known(
    table: TableArrays,
    row: int,
    source: int,
    found: Int64Array,
    features: Float64Array,
    num: int,
) -> int:
    """Add the successors in a table's row as candidates; return the candidate count."""
    _, successor_ids, costs = table
    for j in range(successor_ids.shape[1]):
        token_id = int(successor_ids[row, j])
        if token_id == NONE:
            break
        says = max(costs[row, j] / -COST_STEPS - LEAST_LOG_PROB, FAINT)
        num = add_candidate(token_id, source, says, found, features, num)
    return num


@kernel
def layer_that_knows(layers: Int64Array, previous: int, last: int) -> int:
    """Return the first layer whose harvest knows a context, or NONE."""
    for i in range(layers.shape[0]):
        if find_context(table_of(layers[i])[0], previous, last) != NONE:
            return i
    return NONE


@kernel
def add_known_of_layers(
    layers: Int64Array,
    previous: int,
    last: int,
    source: int,
    found: Int64Array,
    features: Float64Array,
    num: int,
) -> int:
    """Add successors from the first layer whose harvest knows a context; see `add_known`."""
    for i in range(layers.shape[0]):
        table = table_of(layers[i])
        row = find_context(table[0], previous, last)
        if row != NONE:
            return add_known(table, row, source, found, features, num)
    return num


@inlined
def read_skips(
    text: Int32Array,
    links: Int32Array,
    first: int,
    position: int,
    order: int,
    context: Int64Array,
    found: Int64Array,
    features: Float64Array,
    num: int,
) -> tuple[int, int]:
    """Read one text's bucket for `add_skips`; return the candidate count and how many it took."""
    num_rows = text.shape[0]
    before = context[1:]
    num_read = num_taken = 0
    while position >= first and num_read < MAX_SKIPS_READ and num_taken < MAX_SKIPS:
        row = row_of(position, num_rows)
        exchanged = int(text[row, NEXT])
        if exchanged != NONE and text[row_of(exchanged, num_rows), TOKEN] != context[0]:
            after = int(text[row_of(exchanged, num_rows), NEXT])
            length = match_length(text, position, first, before) if after != NONE else 0
            if length >= order:
                token_id = int(text[row_of(after, num_rows), TOKEN])
                says = log_of(length) + 0.1
                num = add_candidate(token_id, SKIP, says, found, features, num)
                num_taken += 1
        position = int(links[row, order - 1])
        num_read += 1
    return num, num_taken


@kernel
def skips_of_layers(
    layers: Int64Array,
    order: int,
    context: Int64Array,
    found: Int64Array,
    features: Float64Array,
    num: int,
) -> tuple[int, int]:
    """Read each layer's bucket for `add_skips`; see `read_skips`."""
    num_taken = 0
    for i in range(layers.shape[0]):
        text, links = text_of(layers[i])
        first, position = first_of(layers[i]), int(found[8 + i, order])
        num, more = read_skips(text, links, first, position, order, context, found, features, num)
        num_taken += more
    return num, num_taken


@kernel
def add_skips(
    text: Int32Array,
    links: Int32Array,
    heads: Int32Array,
    counts: Int64Array,
    layers: Int64Array,
    context: Int64Array,
    found: Int64Array,
    features: Float64Array,
    num: int,
) -> int:
    """Add what followed where the text had another last token; return the candidate count.

    After a copy with one word exchanged, the original shows how the text goes on.
    """
    newest, first = found[3], first_held(text, counts)
    before = context[1:]
    longest = min(heads.shape[0], before.shape[0])
    look_up(heads, int(counts[SEED]), int(counts[MULTIPLIER]), before, longest, newest)
    if layers.shape[0] > 0:
        look_up_layers(layers, before, longest, found)
    for order in range(longest, 1, -1):
        num, num_taken = read_skips(
            text, links, first, int(newest[order]), order, context, found, features, num
        )
        if layers.shape[0] > 0:
            num, more = skips_of_layers(layers, order, context, found, features, num)
            num_taken += more
        if num_taken > 0:
            break
    return num


@kernel
def match_row(length: int, num_successors: int) -> int:
    """Return the row of weights for a match in the text."""
    if length == 0:
        return 0
    row = length if length <= 2 else 3 if length <= 4 else 4 if length <= 8 else 5
    return row if num_successors == 1 else row + 5


@kernel
def estimate(
    text: Int32Array,
    links: Int32Array,
    heads: Int32Array,
    counts: Int64Array,
    sequence: Int64Array,
    layers: Int64Array,
    harvested: TableArrays,
    prewarmed: TableArrays,
    weights: Float64Array,
    context: Int64Array,
    max_order: int,
    path_prob: float,
    found: Int64Array,
    features: Float64Array,
    summed: Float64Array,
    found_probs: Float64Array,
) -> tuple[int, int]:
    """Estimate what follows a context from all sources.

    A candidate's score is a weighted sum of what the sources give for it; its probability is the
    softmax over the candidates and "none of them", whose score is 0. This is a product of experts:
    sources that agree on a token raise it above what each of them gives.

    Source: log-linear interpolation of language models, Klakow (ICSLP 1998); weights that are
    learned online and chosen by context, as in the PAQ compressors (Mahoney 2005).

    Args:
        harvested, prewarmed: tables of the target's own successors (`SuccessorTable.rows`). A
            context that `harvested` does not know is looked up in those of the layers.
        weights: float64 [NUM_WEIGHT_ROWS, NUM_WEIGHTS].
        context: as for `successors`, like `sequence`, `layers`, `max_order`, `path_prob` and
            `found`. Row 1 of `found` is filled with token ids, the first three of row 4 with the
            rows of weights used.
        features: float64 [MAX_FOUND + MAX_OCCURRENCES * num_layers, NUM_FEATURES]; `summed`:
            float64 [NUM_WEIGHTS]; filled.
        found_probs: float64 [as many], filled with probabilities.

    Returns:
        The number of successors found, and the length of the match that decides (0 for none).
    """
    num_found, longest = successors(
        text,
        links,
        heads,
        counts,
        sequence,
        layers,
        context,
        max_order,
        path_prob,
        found,
        found_probs,
    )
    num_in_text = num_found
    for i in range(num_in_text):
        features[i, :] = 0.0
        features[i, TEXT] = math.log(found_probs[i]) - LEAST_LOG_PROB
        features[i, LENGTH] = log_of(int(found[6, i])) + 0.5
        features[i, COUNT] = log_of(int(found[2, i]))
        features[i, IS_NEWEST] = 1.0 if i == 0 else 0.0
        features[i, IN_ANSWER] = 1.0 if found[7, i] == ANSWER else 0.0
        features[i, IN_PROMPT] = 1.0 if found[7, i] == PROMPT else 0.0
    row_of_origin = origin_row(found[0, 0], sequence) if num_in_text > 0 else ORIGIN_ROW + EARLIER
    last = int(context[0])
    known = 0
    row = match_row(longest, num_in_text)
    if context.shape[0] > 1:
        previous = int(context[1])
        row_of_pair = find_context(harvested[0], previous, last)
        if row_of_pair != NONE:
            known += 1
            num_found = add_known(
                harvested, row_of_pair, HARVESTED_PAIR, found, features, num_found
            )
        elif layers.shape[0] > 0 and layer_that_knows(layers, previous, last) != NONE:
            known += 1
            num_found = add_known_of_layers(
                layers, previous, last, HARVESTED_PAIR, found, features, num_found
            )
        row_of_pair = find_context(prewarmed[0], previous, last)
        if row_of_pair != NONE:
            known += 2
            num_found = add_known(
                prewarmed, row_of_pair, PREWARMED_PAIR, found, features, num_found
            )
    row_of_last = find_context(harvested[0], NONE, last)
    if row_of_last != NONE:
        num_found = add_known(harvested, row_of_last, HARVESTED_SINGLE, found, features, num_found)
    elif layers.shape[0] > 0:
        num_found = add_known_of_layers(
            layers, NONE, last, HARVESTED_SINGLE, found, features, num_found
        )
    row_of_last = find_context(prewarmed[0], NONE, last)
    if row_of_last != NONE:
        row += MATCH_ROWS // 2
        num_found = add_known(prewarmed, row_of_last, PREWARMED_SINGLE, found, features, num_found)
    if context.shape[0] > 3 and path_prob > UNLIKELY:
        num_found = add_skips(
            text, links, heads, counts, layers, context, found, features, num_found
        )
    found[4, 0] = row
    found[4, 1] = row_of_origin
    found[4, 2] = KNOWN_ROW + known
    for j in range(NUM_WEIGHTS):
        summed[j] = 0.0
        for i in range(3):
            summed[j] += weights[found[4, i], j]
    highest = 0.0
    for i in range(num_found):
        score = summed[BIAS]
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
    text: Int32Array,
    links: Int32Array,
    heads: Int32Array,
    counts: Int64Array,
    sequence: Int64Array,
    layers: Int64Array,
    harvested: TableArrays,
    prewarmed: TableArrays,
    weights: Float64Array,
    learning_rate: float,
    tail: int,
    token_id: int,
    context: Int64Array,
    found: Int64Array,
    features: Float64Array,
    summed: Float64Array,
    found_probs: Float64Array,
) -> None:
    """Move the weights towards predicting `token_id`, the token that follows position `tail`."""
    length, first = 0, first_held(text, counts)
    position = tail
    while position >= first and length < context.shape[0]:
        row = row_of(position, text.shape[0])
        context[length] = text[row, TOKEN]
        position = int(text[row, PREVIOUS])
        length += 1
    if length == 0:
        return
    num_found, _ = estimate(
        text,
        links,
        heads,
        counts,
        sequence,
        layers,
        harvested,
        prewarmed,
        weights,
        context[:length],
        min(length, heads.shape[0]),
        1.0,
        found,
        features,
        summed,
        found_probs,
    )
    for i in range(num_found):
        came = 1.0 if found[1, i] == token_id else 0.0
        error = learning_rate * (came - found_probs[i])
        for k in range(3):
            row = found[4, k]
            weights[row, BIAS] += error
            for j in range(NUM_TABLE_SOURCES):
                if features[i, j] == 0.0:
                    weights[row, SILENCE + j] += error
                else:
                    weights[row, j] += _OF_LOG_PROBS * error * features[i, j]
            for j in range(NUM_TABLE_SOURCES, NUM_FEATURES):
                weights[row, j] += _OF_DETAILS * error * features[i, j]


@kernel
def push(
    queue: Int64Array, queue_length: int, candidate_probs: Float64Array, candidate: int
) -> None:
    """Add a candidate to a heap whose top is the likeliest, the oldest among equals."""
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
    nodes: Int64Array, node: int, root_context: Int64Array, context: Int64Array
) -> int:
    """Write the tokens up to `node`, newest first, to `context`; return their number."""
    length = 0
    while node != NONE and length < context.shape[0]:
        context[length] = nodes[0, node]
        node = nodes[1, node]
        length += 1
    i = 0
    while i < root_context.shape[0] and length < context.shape[0]:
        context[length] = root_context[i]
        i += 1
        length += 1
    return length


@kernel
def grow_tree(
    text: Int32Array,
    links: Int32Array,
    heads: Int32Array,
    counts: Int64Array,
    sequence: Int64Array,
    layers: Int64Array,
    harvested: TableArrays,
    prewarmed: TableArrays,
    weights: Float64Array,
    root_context: Int64Array,
    max_draft_tokens: int,
    max_candidates: int,
    context: Int64Array,
    found: Int64Array,
    features: Float64Array,
    summed: Float64Array,
    found_probs: Float64Array,
    candidates: Int64Array,
    candidate_probs: Float64Array,
    nodes: Int64Array,
    node_probs: Float64Array,
) -> int:
    """Grow a prefix tree from the likeliest continuations of a context; return its size.

    The tree grows best first: of all successors of the root and of the nodes taken so far, the one
    whose whole path is likeliest comes next. Growth ends at `max_draft_tokens` nodes, or when every
    path left would open a leaf beyond `max_candidates`.

    Args:
        sequence, layers, harvested, prewarmed, weights: as for `estimate`.
        root_context: int64 [up to max_match], the tokens up to the root, newest first, where
            max_match is the larger of MAX_MATCH and N.
        max_draft_tokens: at least 1.
        max_candidates: at least 1.
        context: int64 [max_match]; `found`, `features`, `summed`, `found_probs`: as for `estimate`;
            `candidates`: int64 [3, max_draft_tokens * width] (token, parent, heap), where width is
            that of `found_probs`; `candidate_probs`: float64 of that length. All scratch.
        nodes: int64 [5, max_draft_tokens]; filled with token, parent, depth, number of children and
            the length of the longest match.
        node_probs: float64 [max_draft_tokens]; filled with path probabilities, greatest first.
    """
    num_nodes = num_candidates = queue_length = num_leaves = 0
    node, path_prob = NONE, 1.0
    # A node's match is at most one token longer than its parent's.
    max_order = heads.shape[0]
    while True:
        length = read_context(nodes, node, root_context, context)
        num_found, longest = estimate(
            text,
            links,
            heads,
            counts,
            sequence,
            layers,
            harvested,
            prewarmed,
            weights,
            context[:length],
            min(length, max_order),
            path_prob,
            found,
            features,
            summed,
            found_probs,
        )
        if node == NONE:
            root_order = longest
        else:
            nodes[4, node] = longest
        likeliest = 0
        for i in range(1, num_found):
            if found_probs[i] > found_probs[likeliest]:
                likeliest = i
        for i in range(num_found):
            prob = path_prob * found_probs[i]
            if i == likeliest or prob >= MIN_PROB:
                candidates[0, num_candidates] = found[1, i]
                candidates[1, num_candidates] = node
                candidate_probs[num_candidates] = prob
                push(candidates[2], queue_length, candidate_probs, num_candidates)
                num_candidates += 1
                queue_length += 1
        while True:  # take the likeliest candidate that does not exceed the number of leaves
            if queue_length == 0:
                return num_nodes
            best = pop(candidates[2], queue_length, candidate_probs)
            queue_length -= 1
            parent = candidates[1, best]
            extends_leaf = parent != NONE and nodes[3, parent] == 0
            if extends_leaf or num_leaves < max_candidates:
                break
        node = num_nodes
        path_prob = candidate_probs[best]
        nodes[0, node] = candidates[0, best]
        nodes[1, node] = parent
        nodes[2, node] = 1 if parent == NONE else nodes[2, parent] + 1
        nodes[3, node] = 0
        node_probs[node] = path_prob
        num_leaves += 0 if extends_leaf else 1
        if parent != NONE:
            nodes[3, parent] += 1
        num_nodes += 1
        if num_nodes == max_draft_tokens:
            return num_nodes
        max_order = min(heads.shape[0], 1 + (root_order if parent == NONE else nodes[4, parent]))


# --- chains: many sequences in one call ---

# What the kernels know of a pool, an int64 row at an address: what they know of a layer, of which
# next position, seed and multiplier are not read, and the addresses of its counts and its weights.
COUNTS_AT, WEIGHTS_AT = NUM_LAYER_COLUMNS, NUM_LAYER_COLUMNS + 1
NUM_POOL_COLUMNS = NUM_LAYER_COLUMNS + 2
# And of a sequence: the addresses of its state and of its layers and their number, and the
# addresses and sizes of the arrays of its prewarmed table.
STATE_AT, LAYERS_AT, NUM_LAYERS = range(3)
PREWARMED_KEYS_AT, PREWARMED_IDS_AT, PREWARMED_COSTS_AT = range(3, 6)
PREWARMED_NUM_KEYS, PREWARMED_NUM_SUCCESSORS = range(6, 8)
NUM_SEQUENCE_COLUMNS = 8
NUM_STATES = 4


@view
def row_at(address: int, num_columns: int) -> Int64Array:
    """Return the row of a pool or a sequence."""
    return _array_at(address, (num_columns,), np.int64)


@view
def counts_at(pool: Int64Array) -> Int64Array:
    """Return the counts of a pool."""
    return _array_at(pool[COUNTS_AT], (4,), np.int64)


@view
def weights_at(pool: Int64Array) -> Float64Array:
    """Return the weights of a pool."""
    return _array_at(pool[WEIGHTS_AT], (NUM_WEIGHT_ROWS, NUM_WEIGHTS), np.float64)


@view
def state_at(sequence: Int64Array) -> Int64Array:
    """Return the state of a sequence."""
    return _array_at(sequence[STATE_AT], (NUM_STATES,), np.int64)


@view
def layers_at(sequence: Int64Array) -> Int64Array:
    """Return the layers of a sequence."""
    shape = (sequence[NUM_LAYERS], NUM_LAYER_COLUMNS)
    return _array_at(sequence[LAYERS_AT], shape, np.int64)


@view
def prewarmed_at(sequence: Int64Array) -> TableArrays:
    """Return the arrays of a sequence's prewarmed table."""
    num_keys = sequence[PREWARMED_NUM_KEYS]
    shape = (num_keys, sequence[PREWARMED_NUM_SUCCESSORS])
    return (
        _array_at(sequence[PREWARMED_KEYS_AT], (num_keys,), np.int64),
        _array_at(sequence[PREWARMED_IDS_AT], shape, np.int32),
        _array_at(sequence[PREWARMED_COSTS_AT], shape, np.uint16),
    )


@kernel
def find_negative(token_ids: Int32Array, lengths: Int64Array, num_last: Int64Array) -> int:
    """Return the first row with a negative id among its last tokens, or NONE."""
    for i in range(token_ids.shape[0]):
        for j in range(max(0, lengths[i] - num_last[i]), lengths[i]):
            if token_ids[i, j] < 0:
                return i
    return NONE


@kernel
def observe_rows(
    pools: Int64Array,
    sequences: Int64Array,
    token_ids: Int32Array,
    lengths: Int64Array,
    num_new: Int64Array,
    learning_rate: float,
    learning_stride: int,
    context: Int64Array,
    found: Int64Array,
    features: Float64Array,
    summed: Float64Array,
    found_probs: Float64Array,
) -> None:
    """Append the last tokens of each row to the answer of its sequence, row by row.

    Args:
        pools, sequences: int64 [num_rows], addresses of the rows of each text's pool and sequence.
        token_ids: int32 [num_rows, width], of which the first `lengths[i]` are row i's text.
        num_new: int64 [num_rows], how many of the last ones to append.
        learning_stride: the weights learn from each so many-th token of all rows.

    The other arguments are those of `append`.
    """
    num_appended = 0
    for i in range(token_ids.shape[0]):
        if num_new[i] == 0:
            continue
        pool = row_at(pools[i], NUM_POOL_COLUMNS)
        sequence = row_at(sequences[i], NUM_SEQUENCE_COLUMNS)
        text, links = text_of(pool)
        heads, counts, harvested, weights = (
            heads_of(pool),
            counts_at(pool),
            table_of(pool),
            weights_at(pool),
        )
        state, layers, prewarmed = state_at(sequence), layers_at(sequence), prewarmed_at(sequence)
        begin_appending(text, counts, state)
        state[PROMPT] = min(state[PROMPT], int(counts[NEXT_POSITION]))
        state[ANSWER] = min(state[ANSWER], int(counts[NEXT_POSITION]))
        for j in range(lengths[i] - num_new[i], lengths[i]):
            num_appended += 1
            append_token(
                text,
                links,
                heads,
                counts,
                state,
                layers,
                int(token_ids[i, j]),
                learning_rate if num_appended % learning_stride == 0 else 0.0,
                harvested,
                prewarmed,
                weights,
                context,
                found,
                features,
                summed,
                found_probs,
            )


@kernel
def draft_rows(
    pools: Int64Array,
    sequences: Int64Array,
    token_ids: Int32Array,
    lengths: Int64Array,
    max_draft_tokens: Int64Array,
    min_probability: float,
    state: Int64Array,
    contexts: Int64Array,
    found: Int64Array,
    features: Float64Array,
    summed: Float64Array,
    found_probs: Float64Array,
    chain_ids: Int32Array,
    chain_probs: Float64Array,
    chain_lengths: Int64Array,
) -> None:
    """Follow the likeliest successors of each row's text; nothing of pools or sequences changes.

    Each chain is the tree that `grow_tree` grows for one leaf, up to where its probability falls
    below `min_probability`.

    Args:
        max_draft_tokens: int64 [num_rows], at most the width of `chain_ids`.
        state: int64 [NUM_STATES]; `contexts`: int64 [max_match + width of `chain_ids`]. Scratch.
        chain_ids, chain_probs: int32 and float64 [num_rows, width], filled as far as each chain
            goes, with the probability that it is right up to there.
        chain_lengths: int64 [num_rows], filled.

    The other arguments are those of `observe_rows` and `estimate`.
    """
    most = chain_ids.shape[1]
    max_match = contexts.shape[0] - most
    for i in range(token_ids.shape[0]):
        chain_lengths[i] = 0
        length = min(lengths[i], max_match)
        if length == 0:
            continue
        pool = row_at(pools[i], NUM_POOL_COLUMNS)
        sequence = row_at(sequences[i], NUM_SEQUENCE_COLUMNS)
        text, links = text_of(pool)
        heads, counts, harvested, weights = (
            heads_of(pool),
            counts_at(pool),
            table_of(pool),
            weights_at(pool),
        )
        layers, prewarmed = layers_at(sequence), prewarmed_at(sequence)
        known = state_at(sequence)  # others may read it, so only a copy is lowered like the text
        for j in range(NUM_STATES):
            state[j] = known[j]
        lower(state, counts)
        for j in range(length):
            contexts[most + j] = token_ids[i, lengths[i] - 1 - j]
        max_order, path_prob = heads.shape[0], 1.0
        for depth in range(max_draft_tokens[i]):
            context = contexts[most - depth : most - depth + min(length + depth, max_match)]
            num_found, longest = estimate(
                text,
                links,
                heads,
                counts,
                state,
                layers,
                harvested,
                prewarmed,
                weights,
                context,
                min(context.shape[0], max_order),
                path_prob,
                found,
                features,
                summed,
                found_probs,
            )
            if num_found == 0:
                break
            likeliest = 0
            for j in range(1, num_found):
                if found_probs[j] > found_probs[likeliest]:
                    likeliest = j
            path_prob *= found_probs[likeliest]
            if path_prob < min_probability:
                break
            chain_ids[i, depth] = found[1, likeliest]
            chain_probs[i, depth] = path_prob
            chain_lengths[i] = depth + 1
            contexts[most - depth - 1] = found[1, likeliest]
            # A token's match is at most one token longer than that of the one before.
            max_order = min(heads.shape[0], 1 + longest)


@kernel
def draft_chains(
    pools: Int64Array,
    sequences: Int64Array,
    token_ids: Int32Array,
    lengths: Int64Array,
    num_new: Int64Array,
    max_draft_tokens: Int64Array,
    learning_rate: float,
    learning_stride: int,
    min_probability: float,
    state: Int64Array,
    context: Int64Array,
    contexts: Int64Array,
    found: Int64Array,
    features: Float64Array,
    summed: Float64Array,
    found_probs: Float64Array,
    chain_ids: Int32Array,
    chain_probs: Float64Array,
    chain_lengths: Int64Array,
) -> None:
    """Observe what is new in many rows, then draft a chain for each.

    The arguments are those of `observe_rows` and `draft_rows`.
    """
    observe_rows(
        pools,
        sequences,
        token_ids,
        lengths,
        num_new,
        learning_rate,
        learning_stride,
        context,
        found,
        features,
        summed,
        found_probs,
    )
    draft_rows(
        pools,
        sequences,
        token_ids,
        lengths,
        max_draft_tokens,
        min_probability,
        state,
        contexts,
        found,
        features,
        summed,
        found_probs,
        chain_ids,
        chain_probs,
        chain_lengths,
    )


@kernel
def push_slot(
    parent: int,
    left_probs: Float64Array,
    floor: float,
    slots: Int64Array,
    slot_probs: Float64Array,
    num_slots: int,
    queue_length: int,
) -> int:
    """Queue the next child of `parent` by its expected probability before it is drawn.

    Returns:
        The number of slots queued: 1, or 0 if nothing is left to draw or the expectation is less
        than `floor`.
    """
    total = squares = 0.0
    for i in range(left_probs.shape[1]):
        total += left_probs[parent + 1, i]
        squares += left_probs[parent + 1, i] * left_probs[parent + 1, i]
    if total == 0.0 or squares / total < floor:
        return 0
    slots[1, num_slots] = parent
    slot_probs[num_slots] = squares / total
    push(slots[2], queue_length, slot_probs, num_slots)
    return 1


@kernel
def draw_successor(left_probs: Float64Array, uniform: float, support_probs: Float64Array) -> int:
    """Draw one of the successors left; fill `support_probs` with the distribution drawn from."""
    total = cumulative = 0.0
    for i in range(left_probs.shape[0]):
        total += left_probs[i]
    drawn = NONE
    for i in range(left_probs.shape[0]):
        support_probs[i] = left_probs[i] / total
        # A successor is taken if the uniform is beyond all before it; the last one that can be
        # drawn also takes what rounding leaves below 1.
        if left_probs[i] > 0.0 and (drawn == NONE or uniform >= cumulative):
            drawn = i
        cumulative += support_probs[i]
    return drawn


@kernel
def sample_tree(
    text: Int32Array,
    links: Int32Array,
    heads: Int32Array,
    counts: Int64Array,
    sequence: Int64Array,
    layers: Int64Array,
    harvested: TableArrays,
    prewarmed: TableArrays,
    weights: Float64Array,
    root_context: Int64Array,
    max_draft_tokens: int,
    max_candidates: int,
    uniforms: Float64Array,
    context: Int64Array,
    found: Int64Array,
    features: Float64Array,
    summed: Float64Array,
    found_probs: Float64Array,
    slots: Int64Array,
    slot_probs: Float64Array,
    left_ids: Int64Array,
    left_probs: Float64Array,
    nodes: Int64Array,
    node_probs: Float64Array,
    support_probs: Float64Array,
) -> int:
    """Draw a prefix tree from what follows a context; return its size.

    A *slot* is a place for a node whose token is not drawn yet. The slot with the highest expected
    probability is filled first; it opens the slots of its next sibling and of its first child. So a
    slot's existence and its parent are settled before its token is drawn, by the tokens of earlier
    slots alone: otherwise no acceptance rule could be unbiased. Children of one parent are drawn
    without replacement.

    Source: drawing without replacement from Jeon et al., "Recursive Speculative Decoding"
    (arXiv 2402.14160); the order of the slots is our own.

    Args:
        uniforms: float64 [max_draft_tokens] in [0, 1); slot i is drawn with uniforms[i].
        slots: int64 [3, 2 * max_draft_tokens + 1] (unused, parent, heap), `slot_probs`: float64 of
            that length; `left_probs`: float64 [max_draft_tokens + 1, width], the path
            probabilities of a node's successors, 0 where drawn already, the root's first. All
            scratch.
        left_ids: int64 [max_draft_tokens + 1, width]; filled with the successors of each node,
            the root's first.
        nodes: as for `grow_tree`.
        node_probs: float64 [max_draft_tokens]; filled with the expected probabilities of the slots.
        support_probs: float64 [max_draft_tokens, width]; row i is filled with the distribution
            that node i was drawn from, over the tokens in its parent's row of `left_ids`.

    The other arguments are those of `grow_tree`.
    """
    num_nodes = num_slots = num_leaves = queue_length = 0
    node, path_prob = NONE, 1.0
    max_order = heads.shape[0]
    while True:
        length = read_context(nodes, node, root_context, context)
        num_found, longest = estimate(
            text,
            links,
            heads,
            counts,
            sequence,
            layers,
            harvested,
            prewarmed,
            weights,
            context[:length],
            min(length, max_order),
            path_prob,
            found,
            features,
            summed,
            found_probs,
        )
        if node == NONE:
            root_order = longest
        else:
            nodes[4, node] = longest
        for i in range(left_ids.shape[1]):
            left_ids[node + 1, i] = found[1, i] if i < num_found else 0
            left_probs[node + 1, i] = path_prob * found_probs[i] if i < num_found else 0.0
        pushed = push_slot(node, left_probs, 0.0, slots, slot_probs, num_slots, queue_length)
        num_slots += pushed
        queue_length += pushed
        while True:  # take the likeliest slot that does not exceed the number of leaves
            if queue_length == 0:
                return num_nodes
            slot = pop(slots[2], queue_length, slot_probs)
            queue_length -= 1
            parent = slots[1, slot]
            extends_leaf = parent != NONE and nodes[3, parent] == 0
            if extends_leaf or num_leaves < max_candidates:
                break
        node = num_nodes
        drawn = draw_successor(left_probs[parent + 1], uniforms[node], support_probs[node])
        path_prob = left_probs[parent + 1, drawn]
        left_probs[parent + 1, drawn] = 0.0
        nodes[0, node] = left_ids[parent + 1, drawn]
        nodes[1, node] = parent
        nodes[2, node] = 1 if parent == NONE else nodes[2, parent] + 1
        nodes[3, node] = 0
        node_probs[node] = slot_probs[slot]
        num_leaves += 0 if extends_leaf else 1
        if parent != NONE:
            nodes[3, parent] += 1
        num_nodes += 1
        if num_nodes == max_draft_tokens:
            return num_nodes
        pushed = push_slot(parent, left_probs, MIN_PROB, slots, slot_probs, num_slots, queue_length)
        num_slots += pushed
        queue_length += pushed
        max_order = min(heads.shape[0], 1 + (root_order if parent == NONE else nodes[4, parent]))


# Contexts per bucket of a `SuccessorTable`; beyond that, the least recently put one is dropped.
WAYS = 8
# Probabilities from 1 down to 1e-7 are held as -ln(prob) in steps of 1/4096, two bytes each.
COST_STEPS = 4096.0
MAX_COST = 65535
# Where a table averages, a new value weighs at least one part in this many.
MAX_COUNT = 10


@kernel
def bucket_of(keys: Int64Array, previous: int, last: int) -> int:
    """Return the first row of a context's bucket."""
    state = hash_step(hash_step(0, last), previous + 1)
    return int(state & (keys.shape[0] // WAYS - 1)) * WAYS


@kernel
def find_context(keys: Int64Array, previous: int, last: int) -> int:
    """Return the row of a context in a table of successors, or NONE.

    Args:
        keys: int64 [num_rows]; rows `WAYS * b` to `WAYS * b + WAYS - 1` are bucket b; none where
            nothing is in the table.
        previous: the token before the last one; NONE for the context of the last one alone.
        last: the last token.
    """
    if keys.shape[0] == 0:
        return NONE
    key = (previous + 1) * (HASH_MASK + 1) + last  # exact: ids have 31 bits
    begin = bucket_of(keys, previous, last)
    for row in range(begin, begin + WAYS):
        if keys[row] == key:
            return row
    return NONE


@kernel
def open_front(
    keys: Int64Array,
    counts: Int32Array,
    successor_ids: Int32Array,
    costs: NDArray[np.uint16],
    epochs: Int32Array,
    begin: int,
    row: int,
) -> None:
    """Free a bucket's first row by moving the rows before `row` down by one, overwriting `row`."""
    for other in range(row, begin, -1):
        keys[other] = keys[other - 1]
        counts[other] = counts[other - 1]
        epochs[other] = epochs[other - 1]
        for j in range(successor_ids.shape[1]):
            successor_ids[other, j] = successor_ids[other - 1, j]
            costs[other, j] = costs[other - 1, j]


@kernel
def rehash(
    old_keys: Int64Array,
    old_counts: Int32Array,
    old_ids: Int32Array,
    old_costs: NDArray[np.uint16],
    old_epochs: Int32Array,
    keys: Int64Array,
    counts: Int32Array,
    successor_ids: Int32Array,
    costs: NDArray[np.uint16],
    epochs: Int32Array,
    num_contexts: Int64Array,
) -> None:
    """Copy the rows of a table to an empty one of another size."""
    for old in range(old_keys.shape[0] - 1, -1, -1):  # so that what was put last comes first again
        if old_keys[old] == NONE:
            continue
        previous = old_keys[old] // (HASH_MASK + 1) - 1
        begin = bucket_of(keys, previous, old_keys[old] % (HASH_MASK + 1))
        num_contexts[0] += keys[begin + WAYS - 1] == NONE
        open_front(keys, counts, successor_ids, costs, epochs, begin, begin + WAYS - 1)
        keys[begin] = old_keys[old]
        counts[begin] = old_counts[old]
        epochs[begin] = old_epochs[old]
        for j in range(successor_ids.shape[1]):
            successor_ids[begin, j] = old_ids[old, j]
            costs[begin, j] = old_costs[old, j]


@kernel
def put_context(
    keys: Int64Array,
    counts: Int32Array,
    successor_ids: Int32Array,
    costs: NDArray[np.uint16],
    epochs: Int32Array,
    num_contexts: Int64Array,
    previous: int,
    last: int,
    new_ids: Int32Array,
    new_probs: NDArray[np.float32],
    i: int,
    averages: bool,
    epoch: int,
    merged_ids: Int32Array,
    merged_probs: Float64Array,
) -> None:
    """Put what a target found likely after one context into a table.

    The context put last comes first in its bucket.

    Args:
        keys: as for `find_context`; `counts`: int32 [num_rows], how often each was put;
            `successor_ids`, `costs`: [num_rows, num_successors], likeliest first, NONE where fewer
            are known; `epochs`: int32 [num_rows], when each was put last; `num_contexts`: int64
            [1], number of rows in use.
        previous, last: the context; `previous` may be NONE.
        new_ids, new_probs: [n, k], likeliest first; NONE ends a row. Row `i` is put.
        averages: whether a context's new successors are averaged with the known ones or replace
            them.
        epoch: what is noted as the time.
        merged_ids, merged_probs: [k + num_successors], scratch.
    """
    num_held, k = successor_ids.shape[1], new_ids.shape[1]
    row = find_context(keys, previous, last)
    begin = bucket_of(keys, previous, last)
    num_merged = 0
    share = 1.0
    count = 1
    if row == NONE:
        row = begin + WAYS - 1
        num_contexts[0] += keys[row] == NONE
    elif averages:
        count = min(int(counts[row]) + 1, MAX_COUNT)
        share = 1.0 / count
        for j in range(num_held):
            if successor_ids[row, j] == NONE:
                break
            merged_ids[num_merged] = successor_ids[row, j]
            merged_probs[num_merged] = (1.0 - share) * math.exp(costs[row, j] / -COST_STEPS)
            num_merged += 1
    num_known = num_merged
    for j in range(k):
        if new_ids[i, j] == NONE:
            break
        place = 0
        while place < num_known and merged_ids[place] != new_ids[i, j]:
            place += 1
        if place == num_known:
            place = num_merged
            merged_ids[place] = new_ids[i, j]
            merged_probs[place] = 0.0
            num_merged += 1
        merged_probs[place] += share * float(new_probs[i, j])
    open_front(keys, counts, successor_ids, costs, epochs, begin, row)
    keys[begin] = (previous + 1) * (HASH_MASK + 1) + last
    counts[begin] = count
    epochs[begin] = epoch
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


@kernel
def put_successors(
    keys: Int64Array,
    counts: Int32Array,
    successor_ids: Int32Array,
    costs: NDArray[np.uint16],
    epochs: Int32Array,
    num_contexts: Int64Array,
    contexts: Int64Array,
    new_ids: Int32Array,
    new_probs: NDArray[np.float32],
    averages: bool,
    epoch: int,
    merged_ids: Int32Array,
    merged_probs: Float64Array,
) -> None:
    """Put successors of contexts, int64 [n, 2], into a table; else as `put_context`."""
    for i in range(contexts.shape[0]):
        previous, last = int(contexts[i, 0]), int(contexts[i, 1])
        put_context(
            keys,
            counts,
            successor_ids,
            costs,
            epochs,
            num_contexts,
            previous,
            last,
            new_ids,
            new_probs,
            i,
            averages,
            epoch,
            merged_ids,
            merged_probs,
        )


@kernel
def put_tree(
    keys: Int64Array,
    counts: Int32Array,
    successor_ids: Int32Array,
    costs: NDArray[np.uint16],
    epochs: Int32Array,
    num_contexts: Int64Array,
    previous: int,
    token_ids: Int64Array,
    parents: Int64Array,
    new_ids: Int32Array,
    new_probs: NDArray[np.float32],
    averages: bool,
    epoch: int,
    merged_ids: Int32Array,
    merged_probs: Float64Array,
) -> bool:
    """Put successors of a tree's nodes into a table, by pair and by single token.

    The likeliest nodes come first in a tree; they are put last, because the newest of equal
    contexts is kept, and pairs behind singles, because a full bucket drops what is oldest.

    Args:
        previous: token before the root, or NONE.
        token_ids, parents: [num_nodes], the root first.

    Returns:
        Whether all values are in range; if not, nothing is put.
    """
    num_nodes, k = new_ids.shape
    is_valid = NONE <= previous <= MAX_TOKEN_ID
    for node in range(num_nodes):
        is_valid &= 0 <= token_ids[node] <= MAX_TOKEN_ID
        is_valid &= NONE <= parents[node] < node
        for j in range(k):
            is_valid &= new_ids[node, j] >= NONE and 0.0 <= new_probs[node, j] <= 1.0
    if not is_valid:
        return False
    for node in range(num_nodes - 1, -1, -1):
        last = int(token_ids[node])
        put_context(
            keys,
            counts,
            successor_ids,
            costs,
            epochs,
            num_contexts,
            NONE,
            last,
            new_ids,
            new_probs,
            node,
            averages,
            epoch,
            merged_ids,
            merged_probs,
        )
    for node in range(num_nodes - 1, -1, -1):
        last, parent = int(token_ids[node]), int(parents[node])
        before = int(token_ids[parent]) if parent != NONE else previous
        put_context(
            keys,
            counts,
            successor_ids,
            costs,
            epochs,
            num_contexts,
            before,
            last,
            new_ids,
            new_probs,
            node,
            averages,
            epoch,
            merged_ids,
            merged_probs,
        )
    return True


# --- unigrams: how often the target would use a token, by all that was harvested ---

# A token whose successors no table knows is worth running this many times as much as its own chance
# to be right: what is harvested there serves whenever the token comes again. Twelve prompts, a new
# pool each, SmolLM2: with 0, 4 and 10, decoding was 1.81, 2.03 and 2.05 times as fast as plain by
# the step costs of a CPU whose costs are flat, 1.62, 1.69 and 1.65 times by those of a steeper one.
_WORTH_OF_UNKNOWN = 5.0
# As if so many tokens more had been counted, none of them known: the first counts say little.
_UNSEEN_UNIGRAMS = 16.0


@kernel
def count_unigrams(
    unigram_ids: Int32Array,
    unigram_counts: Float64Array,
    token_ids: Int32Array,
    probs: NDArray[np.float32],
) -> None:
    """Add harvested probabilities to the expected counts of tokens.

    Where a bucket is full, its token with the lowest count is dropped.

    Args:
        unigram_ids: int32 [num_rows], NONE where empty; a power of two in buckets of WAYS.
        unigram_counts: float64 [num_rows], 0 where empty.
        token_ids, probs: [n, k]; NONE ends a row.
    """
    for i in range(token_ids.shape[0]):
        for j in range(token_ids.shape[1]):
            token_id = int(token_ids[i, j])
            if token_id == NONE:
                break
            begin = (hash_step(0, token_id) & (unigram_ids.shape[0] // WAYS - 1)) * WAYS
            place = begin
            for row in range(begin, begin + WAYS):
                if unigram_ids[row] == token_id:
                    place = row
                    break
                if unigram_counts[row] < unigram_counts[place]:
                    place = row
            if unigram_ids[place] != token_id:
                unigram_ids[place] = token_id
                unigram_counts[place] = 0.0
            unigram_counts[place] += probs[i, j]


@kernel
def find_worthwhile(
    unigram_ids: Int32Array,
    unigram_counts: Float64Array,
    layers: Int64Array,
    harvested: TableArrays,
    prewarmed: TableArrays,
    excluded: Int64Array,
    token_ids: Int32Array,
    worths: Float64Array,
) -> int:
    """Find the tokens most worth running wherever the text is; return how many there are.

    A token is worth its unigram probability, the chance that it comes next; five times as much if
    no table knows its successors, because they will be harvested.

    Args:
        unigram_ids, unigram_counts: as for `count_unigrams`.
        layers, harvested, prewarmed: as for `estimate`.
        excluded: int64 [num_excluded], tokens to leave out.
        token_ids: int32 [num_tokens], filled with tokens, the most worthwhile first.
        worths: float64 [num_tokens], filled with what they are worth, at most 1.
    """
    total = _UNSEEN_UNIGRAMS
    for row in range(unigram_ids.shape[0]):
        total += unigram_counts[row]
    num = 0
    for row in range(unigram_ids.shape[0]):
        token_id, worth = int(unigram_ids[row]), unigram_counts[row]
        if token_id == NONE:
            continue
        least = worths[num - 1] * total if num == token_ids.shape[0] else 0.0
        if _WORTH_OF_UNKNOWN * worth <= least:
            continue
        if (
            find_context(harvested[0], NONE, token_id) == NONE
            and layer_that_knows(layers, NONE, token_id) == NONE
            and find_context(prewarmed[0], NONE, token_id) == NONE
        ):
            worth *= _WORTH_OF_UNKNOWN
        worth = min(worth / total, 1.0)
        if num == token_ids.shape[0] and worth <= worths[num - 1]:
            continue
        is_excluded = False
        for i in range(excluded.shape[0]):
            is_excluded = is_excluded or excluded[i] == token_id
        if is_excluded:
            continue
        place = min(num, token_ids.shape[0] - 1)
        while place > 0 and worths[place - 1] < worth:
            token_ids[place] = token_ids[place - 1]
            worths[place] = worths[place - 1]
            place -= 1
        token_ids[place] = token_id
        worths[place] = worth
        num = min(num + 1, token_ids.shape[0])
    return num


# --- files: whether arrays that were not written here are those of a text ---


@kernel
def find_unsound(
    text: Int32Array, links: Int32Array, heads: Int32Array, num_observed: int
) -> tuple[int, int]:
    """Find where a text is not as `append` leaves it.

    Where it is sound, ids are ids or places empty, every position is one that was observed, those
    before and after a token name each other, and every chain leads to ever older positions.

    Returns:
        0, 1 or 2 for text, links or heads, and the row; NONE for both where all is sound.
    """
    num_rows = text.shape[0]
    first = max(0, num_observed - num_rows)
    for position in range(first, num_observed):
        row = position % num_rows
        previous, after = int(text[row, PREVIOUS]), int(text[row, NEXT])
        is_sound = text[row, TOKEN] >= NONE and NONE <= previous < position
        if text[row, TOKEN] == NONE:  # forgotten
            is_sound &= previous == NONE and after == NONE
        is_sound &= after == NONE or position < after < num_observed
        if previous >= first:
            is_sound &= text[previous % num_rows, NEXT] == position
        if after != NONE:
            is_sound &= text[after % num_rows, PREVIOUS] == position
        if not is_sound:
            return 0, row
        for order in range(links.shape[1]):
            is_sound &= NONE <= links[row, order] < position
        if not is_sound:
            return 1, row
    for order in range(heads.shape[0]):
        is_sound = True
        for bucket in range(heads.shape[1]):
            is_sound &= NONE <= heads[order, bucket] < num_observed
        if not is_sound:
            return 2, order
    return NONE, NONE


# --- what is held, and forgetting some of it ---


@kernel
def follow(text: Int32Array, position: int, end: int) -> int:
    """Return the position behind `position` in its sequence, or NONE.

    A position is followed only to one that leads back, so that whoever follows them all from where
    sequences begin comes to none twice, whatever a file holds.
    """
    num_rows = text.shape[0]
    after = int(text[position % num_rows, NEXT])
    if position < after < end and text[after % num_rows, PREVIOUS] == position:
        return after
    return NONE


@kernel
def write_texts(
    text: Int32Array,
    counts: Int64Array,
    since: int,
    token_ids: Int32Array,
    bounds: Int32Array,
    places: Int32Array,
) -> int:
    """Write what is held from position `since` on, by sequence; return how many sequences it is.

    Args:
        token_ids: int32 [at least as many as are held], filled.
        bounds: int32 [one more], filled: sequence i is `token_ids[bounds[i] : bounds[i + 1]]`.
        places: int32 [as many as `token_ids`, 3], filled: for each sequence, the position before
            its first token, held or not, that of its first token, and that of its last one.
    """
    first, end = max(first_held(text, counts), since), int(counts[NEXT_POSITION])
    num_tokens = num_sequences = 0
    bounds[0] = 0
    for begin in range(first, end):
        row = begin % text.shape[0]
        if text[row, PREVIOUS] >= first or text[row, TOKEN] == NONE:
            continue
        places[num_sequences, 0] = text[row, PREVIOUS]
        places[num_sequences, 1] = begin
        position = begin
        while position != NONE:
            token_ids[num_tokens] = text[position % text.shape[0], TOKEN]
            num_tokens += 1
            places[num_sequences, 2] = position
            position = follow(text, position, end)
        num_sequences += 1
        bounds[num_sequences] = num_tokens
    return num_sequences


@kernel
def fill_fallback(sought: Int64Array, fallback: Int32Array) -> None:
    """Fill in, for each place, how many tokens up to it are the first ones of `sought` again."""
    length = 0
    fallback[0] = 0
    for i in range(1, sought.shape[0]):
        while length > 0 and sought[i] != sought[length]:
            length = int(fallback[length - 1])
        if sought[i] == sought[length]:
            length += 1
        fallback[i] = length


@kernel
def advance(sought: Int64Array, fallback: Int32Array, length: int, token_id: int) -> int:
    """Return how many of the last tokens, now that one more came, are the first of `sought`."""
    while length > 0 and (length == sought.shape[0] or token_id != sought[length]):
        length = int(fallback[length - 1])
    return length + 1 if token_id == sought[length] else length


@kernel
def find_occurrences(
    text: Int32Array,
    counts: Int64Array,
    sought: Int64Array,
    reversed_sought: Int64Array,
    fallbacks: Int32Array,
    left: Int32Array,
) -> int:
    """Mark every held token that is part of an occurrence; return how many occurrences there are.

    What a sequence ends with, or begins with, is marked as well where it may be part of one whose
    rest is not held with it. Such parts are not counted.

    Source: Knuth, Morris and Pratt, "Fast pattern matching in strings", SIAM Journal on Computing 6
    (1977).

    Args:
        sought, reversed_sought: int64 [num_sought], at least one token.
        fallbacks: int32 [2, num_sought], scratch.
        left: int32 [num_rows], zeros; above 0 afterwards where a token is part of an occurrence.
    """
    first, end, num_rows = first_held(text, counts), int(counts[NEXT_POSITION]), text.shape[0]
    fill_fallback(sought, fallbacks[0])
    fill_fallback(reversed_sought, fallbacks[1])
    num_found = 0
    for begin in range(first, end):
        if text[begin % num_rows, PREVIOUS] >= first or text[begin % num_rows, TOKEN] == NONE:
            continue
        position, length, num_read, last = begin, 0, 0, begin
        while position != NONE:
            row = position % num_rows
            length = advance(sought, fallbacks[0], length, int(text[row, TOKEN]))
            if length == sought.shape[0]:
                left[row] = length
                num_found += 1
            num_read += 1
            if num_read < sought.shape[0]:
                last = position
            after = follow(text, position, end)
            if after == NONE:
                left[row] = max(left[row], length)
            position = after
        # From the last token that could be of an occurrence begun before, back to the first.
        length, position = 0, last
        while position >= begin and sought.shape[0] > 1:
            row = position % num_rows
            length = advance(reversed_sought, fallbacks[1], length, int(text[row, TOKEN]))
            if position == begin:
                break
            position = int(text[row, PREVIOUS])
        position = begin
        while length > 0:
            row = position % num_rows
            left[row] = max(left[row], 1)
            position, length = int(text[row, NEXT]), length - 1
    for position in range(end - 1, first - 1, -1):  # from the ends of occurrences to their begins
        row = position % num_rows
        previous = int(text[row, PREVIOUS])
        if left[row] > 1 and previous >= first:
            left[previous % num_rows] = max(left[previous % num_rows], left[row] - 1)
    return num_found


@kernel
def contains(values: Int64Array, value: int) -> bool:
    """Return whether a value is among sorted ones."""
    place = np.searchsorted(values, value)
    return bool(place < values.shape[0] and values[place] == value)


@kernel
def find_tokens(
    text: Int32Array, left: Int32Array, token_ids: Int64Array, is_found: NDArray[np.bool_]
) -> None:
    """Find which of some tokens, sorted, are in rows whose `left` is 0."""
    for row in range(text.shape[0]):
        if left[row] == 0:
            place = np.searchsorted(token_ids, text[row, TOKEN])
            if place < token_ids.shape[0] and token_ids[place] == text[row, TOKEN]:
                is_found[place] = True


@kernel
def empty_rows(
    text: Int32Array, links: Int32Array, heads: Int32Array, counts: Int64Array, left: Int32Array
) -> None:
    """Empty the rows whose `left` is above 0, end sequences there, and rebuild the links."""
    first, num_rows = first_held(text, counts), text.shape[0]
    for row in range(num_rows):
        for column in (PREVIOUS, NEXT):
            other = int(text[row, column])
            if left[row] > 0 or (other >= first and left[other % num_rows] > 0):
                text[row, column] = NONE
        if left[row] > 0:
            text[row, TOKEN] = NONE
    heads[:, :] = NONE
    links[:, :] = NONE
    reindex(text, links, heads, counts)


@kernel
def drop_contexts(
    keys: Int64Array,
    counts: Int32Array,
    successor_ids: Int32Array,
    costs: NDArray[np.uint16],
    epochs: Int32Array,
    num_contexts: Int64Array,
    dropped_keys: Int64Array,
    dropped_ids: Int64Array,
) -> None:
    """Drop contexts of a table by their keys, and some tokens wherever they stand; all sorted."""
    for begin in range(0, keys.shape[0], WAYS):
        kept = begin
        for row in range(begin, begin + WAYS):
            key = int(keys[row])
            if key == NONE:
                continue
            if (
                contains(dropped_keys, key)
                or contains(dropped_ids, key // (HASH_MASK + 1) - 1)
                or contains(dropped_ids, key % (HASH_MASK + 1))
            ):
                num_contexts[0] -= 1
                continue
            num_kept = 0
            for j in range(successor_ids.shape[1]):
                token_id, cost = successor_ids[row, j], costs[row, j]
                if token_id == NONE:
                    break
                if not contains(dropped_ids, token_id):
                    successor_ids[kept, num_kept] = token_id
                    costs[kept, num_kept] = cost
                    num_kept += 1
            successor_ids[kept, num_kept:] = NONE
            costs[kept, num_kept:] = MAX_COST
            keys[kept] = key
            counts[kept] = counts[row]
            epochs[kept] = epochs[row]
            kept += 1
        keys[kept : begin + WAYS] = NONE
        counts[kept : begin + WAYS] = 0
        epochs[kept : begin + WAYS] = 0
        successor_ids[kept : begin + WAYS, :] = NONE
        costs[kept : begin + WAYS, :] = MAX_COST


@kernel
def forget(
    text: Int32Array,
    links: Int32Array,
    heads: Int32Array,
    counts: Int64Array,
    left: Int32Array,
    keys: Int64Array,
    key_counts: Int32Array,
    successor_ids: Int32Array,
    costs: NDArray[np.uint16],
    epochs: Int32Array,
    num_contexts: Int64Array,
    unigram_ids: Int32Array,
    unigram_counts: Float64Array,
    dropped_keys: Int64Array,
    dropped_ids: Int64Array,
    has_rows: bool,
) -> None:
    """Forget some rows of the text, and what was harvested of them.

    Args:
        left: as `find_occurrences` left it; `has_rows`: whether any is above 0.
        keys, key_counts, successor_ids, costs, epochs, num_contexts: of the table, as for
            `put_context`.
        unigram_ids, unigram_counts: as for `count_unigrams`.
        dropped_keys, dropped_ids: as for `drop_contexts`.
    """
    if has_rows:
        empty_rows(text, links, heads, counts, left)
    drop_contexts(
        keys,
        key_counts,
        successor_ids,
        costs,
        epochs,
        num_contexts,
        dropped_keys,
        dropped_ids,
    )
    for row in range(unigram_ids.shape[0]):
        if contains(dropped_ids, unigram_ids[row]):
            unigram_ids[row] = NONE
            unigram_counts[row] = 0.0
