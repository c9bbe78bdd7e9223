"""PPO on Atari in PyTorch: the yardstick that jaxrl_atari is measured against.

Written as a competent PyTorch user would, after CleanRL's `ppo_atari_envpool.py`: the same games
(`jaxrl_atari.envs`), network, losses and default spec. Needs torch (measured with 2.13.0).

    python benchmarks/torch_ppo.py --mode tuned --what end_to_end --iterations 10

| mode | |
|---|---|
| `plain` | stock PyTorch in float32 |
| `tuned` | `plain` with channels_last arrays, and malloc thresholds with which glibc keeps freed memory |
| `bfloat16` | `tuned`, with the network under `torch.autocast` to bfloat16 |
| `best` | `tuned` with a fused AdamW, and the fastest of the candidates below on this machine |

The candidates of `best`: float32; where the CPU multiplies bfloat16, also autocast, and float32 whose products
oneDNN computes in bfloat16; then the fastest of these with policy and loss compiled by `torch.compile`. They are
timed before the measurement, on minibatches and steps of the real sizes. One that fails is left out.

In all modes but `plain`, the program restarts itself with malloc's environment variables. The last line of the
output is JSON, with the choice of `best` and the seconds of each candidate. In turns with jaxrl_atari,
`python benchmarks/compare_torch.py` runs all modes.
"""

import copy
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
import tyro
from torch import nn

from jaxrl_atari.config import EnvConfig
from jaxrl_atari.envs import make_pool
from jaxrl_atari.hardware.cpu import read_cpu

FLOAT32 = "float32"
AUTOCAST = "bfloat16 autocast"
BFLOAT16_PRODUCTS = "float32, products in bfloat16"

