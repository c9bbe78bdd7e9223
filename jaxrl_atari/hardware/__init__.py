"""The machine: its GPUs, the choice among them, memory, monitoring, several processes, and settings of the
process."""
