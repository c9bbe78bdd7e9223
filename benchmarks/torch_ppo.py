"""PPO on Atari in plain PyTorch: the yardstick that jaxrl_atari is measured against.

Written as a competent PyTorch user would, after CleanRL's `ppo_atari_envpool.py`: the same games (`jaxrl_atari.envs`),
network, losses and default spec. Needs torch (measured with 2.13.0).

    python benchmarks/torch_ppo.py --mode tuned --what end_to_end --iterations 10

Modes: `plain`, as PyTorch comes; `tuned`, with channels_last arrays and glibc told to keep freed memory (the program
starts itself anew with malloc's environment variables). The last line of the output is JSON.
`python -m jaxrl_atari.benchmark --config configs/qbert.py --compare torch` runs both beside jaxrl_atari, in turns.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import time

import numpy as np
import torch
from torch import nn

from jaxrl_atari.envs import make_pool

NUM_ENVS, LENGTH, EPOCHS, MINIBATCH = 16, 128, 4, 256
LEARNING_RATE, GAMMA, CLIP, ENTROPY_COEF, VALUE_COEF, MAX_NORM = 2.5e-4, 0.99, 0.1, 0.01, 0.5, 0.5
GAE_LAMBDA = 0.95
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def layer(module: nn.Module, scale: float = 2**0.5) -> nn.Module:
    """Orthogonal weights and no bias at the start."""
    nn.init.orthogonal_(module.weight, scale)
    nn.init.zeros_(module.bias)
    return module


class Agent(nn.Module):
    """The Nature-DQN actor-critic: float frames [N, 4, 84, 84] in [0, 1] -> logits [N, A], values [N]."""

    def __init__(self, num_actions: int):
        super().__init__()
        self.torso = nn.Sequential(
            layer(nn.Conv2d(4, 32, 8, stride=4)), nn.ReLU(),
            layer(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(),
            layer(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(),
            nn.Flatten(),
            layer(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(),
        )  # fmt: skip
        self.policy, self.value = layer(nn.Linear(512, num_actions), 0.01), layer(nn.Linear(512, 1), 1.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.torso(x)
        return self.policy(features), self.value(features)[:, 0]


class Loop:
    """Acting and learning on one pool of games."""

    def __init__(self, mode: str, game: str, seed: int):
        torch.manual_seed(seed)
        self.channels_last = mode == "tuned"
        self.pool = make_pool("ale", game, NUM_ENVS, seed=seed)
        self.agent = Agent(self.pool.num_actions)
        if self.channels_last:
            self.agent = self.agent.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(self.agent.parameters(), lr=LEARNING_RATE, eps=1e-5)  # weight decay 0.01
        shape = (LENGTH, NUM_ENVS)
        # The order of the pixels in memory is that of the arithmetic, so that no conversion is needed later.
        stack = (84, 84, 4) if self.channels_last else (4, 84, 84)
        self.frames = torch.zeros((*shape, *stack), dtype=torch.uint8)
        self.actions = torch.zeros(shape, dtype=torch.int64)
        self.log_probs, self.values, self.rewards = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
        self.terminated, self.truncated = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        self.weights = torch.zeros(shape)
        self.stacks = np.zeros((NUM_ENVS, *stack), np.uint8)
        self._push(self.pool.reset())

    def _push(self, step) -> None:
        """The newest frames into the stacks; a new game's first frame fills its stack."""
        oldest_first = np.moveaxis(self.stacks, -1, 1) if self.channels_last else self.stacks
        oldest_first[:, :-1] = oldest_first[:, 1:]
        oldest_first[:, -1] = step.frame
        if step.first.any():
            oldest_first[step.first] = step.frame[step.first][:, None]

    def _input(self, stacks: torch.Tensor) -> torch.Tensor:
        """uint8 stacks as they are stored -> float [N, 4, 84, 84]."""
        return (stacks.permute(0, 3, 1, 2) if self.channels_last else stacks).float().div_(255.0)

    @torch.no_grad()
    def collect(self) -> int:
        """Fills a rollout; returns the number of its env steps."""
        for t in range(LENGTH):
            self.frames[t] = stacks = torch.from_numpy(self.stacks)
            logits, self.values[t] = self.agent(self._input(stacks))
            policy = torch.distributions.Categorical(logits=logits, validate_args=False)
            self.actions[t] = action = policy.sample()
            self.log_probs[t] = policy.log_prob(action)
            step = self.pool.step(action.numpy())
            self._push(step)
            self.rewards[t] = torch.from_numpy(np.clip(step.reward, -1, 1))
            self.terminated[t] = torch.from_numpy(step.terminated | step.life_lost)
            self.truncated[t] = torch.from_numpy(step.truncated)
            self.weights[t] = torch.from_numpy(1.0 - step.first)
        self.bootstrap_value = self.agent(self._input(torch.from_numpy(self.stacks)))[1]
        return int(self.weights.sum())

    @torch.no_grad()
    def advantages(self) -> torch.Tensor:
        """Generalised advantage estimation, [T, B]."""
        advantage = torch.zeros_like(self.rewards)
        last, next_value = torch.zeros(NUM_ENVS), self.bootstrap_value
        for t in reversed(range(LENGTH)):
            going_on = ~self.terminated[t]
            delta = self.rewards[t] + GAMMA * next_value * going_on - self.values[t]
            advantage[t] = last = delta + GAMMA * GAE_LAMBDA * (going_on & ~self.truncated[t]) * last
            next_value = self.values[t]
        return advantage

    def update(self) -> float:
        """All epochs and minibatches over the rollout; returns the last loss."""
        advantage = self.advantages()
        target = (advantage + self.values).flatten()
        advantage, frames = advantage.flatten(), self.frames.flatten(0, 1)
        old_values, old_log_probs = self.values.flatten(), self.log_probs.flatten()
        actions, weights = self.actions.flatten(), self.weights.flatten()
        for _ in range(EPOCHS):
            for index in torch.randperm(LENGTH * NUM_ENVS).split(MINIBATCH):
                share = weights[index] / weights[index].sum()
                a = advantage[index]
                mean = (share * a).sum()
                a = (a - mean) / ((share * (a - mean) ** 2).sum().sqrt() + 1e-8)
                logits, value = self.agent(self._input(frames[index]))
                log_probs = torch.log_softmax(logits, 1)
                log_prob = log_probs.gather(1, actions[index][:, None])[:, 0]
                ratio = (log_prob - old_log_probs[index]).exp()
                policy_loss = -(share * torch.min(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a)).sum()
                old, goal = old_values[index], target[index]
                kept = old + (value - old).clamp(-CLIP, CLIP)
                value_loss = 0.5 * (share * torch.max((value - goal) ** 2, (kept - goal) ** 2)).sum()
                entropy = -(share * (log_probs.exp() * log_probs).sum(1)).sum()
                loss = policy_loss + VALUE_COEF * value_loss - ENTROPY_COEF * entropy
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), MAX_NORM)
                self.optimizer.step()
        return loss.item()


