"""Verification of runs: their scores are recomputed from seeds and actions, or a part is trained again."""
