"""The machine: its CPU, its GPUs and their memory, and the settings of JAX.

| module | content |
|---|---|
| cpu | cores, instruction sets, and the CPU quota of a container |
| gpus | the GPUs that a process may use, found without starting JAX; what NVML knows of them |
| choice | the devices that a config asks for, and how sessions divide the GPUs |
| start | how JAX is limited to the chosen devices and started, and what then becomes of the choice |
| memory | the share of a GPU's memory that JAX reserves |
| monitor | utilisation and memory, sampled while a session trains |
| distributed | several processes that learn together |
| settings | settings of JAX and of the process: those that change numbers, and those that save time and memory |

`devices.py`, above this folder, turns a choice into devices of JAX.
"""
