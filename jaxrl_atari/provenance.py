"""Provenance of a session's numbers: devices, arithmetic, software, machine, and what a resume changes."""

from typing import Any

from jaxrl_atari.config import DevicesConfig, PPOConfig, changed_fields
from jaxrl_atari.devices import Placement
from jaxrl_atari.hardware.cpu import xla_threads
from jaxrl_atari.hardware.gpus import gpu_packages
from jaxrl_atari.runs.description import software_and_machine


def find_provenance(
    devices: DevicesConfig, options: PPOConfig, placement: Placement, compute_dtype: str
) -> dict[str, Any]:
    """What the bits of a session depend on besides its config and seed, as JSON values.

    Args:
        options: as `resolved_options` returns them.
        compute_dtype: the type in which the network computes, such as `float32`.
    """
    today = software_and_machine(devices)
    on_gpu = any(device.platform == "gpu" for device in (*placement.learner, *placement.actors))
    return {
        "python": today["python"],
        "versions": today["versions"],
        "git_revision": today["git_revision"],
        "numeric_settings": today["numeric_settings"],
        "compute_dtype": compute_dtype,
        "coefficients": options.coefficients,  # a default may change with the algorithm's file
        "learns_on": [device.device_kind for device in placement.learner],
        "acts_on": [device.device_kind for device in placement.actors],
        "gpu_software": {"driver": today["hardware"]["driver"], **gpu_packages()} if on_gpu else {},
        "cpu": today["hardware"]["cpu"],
        "instruction_sets": today["hardware"]["instruction_sets"],
        "threads": xla_threads(),
    }


def device_text(placement: Placement, compute_dtype: str, evaluates: bool) -> str:
    """The devices that learn, act and evaluate, why they were chosen, and the arithmetic, in one line."""
    text = f"{', '.join(map(str, placement.learner))} ({placement.why_learner})"
    if not {*placement.actors} <= {*placement.learner}:
        text += f"; acts on {', '.join(map(str, dict.fromkeys(placement.actors)))}"
    if evaluates:
        text += f"; evaluates on {placement.evaluator}"
    return f"{text}; computes in {compute_dtype}"


def resume_text(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Where a session resumes, and which arithmetic settings and coefficients differ from before, in one line.

    Args:
        before: meta of the checkpoint that the session resumes from.
        now: meta of the next checkpoint.
    """
    text = f"resumed at {before['env_steps']:,} env steps (update {before['updates']:,})"
    saved = [name for name in ("compute_dtype", "numeric_settings", "coefficients") if name in before]
    changed = changed_fields({name: before[name] for name in saved}, {name: now[name] for name in saved})
    for name, (old, new) in changed.items():
        text += f"; {name} {old} -> {new}, so numbers may differ from here on"
    return text
