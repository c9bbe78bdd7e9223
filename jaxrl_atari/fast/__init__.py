"""The features of the Nature network, written by hand for CPUs. Skip it at first: it only computes them faster.

**What for.** Without this folder, `nature` trains at 0.75 of its speed in float32 and at 0.51 in bfloat16 (five
pairs each, 2 cores of an Intel Xeon), and `nature_lstm` at 0.86 and 0.75 (three pairs; benchmarks/NOTES.md, "The
layer and the form by hand"). Most of the difference in bfloat16 comes from XLA, which computes bfloat16
convolutions by way of float32.

**What.** The features are three convolutions and a dense layer. They are in the package three times:

    where                             how it is written           what for
    networks.NatureFeatures           layers                      the features, and the place to edit them
    by_hand.features                  matrix products, by hand    computes them fast on CPUs
    comparison.features_as_shipped    layers, in a few lines      what by_hand computes; never edited

`substitution.py` lets `by_hand.features` take the place of `NatureFeatures` when a network is applied.

What a network does with its features, such as heads or an LSTM, is in `networks.py` alone. An edit of it costs no
speed.

**When.** `by_hand.py` runs where only CPUs learn and act, unless `network.conv` is `plain` or `layers`.
Elsewhere `NatureFeatures` runs with its layers. If you edit it or one of its layers, the layers run everywhere:
when a network is made, they are compared with `features_as_shipped`. The comparison misses two kinds of edit,
which `comparison.py` names.

**How to read it.** First the top of `cpu_convolution.py`, which names what XLA's CPU backend does badly. Then
`by_hand.py`, which begins with the equations and small pictures of its data.

**What it costs.** About 700 lines here. Elsewhere: a second layout of frames (`frames.BLOCKED`, `arrange_stacks`,
`map_images`), `Network.for_acting`, the third form in `network_forms.py`, and a rule for authors of a loss that
changes pictures (docs/idea.md).

**When to delete it.** Once training with `network.conv = layers` is at least 0.95 times as fast as with `by_hand`,
in both types (`benchmark --compare network.conv=by_hand,layers`). Do not judge by the gradients alone: a layer
whose gradients took 1.1 times as long gave 0.79 of the speed of training.
"""
