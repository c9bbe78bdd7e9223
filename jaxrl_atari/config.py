"""The options of a run: frozen dataclasses, which a `Config` validates when it is made.

Each option is declared once: its name, type (`Literal` lists the choices), range and default, and a docstring that
is its help text. Below the options of a class stand the checks of values that contradict each other. The fields
hold what the user wrote; whatever is derived from them is a property. The defaults are the PPO-Atari spec that SLM
Lab has published, with a lambda for each game: "the published spec". configs/dialects/ has those of the paper
(Schulman et al. 2017), CleanRL and stable-baselines3.
"""

import contextlib
import dataclasses
import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from jaxrl_atari.envs.games import game_of_id, game_under, parse_game
from jaxrl_atari.envs.protocols import PROTOCOLS, Rules, protocol_text
from jaxrl_atari.errors import UserError, did_you_mean, require

TRACED = "enters the compiled update as data: a new value compiles nothing"
"""Marks the options that `update.update` takes as numbers. Every other option of PPO is compiled in."""


class Limits(NamedTuple):
    """The values that a numeric option may have, both ends included: `Annotated[int, Limits(1, 16)]`."""

    low: float = -math.inf
    high: float = math.inf


UNLIMITED = Limits()
PositiveInt = Annotated[int, Limits(1)]
NonNegativeInt = Annotated[int, Limits(0)]
CheckpointChoice = Literal["best", "latest"] | NonNegativeInt
"""A checkpoint as the user chooses it: a number is that of env steps."""
Fraction = Annotated[float, Limits(0.0, 1.0)]
NonNegativeFloat = Annotated[float, Limits(0.0)]
PositiveFloat = Annotated[float, Limits(1e-6)]

GpuOption = bool | NonNegativeInt | Literal["auto"]
"""`auto`, `true`, `false` or the index of a GPU; see `hardware.choice.choose_device`."""

GpuOrLearner = bool | NonNegativeInt | Literal["auto", "learner"]
"""A `GpuOption`, or `learner`: the learner's own device."""


