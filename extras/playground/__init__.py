"""The page in the browser on which a model fills in gaps."""
