"""The one error that a script tells in a line instead of a traceback."""


class UserError(ValueError):
    """A mistake that the user can mend; the message says how. Raised by checks of input alone: any
    other exception is a bug and keeps its traceback."""
