"""Positions and codes in the int64 arrays that describe a job to the kernels."""

# A job is an int64 array: sizes; the number of threads; then addresses, of float32 unless a comment
# says otherwise. An entry's position follows from this order.
(
    NUM_TOKENS,
    HIDDEN,
    NUM_PHASES,
    NUM_THREADS,
    STATES,  # [tokens, HIDDEN], at first the embeddings
    NORMED,  # [tokens, HIDDEN]
    MIXED,  # [tokens, columns], what products give
    # [tokens, NUM_HEADS, HEAD_SIZE + MORE_SIZE of the layer], then new keys and values; or inputs
    # of a convolution, or the queries of a recurrence.
    QUERIES,
    ATTENDED,  # [tokens, ATTENDED_SIZE of the layer]
    INNER,  # [tokens, of the layer's MLP]
    LIST,  # int64 [NUM_PHASES, ROW_SIZE]
    # Int64 [kinds of masks, NUM_PARTS, 4]: a part's first token, its number of tokens, the address
    # of its mask (bool [tokens, keys]; 0 if they see all keys), and bytes between the mask's rows.
    PARTS,
    NUM_PARTS,
    # Int64 [layers that keep keys, NUM_PARTS, CACHE_SIZE], as `TreeCache.slot_addresses` says.
    CACHES,
    KEPT,  # int64, the tokens whose logits are wanted
    NUM_KEPT,
    LOGITS,  # [NUM_KEPT, columns of the head]
    SCRATCH,  # of all threads
    SCRATCH_SIZE,  # bytes of each
    # Int64 [NUM_PHASES, 16], zeros: the next piece, 64 bytes later the number of finished pieces.
    PHASES,
    NEXT_THREAD,
    SLOT,  # of the pool of workers
    EVERY,  # int64, the numbers of all tokens
    DESCRIPTIONS,  # int64 [rows, ROW_SIZE], counted from 1
    SECONDS,  # [tokens, columns], what products of products give
    SCORES,  # [tokens, scores], of experts, then the gate of the shared expert
    CHOSEN,  # [tokens, NUM_CHOSEN of the layer], experts
    SHARES,  # of the same shape: factors of these experts' results
    # Int64: how many experts were chosen, and how many pieces their inner states have; then what
    # `_experts.group` says of all choices.
    GROUPS,
    OF_EXPERTS,  # [choices, EXPERT_INNER of the layer], by expert
    RESULT,  # [tokens, HIDDEN], the sum of the experts' results
    TILES,  # of what is compiled for tiles, `run_tiles`
    POSITIONS,  # int64 [tokens]
    SAVED,  # [tokens, numbers], what programs of a layer keep for later ones
    INPUTS,  # [tokens, numbers], what layers get of a token besides states
    NOTHING,  # 0, to which a program's own addresses are added
    # Bytes from inputs of products (NORMED, ATTENDED, INNER, OF_EXPERTS) to their digits
    # (`_digits.py`), which are written with them; 0 if no product reads any.
    DIGITS,
    # Which digits these are: in bytes, or in bfloat16 (`_amx.py`), whose last ones are as far
    # behind the others as these behind the inputs.
    KIND,
    TURNED,  # bytes from a thread's scratch memory to what `_amx.py` turns of a phase's inputs
    JOB_SIZE,
) = range(40)
# START: the first one of its NUM_INPUTS inputs in a row. PACKED: address of the function compiled
# for a packed weight's format, or 0. ROW_BYTES: bytes of a row of it. ACROSS: bytes between the
# weights of two inputs, if the weight is stored input by input, or 0; then ROW_BYTES is its format.
(WEIGHT, BIAS, NUM_COLUMNS, START, NUM_INPUTS, PACKED, ROW_BYTES, ACROSS) = range(8)
PRODUCT_SIZE = 8

