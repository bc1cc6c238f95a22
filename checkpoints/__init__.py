"""Weights on disk: written, verified, found again, and read from any known layout."""

from checkpoints.load import Loaded, load, load_model
from checkpoints.store import CheckpointError
