"""The features of the Nature network, written by hand for CPUs. Skip it at first: it only computes them faster.

Without it, whole training has 0.75 of its speed in float32 and 0.51 in bfloat16 (five pairs each, 2 cores of an
Intel Xeon; benchmarks/NOTES.md, "The layer and the form by hand"). `nature_lstm` has 0.86 and 0.75 of it (three
pairs). That is what these 550 lines are for.

The features are three convolutions and a dense layer. `nature` and `nature_lstm` begin with them, and a network
of your own may. They are in the package three times:

    where                           how it is written            what for
    networks.nature_features        layers                       the features, and the place to edit them
    cpu_conv.features               matrix products, by hand     computes them fast on CPUs
    programs.features_as_shipped    layers, in a few lines       what cpu_conv.py computes; never edited

What comes behind them, such as heads or an LSTM, is in `networks.py` alone. An edit of it costs no speed.

`cpu_conv.py` runs where only CPUs learn and act, unless `network.conv` is `plain` or `layers`. Elsewhere
`nature_features` computes the features with its layers. After an edit of it, or of a layer, it does so everywhere:
when a network is made, its program is compared with one that has `features_as_shipped` in their place. The
comparison misses two kinds of edit, which `programs.py` names; one of them is an edit under `if network.for_cpu`.

Most of the difference in bfloat16 comes from XLA, which computes bfloat16 convolutions by way of float32.

Read the top of `layers.py` first, which names what XLA's CPU backend does badly, then `cpu_conv.py`. It begins
with the equations and small pictures of its data.

Delete this folder once training with `network.conv = layers` is at least 0.95 times as fast as with `matmul`, in
both types (`benchmark --compare network.conv=matmul,layers`). `frames.BLOCKED`, the field `features_by_hand` and
the choice in `network_forms.py` go with it. Do not judge by the gradients alone: a layer whose gradients took 1.1
times as long gave 0.79 of the speed of training.
"""
