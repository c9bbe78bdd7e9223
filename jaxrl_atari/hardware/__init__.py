"""CPU, GPUs and drivers, their choice, monitoring, memory, several processes, settings of the process."""
