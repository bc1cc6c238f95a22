"""Counter-based random numbers (Philox): a pure function of (seed, index, row). A resumed run
or another number of processes gets the same numbers without saved state."""

import numpy as np

# Uses of one seed that must not share numbers: the top word of the 256-bit counter. ORDERS: of
# training, or an encoder's masks. PLANS, TOKENS: of samples. SCORED_ORDERS, SCORED_MASKS: of
# likelihoods. REQUESTS: of likelihoods in lm-evaluation-harness. A new use is a new name.
ORDERS, SHUFFLE, SPLIT, LENGTHS, PLANS, TOKENS, SCORED_ORDERS, SCORED_MASKS = range(8)
ENSEMBLES, REQUESTS, DROPOUT, MIXTURE = range(8, 12)


def philox_bits(
    seed: int, index: int, rows: range, width: int, stream: int = ORDERS
) -> np.ndarray:
    """Rows of an endless table of random 64-bit integers, uint64 (len(rows), width): raw Philox
    output, the same in every version of numpy. seed, index: below 2**64. stream: a use above."""
    counters = -(-width // 4)  # of a row: one counter yields four numbers
    key = np.array([seed, index], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    philox = np.random.Philox(key=key, counter=counter).advance(rows.start * counters)
    bits = philox.random_raw(len(rows) * counters * 4)
    return bits.reshape(len(rows), counters * 4)[:, :width]


def to_uniform(bits: np.ndarray) -> np.ndarray:
    """Random 64-bit integers as float64 numbers in [0, 1) with all 53 bits of their precision."""
    return (bits >> np.uint64(11)) * 2.0**-53
