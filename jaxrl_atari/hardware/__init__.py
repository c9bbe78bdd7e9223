"""The machine: its CPU, the choice of GPUs, memory, monitoring, joined processes, and process settings."""
