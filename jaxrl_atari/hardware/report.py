"""The report of `python -m jaxrl_atari.devices`: devices, the choice of each `gpu` option, and problems."""

import argparse
import contextlib
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from jaxrl_atari import __version__
from jaxrl_atari.cli.options import load_config
from jaxrl_atari.config import Config, GpuOption
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware import gpus
from jaxrl_atari.hardware.jax_gpus import visible_gpus
from jaxrl_atari.hardware.memory import estimate, format_bytes, report
from jaxrl_atari.hardware.memory_share import FRACTION, OLD_FRACTION, apply_memory_fraction, do_not_preallocate
from jaxrl_atari.hardware.monitor import GpuReader, GpuUnknown
from jaxrl_atari.hardware.rotation import check_devices, cuda_offset, rotate

MATRIX_SIZE = 1024
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_OFFSET", "JAX_PLATFORMS", FRACTION, OLD_FRACTION, "XLA_FLAGS", gpus.SIMULATED,
)  # fmt: skip

PickDevice = Callable[[GpuOption], tuple[jax.Device, str]]  # `devices.pick_device`: a device and the reason


def compute(device: jax.Device) -> str:
    """Multiplies two matrices on a device and compares the product with NumPy's. Returns the result in a few words."""
    a, b = np.random.default_rng(0).standard_normal((2, MATRIX_SIZE, MATRIX_SIZE), dtype=np.float32)
    multiply = jax.jit(lambda x, y: jnp.matmul(x, y, precision="highest"))
    try:
        x, y = jax.device_put((a, b), device)
        product = jax.block_until_ready(multiply(x, y))
        start = time.perf_counter()
        jax.block_until_ready(multiply(x, y))
        seconds = time.perf_counter() - start
    except Exception as error:  # a broken driver or library may raise anything
        return "failed: " + " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if product.devices() != {device}:
        return f"failed: the result is on {product.devices()}"
    difference = float(np.abs(np.asarray(product) - a @ b).max())
    if not difference < 1e-2:  # entries are of size 32; float32 rounding gives 1e-4
        return f"failed: the product is wrong by {difference:.3g}"
    return f"right, {2 * MATRIX_SIZE**3 / seconds / 1e9:,.0f} GFLOP/s in float32"


def _memory(device: jax.Device) -> str:
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return "JAX reports no memory for this device"
    text = f"{format_bytes(stats['bytes_in_use'])} in use, limit {format_bytes(stats['bytes_limit'])}"
    try:
        with contextlib.closing(GpuReader([device])) as reader:
            return f"{text}, {reader.read()['gpu_memory_gib']:.1f} GiB by all processes"
    except GpuUnknown:
        return text


def _choice(pick_device: PickDevice, gpu: GpuOption) -> str:
    try:
        device, reason = pick_device(gpu)
    except UserError as error:
        return f"error: {error}"
    return f"{device} ({device.device_kind}): {reason}"


def lines(pick_device: PickDevice, rotation: bool = True) -> tuple[list[str], list[str], list[str]]:
    """The lines of the report, the reason for no GPU, and the faults found. Starts JAX's back end.

    Args:
        rotation: with a line on the GPUs of sessions that take one each.
    """
    visible = gpus.visible()
    versions = ", ".join(f"{name} {found}" for name, found in gpus.library_versions().items())
    driver = gpus.driver_version()
    text = [
        f"jaxrl_atari {__version__}, Python {platform.python_version()}, {versions}",
        f"NVIDIA driver {driver or 'none'}",
        *(f"{name} = {os.environ[name]!r}" for name in VARIABLES if name in os.environ),
        "",
    ]
    is_fault = "driver failed" in visible.problem
    missing = [visible.problem] if visible.problem and not is_fault else []
    faults = [visible.problem] if is_fault else []
    gpu_devices = visible_gpus()
    if visible.gpus and not gpu_devices:
        faults.append(_choice(pick_device, "auto"))
    for device in [*gpu_devices, jax.local_devices(backend="cpu")[0]]:
        result = compute(device)
        text.append(f"{device} ({device.device_kind}): {_memory(device)}; matrix product: {result}")
        if result.startswith("failed"):
            faults.append(f"{device}: matrix product {result}")

    options: list[GpuOption] = ["auto", True, *range(len(gpu_devices))]
    text += ["", *(f"devices.gpu = {str(gpu).lower():6}{_choice(pick_device, gpu)}" for gpu in options)]
    # Not through `pick_device`, which would forbid the GPUs to this process.
    text.append(f"devices.gpu = false {jax.local_devices(backend='cpu')[0]}: the GPUs are not touched")
    try:
        offset = cuda_offset()
        if gpu_devices and rotation:
            order = [str(rotate(session, len(gpu_devices), offset=offset)[0]) for session in range(8)]
            text.append(f"sessions 0, 1, 2, ... of a trial run on GPU {', '.join(order)}, ... (CUDA_OFFSET {offset})")
    except UserError as error:
        faults.append(str(error))
    return text, missing, faults


def main(pick_device: PickDevice, arguments: Sequence[str] | None = None) -> None:
    """The command. Exits with status 1 if the driver or a device fails, or CUDA_OFFSET is invalid.

    Args:
        pick_device: `devices.pick_device`, which lies above this folder.
    """
    prog = "python -m jaxrl_atari.devices"
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Reports this machine's devices, which of them each devices.gpu value picks, and problems.",
        allow_abbrev=False,
        usage="%(prog)s [--config FILE [config options]]",
    )
    parser.add_argument("--config", type=Path, help="config file; adds an estimate of memory")
    options, overrides = parser.parse_known_args(arguments)
    if overrides and not options.config:
        raise UserError(f"{overrides[0]}: expected --config FILE before the config's options; --help shows how")
    config = None
    if options.config:
        config = tyro.cli(Config, args=overrides, default=load_config(options.config, get_config=Config)[0], prog=prog)
        check_devices(config.devices)
        apply_memory_fraction(config.devices)
    # The report must not take memory that other processes on the GPU need.
    do_not_preallocate()
    text, missing, faults = lines(pick_device, rotation=config is None or config.devices.data_parallel == 1)
    print("\n".join(text))
    if config is not None:
        device, _ = pick_device(config.devices.gpu)
        limit = (device.memory_stats() or {}).get("bytes_limit")
        option = config.devices.actor
        actor = device if option == "learner" else jax.devices("cpu")[0] if option is False else pick_device(option)[0]
        learner, actor = gpus.network_platform(device), gpus.network_platform(actor)
        print("\n" + report(estimate(config, learner, actor=actor), limit))
    print("\n" + ("\n".join(f"problem: {problem}" for problem in [*missing, *faults]) or "no problem found"))
    if faults:
        sys.exit(1)
