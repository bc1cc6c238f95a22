"""Everything of a training run around the loop in train.py."""
