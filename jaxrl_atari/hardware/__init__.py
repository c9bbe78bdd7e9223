"""CPU, GPUs and drivers, monitoring, memory estimates, settings of the process."""
