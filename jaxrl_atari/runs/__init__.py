"""Run directories: checkpoints, metrics, graphs, and reading them back."""