@dataclass(frozen=True)
class EnvConfig:
    """The game, its protocol, and the environments that play it.

    A protocol is a named set of rules (`envs/protocols.py`). An option with the name of a rule overrides it; None
    keeps the protocol's value.
    """

    game: str = "Qbert"
    """Any ALE game, in any spelling: Qbert, ms_pacman, ALE/Qbert-v5, QbertNoFrameskip-v4 (classic). With the back
    end `gymnasium`, the id of an environment: MiniGrid-Empty-5x5-v0, ALE/Qbert-v5, my_package:MyEnv-v0."""
    backend: Literal["ale", "envpool", "gymnasium"] = "ale"
    """Emulator pool: `ale` (ale-py's AtariVectorEnv), `envpool` (pip install 'jaxrl_atari[envpool]') or
    `gymnasium` (any environment with discrete actions and pictures; pip install 'jaxrl_atari[gymnasium]')."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of a Gymnasium environment, such as '{"mode": 12, "difficulty": 1}'. Only `gymnasium`."""
    image_key: str | None = None
    """Key of the picture where observations are dictionaries. Only `gymnasium`."""
    wrapper: str | None = None
    """A wrapper that your own code has registered (docs/environments.md). Learning sees its rewards and pictures;
    scores are sums of the environment's own rewards. Only `gymnasium`."""
    vectorization_mode: Literal["sync", "async"] = "sync"
    """`sync`: the environments step one after the other; `async`: each has a process of its own, for environments
    that take longer than a message does. Only `gymnasium`."""
    protocol: Literal["auto", "v5", "classic", "machado"] = "auto"
    """`v5`: sticky actions 0.25; `classic`: NoFrameskip-v4, no sticky actions; `machado`: as Machado et al. 2018
    recommend; `auto`: as the game's name implies, else v5."""
    sticky_actions: Fraction | None = None
    """Probability that an emulator frame repeats the action of the frame before."""
    full_action_space: bool | None = None
    """All 18 actions instead of the game's minimal action set."""
    life_loss_terminal: bool | None = None
    """A lost life is a terminal for learning; the game continues."""
    noop_max: NonNegativeInt | None = None
    """Upper limit for the random number of no-ops at the start of a game."""
    fire_on_reset: bool | None = None
    """Press FIRE at the start of a game, if it is in the action set."""
    max_frames: Annotated[int, Limits(8)] | None = None
    """Emulator frames after which a game is truncated (108,000 frames = 30 minutes of play)."""
    clip_rewards: bool | None = None
    """Clip rewards to [-1, 1] for learning. Scores are always sums of raw rewards."""
    num_envs: PositiveInt = 16
    """Environments stepped in parallel (B)."""
    num_groups: NonNegativeInt = 0
    """Groups of environments on each of the learner's devices. They alternate: one steps while the policy acts for
    another. 0: one. Two can be faster on a GPU with more environments than cores."""
    num_threads: NonNegativeInt = 0
    """Emulator threads of each group of environments. 0: one per core. `gymnasium` has none."""
    anchor_steps: NonNegativeInt = 0
    """Steps of an environment after which its next game starts from a seed of its own, so that a resumed session
    can play it again from there. 0: 15,625, and more with 32 or more environments. Only `ale`."""

    @property
    def game_name(self) -> str:
        """ALE's name of the game, such as `MsPacman`; for a Gymnasium environment, its id without a module."""
        return self.game.rpartition(":")[2] if self.backend == "gymnasium" else parse_game(self.game)[0]

    @property
    def atari_game(self) -> str | None:
        """ALE's name of the game, with any back end; None for an environment that is no game of ALE."""
        return game_of_id(self.game_name) if self.backend == "gymnasium" else self.game_name

    @property
    def protocol_name(self) -> str:
        """The name of the chosen protocol; if none is chosen, the one that the game's name implies, or v5."""
        if self.atari_game is None:
            return "gymnasium"
        return self.protocol if self.protocol != "auto" else parse_game(self.game.rpartition(":")[2])[1] or "v5"

    @property
    def rules(self) -> Rules:
        """The rules in force: the protocol's, unless an option overrides them."""
        return PROTOCOLS[self.protocol_name]._replace(**self.chosen_rules)

    @property
    def chosen_rules(self) -> dict[str, Any]:
        """The rules that options override: name -> value."""
        values = {name: getattr(self, name) for name in Rules._fields}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def time_limit(self) -> str:
        """The limit that cuts games off, as messages name it."""
        return "env.max_frames" if self.rules.max_frames else "the environment's time limit"

    @property
    def resolved_protocol(self) -> str:
        """The protocol in force as text: its name, and the rules that differ from it (`protocol_text`).

        With the back end `gymnasium`, the text also has the options of the environment and the key of its image.
        """
        settings: dict[str, Any] = {}
        if self.backend == "gymnasium":
            if self.atari_game is not None:
                settings["backend"] = self.backend
            chosen = {name: getattr(self, name) for name in ("image_key", "wrapper", "options")}
            settings |= {name: value for name, value in chosen.items() if value}
        return protocol_text(self.protocol_name, self.rules, settings)

    def check(self) -> None:
        """Raises `ConfigError` for values that contradict each other."""
        if self.backend == "gymnasium":
            self._check_gymnasium()
        else:
            for name in ("options", "image_key", "wrapper"):
                value = getattr(self, name)
                expected = f"nothing with env.backend = {self.backend}"
                require(not value, f"env.{name}", value, expected, "add --env.backend gymnasium")
        frames = self.rules.max_frames
        require(frames % 4 == 0, "env.max_frames", frames, "a multiple of 4 (an env step)")
        require(
            self.backend != "envpool" or self.rules.noop_max > 0,  # it would draw from an empty range and hang
            "env.noop_max",
            self.rules.noop_max,
            expected="at least 1 with env.backend = envpool",
            hint="ale can start with 0",
        )

    def _check_gymnasium(self) -> None:
        # Gymnasium and its packages import modules that a string names, and a stored run may have such options.
        text = json.dumps(self.options, separators=(",", " "))  # so a colon is one of a string
        expected = "strings without a colon, which may name a module"
        hint = "register an environment of your own that sets the others"
        require(":" not in text, "env.options", self.options, expected, hint)
        if self.atari_game is None:  # it is played as it is registered, except for the clipping of rewards
            expected = f"nothing with {self.game_name}, which is played as it is registered"
            require(self.protocol == "auto", "env.protocol", self.protocol, expected)
            for name, value in self.chosen_rules.items():
                require(name == "clip_rewards", f"env.{name}", value, expected)


