"""The Nature network written by hand for CPUs. Skip it at first: it computes nothing new, only faster.

This network is in the package three times:

    where                           how it is written            what for
    networks.NatureActorCritic      layers                       the network, and the one to edit
    cpu_conv.py                     matrix products, by hand     computes that network fast on CPUs
    programs.Handwritten            layers, in a few lines       what cpu_conv.py computes; never edited

`cpu_conv.py` runs where only CPUs learn and act, unless `network.conv` is `plain` or `layers`. Elsewhere
`NatureActorCritic` itself runs. After an edit, of the module or of a layer of it, the module runs everywhere:
when a network is made, its program is compared with that of `Handwritten`. The comparison misses two kinds of
edit, which `programs.py` names; one of them is an edit under `if self.for_cpu`.

The gradients of `cpu_conv.py` are 1.2 times as fast in float32 as those of `layers.Conv`, and twice as fast in
bfloat16, because XLA computes bfloat16 convolutions by way of float32 (benchmarks/NOTES.md, "The layer and the
form by hand"). On two cores without bfloat16 instructions, training was 0.79 times as fast when a layer for any
size computed the network instead (same note): that is what these 500 lines are for.

Read `programs.py` first, which is short. `cpu_conv.py` begins with the equations and small pictures of its data.

Delete this folder once training with `network.conv = layers` is at least 0.95 times as fast as with `matmul`, in
both types (`benchmark --compare network.conv=matmul,layers`). `frames.BLOCKED` and the choice in
`network_forms.py` go with it. The gradients alone mislead: in that attempt they took only 1.1 times as long.
"""
