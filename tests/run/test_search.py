"""A search: its space and options, its record, its results, and its processes, through the command and on a
cluster."""

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
from sample_runs import read_csv, table, write_run
from simulated_gpus import simulated
from user_commands import ROOT, free_address, one_error_line, still_running

pytest.importorskip("ray", reason="search mode needs Ray: pip install 'jaxrl_atari[search]'")
pytest.importorskip("optuna", reason="search mode needs Optuna: pip install 'jaxrl_atari[search]'")

from optuna.trial import TrialState

from jaxrl_atari import train
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, LogConfig, PPOConfig
from jaxrl_atari.config_dicts import config_from_dict, set_fields
from jaxrl_atari.envs import THREADS_VARIABLE
from jaxrl_atari.errors import ConfigError, SessionsFailed, Stopped, UserError
from jaxrl_atari.hardware.cpu import read_cpu
from jaxrl_atari.hardware.start import limit_jax
from jaxrl_atari.process_tuning import tune_process
from jaxrl_atari.report.search_graphs import draw_graphs
from jaxrl_atari.report.searches import read_trials
from jaxrl_atari.runs.files import read_json, write_json
from jaxrl_atari.runs.layout import checkpoint_env_steps
from jaxrl_atari.search import command
from jaxrl_atari.search import results as results_module
from jaxrl_atari.search.check import check_search
from jaxrl_atari.search.options import read_search
from jaxrl_atari.search.results import SearchResultsKeeper, save_search_results, search_results
from jaxrl_atari.search.space import (
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    ResourcesConfig,
    SearchConfig,
)
from jaxrl_atari.search.study import open_study, start_trial, trial_progress
from jaxrl_atari.search.trial import StudyWriter, train_trial
from jaxrl_atari.trials import ray_cluster, ray_worker
from jaxrl_atari.trials.launch import Failure
from jaxrl_atari.trials.resources import MachineShare, allot

# Ray forks to start its processes, and these run other programs at once: JAX's warning is not for them.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")

QBERT = ["--config", str(ROOT / "configs/search_qbert.py")]
SPACE = {
    "ppo.gae_lambda": FloatDistribution(0.7, 0.98),
    "ppo.learning_rate": FloatDistribution(1e-4, 5e-4, log=True),
}
CHOICES = CategoricalDistribution((0.1, 0.2, 0.3, 0.4, 0.5))
MANY = {f"ppo.{name}": CHOICES for name in ("gamma", "gae_lambda", "clip_epsilon", "entropy_coef", "value_coef")}


def new_search(folder, config=None, **options):
    """A search directory with its trials, none of which has started; returns its options."""
    search = SearchConfig(**{"space": SPACE, "trials": 6, "grace_env_steps": 1000, "seed": 3} | options)
    config = config or Config(name="small", total_env_steps=9000)
    write_json(folder / "search.json", {"config": config.to_dict(), "search": search.to_dict()})
    study = open_study(folder, search)
    for _ in range(search.trials):
        study.enqueue_trial({})
    return search


def run_search(config, search, folder):
    """Runs a search in a folder, or resumes the one that it holds, as the command does."""
    before = None
    if (folder / "search.json").is_file():
        config_before, search_before = read_search(folder)
        before = command.Options(config=config_before, search=search_before)
    return command.run_search(command.Options(config=config, search=search, run_dir=folder), before)


def write_results(folder):
    save_search_results(folder, search_results(folder))


def end_trial(folder, search, number, scores, state=TrialState.COMPLETE, **notes):
    """A trial that has ended, with a log point for each score."""
    trial = start_trial(folder, search, number)
    for name, value in notes.items():
        trial.set_user_attr(name, value)
    if scores:
        write_run(folder / f"trial_{number}", [table(scores)])
        trial.report(scores[-1], 100 * len(scores))
        (folder / f"trial_{number}/session_0/checkpoints").mkdir()
    if state.is_finished():
        score = float(np.mean(scores)) if state == TrialState.COMPLETE else None
        trial.study.tell(trial, score, state)
    return trial.params


# --- Space and options -------------------------------------------------------------------------------------------


def test_the_published_space_is_shipped():
    options, before = command.parse_options(QBERT)
    search = options.search
    assert (options.config.env.game_name, options.directory, before) == ("Qbert", None, None)
    assert search.space == {
        "ppo.gae_lambda": FloatDistribution(0.7, 0.98),
        "ppo.entropy_coef": FloatDistribution(0.005, 0.03, log=True),
        "ppo.learning_rate": FloatDistribution(1e-4, 5e-4, log=True),
    }
    assert (search.grace_env_steps, search.reduction, search.early_stopping) == (500_000, 3, "asha")
    assert search.resources == ResourcesConfig(gpu=0.25)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({}, "search.space = '': expected fields of the config"),
        ({"ppo.gae_lamda": FloatDistribution(0.7, 0.9)}, "search.space = 'ppo.gae_lamda': expected fields"),
        ({"ppo": CHOICES, "seed": CHOICES}, "search.space = 'ppo, seed': expected fields"),
        ({"ppo.gae_lambda": [0.9, 0.95]}, "search.space = 'ppo.gae_lambda': expected fields"),
        ({5: CHOICES}, "search.space = '5': expected fields"),
        ({"devices.gpu": CategoricalDistribution((0, 1))}, "devices.gpu"),
        ({"seed": IntDistribution(0, 3)}, "may differ between trials"),
        ({"env.game": CategoricalDistribution(("Pong", "Qbert"))}, "may differ between trials"),
        ({"ppo.gae_lambda": FloatDistribution(0.9, 1.1)}, "ppo.gae_lambda = 1.1: expected a number from 0 to 1"),
        ({"ppo.epochs": FloatDistribution(1, 4)}, "ppo.epochs = 1.0: expected a whole number"),
        ({"ppo.epochs": IntDistribution(0, 4)}, "ppo.epochs = 0"),
        ({"ppo.anneal_learning_rate": CategoricalDistribution((True, "no"))}, "'no'"),
        ({"env.backend": CategoricalDistribution(("ale", "gym")), **MANY}, "'gym'"),
        ({"ppo.minibatch_size": CategoricalDistribution((256, 300))}, "= 300: expected a divisor"),
        (
            {
                "env.num_envs": CategoricalDistribution((8, 16)),
                "ppo.minibatch_size": CategoricalDistribution((256, 2048)),
            },
            "= 1024 samples",
        ),
    ],
)
def test_a_space_that_cannot_be_used_is_an_error_that_names_the_field(space, words):
    with pytest.raises(ConfigError) as caught:
        check_search(Config(), SearchConfig(space=space))
    assert words in str(caught.value)


