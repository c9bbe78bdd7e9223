"""A machine with GPUs for the processes that tests start: a CUDA driver that shows them, and a plugin of JAX.

The plugin writes down that JAX starts it and with which settings, and then fails, as CUDA does on a broken machine.
"""

import ctypes
import inspect
import json
import os
import subprocess
import sys

from user_commands import ROOT, user_environment


class Library:
    """A stand-in for libcuda.

    Args:
        models: of its GPUs.
        error: what it gives when it starts.
        capabilities: ordinal -> compute capability.
    """

    def __init__(self, models, error=0, capabilities=None):
        self.models, self.error, self.capabilities = models, error, capabilities

    def cuInit(self, flags):
        return self.error

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.models)
        return 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = self.models[device.value].encode()
        return 0

    def cuDeviceTotalMem_v2(self, memory, device):
        assert isinstance(memory._obj, ctypes.c_size_t)
        memory._obj.value = 80 << 30
        return 0

    def cuDeviceGetUuid_v2(self, uuid, device):
        uuid._obj[:] = range(device.value, device.value + 16)
        return 0

    def cuDeviceGetAttribute(self, number, attribute, device):
        number._obj.value = dict(zip((75, 76), self.capabilities[device.value], strict=True))[attribute]
        return 0


DRIVER = """
import ctypes

{library}

class Started(Library):
    def cuInit(self, flags):
        open({called!r}, "w").close()
        return 0

class CDLL(ctypes.CDLL):
    def __new__(cls, name=None, *arguments, **options):
        return Started(["H100"] * {gpus}) if name == "libcuda.so.1" else super().__new__(cls)

ctypes.CDLL = CDLL
"""

PLUGIN = """
import json, os
import jax
from jax._src import hardware_utils, xla_bridge

hardware_utils.has_visible_nvidia_gpu = lambda: True

def start():
    names = (
        "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "CUDA_VISIBLE_DEVICES", "XLA_FLAGS",
    )
    settings = {{name: os.environ[name] for name in names if name in os.environ}}
    settings["jax_cuda_visible_devices"] = jax.config.read("jax_cuda_visible_devices")
    with open({record!r}, "a") as file:
        file.write(json.dumps(settings) + "\\n")
    raise RuntimeError({error!r})

def initialize():
    {initialize}
"""

REGISTER = 'xla_bridge.register_backend_factory("cuda", start, priority=500, fail_quietly=False)'
ERROR = "INTERNAL: no supported devices found for platform CUDA"


SHOWN = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
"""For tests on real GPUs: those that they may take, on a machine that others use too."""


def python(*arguments, timeout=240, **variables):
    """Runs Python in this checkout as a user's shell does, with these variables added."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=user_environment(**variables), cwd=ROOT, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


class FakeCuda:
    """A folder for PYTHONPATH with the driver and the plugin.

    Args:
        gpus: number that the driver shows.
        error: what JAX says when it starts the plugin.
        initialize: code of the plugin's `initialize()`.
    """

    def __init__(self, folder, gpus=1, error=ERROR, initialize=REGISTER):
        self.folder, self._record, self._called = folder, folder / "started.jsonl", folder / "cuInit"
        plugin = folder / "jax_plugins" / "fake_cuda"
        plugin.mkdir(parents=True)
        code = PLUGIN.format(record=str(self._record), error=error, initialize=initialize)
        (plugin / "__init__.py").write_text(code)
        driver = DRIVER.format(library=inspect.getsource(Library), gpus=gpus, called=str(self._called))
        (folder / "sitecustomize.py").write_text(driver)

    def python(self, *arguments, **variables):
        path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        return python(*arguments, PYTHONPATH=path, **variables)

    @property
    def started(self):
        """The settings with which each process started CUDA."""
        return [json.loads(line) for line in self._record.read_text().splitlines()] if self._record.exists() else []

    @property
    def driver_was_called(self):
        return self._called.exists()
