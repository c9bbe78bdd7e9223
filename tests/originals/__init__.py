"""Runs other implementations of PPO, unmodified, on a fixed rollout: the proofs of `test_originals.py`.

Each runner is a program of its own, because it replaces modules (`gym`, `envpool`) and torch's default type:

    python -m originals.run_cleanrl ppo_atari INPUT.npz OUTPUT.npz UPDATES

`rollouts.py` makes the rollout, in our form and as an original's environment gives it. The originals' code is
imported or executed from the installed packages; nothing of it is in this repository.
"""
