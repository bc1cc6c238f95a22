"""Weights on disk: written, verified, found again, and read from any known layout."""

from .load import Loaded, load, load_model
from .store import CheckpointError
