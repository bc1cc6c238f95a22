"""Trained weights, under the name that other programs import: `from checkpoint import
load_model`."""

from checkpoints.errors import CheckpointError
from checkpoints.load import Loaded, load, load_model

__all__ = ["CheckpointError", "Loaded", "load", "load_model"]
