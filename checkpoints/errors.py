"""What this package raises."""

from runtime.errors import UserError


class CheckpointError(UserError):
    """A checkpoint or file of weights that cannot be written, read or used."""
