"""A plugin of JAX that records with which settings JAX starts it, and fails as CUDA does on a broken machine."""

import json
import os

import jax
from jax._src import hardware_utils
from jax.extend.backend import register_backend_factory

SETTINGS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "CUDA_VISIBLE_DEVICES", "XLA_FLAGS")


def start():
    found = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    found["jax_cuda_visible_devices"] = jax.config.read("jax_cuda_visible_devices")
    with open(os.environ["FAKE_RECORD"], "a") as file:
        file.write(json.dumps(found) + "\n")
    raise RuntimeError(os.environ.get("FAKE_CUDA_ERROR", "INTERNAL: no supported devices found for platform CUDA"))


def initialize():
    hardware_utils.has_visible_nvidia_gpu = lambda: True  # JAX looks for /dev/nvidia*
    register_backend_factory("cuda", start, priority=500, fail_quietly=False)
