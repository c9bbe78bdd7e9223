"""The columns of metrics.csv, with section of graphs and unit. docs/metrics.md defines them.

An algorithm may log other metrics. These are written after the columns listed here, and drawn among "losses". An
entry here adds a unit and a place in the order.
"""

SECTIONS = {
    "charts": {
        "env_steps": "env steps",
        "updates": "",
        "optimizer_steps": "",
        "wall_seconds": "s",
        "unix_time": "s",
        "sps": "env steps / s",
        "episodes": "games",
        "return_mean": "game points",
        "return_ma": "game points",
        "episode_length": "env steps",
        "games_in_progress": "games",
        "return_in_progress": "game points",
        "length_in_progress": "env steps",
        "learning_rate": "",
    },
    "losses": {
        "loss": "",
        "policy_loss": "",
        "value_loss": "",
        "entropy": "nats",
        "approx_kl": "nats",
        "clip_fraction": "share of samples",
        "explained_variance": "",
        "gradient_norm": "",
    },
    "system": {
        "gpu_busy_percent": "%",
        "gpu_memory_gib": "GiB",
        "gpu_power_watts": "W",
        "gpu_temperature_c": "°C",
        "cpu_percent": "% of a core",
        "rss_gib": "GiB",
    },
    "time": {
        "emulators_percent": "% of the time",
        "policy_percent": "% of the time",
        "learning_percent": "% of the time",
    },
}
"""Section of graphs in TensorBoard and Weights & Biases -> column -> its unit.

"losses" are means over the updates that were read since the last log point (`session_log.SessionLog`).
"""

COLUMNS = {name: unit for columns in SECTIONS.values() for name, unit in columns.items()}
"""The columns of every session, in the order of metrics.csv, with their units."""

TIME_COLUMNS = tuple(SECTIONS["time"])
"""Where the time since the last log point went; their sum is 100."""

MACHINE_COLUMNS = (*SECTIONS["system"], *TIME_COLUMNS)
"""Load of the machine, and where the time went."""

EVALUATION_COLUMNS = ("env_steps", "episodes", "mean", "std", "cut_off", "seed", "unix_time")
"""Columns of evaluations.csv. `cut_off` counts the games that reached their time limit; one game has no `std`."""

AXES = ("env_steps", "unix_time")
"""Columns that TensorBoard and Weights & Biases have as axes, and do not draw."""


def section_of(name: str) -> str:
    """The section of graphs of any column that a session logs."""
    return next((section for section, columns in SECTIONS.items() if name in columns), "losses")


def unit_of(name: str) -> str:
    """The unit of any column that a session logs; empty if it has none, or is a metric without an entry."""
    return COLUMNS.get(name, "")
