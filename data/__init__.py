"""Data: prepare.py writes token files, loader.py reads them, tokenizers.py and sources.py serve both."""