def test_a_space_of_many_fields_is_checked_within_seconds():
    fields = (
        "gamma",
        "gae_lambda",
        "clip_epsilon",
        "entropy_coef",
        "value_coef",
        "learning_rate",
        "max_grad_norm",
    )
    space = {f"ppo.{name}": CHOICES for name in fields}
    start_time = time.process_time()
    check_search(Config(), SearchConfig(space=space))
    assert time.process_time() - start_time < 15


def test_a_coefficient_that_the_algorithm_lacks_is_refused_before_anything_runs():
    space = {"ppo.coefficients.no_such_one": FloatDistribution(0, 1)}
    with pytest.raises(
        ConfigError, match=r"ppo\.coefficients\.no_such_one = 0.*expected a coefficient of algorithm = ppo"
    ):
        check_search(Config(), SearchConfig(space=space))


def test_a_seed_that_the_config_of_the_best_trial_could_not_have_is_refused_before_anything_runs():
    check_search(Config(seed=2**31 - 2), SearchConfig(space=SPACE))
    with pytest.raises(ConfigError, match="seed"):
        check_search(Config(seed=2**31 - 1), SearchConfig(space=SPACE))


def test_a_search_is_saved_and_read_again(tmp_path):
    space = {
        **SPACE,
        "ppo.epochs": IntDistribution(1, 8),
        "ppo.target_kl": CategoricalDistribution((None, 0.1)),
        "network.name": CategoricalDistribution(("nature", "impala")),
    }
    search = new_search(tmp_path, space=space, resources=ResourcesConfig(gpu=0.25))
    check_search(Config(), dataclasses.replace(search, grace_env_steps=500_000))
    assert read_search(tmp_path) == (Config(name="small", total_env_steps=9000), search)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--total-env-steps", "100000"], "search.grace_env_steps = 500000: expected less"),
        (["--run-dir", "nowhere", "--resume", "there"], "--resume"),
        (["--config", str(ROOT / "configs/qbert.py")], "the file does not define the function get_search"),
        (["--sessions", "2"], "sessions = 2: expected 1 where ASHA compares trials"),
        (["--trial.parallel", "4"], "trial.parallel = 4: expected 0 in a search; --search.resources.gpu and"),
    ],
)
def test_options_that_cannot_be_used(options, words):
    with pytest.raises(UserError, match=words):
        command.parse_options([*QBERT, *options])


@pytest.mark.parametrize(("option", "value"), [("reduction", 1), ("resources.gpu", 1.5), ("sampler", "x")])
def test_a_value_that_cannot_be_used_is_named(option, value):
    with pytest.raises(UserError, match=option.replace(".", r"\.")):
        command.parse_options([*QBERT, f"--search.{option}", str(value)])


def test_a_search_that_continues_may_have_more_trials_but_no_other_options(tmp_path):
    search = new_search(tmp_path)
    more, before = command.parse_options(["--resume", str(tmp_path), "--search.trials", "9"])
    assert (before.search, more.directory) == (search, tmp_path)
    assert more.search == dataclasses.replace(search, trials=9)
    with pytest.raises(ConfigError, match=r"search\.reduction = 4: expected 3, its value in this search"):
        command.parse_options(["--run-dir", str(tmp_path), "--search.reduction", "4"])
    with pytest.raises(ConfigError, match=r"ppo\.epochs = 2: expected 4"):
        command.parse_options(["--resume", str(tmp_path), "--ppo.epochs", "2"])
    with pytest.raises(UserError, match="nowhere: not a search directory"):
        command.parse_options(["--resume", str(tmp_path / "nowhere")])


def test_a_search_of_an_earlier_version_needs_that_version(tmp_path):
    new_search(tmp_path)
    values = json.loads((tmp_path / "search.json").read_text())
    values["search"]["retries"] = 1
    write_json(tmp_path / "search.json", values)
    with pytest.raises(
        UserError, match=r"search\.json: cannot be used \(TypeError: .*retries.*; continue it with the version"
    ):
        command.parse_options(["--resume", str(tmp_path)])
    del values["search"]["retries"]
    values["search"]["reduction"] = 1
    write_json(tmp_path / "search.json", values)
    with pytest.raises(UserError, match=r"search\.json: search\.reduction = 1: expected"):
        command.parse_options(["--resume", str(tmp_path)])


# --- The record --------------------------------------------------------------------------------------------------


def test_random_samples_depend_on_seed_and_number_alone(tmp_path):
    def sampled(name, seed, order):
        (tmp_path / name).mkdir()
        search = new_search(tmp_path / name, sampler="random", trials=40, seed=seed)
        return {number: start_trial(tmp_path / name, search, number).params for number in order}

    samples = sampled("one", 0, range(40))
    assert sampled("two", 0, [5, 3]) == {5: samples[5], 3: samples[3]}
    assert sampled("three", 1, [5])[5] != samples[5]
    for name, distribution in SPACE.items():
        values = [fields[name] for fields in samples.values()]
        assert distribution.low <= min(values) < max(values) <= distribution.high
        assert len(set(values)) == 40
    # The median of a log-uniform range is the geometric mean of its ends.
    assert np.median([fields["ppo.learning_rate"] for fields in samples.values()]) < 3e-4


def test_tpe_learns_from_the_scores(tmp_path):
    search = new_search(tmp_path, space={"ppo.gamma": FloatDistribution(0.0, 1.0)}, trials=40)
    for number in range(30):
        trial = start_trial(tmp_path, search, number)
        trial.study.tell(trial, trial.params["ppo.gamma"])
    assert np.mean([start_trial(tmp_path, search, number).params["ppo.gamma"] for number in range(30, 40)]) > 0.7


