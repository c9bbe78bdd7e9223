import csv
import dataclasses
import functools
import importlib
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from sample_runs import write_checkpoint
from user_commands import ROOT, free_address

from jaxrl_atari import train
from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, LogConfig, PPOConfig, load_config_file
from jaxrl_atari.errors import ConfigError, SessionsFailed, UserError
from jaxrl_atari.report.search_records import Record, ranked, read_records, trial_dir, write_record
from jaxrl_atari.runs.description import session_dir
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.runs.reading import checkpoint_steps, session_dirs
from jaxrl_atari.runs.writers import CsvWriter
from jaxrl_atari.search import (
    Choice,
    Grid,
    Integer,
    LogUniform,
    ResourcesConfig,
    SearchConfig,
    Uniform,
    worker,
)
from jaxrl_atari.search import __main__ as search_command
from jaxrl_atari.search.files import read_search, write_search
from jaxrl_atari.search.results import write_results
from jaxrl_atari.search.space import check_space, grid_point, search_from_dict, set_fields
from jaxrl_atari.search.worker import trial_config

# Ray forks to start its processes, and these run other programs at once: JAX's warning is not for them.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")

# More combinations than are tested.
MANY = {
    f"ppo.{name}": Choice((0.1, 0.2, 0.3, 0.4, 0.5))
    for name in ("gamma", "gae_lambda", "clip_epsilon", "entropy_coef", "value_coef", "weight_decay")
}
SPACE = {"ppo.gae_lambda": Uniform(0.7, 0.98), "ppo.learning_rate": LogUniform(1e-4, 5e-4)}


@pytest.fixture
def tune():
    """The module `tune`, which needs the packages of the extra `search`."""
    for package in ("ray", "optuna"):
        pytest.importorskip(package, reason=f"search mode needs {package}: pip install 'jaxrl_atari[search]'")
    return search_command.load_tune("")


@pytest.fixture
def algorithm(tune):
    """The module `algorithm`."""
    return importlib.import_module("jaxrl_atari.search.algorithm")


def small_search(**settings):
    return SearchConfig(**{"space": SPACE, "trials": 6, "grace_env_steps": 1000, "seed": 3} | settings)


