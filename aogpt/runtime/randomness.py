"""Counter-based random numbers (Philox): a pure function of (seed, index, row). A
resumed run or another number of processes gets the same numbers without saved state."""

import numpy as np

# Uses of one seed that must not share numbers: the top word of the 256-bit counter. A
# new use is a new name, and no other name here is in capitals.
ORDERS = 0  # of training, or an encoder's masks
SHUFFLE = 1
SPLIT = 2
PLANS = 4  # of samples
TOKENS = 5  # of samples
SCORED_ORDERS = 6  # of likelihoods
SCORED_MASKS = 7  # of likelihoods
ENSEMBLES = 8
DROPOUT = 10
LENGTHS = 11  # of samples of records


def philox_bits(
    seed: int, index: int, rows: range, width: int, stream: int = ORDERS
) -> np.ndarray:
    """Return rows of an endless table of random 64-bit integers, uint64
    (len(rows), width): raw Philox output, the same in every version of numpy.

    seed, index: below 2**64. stream: one of the uses above."""
    counters_per_row = -(-width // 4)  # rounded up: a counter yields four numbers
    numbers_per_row = 4 * counters_per_row
    philox = np.random.Philox(
        key=np.array([seed, index], dtype=np.uint64),
        counter=np.array([0, 0, 0, stream], dtype=np.uint64),
    )
    philox.advance(rows.start * counters_per_row)
    bits = philox.random_raw(len(rows) * numbers_per_row)
    table = bits.reshape(len(rows), numbers_per_row)
    return table[:, :width]


def to_uniform(bits: np.ndarray) -> np.ndarray:
    """Return random 64-bit integers as float64 numbers in [0, 1) with all 53 bits of
    their precision."""
    bits_53 = bits >> np.uint64(11)
    return bits_53 * 2.0**-53
