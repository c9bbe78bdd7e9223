"""The benchmark's arithmetic against a clock of our own, and the whole command on the real emulator."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
from small_training import TINY, change

from jaxrl_atari.benchmark import __main__ as benchmark
from jaxrl_atari.benchmark import measure
from jaxrl_atari.benchmark.comparison import compare, make_sides
from jaxrl_atari.config import Config
from jaxrl_atari.session import iterations, open_session

# --- Arithmetic --------------------------------------------------------------------------------------------------


def test_rates(tmp_path, monkeypatch):
    """By a clock that moves by 4 s at each reading. Games end after 32 env steps, and the next step starts one."""
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=itertools.count(step=4.0).__next__))
    with open_session(change(TINY, total_env_steps=10_000), tmp_path / "session_0") as run:
        training = measure.Training(run, iterations(run))
        figures = measure.measure_training(training, 9.0)
        assert figures["end_to_end_sps"] == 4 * (48 - 1) / 12  # steps 17 to 64; 33 is no transition
        assert measure.measure_acting(training, 9.0) == {"acting_sps": 4 * (48 - 2) / 12}  # 65 to 112; 66 and 99
        assert measure.measure_emulators(training, 261.0) == {"env_sps": 4 * (66 - 2) / 264}
        assert measure.measure_updates(training, 9.0) == {"update_samples_per_second": 3 * 64 / 12}
        run.learner.update = lambda *_: lambda: {"skipped_steps": 1.0}  # `target_kl` leaves out one of two steps
        assert measure.measure_updates(training, 9.0) == {"update_samples_per_second": 3 * 32 / 12}


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


def test_the_sides_of_a_comparison(simulate):
    def configs(text):
        return [side.args[0] for side in make_sides(text, Config(seed=3), "end_to_end", 1.0).values()]

    assert [config.overlap for config in configs("overlap=none,update")] == ["none", "update"]
    assert [config.devices.evaluator for config in configs("devices.evaluator=false,1")] == [False, 1]
    simulate(1)
    assert [config.devices.gpu for config in configs("cpu,gpu")] == [False, True]  # the ratio is GPU / CPU


# --- The command -------------------------------------------------------------------------------------------------


def test_the_whole_command(capsys):
    sizes = "--env.num-envs 4 --env.num-threads 1 --ppo.rollout-length 16 --ppo.minibatch-size 32 --ppo.epochs 1"
    benchmark.main([*sizes.split(), "--env.game", "Breakout", "--repeats", "2", "--seconds", "0.05"])
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
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
