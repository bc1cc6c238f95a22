"""Random numbers that are a pure function of where they are used: counter-based, from Philox.

No generator has a state that would have to be saved or shared: a run that resumes, or has another
number of processes, asks for the same (seed, index, row) and gets the same numbers."""

import numpy as np

from runtime.errors import UserError

# Uses of one seed that must not share numbers: the top word of the 256-bit counter tells them
# apart.
ORDERS, SHUFFLE, SPLIT, LENGTHS = range(4)


def philox_bits(seed: int, index: int, rows: range, width: int, stream: int = ORDERS) -> np.ndarray:
    """Random 64-bit integers of some rows of an endless table: a pure function of the arguments.

    Args:
        seed, index: integers from 0 to 2**64 - 1 that name the table; the index is often a step.
        rows: the rows wanted, contiguous. Row r is the same whichever other rows are drawn with it.
        width: numbers in a row.
        stream: which of the uses above.

    Returns: uint64 array (len(rows), width); raw Philox output, the same in every version of numpy.
    """
    if not (0 <= seed < 2**64 and 0 <= index < 2**64):
        raise UserError(
            f"seed and step must be from 0 to 2**64 - 1, but they are {seed} and {index}"
        )
    counters = -(-width // 4)  # of a row: one counter yields four numbers
    key = np.array([seed, index], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    philox = np.random.Philox(key=key, counter=counter).advance(rows.start * counters)
    bits = philox.random_raw(len(rows) * counters * 4)
    return bits.reshape(len(rows), counters * 4)[:, :width]


def to_uniform(bits: np.ndarray) -> np.ndarray:
    """Random 64-bit integers as float64 numbers in [0, 1), all 53 bits of their precision used."""
    return (bits >> np.uint64(11)) * 2.0**-53
