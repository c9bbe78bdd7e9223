"""A machine with GPUs for the processes that tests start: `fake_machine/` has its NVML and its plugin of JAX."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from user_commands import ROOT, user_environment

from jaxrl_atari.hardware import gpus, nvidia

FAKE_MACHINE = Path(__file__).parent / "fake_machine"
SHOWN = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
"""For tests on real GPUs: those that they may take, on a machine that others use too."""


def python(*arguments, timeout=240, **variables):
    """Runs Python in this checkout as a user's shell does, with these variables added."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=user_environment(**variables), cwd=ROOT, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


class FakeMachine:
    """A machine with some GPUs, on which JAX cannot start; it records when it is asked to."""

    def __init__(self, folder, gpus=1):
        self._record, self._gpus = folder / "started.jsonl", gpus

    def python(self, *arguments, **variables):
        path = os.pathsep.join([str(FAKE_MACHINE), str(ROOT)])
        fakes = {"PYTHONPATH": path, "FAKE_GPUS": str(self._gpus), "FAKE_RECORD": str(self._record)}
        return python(*arguments, **fakes, **variables)

    @property
    def started(self):
        """The settings with which each process has started CUDA."""
        return (
            [json.loads(line) for line in self._record.read_text().splitlines()] if self._record.exists() else []
        )

    @property
    def nvml_was_asked(self):
        return self._record.with_name(f"{self._record.name}_nvml").exists()


@pytest.fixture(name="machine")
def _machine(monkeypatch):
    """This process on a machine with four GPUs and JAX's plugin for them; returns the stand-in for NVML."""
    spec = importlib.util.spec_from_file_location("fake_nvml", FAKE_MACHINE / "pynvml.py")
    nvml = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nvml)
    monkeypatch.setattr(nvidia, "nvml", nvml)
    monkeypatch.setenv("FAKE_GPUS", "4")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    monkeypatch.syspath_prepend(FAKE_MACHINE)
    platforms, in_jax = jax.config.jax_platforms, jax.config.read("jax_cuda_visible_devices")
    jax.config.update("jax_platforms", None)
    nvidia._start_nvml.cache_clear()
    nvidia._check_choice_in_jax.cache_clear()
    before = gpus.use_provider(nvidia.NvidiaGpus())
    yield nvml
    gpus.use_provider(before)
    nvidia._start_nvml.cache_clear()
    nvidia._check_choice_in_jax.cache_clear()
    jax.config.update("jax_platforms", platforms)
    jax.config.update("jax_cuda_visible_devices", in_jax)