@dataclass(frozen=True)
class PPOConfig:
    """Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347)."""

    rollout_length: PositiveInt = 128
    """Env steps per environment between two updates (T)."""
    epochs: PositiveInt = 4
    """Passes over each rollout."""
    minibatch_size: PositiveInt = 256
    """Samples per gradient step, over all devices."""
    learning_rate: Annotated[Fraction, TRACED] = 2.5e-4
    """Adam's step size; with anneal_learning_rate, that of the first update."""
    anneal_learning_rate: bool = True
    """The learning rate falls linearly to zero at total_env_steps, changing once per update."""
    adam_epsilon: NonNegativeFloat = 1e-5
    """Adam's epsilon."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of all parameters, biases included (AdamW). The published spec does not set it, so
    PyTorch's default, 0.01, applies there; 0 gives Adam."""
    gamma: Annotated[Fraction, TRACED] = 0.99
    """Discount per env step."""
    gae_lambda: Annotated[Fraction | None, TRACED] = None
    """Lambda of generalised advantage estimation. None: under `classic` 0.95, that of most references; else the
    value that SLM Lab tuned for the game under `v5`, or 0.95."""
    clip_epsilon: Annotated[PositiveFloat, TRACED] = 0.1
    """Clip range of the probability ratio and of the value."""
    entropy_coef: Annotated[NonNegativeFloat, TRACED] = 0.01
    """Weight of the entropy bonus; with entropy_coef_end, that of the first update."""
    entropy_coef_end: Annotated[NonNegativeFloat | None, TRACED] = None
    """Weight of the entropy bonus at total_env_steps: it changes linearly, once per update. None: entropy_coef."""
    value_coef: Annotated[NonNegativeFloat, TRACED] = 0.5
    """Weight of the value loss."""
    max_grad_norm: PositiveFloat = 0.5
    """Gradients are scaled down to this global norm."""
    anneal_clip_epsilon: bool = False
    """The clip range falls linearly to zero at total_env_steps, as the learning rate does."""
    normalize_advantages: bool = True
    """Scale the advantages of each minibatch to mean 0 and standard deviation 1."""
    unbiased_std: bool = False
    """normalize_advantages uses the unbiased standard deviation, with N - 1 instead of N (PyTorch's default)."""
    clip_value_loss: bool = True
    """Clip the change of the value by clip_epsilon in the value loss."""
    truncation_is_terminal: bool = False
    """A game that is cut off counts as lost: no value beyond its last step."""
    learn_from_auto_resets: bool = False
    """Learn from auto-reset steps too, although the emulator ignores their actions."""
    minibatches: Literal["stratified", "uniform"] = "stratified"
    """`stratified`: each minibatch has equally many samples of each environment, if their number divides the
    minibatch size, else of each block of environments. `uniform`: any samples, which needs a single device. With a
    recurrent network, both draw environments, and a minibatch has all steps of each."""
    target_kl: NonNegativeFloat | None = None
    """An update ends after the first epoch whose mean approx_kl exceeds this. None: it runs all epochs.
    CleanRL asks the last minibatch of an epoch instead; SB3 stops within an epoch, at 1.5 times the value."""
    coefficients: Annotated[dict[str, float], TRACED] = field(default_factory=dict, hash=False)
    """Coefficients of the algorithm, such as '{"intrinsic_reward": 0.1}' with `rnd`. Those left out have the
    defaults of the algorithm (docs/idea.md)."""


