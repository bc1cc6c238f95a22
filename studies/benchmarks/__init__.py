"""Speed, as ratios between systems that run side by side: what bench.py calls."""
