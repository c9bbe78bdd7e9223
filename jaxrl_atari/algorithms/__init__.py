"""Further algorithms, each a file that replaces parts of `ppo.PPO`; and the dialects of PPO."""
