"""The columns of metrics.csv, with section of graphs, unit and definition. docs/metrics.md explains them.

An algorithm may log other metrics. These are written after the columns listed here, and drawn among "losses". An
entry here adds a unit, a definition and a place in the order.
"""

from typing import NamedTuple


class Column(NamedTuple):
    """One column of a log point."""

    section: str  # section of graphs in TensorBoard and Weights & Biases
    unit: str
    definition: str


COLUMNS = {
    "env_steps": Column("charts", "env steps", "env steps of this session so far"),
    "updates": Column("charts", "", "updates so far"),
    "optimizer_steps": Column("charts", "", "gradient steps so far"),
    "wall_seconds": Column(
        "charts", "s", "training time so far, without the first rollout and update of each start"
    ),
    "unix_time": Column("charts", "s", "when the log point was written, since 1970 (UTC)"),
    "sps": Column("charts", "env steps / s", "env steps per second since the last log point"),
    "episodes": Column("charts", "games", "games finished so far"),
    "return_mean": Column("charts", "game points", "mean return of the last 100 finished games"),
    "return_ma": Column(
        "charts",
        "game points",
        "mean of return_mean over the last tenth of the budget, at most 1M env steps; the score",
    ),
    "episode_length": Column("charts", "env steps", "mean length of the last 100 finished games"),
    "games_in_progress": Column("charts", "games", "games in progress, until a game has finished"),
    "return_in_progress": Column("charts", "game points", "their mean return so far"),
    "length_in_progress": Column("charts", "env steps", "their mean length so far"),
    "learning_rate": Column("charts", "", "Adam's step size in the next update"),
    "loss": Column("losses", "", "the function whose gradient is taken"),
    "policy_loss": Column("losses", "", "clipped surrogate loss"),
    "value_loss": Column("losses", "", "clipped value loss, before the value coefficient"),
    "entropy": Column("losses", "nats", "entropy of the policy"),
    "approx_kl": Column("losses", "nats", "estimate of KL(pi_old, pi)"),
    "clip_fraction": Column("losses", "share of samples", "samples whose probability ratio is clipped"),
    "explained_variance": Column("losses", "", "1 - Var(target - V_old) / Var(target) over the rollout"),
    "gradient_norm": Column("losses", "", "global L2 norm of the gradient, before clipping"),
    "gpu_busy_percent": Column("system", "%", "NVML utilisation, mean over the GPUs that learn or act"),
    "gpu_memory_gib": Column(
        "system", "GiB", "GPU memory in use by all processes, sum over the GPUs that learn or act"
    ),
    "gpu_power_watts": Column("system", "W", "power draw, sum over the GPUs that learn or act"),
    "gpu_temperature_c": Column("system", "°C", "temperature of the hottest of the GPUs that learn or act"),
    "cpu_percent": Column("system", "% of a core", "CPU time of this process / time passed"),
    "rss_gib": Column("system", "GiB", "resident memory of this process"),
    "emulators_percent": Column("time", "% of the time", "waiting for the emulators"),
    "policy_percent": Column("time", "% of the time", "the rest of acting: policy, transfers, bookkeeping"),
    "learning_percent": Column("time", "% of the time", "waiting for the update; log points, checkpoints"),
}
"""The columns of every session, in the order of metrics.csv.

"losses" are means over the updates that were read since the last log point (`session_log.SessionLog`).
"""

TIME_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.section == "time")
"""Where the time since the last log point went; their sum is 100."""

MACHINE_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.section in ("system", "time"))
"""Load of the machine, and where the time went."""

EVALUATION_COLUMNS = ("env_steps", "episodes", "mean", "std", "cut_off", "seed", "unix_time")
"""Columns of evaluations.csv. `cut_off` counts the games that reached their time limit; one game has no `std`."""

AXES = ("env_steps", "unix_time")
"""Columns that TensorBoard and Weights & Biases have as axes, and do not draw."""


def section_of(name: str) -> str:
    """The section of graphs of any column that a session logs."""
    return COLUMNS[name].section if name in COLUMNS else "losses"


def unit_of(name: str) -> str:
    """The unit of any column that a session logs; empty if it has none, or is a metric without an entry."""
    return COLUMNS[name].unit if name in COLUMNS else ""