def has_ended(pid, timeout=30.0):
    """Waits for a process to end; returns whether it did. A zombie has ended."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def start_search(tmp_path, search, config=None):
    """Makes a new search directory, as the command does; returns the config."""
    config = config or Config(name="small", total_env_steps=9000)
    write_search(tmp_path, config, search)
    return config


def some_fields(space, number):
    """Fields of trial `number`, in the space."""
    rng = np.random.default_rng(number)
    return {
        name: float(rng.uniform(d.low, d.high)) if isinstance(d, (Uniform, LogUniform)) else d.values[number % 2]
        for name, d in space.items()
    }


def add_trial(search_dir, number, scores, status="unfinished", fields=None, every=1000):
    """Adds a trial with a log point every `every` env steps, and a checkpoint."""
    fields = some_fields(SPACE, number) if fields is None else fields
    score = scores[-1] if scores and status != "unfinished" else None
    record = Record(number, fields, status, "" if status == "unfinished" else "why", score, every * len(scores))
    write_record(search_dir, record)
    config = trial_config(*read_search(search_dir), fields, 0, 1)
    write_json(trial_dir(search_dir, number) / "config.json", {"config": config.to_dict()})
    session = trial_dir(search_dir, number) / "session_0"
    write_checkpoint(session, record.env_steps)
    writer = CsvWriter(session / "metrics.csv")
    for i, score in enumerate(scores):
        writer.write({"env_steps": every * (i + 1), "return_mean": score, "return_ma": score, "wall_seconds": 1.0})
    writer.close()


def last_checkpoint(session_dir):
    return max(int(path.name) for path in (session_dir / "checkpoints").iterdir())


def last_log_point(session_dir):
    with (session_dir / "metrics.csv").open() as file:
        return int(([{"env_steps": 0}, *csv.DictReader(file)])[-1]["env_steps"])


def output(search_dir, number):
    return (trial_dir(search_dir, number) / "output.txt").read_text()


# --- The space -------------------------------------------------------------------------------------------------------


def test_published_space_is_shipped():
    config, search, _ = search_command.parse(["--config", str(ROOT / "configs/search_qbert.py")])
    assert config.env.game_name == "Qbert"
    assert search.space == {
        "ppo.gae_lambda": Uniform(0.7, 0.98),
        "ppo.entropy_coef": LogUniform(0.005, 0.03),
        "ppo.learning_rate": LogUniform(1e-4, 5e-4),
    }
    assert (search.grace_env_steps, search.reduction, search.early_stopping) == (500_000, 3, "asha")
    assert search.resources == ResourcesConfig(gpu=0.25)
    check_space(config, search)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({}, "search.space"),
        ({"ppo.gae_lamda": Uniform(0.7, 0.9)}, "ppo.gae_lamda"),
        ({"lambda": Uniform(0.7, 0.9)}, "'lambda': expected a field"),
        ({"ppo": Choice((1, 2))}, "'ppo': expected a field"),
        ({"devices.gpu": Choice((0, 1))}, "devices.gpu"),
        ({"seed": Integer(0, 3)}, "may differ between trials"),
        ({"ppo.gae_lambda": Uniform(0.9, 0.7)}, "lower to a higher"),
        ({"ppo.gae_lambda": Uniform(0.9, 1.1)}, "ppo.gae_lambda = 1.1: expected a number from 0 to 1"),
        ({"ppo.gae_lambda": Uniform(0.9, math.nan)}, "ppo.gae_lambda"),
        ({"ppo.learning_rate": LogUniform(0.0, 1e-3)}, "above 0"),
        ({"ppo.learning_rate": Integer(0, 1.5)}, "whole"),
        ({"ppo.epochs": Uniform(1, 4)}, "use Integer"),
        ({"ppo.epochs": Integer(0, 4)}, "ppo.epochs = 0"),
        ({"ppo.epochs": Choice(())}, "at least one value"),
        ({"ppo.epochs": Choice((1, 2.5))}, "ppo.epochs = 2.5: expected a whole number"),
        ({"ppo.anneal_learning_rate": Choice((True, "no"))}, "'no'"),
        ({"env.backend": Choice(("ale", "gym"))}, "'gym'"),
        ({"env.backend": Choice(("ale", "gym")), **MANY}, "'gym'"),
        ({"ppo.minibatch_size": Choice((256, 300))}, "ppo.minibatch_size = 300: expected a divisor"),
        ({"env.num_envs": Choice((8, 16)), "ppo.minibatch_size": Choice((256, 2048))}, "= 1024 samples"),
        ({"ppo.epochs": (1, 4)}, "Uniform, LogUniform"),
        ({"ppo.epochs": Grid((1, 2, 3)), "ppo.clip_epsilon": Grid((0.1, 0.2, 0.3))}, "9 points of the grid"),
    ],
)
def test_an_invalid_space_is_an_error_that_names_the_field(space, words):
    with pytest.raises(ConfigError) as caught:
        check_space(Config(), SearchConfig(space=space, trials=8))
    assert words in str(caught.value)


def test_a_valid_space_passes_and_is_saved_as_json():
    space = {
        "ppo.gae_lambda": Choice((None, 0.9)),
        "ppo.weight_decay": Uniform(0, 1),
        "ppo.epochs": Integer(1, 8),
        "ppo.anneal_learning_rate": Grid((True, False)),
        "env.game": Choice(("Pong", "Qbert")),
        "overlap": Choice(("none", "update")),
        "total_env_steps": Integer(10**6, 10**7),
    }
    search = SearchConfig(space=space, resources=ResourcesConfig(gpu=0.25))
    check_space(Config(), search)
    assert search_from_dict(json.loads(json.dumps(search.to_dict()))) == search


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reduction": 1}, "search.reduction"),
        ({"method": "grid"}, "search.method"),
        ({"early_stopping": "yes"}, "search.early_stopping"),
        ({"keep": -1}, "search.keep"),
    ],
)
def test_an_invalid_option_is_an_error(settings, words):
    with pytest.raises(ConfigError, match=words):
        small_search(**settings)


@pytest.mark.parametrize("gpu", [-0.5, -1, 1.5, math.inf])
def test_an_invalid_share_of_a_gpu_is_an_error(gpu):
    with pytest.raises(ConfigError, match="gpu = "):
        ResourcesConfig(gpu=gpu)


def test_a_grace_period_beyond_the_budget_is_an_error_with_early_stopping():
    config = Config(total_env_steps=100_000)
    with pytest.raises(ConfigError, match="grace_env_steps"):
        check_space(config, SearchConfig(space=SPACE))
    check_space(config, SearchConfig(space=SPACE, early_stopping="none"))


@pytest.mark.parametrize(
    ("devices", "share", "words"),
    [
        ({"gpu": 0}, 1.0, "devices.gpu = 0: expected auto"),
        ({"gpu": True}, 0.0, "search.resources.gpu = 0.0"),
        ({"actor": 1}, 1.0, "devices.actor = 1: expected a GPU of the trial, which has 1"),
    ],
)
def test_a_trial_has_the_gpus_that_ray_gives_it(devices, share, words):
    with pytest.raises(ConfigError, match=words):
        check_space(Config(devices=DevicesConfig(**devices)), small_search(resources=ResourcesConfig(gpu=share)))


def test_a_search_on_gpus_that_are_not_there_writes_nothing(tune, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXRL_ATARI_SIMULATED_GPUS", "0")
    arguments = ["--config", str(ROOT / "configs/search_qbert.py"), "--devices.gpu", "true"]
    with pytest.raises(ConfigError, match=r"devices\.gpu = True: expected a visible GPU"):
        search_command.main([*arguments, "--output-dir", str(tmp_path / "data")])
    assert list(tmp_path.iterdir()) == []


def test_random_samples_are_reproducible_and_distributed_as_specified(algorithm):
    space = {**SPACE, "ppo.epochs": Integer(1, 3), "ppo.clip_epsilon": Choice((0.1, 0.2))}
    search, other_seed = (small_search(space=space, method="random", seed=seed) for seed in (0, 1))
    samples = [algorithm.sample(search, i) for i in range(2000)]
    assert samples[5] == algorithm.sample(search, 5) != algorithm.sample(other_seed, 5)
    rates = np.array([d["ppo.learning_rate"] for d in samples])
    assert rates.min() >= 1e-4
    assert rates.max() <= 5e-4
    # Median of a log-uniform: the geometric mean of its ends; 2,000 samples are within 5%.
    assert np.median(rates) == pytest.approx(math.sqrt(1e-4 * 5e-4), rel=0.05)
    assert np.mean([d["ppo.gae_lambda"] for d in samples]) == pytest.approx(0.84, abs=0.01)
    counts = np.bincount([d["ppo.epochs"] for d in samples], minlength=4)
    assert counts[0] == 0
    assert counts[1:].min() > 550  # a third each, including the upper end
    assert {d["ppo.clip_epsilon"] for d in samples} == {0.1, 0.2}


def test_a_grid_gives_every_point_in_turn(algorithm):
    space = {"ppo.epochs": Grid((1, 2, 4)), "ppo.gamma": Uniform(0.9, 0.99), "ppo.clip_epsilon": Grid((0.1, 0.2))}
    points = [tuple(grid_point(space, i).values()) for i in range(7)]
    assert points == [(1, 0.1), (1, 0.2), (2, 0.1), (2, 0.2), (4, 0.1), (4, 0.2), (1, 0.1)]
    for method in ("random", "optuna"):
        assert algorithm.sample(small_search(space=space, method=method), 3)["ppo.epochs"] == 2


def test_set_fields_replaces_fields_that_are_valid_only_together():
    fields = {"env.num_envs": 8, "ppo.minibatch_size": 1024, "ppo.gamma": 0.9, "overlap": "update"}
    config = set_fields(Config(), fields)
    assert (config.env.num_envs, config.ppo.minibatch_size, config.ppo.gamma) == (8, 1024, 0.9)
    assert config.overlap == "update"
    assert config.env.game == Config().env.game


# --- The command line ------------------------------------------------------------------------------------------------


def test_command_line_sets_search_and_config():
    path = str(ROOT / "configs/search_qbert.py")
    arguments = ["--config", path, "--search.trials", "4", "--search.resources.gpu", "0.125", "--ppo.epochs", "2"]
    config, search, search_dir = search_command.parse([*arguments, "--search.early-stopping", "none"])
    assert (search.trials, search.resources.gpu, config.ppo.epochs, search_dir) == (4, 0.125, 2, None)
    assert search.early_stopping == "none"
    assert set(search.space) == {"ppo.gae_lambda", "ppo.entropy_coef", "ppo.learning_rate"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "one is needed"),
        (["--config", str(ROOT / "configs/search_qbert.py"), "--search.trial", "4"], "search.trial"),
        (["--resume", "here", "--run-dir", "there"], "both name the search directory"),
        (["--config", str(ROOT / "configs/search_qbert.py"), "--devices.distributed"], "false in a search"),
    ],
)
def test_command_line_errors_are_one_line(arguments, words):
    with pytest.raises(UserError, match=words) as caught:
        search_command.parse(arguments)
    assert "\n" not in str(caught.value)


def test_help_needs_no_config(capsys):
    with pytest.raises(SystemExit) as ended:
        search_command.parse(["--help"])
    assert not ended.value.code
    assert "--search.trials" in capsys.readouterr().out


def test_resume_may_add_trials_but_not_change_the_search(tmp_path):
    start_search(tmp_path, small_search())
    _, search, search_dir = search_command.parse(["--resume", str(tmp_path), "--search.trials", "9"])
    assert (search.trials, search_dir) == (9, tmp_path)
    with pytest.raises(ConfigError, match="= 4: expected 3"):
        search_command.parse(["--resume", str(tmp_path), "--search.reduction", "4"])


def test_run_dir_starts_a_search_or_continues_the_one_it_holds(tmp_path):
    line = ["--config", str(ROOT / "configs/search_qbert.py"), "--run-dir", str(tmp_path / "search")]
    config, search, search_dir = search_command.parse(line)
    assert search_dir == tmp_path / "search"
    search_dir.mkdir()
    write_search(search_dir, config, search)
    assert search_command.parse([*line, "--search.retries", "2"])[1].retries == 2
    assert search_command.parse(["--run-dir", str(search_dir), "--search.retries", "2"])[1].retries == 2
    with pytest.raises(UserError, match=r"--run-dir .*none: holds no search; give --config FILE"):
        search_command.parse(["--run-dir", str(tmp_path / "none")])
    with pytest.raises(ConfigError, match=r"ppo.epochs = 2: expected 4, its value in this search"):
        search_command.parse([*line, "--ppo.epochs", "2"])


def test_failed_trials_are_tried_again_as_often_as_asked(algorithm, tmp_path):
    start_search(tmp_path, small_search())
    add_trial(tmp_path, 0, [1.0], "failed")
    write_record(tmp_path, dataclasses.replace(read_records(tmp_path)[0], tries=1))
    (record,) = read_records(tmp_path).values()
    assert [record.is_open(retries) for retries in (0, 1)] == [False, True]
    assert algorithm.TrialSampler(tmp_path, small_search(), {}).suggest("id")["number"] == 1
    assert algorithm.TrialSampler(tmp_path, small_search(retries=1), {}).suggest("id")["number"] == 0


@pytest.fixture
def one_thread(monkeypatch):
    """`run_search_trial` in this process: it sets NPROC, which would stay for the tests after it."""
    monkeypatch.setenv("NPROC", "1")


@pytest.mark.parametrize("status", ["unfinished", "failed"])
@pytest.mark.usefixtures("one_thread")
def test_a_trial_that_starts_again_has_no_reason_of_an_earlier_end(tmp_path, monkeypatch, status):
    start_search(tmp_path, small_search())
    add_trial(tmp_path, 0, [1.0])
    record = read_records(tmp_path)[0]
    write_record(tmp_path, dataclasses.replace(record, status=status, reason="why it ended before"))
    monkeypatch.setattr(worker, "run_session", lambda *arguments, **how: None)
    worker.run_search_trial({"search_dir": str(tmp_path), "number": 0, "fields": record.fields, "gpu": 0, "cpu": 1})
    assert read_records(tmp_path)[0] == record


@pytest.mark.usefixtures("one_thread")
def test_a_resumed_trial_keeps_the_software_that_began_it(tmp_path, monkeypatch):
    start_search(tmp_path, small_search())
    add_trial(tmp_path, 0, [1.0])
    file = trial_dir(tmp_path, 0) / "config.json"
    write_json(file, json.loads(file.read_text()) | {"git_revision": "abc", "python": "3.0"})
    monkeypatch.setattr(worker, "run_session", lambda *arguments, **how: None)
    record = read_records(tmp_path)[0]
    worker.run_search_trial({"search_dir": str(tmp_path), "number": 0, "fields": record.fields, "gpu": 0, "cpu": 1})
    described = json.loads(file.read_text())
    assert (described["git_revision"], described["python"]) == ("abc", "3.0")
    assert [entry["python"] for entry in described["resumed"]] == [platform.python_version()]


# --- Resources of a trial --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu", "share"), [(1.0, 0.9), (0.5, 0.45), (0.25, 0.225), (0.125, 0.1125), (2.0, 0.9)])
def test_memory_share_follows_the_gpu_share(gpu, share):
    assert trial_config(Config(), small_search(), {}, gpu, 2).devices.memory_fraction == pytest.approx(share)


def test_trial_config():
    config = Config(sessions=4, log=LogConfig(graphs=True))
    stopping, whole = small_search(), small_search(early_stopping="none")
    trial = trial_config(config, stopping, {"ppo.gamma": 0.9}, 0, 2)
    assert (trial.sessions, trial.devices.gpu, trial.env.num_threads, trial.log.graphs) == (1, False, 2, False)
    assert trial.ppo.gamma == 0.9
    assert trial_config(config, whole, {}, 0, 2).sessions == 4
    own = Config(devices=dataclasses.replace(config.devices, memory_fraction=0.3))
    with pytest.raises(ConfigError, match="memory_fraction"):
        trial_config(own, stopping, {}, 0.25, 1)


def test_resources(tune):
    def split(gpu, cpu, *machines):
        return tune.resources(small_search(resources=ResourcesConfig(gpu, cpu)), machines, "auto", "there is no GPU")

    assert split(0.25, 0, {"GPU": 2.0, "CPU": 16.0})[:3] == (0.25, 2, 8)
    assert "8 at a time" in split(0.25, 0, {"GPU": 2.0, "CPU": 16.0})[3]
    assert split(0.4, 0, {"GPU": 2.0, "CPU": 16.0})[:3] == (0.4, 4, 4)  # none has parts of two GPUs
    assert split(2.0, 0, {"GPU": 5.0, "CPU": 16.0})[:3] == (2.0, 8, 2)
    gpu, cpu, at_once, line = split(0.25, 0, {"CPU": 2.0})
    assert (gpu, cpu, at_once) == (0, 1, 2)
    assert "there is no GPU" in line
    assert split(0.0, 2, {"GPU": 2.0, "CPU": 16.0})[:2] == (0, 2)
    with pytest.raises(ConfigError, match=r"devices\.gpu = True: expected a Ray cluster with GPUs"):
        tune.resources(small_search(), [{"CPU": 2.0}], True, "")
    with pytest.raises(UserError, match="found: 1 GPU and 2 cores"):
        split(2.0, 1, {"GPU": 1.0, "CPU": 2.0})
    # Several machines: a trial runs on one of them.
    assert split(1.0, 0, {"CPU": 32.0}, {"GPU": 2.0, "CPU": 8.0})[:3] == (1.0, 4, 2)
    assert split(1.0, 0, {"GPU": 1.0, "CPU": 8.0}, {"GPU": 2.0, "CPU": 4.0})[:3] == (1.0, 2, 3)
    assert split(0.0, 4, {"CPU": 6.0}, {"CPU": 6.0})[:3] == (0.0, 4, 2)
    with pytest.raises(UserError, match="found: 2 GPUs and 16 cores on 2 machines, none of which has enough of both"):
        split(2.0, 0, {"GPU": 1.0, "CPU": 8.0}, {"GPU": 1.0, "CPU": 8.0})


# --- Sampling, ASHA and records --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["optuna", "random"])
def test_a_resumed_search_starts_with_unfinished_trials_and_repeats_nothing(algorithm, tmp_path, method):
    search = small_search(method=method)
    start_search(tmp_path, search)
    sampler = algorithm.TrialSampler(tmp_path, search, {"gpu": 0})
    first = [sampler.suggest(f"id{i}") for i in range(3)]
    assert [task["number"] for task in first] == [0, 1, 2]
    records = read_records(tmp_path)
    assert [records[i].fields for i in range(3)] == [task["fields"] for task in first]  # on disk before they start
    add_trial(tmp_path, 1, [5.0], "finished", first[1]["fields"])
    add_trial(tmp_path, 2, [], "failed", first[2]["fields"])

    again = algorithm.TrialSampler(tmp_path, search, {"gpu": 0})
    assert again.suggest("id9") == first[0]
    new = again.suggest("id10")
    assert new["number"] == 3
    assert new["fields"] not in [task["fields"] for task in first]
    for name, distribution in SPACE.items():
        assert distribution.low <= new["fields"][name] <= distribution.high


class FakeTrial:
    def __init__(self, number):
        self.trial_id, self.config = f"new{number}", {"number": number}


def test_asha_continues_with_its_comparisons_after_a_resume(algorithm, tmp_path):
    search = small_search()
    start_search(tmp_path, search)
    for number, score in enumerate((10.0, 20.0, 30.0)):
        add_trial(tmp_path, number, [math.nan, score], "finished")  # its first score at 2,000 env steps
    add_trial(tmp_path, 3, [25.0, 26.0])  # unfinished, past the first comparison already
    add_trial(tmp_path, 6, [1.0])  # unfinished, perhaps ended before it was compared
    asha = algorithm.ResumableAsha(tmp_path, search, 9000)
    trials = {number: FakeTrial(number) for number in (3, 4, 5, 6)}
    for trial in trials.values():
        asha.on_trial_add(None, trial)

    def decide(number, env_steps, score):
        return asha.on_trial_result(None, trials[number], {"env_steps": env_steps, "return_ma": score})

    assert decide(3, 2000, 0.0) == "CONTINUE"  # compared at 1,000 before
    assert decide(6, 1000, 1.0) == "STOP"
    cutoff = float(np.percentile([10, 20, 30, 25, 1], 100 * (1 - 1 / 3)))  # the best third continues
    assert decide(4, 1000, cutoff - 0.1) == "STOP"
    assert decide(5, 1000, 100.0) == "CONTINUE"


def test_the_record_of_an_ended_trial_follows_from_its_files(tune, tmp_path):
    search = small_search(keep=1)
    start_search(tmp_path, search)
    add_trial(tmp_path, 0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    add_trial(tmp_path, 1, [1.0, 1.5])
    add_trial(tmp_path, 2, [7.0])
    add_trial(tmp_path, 3, [])
    ended = [tune.end_record(tmp_path, i, failure, False, 1) for i, failure in enumerate(["", "", "broke", ""])]
    assert [(r.status, r.score, r.env_steps) for r in ended] == [
        ("finished", 9.0, 9000),
        ("stopped", 1.5, 2000),
        ("failed", 7.0, 1000),
        ("stopped", None, 0),
    ]
    assert ended[2].reason == "broke"
    assert [record.number for record in ranked(ended)] == [0, 1]


def test_a_trial_is_finished_by_its_own_budget_and_sessions(tune, tmp_path):
    space = {"total_env_steps": Choice((6000, 9000)), "ppo.rollout_length": Choice((128, 512))}
    start_search(tmp_path, small_search(space=space, early_stopping="none"))
    add_trial(tmp_path, 0, [1.0] * 6, fields={"total_env_steps": 6000})
    add_trial(tmp_path, 1, [1.0] * 6, fields={"ppo.rollout_length": 512})  # 8,192 env steps a rollout
    add_trial(tmp_path, 2, [1.0] * 6)
    add_trial(tmp_path, 3, [1.0] * 9, fields={"sessions": 2})  # the second one has not begun
    assert [tune.end_record(tmp_path, i, "", True, 1).status for i in range(4)] == [
        "finished", "finished", "unfinished", "unfinished",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("", "its process was killed, by hand or for lack of memory"),
        ("Failure # 1\nThe actor died unexpectedly before finishing this task.\n", "its process was killed, by hand"),
        # Excerpt of a message of Ray 2.60; its last line is about Ray's settings.
        (
            "Failure # 1\n1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 127.1,"
            " ID: a1) was 1.20GB used / 23.54GB limit (0.050969)\nRefer to the documentation\n",
            "Ray killed its process because the machine was low on memory (1.20GB used / 23.54GB limit)",
        ),
        ("Traceback\n  File x\nTypeError: cannot pickle\n", "TypeError: cannot pickle"),
    ],
)
def test_the_reason_of_a_killed_process_is_one_line(tune, tmp_path, error, reason):
    (tmp_path / "error.txt").write_text(error)
    assert tune.failure_reason(tmp_path / "error.txt").startswith(reason)
    assert "\n" not in tune.failure_reason(tmp_path / "error.txt")


def test_only_the_best_trials_keep_their_checkpoints(tune, tmp_path):
    start_search(tmp_path, small_search())
    for number, (score, status) in enumerate(
        [(8.0, "stopped"), (9.0, "failed"), (7.0, "finished"), (6.0, "finished"), (1.0, "unfinished")]
    ):
        add_trial(tmp_path, number, [score], status)
    tune.remove_checkpoints(tmp_path, small_search(keep=2))
    kept = {path.parent.parent.name for path in tmp_path.glob("trial_*/session_0/checkpoints")}
    assert kept == {"trial_1", "trial_2", "trial_3", "trial_4"}  # a failed one may be tried again
    assert (tmp_path / "trial_0/session_0/metrics.csv").exists()


@pytest.mark.usefixtures("one_thread")
def test_a_failed_trial_continues_from_its_checkpoint(tune, tmp_path, monkeypatch):
    """After a resume of the search with more `retries`: its sessions that had finished are left alone."""
    config = Config(name="small", total_env_steps=8192, sessions=2)
    start_search(tmp_path, small_search(early_stopping="none"), config)
    add_trial(tmp_path, 0, [1.0, 2.0], "failed", every=4096)
    write_checkpoint(trial_dir(tmp_path, 0) / "session_1", 4096)
    tune.remove_checkpoints(tmp_path, small_search(keep=0))
    asked = []

    def run_session(config, folder, session, *, resume, **how):
        asked.append((folder.name, resume, checkpoint_steps(folder)))

    monkeypatch.setattr(worker, "run_session", run_session)
    monkeypatch.setattr(worker, "write_trial_summary", lambda run_dir: {"score": None})
    fields = read_records(tmp_path)[0].fields
    worker.run_search_trial({"search_dir": str(tmp_path), "number": 0, "fields": fields, "gpu": 0, "cpu": 1})
    assert asked == [("session_1", True, [4096])]


def test_sigusr1_stays_a_stop_request_when_tune_begins(tune, tmp_path):
    recorder, stop = tune.Recorder(tmp_path, small_search()), tune.StopFile(tmp_path)
    with stop:
        before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as Tune sets its own
        recorder.setup(stop=None, num_samples=1, total_num_samples=1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested()
        signal.signal(signal.SIGUSR1, before)
    stop.clear()


def test_the_scores_of_trials_are_printed_in_full(tune, tmp_path, monkeypatch):
    start_search(tmp_path, small_search())
    add_trial(tmp_path, 0, [14_295.4])
    lines = []
    monkeypatch.setattr(tune, "say", lines.append)
    monkeypatch.setattr(tune, "STATUS_SECONDS", 0.0)
    result = {"env_steps": 1000, "return_ma": 14_295.4}
    trial = SimpleNamespace(status="RUNNING", config={"number": 0}, last_result=result)
    recorder = tune.Recorder(tmp_path, small_search())
    recorder.on_step_end(0, [trial])
    recorder.on_trial_complete(0, [trial], trial)
    assert lines == [
        "running: trial 0 1,000 env steps, return_ma 14,295",
        "trial 0  stopped at 1,000 env steps, score 14,295: worse than others (ASHA)",
    ]


def test_checkpoints_are_kept_if_no_trial_has_a_score(tune, tmp_path):
    start_search(tmp_path, small_search())
    for number in range(2):
        add_trial(tmp_path, number, [], "finished")
    tune.remove_checkpoints(tmp_path, small_search(keep=1))
    assert [path.parent.parent.name for path in tmp_path.glob("trial_*/session_0/checkpoints")] == ["trial_0"]


# --- Results ---------------------------------------------------------------------------------------------------------


def drawn(monkeypatch, search_dir):
    """Name of each graph of a search -> its figure."""
    figures = {}
    keep = lambda figure, folder, name: figures.update({name: figure})  # noqa: E731
    monkeypatch.setattr("jaxrl_atari.search.plots.save_figure", keep)
    write_results(search_dir)
    return figures


def test_results(tmp_path, monkeypatch):
    search = small_search(space={**SPACE, "env.game": Choice(("Pong", "Qbert"))})
    config = Config(name="small", total_env_steps=9000, env=EnvConfig(num_envs=8), ppo=PPOConfig(epochs=2))
    start_search(tmp_path, search, config)
    for number, (scores, status) in enumerate(
        [([1.0, 4.0], "stopped"), ([2.0, 5.0, 12.5], "finished"), ([], "failed"), ([3.0], "unfinished")]
    ):
        add_trial(tmp_path, number, scores, status, some_fields(search.space, number))
    table = write_results(tmp_path)

    with (tmp_path / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["trial"] for row in rows] == ["1", "0", "2", "3"]  # best first
    assert (float(rows[0]["score"]), int(rows[0]["env_steps"]), rows[0]["status"]) == (12.5, 3000, "finished")
    assert float(rows[0]["ppo.gae_lambda"]) == some_fields(search.space, 1)["ppo.gae_lambda"]
    assert rows[2]["score"] == ""
    lines = table.splitlines()
    assert len(lines) == 2 + 4
    assert len({len(line) for line in lines}) == 1  # aligned
    assert len({line.count("|") for line in lines}) == 1
    assert (tmp_path / "trials.md").read_text() == table
    for name in ("fields", "parallel", "curves"):
        for suffix in (".png", ".svg"):
            assert (tmp_path / "graphs" / (name + suffix)).stat().st_size > 5000
    figures = drawn(monkeypatch, tmp_path)
    (best_line,) = [line for line in figures["curves"].axes[0].lines if line.get_linewidth() > 2]
    assert best_line.get_ydata().tolist() == [2.0, 5.0, 12.5]
    axes = next(axes for axes in figures["fields"].axes if axes.get_xlabel() == "ppo.gae_lambda")
    points = [tuple(map(float, points.get_offsets()[0])) for points in axes.collections]
    assert points[1] == (some_fields(search.space, 1)["ppo.gae_lambda"], 12.5)

    best = tmp_path / "small_best.py"
    expected = set_fields(config, some_fields(search.space, 1))
    assert load_config_file(best) == dataclasses.replace(expected, name="small_best")
    chosen, _ = train.parse(["--config", str(best), "--sessions", "4"])
    assert (chosen.sessions, chosen.ppo.gae_lambda) == (4, expected.ppo.gae_lambda)
    assert max(map(len, best.read_text().splitlines())) <= 110


def test_the_field_that_decides_the_score_has_the_largest_importance(algorithm, tmp_path, monkeypatch):
    space = {"ppo.gamma": Uniform(0.9, 0.99), "ppo.learning_rate": LogUniform(1e-4, 1e-3), "ppo.epochs": Choice((2, 4))}
    search = small_search(space=space, method="random", trials=24)
    start_search(tmp_path, search)
    for number in range(24):
        fields = algorithm.sample(search, number)
        add_trial(tmp_path, number, [1e5 * fields["ppo.learning_rate"]], "finished", fields)
    text = write_results(tmp_path)
    shares = json.loads((tmp_path / "importances.json").read_text())
    assert next(iter(shares)) == "ppo.learning_rate"
    assert set(shares) == set(space)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["ppo.learning_rate"] > 0.6
    last = text.splitlines()[-1]
    assert last.startswith(f"importance for the score: ppo.learning_rate {shares['ppo.learning_rate']:.2f}, ")
    assert (tmp_path / "graphs" / "importances.png").stat().st_size > 5000
    (axes,) = drawn(monkeypatch, tmp_path)["importances"].axes
    widths = [bar.get_width() for bar in axes.patches]
    assert dict(zip([label.get_text() for label in axes.get_yticklabels()], widths, strict=True)) == shares


@pytest.mark.parametrize("scores", [[], [1.0, 2.0, 3.0], [5.0] * 8], ids=["none", "too few", "equal"])
def test_scores_that_set_no_trials_apart_give_no_importances(tune, scores):
    from jaxrl_atari.search.study import importances

    records = [Record(n, some_fields(SPACE, n), "finished", score=score) for n, score in enumerate(scores)]
    assert importances(small_search(), records) == {}


def test_only_a_warning_about_the_scores_leaves_the_importances_out(tune, monkeypatch):
    from jaxrl_atari.search import study

    def deprecated(*_, **__):
        warnings.warn("an API of NumPy", DeprecationWarning, stacklevel=2)
        return {"ppo.gae_lambda": 1.0}

    monkeypatch.setattr(study.optuna.importance, "get_param_importances", deprecated)
    records = [Record(number, some_fields(SPACE, number), "finished", score=1.0) for number in range(4)]
    with pytest.warns(DeprecationWarning, match="an API"):
        assert study.importances(small_search(), records) == {"ppo.gae_lambda": 1.0}


def test_a_record_with_other_fields_is_an_error_of_one_line(tmp_path):
    start_search(tmp_path, small_search())
    add_trial(tmp_path, 0, [1.0], "finished", fields={"ppo.epochs": 3})
    with pytest.raises(UserError, match=r"trial_0/record\.json: its fields are not those of the search \(ppo"):
        write_results(tmp_path)


def test_a_copy_of_a_trial_is_no_trial(tmp_path):
    start_search(tmp_path, small_search())
    add_trial(tmp_path, 0, [1.0], "finished")
    shutil.copytree(tmp_path / "trial_0", tmp_path / "trial_0_copy")
    assert list(read_records(tmp_path)) == [0]


def test_results_without_a_score(tmp_path):
    start_search(tmp_path, small_search())
    write_results(tmp_path)
    add_trial(tmp_path, 0, [], "failed")
    with (tmp_path / "trials.csv").open() as reader:
        write_results(tmp_path)
        assert len(reader.readlines()) == 1  # atomic: whoever reads the old table reads all of it
    for name in ("fields", "curves"):
        assert "no trial has a score yet" in (tmp_path / f"graphs/{name}.svg").read_text()
    assert not (tmp_path / "graphs/parallel.svg").exists()
    assert not (tmp_path / "small_best.py").exists()


def test_a_search_in_which_every_trial_fails_has_exit_status_1(tune, tmp_path):
    search = small_search(trials=2)
    config = start_search(tmp_path, search)
    for number in range(2):
        add_trial(tmp_path, number, [], "failed")
    with pytest.raises(SessionsFailed, match=r"every trial failed \(2\), the last one: why") as caught:
        search_command.search(config, search, tmp_path)
    assert caught.value.exit_status == 1


def test_a_finished_search_runs_nothing(tune, tmp_path, monkeypatch):
    search = small_search(trials=2)
    config = start_search(tmp_path, search)
    for number in range(2):
        add_trial(tmp_path, number, [1.0], "finished")
    monkeypatch.setattr(tune, "connect", lambda search: pytest.fail("Ray was started"))
    assert search_command.search(config, search, tmp_path) == tmp_path


# --- In real processes -----------------------------------------------------------------------------------------------


def test_joining_a_cluster_requires_its_token(tune, tmp_path):
    home = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"} | {"HOME": str(tmp_path)}
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("0123456789abcdef" * 4)
    address = free_address()
    ray_start = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus", "3"]
    ray_start += ["--node-ip-address", "127.0.0.1", "--port", address.split(":")[1], "--include-dashboard", "false"]
    join = f"""
