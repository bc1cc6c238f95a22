"""What all of this folder raises."""

from runtime.validation import FileError


class CheckpointError(FileError):
    """A checkpoint that cannot be written, read or used; the message says which, why and what to
    do."""
