"""The numbers by which a job and what prepares it understand each other, and nothing else."""

# A job is an int64 array. First the sizes, then how many threads may come and what format numbers
# have; how the inputs of products are arranged; addresses, of float32 unless it says otherwise.
NUM_TOKENS, HIDDEN, NUM_LAYERS, NUM_HEADS, NUM_KEY_HEADS, HEAD_SIZE, VOCAB_SIZE = range(7)
NUM_THREADS, FORMAT, ARRANGED = 7, 8, 9
STATES = 10  # [tokens, HIDDEN], at first those of the embedding
NORMED = 11  # [tokens, HIDDEN], arranged
MIXED = 12  # queries, keys and values, [tokens, (NUM_HEADS + 2 · NUM_KEY_HEADS) · HEAD_SIZE]
QUERIES = 13  # [tokens, NUM_HEADS · HEAD_SIZE]
ATTENDED = 14  # the same, arranged
INNER = 15  # [tokens, of the layer's MLP], arranged
ADDED = 16  # [tokens, HIDDEN], what comes to the states
LAYERS = 17  # int64 [NUM_LAYERS, LAYER_SIZE]
# Int64 [kinds of masks, NUM_PARTS, 4]: a part's first token, how many, address of its mask, bool
# [tokens, keys], or 0 if they see all keys, and bytes from one row of that to the next.
PARTS, NUM_PARTS = 18, 19
PLACES = 20  # int64 [NUM_LAYERS, NUM_PARTS, 5], as `TreeCache.places` returns them
KEPT, NUM_KEPT, LOGITS = 21, 22, 23  # int64, which tokens; of the format [NUM_KEPT, VOCAB_SIZE]
SCRATCH, SCRATCH_SIZE = 24, 25  # of all threads, and bytes of each
# Int64 [phases, 32], zeros: the next piece, and 64 bytes on how many are done; then the same of
# what low-rank additions need first.
PHASES = 26
NEXT_THREAD = 27
LAST_NORM, HEAD = 28, 32  # a norm, and a product
EVERY = 37  # int64, the numbers of all tokens
ADDITIONS = 38  # int64 [additions, LAYER_SIZE]
BETWEEN, BETWEEN_SIZE = 39, 40  # [tokens, BETWEEN_SIZE], between the factors of a layer's additions
JOB_SIZE = 41

# A layer has norms of four numbers and products of five; the shape of its MLP; addresses of the
# angles' cosines and sines, [tokens, TURNED]; and what its attention and residuals need.
(PRE_ATTENTION, POST_ATTENTION, PRE_MLP, POST_MLP, QUERY_NORM, KEY_NORM) = range(0, 24, 4)
(QUERY, KEY, VALUE, OUT, GATE, UP, DOWN) = range(24, 59, 5)
INNER_SIZE, ACTIVATION, COS, SIN, TURNED, TURN, SCALING, SOFTCAP, SINKS, SEES = range(59, 69)
FACTOR, IS_PARALLEL, LAYER_SIZE = 69, 70, 71
FLAGS, EPS, NORM_WEIGHT, NORM_BIAS = range(4)  # EPS, as SCALING and others: bits of a float32
WEIGHT, BIAS, NUM_COLUMNS, FIRST_ADDED, END_ADDED, PRODUCT_SIZE = range(6)
# A low-rank addition to a product: its first factor as a product, the second's WEIGHT and BIAS,
# what the result is multiplied by, the format of both, and where in a row of BETWEEN it begins.
SECOND, TIMES, OF_ADDED, START = 5, 7, 8, 9

IS_NORM, CENTERS, ROUNDS, ADDS_ONE, IS_WHOLE = 1, 2, 4, 8, 16  # flags of a norm
PLAIN, PAIRS, NARROW = range(3)  # arranged as float32, as float32 for bfloat16, as bfloat16
HALVES, NEIGHBOURS, WIDE = 1, 2, 4  # what is turned with what; without rounding between
SILU, GELU, GELU_TANH, RELU, RELU_SQUARED = range(5)
TO_ROWS, TO_INNER, TO_LOGITS = range(3)  # what becomes of the columns of a product
FIRST, NUM_NEW, MASK, MASK_ROW = range(4)
KEYS, KEY_HEAD, VALUES, VALUE_HEAD, NUM_KEYS = range(5)

PHASES_OF_LAYER = 8

# What a rotary module gets in the place of states and of positions.
STATES_GIVEN, POSITIONS_GIVEN = object(), object()
