"""A stand-in for NVML: a machine with FAKE_GPUS GPUs of 24 GiB; GPU i is 10 i percent busy and uses i GiB.

The last GPU has two slices, `MIG-slice` and `MIG-other`, of which NVML knows the memory alone. FAKE_NVML_ERROR
is what starting gives; FAKE_FAILING has the errors of single GPUs, such as `1:15,2:4`. Other processes hold
FAKE_TAKEN_GIB of each.
GPU FAKE_MIG is in MIG mode, with room for two slices and `MIG-slice` in the second place.
"""

import os
from types import SimpleNamespace

NVML_ERROR_NO_PERMISSION, NVML_ERROR_NOT_FOUND = 4, 6
NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND = 9, 12
NVML_TEMPERATURE_GPU = 0
SLICES = ("MIG-slice", "MIG-other")
calls = []


class NVMLError(Exception):
    @property
    def value(self):
        return self.args[0]


def nvmlInit():
    calls.append("nvmlInit")
    if record := os.environ.get("FAKE_RECORD"):
        with open(f"{record}_nvml", "w"):
            pass
    if error := os.environ.get("FAKE_NVML_ERROR"):
        raise NVMLError(int(error))


def nvmlSystemGetDriverVersion():
    return "570.1"


def nvmlDeviceGetCount():
    return int(os.environ["FAKE_GPUS"])


def nvmlDeviceGetHandleByIndex(index):
    failing = filter(None, os.environ.get("FAKE_FAILING", "").split(","))
    errors = dict(map(int, entry.split(":")) for entry in failing)
    if index in errors:
        raise NVMLError(errors[index])
    return index


def nvmlDeviceGetHandleByUUID(uuid):
    if uuid in SLICES:
        return uuid
    kind, _, index = uuid.partition("-")
    if kind != "GPU" or int(index, 16) >= nvmlDeviceGetCount():
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return int(index, 16)


def nvmlDeviceGetMaxMigDeviceCount(handle):
    return 2 if str(handle) == os.environ.get("FAKE_MIG") else 0


def nvmlDeviceGetMigDeviceHandleByIndex(handle, index):
    if index == 0:
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return "MIG-slice"


def nvmlDeviceGetUUID(handle):
    return handle if handle in SLICES else f"GPU-{handle:x}"


def nvmlDeviceGetName(handle):
    return "H100"


def nvmlDeviceGetMemoryInfo(handle):
    total, used = 24 << 30, (0.5 if handle in SLICES else handle) * 2**30
    taken = float(os.environ.get("FAKE_TAKEN_GIB", 0)) * 2**30  # by other processes
    return SimpleNamespace(total=total, used=used + taken, free=total - used - taken)


def _board(handle):
    if handle in SLICES or "lost" in os.environ.get("FAKE_STATE", ""):
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return handle


def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=10 * _board(handle))


def nvmlDeviceGetPowerUsage(handle):
    return 100_000 * _board(handle)


def nvmlDeviceGetTemperature(handle, sensor):
    return 30 + _board(handle)
