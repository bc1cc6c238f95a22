"""The error that scripts print in one line, without a traceback."""

LONGEST_REASON = 300  # characters


class UserError(ValueError):
    """A mistake that the user can correct; the message says how. Only checks of input
    raise it: any other exception is a bug and keeps its traceback."""


def reason_of(error: BaseException) -> str:
    """Return the innermost cause of an error, on one line; with several processes, the
    cause in the first."""
    # torch.distributed.checkpoint: {rank: (error, traceback)}
    failures = getattr(error, "failures", None)
    if failures:
        first_failure = next(iter(failures.values()))
        error = first_failure[0]
    while error.__cause__ is not None:
        error = error.__cause__
    name = type(error).__name__
    words = f"{name}: {error}".split()
    reason = " ".join(words)
    return reason[:LONGEST_REASON]
