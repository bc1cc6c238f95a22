"""The error that scripts print in one line, without a traceback."""


class UserError(ValueError):
    """A mistake that the user can correct; the message says how. Only checks of input raise it: any
    other exception is a bug and keeps its traceback."""


def reason_of(error: BaseException) -> str:
    """The innermost cause of an error, on one line; with several processes, of the first."""
    failures = getattr(error, "failures", None)  # of torch.distributed.checkpoint
    error = next(iter(failures.values()))[0] if failures else error
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
