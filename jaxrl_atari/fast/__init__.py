"""The Nature network written by hand for CPUs. Skip it at first: it computes nothing new, only faster.

Without it, whole training has 0.75 of its speed in float32 and 0.51 in bfloat16 (five pairs each, 2 cores of an
Intel Xeon; benchmarks/NOTES.md, "The layer and the form by hand"). That is what these 570 lines are for.

This network is in the package three times:

    where                           how it is written            what for
    networks.NatureActorCritic      layers                       the network, and the one to edit
    cpu_conv.py                     matrix products, by hand     computes that network fast on CPUs
    programs.NatureAsShipped        layers, in a few lines       what cpu_conv.py computes; never edited

`cpu_conv.py` runs where only CPUs learn and act, unless `network.conv` is `plain` or `layers`. Elsewhere
`NatureActorCritic` itself runs. After an edit, of the module or of a layer of it, the module runs everywhere:
when a network is made, its program is compared with that of `NatureAsShipped`. The comparison misses two kinds of
edit, which `programs.py` names; one of them is an edit under `if self.for_cpu`.

Most of the difference in bfloat16 comes from XLA, which computes bfloat16 convolutions by way of float32.

Read the top of `layers.py` first, which names what XLA's CPU backend does badly, then `cpu_conv.py`. It begins
with the equations and small pictures of its data.

Delete this folder once training with `network.conv = layers` is at least 0.95 times as fast as with `matmul`, in
both types (`benchmark --compare network.conv=matmul,layers`). `frames.BLOCKED` and the choice in
`network_forms.py` go with it. Do not judge by the gradients alone: a layer whose gradients took 1.1 times as long
gave 0.79 of the speed of training.
"""
