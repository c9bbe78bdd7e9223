"""Policies from checkpoints, and full games played with them."""
