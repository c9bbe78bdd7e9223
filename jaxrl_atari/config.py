"""What a run is made of: frozen dataclasses, validated when they are made.

The fields hold what the user wrote; everything that follows from them is a property. The defaults are the published
PPO-Atari spec (Schulman et al. 2017, in SLM Lab's per-game tuning of lambda).
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from jaxrl_atari.config_fields import (
    GpuOption,
    one_word,
    parse_count,
    parse_gpu,
    require,
    require_choice,
    require_int,
    require_number,
)
from jaxrl_atari.games import parse_game, tuned_gae_lambda

Backend = Literal["ale", "envpool"]
Protocol = Literal["auto", "v5", "classic"]
ComputeDtype = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class EnvConfig:
    """The games: which, how many at once, under which protocol."""

    game: str = "Qbert"
    """Any game of ALE, as you like to write it: Qbert, ms_pacman, ALE/Qbert-v5, QbertNoFrameskip-v4 (classic)."""
    backend: Backend = "ale"
    """Emulator pool: `ale` (ale-py's AtariVectorEnv) or `envpool` (pip install 'jaxrl_atari[envpool]')."""
    protocol: Protocol = "auto"
    """`v5`: sticky actions 0.25; `classic` (NoFrameskip-v4): none; `auto`: as the game's name says, else v5."""
    num_envs: int = 16
    """Environments stepped in parallel (B)."""
    num_groups: int = 0
    """Groups of environments in ping-pong: one steps while the policy acts for the other. 0: 2 on a GPU (1 where
    its share of the environments is odd), 1 on a CPU."""
    num_threads: int = 0
    """Emulator threads. 0: one per core."""
    max_frames: int = 108_000
    """Emulator frames after which a game is truncated (108,000 frames = 30 minutes of play)."""

    def __post_init__(self) -> None:
        parse_game(self.game)
        require_choice("env.backend", self.backend, ("ale", "envpool"))
        require_choice("env.protocol", self.protocol, ("auto", "v5", "classic"))
        require_int("env.num_envs", self.num_envs, 1, 65_536)
        require_int("env.num_groups", self.num_groups, 0, 64)
        require_int("env.num_threads", self.num_threads, 0, 4_096)
        require_int("env.max_frames", self.max_frames, 8, 10_000_000)
        require(self.max_frames % 4 == 0, "env.max_frames", self.max_frames, "a multiple of 4 (an env step)")
        named = parse_game(self.game)[1]
        require(
            self.protocol == "auto" or named in (None, self.protocol),
            "env.protocol",
            self.protocol,
            f"{named}, which the name {self.game} means",
            f"leave env.protocol out, or write the game as {self.game_name}",
        )

    @property
    def game_name(self) -> str:
        """ALE's own name of the game, for example `MsPacman`."""
        return parse_game(self.game)[0]

    @property
    def resolved_protocol(self) -> Literal["v5", "classic"]:
        """The protocol in force: the one chosen, else the one that the game's name means, else v5."""
        named = parse_game(self.game)[1]
        return self.protocol if self.protocol != "auto" else named or "v5"


@dataclass(frozen=True)
class PPOConfig:
    """Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347)."""

    rollout_length: int = 128
    """Env steps of each environment between two updates (T)."""
    epochs: int = 4
    """Passes over each rollout."""
    minibatch_size: int = 256
    """Samples of each gradient step, over all devices."""
    learning_rate: float = 2.5e-4
    """Adam's step size at the start; falls linearly to zero over total_env_steps, one step an update."""
    anneal_learning_rate: bool = True
    """False keeps the learning rate constant."""
    adam_epsilon: float = 1e-5
    """Adam's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay (AdamW)."""
    gamma: float = 0.99
    """Discount of a step."""
    gae_lambda: float | None = None
    """Lambda of generalised advantage estimation. None: the value tuned for the game."""
    clip_epsilon: float = 0.1
    """Clip range of the probability ratio and of the value."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this global norm."""

    def __post_init__(self) -> None:
        require_int("ppo.rollout_length", self.rollout_length, 1, 65_536)
        require_int("ppo.epochs", self.epochs, 1, 1_000)
        require_int("ppo.minibatch_size", self.minibatch_size, 1, 2**31 - 1)
        require_number("ppo.learning_rate", self.learning_rate, 0.0, 1.0)
        require_number("ppo.adam_epsilon", self.adam_epsilon, 1e-12, 1.0)
        require_number("ppo.weight_decay", self.weight_decay, 0.0, 10.0)
        require_number("ppo.gamma", self.gamma, 0.0, 1.0)
        if self.gae_lambda is not None:
            require_number("ppo.gae_lambda", self.gae_lambda, 0.0, 1.0)
        require_number("ppo.clip_epsilon", self.clip_epsilon, 1e-6, 10.0)
        require_number("ppo.entropy_coef", self.entropy_coef, 0.0, 10.0)
        require_number("ppo.value_coef", self.value_coef, 0.0, 100.0)
        require_number("ppo.max_grad_norm", self.max_grad_norm, 1e-6, 1e6)


@dataclass(frozen=True)
class NetworkConfig:
    """The Nature-DQN actor-critic (Mnih et al. 2015)."""

    compute_dtype: ComputeDtype = "auto"
    """Arithmetic of the torso; auto: bfloat16 on a GPU, else float32, though a CPU with AVX512-BF16 is faster in
    bfloat16. Parameters, heads, losses: always float32."""
    conv: Literal["auto", "plain", "matmul"] = "auto"
    """Form of the convolutions, the same numbers in each: plain (cuDNN's), matmul (fast in a loop on CPU), auto."""

    def __post_init__(self) -> None:
        require_choice("network.compute_dtype", self.compute_dtype, ("auto", "float32", "bfloat16"))
        require_choice("network.conv", self.conv, ("auto", "plain", "matmul"))


@dataclass(frozen=True)
class DevicesConfig:
    """Where things run."""

    gpu: Annotated[GpuOption, one_word(str, "auto|true|false|INDEX")] = "auto"
    """`auto`: a GPU if JAX has one, else CPU; `true`: a GPU or an error; `false`: the CPU; `0`, `1`...: that GPU."""
    data_parallel: Annotated[int | Literal["all"], one_word(parse_count, "N|all")] = 1
    """Devices that learn one session together, each with its share of the environments and of every minibatch."""
    actor: Annotated[GpuOption | Literal["learner"], one_word(str, "learner|auto|true|false|INDEX")] = "learner"
    """Device that acts: `learner` (the learner's own), or as `gpu`."""
    evaluator: Annotated[GpuOption | Literal["learner"], one_word(str, "learner|auto|true|false|INDEX")] = False
    """Device of the evaluations during training: `false` (the CPU), `learner`, or as `gpu`."""
    memory_fraction: float | None = None
    """Share of a GPU's memory that a process takes. None: JAX's 0.75, or 0.9 / n where n processes share a GPU."""
    distributed: bool = False
    """Several processes, also on several hosts, learn one session together: start the same command in each of them."""
    coordinator: str | None = None
    """HOST:PORT of process 0. None: as the cluster's environment says (SLURM, Open MPI, Kubernetes, TPU pods)."""
    num_processes: int | None = None
    """Processes in all. None: as the cluster's environment says."""
    process_index: int | None = None
    """This process, 0 .. num_processes - 1. None: as the cluster's environment says."""
    check: bool = False
    """Assert at every step that each array lies on the device where it belongs, and forbid implicit transfers."""

    def __post_init__(self) -> None:
        for name, words in (("gpu", ()), ("actor", ("learner",)), ("evaluator", ("learner",))):
            object.__setattr__(self, name, parse_gpu(getattr(self, name), f"devices.{name}", words))
        if self.memory_fraction is not None:
            require_number("devices.memory_fraction", self.memory_fraction, 0.01, 1.0)
        if self.data_parallel != "all":
            require_int("devices.data_parallel", self.data_parallel, 1, 4_096)


@dataclass(frozen=True)
class TrialConfig:
    """How the sessions of a trial are run."""

    parallel: int = 0
    """Sessions at a time, each in a process of its own. 0: one a GPU (or data_parallel GPUs), one on a CPU."""

    def __post_init__(self) -> None:
        require_int("trial.parallel", self.parallel, 0, 1_024)


@dataclass(frozen=True)
class LogConfig:
    """What is written, and how often."""

    every_env_steps: int = 10_000
    """Env steps between two log points."""
    checkpoint_every_env_steps: int = 250_000
    """Env steps between two checkpoints (one more is written at the end)."""
    graphs: bool = True
    """Draw the graphs of sessions and trial at every checkpoint."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    jsonl: bool = False
    """Write the log points as JSON lines too (metrics.jsonl)."""
    wandb: bool = False
    """Log to Weights & Biases too (pip install 'jaxrl_atari[wandb]'); WANDB_MODE=offline keeps it on this machine."""
    wandb_project: str = "jaxrl_atari"
    """Weights & Biases project."""

    def __post_init__(self) -> None:
        require_int("log.every_env_steps", self.every_env_steps, 1, 10**12)
        require_int("log.checkpoint_every_env_steps", self.checkpoint_every_env_steps, 1, 10**12)
        require(bool(self.wandb_project), "log.wandb_project", self.wandb_project, "the name of a project")


@dataclass(frozen=True)
class EvaluationConfig:
    """Full games played with a snapshot of the parameters while training goes on, on `devices.evaluator`."""

    every_env_steps: int = 0
    """Env steps between two evaluations. 0: none."""
    episodes: int = 16
    """Full games of an evaluation."""
    num_envs: int = 4
    """Games played at once."""
    greedy: bool = False
    """Take the most probable action instead of drawing one."""

    def __post_init__(self) -> None:
        require_int("evaluation.every_env_steps", self.every_env_steps, 0, 10**12)
        require_int("evaluation.episodes", self.episodes, 1, 1_000_000)
        require_int("evaluation.num_envs", self.num_envs, 1, 4_096)


@dataclass(frozen=True)
class Config:
    """One trial: `sessions` runs of the same spec, session i seeded with `seed + i`."""

    name: str = "atari"
    """Name of the run directory: OUTPUT_DIR/NAME_TIMESTAMP."""
    seed: int = 0
    """Everything random in session i derives from seed + i."""
    sessions: int = 1
    """Training runs of this trial."""
    total_env_steps: int = 10_000_000
    """Budget of a session in env steps (1 env step = 4 emulator frames)."""
    output_dir: str = "data"
    """Folder in which run directories are made."""
    overlap: Literal["none", "update"] = "none"
    """`none`: strictly on-policy, reproducible; `update`: acting goes on during the update, one update behind."""
    env: EnvConfig = field(default_factory=EnvConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    trial: TrialConfig = field(default_factory=TrialConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        require(
            bool(self.name) and not set(self.name) & set("/\\\0") and self.name not in (".", ".."),
            "name",
            self.name,
            "a plain file name",
        )
        require_int("seed", self.seed, 0, 2**31 - 1)
        require_int("sessions", self.sessions, 1, 10_000)
        require(
            self.seed + self.sessions <= 2**31, "seed", self.seed, "at most 2,147,483,648 - sessions", "lower the seed"
        )
        require_choice("overlap", self.overlap, ("none", "update"))
        # Several processes add up their env steps in acting: in each, that would come at another point of the update.
        require(
            self.overlap == "none" or not self.devices.distributed,
            "overlap",
            self.overlap,
            "none with devices.distributed",
            "leave one of the two out",
        )
        require_int("total_env_steps", self.total_env_steps, 1, 10**12)
        samples, minibatch = self.rollout_size, self.ppo.minibatch_size
        require(
            samples % minibatch == 0,
            "ppo.minibatch_size",
            minibatch,
            f"a divisor of the rollout's {self.ppo.rollout_length} x {self.env.num_envs} = {samples} samples",
            "change ppo.minibatch_size, ppo.rollout_length or env.num_envs",
        )
        devices = 1 if self.devices.data_parallel == "all" else self.devices.data_parallel
        require(
            self.env.num_envs % devices == 0 and minibatch % devices == 0,
            "devices.data_parallel",
            devices,
            f"a divisor of env.num_envs = {self.env.num_envs} and ppo.minibatch_size = {minibatch}",
        )
        require(
            self.env.num_groups == 0 or self.env.num_envs % self.env.num_groups == 0,
            "env.num_groups",
            self.env.num_groups,
            f"a divisor of env.num_envs = {self.env.num_envs}",
        )
        require(
            self.total_env_steps >= samples,
            "total_env_steps",
            self.total_env_steps,
            f"at least one rollout of {samples} env steps",
        )

    @property
    def rollout_size(self) -> int:
        """Samples of one rollout: T x B."""
        return self.ppo.rollout_length * self.env.num_envs

    @property
    def num_minibatches(self) -> int:
        """Gradient steps of one epoch."""
        return self.rollout_size // self.ppo.minibatch_size

    @property
    def gae_lambda(self) -> float:
        """The lambda in force: the one chosen, else the one tuned for the game."""
        chosen = self.ppo.gae_lambda
        return tuned_gae_lambda(self.env.game_name) if chosen is None else chosen

    def is_spent(self, env_steps: int) -> bool:
        """True once a further rollout would end farther from the budget than `env_steps` is."""
        return self.total_env_steps - env_steps < self.rollout_size / 2

    def to_dict(self) -> dict[str, Any]:
        """This config as nested dicts of JSON values."""
        return dataclasses.asdict(self)