from jaxrl_atari import cli
from jaxrl_atari.config import Config
from jaxrl_atari.search import SearchConfig
from jaxrl_atari.search import __main__ as search
def main():
    tune = search.load_tune({address!r})
    tune.connect(Config(), SearchConfig(space={{}}, address={address!r}))
    print("CPUs:", tune.ray.cluster_resources()["CPU"])
cli.run(main)
"""

    def joined(**environment):
        return subprocess.run(
            [sys.executable, "-c", join], cwd=ROOT, env=home | environment, capture_output=True, text=True, timeout=120
        )

    no_cluster = joined()
    assert no_cluster.returncode == 2
    assert no_cluster.stderr.strip().splitlines()[-1].startswith(f"error: search.address = '{address}': ")
    assert no_cluster.stderr.strip().endswith("is there a `ray start --head`?")
    with (tmp_path / "ray.txt").open("w") as log:
        head = subprocess.Popen(ray_start, env=home, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while "Ray runtime started" not in (tmp_path / "ray.txt").read_text() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert "Ray runtime started" in (tmp_path / "ray.txt").read_text()
        with_token = joined()
        assert "CPUs: 3.0" in with_token.stdout, with_token.stderr
        token.unlink()
        without = joined(RAY_NUM_REDIS_GET_RETRIES="2")
        assert without.returncode == 2
        assert "the cluster requires its token; copy ~/.ray/auth_token" in without.stderr
    finally:
        head.terminate()
        head.wait(30)


def test_a_ray_that_does_not_start_is_one_line(tune, monkeypatch):
    def init(*_, **__):
        raise Exception("The current node timed out\nduring startup.")  # as Ray does

    monkeypatch.setattr(tune.ray, "init", init)
    with pytest.raises(UserError, match=r"^Ray did not start: The current node timed out during startup\.; is the"):
        tune.connect(Config(), small_search())


def test_trials_get_their_share_of_a_gpu_and_failures_do_not_end_the_search(tune, tmp_path, monkeypatch):
    """Ray with two simulated GPUs; the trials only read their environment, and some of them fail."""
    import ray

    def look(task):
        import os
        import signal
        import time

        import jax

        from jaxrl_atari.hardware.memory import out_of_memory_advice
        from jaxrl_atari.hardware.memory_share import apply_memory_fraction
        from jaxrl_atari.report.search_records import read_records
        from jaxrl_atari.runs.files import write_json
        from jaxrl_atari.runs.writers import CsvWriter
        from jaxrl_atari.search import worker

        number = task["number"]

        def run_session(config, *arguments, writers, **how):
            apply_memory_fraction(config.devices)  # these two as in `session.prepare`
            with out_of_memory_advice(config):
                fake_training(*arguments, writers)

        def fake_training(session_dir, session, writers):
            started = jax._src.xla_bridge.backends_are_initialized()
            seen = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "XLA_CLIENT_MEM_FRACTION")}
            write_json(session_dir.parent / "seen.json", {**seen, "started": started, "pid": os.getpid()})
            killed = session_dir.parent / "killed"
            if number == 1 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 2:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")
            session_dir.mkdir()
            search_dir = session_dir.parents[1]
            while number == 3 and read_records(search_dir)[0].status == "unfinished":
                time.sleep(0.1)  # it is compared with trial 0
            score = float("nan") if number == 4 else 10.0 - number  # each trial is worse than the one before
            row = {"return_mean": score, "return_ma": score, "wall_seconds": 1.0}
            for i in range(1, 10):
                for writer in (CsvWriter(session_dir / "metrics.csv", 10**6), *writers):
                    writer.write({"env_steps": 1000 * i, **row})
                    writer.close()

        worker.run_session = run_session
        return worker.run_search_trial(task)

    search = small_search(resources=ResourcesConfig(gpu=0.25, cpu=1), method="random", trials=5, retries=1)
    lines = []
    monkeypatch.setattr(tune, "say", lines.append)
    monkeypatch.setenv("RAY_worker_niceness", "0")  # Ray's default of 15 starves the trials on a busy machine
    config = start_search(tmp_path, search)
    monkeypatch.setattr(tune, "run_search_trial", look)
    monkeypatch.setenv("JAXRL_ATARI_SIMULATED_GPUS", "2")
    monkeypatch.setattr(ray, "init", functools.partial(ray.init, num_cpus=2))
    assert tune.run(config, search, tmp_path)

    records = read_records(tmp_path)
    statuses = [record.status for record in records.values()]
    assert statuses[:1] + statuses[2:] == ["finished", "failed", "stopped", "finished"]
    assert statuses[1] in ("finished", "stopped")  # killed once, it was tried again
    assert [line for line in lines if line.startswith("trial 1  is tried again: its process was killed")]
    assert [line for line in lines if line.startswith("trial 2  is tried again: out of device memory")]
    assert (records[1].tries, records[2].tries) == (1, 2)
    assert records[2].reason == "out of device memory (RESOURCE_EXHAUSTED: Out of memory)"
    assert "lower ppo.minibatch_size (now 256)" in output(tmp_path, 2)
    assert (records[4].score, records[4].env_steps) == (None, 9000)  # none of its games has ended
    seen = [json.loads((trial_dir(tmp_path, number) / "seen.json").read_text()) for number in range(5)]
    for values in seen:
        assert values["CUDA_VISIBLE_DEVICES"] in ("0", "1")
        assert float(values["XLA_CLIENT_MEM_FRACTION"]) == 0.225
        assert not values["started"]
        assert has_ended(values["pid"])
    assert not (tmp_path / "ray").exists()


SEARCH_OF_WAITING_TRIALS = """
import sys
from jaxrl_atari import cli
from jaxrl_atari.search import __main__ as command

