"""The benchmark's arithmetic against a clock of our own, and the whole command on the real emulator."""

import gzip
import itertools
import json
import math
import mmap
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import psutil
import pytest
from fake_pools import FakePool

from jaxrl_atari.benchmark import __main__ as benchmark
from jaxrl_atari.benchmark import comparison, instruments, measure
from jaxrl_atari.benchmark.comparison import Job, compare, option_of, run_for_json, summary, verdict
from jaxrl_atari.config import Config, EnvConfig, NetworkConfig, PPOConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware import gpus
from jaxrl_atari.hardware.cpu import multiplies_bfloat16, read_cpu
from jaxrl_atari.rollout import Collected

TINY = """
from jaxrl_atari.config import Config, EnvConfig, LogConfig, PPOConfig

def get_config():
    return Config(
        env=EnvConfig(game="Breakout", num_envs=4, num_groups=2, num_threads=1),
        ppo=PPOConfig(rollout_length=8, minibatch_size=16, epochs=1),
    )
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    return str(path)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only its owner moves; `time.time` as well."""
    clock = SimpleNamespace(now=100.0)
    for module in (measure, instruments):
        fake = SimpleNamespace(perf_counter=lambda: clock.now, time=lambda: clock.now)
        monkeypatch.setattr(module, "time", fake)
    return clock


# --- Instruments -----------------------------------------------------------------------------------------------------


def test_every_moment_belongs_to_the_innermost_section(clock):
    def wait(seconds):
        clock.now += seconds

    timer = instruments.SectionTimer()
    inner = timer.timed("transfer")(lambda: wait(3))

    def outer_body():
        wait(1)
        inner()
        wait(10)

    outer = timer.timed("inference")(outer_body)
    wait(100)
    outer()
    wait(1000)
    inner()
    elsewhere = threading.Thread(target=outer)  # the learner's thread, say
    elsewhere.start()
    elsewhere.join()
    timer.enter("other")
    assert timer.seconds == {"other": 100 + 1000 + 14, "inference": 11, "transfer": 6}


def test_a_section_ends_with_an_exception(clock):
    def fail():
        clock.now += 2
        raise ValueError

    timer = instruments.SectionTimer()
    with pytest.raises(ValueError):  # noqa: PT011
        timer.timed("update")(fail)()
    clock.now += 5
    timer.enter("other")
    assert timer.seconds == {"other": 5, "update": 2}


def test_compilations_are_counted():
    with instruments.Compilations() as compilations:
        twice = jax.jit(lambda x: 2 * x + 41)
        x = jax.device_put(np.float32(1))
        twice(x)
        first = compilations.count[compilations.COMPILE]
        twice(x)
        assert compilations.count[compilations.COMPILE] == first > 0
        assert compilations.count["/jax/core/compile/jaxpr_trace_duration"] > 0
        assert compilations.compile_seconds > 0
    jax.jit(lambda x: 3 * x + 41)(x)
    assert compilations.count[compilations.COMPILE] == first


def test_peak_memory_includes_freed_memory():
    before = instruments.peak_rss_gib()
    now = psutil.Process().memory_info().rss / 2**30
    assert before > 0.99 * now
    with mmap.mmap(-1, int((before - now + 0.1) * 2**30)) as block:  # malloc may reuse memory that it has kept
        np.frombuffer(block, np.uint8)[::4096] = 1
    assert instruments.peak_rss_gib() > before + 0.05
    device = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 2**29})
    assert instruments.peak_device_gib([device, device]) == 1
    assert instruments.peak_device_gib([device, SimpleNamespace(memory_stats=lambda: None)]) is None


# --- Rates -----------------------------------------------------------------------------------------------------------


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
    rate = measure.random_play([pool], seconds=15.0, rng=np.random.default_rng(0))
    assert clock.now == 18.0  # 8 steps of 2 s fill the 15 s, and the one that is under way is waited for
    assert rate == 5 * 7 / 18.0  # steps 4 and 8 start new games: 7 of 9 are transitions


