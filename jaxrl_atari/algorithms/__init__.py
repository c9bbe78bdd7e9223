"""Further algorithms, each a file that replaces parts of `ppo.PPO`. `registry.ALGORITHMS` names them."""
