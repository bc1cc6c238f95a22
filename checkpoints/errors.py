"""What all of this folder raises."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read or used; the message says which, why and what to
    do."""
