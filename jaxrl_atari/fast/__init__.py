"""The Nature network written by hand for CPUs. Skip it at first: it computes nothing new, only faster.

Why this network is in the package three times:

1. `networks.NatureActorCritic` is the network, and the one to edit.
2. `cpu_conv.py` computes the same by hand. On a CPU its gradients are 1.2 times as fast in float32, and twice in
   bfloat16.
3. `programs.Handwritten` says in 15 lines what was written by hand. `NatureActorCritic` is compared with it when a
   network is made. After an edit they differ, and the package computes the edited network, not `cpu_conv.py`.

When it goes: once the gradients of `layers.Conv` take at most 1.05 times as long as those of `cpu_conv.py`, in
both types. That needs an XLA whose CPU backend multiplies bfloat16 in convolutions (`cpu_conv.py`, "Until when").
"""