TRACED_OPTIONS = tuple(option.name for option in dataclasses.fields(PPOConfig) if TRACED in get_args(option.type))
"""The options of PPO that are marked `TRACED`, such as `learning_rate`."""


@dataclass(frozen=True)
class NetworkConfig:
    """The actor-critic."""

    name: str = "nature"
    """The network: `nature` (Mnih et al. 2015), `impala` (Espeholt et al. 2018), `nature_lstm` (`nature` with an
    LSTM of 256 units), or one that your own code has registered (docs/idea.md)."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the torso; parameters, heads and losses are always float32. On a CPU with AVX512-BF16,
    `bfloat16` is faster, and the start of a session says by how much. On a GPU from Ampere on, `float32`
    convolutions compute in TF32."""
    conv: Literal["auto", "plain"] = "auto"
    """How convolutions and their gradients are computed: `plain` (by XLA, with cuDNN on a GPU), or `auto`: in the
    ways of `cpu/` where only CPUs learn and act, else as `plain`. Results agree up to rounding."""


@dataclass(frozen=True)
class DevicesConfig:
    """Devices of the learner, the actor and the evaluator."""

    gpu: GpuOption = "auto"
    """`auto`: an NVIDIA GPU if JAX has one, else the CPU; `true`: a GPU, or an error; `false`: the CPU; `0`, `1`,
    ...: exactly that GPU."""
    data_parallel: PositiveInt | Literal["all"] = 1
    """Devices that learn together in one session, each with a share of the environments and minibatches."""
    actor: GpuOrLearner = "learner"
    """Device that acts: `learner` (the learner's own), or as `gpu`."""
    evaluator: GpuOrLearner = False
    """Device of the evaluations during training: `false` (the CPU), `learner`, or as `gpu`."""
    memory_fraction: Annotated[float, Limits(0.01, 1.0)] | None = None
    """Fraction of a GPU's memory that a process reserves. None: 0.75, or at most 0.9 / N if N share the GPU."""
    deterministic: bool = False
    """Every run with the same seed, GPU and software gives the same bits: XLA uses deterministic kernels only and
    picks them without timing. Slower. A CPU needs no such option."""
    distributed: bool = False
    """Several processes learn together in one session, on one host or more. Start the same command in each."""
    coordinator: str | None = None
    """HOST:PORT of process 0. None: from the cluster's environment (SLURM, Open MPI, Kubernetes)."""
    num_processes: PositiveInt | None = None
    """Number of processes. None: from the cluster's environment."""
    process_index: NonNegativeInt | None = None
    """Index of this process, 0 .. num_processes - 1. None: from the cluster's environment."""
    check: bool = False
    """Assert that arrays are on the intended devices: at each policy step the parameters and the rollout so far,
    at each update the train state and the rollout. Forbid implicit transfers during training (except of frames
    and actions)."""

    @property
    def may_use_gpus(self) -> bool:
        """False with `gpu = false`: nothing runs on a GPU, and nothing asks the machine for its GPUs."""
        return self.gpu is not False


@dataclass(frozen=True)
class TrialConfig:
    """How the sessions of a trial are run."""

    parallel: NonNegativeInt = 0
    """Sessions at a time, each in its own process. 0: one per GPU (or per data_parallel GPUs), one on a CPU."""


