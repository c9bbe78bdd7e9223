"""Further algorithms, each a file that replaces parts of `ppo.PPO`. `registry.ALGORITHMS` names them.

They are examples of the interface: tested, but not tuned, and not compared with PPO on a game.
"""
