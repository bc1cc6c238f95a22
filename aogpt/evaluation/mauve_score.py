"""MAUVE: how near the distribution of samples is to that of text, 0 to 1 (Pillutla et
al., arXiv 2102.01454), by the package mauve-text, from features of a judge."""

import math

import numpy as np

from ..runtime.errors import UserError

# samples on each side, for the two clusters that the package takes at least
FEWEST = 20


def require_mauve() -> None:
    """Raise UserError where the package is missing."""
    try:
        import mauve  # noqa: F401
    except ImportError:
        raise UserError(
            "--mauve needs the package mauve-text: pip install mauve-text"
        ) from None


def mauve_score(text: np.ndarray, samples: np.ndarray) -> float:
    """Return MAUVE of features of text and of samples, (N, D) and (M, D); NaN for fewer
    than FEWEST of either."""
    if min(len(text), len(samples)) < FEWEST:
        return math.nan
    from mauve import compute_mauve

    return float(compute_mauve(p_features=text, q_features=samples).mauve)
