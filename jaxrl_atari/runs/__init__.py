"""Run directories: checkpoints, logs, and reading them back."""
