"""Two things that make training fast: each frame stored once, and convolutions that suit XLA's CPU backend."""
