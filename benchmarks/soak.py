"""Soak test: hours of training at a small shape; memory, open files, threads and disk use must not grow.

    python benchmarks/soak.py --hours 2

trains Pong with 4 environments, checkpoints every 1,000 env steps and graphs, in a process of its own, and samples
it every 10 seconds. It prints the slope of memory after the first ten minutes, the extremes of the other figures,
and one JSON line. Exit status 1: a figure grew. The samples are written to `soak.csv` beside the run.
"""

import contextlib
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import tyro

from jaxrl_atari import cli
from jaxrl_atari.errors import SessionsFailed, require
from jaxrl_atari.output import say

OPTIONS = (
    "--config", "configs/pong.py", "--name", "soak", "--env.num-envs", "4", "--ppo.rollout-length", "32",
    "--ppo.minibatch-size", "32", "--log.checkpoint-every-env-steps", "1000", "--log.every-env-steps", "1000",
    "--total-env-steps", "1000000000",
)  # fmt: skip
WARM_UP_SECONDS = 600.0
MAX_MIB_PER_HOUR = 2.0
MAX_GROWTH = 1.15
"""Of the largest value in the second half over that in the first half: files come and go as checkpoints do."""
FIGURES = ("seconds", "memory_mib", "open_files", "threads", "files", "files_mib")


def sample(process: psutil.Process, run_dir: Path) -> list[float]:
    """The `FIGURES` after the first: of the process, and of its files other than logs.

    Memory is what is resident, not the part that is the process's own (USS): that part rises when another process
    that shares its libraries ends.
    """
    sizes = []
    for folder, _, names in os.walk(run_dir):  # training deletes old checkpoints meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size = os.stat(os.path.join(folder, name)).st_size
                if not name.endswith(".csv") and "tfevents" not in name:
                    sizes.append(size)
    memory = process.memory_info().rss / 2**20
    return [memory, process.num_fds(), process.num_threads(), len(sizes), sum(sizes) / 2**20]


def main(hours: float = 2.0, output_dir: Path = Path("data")) -> None:
    """Runs the soak test."""
    shortest = 2 * WARM_UP_SECONDS / 3600  # the figures after the warm-up are compared in two halves
    require(hours >= shortest, "--hours", hours, f"at least {shortest:.2f}, twice the warm-up")
    output_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="soak_", dir=output_dir))
    run_dir = folder / "run"
    rows = []
    command = [sys.executable, "-m", "jaxrl_atari.train", *OPTIONS, "--run-dir", str(run_dir)]
    with (
        open(folder / "output.txt", "w") as output,
        open(folder / "soak.csv", "w", newline="", buffering=1) as table,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as training,
    ):
        process = psutil.Process(training.pid)
        writer = csv.writer(table)
        writer.writerow(FIGURES)
        start = time.monotonic()
        elapsed = 0.0
        try:
            while elapsed < hours * 3600 and training.poll() is None:
                rows.append([elapsed, *sample(process, run_dir)])
                writer.writerow(rows[-1])
                time.sleep(10)
                elapsed = time.monotonic() - start
            ended = training.poll()
        finally:
            training.terminate()
    if ended is not None:
        raise SessionsFailed(f"training ended with status {ended}; see {folder / 'output.txt'}")
    report(rows)


def report(rows: Sequence[Sequence[float]]) -> None:
    """Prints the figures after the warm-up.

    Raises:
        SessionsFailed: one of them grew.
    """
    seconds, *columns = np.array([row for row in rows if row[0] >= WARM_UP_SECONDS]).T
    half = len(seconds) // 2
    found = {}
    growing = []
    for name, values in zip(FIGURES[1:], columns, strict=True):
        per_hour = float(np.polyfit(seconds / 3600, values, 1)[0])  # the least-squares line
        growth = float(values[half:].max() / values[:half].max())
        found[name] = {"min": values.min(), "max": values.max(), "per_hour": per_hour, "growth": growth}
        cells = [f"{key} {value:>10,.2f}   " for key, value in found[name].items()]
        say(f"{name:<12}{''.join(cells)}")
        grows = per_hour > MAX_MIB_PER_HOUR if name == "memory_mib" else growth > MAX_GROWTH
        if grows:
            growing.append(name)
    say(json.dumps({"hours": seconds[-1] / 3600, **found}))
    if growing:
        raise SessionsFailed(f"after the warm-up these grew: {', '.join(growing)}")


if __name__ == "__main__":
    cli.run(lambda: tyro.cli(main))
