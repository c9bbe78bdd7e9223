"""The forms of networks: `forms.py` chooses the form and arithmetic of every network, for CPUs and GPUs.

`cpu_conv.py` is for CPUs alone, and makes training fast there. Skip it at first.
"""
