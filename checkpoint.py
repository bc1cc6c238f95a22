"""Trained weights, under the name that other programs import: `from checkpoint import load_model`."""

from checkpoints.store import CheckpointError, Loaded, load, load_model

__all__ = ["CheckpointError", "Loaded", "load", "load_model"]
