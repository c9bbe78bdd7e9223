"""Devices: the `gpu` option -> JAX devices, sessions over GPUs, one session over several GPUs.

    python -m jaxrl_atari.devices [--config configs/qbert.py]

reports the devices of this machine, the one that each `gpu` option picks, and problems.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

from jaxrl_atari.cli.errors import ConfigError, UserError
from jaxrl_atari.config import DevicesConfig, GpuOption
from jaxrl_atari.hardware import gpus
from jaxrl_atari.hardware.memory import is_out_of_memory
from jaxrl_atari.hardware.memory_share import apply_memory_fraction
from jaxrl_atari.hardware.runtime import jax_has_started, use_deterministic_kernels
from jaxrl_atari.ppo import Shard


class Choice(NamedTuple):
    """A device and why it was picked."""

    device: jax.Device
    reason: str


class Placement(NamedTuple):
    """Which device does what in a session."""

    learner: tuple[jax.Device, ...]  # of all processes
    actors: tuple[jax.Device, ...]  # for each of this process's learner devices, the one that acts for it
    evaluator: jax.Device
    reason: str

    @property
    def home(self) -> jax.Device:
        """The learner's first device in this process."""
        return next(d for d in self.learner if d.process_index == jax.process_index())


# --- Before JAX starts -------------------------------------------------------------------------------------------

_limited_to: tuple[int, ...] | None = None  # indices of the GPUs, if `limit_jax` has limited JAX to some


def limit_jax(config: DevicesConfig) -> None:
    """Limits JAX to the devices that a session uses: the other GPUs get no context and no array.

    Also sets the memory fraction and the flags of `devices.deterministic`. Call before JAX starts its back end;
    afterwards JAX keeps the devices that it has.
    """
    global _limited_to
    apply_memory_fraction(config)
    if config.deterministic:
        use_deterministic_kernels()
    if jax_has_started():
        return
    if config.gpu is False and gpus.simulated_count() is None:
        forbid_gpu("devices.gpu = false")  # without a call of the CUDA driver
        return
    shown, problem = gpus.visible()
    used = _used_gpus(config, len(shown))
    if used and used[-1] >= len(shown):
        return  # `place` refuses it
    if gpus.simulated_count() is not None:
        _limited_to = used
        jax.config.update("jax_num_cpu_devices", len(used) + 1)
    elif not used:
        forbid_gpu(problem)
    elif len(used) < len(shown) and jax.config.read("jax_cuda_visible_devices") == "all":
        # Not CUDA_VISIBLE_DEVICES, which the CUDA driver has already read in this process.
        _limited_to = used
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, used)))


def _used_gpus(config: DevicesConfig, count: int) -> tuple[int, ...]:
    """Indices of the GPUs that a session uses of `count` visible ones; an index may be beyond them."""
    if config.distributed:  # learner devices are counted over all processes
        return () if config.gpu is False else tuple(range(count))
    first = _index(config.gpu, count)
    used = {_index(config.actor, count), _index(config.evaluator, count), first}
    if first is not None:
        used |= set(range(first, count if config.data_parallel == "all" else first + config.data_parallel))
    return tuple(sorted(index for index in used if index is not None))


def _index(option: GpuOption | Literal["learner"], count: int) -> int | None:
    """The index that an option means, None for no GPU of its own."""
    if option == "learner" or option is False or (option == "auto" and count == 0):
        return None
    return 0 if option == "auto" else int(option) - (option is True)


def forbid_gpu(reason: str = "") -> None:
    """Keeps JAX off the GPUs: no back end starts there and no memory is taken. Call before JAX starts its back end."""
    gpus.forbidden_because = gpus.forbidden_because or reason
    jax.config.update("jax_platforms", "cpu")


# --- The `gpu` option ----------------------------------------------------------------------------------------------


def visible_gpus() -> list[jax.Device]:
    """The GPUs that JAX sees (those that CUDA_VISIBLE_DEVICES leaves), by index. Starts JAX's back end."""
    return list(_visible_gpus()[0].values())