def trial(task):
    import pathlib, time
    from jaxrl_atari.search import worker

    def run_session(config, session_dir, session, *, stop_requested, **how):
        with (session_dir.parent / "starts").open("a") as starts:
            starts.write("x")
        while not stop_requested():
            time.sleep(0.05)
        (session_dir.parent / "last_checkpoint").touch()
        raise KeyboardInterrupt

    worker.run_session = run_session
    return worker.run_search_trial(task)

def main():
    command.load_tune("").run_search_trial = trial
    command.main(sys.argv[1:])

cli.run(main)
"""


def test_a_killed_search_leaves_no_process_and_a_signal_to_its_group_ends_it(tune, tmp_path):
    """SIGKILL of the search, then SIGTERM to its process group; the trials wait instead of training."""
    search_dir = tmp_path / "search"
    line = ["--config", str(ROOT / "configs/search_qbert.py"), "--run-dir", str(search_dir)]
    line += ["--search.trials", "2", "--search.method", "random", "--search.early-stopping", "none"]

    def start(times):
        """Starts the search and waits for a trial that has been started `times` times."""
        process = subprocess.Popen(
            [sys.executable, "-c", SEARCH_OF_WAITING_TRIALS, *line], cwd=ROOT, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"RAY_worker_niceness": "0", "PYTHONPATH": str(ROOT)}, start_new_session=True,
        )  # fmt: skip
        end = time.monotonic() + 120
        while "x" * times not in [path.read_text() for path in search_dir.glob("trial_*/starts")]:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.05)
        family = psutil.Process(process.pid).children(recursive=True)
        assert "ray::ImplicitFunc.train" in map(name, family)
        return process, family

    def name(process):
        """The name of a process; empty if it has ended since it was found."""
        try:
            return process.name()
        except psutil.NoSuchProcess:
            return ""

    process, family = start(times=1)
    agents = [member for member in family if name(member).endswith("Agent")]  # Ray's notice a kill after a minute
    process.kill()
    assert not psutil.wait_procs(set(family) - set(agents), timeout=60)[1]
    process.communicate()

    process, family = start(times=2)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "are killed" not in output, "a trial has not heard of it"
    assert not psutil.wait_procs(family, timeout=30)[1]
    assert list(search_dir.glob("trial_*/last_checkpoint"))
    assert {record.status for record in read_records(search_dir).values()} == {"unfinished"}


SMALL = """
from jaxrl_atari.config import Config, EnvConfig, LogConfig, PPOConfig
from jaxrl_atari.search import Grid, SearchConfig, Uniform