# A phase of the list is one of three. Products: how many; words of the job that have the address
# of their inputs and of the results, and how many numbers of a token these are; COLUMNS, the row of
# the program of their columns, or 0. Rows: programs of the last layer's end and of what comes next.
# RUN: the address of what is compiled apart, one of its phases, the row that describes it, its kind
# of masks and the number of its cache.
MOST_PRODUCTS = 12
(NUM_PRODUCTS, GIVEN, NUM_GIVEN, TARGET, NUM_MADE, COLUMNS, TOKENS) = range(96, 103)
(AT_END, BEFORE, RUN, STEP, OF, SEES, CACHE) = range(103, 110)
ROW_SIZE = 176
# What mixes tokens: numbers of a token's queries, and of a token behind it, and in a row of QUERIES
# with new keys and values.
# Attention: bits of float32 SCALING and SOFTCAP; heads of queries and of keys; numbers of a
# key's head, and of a value's. If MORE_SIZE is not 0, the cache has so many further numbers of keys
# in place of values, and keys are the values, too.
# READS: whether keys are those of another layer. HEADS: the row of its program.
(NUM_QUERIES, ATTENDED_SIZE, QUERIES_SIZE, SCALING, SOFTCAP, SINKS) = range(30, 36)
NUM_HEADS, NUM_KEY_HEADS, HEAD_SIZE, RESULT_SIZE, MORE_SIZE = range(36, 41)
READS, HEADS = range(41, 43)
# A convolution: its weights, [channels, TAPS], and biases; keys are its inputs, [slots, channels].
CONVOLUTION, CONVOLUTION_BIAS, TAPS = range(43, 46)
# A program: the address of its function; how many addresses it takes; how many numbers of its last
# result get digits, if it precedes a product; for each address, a word of the job, to whose address
# bytes are added, and bytes from one token, or column, to the next. A program of columns has
# addresses of constants alone.
PROGRAM, NUM_PLACES, NUM_DIGITS, PLACES = range(4)
MOST_PLACES = (ROW_SIZE - PLACES) // 3
# Experts: as products, gate, up and down, whose columns are those of all experts, and NUM_COLUMNS
# those of one; addresses of biases of gate and up; how the weights lie; the address of the program
# of gate and up; whether these are multiplied by digits.
EXPERT_GATE, EXPERT_UP, EXPERT_DOWN = range(0, 24, PRODUCT_SIZE)
NUM_EXPERTS, NUM_CHOSEN, EXPERT_INNER, GATE_UP_BIAS, LIES, GATING, BY_DIGITS = range(27, 34)
# Attention to latents: what makes each head's key, without angles, and value of latents; numbers of
# such a key, of a turned one, and of a value; EXPAND's format. In a row of QUERIES, those of which
# queries for latents are made follow them.
EXPAND, (STRAIGHT, TURNING, EXPANDED, OF_EXPAND) = 0, range(PRODUCT_SIZE, PRODUCT_SIZE + 4)
# A recurrence: heads of keys, and of values, and their sizes; the first channel of queries, keys
# and values in the convolution; whether it is a gated delta net, else a Mamba 2; the address of
# factors by which values join the results; numbers of a token in INNER: inputs of the convolution,
# decays of heads as logarithms, and what they take.
KEY_HEADS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE, CHANNELS = range(5)
IS_DELTA, SKIPS, GIVEN_SIZE = range(7, 10)

# The pool of workers, in lines of 8 words: how many jobs have begun; whether it is closed, how many
# workers there are, and a zero; where idle workers sleep; how many still run; slots; a line of each
# worker: the slot that it is in, and the pool's address.
CALLS, CLOSED, NUM_WORKERS, ZERO, POOL_BED, NUM_RUNNING, SLOTS = 0, 8, 9, 10, 16, 56, 64
# A slot: whether it is taken; the number of its job, which is odd while the job is open; the
# compiled function and the job; the address of the phase that runs; where its threads sleep.
NUMBER, FUNCTION, JOB, CURRENT, SLOT_BED, SLOT_SIZE = 8, 9, 10, 16, 24, 64
WORKERS = SLOTS + 16 * SLOT_SIZE
LAST_SLOT = WORKERS - SLOT_SIZE
# A bed: how many threads lie in it; the system's mutex, and its condition variable.
MUTEX, CONDITION = 8, 24

# Inputs whose digits have one scale. A row of digits is so many bytes longer than one of inputs:
# rows a power of 2 apart would push each other out of the first cache.
DIGITS_BLOCK, DIGITS_APART = 32, 128
NO_DIGITS, IN_BYTES, IN_BFLOAT16 = range(3)

FIRST, NUM_NEW, MASK, MASK_ROW = range(4)
# Of a recurrence, keys are the inputs of its convolution, and values what else tokens add, in
# float32: keys, values, and of each value head how much its state keeps, and takes. STATE is the
# address of the states, [VALUE_HEADS, KEY_SIZE, VALUE_SIZE], which lack the tokens from the slot
# LACKS on; those with the tokens before the slot UNTIL go to the address BROUGHT.
KEYS, KEY_HEAD, VALUES, VALUE_HEAD, NUM_KEYS, STATE, LACKS, UNTIL, BROUGHT, CACHE_SIZE = range(10)

# Weights of experts lie input by input; the columns of gate and up alternate.
LIE_ACROSS, ALTERNATE = 1, 2

# Tokens of a phase: all; those whose logits are wanted; these, whose rows lie one after the other.
EVERY_TOKEN, KEPT_TOKENS, KEPT_ROWS = range(3)

# What a module of a plan gets in the place of states, of positions, of tokens, of positions that
# three axes count alike, of places in the text, which the model counts itself, and of zeros.
STATES_GIVEN, POSITIONS_GIVEN, TOKENS_GIVEN, AXES_GIVEN, PLACES_GIVEN, ZEROS_GIVEN = (
    object() for _ in range(6)
)

# Formats of packed weights, by GGML's numbers: its names, numbers in a block, and bytes of one.
BLOCKS = {
    0: ("F32", 32, 128),
    1: ("F16", 32, 64),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 32, 64),
    39: ("MXFP4", 32, 17),
}