NUM_ENVS = 16
LENGTH = 128
EPOCHS = 4
MINIBATCH = 256
LEARNING_RATE = 2.5e-4
GAMMA = 0.99
GAE_LAMBDA = 0.95
CLIP = 0.1
ENTROPY_COEF = 0.01
VALUE_COEF = 0.5
MAX_NORM = 0.5
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
        self.policy = layer(nn.Linear(512, num_actions), 0.01)
        self.value = layer(nn.Linear(512, 1), 1.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.torso(x)
        return self.policy(features), self.value(features)[:, 0]


class Loop:
    """Acting and learning on one pool of games."""

    def __init__(self, mode: str, game: str, seed: int):
        torch.manual_seed(seed)
        self.channels_last = mode != "plain"
        self.pool = make_pool(EnvConfig(game=game), NUM_ENVS, seed=seed)
        self.agent = Agent(self.pool.num_actions)
        if self.channels_last:
            self.agent = self.agent.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(  # weight decay 0.01
            self.agent.parameters(), lr=LEARNING_RATE, eps=1e-5, fused=mode == "best"
        )
        self.use(AUTOCAST if mode == "bfloat16" else FLOAT32)
        shape = (LENGTH, NUM_ENVS)
        # The order of the pixels in memory is that of the arithmetic, so that no conversion is needed later.
        stack = (84, 84, 4) if self.channels_last else (4, 84, 84)
        self.frames = torch.zeros((*shape, *stack), dtype=torch.uint8)
        self.actions = torch.zeros(shape, dtype=torch.int64)
        self.log_probs = torch.zeros(shape)
        self.values = torch.zeros(shape)
        self.rewards = torch.zeros(shape)
        self.terminated = torch.zeros(shape, dtype=torch.bool)
        self.truncated = torch.zeros(shape, dtype=torch.bool)
        self.weights = torch.zeros(shape)
        self.stacks = np.zeros((NUM_ENVS, *stack), np.uint8)
        self._push(self.pool.reset())

    def _push(self, step) -> None:
        """Puts the newest frames into the stacks. A new game's first frame fills its stack."""
        oldest_first = np.moveaxis(self.stacks, -1, 1) if self.channels_last else self.stacks
        oldest_first[:, :-1] = oldest_first[:, 1:]
        oldest_first[:, -1] = step.frame
        if step.first.any():
            oldest_first[step.first] = step.frame[step.first][:, None]

    def use(self, arithmetic: str, compiled: bool = False) -> None:
        """Sets the arithmetic of the network, and whether `torch.compile` compiles the policy and the loss."""
        self.arithmetic = arithmetic
        self.compiled = compiled
        precision = "bf16" if arithmetic == BFLOAT16_PRODUCTS else "none"  # the default
        torch.backends.mkldnn.conv.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = precision
        self._policy = torch.compile(self._network, dynamic=False) if compiled else self._network
        self._loss = torch.compile(self._minibatch_loss, dynamic=False) if compiled else self._minibatch_loss

    def _network(self, stacks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 stacks as they are stored -> logits [N, A], values [N]."""
        x = (stacks.permute(0, 3, 1, 2) if self.channels_last else stacks).float().div_(255.0)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.arithmetic == AUTOCAST):
            logits, values = self.agent(x)
        return logits.float(), values.float()

    @torch.no_grad()
    def collect(self) -> int:
        """Fills a rollout; returns the number of its env steps."""
        for t in range(LENGTH):
            self.frames[t] = stacks = torch.from_numpy(self.stacks)
            logits, self.values[t] = self._policy(stacks)
            policy = torch.distributions.Categorical(logits=logits, validate_args=False)
            self.actions[t] = action = policy.sample()
            self.log_probs[t] = policy.log_prob(action)
            step = self.pool.step(action.numpy())
            self._push(step)
            self.rewards[t] = torch.from_numpy(np.clip(step.reward, -1, 1))
            self.terminated[t] = torch.from_numpy(step.terminated | step.life_lost)
            self.truncated[t] = torch.from_numpy(step.truncated)
            self.weights[t] = torch.from_numpy(1.0 - step.first)
        self.bootstrap_value = self._policy(torch.from_numpy(self.stacks))[1]
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

    def _minibatch_loss(
        self,
        frames: torch.Tensor,
        actions: torch.Tensor,
        old_log_prob: torch.Tensor,
        old_value: torch.Tensor,
        advantage: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        """The PPO loss of a minibatch, [N]."""
        share = weight / weight.sum()
        mean = (share * advantage).sum()
        a = (advantage - mean) / ((share * (advantage - mean) ** 2).sum().sqrt() + 1e-8)
        logits, value = self._network(frames)
        log_probs = torch.log_softmax(logits, 1)
        log_prob = log_probs.gather(1, actions[:, None])[:, 0]
        ratio = (log_prob - old_log_prob).exp()
        policy_loss = -(share * torch.min(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a)).sum()
        clipped = old_value + (value - old_value).clamp(-CLIP, CLIP)
        value_loss = 0.5 * (share * torch.max((value - target) ** 2, (clipped - target) ** 2)).sum()
        entropy = -(share * (log_probs.exp() * log_probs).sum(1)).sum()
        return policy_loss + VALUE_COEF * value_loss - ENTROPY_COEF * entropy

    def _gradient_step(self, *minibatch: torch.Tensor) -> torch.Tensor:
        """One step of the optimiser; returns the loss."""
        loss = self._loss(*minibatch)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.agent.parameters(), MAX_NORM)
        self.optimizer.step()
        return loss

    def update(self) -> float:
        """All epochs and minibatches over the rollout; returns the last loss."""
        advantage = self.advantages()
        target = advantage + self.values
        arrays = (self.frames, self.actions, self.log_probs, self.values, advantage, target, self.weights)
        flat = [array.flatten(0, 1) for array in arrays]
        for _ in range(EPOCHS):
            for index in torch.randperm(LENGTH * NUM_ENVS).split(MINIBATCH):
                loss = self._gradient_step(*(array[index] for array in flat))
        return loss.item()

    def use_fastest(self, what: str) -> dict[str, float | str]:
        """Mode `best`: uses the fastest candidate.

        Returns:
            Candidate -> the seconds of an iteration with it, or why it failed.
        """
        before = copy.deepcopy((self.agent.state_dict(), self.optimizer.state_dict()))
        tried: dict[str, float | str] = {}
        seconds: dict[tuple[str, bool], float] = {}

        def time_candidate(arithmetic: str, compiled: bool) -> None:
            name = f"{arithmetic}, compiled" if compiled else arithmetic
            try:
                self.use(arithmetic, compiled)
                tried[name] = seconds[arithmetic, compiled] = self._iteration_seconds(what)
            except Exception as error:  # torch.compile needs a C++ compiler, and raises many types
                tried[name] = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"

        multiplies_bfloat16 = "BF16" in read_cpu().instruction_sets
        for arithmetic in (FLOAT32, AUTOCAST, BFLOAT16_PRODUCTS) if multiplies_bfloat16 else (FLOAT32,):
            time_candidate(arithmetic, compiled=False)
        time_candidate(min(seconds, key=seconds.__getitem__)[0], compiled=True)
        self.use(*min(seconds, key=seconds.__getitem__))
        self.agent.load_state_dict(before[0])
        self.optimizer.load_state_dict(before[1])
        return tried

    def _iteration_seconds(self, what: str) -> float:
        """Seconds of the network's work in an iteration, from the fastest of some minibatches and acting steps."""
        noise = torch.randn(4, MINIBATCH)
        frames = torch.randint(0, 256, (MINIBATCH, *self.frames.shape[2:]), dtype=torch.uint8)
        minibatch = (frames, torch.zeros(MINIBATCH, dtype=torch.int64), *noise, torch.ones(MINIBATCH))
        gradients = fastest(lambda: self._gradient_step(*minibatch))
        seconds = EPOCHS * (LENGTH * NUM_ENVS // MINIBATCH) * gradients
        if what == "end_to_end":
            with torch.no_grad():
                seconds += LENGTH * fastest(lambda: self._policy(frames[:NUM_ENVS]))
        return seconds


def fastest(function: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls, after two that may compile."""
    times = []
    for _ in range(8):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times[2:])


def measure(loop: Loop, what: str, iterations: int) -> list[float]:
    """The speed of each iteration after a first one.

    It is in gradient samples per second (`update`) or env steps per second (`end_to_end`).
    """
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


def main(
    mode: Literal["plain", "tuned", "bfloat16", "best"] = "plain",
    what: Literal["update", "end_to_end"] = "end_to_end",
    iterations: int = 10,
    game: str = "Qbert",
    threads: int = 2,
    seed: int = 0,
) -> None:
    """PPO on Atari in PyTorch, timed.

    Args:
        iterations: iterations timed, after one that is not
        threads: of PyTorch; the emulator takes one a core
    """
    if mode != "plain" and any(os.environ.get(name) != value for name, value in MALLOC.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)  # glibc reads them at start
    torch.set_num_threads(threads)
    loop = Loop(mode, game, seed)
    tried = loop.use_fastest(what) if mode == "best" else {}
    rates = measure(loop, what, iterations)
    loop.pool.close()
    result = {
        "framework": f"torch {torch.__version__}",
        "mode": mode,
        "arithmetic": loop.arithmetic,
        "compiled": loop.compiled,
        "tried_seconds": tried,
        "unit": "env steps/s" if what == "end_to_end" else "gradient samples/s",
        "median": statistics.median(rates),
        "min": min(rates),
        "max": max(rates),
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    tyro.cli(main)
