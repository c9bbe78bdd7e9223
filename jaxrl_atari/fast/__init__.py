"""The Nature network written by hand for CPUs. Skip it at first: it computes nothing new, only faster.

Why this network is in the package three times:

1. `networks.NatureActorCritic` is the network, and the one to edit.
2. `cpu_conv.py` computes the same by hand. On a CPU its gradients are 1.2 times as fast in float32 as those of
   `layers.Conv`, and twice in bfloat16, because XLA computes bfloat16 convolutions by way of float32
   (benchmarks/NOTES.md, "The layer and the form by hand").
3. `programs.Handwritten` says in a few lines what was written by hand. `NatureActorCritic` is compared with it
   when a network is made. After an edit they differ, and the package computes the edited network.

When this folder goes, with `frames.BLOCKED` and the choice in `network_forms.py`: once the gradients of
`layers.Conv` take at most 1.05 times as long as those of `cpu_conv.py`, in both types, measured as in that note.
In bfloat16 that needs an XLA whose CPU backend multiplies bfloat16 in convolutions.
"""
