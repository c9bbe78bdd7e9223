"""Search over lambda, entropy coefficient and learning rate on Qbert: the published Atari search space.

    python -m jaxrl_atari.search --config configs/search_qbert.py

It runs 16 trials of one session each. ASHA compares them at 500,000, 1,500,000 and 4,500,000 env steps and keeps
the best third each time. Then confirm the best trial with several sessions:

    python -m jaxrl_atari.train --config data/qbert_search_TIMESTAMP/qbert_best.py --sessions 4
"""

from jaxrl_atari.config import Config, EnvConfig
from jaxrl_atari.search.space import FloatDistribution, ResourcesConfig, SearchConfig


def get_config() -> Config:
    return Config(name="qbert", env=EnvConfig(game="Qbert"))


def get_search() -> SearchConfig:
    return SearchConfig(
        space={
            "ppo.gae_lambda": FloatDistribution(0.7, 0.98),
            "ppo.entropy_coef": FloatDistribution(0.005, 0.03, log=True),
            "ppo.learning_rate": FloatDistribution(1e-4, 5e-4, log=True),
        },
        resources=ResourcesConfig(gpu=0.25),  # four trials on each GPU; without a GPU, they run on the CPU
    )