def _visible_gpus() -> tuple[dict[int, jax.Device], str]:
    """Index -> GPU, over all processes; where there are none, why.

    Raises:
        UserError: a GPU has too little free memory for JAX to start.
    """
    shown, problem = gpus.visible()
    if gpus.simulated_count() is not None:
        return _by_index(_simulated_gpus(len(shown))), problem
    if not shown:
        forbid_gpu(problem)
        return {}, gpus.forbidden_because
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms and "cpu" not in platforms.split(",") and not jax_has_started():
        jax.config.update("jax_platforms", f"{platforms},cpu")  # first parameters are computed on the CPU
    with _plugin_failures() as failures:
        try:
            return _by_index(jax.devices("gpu")), ""
        except RuntimeError as error:  # raised if JAX has no such back end, or if it cannot be started
            text = " ".join(failures or [" ".join(str(error).split())])
            if is_out_of_memory(text):
                raise UserError(
                    f"JAX cannot start on the GPU ({text[:160]}): other processes hold its memory; wait for them, lower"
                    " their devices.memory_fraction, or choose another GPU with devices.gpu"
                ) from error
            forbid_gpu(f"JAX cannot start on a GPU: {text}")
            return {}, gpus.forbidden_because


def _by_index(devices: Sequence[jax.Device]) -> dict[int, jax.Device]:
    indices = _limited_to if _limited_to and len(_limited_to) == len(devices) else range(len(devices))
    return dict(zip(indices, devices, strict=True))


@contextlib.contextmanager
def _plugin_failures() -> Iterator[list[str]]:
    """Collects why JAX could not load a plugin; JAX would log a traceback."""
    logger, failures = logging.getLogger("jax._src.xla_bridge"), []

    def keep(record: logging.LogRecord) -> bool:
        if record.exc_info:
            failures.append(" ".join(f"{record.exc_info[1]}".split()))
        return not record.exc_info

    logger.addFilter(keep)
    try:
        yield failures
    finally:
        logger.removeFilter(keep)


def _simulated_gpus(count: int) -> list[jax.Device]:
    """CPU devices that stand in for GPUs: all but the first one of each process, which stays the CPU."""
    if count == 0:
        return []
    count = count if _limited_to is None else len(_limited_to)
    with contextlib.suppress(RuntimeError):  # the back end has started: it has the devices it has
        jax.config.update("jax_num_cpu_devices", count + 1)
    if (here := len(jax.local_devices(backend="cpu"))) <= count:
        raise UserError(f"{gpus.SIMULATED}: JAX started with {here} CPU devices; {count + 1} are needed")
    devices = jax.devices("cpu")
    processes = sorted({device.process_index for device in devices})
    return [device for p in processes for device in [d for d in devices if d.process_index == p][1 : count + 1]]


def pick_device(gpu: GpuOption, here: bool = False) -> Choice:
    """The device that a `gpu` option means.

    | gpu | device |
    |---|---|
    | "auto" | the first GPU if JAX has one, else the CPU |
    | True | the first GPU, or an error |
    | False | the CPU, even where a GPU is |
    | 0, 1, ... | exactly that GPU, or an error |

    Args:
        here: count the GPUs of this process alone, if there are several processes.

    Raises:
        ConfigError: no such GPU; the message names what is visible.
    """
    if gpu is False:
        forbid_gpu("devices.gpu = false")
        return Choice(jax.devices("cpu")[0], "devices.gpu = false")
    devices, problem = _visible_gpus()
    if here and jax.distributed.is_initialized():
        devices = dict(enumerate(d for d in devices.values() if d.process_index == jax.process_index()))
    if gpu == "auto" and not devices:
        return Choice(jax.devices("cpu")[0], f"devices.gpu = auto, and there is no GPU: {problem}")
    index = min(devices, default=0) if gpu == "auto" or gpu is True else gpu
    if index not in devices:
        if _limited_to and index < len(gpus.visible().gpus):
            raise ConfigError(
                "devices.gpu", gpu, f"GPU {', '.join(map(str, devices))}, to which JAX was limited when it started",
                "use another GPU in a fresh process",
            )  # fmt: skip
        raise gpus.no_such_gpu(gpu, [d.device_kind for d in devices.values()], problem)
    reason = "devices.gpu = auto, and there is a GPU" if gpu == "auto" else f"devices.gpu = {str(gpu).lower()}"
    return Choice(devices[index], reason + _if_simulated())


