"""What `python -m jaxrl_atari.devices` prints: the devices, what each `gpu` option picks, and what is wrong."""

import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_atari import cli, devices
from jaxrl_atari.config import Config, GpuOption
from jaxrl_atari.config_files import load_config_file
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware import gpus
from jaxrl_atari.hardware.memory import estimate, format_bytes, report
from jaxrl_atari.hardware.monitor import GpuReader, GpuUnknown

SIZE = 1024  # of the matrices of the trial computation


def compute(device: jax.Device) -> str:
    """Multiplies two matrices on a device and compares the product with NumPy's; says how that went, in a few words."""
    a, b = np.random.default_rng(0).standard_normal((2, SIZE, SIZE), dtype=np.float32)
    multiply = jax.jit(lambda x, y: jnp.matmul(x, y, precision="highest"))
    try:
        x, y = jax.device_put((a, b), device)
        product = jax.block_until_ready(multiply(x, y))
        start = time.perf_counter()
        jax.block_until_ready(multiply(x, y))
        seconds = time.perf_counter() - start
    except Exception as error:  # whatever a broken driver or library raises
        return "failed: " + " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if product.devices() != {device}:
        return f"failed: the result is on {product.devices()}"
    difference = float(np.abs(np.asarray(product) - a @ b).max())
    if not difference < 1e-2:  # entries are of size 32; float32 rounding gives 1e-4
        return f"failed: the product is wrong by {difference:.3g}"
    return f"right, {2 * SIZE**3 / seconds / 1e9:,.0f} GFLOP/s in float32"


def _memory(device: jax.Device) -> str:
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return "JAX tells no memory of this device"
    text = f"{format_bytes(stats['bytes_in_use'])} in use, limit {format_bytes(stats['bytes_limit'])}"
    try:
        reader = GpuReader([device])
    except GpuUnknown:
        return text
    try:
        return text + f", {reader.read()['gpu_memory_gib']:.1f} GiB by all processes"
    finally:
        reader.close()


def _pick(gpu: GpuOption) -> str:
    try:
        device, reason = devices.pick_device(gpu)
    except UserError as error:
        return f"error: {error}"
    return f"{device} ({device.device_kind}): {reason}"


def lines() -> tuple[list[str], list[str]]:
    """The report, and the problems found, a line each. Starts JAX's back end."""
    visible = gpus.visible()
    versions = ", ".join(f"{name} {found}" for name, found in gpus.library_versions().items())
    driver = gpus.driver_version()
    text = [
        f"jaxrl_atari {importlib.metadata.version('jaxrl_atari')}, Python {platform.python_version()}, {versions}",
        f"NVIDIA driver {driver or 'none'}",
        *(f"{name} = {os.environ[name]!r}" for name in (*VARIABLES, gpus.SIMULATED) if name in os.environ),
        "",
    ]
    problems = [visible.problem] if visible.problem else []
    gpu_devices = devices.visible_gpus()
    if visible.gpus and not gpu_devices:
        problems.append(_pick("auto"))
    for device in [*gpu_devices, jax.local_devices(backend="cpu")[0]]:
        result = compute(device)
        text.append(f"{device} ({device.device_kind}): {_memory(device)}; matrix product: {result}")
        if result.startswith("failed"):
            problems.append(f"{device}: matrix product {result}")

    options: list[GpuOption] = ["auto", True, *range(len(gpu_devices))]
    text += ["", *(f"devices.gpu = {str(gpu).lower():6}{_pick(gpu)}" for gpu in options)]
    # By hand, as picking it would forbid the GPUs to this process.
    text.append(f"devices.gpu = false {jax.local_devices(backend='cpu')[0]}: the GPUs are not touched")
    try:
        offset = gpus.cuda_offset()
        if gpu_devices:
            order = [str(gpus.rotate(session, len(gpu_devices), offset=offset)[0]) for session in range(8)]
            text.append(f"sessions 0, 1, 2, ... of a trial run on GPU {', '.join(order)}, ... (CUDA_OFFSET {offset})")
    except UserError as error:
        problems.append(str(error))
    return text, problems


VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_OFFSET", "JAX_PLATFORMS", gpus.FRACTION, gpus.OLD_FRACTION, "XLA_FLAGS",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; exits with status 1 if a device does not compute or a setting is wrong."""
    prog = "python -m jaxrl_atari.devices"
    parser = cli.Parser(
        prog=prog, description=__doc__, allow_abbrev=False, usage="%(prog)s [--config FILE [config options]]"
    )
    parser.add_argument("--config", help="a config file; also estimates the memory that its training needs")
    options, overrides = parser.parse_known_args(arguments)
    if overrides and not options.config:
        raise UserError(f"{overrides[0]}: expected --config FILE before the config's options; --help shows how")
    config = None
    if options.config:
        config = cli.parse(Config, overrides, default=load_config_file(options.config), prog=prog)
    # To look must not take the memory that others on this GPU need.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    text, problems = lines()
    print("\n".join(text))
    if config is not None:
        choice = devices.pick_device(config.devices.gpu)
        limit = (choice.device.memory_stats() or {}).get("bytes_limit")
        print("\n" + report(estimate(config, choice.device.platform), limit))
    print("\n" + ("\n".join(f"problem: {problem}" for problem in problems) or "no problem found"))
    if any("failed" in problem or "CUDA_OFFSET" in problem for problem in problems):
        sys.exit(1)