def test_tpe_keeps_away_from_trials_that_are_running(tmp_path):
    """They have no score yet, and would else be sampled again by the trials beside them."""

    def next_value(name, running):
        folder = tmp_path / name
        folder.mkdir()
        search = new_search(folder, space={"ppo.gamma": FloatDistribution(0.0, 1.0)}, trials=30)
        for number in range(15):
            trial = start_trial(folder, search, number)
            trial.study.tell(trial, trial.params["ppo.gamma"])
        for number in range(15, 15 + running):
            start_trial(folder, search, number)
        return start_trial(folder, search, 29).params["ppo.gamma"]

    alone = next_value("alone", running=0)
    assert next_value("alone again", running=0) == alone, "a serial search has the same samples each time"
    assert next_value("beside others", running=4) != alone


def test_asha_stops_the_worse_trials_and_remembers_what_it_compared(tmp_path):
    search = new_search(tmp_path, reduction=2)
    config = Config(total_env_steps=9000, log=LogConfig(every_env_steps=100))

    def stopped(number, *points):
        writer = StudyWriter(start_trial(tmp_path, search, number), config)  # another process
        for env_steps, score in points:
            writer.write({"env_steps": env_steps, "return_ma": score})
        state = open_study(tmp_path, search).trials[number].state
        assert writer.pruned == (state == TrialState.PRUNED)
        return writer.pruned

    for number, score in enumerate((10.0, 20.0, 30.0, 40.0)):
        assert not stopped(number, (500, 0.0), (1000, score))
    assert stopped(4, (1000, 25.0), (1100, 99.0))  # the better half continues; the last point comes after the stop
    assert open_study(tmp_path, search).trials[4].value == 25.0
    assert not stopped(5, (900, None), (1000, math.nan), (1100, 35.0))  # both mean: no finished game yet
    assert stopped(5, (2100, 1.0)) is False  # the only one at the second comparison
    assert not stopped(2, (8900, 0.0))  # its budget is spent


def test_a_killed_trial_repeats_no_log_point_to_the_study(tmp_path, recwarn):
    """It resumes from its newest checkpoint, so its writer gets some log points again."""
    search = new_search(tmp_path, reduction=2)
    config = Config(total_env_steps=9000, log=LogConfig(every_env_steps=100))
    reported = {}
    for points in ((100, 200, 300), (100, 200, 300, 400)):
        trial = start_trial(tmp_path, search, 0)
        writer = StudyWriter(trial, config, reported=reported.keys())
        for env_steps in points:
            writer.write({"env_steps": env_steps, "return_ma": float(env_steps)})
        reported = open_study(tmp_path, search).trials[0].intermediate_values
        assert reported == {env_steps: float(env_steps) for env_steps in points}
    assert not [warning for warning in recwarn if "already reported" in str(warning.message)]


def test_a_trial_that_asha_stops_trains_no_further(tmp_path):
    (tmp_path / "tiny.py").write_text(TINY)
    config = load_config(tmp_path / "tiny.py")
    search = new_search(
        tmp_path, dataclasses.replace(config, sessions=1), grace_env_steps=200, reduction=2, trials=3
    )
    for number in range(2):  # two trials beyond its reach
        writer = StudyWriter(start_trial(tmp_path, search, number), config)
        writer.write({"env_steps": 200, "return_ma": 1e6 + number})
    (tmp_path / "trial_2").mkdir()
    with pytest.raises(Stopped):
        train_trial(tmp_path / "trial_2", MachineShare(0, 1))
    write_results(tmp_path)
    row = next(row for row in read_csv(tmp_path / "trials.csv") if row["trial"] == "2")
    assert row["status"] == "stopped by ASHA"
    assert 200 <= int(row["env_steps"]) == checkpoint_env_steps(tmp_path / "trial_2/session_0")[-1] < 2000
    assert open_study(tmp_path, search).trials[2].value == pytest.approx(float(row["score"]))


