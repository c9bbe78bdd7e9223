"""The benchmark's arithmetic against a clock of our own, and the whole command on the real emulator."""

import gzip
import importlib.util
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from fake_pools import FakePool

from jaxrl_atari.benchmark import __main__ as benchmark
from jaxrl_atari.benchmark import measure
from jaxrl_atari.benchmark.comparison import SideRun, compare, make_sides, print_comparison, run_json
from jaxrl_atari.config import Config, EnvConfig, PPOConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware import gpus
from jaxrl_atari.hardware.cpu import read_cpu
from jaxrl_atari.rollout import Collected

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = ["--env.game", "Breakout", "--env.num-envs", "4", "--env.num-groups", "2", "--env.num-threads", "1",
        "--ppo.rollout-length", "8", "--ppo.minibatch-size", "16", "--ppo.epochs", "1"]  # fmt: skip


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
        return Collected([], 30, [], waiting_seconds=0.0, other_seconds=0.0)

    def iterations():
        for number in itertools.count():
            clock.now += 4
            progress.env_steps += 30
            if number == 2:
                log_point(policy_percent=30.0)
            yield np.zeros(1)

    def log_point(policy_percent):
        log.row = dict.fromkeys(measure.MACHINE_COLUMNS, math.nan)
        log.row |= {"policy_percent": policy_percent, "wall_seconds": clock.now}

    def wait():
        clock.now += 2
        return {}

    def wait_for_half():
        clock.now += 1
        return {"skipped_steps": 1.5}

    log.last_point = lambda rate: log_point(policy_percent=0.0)
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
    assert (
        found["policy_percent"] == (8 * 30.0 + 4 * 0.0) / 12
    )  # of the one that is due, and of the one at the end
    assert math.isnan(found["gpu_busy_percent"])
    assert measure.measure_acting(training, 2.5) == {"acting_sps": 3 * 30 / 3}
    assert measure.measure_updates(training, 3.0) == {"update_samples_per_second": 2 * (4 * 8 * 3) / 4}
    learner.update = lambda *_: wait_for_half  # of 3 gradient steps, `target_kl` leaves out half
    assert measure.measure_updates(training, 3.0) == {"update_samples_per_second": 3 * (4 * 8 * 1.5) / 3}


@pytest.mark.parametrize("anneal", [False, True])
def test_updates_are_measured_without_a_learning_rate(anneal, monkeypatch):
    """They would train the session that the other parts measure."""
    rates = []

    def update(rollouts, options, key):
        rates.append(options.learning_rate)
        return dict

    learner = SimpleNamespace(update=update, acting_params=list, state=0)
    config = Config(ppo=PPOConfig(anneal_learning_rate=anneal))
    session = SimpleNamespace(
        learner=learner, config=config, environments=SimpleNamespace(groups=[]), keys=lambda _: (0, 0)
    )
    monkeypatch.setattr(measure, "collect", lambda *_, **__: Collected([], 30, [], 0.0, 0.0))
    measure.measure_updates(measure.Training(session, iter(())), 1e-9)
    assert rates == [0.0]


def test_sides_take_turns_and_ratios_are_of_neighbours(capsys):
    order, speed = [], itertools.count(1)

    def side(name):
        def run():
            order.append(name)
            return SideRun(float(next(speed)), 0.5, {"name": name})

        return run

    result = compare({name: side(name) for name in "abc"}, [("b", "a"), ("c", "a")], repeats=2)
    assert order == ["a", "b", "c", "c", "b", "a"]
    assert result.ratios["b / a"].values == [2 / 1, 5 / 6]
    assert result.ratios["c / a"].values == [3 / 1, 4 / 6]
    assert result.sides["a"].rate.median == 3.5
    assert result.to_dict()["sides"]["a"] == {
        "rate": {"median": 3.5, "min": 1.0, "max": 6.0, "values": [1.0, 6.0]},
        "runs": [{"name": "a"}] * 2,
    }
    print_comparison(result)
    out = capsys.readouterr().out
    assert out.startswith("round 1 of 2: a 1\nround 1 of 2: b 2\n")
    assert "b / a: 1.42 (0.83 to 2.00, 2 pairs)" in out


