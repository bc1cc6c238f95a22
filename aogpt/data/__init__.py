"""Data: prepare.py writes token files, loader.py reads them, and both use
tokenizers.py."""
