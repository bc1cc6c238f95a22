"""Data: prepare.py writes token files, loader.py reads them, tokenizer.py and sources.py serve both."""