def test_a_side_shows_the_traceback_of_a_bug_and_one_line_of_an_error_of_the_user(capfd):
    with pytest.raises(UserError, match=r"-c .* failed \(exit status 1\): ZeroDivisionError: division by zero"):
        run_json(["-c", "1 / 0"])
    assert capfd.readouterr().err.startswith("Traceback (most recent call last):\n")
    with pytest.raises(UserError, match=r"failed \(exit status 2\): devices.gpu"):
        run_json(["-c", "import sys; print('error: devices.gpu', file=sys.stderr); sys.exit(2)"])
    assert capfd.readouterr().err == ""
    code = "import sys; print('a warning', file=sys.stderr); print('{}')"
    assert run_json(["-c", code]) == {}
    assert capfd.readouterr().err == "a warning\n"


def test_the_sides_of_a_comparison():
    def configs(text):
        return [side.args[0] for side in make_sides(text, Config(seed=3), "end_to_end", 1.0).values()]

    assert [config.overlap for config in configs("overlap=none,update")] == ["none", "update"]
    assert [config.log.graphs for config in configs("log.graphs=true,false")] == [True, False]
    assert [config.devices.evaluator for config in configs("devices.evaluator=false,1")] == [False, 1]
    if gpus.visible_gpus().gpus:
        assert [config.devices.gpu for config in configs("cpu,gpu")] == [False, True]  # the ratio is GPU / CPU
    else:  # an error before anything is measured
        with pytest.raises(UserError, match=r"devices\.gpu = True: expected a visible GPU"):
            configs("cpu,gpu")


# --- The command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parts", "env,actin"), "--parts = 'env,actin': expected some of end_to_end,env,acting,update"),
        (("--repeats", "0"), "--repeats = 0: expected a whole number"),
        (("--devices.distributed",), "devices.distributed = True: expected false: one process is measured"),
        (("--compare", "overlap=none,update", "--trace", "x"), "--trace = 'x': expected nothing with --compare"),
        (("--compare", "overlap=none,update", "--parts", "env,acting"), "expected one part with --compare"),
        (("--trace", "x", "--parts", "env"), "--parts = 'env': expected nothing with --trace"),
        (("--compare", "env.num_envs=8"), "expected cpu,gpu or FIELD=VALUE,VALUE,..."),
    ],
)
def test_wrong_options(arguments, message, capsys):
    with pytest.raises(UserError) as error:
        run(capsys, *arguments)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("overlap=none,some", "^invalid choice 'some' for argument '--overlap'"),
        ("env.num_envs=4,5", r"^ppo\.minibatch_size = .*: expected a divisor"),
        ("env.nothing=1,2", "^--env.nothing: benchmark --compare has no such option"),
        ("help=a,b", "^--help: benchmark --compare has no such option"),
    ],
)
def test_a_value_that_the_config_cannot_have_is_refused_before_anything_is_measured(text, message, capsys):
    with pytest.raises(UserError, match=message):
        run(capsys, "--compare", text)
    assert "round 1" not in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("overlap", ["none", "update"])
def test_the_whole_command(overlap, capsys):
    lines, result = run(capsys, "--repeats", 2, "--seconds", 0.05, "--overlap", overlap)
    progress = [line for line in lines if line.startswith("repeat 2 of 2")]
    assert [part for part in measure.PARTS if f"  {part} " in progress[0]] == [*measure.PARTS]
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
    assert (result["config"]["overlap"], result["versions"]["jax"]) == (overlap, jax.__version__)
    assert result["hardware"]["cpu"] in "\n".join(lines)