def measure(loop: Loop, what: str, iterations: int) -> list[float]:
    """Per iteration after a first one, gradient samples a second (`update`) or env steps a second (`end_to_end`)."""
    env_steps = loop.collect()
    rates = []
    for _ in range(iterations + 1):
        start = time.perf_counter()
        if what == "end_to_end":
            env_steps = loop.collect()
        loop.update()
        seconds = time.perf_counter() - start
        rates.append((env_steps if what == "end_to_end" else EPOCHS * LENGTH * NUM_ENVS) / seconds)
    return rates[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO on Atari in plain PyTorch, timed.")
    parser.add_argument("--mode", choices=("plain", "tuned"), default="plain")
    parser.add_argument("--what", choices=("update", "end_to_end"), default="end_to_end")
    parser.add_argument("--iterations", type=int, default=10, help="iterations timed, after one that is not")
    parser.add_argument("--game", default="Qbert")
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch; the emulator takes one a core")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.mode == "tuned" and any(os.environ.get(name) != value for name, value in MALLOC.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)  # glibc reads them at start
    torch.set_num_threads(args.threads)
    loop = Loop(args.mode, args.game, args.seed)
    rates = measure(loop, args.what, args.iterations)
    loop.pool.close()
    print("each iteration:", " ".join(f"{rate:.0f}" for rate in rates))
    result = {
        "framework": f"torch {torch.__version__}",
        "mode": args.mode,
        "unit": "env steps/s" if args.what == "end_to_end" else "gradient samples/s",
        "median": statistics.median(rates),
        "min": min(rates),
        "max": max(rates),
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