@dataclass(frozen=True)
class LogConfig:
    """Log points, checkpoints and log back ends."""

    every_env_steps: PositiveInt | None = None
    """Env steps between two log points. None: a hundredth of the budget, at most 10,000."""
    checkpoint_every_env_steps: PositiveInt = 250_000
    """Env steps between two checkpoints (the end of training writes one more)."""
    keep_checkpoints: NonNegativeInt = 2
    """The latest checkpoints to keep, besides the best. 0: all."""
    stop_at_return: float | None = None
    """Mean return of the last 100 games, once as many have finished, at which a session ends as if its budget were
    spent. None: it goes on."""
    stop_after_hours: NonNegativeFloat | None = None
    """Hours of training (`wall_seconds`) after which a session ends in the same way. None: it goes on."""
    graphs: bool = True
    """Draw graphs and write report.html at the end. `plots` and `report` do so at any time."""
    tensorboard: bool = True
    """Write TensorBoard event files. Their viewer is an extra: pip install 'jaxrl_atari[tensorboard]'."""
    actions: bool = True
    """Log seeds and actions (3 to 5 MB per 10M env steps), so that `verify` can recompute every score. Only
    `ale` has them."""
    wandb: bool = False
    """Also log to Weights & Biases (pip install 'jaxrl_atari[wandb]'). With WANDB_MODE=offline, the log stays on
    this machine."""
    wandb_project: str = "jaxrl_atari"
    """Weights & Biases project."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Full games played during training with a snapshot of the parameters, on `devices.evaluator`."""

    every_env_steps: NonNegativeInt = 0
    """Env steps between two evaluations. 0: no evaluations."""
    episodes: PositiveInt = 16
    """Full games per evaluation."""
    num_envs: PositiveInt = 4
    """Games played at once."""
    greedy: bool = False
    """Take the most probable action instead of sampling one."""