def get_config():
    return Config(
        name="tiny", total_env_steps=4096, sessions=2, env=EnvConfig(game="Qbert", num_envs=8, max_frames=600),
        ppo=PPOConfig(rollout_length=32, epochs=1, minibatch_size=256),
        log=LogConfig(every_env_steps=256, checkpoint_every_env_steps=100_000, tensorboard=False),
    )

def get_search():
    return SearchConfig(
        space={"ppo.gae_lambda": Uniform(0.7, 0.98), "ppo.learning_rate": Grid((1e-4, 3e-4))},
        trials=4, method="random", early_stopping="none", keep=1,
    )
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_search_interrupted_and_resumed_on_the_emulator(tune, tmp_path):
    (tmp_path / "tiny.py").write_text(SMALL)

    def start(*arguments):
        command = [sys.executable, "-m", "jaxrl_atari.search", *arguments]
        environment = os.environ | {
            "RAY_worker_niceness": "0"
        }  # Ray's default of 15 starves the trials on a busy machine
        return subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )

    before = {process.pid for process in psutil.process_iter()}
    process = start("--config", str(tmp_path / "tiny.py"), "--output-dir", str(tmp_path))
    for line in process.stdout:
        if line.startswith("trial 2  starts"):  # one has ended, this one runs, the fourth may
            (search_dir,) = tmp_path.glob("tiny_search_*")
            metrics = session_dir(trial_dir(search_dir, 2), 0) / "metrics.csv"
            while not metrics.exists() or last_log_point(metrics.parent) == 0:
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGTERM)  # as `timeout` does
            break
    process.communicate(timeout=60)
    assert process.returncode == 130
    time.sleep(2)
    left = [p.cmdline() for p in psutil.process_iter() if p.pid not in before and "ray" in " ".join(p.cmdline())]
    assert left == []
    records = read_records(search_dir)
    ended = {n: record for n, record in records.items() if record.status == "finished"}
    assert ended
    # Running trials have a checkpoint at the stop request: in this config, only the end of a session writes one.
    running = [path for n in records if n not in ended for path in session_dirs(trial_dir(search_dir, n))]
    assert running
    for path in running:
        assert last_checkpoint(path) == last_log_point(path)
    stamps = {n: (trial_dir(search_dir, n) / "output.txt").stat().st_mtime_ns for n in ended}

    process = start("--resume", str(search_dir))
    stdout, _ = process.communicate(timeout=280)
    assert process.returncode == 0, stdout
    records = read_records(search_dir)
    assert [record.status for record in records.values()] == ["finished"] * 4
    assert {n: (trial_dir(search_dir, n) / "output.txt").stat().st_mtime_ns for n in ended} == stamps
    assert len(list(search_dir.glob("trial_*/session_*/checkpoints"))) == 2  # both sessions of the best trial
    assert all(record.score is not None for record in records.values())
    continued = [text for n in set(records) - set(ended) if "resumed at" in (text := output(search_dir, n))]
    assert continued

    command = [sys.executable, "-m", "jaxrl_atari.train", "--config", str(search_dir / "tiny_best.py")]
    budget = ["--total-env-steps", "512", "--sessions", "1", "--output-dir", str(tmp_path / "confirmed")]
    done = subprocess.run([*command, *budget], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (tmp_path / "confirmed").iterdir()
    best = ranked(list(records.values()))[0]
    ppo = json.loads((run_dir / "config.json").read_text())["config"]["ppo"]
    assert {name: ppo[name.removeprefix("ppo.")] for name in best.fields} == best.fields
    assert last_checkpoint(run_dir / "session_0") == last_log_point(run_dir / "session_0") > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_out_of_memory_and_a_non_finite_loss_do_not_end_a_search(tune, algorithm, tmp_path, monkeypatch):
    """Both are real: Adam at learning rate 1, and a process with a memory limit below the size of a minibatch."""

    def limited(task):
        import resource

        import psutil

        from jaxrl_atari.search.worker import run_search_trial

        limit = psutil.Process().memory_info().vms + 2 * 2**30  # it needs 3 GiB for 16,384 samples, 0.6 for 256
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return run_search_trial(task)

    monkeypatch.setattr(tune, "run_search_trial", limited)
    monkeypatch.setenv("RAY_worker_niceness", "0")
    config = Config(
        name="fails", output_dir=str(tmp_path), total_env_steps=32_768, env=EnvConfig(num_envs=8),
        ppo=PPOConfig(rollout_length=2048, epochs=1), log=LogConfig(tensorboard=False),
    )  # fmt: skip
    space = {"ppo.minibatch_size": Grid((256, 16_384)), "ppo.learning_rate": Choice((1.0, 2.5e-4))}
    search = SearchConfig(space=space, trials=3, method="random", early_stopping="none", seed=3)
    sampled = [tuple(algorithm.sample(search, n).values()) for n in range(3)]
    assert sampled == [(256, 1.0), (16_384, 2.5e-4), (256, 2.5e-4)]
    search_dir = search_command.search(config, search)
    exploded, starved, sound = read_records(search_dir).values()
    assert (exploded.status, starved.status, sound.status) == ("failed", "failed", "finished")
    assert re.fullmatch(r"update [12]: .*gradient_norm = (inf|nan).*", exploded.reason)
    allocation = r"out of device memory \(RESOURCE_EXHAUSTED: Out of memory allocating \d{10} bytes\)"
    assert re.fullmatch(allocation, starved.reason)
    table = (search_dir / "trials.md").read_text()
    assert exploded.reason in table
    assert starved.reason in table


def test_optuna_learns_from_the_scores(algorithm, tmp_path, monkeypatch):
    import optuna

    search = small_search()
    start_search(tmp_path, search)
    studies, create_study = [], optuna.create_study
    monkeypatch.setattr(optuna, "create_study", lambda **how: studies.append(create_study(**how)) or studies[-1])
    for number, (score, status) in enumerate([(10.0, "finished"), (30.0, "stopped"), (99.0, "failed")]):
        add_trial(tmp_path, number, [score], status)
    sampler = algorithm.TrialSampler(tmp_path, search, {})
    fields = sampler.suggest("id0")["fields"]
    assert studies[-1].best_value == 30.0  # the highest; that of a failed trial does not count
    write_record(tmp_path, Record(3, fields, "finished", score=50.0))
    sampler.suggest("id1")
    assert studies[-1].best_value == 50.0
    assert studies[-1].best_trial.params == fields
    assert studies[-1].direction == optuna.study.StudyDirection.MAXIMIZE


def test_asha_keeps_the_configured_share_of_the_trials(algorithm, tmp_path):
    search = small_search(reduction=2)
    start_search(tmp_path, search)
    for number, score in enumerate((10.0, 20.0, 30.0, 40.0, 50.0)):
        add_trial(tmp_path, number, [score], "finished")
    asha = algorithm.ResumableAsha(tmp_path, search, 9000)
    for number, score, decision in ((5, 29.0, "STOP"), (6, 31.0, "CONTINUE")):  # the better half continues
        trial = FakeTrial(number)
        asha.on_trial_add(None, trial)
        assert asha.on_trial_result(None, trial, {"env_steps": 1000, "return_ma": score}) == decision


def test_a_trial_needs_at_least_data_parallel_gpus():
    config = Config(devices=DevicesConfig(data_parallel=4))
    with pytest.raises(ConfigError, match=r"search.resources.gpu = 2.* at least devices.data_parallel = 4"):
        check_space(config, SearchConfig(space=SPACE, resources=ResourcesConfig(gpu=2)))
    check_space(config, SearchConfig(space=SPACE, resources=ResourcesConfig(gpu=4)))


def test_the_best_trial_is_the_one_with_the_highest_score():
    scores = [(-20.0, "finished"), (3.0, "finished"), (9.0, "stopped"), (50.0, "failed"), (None, "finished")]
    records = [Record(number, {}, status, score=score) for number, (score, status) in enumerate(scores)]
    records += [Record(5, {}, "stopped", score=8.0), Record(6, {}, "finished", score=3.0)]
    assert [record.number for record in ranked(records)] == [1, 6, 0, 2, 5]
