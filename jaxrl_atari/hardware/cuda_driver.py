"""The CUDA driver, libcuda: the only file that loads it."""

import ctypes
import uuid
from typing import Any

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
REASONS = {
    802: "its fabric manager is not running",
    803: "its library and kernel module are of different versions; restart the machine",
    804: "the GPU is too old for this CUDA version",
    999: "unknown error; is the kernel module loaded?",
}

COMPUTE_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


class DriverError(Exception):
    """The driver is missing or a call of it failed. The message names the call and the reason."""


class NoDevice(DriverError):
    """The driver shows no GPU."""


class CudaDriver:
    """The GPUs that the driver shows to this process, by ordinal. Takes no memory of a GPU.

    Raises:
        DriverError: by the constructor and by every method.
    """

    def __init__(self):
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError("there is no NVIDIA driver (libcuda.so.1 is not found)") from error
        self._call("cuInit", 0)

    def count(self) -> int:
        """Number of GPUs."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def model(self, ordinal: int) -> str:
        """Product name, such as `NVIDIA H100`."""
        name = ctypes.create_string_buffer(100)
        self._call("cuDeviceGetName", name, len(name), self._device(ordinal))
        return name.value.decode(errors="replace")

    def memory(self, ordinal: int) -> int:
        """Total memory in bytes."""
        memory = ctypes.c_size_t()
        self._call("cuDeviceTotalMem_v2", ctypes.byref(memory), self._device(ordinal))
        return memory.value

    def uuid(self, ordinal: int) -> str:
        """UUID, without its prefix, of the GPU or MIG slice."""
        raw = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(raw), self._device(ordinal))  # v2: of the MIG slice, if it is one
        return str(uuid.UUID(bytes=bytes(raw)))

    def compute_capability(self, ordinal: int) -> tuple[int, int]:
        """Compute capability, such as (9, 0)."""
        numbers = []
        for attribute in COMPUTE_CAPABILITY:
            number = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(number), attribute, self._device(ordinal))
            numbers.append(number.value)
        return numbers[0], numbers[1]

    def _device(self, ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device

    def _call(self, function: str, *arguments: Any) -> None:
        try:
            error = getattr(self._library, function)(*arguments)
        except AttributeError as missing:
            raise DriverError(f"the NVIDIA driver failed: it is too old and has no {function}; update it") from missing
        if error == NO_DEVICE:
            raise NoDevice("the NVIDIA driver shows no GPU")
        if error:
            raise DriverError(f"the NVIDIA driver failed: {function} gave {error} ({REASONS.get(error, 'see cuda.h')})")