def _if_simulated() -> str:
    return "" if gpus.simulated_count() is None else ", simulated by a CPU device"


def place(config: DevicesConfig) -> Placement:
    """The devices of a session; starts JAX's back end.

    Raises:
        ConfigError: a device that is not there.
    """
    choice = pick_device(config.gpu)
    # Several devices: those from the chosen one on.
    peers = [choice.device]
    if config.data_parallel != 1:
        gpus_here = visible_gpus() if config.gpu is not False else []
        everywhere = gpus_here if choice.device in gpus_here else jax.devices(choice.device.platform)
        peers = everywhere[everywhere.index(choice.device) :]
    count = len(peers) if config.data_parallel == "all" else config.data_parallel
    if count > len(peers):
        raise ConfigError("devices.data_parallel", count, f"at most {len(peers)}, the devices from {choice.device} on")
    learner = tuple(peers[:count])
    if len({d.process_index for d in learner}) < jax.process_count():
        raise ConfigError(
            "devices.data_parallel", config.data_parallel, f"all, or enough for the {jax.process_count()} processes of"
            " devices.distributed: each has at least one device of its own",
        )  # fmt: skip
    local = tuple(d for d in learner if d.process_index == jax.process_index())

    def other(option: GpuOption | Literal["learner"]) -> jax.Device | None:
        """None: the learner's own."""
        if option == "learner":
            return None
        return jax.local_devices(backend="cpu")[0] if option is False else pick_device(option, here=True).device

    actor, evaluator = other(config.actor), other(config.evaluator)
    actors = local if actor is None else (actor,) * len(local)
    return Placement(learner, actors, evaluator or local[0], choice.reason)


# --- Data parallel -----------------------------------------------------------------------------------------------

AXIS = "devices"


class DataParallel:
    """One program on one device or on several, each with its shard of the data.

    On one device it is `jit`, and arrays are what they are. On several it is `pmap`: every array then has a leading
    axis, one row per device. A move to `shard_map` would change this class alone.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self.devices = tuple(devices)
        self.local_devices = tuple(d for d in self.devices if d.process_index == jax.process_index())
        mesh = jax.sharding.Mesh(np.asarray(self.devices), (AXIS,))
        self._rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))

    def __len__(self) -> int:
        return len(self.devices)

    def compile(self, function: Callable, donate_argnums: Sequence[int] = ()) -> Callable:
        """The function on all devices; on several, it is given `shard`, its part (`ppo.Shard`), as a keyword."""
        if len(self) == 1:
            return jax.jit(function, donate_argnums=donate_argnums)

        def on_each(*args: Any) -> Any:
            shard = Shard(lax.axis_index(AXIS), len(self), partial(lax.psum, axis_name=AXIS))
            return function(*_with_keys(args), shard=shard)

        return jax.pmap(on_each, axis_name=AXIS, devices=self.devices, donate_argnums=tuple(donate_argnums))

    def assemble(self, shards: Sequence[Any]) -> Any:
        """A tree of arrays from one tree per local device, which is moved there if it is elsewhere."""
        placed = [jax.device_put(shard, device) for shard, device in zip(shards, self.local_devices, strict=True)]
        if len(self) == 1:
            return placed[0]
        placed = _without_keys(placed)

        def rows(*parts: jax.Array) -> jax.Array:
            shape = (len(self.devices), *parts[0].shape)
            return jax.make_array_from_single_device_arrays(shape, self._rows, [_as_row(part) for part in parts])

        return jax.tree.map(rows, *placed)

    def replicate(self, tree: Any) -> Any:
        """The same values on all devices."""
        return self.assemble([tree] * len(self.local_devices))

    def shard(self, tree: Any, index: int) -> Any:
        """The part of a tree that local device `index` holds, on that device."""
        if len(self) == 1:
            return tree
        return jax.tree.map(lambda x: _as_shard(_local_row(x, self.local_devices[index])), tree)


class _KeyData(NamedTuple):
    """The data of typed PRNG keys, which pmap does not accept across processes."""

    data: jax.Array


def _without_keys(tree: Any) -> Any:
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: _KeyData(jax.random.key_data(x)) if is_key(x) else x, tree)


def _with_keys(tree: Any) -> Any:
    is_data = lambda x: isinstance(x, _KeyData)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.wrap_key_data(x.data) if is_data(x) else x, tree, is_leaf=is_data)


_as_row = jax.jit(lambda x: x[None])
_as_shard = jax.jit(lambda x: x[0])


def _local_row(x: jax.Array, device: jax.Device) -> jax.Array:
    return next(shard.data for shard in x.addressable_shards if shard.device == device)


# --- Several processes -------------------------------------------------------------------------------------------


def join_processes(config: DevicesConfig) -> None:
    """Makes this process one of several that learn together. Call before JAX starts its back end.

    Raises:
        UserError: the others cannot be found.
    """
    limit_jax(config)
    try:
        jax.distributed.initialize(config.coordinator, config.num_processes, config.process_index)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"devices.distributed: {str(error).rstrip('.')}; give devices.coordinator HOST:PORT, devices.num_processes"
            " and devices.process_index, or start it by a cluster manager that JAX knows"
        ) from error


def is_leader() -> bool:
    """True in the process that writes files: the only one, or process 0 of several.

    A process that is alone starts no back end by asking.
    """
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def sum_over_processes(count: int) -> int:
    """The sum of every process's count; on one process, the count itself."""
    if not jax.distributed.is_initialized():
        return count
    with jax.transfer_guard("allow"):
        return int(process_allgather(np.int32(count)).sum())


