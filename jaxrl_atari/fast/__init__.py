"""The Nature network written by hand for CPUs. Skip it at first: it computes nothing new, only faster.

`cpu_conv.py` computes it. `programs.py` tells whether the module in `networks.py` is still that network.
"""
