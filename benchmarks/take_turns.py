"""Compares the speed of training in two checkouts, or with other environment variables, on a noisy machine.

    python benchmarks/take_turns.py ../before . [--blocks 6] [--updates 8] [-- OPTIONS OF TRAIN]
    python benchmarks/take_turns.py . "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 ."

Both trainings take turns, one iteration each: while one runs, the other is halted (SIGSTOP). A machine whose speed
drifts over minutes slows both alike, so a ratio is steady where two whole runs differ by 20%. Start-up and
compilation do not count. The same seed gives both the same games. Linux only.

Run it twice, and take the second result: a process that has compiled its programs is slower than one that has
read them from the cache (benchmarks/NOTES.md). Several runs tell how much ratios differ from process to process.
"""

import argparse
import csv
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

WARM_UP = 4  # iterations of each training before the first turn


class Turn(NamedTuple):
    """The seconds that an iteration took."""

    wall: float
    cpu: float


class Training:
    """A training in a process of its own, which can be halted.

    Args:
        side: `[NAME=VALUE ...] CHECKOUT`, environment variables and a checkout of this repository.
        run_dir: directory of the run.
        options: further options of `train`.
    """

    def __init__(self, side: str, run_dir: Path, options: list[str]):
        *variables, checkout = side.split()
        root = Path(checkout).resolve()
        environment = os.environ | {"PYTHONPATH": str(root)} | dict(each.split("=", 1) for each in variables)
        command = [sys.executable, "-m", "jaxrl_atari.train", "--config", "configs/qbert.py"]
        command += ["--total-env-steps", str(10**12), "--log.every-env-steps", "1"]  # a row for each iteration
        command += ["--log.checkpoint-every-env-steps", str(10**12), "--log.no-graphs", "--run-dir", str(run_dir)]
        self.metrics = run_dir / "session_0" / "metrics.csv"
        self.output = run_dir.with_suffix(".txt")
        with self.output.open("w") as output:
            self.process = psutil.Popen(
                [*command, *options], cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def iterations(self) -> int:
        """Number of complete iterations."""
        if not self.metrics.is_file():
            return 0
        with self.metrics.open() as lines:
            return sum(1 for _ in csv.reader(lines)) - 1

    def run_until(self, iterations: int) -> None:
        """Lets the training run until it has completed so many iterations, and halts it."""
        self.process.send_signal(signal.SIGCONT)
        while self.iterations() < iterations:
            if self.process.poll() is not None:
                sys.exit(f"the training has ended:\n{self.output.read_text()[-2000:]}")
            time.sleep(0.005)
        self.process.send_signal(signal.SIGSTOP)

    def cpu_seconds(self) -> float:
        """CPU time of the process so far."""
        times = self.process.cpu_times()
        return times.user + times.system

    def resident_mib(self) -> float:
        """Resident memory now."""
        return self.process.memory_info().rss / 2**20

    def turn(self) -> Turn:
        """Runs one iteration."""
        cpu = self.cpu_seconds()
        start = time.monotonic()
        self.run_until(self.iterations() + 1)
        return Turn(time.monotonic() - start, self.cpu_seconds() - cpu)


def compare(sides: list[str], blocks: int, updates: int, options: list[str]) -> None:
    """Prints the speed of the second training, divided by that of the first, in wall time and in CPU time."""
    trainings: list[Training] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, side in zip("ab", sides, strict=True):
                trainings.append(Training(side, Path(folder) / name, options))
                trainings[-1].run_until(WARM_UP)
            first, second = trainings
            wall_ratios = []  # of each block: the speed of the second training, divided by that of the first
            cpu_ratios = []
            for block in range(blocks):
                turns: dict[Training, list[Turn]] = {first: [], second: []}
                for number in range(block * updates, (block + 1) * updates):
                    for training in (first, second) if number % 2 == 0 else (second, first):
                        turns[training].append(training.turn())
                wall = {training: sum(turn.wall for turn in taken) for training, taken in turns.items()}
                cpu = {training: sum(turn.cpu for turn in taken) for training, taken in turns.items()}
                wall_ratios.append(wall[first] / wall[second])
                cpu_ratios.append(cpu[first] / cpu[second])
            for name, ratios in (("wall", wall_ratios), ("CPU", cpu_ratios)):
                each = " ".join(f"{ratio:.3f}" for ratio in ratios)
                ratio = statistics.median(ratios)
                print(f"{sides[1]} is {ratio:.3f} times as fast as {sides[0]} in {name} time; blocks: {each}")
            print("resident memory, MiB:", *(f"{training.resident_mib():.0f}" for training in trainings))
        finally:
            for training in trainings:
                training.process.kill()
                training.process.wait()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("sides", nargs=2, metavar="'[NAME=VALUE ...] CHECKOUT'")
    parser.add_argument("--blocks", type=int, default=6, help="number of ratios")
    parser.add_argument("--updates", type=int, default=8, help="iterations of each training in a block")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    chosen = parser.parse_args(sys.argv[1:split])
    compare(chosen.sides, chosen.blocks, chosen.updates, sys.argv[split + 1 :])


if __name__ == "__main__":
    main()
