"""Records that end, in any order. The end is given: it is known before any token, so it
says how long the record is. Then

    log p(record) = log p(length) + log p(tokens | the end is at its place, an order)

p(length) counts the training records of each length, with one more of every length that
fits a block: it sums to 1, and no length is impossible."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..runtime.errors import UserError


@dataclass(frozen=True)
class RecordEnd:
    """The end of the records that a run was trained on, where it was given."""

    token: int  # the id that stands at the end
    # How many training records have 0, 1, ... tokens before it, up to the longest that
    # fits a block.
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, meta: Mapping[str, Any], folder: object) -> "RecordEnd":
        """Return the end of the records of a prepared data set. Raises UserError for
        one whose records have no end, or that lacks the histogram of lengths."""
        histogram = meta["splits"].get("train", {}).get("lengths")
        if histogram is None:
            raise UserError(
                f"{folder} has no lengths of records that end, which data.end = 'given'"
                " needs: prepare it again, or set data.end = 'predicted' where all "
                "records have one length"
            )
        lengths = tuple(histogram.get(str(n), 0) for n in range(meta["block_size"]))
        return cls(meta["eot"], lengths)

    @property
    def longest(self) -> int:
        """Return the most tokens of a record before its end."""
        return len(self.lengths) - 1

    def longest_in(self, block_size: int) -> int:
        """Return the most tokens of a record for a model of this block size: the block
        holds the end, too."""
        return min(block_size - 1, self.longest)

    @cached_property
    def cumulative(self) -> list[int]:
        """Return how many of the counts, each with one more, are of at most 0, 1, ...
        tokens."""
        counts = np.array(self.lengths, dtype=np.int64) + 1
        return counts.cumsum().tolist()

    def log_prob(self, length: int, least: int = 0) -> float:
        """Return log p(length | at least `least`) in nats; minus infinity where it does
        not fit."""
        if not least <= length <= self.longest:
            return -math.inf
        total = self.cumulative[-1] - self.below(least)
        return math.log(self.lengths[length] + 1) - math.log(total)

    def below(self, length: int) -> int:
        """Return how many of the counts, each with one more, are of fewer tokens."""
        return self.cumulative[length - 1] if length else 0

    def draw(self, uniforms: Sequence[float], least: int, most: int) -> list[int]:
        """Draw a length from `least` to `most` for each number in [0, 1), from
        p(length) cut to these lengths."""
        most = min(most, self.longest)
        assert least <= most, "a longer prompt is refused before"
        below = self.below(least)
        total = self.cumulative[most] - below
        wanted = below + np.array(uniforms, dtype=np.float64) * total
        return np.searchsorted(self.cumulative, wanted, side="right").tolist()