def stub_training(clock, overlap):
    """Training of 30 env steps an iteration in 4 s, of updates in 2 s, of rollouts in 1 s."""
    progress, learner = SimpleNamespace(env_steps=1000), SimpleNamespace(state=np.zeros(3), seconds_left=0)

    def collect():
        clock.now += 1
        return Collected([], 30, [], 0.0)

    def iterate():
        clock.now += 4
        progress.env_steps += 30
        return np.zeros(1)

    def settle():
        clock.now += learner.seconds_left
        learner.seconds_left = 0

    def update(*_):
        learner.seconds_left = 2
        learner.state += 1  # in place: an update consumes its state
        if not overlap:
            settle()

    learner.update, learner.settle = update, settle
    learner.reset = lambda state: setattr(learner, "state", state)
    config = Config(env=EnvConfig(num_envs=4), ppo=PPOConfig(rollout_length=8, minibatch_size=32, epochs=3))
    run = SimpleNamespace(progress=progress, learner=learner)
    return SimpleNamespace(
        run=run, iterate=iterate, _collect=collect, _key=lambda: None, overlap=overlap, config=config
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_rates(clock, overlap):
    training = stub_training(clock, overlap)
    assert measure.Training.end_to_end(training, 9.0) == 3 * 30 / 12  # a part ends with its iteration
    env_steps = training.run.progress.env_steps
    assert env_steps == 1000 + 30 * (4 if overlap else 3)
    assert measure.Training.acting(training, 2.5) == 3 * 30 / 3
    assert measure.Training.update(training, 3.0) == 2 * (4 * 8 * 3) / 4
    assert training.run.progress.env_steps == env_steps  # training continues from where it was
    assert training.run.learner.state.tolist() == [0, 0, 0]


# --- Comparisons -----------------------------------------------------------------------------------------------------


def test_summary():
    assert summary([3.0, 1.0, 8.0]) == {"median": 3.0, "min": 1.0, "max": 8.0, "values": [3.0, 1.0, 8.0]}


def test_verdict():
    assert verdict("a", "b", [2.0, 3.0, 1.5]) == "a is 2.00 times as fast as b (1.50 to 3.00 over 3 pairs)"
    assert verdict("a", "b", [0.5, 0.25]) == "b is 3.00 times as fast as a (2.00 to 4.00 over 2 pairs)"
    assert verdict("a", "b", [1.2, 0.8, 1.1]).endswith("(0.80 to 1.20 over 3 pairs): within the noise")


def test_options_of_fields():
    for name in ("num_envs", "num-envs", "env.num_envs"):
        assert option_of(name, "8") == ("--env.num-envs", "8")
    assert option_of("overlap", "none") == ("--overlap", "none")
    assert option_of("evaluator", "false") == ("--devices.evaluator", "false")  # or an index, or `learner`
    assert option_of("devices.deterministic", "true") == ("--devices.deterministic",)
    assert option_of("clip_value_loss", "false") == ("--ppo.no-clip-value-loss",)
    with pytest.raises(UserError, match=r"no_such_field: expected .* env\.num_envs"):
        option_of("no_such_field", "1")
    with pytest.raises(UserError, match=r"every_env_steps: expected .* log\.every_env_steps"):
        option_of("every_env_steps", "1")  # of the log and of evaluation


def test_sides_take_turns_and_ratios_are_of_neighbours(monkeypatch, capsys):
    order, speed = [], itertools.count(1)

    def side(name):
        def run():
            order.append(name)
            return {"rate": float(next(speed)), "peak_rss_gib": 0.5}

        return run

    sides = ({name: side(name) for name in "abc"}, [("b", "a"), ("c", "a")])
    monkeypatch.setattr(comparison, "make_sides", lambda *_: sides)
    result = compare(Job(Path("x.py"), (), 1.0), Config(), "anything", repeats=2)
    assert order == ["a", "b", "c", "c", "b", "a"]
    assert result["ratios"]["b / a"]["values"] == [2 / 1, 5 / 6]
    assert result["ratios"]["c / a"]["values"] == [3 / 1, 4 / 6]
    assert result["sides"]["a"]["rate"]["median"] == 3.5
    assert "b is 1.42 times as fast as a" in capsys.readouterr().out


def fake_run(calls):
    """A stand-in for `run_for_json`: what both a benchmark and the yardstick say."""

    def run(arguments, environment=None):
        calls.append((list(arguments), environment))
        names = ("env_sps", "acting_sps", "end_to_end_sps", "share_of_limit", "update_samples_per_second")
        figures = {name: summary([10.0]) for name in names}
        memory = {"peak_rss_gib": 1.0, "peak_device_gib": None}
        return {
            "figures": figures, "memory": memory, "process": {"devices": ["cpu:0"]},
            "median": 10.0, "peak_rss_gib": 1.0, "framework": "torch", "arithmetic": "bfloat16 autocast",
            "compiled": True, "tried_seconds": {"float32": 2.0},
        }  # fmt: skip

    return run


def test_the_processes_of_a_comparison(monkeypatch):
    calls = []
    monkeypatch.setattr(comparison, "run_for_json", fake_run(calls))
    job = Job(Path("c.py"), ("--seed", "3"), 1.5)
    compare(job, Config(), "overlap=none,update", repeats=1)
    assert [arguments[-4:] for arguments, _ in calls] == [
        ["--seed", "3", "--overlap", "none"],
        ["--seed", "3", "--overlap", "update"],
    ]
    calls.clear()
    compare(job, Config(), "JAXRL_ATARI_NO_TUNING=0,1", repeats=1)
    assert [environment for _, environment in calls] == [
        {"JAXRL_ATARI_NO_TUNING": "0"},
        {"JAXRL_ATARI_NO_TUNING": "1"},
    ]
    calls.clear()
    monkeypatch.setattr(comparison.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(comparison, "YARDSTICK", comparison.Path(__file__))
    monkeypatch.setattr(comparison, "multiplies_bfloat16", lambda: False)
    compare(job, Config(), "torch", repeats=1)
    assert calls[1][0][0] == __file__
    assert {"--mode=plain", "--game=Qbert", "--what=end_to_end"} < set(calls[1][0])
    calls.clear()
    compare(job._replace(compared="update"), Config(), "torch", repeats=1)
    assert calls[0][0][calls[0][0].index("--parts") + 1] == "update"
    assert "--what=update" in calls[1][0]
    calls.clear()
    monkeypatch.setattr(gpus, "visible", lambda: gpus.Visible((gpus.Gpu("0", "a GPU", 1),)))
    compare(job, Config(), "cpu,gpu", repeats=1)
    assert [arguments[-2:] for arguments, _ in calls] == [["--devices.gpu", "false"], ["--devices.gpu", "true"]]


@pytest.mark.parametrize(
    ("dtype", "has_bfloat16", "expected"),
    [
        ("auto", True, ["float32 plain", "float32 tuned", "bfloat16 bfloat16", "bfloat16 best"]),
        ("auto", False, ["float32 plain", "float32 tuned", "float32 best"]),
        ("float32", True, ["float32 plain", "float32 tuned"]),
        ("bfloat16", True, ["bfloat16 bfloat16", "bfloat16 best"]),
        ("bfloat16", False, ["bfloat16 bfloat16"]),
    ],
)
def test_pytorch_is_compared_in_the_same_arithmetic(dtype, has_bfloat16, expected, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(comparison, "run_for_json", fake_run(calls))
    monkeypatch.setattr(comparison.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(comparison, "multiplies_bfloat16", lambda: has_bfloat16)
    config = Config(network=NetworkConfig(compute_dtype=dtype))
    result = compare(Job(Path("c.py"), (), 1.0), config, "torch", repeats=1)
    pairs = [pair.split() for pair in expected]
    assert list(result["ratios"]) == [f"jaxrl_atari {ours} / torch {mode}" for ours, mode in pairs]
    ours = [arguments[-4:] for arguments, _ in calls if arguments[0] == "-m"]
    assert ours == [
        ["--devices.gpu", "false", "--network.compute-dtype", each] for each in dict.fromkeys(ours for ours, _ in pairs)
    ]
    modes = [arguments[2] for arguments, _ in calls if arguments[0] != "-m"]
    assert modes == [f"--mode={mode}" for _, mode in pairs]
    assert result["sides"][f"torch {pairs[-1][1]}"]["runs"][0]["tried_seconds"] == {"float32": 2.0}
    assert f"torch {pairs[-1][1]} 10 (bfloat16 autocast, compiled)" in capsys.readouterr().out


def test_impossible_comparisons(monkeypatch, tmp_path):
    job = Job(Path("c.py"), (), 1.0)
    monkeypatch.setattr(gpus, "visible", lambda: gpus.Visible((), "there is no NVIDIA driver"))
    with pytest.raises(UserError, match="no GPU to compare with: there is no NVIDIA driver"):
        compare(job, Config(), "cpu,gpu", 1)
    monkeypatch.setattr(comparison, "YARDSTICK", tmp_path / "torch_ppo.py")
    with pytest.raises(UserError, match="from a checkout"):
        compare(job, Config(), "torch", 1)
    monkeypatch.setattr(comparison, "YARDSTICK", comparison.Path(__file__))
    monkeypatch.setattr(comparison.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="PyTorch is not installed"):
        compare(job, Config(), "torch", 1)
    monkeypatch.setattr(comparison.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(UserError, match=r"env\.num_envs = 32: expected 16, the yardstick"):
        compare(job, Config(env=EnvConfig(num_envs=32)), "torch", 1)
    with pytest.raises(UserError, match=r"network\.name = 'impala': expected 'nature', the yardstick"):
        compare(job, Config(network=NetworkConfig(name="impala")), "torch", 1)
    with pytest.raises(UserError, match=r"overlap = 'update': expected 'none', the yardstick"):
        compare(job, Config(overlap="update"), "torch", 1)


def test_json_of_a_process(monkeypatch):
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    code = (
        "import os, json; print('words'); print(json.dumps({k: os.environ.get(k) for k in ('MALLOC_TOP_PAD_', 'X')}))"
    )
    assert run_for_json(["-c", code], {"X": "7"}) == {"MALLOC_TOP_PAD_": None, "X": "7"}
    with pytest.raises(UserError, match=r"failed \(exit status 2\): env.num_envs = 3: no"):
        run_for_json(["-c", "import sys; print('error: env.num_envs = 3: no', file=sys.stderr); sys.exit(2)"])


def test_scale(monkeypatch, tmp_path, capsys):
    calls = []
    monkeypatch.setattr(comparison, "run_for_json", fake_run(calls))
    result = comparison.scale(Job(Path("c.py"), (), 1.0), "num_envs=8,16", 2, tmp_path / "plots")
    assert [arguments[-1] for arguments, _ in calls] == ["8", "8", "16", "16"]  # once to compile, once to measure
    assert all(arguments[-2] == "--env.num-envs" for arguments, _ in calls)
    assert result["field"] == "env.num_envs"
    assert result["rows"][16]["env_sps"]["median"] == 10.0
    assert (tmp_path / "plots" / "scale_num_envs.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert capsys.readouterr().out.count("\n") == 5
    with pytest.raises(UserError, match="expected whole numbers"):
        comparison.scale(Job(Path("c.py"), (), 1.0), "overlap=none,update", 1, tmp_path)


def test_startup(monkeypatch):
    calls = []

    def run(arguments, environment=None):
        calls.append(environment["JAX_COMPILATION_CACHE_DIR"])
        about = {"compile_seconds": 4.0, "programs": 2, "cache_hits": 2 * len(calls) - 2}
        return {"process": {"first_env_step_at": 1_005.0, "first_update_at": 1_009.0, **about}}

    monkeypatch.setattr(comparison, "run_for_json", run)
    monkeypatch.setattr(comparison, "time", SimpleNamespace(time=lambda: 1_000.0))
    starts = comparison.measure_startup(Job(Path("c.py"), (), 1.0))
    assert len(set(calls)) == 1  # the second start finds what the first one left
    assert list(starts) == ["cold", "warm"]
    assert starts["cold"]["first_env_step_seconds"] == 5.0
    assert starts["warm"]["first_update_seconds"] == 9.0
    assert starts["warm"]["cache_hits"] == 2


# --- The command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parts", "env,actin"), "--parts = 'actin': expected some of end_to_end, env, acting, update, startup"),
        (("--repeats", "-1"), "--repeats = -1: expected a whole number"),
        (("--repeats", "0", "--compare", "torch"), "--repeats = 0: expected at least 1"),
        (("--repeats", "0", "--trace", "here"), "--repeats = 0: expected at least 1"),
        (("--trace", "/dev/null/here"), "--trace /dev/null/here: Not a directory; choose a folder"),
        (("--repeats", "x"), "invalid int value"),
        (("--compare", "torch", "--scale", "num_envs=8,16"), "not allowed with"),
        (("--scale", "num_envs=4,5"), "minibatch_size = 16: expected a divisor"),
        (("--compare", "overlap=none,some"), "some"),
        (("--env.num-envs", "3"), "minibatch_size = 16: expected a divisor"),
    ],
)
def test_wrong_options(tiny, arguments, message, monkeypatch):
    monkeypatch.setattr(comparison, "run_for_json", lambda *_: pytest.fail("something was started"))
    with pytest.raises(UserError) as error:
        benchmark.main(["--config", tiny, *arguments])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_no_config():
    with pytest.raises(UserError, match="--config: one is needed"):
        benchmark.main([])


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        benchmark.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--compare" in text
    assert "--env.num-envs" in text


@pytest.mark.parametrize("overlap", ["none", "update"])
def test_the_whole_command(tiny, overlap, capsys):
    arguments = ["--repeats", "2", "--seconds", "0.05", "--parts", "end_to_end,env,acting,update", "--overlap", overlap]
    benchmark.main(["--config", tiny, *arguments])
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])

    figures = result["figures"]
    for name in measure.RATES.values():
        assert len(figures[name]["values"]) == 2
        assert 0 < figures[name]["min"] <= figures[name]["median"] <= figures[name]["max"] < math.inf
    shares = [a / b for a, b in zip(figures["end_to_end_sps"]["values"], figures["env_sps"]["values"], strict=True)]
    assert figures["share_of_limit"]["values"] == shares
    assert set(result["iteration_seconds"]) == set(measure.SECTIONS)
    for section in measure.SECTIONS:
        assert result["iteration_seconds"][section]["min"] > 0
    assert 0.1 < result["memory"]["peak_rss_gib"] < 8
    process = result["process"]
    assert process["first_env_step_at"] < process["first_update_at"]
    assert process["cache_hits"] <= process["programs"]
    assert (process["compile_seconds"] > 0) == (process["programs"] > 0)  # none if this worker has them in memory
    assert result["config"]["overlap"] == overlap
    found = read_cpu()
    assert lines.index(str(found)) < lines.index("")
    sets = None if found.instruction_sets is None else list(found.instruction_sets)
    reported = {"cpu": found.model, "cores": found.cores, "threads_per_core": found.threads_per_core}
    assert result["hardware"].items() >= (reported | {"virtual": found.virtual}).items()
    assert result["hardware"]["instruction_sets"] == sets
    assert result["versions"]["jax"] == jax.__version__
    for label in ("raw env SPS", "acting SPS", "update samples/s", "end-to-end SPS", "  env_wait", "peak memory"):
        assert sum(line.startswith(label) for line in lines) == 1


def test_a_trace_shows_updates_of_the_steady_state_and_no_compilation(tiny, tmp_path, capsys):
    folder = tmp_path / "trace"
    benchmark.main(["--config", tiny, "--repeats", "2", "--trace", str(folder)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["iterations"], result["compiled"]) == (2, 0)
    names = [Path(file).name for file in result["trace"]]
    assert sorted(name.partition(".")[2] for name in names) == ["trace.json.gz", "xplane.pb"]  # Perfetto; xprof

    with gzip.open(next(file for file in result["trace"] if file.endswith(".gz"))) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    sections = ("update", "env_wait", "inference")
    named = {name: [event for event in events if event["name"] == name] for name in ("iteration", *sections)}
    assert len(named["iteration"]) == len(named["update"]) == 2
    assert len(named["env_wait"]) == 2 * 8 * 2 * 2  # iterations x steps x groups x send and receive
    for inner in sections:
        for event in named[inner]:
            spans = [(e["ts"], e["ts"] + e["dur"]) for e in named["iteration"]]
            assert any(start <= event["ts"] and event["ts"] + event["dur"] <= end for start, end in spans)
    assert any(event["name"] == "PjitFunction(update)" for event in events)
    assert not [e["name"] for e in events if "compile" in e["name"].lower()]

    profile = jax.profiler.ProfileData.from_file(next(file for file in result["trace"] if file.endswith(".pb")))
    lines = [event.name for plane in profile.planes for line in plane.lines for event in line.events]
    assert lines.count("update") == 2


def test_no_repeats_are_the_first_update_alone(tiny, capsys):
    benchmark.main(["--config", tiny, "--repeats", "0", "--parts", "end_to_end"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["figures"] == result["iteration_seconds"] == {}
    assert result["process"]["first_env_step_at"] < result["process"]["first_update_at"]


@pytest.mark.slow
def test_startup_in_real_processes(tiny, capsys):
    benchmark.main(["--config", tiny, "--repeats", "1", "--seconds", "0.05", "--parts", "startup"])
    cold, warm = json.loads(capsys.readouterr().out.splitlines()[-1])["startup"].values()
    assert cold["cache_hits"] == 0
    assert warm["cache_hits"] == warm["programs"] == cold["programs"]
    assert 0 < warm["compile_seconds"] < cold["compile_seconds"] < cold["first_update_seconds"]
    assert 0 < warm["first_env_step_seconds"] < warm["first_update_seconds"] < cold["first_update_seconds"]


@pytest.mark.slow
def test_comparison_and_scale_in_real_processes(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    short = ["--config", tiny, "--repeats", "1", "--seconds", "0.05"]
    benchmark.main([*short, "--compare", "overlap=none,update"])
    compared = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(side["rate"]["median"] > 0 for side in compared["sides"].values())
    assert len(compared["sides"]) == 2
    benchmark.main([*short, "--scale", "num_envs=4,8"])
    scaled = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["end_to_end_sps"]["median"] > 0 for row in scaled["rows"].values()] == [True, True]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_comparison_with_torch_in_real_processes(capsys):
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    path = comparison.Path(__file__).parents[1] / "configs" / "qbert.py"
    benchmark.main(["--config", str(path), "--repeats", "1", "--seconds", "2", "--compare", "torch"])
    compared = json.loads(capsys.readouterr().out.splitlines()[-1])
    sides = ["jaxrl_atari float32", "torch plain", "torch tuned", "torch best"]
    if multiplies_bfloat16():
        sides += ["jaxrl_atari bfloat16", "torch bfloat16"]
    assert sorted(compared["sides"]) == sorted(sides)
    assert all(side["rate"]["median"] > 0 for side in compared["sides"].values())


@pytest.mark.slow
def test_the_forms_of_acting_play_the_same_games():
    root = Path(__file__).parents[1]
    arguments = ["--config", root / "configs" / "qbert.py", "--rounds", "1", "--seconds", "0.1"]
    arguments += ["--env.num-envs", "2", "--ppo.rollout-length", "16", "--ppo.minibatch-size", "16"]
    command = [sys.executable, root / "benchmarks" / "acting_forms.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.findall(r"^(.+\S) +100\.00% of", done.stdout, re.M) == ["1 group", "1 group, pinned", "xla()", "2 groups"]
    assert all(sps > 0 for (sps,) in json.loads(done.stdout.splitlines()[-1])["sps"].values())


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    if not gpus.visible().gpus:
        pytest.skip(f"no GPU here: {gpus.visible().problem}")
    path = comparison.Path(__file__).parents[1] / "configs" / "qbert.py"
    arguments = ["--repeats", "1", "--seconds", "2", "--parts", "end_to_end,env", "--devices.gpu", "true"]
    benchmark.main(["--config", str(path), *arguments])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["hardware"]["gpus"]
    assert 0 < result["figures"]["gpu_busy_percent"]["median"] <= 100
    assert 0.01 < result["memory"]["peak_device_gib"] < 16


def test_the_yardstick_trains_about_as_long_as_asked(monkeypatch):
    calls = []
    monkeypatch.setattr(comparison, "run_for_json", fake_run(calls))
    comparison._run_torch(Job(Path("c.py"), (), 16.0), Config(), "plain")
    assert "--iterations=4" in calls[0][0]  # 16 s at 500 env steps a second, rollouts of 2,048


SHORT_YARDSTICK = """
import sys
sys.path.insert(0, {folder!r})
import torch_ppo
torch_ppo.EPOCHS, torch_ppo.LENGTH = 1, 32
torch_ppo.main()
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", ["plain", "tuned", "bfloat16", "best"])
def test_the_yardstick_trains_in_every_mode(mode, tmp_path):
    if comparison.importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    script = tmp_path / "short.py"
    script.write_text(SHORT_YARDSTICK.format(folder=str(comparison.YARDSTICK.parent)))
    result = run_for_json([str(script), "--mode", mode, "--iterations", "1"])
    assert result["mode"] == mode
    assert 0 < result["median"] < math.inf
    if mode == "best":  # the fastest of the candidates, with torch.compile among them
        seconds = {name: tried for name, tried in result["tried_seconds"].items() if isinstance(tried, float)}
        chosen = result["arithmetic"] + ", compiled" * result["compiled"]
        assert chosen == min(seconds, key=seconds.__getitem__)
        assert ("bfloat16 autocast" in seconds) == multiplies_bfloat16()
        assert sum(name.endswith(", compiled") for name in result["tried_seconds"]) == 1
    else:
        assert (result["arithmetic"] == "bfloat16 autocast") == (mode == "bfloat16")
        assert not result["compiled"]


def test_the_scale_graph_shows_median_and_range(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(comparison, "save_figure", lambda figure, *_: drawn.append(figure) or [tmp_path])
    figures = {name: summary([1.0, 2.0, 9.0]) for name in ("env_sps", "acting_sps", "end_to_end_sps")}
    rows = {value: figures | {"peak_rss_gib": value / 8, "peak_device_gib": None} for value in (8, 16)}
    comparison.draw_scale("num_envs", rows, tmp_path)
    speed, memory = drawn[0].axes
    assert [line.get_ydata(orig=False).tolist() for line in speed.lines] == [[2.0, 2.0]] * 3
    assert [line.get_ydata(orig=False).tolist() for line in memory.lines] == [[1.0, 2.0]]
    rows = {value: figures | {"peak_rss_gib": 1.0, "peak_device_gib": None} for value in (0, 1, 2, 4)}
    comparison.draw_scale("num_groups", rows, tmp_path)  # 0: automatic
    gaps = np.diff(drawn[1].axes[0].transData.transform([[value, 1] for value in rows])[:, 0])
    assert gaps.min() > 0.2 * gaps.sum()  # all four are told apart
