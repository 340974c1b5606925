"""Positions and codes in the int64 arrays that describe a job to the kernels."""

# A job is an int64 array: sizes; the number of threads; then addresses, of float32 unless a comment
# says otherwise; the last norm and the head's product. An entry's position follows from this order.
(
    NUM_TOKENS,
    HIDDEN,
    NUM_LAYERS,
    VOCAB_SIZE,
    NUM_THREADS,
    STATES,  # [tokens, HIDDEN], at first the embeddings
    NORMED,  # [tokens, HIDDEN]
    MIXED,  # [tokens, MIXED_SIZE of the layer], what its first products give
    # [tokens, NUM_HEADS, HEAD_SIZE + MORE_SIZE of the layer], or the queries of a recurrence.
    QUERIES,
    ATTENDED,  # [tokens, ATTENDED_SIZE of the layer]
    INNER,  # [tokens, of the layer's MLP]
    ADDED,  # [tokens, HIDDEN], the result to be added to the states
    LAYERS,  # int64 [NUM_LAYERS, LAYER_SIZE]
    # Int64 [kinds of masks, NUM_PARTS, 4]: a part's first token, its number of tokens, the address
    # of its mask (bool [tokens, keys]; 0 if they see all keys), and bytes between the mask's rows.
    PARTS,
    NUM_PARTS,
    # Int64 [NUM_LAYERS, NUM_PARTS, CACHE_SIZE], as `TreeCache.slot_addresses` returns them.
    CACHES,
    KEPT,  # int64, the tokens whose logits are wanted
    NUM_KEPT,
    LOGITS,  # [NUM_KEPT, VOCAB_SIZE]
    SCRATCH,  # of all threads
    SCRATCH_SIZE,  # bytes of each
    # Int64 [phases, 32], zeros: the next piece, 64 bytes later the number of finished pieces; then
    # both again for the first factors of low-rank additions.
    PHASES,
    NEXT_THREAD,
    SLOT,  # of the pool of workers
    EVERY,  # int64, the numbers of all tokens
    ADDITIONS,  # int64 [additions, LAYER_SIZE]
    BETWEEN,  # [tokens, BETWEEN_SIZE], between the factors of a layer's additions
    BETWEEN_SIZE,
    FACTORS,  # [tokens], factors of queries if a layer is SCALED
    SCORES,  # [tokens, SCORES_SIZE], of experts, then the gate of the shared expert
    SCORES_SIZE,
    CHOSEN,  # int64 [tokens, NUM_CHOSEN of the layer], experts
    SHARES,  # float32, the same shape: factors of these experts' results
    OF_EXPERTS,  # [choices, EXPERT_INNER of the layer], by expert
    TILES,  # of what is compiled for tiles, `run_tiles`
    # Bytes from the first inputs of products (NORMED, ATTENDED, INNER, OF_EXPERTS) to their digits
    # (`_digits.py`), which are written with them; 0 if no product reads any.
    DIGITS,
    LAST_NORM,
) = range(37)
FLAGS, EPS, NORM_WEIGHT, NORM_BIAS, NORM_SIZE = range(5)  # EPS, as SCALING: bits of a float32
# PACKED: address of the function compiled for a packed weight's format, or 0. ROW_BYTES: bytes of a
# row of it. HALF: half the rows of a head, if rows of its first and second half alternate, or 0.
# ACROSS: bytes between the weights of two inputs, if the weight is stored input by input, or 0;
# then ROW_BYTES is its format.
(WEIGHT, BIAS, NUM_COLUMNS, FIRST_ADDED, END_ADDED, PACKED, ROW_BYTES, HALF, ACROSS) = range(9)
PRODUCT_SIZE = 9
HEAD = LAST_NORM + NORM_SIZE
JOB_SIZE = HEAD + PRODUCT_SIZE

