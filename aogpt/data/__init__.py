"""Data: prepare.py writes token files, loader.py reads them, tokenizers.py serves
all."""
