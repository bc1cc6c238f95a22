"""Experiments: arms that are tuned alike and trained over seeds, and verdicts on what they show."""
