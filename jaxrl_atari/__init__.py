"""PPO on Atari with JAX: `python -m jaxrl_atari.train --config configs/qbert.py`."""

__version__ = "0.1.0"
