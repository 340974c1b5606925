"""The numbers by which a job and what prepares it understand each other, and nothing else."""

# A job is an int64 array: sizes; how many threads may come, what format numbers have, and how the
# inputs of products are arranged; then addresses, of float32 unless it says otherwise; a norm and a
# product. An entry's position follows from this order.
(
    NUM_TOKENS,
    HIDDEN,
    NUM_LAYERS,
    NUM_HEADS,
    NUM_KEY_HEADS,
    HEAD_SIZE,
    VOCAB_SIZE,
    NUM_THREADS,
    FORMAT,
    ARRANGED,
    STATES,  # [tokens, HIDDEN], at first those of the embedding
    NORMED,  # [tokens, HIDDEN], arranged
    # Queries, keys, values: [tokens, (NUM_HEADS + 2 · NUM_KEY_HEADS) · HEAD_SIZE]; or [tokens, 3 ·
    # HIDDEN], of a convolution.
    MIXED,
    QUERIES,  # [tokens, NUM_HEADS · HEAD_SIZE]
    ATTENDED,  # the same, arranged; or [tokens, HIDDEN], of a convolution
    INNER,  # [tokens, of the layer's MLP], arranged
    ADDED,  # [tokens, HIDDEN], what comes to the states
    LAYERS,  # int64 [NUM_LAYERS, LAYER_SIZE]
    # Int64 [kinds of masks, NUM_PARTS, 4]: a part's first token, how many, address of its mask,
    # bool [tokens, keys], or 0 if they see all keys, and bytes from one row of that to the next.
    PARTS,
    NUM_PARTS,
    PLACES,  # int64 [NUM_LAYERS, NUM_PARTS, 5], as `TreeCache.slot_addresses` returns them
    KEPT,  # int64, which tokens
    NUM_KEPT,
    LOGITS,  # of the format [NUM_KEPT, VOCAB_SIZE]
    SCRATCH,  # of all threads
    SCRATCH_SIZE,  # bytes of each
    # Int64 [phases, 32], zeros: the next piece, and 64 bytes on how many are done; then the same of
    # what low-rank additions need first.
    PHASES,
    NEXT_THREAD,
    EVERY,  # int64, the numbers of all tokens
    ADDITIONS,  # int64 [additions, LAYER_SIZE]
    BETWEEN,  # [tokens, BETWEEN_SIZE], between the factors of a layer's additions
    BETWEEN_SIZE,
    FACTORS,  # [tokens], of queries where a layer is SCALED
    SCORES,  # [tokens, SCORES_SIZE], of experts, then the gate of what is shared
    SCORES_SIZE,
    CHOSEN,  # int64 [tokens, NUM_CHOSEN of the layer], experts
    SHARES,  # the same, float32: what the results of these are multiplied by
    OF_EXPERTS,  # [choices, EXPERT_INNER of the layer], arranged; by expert
    LAST_NORM,
) = range(39)
FLAGS, EPS, NORM_WEIGHT, NORM_BIAS, NORM_SIZE = range(5)  # EPS, as SCALING: bits of a float32
# PACKED: address of what is compiled for a packed weight's format, else 0; then the bytes of a row,
# and half the rows of a head, whose first and second halves take turns in the weight, or 0. ACROSS:
# bytes from the weights of one input to those of the next, where columns lie side by side, or 0.
(WEIGHT, BIAS, NUM_COLUMNS, FIRST_ADDED, END_ADDED, PACKED, ROW_BYTES, HALF, ACROSS) = range(9)
PRODUCT_SIZE = 9
HEAD = LAST_NORM + NORM_SIZE
JOB_SIZE = HEAD + PRODUCT_SIZE

# A layer has norms, the last two of what states become; products; the shape of its MLP; addresses
# of the angles' cosines and sines, [tokens, TURNED]; what its attention and residuals need; and in
# what order MIXED has the heads: so many groups, and the heads of one before each kind's.
(PRE_ATTENTION, POST_ATTENTION, PRE_MLP, POST_MLP, QUERY_NORM, KEY_NORM) = range(0, 24, NORM_SIZE)
OF_ATTENTION, OF_MLP = range(24, 32, NORM_SIZE)
(QUERY, KEY, VALUE, OUT, GATE, UP, DOWN) = range(32, 95, PRODUCT_SIZE)
INNER_SIZE, ACTIVATION, COS, SIN, TURNED, TURN, SCALING, SOFTCAP, SINKS, SEES = range(95, 105)
# EXPERTS: which of the rows of ADDITIONS tells of a layer's experts, counted from 1; 0 for none.
# Of a short convolution instead of attention: addresses of its weights, [HIDDEN, TAPS], and of its
# biases; TAPS is 0 for attention. FIRST_QUERY is which third of MIXED multiplies its results then,
# FIRST_KEY and FIRST_VALUE the two that make its inputs; keys are these inputs, [slots, HIDDEN].
FACTOR, IS_PARALLEL, SCALED, EXPERTS, CONVOLUTION, CONVOLUTION_BIAS, TAPS = range(105, 112)
NUM_GROUPS, FIRST_QUERY, FIRST_KEY, FIRST_VALUE, LAYER_SIZE = range(112, 117)
# A low-rank addition to a product: its first factor as a product, the second's WEIGHT and BIAS,
# what the result is multiplied by, the format of both, and where in a row of BETWEEN it begins.
SECOND = PRODUCT_SIZE
TIMES, OF_ADDED, START = range(SECOND + 2, SECOND + 5)
# Experts: the router, and the gate of what is shared, as products; how experts are chosen and their
# results weighed; the formats of the router and of what is added to its scores; and addresses of
# the stacked weights, of gate and up together, and of down.
ROUTER, SHARED_GATE = 0, PRODUCT_SIZE
(NUM_CHOSEN, WEIGHS, ROUTING, SHARE, NUM_SETS, NUM_SETS_CHOSEN, CORRECTION) = range(18, 25)
(OF_ROUTER, OF_CORRECTION, EXPERT_GATE_UP, EXPERT_DOWN, EXPERT_INNER) = range(25, 30)

# Flags of a norm; the last two say what it spans, and when it runs.
IS_NORM, CENTERS, ROUNDS, ADDS_ONE, IS_WHOLE, AFTER_TURN = 1, 2, 4, 8, 16, 32
PLAIN, PAIRS, NARROW = range(3)  # arranged as float32, as float32 for bfloat16, as bfloat16
HALVES, NEIGHBOURS, WIDE = 1, 2, 4  # what is turned with what; without rounding between
SILU, GELU, GELU_TANH, RELU, RELU_SQUARED = range(5)
TO_ROWS, TO_INNER, TO_LOGITS = range(3)  # what becomes of the columns of a product
FIRST, NUM_NEW, MASK, MASK_ROW = range(4)
KEYS, KEY_HEAD, VALUES, VALUE_HEAD, NUM_KEYS = range(5)

# What experts are chosen by and weighed with, and what else is done for that.
BY_SOFTMAX, BY_SIGMOID, BY_SOFTMAX_OF_CHOSEN = range(3)
SELECTS_RAW, IS_SORTED, IS_SUMMED, ROUNDS_SCORES, ROUNDS_SHARES = 1, 2, 4, 8, 16

PHASES_OF_LAYER = 12

# What a module of a plan gets in the place of states, of positions, and of tokens.
STATES_GIVEN, POSITIONS_GIVEN, TOKENS_GIVEN = object(), object(), object()