@dataclass(frozen=True)
class Config:
    """One trial: `sessions` training runs with the same options, session i seeded with `seed + i`."""

    name: str = "atari"
    """Name of the run directory: OUTPUT_DIR/NAME_TIMESTAMP."""
    seed: Annotated[int, Limits(0, 2**31 - 1)] = 0
    """Everything random in session i derives from seed + i."""
    sessions: PositiveInt = 1
    """Training runs in this trial."""
    total_env_steps: PositiveInt = 10_000_000
    """Budget of a session in env steps (1 env step = 4 emulator frames)."""
    output_dir: str = "data"
    """Parent folder of the run directories."""
    algorithm: str = "ppo"
    """What is learned from a rollout: `ppo`, `rnd` (with an intrinsic reward), `vtrace` (another estimator of
    advantages), or an algorithm that your own code has registered (docs/idea.md)."""
    init_from: str | None = None
    """Parameters that new sessions start from, as far as their names and shapes fit: the directory of a run or a
    session, or an .npz file (docs/train.md). None: random ones."""
    init_checkpoint: CheckpointChoice = "best"
    """Checkpoint of the run that init_from names: `best`, `latest` or its env steps."""
    init_digest: str | None = None
    """Digest of the parameters of init_from; a session refuses others. None: the run fills it in."""
    overlap: Literal["none", "update"] = "none"
    """`none`: strictly on-policy; `update`: acting continues during the update, with parameters one update old."""
    env: EnvConfig = field(default_factory=EnvConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    trial: TrialConfig = field(default_factory=TrialConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        self.env.check()
        is_name = Path(self.name).name == self.name and self.name not in ("", "..") and self.name.isprintable()
        require(is_name, "name", self.name, "a plain file name")
        if self.devices.distributed:
            # Processes sum their env steps while acting; with overlap, each would at another point of the update.
            require(self.overlap == "none", "overlap", self.overlap, "none with devices.distributed")
            parallel = self.trial.parallel
            require(parallel <= 1, "trial.parallel", parallel, "0 or 1 with devices.distributed")

    def check_sizes(self, devices: int) -> None:
        """Raises `ConfigError` unless budget, rollout and minibatches fit together, and split over the devices.

        It is called where a training begins: a config file may have sizes that only fit those of the command line.
        """
        rollout = f"at least one rollout of {self.rollout_size} env steps"
        require(self.total_env_steps >= self.rollout_size, "total_env_steps", self.total_env_steps, rollout)
        length = self.ppo.rollout_length
        envs = self.env.num_envs
        minibatch = self.ppo.minibatch_size
        require(
            minibatch > 1 or not self.ppo.normalize_advantages,
            "ppo.minibatch_size",
            minibatch,
            expected="at least 2 with ppo.normalize_advantages",
            hint="normalised, the advantage of a single sample is always 0",
        )
        require(
            self.rollout_size % minibatch == 0,
            "ppo.minibatch_size",
            minibatch,
            expected=f"a divisor of the rollout's {length} x {envs} = {self.rollout_size} samples",
        )
        require(
            envs % devices == 0 and minibatch % devices == 0,
            "devices.data_parallel",
            devices,
            expected=f"a divisor of env.num_envs = {envs} and ppo.minibatch_size = {minibatch}",
        )
        require(
            envs // devices % (self.env.num_groups or 1) == 0,
            "env.num_groups",
            self.env.num_groups,
            expected=f"a divisor of the {envs // devices} environments of each device",
        )
        require(
            devices == 1 or self.ppo.minibatches == "stratified",
            "ppo.minibatches",
            self.ppo.minibatches,
            expected=f"stratified on {devices} devices",
            hint="several devices draw what one would only if each has its share of every minibatch",
        )

    @property
    def rollout_size(self) -> int:
        """Samples per rollout: T x B."""
        return self.ppo.rollout_length * self.env.num_envs

    @property
    def unrecorded_reason(self) -> str:
        """Why games are not recorded; empty if they are: they continue after a resume, and can be played again."""
        if self.env.backend != "ale":
            return f"the back end {self.env.backend} records no games"
        return "games are not recorded with devices.distributed" if self.devices.distributed else ""

    @property
    def resume_note(self) -> str:
        """What a resume lacks if games are not recorded; empty if they are."""
        if not self.unrecorded_reason:
            return ""
        return f"new games at each resume, and no log of actions for `verify`: {self.unrecorded_reason}"

    @property
    def num_minibatches(self) -> int:
        """Gradient steps per epoch."""
        return self.rollout_size // self.ppo.minibatch_size

    @property
    def resolved_gae_lambda(self) -> float:
        """The lambda in force: the chosen one, or the default of the game under its protocol."""
        chosen = self.ppo.gae_lambda
        game = self.env.atari_game or self.env.game_name
        return game_under(game, self.env.protocol_name).gae_lambda if chosen is None else chosen

    @property
    def log_interval(self) -> int:
        """Env steps between two log points."""
        return self.log.every_env_steps or min(max(self.total_env_steps // 100, 1), 10_000)

    def is_spent(self, env_steps: float) -> bool:
        """True once `env_steps` is closer to the budget than the end of another rollout would be."""
        return self.total_env_steps - env_steps < self.rollout_size / 2

    def to_dict(self) -> dict[str, Any]:
        """This config as nested dicts of JSON values."""
        return dataclasses.asdict(self)


# --- Configs as dictionaries -------------------------------------------------------------------------------------

DICTIONARIES = {"env.options", "ppo.coefficients"}
"""Fields that are dictionaries, whose keys are not fixed."""


def config_from_dict(values: dict[str, Any], kind: Any = Config, prefix: str = "") -> Any:
    """The inverse of `Config.to_dict`. Raises `UserError` for a field that this version does not have."""
    kinds = {option.name: option.type for option in dataclasses.fields(kind)}
    for name in values.keys() - kinds:
        raise UserError(
            f"{prefix}{name}: this version of jaxrl_atari has no such field; use the version that saved it"
        )
    nested = {
        name: config_from_dict(value, kinds[name], f"{prefix}{name}.")
        for name, value in values.items()
        if isinstance(value, dict) and dataclasses.is_dataclass(kinds[name])
    }
    return kind(**values | nested)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict as one with dotted names: `{"ppo.gamma": 0.99, ...}`."""
    items: dict[str, Any] = {}
    for name, value in values.items():
        if value and isinstance(value, dict):
            items |= flat(value, f"{prefix}{name}.")
        else:
            items[f"{prefix}{name}"] = value
    return items


def changed_fields(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The fields in which two nested dicts of JSON values differ: dotted name -> (before, after).

    A field that one of them lacks is None there. An empty dict counts as absent. `devices.gpu = false` differs
    from `devices.gpu = 0`, although Python's `False` equals 0.
    """
    old = flat(before)
    new = flat(after)
    pairs = {name: (old.get(name), new.get(name)) for name in old | new}
    return {name: (was, now) for name, (was, now) in pairs.items() if _json(was) != _json(now)}


def _json(value: Any) -> str:
    return json.dumps(None if value == {} else value)


def set_fields(config: Config, fields: Mapping[str, Any]) -> Config:
    """Returns a config in which fields have other values.

    Args:
        config: the config.
        fields: dotted name -> value, with `ppo.coefficients.NAME` for a coefficient. All are replaced at once.

    Raises:
        ConfigError: a name that is no field; a value, or a combination of values, that the config does not accept.
    """
    values = config.to_dict()
    known = {*flat(values), *DICTIONARIES}
    for name, value in fields.items():
        is_field = name in known or name.rpartition(".")[0] in DICTIONARIES
        require(is_field, name, value, "a field of the config", did_you_mean(name, known))
        *parents, leaf = name.split(".")
        parent = values
        for each in parents:
            parent = parent[each]
        parent[leaf] = "none" if name == "overlap" and value is None else value
    return config_from_dict(values)


def can_vary(name: str) -> bool:
    """Whether a field may differ between the settings of a sweep or the trials of a search, if there is one.

    A coefficient, `ppo.coefficients.NAME`, may.
    """
    fixed = {
        "name", "seed", "sessions", "total_env_steps", "output_dir", "env.game", "env.protocol", "env.options",
        "env.image_key", "ppo.coefficients", "init_checkpoint", "init_digest",
    }  # fmt: skip
    return name not in fixed and not name.startswith(("devices.", "trial.", "evaluation.", "log.", "env.options."))


def parse_value(text: str) -> bool | int | float | str | None:
    """The value of a word: true, false, none, a number or the word itself. `16`, `1_000` and `1e6` are whole."""
    with contextlib.suppress(ValueError):
        number = float(text)
        return int(number) if number.is_integer() else number
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def value_text(value: Any) -> str:
    """A value as `parse_value` reads it: `0.0001`, `true`, `none`."""
    return str(value).lower() if isinstance(value, bool | None) else str(value)


# --- Checks ------------------------------------------------------------------------------------------------------


def check_fields(options: Any, prefix: str = "") -> None:
    """Checks every field of a dataclass, and of those in it, against its annotation: type, choices and `Limits`.

    A whole number becomes a float where the field is one.

    Args:
        prefix: stands before the fields' names in errors, such as `ppo.`, or `--` for options of a command.

    Raises:
        ConfigError: the first field whose value does not fit.
    """
    for name, annotation in get_type_hints(type(options), include_extras=True).items():
        kinds = alternatives(annotation)
        shown = f"--{name.replace('_', '-')}" if prefix == "--" else f"{prefix}{name}"
        value = getattr(options, name)
        fits = any(_fits(value, *each) for each in kinds)
        require(fits, shown, value, " or ".join(_description(*each) for each in kinds))
        if type(value) is int and float in [kind for kind, _ in kinds]:
            value = float(value)
        object.__setattr__(options, name, value)
        if dataclasses.is_dataclass(value):
            check_fields(value, f"{shown}.")


def alternatives(annotation: Any, limits: Limits = UNLIMITED) -> list[tuple[Any, Limits]]:
    """The types that an annotation allows, such as int and None, each with its limits."""
    parts = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return alternatives(parts[0], *(mark for mark in parts if isinstance(mark, Limits)))
    if get_origin(annotation) in (Union, types.UnionType):
        return [each for part in parts for each in alternatives(part)]
    return [(annotation, limits)]


def _fits(value: Any, kind: Any, limits: Limits) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind in (int, float):
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        return is_number and math.isfinite(value) and limits.low <= value <= limits.high
    return isinstance(value, get_origin(kind) or kind)


def _description(kind: Any, limits: Limits) -> str:
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    within = ""
    if limits.high < math.inf:
        within = f" from {limits.low:,} to {limits.high:,}"
    elif limits.low > -math.inf:
        within = f" of at least {limits.low:,}"
    words = {
        int: f"a whole number{within}",
        float: f"a number{within}",
        bool: "true or false",
        str: "text",
        type(None): "None",
    }
    return words.get(kind, f"a value of type {getattr(kind, '__name__', kind)}")
