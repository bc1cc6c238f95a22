"""Likelihood with its errors, order ensembles, judges and measures of generated
text."""
