"""Search: many trials with early stopping on few GPUs (Ray Tune)."""