@pytest.mark.long
def test_a_trial_that_was_stopped_has_the_log_points_of_one_that_was_not(tmp_path, monkeypatch):
    """It is stopped in an update with a log point, and after the resume in one without."""
    (tmp_path / "tiny.py").write_text(TINY)
    config = dataclasses.replace(load_config(tmp_path / "tiny.py"), sessions=1, total_env_steps=500)
    stop_at = math.inf  # env steps
    requested = threading.Event()

    def progress(writer, env_steps, row):  # called after an update, before its log point
        if env_steps >= stop_at:
            requested.set()

    def reported(folder, *stops):
        nonlocal stop_at
        (tmp_path / folder / "trial_0").mkdir(parents=True)
        search = new_search(tmp_path / folder, config, early_stopping="none")
        for stop_at in (*stops, math.inf):
            requested.clear()
            with contextlib.nullcontext() if stop_at == math.inf else pytest.raises(Stopped):
                train_trial(tmp_path / folder / "trial_0", MachineShare(0, 1), stop_requested=requested.is_set)
        return open_study(tmp_path / folder, search).trials[0].intermediate_values

    monkeypatch.setattr(StudyWriter, "progress", progress)
    points = reported("uninterrupted")
    middle = sorted(points)[len(points) // 2]
    assert reported("stopped", middle, middle + 1) == points
    assert len(points) > 3


@pytest.mark.parametrize(("gpu", "share"), [(1.0, None), (0.5, 0.45), (0.25, 0.225), (0.125, 0.1125), (0.0, None)])
def test_the_config_of_a_trial_follows_its_share(gpu, share):
    config = MachineShare(gpu, 2).configure(Config())
    assert (config.devices.memory_fraction, config.env.num_threads) == (share, 2)
    assert config.devices.gpu == ("auto" if gpu else False)


def test_the_user_chooses_the_emulator_threads_of_a_trial(monkeypatch):
    monkeypatch.setenv(THREADS_VARIABLE, "3")
    assert MachineShare(0.0, 2).configure(Config()).env.num_threads == 3
    chosen = Config(env=EnvConfig(num_threads=4))
    assert MachineShare(0.0, 2).configure(chosen).env.num_threads == 4


def test_a_share_that_is_too_small_is_refused_with_what_helps_on_a_cluster():
    for config, words in (
        (Config(), "sessions on a GPU = 200: .*; raise resources.gpu"),
        (
            Config(devices=DevicesConfig(memory_fraction=0.1)),
            "devices.memory_fraction = 0.1: .*; lower it, or raise",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            MachineShare(0.005, 1).configure(config)


def test_resources():
    def split(gpu, cpu, *machines, option="auto"):
        return tuple(allot(ResourcesConfig(gpu, cpu), machines, DevicesConfig(gpu=option)))

    assert split(0.25, 0, {"GPU": 2.0, "CPU": 16.0}) == (0.25, 2)
    assert split(1.0, 0, {"CPU": 32.0}, {"GPU": 2.0, "CPU": 8.0}) == (1.0, 4)
    assert split(1.0, 0, {"GPU": 1.0, "CPU": 8.0}, {"GPU": 2.0, "CPU": 4.0}) == (1.0, 2)
    assert split(0.25, 0, {"CPU": 2.0}) == (0.0, 1)
    assert split(0.25, 3, {"GPU": 2.0, "CPU": 16.0}, option=False) == (0.0, 3)
    with pytest.raises(UserError, match="a machine with 2 GPUs and 1 core; found 1 GPU and 8 cores; 1 GPU and 8"):
        split(2.0, 0, {"GPU": 1.0, "CPU": 8.0}, {"GPU": 1.0, "CPU": 8.0})
    with pytest.raises(ConfigError, match=r"devices\.gpu = True: expected a GPU"):
        split(1.0, 0, {"CPU": 2.0}, option=True)


@pytest.mark.parametrize(
    ("data_parallel", "gpu", "is_enough"), [(2, 1.0, False), (2, 2.0, True), (1, 0.25, True), ("all", 4.0, True)]
)
def test_a_share_has_the_gpus_that_learn_in_each_session(data_parallel, gpu, is_enough):
    machines = [{"GPU": 4.0, "CPU": 8.0}]
    devices = DevicesConfig(data_parallel=data_parallel)
    if is_enough:
        assert allot(ResourcesConfig(gpu), machines, devices).gpu == gpu
        return
    with pytest.raises(ConfigError, match=r"gpu = 1\.0: expected at least devices\.data_parallel = 2, "):
        allot(ResourcesConfig(gpu), machines, devices)
    assert allot(ResourcesConfig(gpu), [{"CPU": 8.0}], devices).gpu == 0  # each session learns on CPU devices


def test_a_share_without_the_gpus_that_learn_is_refused_before_ray_starts(simulate, tmp_path):
    simulate(2)
    with pytest.raises(ConfigError, match=r"resources\.gpu = 1\.0: expected at least devices\.data_parallel = 2"):
        run_search(Config(devices=DevicesConfig(data_parallel=2)), SearchConfig(space=SPACE), tmp_path / "search")
    assert not (tmp_path / "search").exists()


# --- Results -----------------------------------------------------------------------------------------------------


def test_results(tmp_path, monkeypatch):
    import matplotlib
    from matplotlib import pyplot

    config = Config(name="small", total_env_steps=9000, env=EnvConfig(num_envs=8), ppo=PPOConfig(epochs=2))
    search = new_search(
        tmp_path, config, space={**SPACE, "network.name": CategoricalDistribution(("nature", "impala"))}
    )
    end_trial(tmp_path, search, 0, [1.0, 50.0], TrialState.PRUNED)
    best = end_trial(tmp_path, search, 1, [2.0, 5.0, 12.5])
    end_trial(tmp_path, search, 2, [3.0], TrialState.RUNNING, failure="the loss | is nan")
    end_trial(tmp_path, search, 3, [], TrialState.RUNNING)
    monkeypatch.setitem(matplotlib.rcParams, "figure.facecolor", "red")
    write_results(tmp_path)
    draw_graphs(open_study(tmp_path, search), tmp_path / "graphs")
    assert pyplot.get_fignums() == []

    rows = read_csv(tmp_path / "trials.csv")
    assert [(row["trial"], row["status"]) for row in rows] == [
        ("1", "finished"), ("0", "stopped by ASHA"), ("2", "failed: the loss | is nan"), ("3", "unfinished"),
    ]  # fmt: skip
    assert (float(rows[0]["score"]), rows[0]["env_steps"], rows[3]["score"]) == (6.5, "300", "")
    assert float(rows[0]["ppo.gae_lambda"]) == best["ppo.gae_lambda"]
    assert len({line.count("|") for line in (tmp_path / "trials.md").read_text().splitlines()}) == 1
    for name in ("curves", "fields", "parallel", "importances"):
        assert (tmp_path / f"graphs/{name}.png").stat().st_size > 5000
        assert "ff0000" not in (tmp_path / f"graphs/{name}.svg").read_text()

    file = tmp_path / "small_best.py"
    expected = dataclasses.replace(set_fields(config, best), name="small_best", seed=1)
    assert load_config(file) == expected
    chosen = train.parse_options(["--config", str(file), "--sessions", "4"]).config
    assert (chosen.sessions, chosen.ppo) == (4, expected.ppo)


def test_the_choice_none_is_a_value_and_no_gap_in_the_results(tmp_path):
    config = Config(name="small", total_env_steps=9000)
    search = new_search(tmp_path, config, space={"ppo.target_kl": CategoricalDistribution((None,))}, trials=1)
    end_trial(tmp_path, search, 0, [1.0])
    write_results(tmp_path)
    assert [row["ppo.target_kl"] for row in read_csv(tmp_path / "trials.csv")] == ["None"]
    assert [cell.strip() for cell in (tmp_path / "trials.md").read_text().splitlines()[2].split("|")[1:4]] == [
        "0", "None", "1",
    ]  # fmt: skip
    assert "ppo.target_kl None" in (tmp_path / "small_best.py").read_text()


def test_the_graphs_and_the_table_have_one_best_trial(tmp_path):
    """Before a trial has finished, it is one that ASHA stopped, not one that runs, whose score is not final."""
    config = Config(name="small", total_env_steps=9000)
    search = new_search(tmp_path, config)
    end_trial(tmp_path, search, 0, [1.0], TrialState.PRUNED)
    end_trial(tmp_path, search, 1, [9.0], TrialState.RUNNING)
    kinds = [trial.kind for trial in read_trials(open_study(tmp_path, search))]
    assert kinds == ["best", "unfinished"]
    assert search_results(tmp_path).rows[0].number == 0


def test_a_finished_search_starts_nothing_and_is_shown_where_it_cannot_be_saved(tmp_path, capsys):
    config = Config(name="small", total_env_steps=9000, log=LogConfig(graphs=False))
    search = new_search(tmp_path, config, trials=2)
    for number in range(2):
        end_trial(tmp_path, search, number, [1.0 + number])
    assert run_search(config, search, tmp_path) == tmp_path
    assert [row["status"] for row in read_csv(tmp_path / "trials.csv")] == ["finished"] * 2
    said = capsys.readouterr().out
    (tmp_path / "trials.md").unlink()
    (tmp_path / "trials.md").mkdir()
    run_search(config, search, tmp_path)
    again = capsys.readouterr().out
    assert again.startswith(said)
    assert re.search(
        r"results are not saved: .*trials\.md.*--resume .* tries again$", again.removeprefix(said).strip()
    )


def test_a_bug_in_the_graphs_of_a_search_does_not_end_the_command(tmp_path, monkeypatch, capsys):
    config = Config(name="small", total_env_steps=9000)
    search = new_search(tmp_path, config, trials=1)
    end_trial(tmp_path, search, 0, [1.0])
    monkeypatch.setattr(command, "draw_graphs", lambda *arguments: {}["score"])
    run_search(config, search, tmp_path)
    output = capsys.readouterr()
    assert re.search(r"^no graphs: KeyError: 'score'; python .*search --resume .* tries again$", output.out, re.M)
    assert output.out.rstrip().endswith("report.html")
    assert output.err.startswith("Traceback (most recent call last):\n")


def test_a_trial_whose_config_is_damaged_keeps_its_score_and_says_why(tmp_path):
    search = new_search(tmp_path, trials=1)
    end_trial(tmp_path, search, 0, [3.0, 5.0])
    (tmp_path / "trial_0/config.json").write_text("{broken")
    write_results(tmp_path)
    (row,) = read_csv(tmp_path / "trials.csv")
    assert (row["score"], row["env_steps"]) == ("4.0", "200")
    assert re.match(r"finished; .*trial_0/config\.json: cannot be used ", row["status"])


def test_the_failure_of_a_trial_that_asha_had_stopped_is_shown(tmp_path, monkeypatch, capsys):
    from jaxrl_atari.trials import ray_tasks  # imports Ray

    search = new_search(tmp_path, trials=1)
    end_trial(tmp_path, search, 0, [1.0], TrialState.PRUNED)
    monkeypatch.setattr(
        ray_tasks, "run_tasks", lambda tasks, *_, **__: tasks[0].on_end(Failure("the disk is full"))
    )
    command._train_trials(Config(), search, tmp_path, open_study(tmp_path, search), [0])
    assert ": stopped by ASHA; its process then failed: the disk is full\n" in capsys.readouterr().out


def test_results_that_cannot_be_read_do_not_stop_the_trials(tmp_path, monkeypatch, capsys):
    from jaxrl_atari.trials import ray_tasks  # imports Ray

    search = new_search(tmp_path, trials=1)
    end_trial(tmp_path, search, 0, [1.0])

    def cannot_be_read(_):  # the progress of a trial
        raise OSError("stale file handle")

    def one_trial_ends_before_a_stop_request(tasks, *_, **__):
        tasks[0].on_end(None)
        raise KeyboardInterrupt

    monkeypatch.setattr(results_module, "trial_progress", cannot_be_read)
    monkeypatch.setattr(command, "trial_progress", cannot_be_read)
    monkeypatch.setattr(ray_tasks, "run_tasks", one_trial_ends_before_a_stop_request)
    with pytest.raises(KeyboardInterrupt, match=r"^stopped; go on with "):
        command._train_trials(Config(), search, tmp_path, open_study(tmp_path, search), [0])
    assert capsys.readouterr().out.count("the results cannot be read: ") == 2


def test_a_trial_that_has_ended_is_read_once_while_others_train(tmp_path, monkeypatch):
    """Each end of a trial would else read the log points of all trials again."""
    config = Config(name="small", total_env_steps=9000)
    search = new_search(tmp_path, config, trials=4)
    keeper = SearchResultsKeeper(tmp_path, config, search, open_study(tmp_path, search))
    read = []

    def progress_and_note(run_dir):
        read.append(run_dir.name)
        return trial_progress(run_dir)

    monkeypatch.setattr(results_module, "trial_progress", progress_and_note)
    end_trial(tmp_path, search, 3, [9.0], TrialState.RUNNING)
    for number in range(3):
        end_trial(tmp_path, search, number, [1.0 + number])
        keeper.update(number)
    assert {name: read.count(name) for name in read} == {"trial_0": 1, "trial_1": 1, "trial_2": 1, "trial_3": 3}
    rows = read_csv(tmp_path / "trials.csv")
    assert [(row["trial"], row["score"]) for row in rows] == [
        ("2", "3.0"),
        ("1", "2.0"),
        ("0", "1.0"),
        ("3", "9.0"),
    ]


def test_a_search_all_of_whose_trials_failed_has_status_1_at_every_start(tmp_path, capsys):
    """Also where an earlier start has tried them: a trial in which no game has ended does not run again."""
    config = Config(name="small", total_env_steps=9000, log=LogConfig(graphs=False))
    search = new_search(tmp_path, config, trials=2)
    end_trial(tmp_path, search, 0, [], TrialState.FAIL, failure="an earlier reason")
    end_trial(tmp_path, search, 1, [], TrialState.FAIL)
    for _ in range(2):
        with pytest.raises(SessionsFailed, match=r"all of 2 trials failed; the last one: no game ended") as error:
            run_search(config, search, tmp_path)
        assert error.value.exit_status == 1
        assert f"resuming {tmp_path}\n" in capsys.readouterr().out


def test_a_start_that_neither_trains_nor_changes_anything_is_no_resume(tmp_path, capsys):
    config = Config(name="small", total_env_steps=9000, log=LogConfig(graphs=False))
    search = new_search(tmp_path, config, trials=2)
    for number in range(2):
        end_trial(tmp_path, search, number, [1.0 + number])
    before = (tmp_path / "search.json").read_bytes()
    run_search(config, search, tmp_path)
    assert (tmp_path / "search.json").read_bytes() == before
    assert "changed" not in capsys.readouterr().out
    run_search(config, dataclasses.replace(search, trials=1), tmp_path)
    assert "changed: search.trials 2 -> 1\n" in capsys.readouterr().out
    (resume,) = json.loads((tmp_path / "search.json").read_text())["resumed"]
    assert resume["changed"] == {}, "the config"


def test_a_trial_without_a_finished_game_has_one_status(tmp_path):
    """In Optuna's journal and in the table. It has spent its budget, so it does not run again."""
    (tmp_path / "tiny.py").write_text(TINY)
    config = load_config(tmp_path / "tiny.py")
    config = dataclasses.replace(config, total_env_steps=64, sessions=1)  # games last 100 env steps
    search = new_search(tmp_path, config, trials=1)
    (tmp_path / "trial_0").mkdir()
    train_trial(tmp_path / "trial_0", MachineShare(0, 1))
    write_results(tmp_path)
    (trial,) = open_study(tmp_path, search).trials
    (row,) = read_csv(tmp_path / "trials.csv")
    assert (trial.state, row["status"]) == (TrialState.FAIL, f"failed: {trial.user_attrs['failure']}")
    assert row["status"] == "failed: no game ended within the budget"
    assert not (tmp_path / "tiny_best.py").exists()


# --- Processes ---------------------------------------------------------------------------------------------------

TINY = """
from jaxrl_atari.config import Config, EnvConfig, LogConfig, PPOConfig
from jaxrl_atari.search.space import FloatDistribution, ResourcesConfig, SearchConfig

def get_config():
    return Config(
        name="tiny", total_env_steps=2_500, sessions=2, env=EnvConfig(game="Qbert", num_envs=2, max_frames=400),
        ppo=PPOConfig(rollout_length=8, epochs=1, minibatch_size=16),
        log=LogConfig(every_env_steps=64, checkpoint_every_env_steps=256, tensorboard=False),
    )

def get_search():
    return SearchConfig(
        space={"ppo.gae_lambda": FloatDistribution(0.7, 0.98)}, trials=2, early_stopping="none",
        resources=ResourcesConfig(gpu=0.5),
    )
"""
PROMPT = {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}  # Ray's 15 starves the trials on a busy machine


def start(*words, **environment):
    """A command in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)], cwd=ROOT, env=os.environ | PROMPT | environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def log_points(directory):
    """Session directory -> env steps of its last log point, 0 before the first."""
    return {path.parent: int(float(rows[-1]["env_steps"])) if (rows := read_csv(path)) else 0
            for path in directory.glob("*/session_*/metrics.csv")}  # fmt: skip


def wait_for_progress(process, directory, sessions=2):
    """Waits until `sessions` sessions have new log points; returns all processes."""
    before, end = log_points(directory), time.monotonic() + 300
    while sum(steps > before.get(path, 0) for path, steps in log_points(directory).items()) < sessions:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.1)
    return psutil.Process(process.pid).children(recursive=True)


def test_a_task_that_cannot_begin_says_why(tmp_path, monkeypatch):
    """An environment variable that the worker's process refuses, and an output.txt that cannot be opened."""

    def failure(folder):
        end = ray_worker.run_in_folder(
            tmp_path / folder, MachineShare(1.0, 1), lambda: False, lambda *a, **b: pytest.fail("it began")
        )
        return end.failure

    monkeypatch.setattr(ray_worker, "tune_process", tune_process.__wrapped__)  # another test may have called it
    monkeypatch.setenv("NPROC", "many")
    refused = failure("refused")
    assert refused.reason.startswith("NPROC = 'many': expected a whole number")
    assert refused.correctable
    assert not (tmp_path / "refused").exists()
    (tmp_path / "taken/output.txt").mkdir(parents=True)
    assert failure("taken").reason.startswith("IsADirectoryError: ")


def test_a_task_that_starts_after_a_stop_request_does_nothing(tmp_path):
    end = ray_worker.run_in_folder(
        tmp_path / "task", MachineShare(1.0, 1), lambda: True, lambda *a, **b: pytest.fail("it began")
    )
    assert (end.was_stopped, end.failure) == (True, None)
    assert not (tmp_path / "task").exists()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_search_is_interrupted_killed_and_continued(tmp_path):
    """Two trials at a time on a simulated GPU, each of two sessions."""
    (tmp_path / "tiny.py").write_text(TINY)
    search_dir, gpu = tmp_path / "search", simulated(1)
    line = ["-m", "jaxrl_atari.search", "--config", tmp_path / "tiny.py", "--run-dir", search_dir]
    for number in (signal.SIGINT, signal.SIGTERM):  # as a terminal and `timeout` send them: to the process group
        process = start(*line, **gpu)
        family = wait_for_progress(process, search_dir)
        os.killpg(process.pid, number)
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 130, output
        assert f"stopped; go on with python -m jaxrl_atari.search --resume {search_dir}" in output
        assert not still_running(family, seconds=1)
        stopped = log_points(search_dir)
        assert {path: checkpoint_env_steps(path)[-1] for path in stopped} == stopped

    process = start(*line, **gpu)
    family = wait_for_progress(process, search_dir)
    process.kill()
    process.communicate()
    assert not still_running(family, seconds=60)

    process = start(*line, "--search.trials", 3, **gpu)
    family = wait_for_progress(process, search_dir, 1)
    next(child for child in family if "ray::trial_" in " ".join(child.cmdline())).kill()
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    assert "failed: its process was killed" in output
    process = start(*line, "--search.trials", 3, **gpu)  # what has failed runs again
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    rows = read_csv(search_dir / "trials.csv")
    assert [row["status"] for row in rows] == ["finished"] * 3
    assert all(2_450 < int(row["env_steps"]) < 2_550 for row in rows)
    for path, env_steps in stopped.items():
        assert f"resumed at {env_steps:,} env steps" in (path.parent / "output.txt").read_text()
    best = search_dir / f"trial_{rows[0]['trial']}"
    assert json.loads((best / "config.json").read_text())["config"]["devices"]["memory_fraction"] == 0.45
    assert (search_dir / "report.html").exists()
    assert load_config(search_dir / "tiny_best.py").sessions == 2


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_search_whose_trials_are_all_refused_leaves_no_directory(tmp_path):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/wandb.py").write_text("import no_such_module")
    (tmp_path / "tiny.py").write_text(TINY)
    line = ["-m", "jaxrl_atari.search", "--config", tmp_path / "tiny.py", "--run-dir", tmp_path / "search"]
    process = start(*line, "--log.wandb", PYTHONPATH=f"{tmp_path / 'modules'}{os.pathsep}{ROOT}")
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 2, output
    assert re.search("^error: no trial could begin: log.wandb = true: wandb cannot be imported", output, re.M), (
        output
    )
    assert not (tmp_path / "search").exists()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_search_in_which_all_trials_fail_has_status_1(tmp_path):
    """Files take the places of their directories."""
    (tmp_path / "tiny.py").write_text(TINY)
    search_dir = tmp_path / "search"
    search_dir.mkdir()
    config = load_config(tmp_path / "tiny.py")
    config = dataclasses.replace(config, log=dataclasses.replace(config.log, graphs=False))
    new_search(
        search_dir, config, space={"ppo.gae_lambda": FloatDistribution(0.7, 0.98)}, trials=2, early_stopping="none"
    )
    for number in range(2):
        (search_dir / f"trial_{number}").write_text("in the way")
    process = start("-m", "jaxrl_atari.search", "--resume", search_dir)
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 1, output
    assert re.search(r"^error: all of 2 trials failed; the last one: FileExistsError: ", output, re.M), output
    assert {row["status"][:24] for row in read_csv(search_dir / "trials.csv")} == {"failed: FileExistsError:"}


ON_RAY = """
import sys
from functools import partial
from pathlib import Path
from jaxrl_atari.config import Config, DevicesConfig
from jaxrl_atari.trials.launch import Job
from jaxrl_atari.trials.ray_cluster import check_cluster, set_ray_variables
from jaxrl_atari.trials.resources import ResourcesConfig
import small_sessions

folder = Path(sys.argv[1])
cluster = {"address": "", "devices": DevicesConfig(gpu=False), "resources": ResourcesConfig()}
check_cluster(**cluster)
set_ray_variables(cluster["address"])
from jaxrl_atari.trials.ray_tasks import RayTask, run_on_ray, run_tasks  # imports Ray
"""


def run_on_ray(script, folder):
    """Runs a script that begins with `ON_RAY`. Returns its exit status and output."""
    process = start("-c", ON_RAY + script, folder, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    output, _ = process.communicate(timeout=250)
    return process.returncode, output


ENDING_BADLY = """
def on_end(failure):
    (folder / "ended").touch()
    raise OSError("no results")

tasks = []
for number in range(2):
    directory = folder / f"trial_{number}"
    run = partial(small_sessions.one_trial_ends, directory)
    tasks.append(RayTask(directory.name, directory, run, progress=str, on_end=on_end))
run_tasks(tasks, "trial", directory=folder, **cluster)
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_error_when_a_trial_ends_is_raised_once_the_others_have_trained(tmp_path):
    status, output = run_on_ray(ENDING_BADLY, tmp_path)
    assert status == 1, output
    assert output.splitlines()[-1] == "OSError: no results"
    assert (tmp_path / "trained").exists(), output


def test_the_tasks_of_ray_do_not_inherit_what_an_earlier_session_has_set(tmp_path, simulate, monkeypatch):
    """They are the children of the process that starts Ray, which prints its variables here in place of that."""
    (tmp_path / "jaxrl_atari").mkdir()
    script = "import os; raise RuntimeError([os.environ.get(n) for n in ('XLA_FLAGS', 'XLA_CLIENT_MEM_FRACTION')])"
    (tmp_path / "jaxrl_atari/__init__.py").write_text(script)
    monkeypatch.chdir(tmp_path)  # from where the process imports first
    monkeypatch.setenv("XLA_FLAGS", "--of-the-user")
    simulate(1)
    limit_jax(DevicesConfig(gpu=0, memory_fraction=0.9, deterministic=True))
    with (
        pytest.raises(UserError, match=re.escape("RuntimeError: ['--of-the-user', None]")),
        ray_cluster.started_cluster("", DevicesConfig(gpu=False)),
    ):
        pass
    limit_jax(DevicesConfig())  # puts the settings back


def test_the_error_of_the_process_that_starts_ray_is_named(tmp_path, monkeypatch):
    (tmp_path / "jaxrl_atari").mkdir()
    (tmp_path / "jaxrl_atari/__init__.py").write_text("raise RuntimeError('a broken installation')")
    monkeypatch.chdir(tmp_path)  # from where the process imports first
    with (
        pytest.raises(UserError, match=r"^Ray did not start: RuntimeError: a broken installation$"),
        ray_cluster.started_cluster("", DevicesConfig(gpu=False)),
    ):
        pass


FAILING = """
jobs = [Job(Config(), folder, number, description={}, position=number) for number in range(2)]
run_on_ray(jobs, small_sessions.train_and_fail, lambda job, failure: job.say(f"{failure.reason}"),
           directory=folder, **cluster)
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_a_session_wrote_is_kept_on_a_cluster_once_it_has_trained(tmp_path):
    """Session 1 was refused before its first update: its new directory is removed."""
    status, output = run_on_ray(FAILING, tmp_path)
    assert status == 0, output
    for number in range(2):
        assert f"session {number}  seed = {number}: expected another one" in output
        described = read_json(tmp_path / f"described_{number}.json")
        config = config_from_dict(described["config"])
        assert (config.devices.gpu, config.env.num_threads) == (False, 1), "the config that the task trains with"
        assert described["hardware"]["cores"] == read_cpu().cores, "the machine of the task"
    assert (tmp_path / "session_0/output.txt").read_text() == "a line of output\n"
    assert not (tmp_path / "session_1").exists()


def test_why_ray_did_not_start_is_one_true_line(tmp_path):
    (tmp_path / "tiny.py").write_text(TINY)
    line = ["-m", "jaxrl_atari.search", "--config", tmp_path / "tiny.py", "--run-dir", tmp_path / "search"]
    (long := tmp_path / ("long" * 30)).mkdir()
    for options, environment, words in (
        ([], {"TMPDIR": str(long)}, "Ray did not start: OSError: .*cannot exceed 107 bytes"),
        (["--search.address", free_address()], {}, "address 127.0.0.1.*refused; expected HOST:PORT"),
        (
            ["--search.address", "nowhere"],
            {},
            "address = 'nowhere': expected auto, or HOST:PORT of a `ray start`$",
        ),
        (["--search.address", "localhost:99999"], {}, "'localhost:99999': expected auto, or HOST:PORT"),
    ):
        process = start(*line, *options, **environment)
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 2
        assert re.search(words, one_error_line(output))
        assert not (tmp_path / "search").exists()


CLUSTER = """
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1)
print("address", cluster.address, flush=True)
input()
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_suite_on_a_cluster_of_two_nodes(tmp_path):
    """It is killed, stopped and continued; a file takes the place of a session directory. The nodes share a
    folder."""
    (tmp_path / "tiny.py").write_text(TINY)
    nodes, suite_dir = start("-c", CLUSTER), tmp_path / "suite"
    line = [
        "-m",
        "jaxrl_atari.suite",
        "--config",
        tmp_path / "tiny.py",
        "--run-dir",
        suite_dir,
        "--games",
        "Pong",
        "Qbert",
    ]
    try:
        address = next(line.split()[1] for line in nodes.stdout if line.startswith("address"))
        process = start(*line, "--address", address)
        wait_for_progress(process, suite_dir)
        process.kill()
        process.communicate()
        killed = {
            path: checkpoint_env_steps(path)[-1] for path in log_points(suite_dir) if checkpoint_env_steps(path)
        }
        time.sleep(2)
        assert not (suite_dir / "Qbert/session_1").exists()
        process = start(*line, "--address", address)
        wait_for_progress(process, suite_dir)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 130, output
        assert f"stopped; go on with python -m jaxrl_atari.suite --resume {suite_dir}" in output
        stopped = log_points(suite_dir)
        assert {path: checkpoint_env_steps(path)[-1] for path in stopped} == stopped
        assert not (suite_dir / "ray").exists()
        (suite_dir / "Qbert").mkdir(exist_ok=True)
        (suite_dir / "Qbert/session_1").write_text("in the way")
        process = start(*line, "--address", address)
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 1, output
        assert "1 of 4 sessions failed (game Qbert session 1: " in output
        assert {path.relative_to(suite_dir).as_posix() for path in log_points(suite_dir)} == {
            "Pong/session_0", "Pong/session_1", "Qbert/session_0",
        }  # fmt: skip
        statuses = {row["game"]: row["status"] for row in read_csv(suite_dir / "results.csv")}
        assert statuses["Pong"] == "complete"
        described = read_json(suite_dir / "Pong/config.json")
        assert described["config"]["env"]["num_threads"] == 1, "the config of the session, and not of the command"
        assert described["resumed"]
        assert not any(entry["changed"] for entry in described["resumed"])
        sweep = [
            "--run-dir",
            tmp_path / "sweep",
            "--games",
            "Pong",
            "--vary",
            "ppo.gamma=0.9,0.99",
            "--sessions",
            "1",
        ]
        process = start(*line[:4], *sweep, "--total-env-steps", "512", "--address", address)
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 0, output
        rows = read_csv(tmp_path / "sweep" / "results.csv")
        assert [(row["ppo.gamma"], row["status"]) for row in rows] == [("0.9", "complete"), ("0.99", "complete")]
        for path, env_steps in killed.items():
            assert f"resumed at {env_steps:,} env steps" in (path / "output.txt").read_text()
    finally:
        nodes.communicate("")


MY_NETWORK = """
import flax.linen as nn
import jax.numpy as jnp
from beside_it import FEATURES
from jaxrl_atari import register_network

class Tiny(nn.Module):
    num_actions: int
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, stacks):
        pixels = stacks.astype(self.dtype).reshape(*stacks.shape[:-3], -1)[..., ::97] / 255
        features = nn.relu(nn.Dense(FEATURES, dtype=self.dtype)(pixels)).astype(jnp.float32)
        return nn.Dense(self.num_actions)(features), nn.Dense(1)(features)[..., 0]

register_network("tiny_of_the_cluster", Tiny)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_import_names_is_sent_to_machines_that_do_not_have_it(tmp_path):
    """The cluster has another working directory, and the file is gone before a process could read it."""
    (tmp_path / "tiny.py").write_text(TINY)
    (tmp_path / "elsewhere").mkdir()
    file, beside = tmp_path / "my_network.py", tmp_path / "beside_it.py"
    nodes = start("-c", f"import os; os.chdir({str(tmp_path / 'elsewhere')!r})\n{CLUSTER}")
    options = ["--import", file, "--network.name", "tiny_of_the_cluster", "--total-env-steps", 512]

    def run(module, folder, text, *more):
        file.write_text(text)
        beside.write_text("FEATURES = 8\n")
        words = ["-m", f"jaxrl_atari.{module}", "--config", tmp_path / "tiny.py", "--run-dir", tmp_path / folder]
        output = ""
        with start(*words, *options, *more, "--sessions", 1) as process:
            for line in process.stdout:
                output += line
                if re.match(r"each (session|trial) has 0 GPUs", line):
                    file.unlink()
                    beside.unlink()
        return process.returncode, output

    try:
        address = next(line.split()[1] for line in nodes.stdout if line.startswith("address"))
        alone = MY_NETWORK.replace("from beside_it import FEATURES", "FEATURES = 8")
        status, output = run("suite", "suite", alone, "--games", "Pong", "--address", address)
        assert status == 0, output
        assert (tmp_path / "suite/Pong/code/my_network.py").read_text() == alone
        status, output = run("search", "search", alone, "--search.trials", 1, "--search.address", address)
        assert status == 0, output
        assert [row["status"] for row in read_csv(tmp_path / "search/trials.csv")] == ["finished"]
        assert (tmp_path / "search/trial_0/code/my_network.py").read_text() == alone
        status, output = run("suite", "beside", MY_NETWORK, "--games", "Pong", "--address", address)
        assert status == 2, output  # no session could begin
        assert re.search(
            r"session 0  failed: on .*my_network.py, line 4: .*No module named 'beside_it'", output
        ), output
        assert "put it into a folder that all machines share" in output
        assert "Traceback" not in output
    finally:
        nodes.communicate("")
