"""Instruments of the benchmark: they observe running code from outside and leave it unchanged."""

import contextlib
import resource
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from jaxrl_atari.hardware.monitor import GIB


class Compilations:
    """Counts what JAX traces and compiles. Use it in a `with` block."""

    COMPILE = "/jax/core/compile/backend_compile_duration"
    CACHE_HIT = "/jax/compilation_cache/cache_hits"

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.compile_seconds = 0.0
        """Time in XLA, or in reading its result from the cache; tracing is not included."""

    def _on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count[event] += 1
        if event == self.COMPILE:
            self.compile_seconds += duration_secs

    def _on_event(self, event: str, **_: str | int) -> None:
        self.count[event] += 1

    def __enter__(self) -> "Compilations":
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)
        return self

    def __exit__(self, *exception: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)


def wrapped(owner: Any, name: str, wrap: Callable[[Callable], Callable]) -> contextlib.AbstractContextManager:
    """Replaces `owner.name` by `wrap(owner.name)` inside a `with` block."""
    return mock.patch.object(owner, name, wrap(getattr(owner, name)))


class SectionTimer:
    """Divides the time of this thread into sections; every moment belongs to the innermost open one."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._section = "other"
        self._since = time.perf_counter()
        self._thread = threading.get_ident()

    def enter(self, section: str) -> str:
        """Opens a section and returns the one that was open before."""
        before, now = self._section, time.perf_counter()
        self.seconds[before] += now - self._since
        self._section, self._since = section, now
        return before

    def timed(self, section: str) -> Callable[[Callable], Callable]:
        """A decorator that times a function as a section on this thread; other threads call it untimed."""

        def wrap(function: Callable) -> Callable:
            def timed(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() != self._thread:
                    return function(*args, **kwargs)
                before = self.enter(section)
                try:
                    return function(*args, **kwargs)
                finally:
                    self.enter(before)

            return timed

        return wrap


def peak_rss_gib() -> float:
    """Peak resident memory of this process."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):  # getrusage's figure includes the process that started this one
                return int(line.split()[1]) * 2**10 / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 2**10) / GIB


def peak_device_gib(devices: Sequence[jax.Device]) -> float | None:
    """Peak memory that JAX has used on these devices together; None where it is not reported (on a CPU)."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) / GIB if len(known) == len(peaks) else None
