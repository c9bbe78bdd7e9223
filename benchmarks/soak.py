"""Soak test: hours of training at a small shape; memory, open files, threads and disk use must not grow.

    python benchmarks/soak.py --hours 2

trains Pong with 4 environments, checkpoints every 1,000 env steps and graphs, in a process of its own, and samples it
every 10 seconds. It prints the slope of memory after the first ten minutes, the extremes of the other figures, and one
JSON line. Exit status 1: a figure grew. The samples are written to `soak.csv` beside the run.
"""

import argparse
import contextlib
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from jaxrl_atari import cli
from jaxrl_atari.errors import SessionsFailed, UserError

OPTIONS = (
    "--config", "configs/pong.py", "--name", "soak", "--env.num-envs", "4", "--ppo.rollout-length", "32",
    "--ppo.minibatch-size", "32", "--log.checkpoint-every-env-steps", "1000", "--log.every-env-steps", "1000",
    "--total-env-steps", "1000000000",
)  # fmt: skip
WARM_UP_SECONDS = 600.0
MAX_MIB_PER_HOUR = 2.0
MAX_GROWTH = 1.15
"""Of the largest value in the second half over that in the first half: files come and go as checkpoints do."""


def sample(process: psutil.Process, run_dir: Path) -> dict[str, float]:
    """Figures of the process and of its files.

    `memory_mib` is resident memory, not the part that is the process's own (USS): that part rises when another process
    that shares its libraries ends.
    """
    with process.oneshot():
        figures: dict[str, float] = {"memory_mib": process.memory_info().rss / 2**20}
        figures |= {"open_files": process.num_fds(), "threads": process.num_threads()}
    logs = other = files = 0
    for folder, _, names in os.walk(run_dir):  # training deletes old checkpoints meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size = os.stat(os.path.join(folder, name)).st_size
                files += 1
                if name.endswith(".csv") or "tfevents" in name:
                    logs += size
                else:
                    other += size
    return figures | {"files": files, "logs_mib": logs / 2**20, "other_mib": other / 2**20}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--output-dir", type=Path, default=Path("data"), help="where the run is written (data)")
    options, overrides = parser.parse_known_args()
    if options.hours * 3600 <= WARM_UP_SECONDS:
        raise UserError(f"--hours {options.hours}: expected more than {WARM_UP_SECONDS / 3600:.2f}, the warm-up")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    run_dir = Path(tempfile.mkdtemp(prefix="soak_", dir=options.output_dir)) / "run"
    command = [sys.executable, "-m", "jaxrl_atari.train", *OPTIONS, "--run-dir", str(run_dir), *overrides]
    rows = []
    with (
        open(run_dir.parent / "output.txt", "w") as output,
        open(run_dir.parent / "soak.csv", "w", newline="", buffering=1) as table,
    ):
        training = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        process, start = psutil.Process(training.pid), time.monotonic()
        writer = None
        try:
            while (elapsed := time.monotonic() - start) < options.hours * 3600 and training.poll() is None:
                row = {"seconds": elapsed, **sample(process, run_dir)}
                rows.append(row)
                if writer is None:
                    writer = csv.DictWriter(table, row)
                    writer.writeheader()
                writer.writerow(row)
                time.sleep(10)
            ended_early = training.poll()
        finally:
            training.terminate()
            training.wait()
    if ended_early is not None:
        raise SessionsFailed(f"training ended with status {ended_early}; see {run_dir.parent / 'output.txt'}")
    report(rows, run_dir)


def report(rows: list[dict[str, float]], run_dir: Path) -> None:
    """Prints the figures after the warm-up.

    Raises:
        SessionsFailed: one of them grew.
    """
    steady = [row for row in rows if row["seconds"] >= WARM_UP_SECONDS]
    columns = {name: np.array([row[name] for row in steady]) for name in steady[0]}
    hours = columns.pop("seconds") / 3600
    half = len(steady) // 2
    figures = {
        name: {
            "min": float(values.min()),
            "max": float(values.max()),
            "per_hour": float(np.polyfit(hours, values, 1)[0]),  # the least-squares line
            "growth": float(values[half:].max() / values[:half].max()),
        }
        for name, values in columns.items()
    }
    for name, figure in figures.items():
        print(f"{name:<12}" + "".join(f"{key} {value:>10,.2f}   " for key, value in figure.items()))
    print(json.dumps({"run_dir": str(run_dir), "hours": float(hours[-1]), **figures}))
    bounded = ("open_files", "threads", "files", "other_mib")
    growing = [name for name in bounded if figures[name]["growth"] > MAX_GROWTH]
    growing += ["memory_mib"] if figures["memory_mib"]["per_hour"] > MAX_MIB_PER_HOUR else []
    if growing:
        raise SessionsFailed(f"after the warm-up these grew: {', '.join(growing)}")


if __name__ == "__main__":
    cli.run(main)
