"""Weights on disk: written, verified, found again, and read from any known layout."""
