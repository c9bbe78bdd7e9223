"""Algorithms besides PPO. Each is a file that replaces parts of `ppo.PPO`, named in `registry.ALGORITHMS`."""
