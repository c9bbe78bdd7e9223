"""The resources of a task on a Ray cluster: those that the user asks for, and the share of a machine that it gets.

A task is a session of a suite, or a trial of a search.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from jaxrl_atari.config import Config, DevicesConfig, Limits, check_fields
from jaxrl_atari.envs import user_threads
from jaxrl_atari.errors import UserError, require
from jaxrl_atari.hardware.gpus import visible_gpus
from jaxrl_atari.hardware.memory import memory_fraction
from jaxrl_atari.output import counted


@dataclass(frozen=True)
class ResourcesConfig:
    """Resources of each session of a suite, or of each trial of a search."""

    gpu: Annotated[float, Limits(0.0, 4_096.0)] = 1.0
    """GPUs of each: 0.5, 0.25, 0.125 for 2, 4, 8 on each GPU. With 0, or without a GPU, they run on the CPU."""
    cpu: Annotated[int, Limits(0, 4_096)] = 0
    """CPU cores of each. 0: an equal share where there are GPUs, 1 on a CPU."""

    def __post_init__(self) -> None:
        check_fields(self, "resources.")
        whole = self.gpu <= 1 or self.gpu == int(self.gpu)
        require(whole, "resources.gpu", self.gpu, "a share from 0 to 1, or a whole number of GPUs")


class MachineShare(NamedTuple):
    """The share of a machine that a task gets."""

    gpu: float  # GPUs; 0: the task runs on the CPU
    cpu: int  # cores

    def configure(self, config: Config) -> Config:
        """Returns a config that keeps within this share.

        Without a GPU, `devices.gpu` is false. With a part of one, such as 0.25, `devices.memory_fraction` leaves
        room for as many processes on the GPU, here 4; see `memory_fraction`. Each group of environments has as
        many emulator threads as the share has cores, unless the user has chosen `env.num_threads` or, on this
        machine, the variable `envs.THREADS_VARIABLE`.

        Raises:
            ConfigError: the share of the memory is too small, devices.memory_fraction exceeds it, or the variable
                has an unusable value.
        """
        if self.gpu:
            sharing = int(1 / min(self.gpu, 1))  # tasks on a GPU
            memory = min((gpu.memory for gpu in visible_gpus().gpus), default=0)
            fraction = memory_fraction(config.devices, sharing, memory, advice="raise resources.gpu")
            devices = replace(config.devices, memory_fraction=fraction)
        else:
            devices = replace(config.devices, gpu=False)
        threads = config.env.num_threads or user_threads() or self.cpu
        if config.env.backend == "gymnasium":  # it has no threads
            threads = 0
        env = replace(config.env, num_threads=threads)
        return replace(config, devices=devices, env=env)


def check_gpus(resources: ResourcesConfig, devices: DevicesConfig) -> None:
    """Checks that the GPUs of a task are enough for `devices.data_parallel`. Raises `ConfigError` if not.

    Ray shows a task only the GPUs of its own share.
    """
    if devices.data_parallel == "all":
        return
    needed = devices.data_parallel
    require(
        needed == 1 or resources.gpu >= needed,
        "resources.gpu",
        resources.gpu,
        expected=f"at least devices.data_parallel = {needed}, the number of GPUs on which each session learns",
    )


def allot(
    resources: ResourcesConfig, machines: Sequence[Mapping[str, float]], devices: DevicesConfig
) -> MachineShare:
    """Works out the share of a machine that each task gets.

    Args:
        resources: the resources that the user asks for.
        machines: the resources of each machine of the cluster: numbers of "GPU" and "CPU".
        devices: devices of the config.

    Raises:
        ConfigError: `devices` asks for a GPU, and the share has none; or `check_gpus`.
        UserError: a task needs more than any machine has.
    """
    owned = [(machine.get("GPU", 0.0), machine.get("CPU", 0.0)) for machine in machines]
    gpu = resources.gpu if devices.may_use_gpus and any(gpus for gpus, _ in owned) else 0.0
    cpu = max(resources.cpu, 1)
    require(
        devices.gpu is not True or gpu > 0,
        "devices.gpu",
        True,
        expected="a GPU on a machine of the Ray cluster, and resources.gpu above 0",
    )
    if gpu:
        check_gpus(resources, devices)
    fitting = [(gpus, cores) for gpus, cores in owned if gpus >= gpu and cores >= cpu]
    if not fitting:
        there = "; ".join(f"{counted(gpus, 'GPU')} and {counted(cores, 'core')}" for gpus, cores in owned)
        raise UserError(
            f"resources: expected a machine with {counted(gpu, 'GPU')} and {counted(cpu, 'core')}; found {there}"
        )
    equal_share = min(int(cores * gpu / gpus) for gpus, cores in fitting) if gpu else 1
    return MachineShare(gpu, resources.cpu or max(equal_share, 1))
