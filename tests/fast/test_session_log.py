"""Log points: speed, shares of the time, the score, and when an evaluation is due. On clocks of the tests' own."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from small_training import Lines

from jaxrl_atari.errors import InterfaceError
from jaxrl_atari.runs.columns import TIME_COLUMNS
from jaxrl_atari.runs.progress import Progress
from jaxrl_atari.runs.session_log import SessionLog


def session_log(writer, every_env_steps, progress):
    """The log of a session without gradient steps, figures of the machine and games in progress."""
    return SessionLog(
        writer,
        every_env_steps,
        progress,
        unlogged=(),
        optimizer_steps=0,
        steps_per_update=0,
        monitor=dict,
        games_so_far=lambda: np.zeros((0, 2)),
    )


def test_sps_and_shares_of_the_time(monkeypatch):
    """Acting takes 1 s, of which 0.75 s wait for the emulators, and the update takes 2 s."""
    clock, lines, progress, end = SimpleNamespace(now=0.0), Lines(), Progress({}), 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    log = session_log(lines, 600, progress)

    def wait_until(end):
        clock.now = max(clock.now, end)
        return {"loss": 1.0}

    for _ in range(7):
        clock.now = max(clock.now, end) + 1.0  # acting waits for the parameters
        end = clock.now + 2.0
        progress.count(300, [], 16)
        log.after_update(lambda end=end: wait_until(end), 1e-3, (0.75, 0.25), {})
    log.read_newest()
    log.last_point(1e-3)
    # The last point is of one rollout, and of two updates: it waits for the newest.
    assert [(row["env_steps"], row.get("sps")) for row in lines.rows] == [
        (600, None), (1200, 100), (1800, 100), (2100, 60)
    ]  # fmt: skip
    shares = [[row[name] for name in TIME_COLUMNS] for row in lines.rows[1:]]
    assert shares == [pytest.approx(x) for x in ([25, 25 / 3, 200 / 3], [25, 25 / 3, 200 / 3], [15, 5, 80])]
    assert lines.rows[0]["wall_seconds"] == 1, "without the first update, which compiles"


def test_a_metric_that_has_the_name_of_a_column_is_refused():
    for name in ("updates", "sps", "cpu_percent"):
        log = session_log(Lines(), 1000, Progress({}))
        log.after_update(lambda name=name: {"loss": 1.0, name: 2.0}, 1e-3, (0.0, 0.0), {})
        with pytest.raises(InterfaceError, match=f"metric = '{name}': expected another name"):
            log.read_newest()
