"""Log points: speed, shares of the time, the score, and when an evaluation is due. On clocks of the tests' own."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from small_training import TINY, Lines, change

from jaxrl_atari.envs.pool import FinishedGame
from jaxrl_atari.errors import InterfaceError
from jaxrl_atari.runs.columns import TIME_COLUMNS
from jaxrl_atari.runs.description import resume_text
from jaxrl_atari.runs.progress import EpisodeStatistics, Progress
from jaxrl_atari.runs.session_log import SessionLog
from jaxrl_atari.update import current_options, learning_rate


def session_log(writer, every_env_steps, progress, unlogged=()):
    """The log of a session without gradient steps, figures of the machine and games in progress."""
    return SessionLog(
        writer,
        every_env_steps,
        progress,
        unlogged=unlogged,
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
        log.after_update(lambda end=end: wait_until(end), 1e-3, (0.75, 0.25))
    log.read_newest()
    log.last_point(1e-3)
    # The last point is of one rollout, and of two updates: it waits for the newest.
    assert [(row["env_steps"], row.get("sps")) for row in lines.rows] == [
        (600, None), (1200, 100), (1800, 100), (2100, 60)
    ]  # fmt: skip
    shares = [[row[name] for name in TIME_COLUMNS] for row in lines.rows[1:]]
    assert shares == [pytest.approx(x) for x in ([25, 25 / 3, 200 / 3], [25, 25 / 3, 200 / 3], [15, 5, 80])]
    assert lines.rows[0]["wall_seconds"] == 1, "without the first update, which compiles"


def test_a_resume_on_other_clocks(monkeypatch):
    """The monotonic clock begins anew with the machine, and the date was set back by a day."""
    monotonic, date = SimpleNamespace(now=1e6), SimpleNamespace(now=1.8e9)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic.now)
    monkeypatch.setattr(time, "time", lambda: date.now)
    meta, found = {}, []
    for _ in range(2):
        lines, progress = Lines(), Progress(meta)
        log = session_log(lines, 100, progress, meta.get("unlogged_metrics", ()))
        for _ in range(3):
            monotonic.now += 2
            date.now += 2
            progress.count(100, [], 1)
            log.after_update(lambda: {"loss": 1.0}, 0.1, (0.5, 0.5))
        found += [(row["env_steps"], row["wall_seconds"], row.get("sps")) for row in lines.rows]
        log.read_newest()
        meta = {"config": TINY.to_dict(), **progress.state(), **log.state()}
        monotonic.now, date.now = 5.0, date.now - 86_400
    # The first update of each start, which may compile, does not count.
    assert found[:3] == [(100, 0, None), (200, 2, 50), (300, 4, 50)]
    assert found[3:] == [(400, 4, None), (500, 6, 50), (600, 8, 50)]


def test_a_metric_that_has_the_name_of_a_column_is_refused():
    for name in ("updates", "sps", "cpu_percent"):
        progress = Progress({})
        log = session_log(Lines(), 1000, progress)
        log.after_update(lambda name=name: {"loss": 1.0, name: 2.0}, 1e-3, (0.0, 0.0))
        log.read_newest()
        progress.count(300, [], 16)
        with pytest.raises(InterfaceError, match=f"metric {name} = "):
            log.last_point(1e-3)


@pytest.mark.parametrize("update", [2_048, 131_072])
def test_return_ma_depends_neither_on_log_points_nor_on_the_size_of_updates(update):
    """On a line that rises to 10 at 10M env steps, the mean of the last 1M is 9.5."""
    statistics = EpisodeStatistics()
    for env_steps in [*range(update, 10_000_000, update), 10_000_000]:
        statistics.returns.clear()
        statistics.count([FinishedGame(0, 0, env_steps / 1e6, 1)], env_steps)
        if env_steps % 3:
            statistics.to_row()
    assert statistics.to_row()["return_ma"] == pytest.approx(9.5, rel=0.005)


def test_the_learning_rate_is_a_line_to_zero_and_the_options_reach_the_update():
    rates = [learning_rate(TINY, env_steps) for env_steps in (0, 64, 256, 300)]
    np.testing.assert_allclose(rates, [2.5e-4, 2.5e-4 * 0.75, 0.0, 0.0])
    config = change(TINY, ppo={"anneal_learning_rate": False, "gamma": 0.9})
    options = current_options(config, 128)
    assert (options.learning_rate, options.gae_lambda, options.gamma) == tuple(map(np.float32, (2.5e-4, 0.7, 0.9)))


def test_a_resume_names_what_may_change_its_numbers():
    provenance = {"compute_dtype": "float32", "coefficients": {"z_loss": 0.1}, "numeric_settings": {"threads": 2}}
    before = {"env_steps": 10, "updates": 1, "provenance": {**provenance, "python": "3.11"}}
    assert "differ" not in resume_text(before, before)
    now = {"compute_dtype": "bfloat16", "coefficients": {"z_loss": 0.2}, "numeric_settings": {"threads": 3}}
    text = resume_text(before, {"provenance": {**now, "python": "3.12"}})
    assert "python" not in text
    for change_of in ("compute_dtype float32 -> bfloat16", "coefficients.z_loss 0.1 -> 0.2", "threads 2 -> 3"):
        assert f"{change_of}, so numbers may differ" in text
