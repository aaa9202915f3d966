"""A model in, rows out: perplexity over length, passkey over length and depth, and their statistics."""
