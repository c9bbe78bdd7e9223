"""Pools of Atari games: NumPy in, NumPy out."""