# A layer: norms, those of OF_ATTENTION and OF_MLP of the states after each addition; products; the
# shape of its MLP; addresses of the angles' cosines and sines, [tokens, TURNED]; settings of
# attention and residuals; the order of heads in MIXED: number of groups, and heads in a group
# before those of each kind.
(PRE_ATTENTION, POST_ATTENTION, PRE_MLP, POST_MLP, QUERY_NORM, KEY_NORM) = range(0, 24, NORM_SIZE)
OF_ATTENTION, OF_MLP, VALUE_NORM, POST_INPUTS = range(24, 40, NORM_SIZE)
(QUERY, KEY, VALUE, MORE, OUT, GATE, UP, DOWN) = range(40, 112, PRODUCT_SIZE)
INPUT_GATE, INPUT_OUT = range(112, 130, PRODUCT_SIZE)
INNER_SIZE, ACTIVATION, COS, SIN, TURNED, TURN, SCALING, SOFTCAP, SINKS, SEES = range(130, 140)
# EXPERTS, RECURRENCE: the rows of ADDITIONS that describe a layer's experts and its recurrence,
# counted from 1; 0 for none. A short convolution instead of attention has addresses of its weights,
# [HIDDEN, TAPS], and of its biases; for attention, TAPS is 0. Then FIRST_QUERY is the third of
# MIXED that multiplies the results, FIRST_KEY and FIRST_VALUE the two whose product is the input;
# keys are these inputs, [slots, HIDDEN]. QUERY_STEP is the number of heads in MIXED from one query
# to the next, and from one gate of attention's results to the next; FIRST_GATE is the first gate,
# or -1 without gates.
FACTOR, IS_PARALLEL, SCALED, EXPERTS, CONVOLUTION, CONVOLUTION_BIAS, TAPS = range(140, 147)
NUM_GROUPS, FIRST_QUERY, FIRST_KEY, FIRST_VALUE, QUERY_STEP, FIRST_GATE = range(147, 153)
# RUN_ATTENTION: address of what is compiled for attention, or what the layer has instead;
# RUN_EXPERTS: the same for experts, or 0.
MIXED_SIZE, ATTENDED_SIZE, RECURRENCE, RUN_ATTENTION, RUN_EXPERTS = range(153, 158)
# Heads of queries and of keys; numbers of a key's head, and of a value's; factor of values. If
# MORE_SIZE is not 0, the cache has so many further numbers of keys in place of values, and keys are
# the values, too. Then LATENT is the row of ADDITIONS that describes the rest, counted from 1.
(NUM_HEADS, NUM_KEY_HEADS, HEAD_SIZE, RESULT_SIZE, MORE_SIZE, VALUE_FACTOR) = range(158, 164)
# INPUTS: address of what the layer gets of its tokens besides states, float32 [tokens, INPUT_SIZE];
# it multiplies the activated results of INPUT_GATE. SCALAR: address of a number by which the states
# are multiplied at the end, or 0. READS: whether keys and values are those of
# another layer, whose addresses CACHES has twice. NO_NORM: zeros.
LATENT, INPUTS, INPUT_SIZE, SCALAR, READS, NO_NORM, LAYER_SIZE = (*range(164, 170), 173)
# A low-rank addition to a product: its first factor as a product, WEIGHT and BIAS of the second,
# the scale of the result, and its first number in a row of BETWEEN.
SECOND = PRODUCT_SIZE
TIMES, START = range(SECOND + 2, SECOND + 4)
# Experts: the router, and the gate of the shared expert, as products; codes for the choice and the
# factors of results; the address of the correction of scores; the format of stacked weights that
# lie input by input; addresses of the stacks: gate and up together, and down; of their biases; how
# the weights lie; what becomes of gate and up (`experts.GatingPlan`).
ROUTER, SHARED_GATE = 0, PRODUCT_SIZE
(NUM_CHOSEN, WEIGHS, ROUTING, SHARE, NUM_SETS, NUM_SETS_CHOSEN, CORRECTION) = range(18, 25)
(OF_STACKS, EXPERT_GATE_UP, EXPERT_DOWN, EXPERT_INNER) = range(25, 29)
(GATE_UP_BIAS, DOWN_BIAS, LIES, GATING, ALPHA, BOUND, ADDED_TO_UP, ADDED_TO_SUM) = range(29, 37)
# Of packed experts, up has an address of its own, or 0; of gate, up and down, PACKED, ROW_BYTES,
# and whether they are multiplied by digits.
EXPERT_UP, GATE_PACKED, DOWN_PACKED, GATE_ROW, DOWN_ROW, GATE_DIGITS = 37, 38, 40, 41, 43, 44
# Attention to latents: what makes queries of the normed columns of the layer's first product, or no
# product if these are queries; what makes each head's key, without angles, and value of latents;
# numbers of such a key, of a turned one, and of a value; address of what attends; EXPAND's format.
(SECOND_QUERY, EXPAND, STRAIGHT, TURNING, EXPANDED) = (0, PRODUCT_SIZE, *range(18, 21))
ATTEND, OF_EXPAND = 21, 22
# A recurrence: heads of keys, and of values, and their sizes; for queries, keys, values, gates of
# results, writing strengths and decays, the first column in MIXED, and how many columns are from
# those of one key head to those of the next; for the first three, the first channel of the
# convolution; value heads that share a norm; whether it is a gated delta net, else a Mamba 2;
# addresses of the biases of decays, of what decays are multiplied by, as logarithms, and of factors
# by which values join the results.
(KEY_HEADS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE, COLUMNS, COLUMN_STEPS) = (*range(5), 10)
CHANNELS, NUM_NORMED, IS_DELTA, DECAY_BIASES, DECAYS, SKIPS = 16, *range(19, 24)

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

# Flags of a norm; the last two say which numbers it spans, and when it runs.
IS_NORM, CENTERS, ADDS_ONE, IS_WHOLE, AFTER_TURN = 1, 2, 4, 8, 16
# The pairs that are rotated together; the first of all neighbours come first.
HALVES, NEIGHBOURS, SORTS = 1, 2, 4
SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, SWISH = range(6)  # the last one is of experts alone
TO_ROWS, TO_INNER, TO_INPUTS = range(3)  # use of a product's columns
FIRST, NUM_NEW, MASK, MASK_ROW = range(4)
# Of a recurrence, keys are the inputs of its convolution, and values what else tokens add, in
# float32: keys, values, and of each value head how much its state keeps, and takes. STATE is the
# address of the states, [VALUE_HEADS, KEY_SIZE, VALUE_SIZE], which lack the tokens from the slot
# LACKS on; those with the tokens before the slot UNTIL go to the address BROUGHT.
KEYS, KEY_HEAD, VALUES, VALUE_HEAD, NUM_KEYS, STATE, LACKS, UNTIL, BROUGHT, CACHE_SIZE = range(10)

# Scores by which experts are chosen, factors of their results, and further operations on both.
BY_SOFTMAX, BY_SIGMOID, BY_SOFTMAX_OF_CHOSEN, BY_MIXING = range(4)
SELECTS_RAW, IS_SORTED, IS_SUMMED = 1, 2, 4
# Weights of experts lie input by input; the columns of gate and up alternate.
LIE_ACROSS, ALTERNATE = 1, 2

PHASES_OF_LAYER = 15

# What a module of a plan gets in the place of states, of positions, of tokens, and of positions
# that three axes count alike.
STATES_GIVEN, POSITIONS_GIVEN, TOKENS_GIVEN, AXES_GIVEN = (object() for _ in range(4))

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
