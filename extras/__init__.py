"""Applications of aogpt, which it does not import; each is meant to be copied."""