@pytest.mark.long
def test_figures_that_cannot_be_saved_are_shown(tmp_path, capsys):
    path = tmp_path / ("x" * 250)  # with that of a partial file, longer than a name may be
    with pytest.raises(UserError, match=r"shown above, but not saved: .*File name too long"):
        benchmark.main([*TINY, "--parts", "env", "--repeats", "1", "--seconds", "0.01", "--json", str(path)])
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert shown["figures"]["env_sps"]["median"] > 0
    benchmark.main(
        [*TINY, "--parts", "env", "--repeats", "1", "--seconds", "0.01", "--json", str(tmp_path / "a/b")]
    )
    assert json.loads((tmp_path / "a/b").read_text()) == json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_file_for_the_figures_is_checked_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    benchmark.check_options(benchmark.Options(json_file=tmp_path / "new" / "a.json"))
    assert not (tmp_path / "new").exists()  # a check makes no folder
    for path, words in (
        (tmp_path, "expected the path of a file"),
        (tmp_path / "file" / "a.json", "choose another"),
    ):
        with pytest.raises(UserError, match=rf"--json.*{words}"):
            benchmark.main([*TINY, "--json", str(path)])
    with pytest.raises(UserError, match=r"--trace .*/file: File exists; choose another folder"):
        benchmark.main([*TINY, "--trace", str(tmp_path / "file")])


@pytest.mark.long
def test_a_trace_shows_iterations_of_the_steady_state_and_no_compilation(tmp_path, capsys):
    _, result = run(capsys, "--repeats", 2, "--trace", tmp_path / "trace")
    names = [Path(file).name.partition(".")[2] for file in result["trace"]]
    assert names == ["trace.json.gz", "xplane.pb"]  # Perfetto; xprof
    with gzip.open(result["trace"][0]) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == "iteration"]
    assert len(spans) == 2
    updates = [event["ts"] for event in events if event["name"] == "PjitFunction(update)"]
    assert all(any(start <= at <= end for at in updates) for start, end in spans)
    assert not [event["name"] for event in events if "compile" in event["name"].lower()]


SHORT = ("--seconds", 0.05, "--repeats", 1)


@pytest.mark.slow
def test_a_comparison_in_real_processes(capsys):
    result = run(capsys, *SHORT, "--compare", "env.num_envs=2,4", "--parts", "acting")[1]
    assert all(side["rate"]["median"] > 0 for side in result["sides"].values())
    assert [*result["ratios"]] == ["env.num_envs=4 / env.num_envs=2"]


def test_a_side_that_fails_is_an_error(capsys):
    with pytest.raises(UserError, match=r"failed \(exit status 2\): devices.gpu = True: expected a visible GPU"):
        run(capsys, "--compare", "devices.gpu=true,false") if not gpus.visible_gpus().gpus else pytest.skip(
            "there is a GPU"
        )


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    if not gpus.visible_gpus().gpus:
        pytest.skip(f"no GPU here: {gpus.visible_gpus().why_none}")
    benchmark.main(["--repeats", "1", "--seconds", "2", "--parts", "end_to_end,env", "--devices.gpu", "true"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["hardware"]["gpus"]
    assert 0 < result["figures"]["gpu_busy_percent"]["median"] <= 100


# --- The yardstick -----------------------------------------------------------------------------------------------


def python(script, *arguments):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_jaxrl_atari_beside_torch():
    compared = python(BENCHMARKS / "compare_torch.py", "--repeats", 1, "--seconds", 2)
    sides = ["jaxrl_atari float32", "torch plain", "torch tuned", "torch best"]
    if "BF16" in read_cpu().instruction_sets:
        sides += ["jaxrl_atari bfloat16", "torch bfloat16"]
    assert sorted(compared["sides"]) == sorted(sides)
    for name, side in compared["sides"].items():
        assert side["rate"]["median"] > 0
        (result,) = side["runs"]
        if name == "torch best":  # the fastest of the candidates, with torch.compile among them
            seconds = {name: tried for name, tried in result["tried_seconds"].items() if isinstance(tried, float)}
            chosen = result["arithmetic"] + ", compiled" * result["compiled"]
            assert chosen == min(seconds, key=seconds.__getitem__)
            assert sum(name.endswith(", compiled") for name in result["tried_seconds"]) == 1
        elif name.startswith("torch"):
            assert (result["arithmetic"] == "bfloat16 autocast") == (name == "torch bfloat16")
