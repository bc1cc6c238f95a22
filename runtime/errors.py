"""The one error that a script tells in a line instead of a traceback."""


class UserError(ValueError):
    """A mistake that the user can mend; the message says how. Raised by checks of input alone: any
    other exception is a bug and keeps its traceback."""


def reason_of(error: BaseException) -> str:
    """An error on one line: its innermost cause; of several processes that of the first."""
    failures = getattr(error, "failures", None)  # of torch.distributed.checkpoint
    error = next(iter(failures.values()))[0] if failures else error
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
