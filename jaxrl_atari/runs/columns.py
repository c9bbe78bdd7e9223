"""The columns of metrics.csv, with section of graphs and unit. docs/metrics.md defines them.

An algorithm may log other metrics. These are written after the columns listed here, and drawn among "losses". An
entry here adds a unit and a place in the order.
"""

from typing import NamedTuple


class Column(NamedTuple):
    """One column of a log point."""

    section: str  # section of graphs in TensorBoard and Weights & Biases
    unit: str


COLUMNS = {
    "env_steps": Column("charts", "env steps"),
    "updates": Column("charts", ""),
    "optimizer_steps": Column("charts", ""),
    "wall_seconds": Column("charts", "s"),
    "unix_time": Column("charts", "s"),
    "sps": Column("charts", "env steps / s"),
    "episodes": Column("charts", "games"),
    "return_mean": Column("charts", "game points"),
    "return_ma": Column("charts", "game points"),
    "episode_length": Column("charts", "env steps"),
    "games_in_progress": Column("charts", "games"),
    "return_in_progress": Column("charts", "game points"),
    "length_in_progress": Column("charts", "env steps"),
    "learning_rate": Column("charts", ""),
    "loss": Column("losses", ""),
    "policy_loss": Column("losses", ""),
    "value_loss": Column("losses", ""),
    "entropy": Column("losses", "nats"),
    "approx_kl": Column("losses", "nats"),
    "clip_fraction": Column("losses", "share of samples"),
    "explained_variance": Column("losses", ""),
    "gradient_norm": Column("losses", ""),
    "gpu_busy_percent": Column("system", "%"),
    "gpu_memory_gib": Column("system", "GiB"),
    "gpu_power_watts": Column("system", "W"),
    "gpu_temperature_c": Column("system", "°C"),
    "cpu_percent": Column("system", "% of a core"),
    "rss_gib": Column("system", "GiB"),
    "emulators_percent": Column("time", "% of the time"),
    "policy_percent": Column("time", "% of the time"),
    "learning_percent": Column("time", "% of the time"),
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