def gather_rows(rows: np.ndarray) -> np.ndarray:
    """The rows `[n, k]` of all processes, in the order of the processes; each may have another n.

    Numbers come back as float32 from several processes, and as they are from one.
    """
    if not jax.distributed.is_initialized():
        return rows
    with jax.transfer_guard("allow"):
        counts = process_allgather(np.int32(len(rows)))
        # A power of two, so that few sizes are compiled.
        padded = np.zeros((1 << (max(1, int(counts.max())) - 1).bit_length(), rows.shape[1]), np.float32)
        padded[: len(rows)] = rows
        everywhere = process_allgather(padded)
    return np.concatenate([part[:count] for part, count in zip(everywhere, counts, strict=True)])


def agree(text: str) -> str:
    """Process 0's text, in every process."""
    if not jax.distributed.is_initialized():
        return text
    letters = np.zeros(4_096, np.uint8)
    encoded = np.frombuffer(text.encode(), np.uint8)
    letters[: len(encoded)] = encoded
    return bytes(broadcast_one_to_all(letters)).rstrip(b"\0").decode()


# --- The checker -------------------------------------------------------------------------------------------------


class PlacementError(AssertionError):
    """An array is not on the device where it belongs."""


def check_placement(what: str, arrays: Any, devices: Sequence[jax.Device]) -> None:
    """Asserts that every array of a tree lies on exactly these devices of this process.

    Raises:
        PlacementError: it names the first array that does not, where it is and where it should be.
    """
    wanted = set(devices)
    for path, x in jax.tree_util.tree_leaves_with_path(arrays):
        found = None
        if isinstance(x, jax.Array):
            found = {device for device in x.devices() if device.process_index == jax.process_index()}
        if found != wanted:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            where = "the host" if found is None else ", ".join(sorted(map(str, found)))
            should = ", ".join(sorted(map(str, wanted)))
            raise PlacementError(f"{what}: {name} is on {where}; expected on {should}")


if __name__ == "__main__":
    from jaxrl_atari import cli
    from jaxrl_atari.hardware import report

    cli.run(lambda: report.main(pick_device, visible_gpus))
