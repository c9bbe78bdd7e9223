"""Monitor of the machine during a session: the GPUs through NVML, CPU and memory of the process through psutil.

NVML, used only in this file, counts all GPUs of the machine in its own order and ignores CUDA_VISIBLE_DEVICES and
CUDA_DEVICE_ORDER. JAX counts the GPUs that CUDA shows to this process. The UUID, from the CUDA driver, identifies a
GPU of JAX in NVML.
"""

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import psutil
import pynvml

from jaxrl_atari.hardware.cuda_driver import CudaDriver, DriverError

nvml: Any = pynvml  # its annotations say less than it returns
GIB = 2**30
GPU_COLUMNS = ("gpu_busy_percent", "gpu_memory_gib", "gpu_power_watts", "gpu_temperature_c")
HOST_COLUMNS = ("cpu_percent", "rss_gib")
MONITOR_COLUMNS = GPU_COLUMNS + HOST_COLUMNS
"""The names of the measured values. runs/columns.py defines them."""


class GpuUnknown(Exception):
    """A GPU cannot be identified or read. The message is the reason."""


def cuda_uuid(ordinal: int) -> str:
    """UUID of the GPU or MIG slice that this process has as CUDA device `ordinal`; see `CudaDriver.uuid`."""
    try:
        return CudaDriver().uuid(ordinal)
    except DriverError as error:
        raise GpuUnknown(str(error)) from error


class GpuReader:
    """Reads the GPUs among some JAX devices.

    Raises:
        GpuUnknown: no device is a GPU, or NVML does not find one of them.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        local = [device for device in devices if device.process_index == jax.process_index()]
        gpus = {device.local_hardware_id for device in local if device.platform == "gpu"}
        if not gpus:
            raise GpuUnknown("no GPU in use")
        try:
            nvml.nvmlInit()
            try:
                self._handles = [self._find(cuda_uuid(ordinal)) for ordinal in sorted(gpus)]
            except Exception:
                nvml.nvmlShutdown()
                raise
        except nvml.NVMLError as error:
            raise GpuUnknown(f"NVML: {error}") from error

    def _find(self, gpu_uuid: str) -> tuple[Any, Any]:
        """NVML handles of the device, and of the board that measures its power and temperature."""
        try:
            board = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu_uuid}")
            return board, board
        except nvml.NVMLError:
            mig_slice = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{gpu_uuid}")
            return mig_slice, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig_slice)

    def read(self) -> dict[str, float]:
        """`GPU_COLUMNS` now: busy is the mean over devices, memory and power the sum, temperature the maximum.

        A column is NaN if one of the devices does not have it.

        Raises:
            GpuUnknown: no column could be read on any device.
        """
        errors = []

        def each(read: Callable[[Any, Any], float]) -> list[float]:
            values = []
            for device, board in self._handles:
                try:
                    values.append(read(device, board))
                except nvml.NVMLError as error:  # for example: a MIG slice has no utilisation
                    errors.append(error)
                    values.append(math.nan)
            return values

        busy = each(lambda device, board: nvml.nvmlDeviceGetUtilizationRates(device).gpu)
        memory = each(lambda device, board: nvml.nvmlDeviceGetMemoryInfo(device).used / GIB)
        power = each(lambda device, board: nvml.nvmlDeviceGetPowerUsage(board) / 1000.0)
        temperature = each(lambda device, board: nvml.nvmlDeviceGetTemperature(board, nvml.NVML_TEMPERATURE_GPU))
        if len(errors) == len(GPU_COLUMNS) * len(self._handles):
            raise GpuUnknown(f"NVML: {errors[-1]}")
        hottest = math.nan if any(map(math.isnan, temperature)) else max(temperature)
        return dict(zip(GPU_COLUMNS, (sum(busy) / len(busy), sum(memory), sum(power), hottest), strict=True))

    def close(self) -> None:
        """Shuts NVML down."""
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


class HostReader:
    """CPU time and memory of this process and its children."""

    REFRESH_CHILDREN = 10  # readings; a search for children reads all of /proc, which is slow on a large machine

    def __init__(self) -> None:
        self._processes = [psutil.Process()]
        self._readings = 0
        self.read()  # psutil counts CPU time from its first reading

    def read(self) -> dict[str, float]:
        """`HOST_COLUMNS`: CPU use since the last reading (100 is one core), and memory now."""
        if self._readings % self.REFRESH_CHILDREN == 0:
            me = self._processes[0]
            known = {process: process for process in self._processes}
            with contextlib.suppress(psutil.Error, OSError):  # for example where /proc hides the processes of others
                self._processes = [me, *(known.get(child, child) for child in me.children(recursive=True))]
        self._readings += 1
        cpu, rss = 0.0, 0
        for process in self._processes:
            try:
                with process.oneshot():
                    cpu += process.cpu_percent()
                    rss += process.memory_info().rss
            except psutil.Error:  # a child that has ended
                continue
        return dict(zip(HOST_COLUMNS, (cpu, rss / GIB), strict=True))


class Monitor:
    """A thread that samples the machine once a second until the end of its `with` block.

    Failures never stop training: a value that cannot be read is NaN, and one line reports it.

    Args:
        devices: the JAX devices in use, whose back end has started.
        say: receives lines for the user.
        seconds: interval between two samples.
    """

    def __init__(self, devices: Sequence[jax.Device], say: Callable[[str], None], seconds: float = 1.0):
        self._say = say
        self._unsaid = ""
        self._gpu: GpuReader | None = None
        try:
            self._gpu = GpuReader(devices)
        except Exception as error:  # no failure of a driver may stop training
            say(_host_only(error))
        self._host = HostReader()
        self._lock = threading.Lock()
        self._newest: dict[str, float] = {}
        self._samples: deque[dict[str, float]] = deque(maxlen=3_600)  # since the last `read`
        self._stop = threading.Event()
        self._seconds = seconds
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            self.sample()

    def sample(self) -> None:
        """Takes one sample now."""
        values: dict[str, float] = dict.fromkeys(MONITOR_COLUMNS, math.nan)
        with contextlib.suppress(psutil.Error, OSError):
            values |= self._host.read()
        if self._gpu is not None:
            try:
                values |= self._gpu.read()
            except Exception as error:  # no failure of a driver may stop training
                self._gpu.close()
                self._gpu = None
                self._unsaid = _host_only(error)
        with self._lock:
            self._newest = values
            self._samples.append(values)

    def read(self) -> dict[str, float]:
        """`MONITOR_COLUMNS`: means over the samples since the last `read`, or the newest sample if there is none.

        Takes a sample itself before the first one of the thread.
        """
        if not self._newest:
            self.sample()
        if self._unsaid:  # printed by the caller's thread, like all other lines
            self._say(self._unsaid)
            self._unsaid = ""
        with self._lock:
            samples = list(self._samples) or [self._newest]
            self._samples.clear()
        return {name: _mean([sample[name] for sample in samples]) for name in MONITOR_COLUMNS}

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)  # a driver may hang
        if self._gpu is not None:
            self._gpu.close()
            self._gpu = None


def _host_only(reason: Exception) -> str:
    return f"monitor: {reason}; only the CPU and memory of this process are recorded"


def _mean(values: Sequence[float]) -> float:
    """Mean of the finite values; NaN if there is none."""
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
