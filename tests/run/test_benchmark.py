"""The benchmark's arithmetic against a clock of our own, and the whole command on the real emulator."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from fake_pools import FakePool

from jaxrl_atari.benchmark import __main__ as benchmark
from jaxrl_atari.benchmark import measure
from jaxrl_atari.benchmark.comparison import compare, make_sides
from jaxrl_atari.config import Config, EnvConfig, PPOConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware import gpus
from jaxrl_atari.rollout import Collected

TINY = ["--env.game", "Breakout", "--env.num-envs", "4", "--env.num-threads", "1",
        "--ppo.rollout-length", "16", "--ppo.minibatch-size", "32", "--ppo.epochs", "1"]  # fmt: skip


def run(capsys, *arguments):
    """Lines of output, and the JSON object in the last one."""
    benchmark.main([*TINY, *map(str, arguments)])
    lines = capsys.readouterr().out.splitlines()
    return lines, json.loads(lines[-1])


# --- Arithmetic --------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A clock that only its owner moves."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


class TickingPool(FakePool):
    """Every step takes 2 s; a game lasts for 3 env steps and the step that starts the next one."""

    num_actions = 3

    def __init__(self, clock):
        super().__init__(num_envs=5)
        self._clock, self._steps = clock, [0] * 5

    def recv(self):
        self._clock.now += 2
        return super().recv()

    def _start(self, i):
        self._steps[i] = 0

    def _play(self, i, action):
        self._steps[i] += 1
        return 0.0, self._steps[i] == 3, False, False

    def _frame(self, i):
        return np.zeros((84, 84), np.uint8)


def test_steps_that_start_a_game_are_no_transitions(clock):
    pool = TickingPool(clock)
    pool.reset()
    clock.now = 0.0
    rate = measure.emulator_speed(pool, seconds=15.0)
    assert clock.now == 16.0  # 8 steps of 2 s
    assert rate == 5 * 6 / 16.0  # steps 4 and 8 start new games: 6 of 8 are transitions


def test_rates(clock, monkeypatch):
    """Training of 30 env steps an iteration in 4 s, of updates in 2 s, of rollouts in 1 s."""
    progress, learner, log = (
        SimpleNamespace(**parts) for parts in ({"env_steps": 1000}, {"state": 0}, {"row": {}})
    )

    def collect(*_, **__):
        clock.now += 1
        return Collected([], 30, [], waiting_seconds=0.0, other_seconds=0.0, logged={})

    def iterations():
        while True:
            clock.now += 4
            progress.env_steps += 30
            yield np.zeros(1)

    def log_point(policy_percent):
        log.row = dict.fromkeys(measure.MACHINE_COLUMNS, math.nan)
        log.row["policy_percent"] = policy_percent

    def wait():
        clock.now += 2
        return {}

    def wait_for_half():
        clock.now += 1
        return {"skipped_steps": 1.5}

    log.last_point = lambda rate: log_point(policy_percent=30.0)
    learner.update, learner.acting_params = lambda *_: wait, list
    config = Config(env=EnvConfig(num_envs=4), ppo=PPOConfig(rollout_length=8, minibatch_size=32, epochs=3))
    environments = SimpleNamespace(groups=[])
    session = SimpleNamespace(
        progress=progress,
        learner=learner,
        log=log,
        config=config,
        environments=environments,
        keys=lambda _: (0, 0),
    )
    monkeypatch.setattr(measure, "collect", collect)
    training = measure.Training(session, iterations())
    found = measure.measure_training(training, 9.0)
    assert found["end_to_end_sps"] == 3 * 30 / 12  # a part ends with its iteration
    assert found["policy_percent"] == 30.0
    assert math.isnan(found["gpu_busy_percent"])
    assert measure.measure_acting(training, 2.5) == {"acting_sps": 3 * 30 / 3}
    assert measure.measure_updates(training, 3.0) == {"update_samples_per_second": 2 * (4 * 8 * 3) / 4}
    learner.update = lambda *_: wait_for_half  # of 3 gradient steps, `target_kl` leaves out half
    assert measure.measure_updates(training, 3.0) == {"update_samples_per_second": 3 * (4 * 8 * 1.5) / 3}


def test_sides_take_turns_and_ratios_are_of_neighbours():
    order, speed = [], itertools.count(1)

    def side(name):
        def run():
            order.append(name)
            return {"rate": float(next(speed)), "rss_gib": 0.5}

        return run

    result = compare({name: side(name) for name in "abc"}, [("b", "a"), ("c", "a")], repeats=2)
    assert order == ["a", "b", "c", "c", "b", "a"]
    assert result["ratios"]["b / a"]["values"] == [2 / 1, 5 / 6]
    assert result["ratios"]["c / a"]["values"] == [3 / 1, 4 / 6]
    assert result["sides"]["a"] == {
        "rate": {"median": 3.5, "min": 1.0, "max": 6.0, "values": [1.0, 6.0]},
        "runs": [{"rate": 1.0, "rss_gib": 0.5}, {"rate": 6.0, "rss_gib": 0.5}],
    }


def test_the_sides_of_a_comparison():
    def configs(text):
        return [side.args[0] for side in make_sides(text, Config(seed=3), "end_to_end", 1.0).values()]

    assert [config.overlap for config in configs("overlap=none,update")] == ["none", "update"]
    assert [config.devices.evaluator for config in configs("devices.evaluator=false,1")] == [False, 1]
    if gpus.visible_gpus().gpus:
        assert [config.devices.gpu for config in configs("cpu,gpu")] == [False, True]  # the ratio is GPU / CPU
    else:  # an error before anything is measured
        with pytest.raises(UserError, match=r"devices\.gpu = True: expected a visible GPU"):
            configs("cpu,gpu")


# --- The command -------------------------------------------------------------------------------------------------


def test_what_cannot_be_measured(capsys):
    for arguments, message in (
        (("--parts", "env,actin"), "--parts = 'env,actin': expected some of end_to_end,env,acting,update"),
        (("--compare", "overlap=none,update", "--parts", "env,acting"), "expected one part with --compare"),
        (("--compare", "env.num_envs=8"), "expected cpu,gpu or FIELD=VALUE,VALUE,..."),
        (("--compare", "env.num_envs=4,5"), "ppo.minibatch_size"),
    ):
        with pytest.raises(UserError) as error:
            run(capsys, *arguments)
        assert message in str(error.value)


def test_the_whole_command(capsys):
    lines, result = run(capsys, "--repeats", 2, "--seconds", 0.05)
    figures = result["figures"]
    rates = ("end_to_end_sps", "env_sps", "acting_sps", "update_samples_per_second")
    for name in (*rates, "cpu_percent", "emulators_percent"):
        assert len(figures[name]["values"]) == 2
        assert 0 < figures[name]["min"] <= figures[name]["median"] <= figures[name]["max"] < math.inf
        assert sum(line.startswith(f"{name} ") for line in lines) == 1
    shares = [
        a / b for a, b in zip(figures["end_to_end_sps"]["values"], figures["env_sps"]["values"], strict=True)
    ]
    assert figures["share_of_limit"]["values"] == shares
    time = [figures[name]["values"] for name in ("emulators_percent", "policy_percent", "learning_percent")]
    np.testing.assert_allclose(np.sum(time, axis=0), 100)
    assert 0.1 < result["start_peak_rss_gib"] < 8
    assert result["start_seconds"] > 0
    assert result["config"]["env"]["num_envs"] == 4


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    if not gpus.visible_gpus().gpus:
        pytest.skip(f"no GPU here: {gpus.visible_gpus().why_none}")
    benchmark.main(["--repeats", "1", "--seconds", "2", "--parts", "end_to_end,env", "--devices.gpu", "true"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["hardware"]["gpus"]
    assert 0 < result["figures"]["gpu_busy_percent"]["median"] <= 100
