"""Weights on disk: written, verified, found again, and read from any known layout."""

from checkpoints.errors import CheckpointError
from checkpoints.load import Loaded, load, load_model

__all__ = ["CheckpointError", "Loaded", "load", "load_model"]
