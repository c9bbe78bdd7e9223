"""What a run leaves behind: checkpoints, metrics, graphs, and how they are read back."""
