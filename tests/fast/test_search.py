"""A search: its space and options, its record and its results, without training."""

import dataclasses
import math

import numpy as np
import pytest
from sample_runs import read_csv, table, write_run
from user_commands import ROOT

pytest.importorskip("optuna", reason="search mode needs Optuna: pip install 'jaxrl_atari[search]'")

from optuna.trial import TrialState

from jaxrl_atari import train
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, LogConfig, PPOConfig, set_fields
from jaxrl_atari.errors import ConfigError, SessionsFailed, UserError
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.search import command
from jaxrl_atari.search.space import (
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    ResourcesConfig,
    SearchConfig,
    check_search,
)
from jaxrl_atari.search.study import StudyWriter, open_study, save_results, start_trial
from jaxrl_atari.trials.slots import allot

QBERT = ["--config", str(ROOT / "configs/search_qbert.py")]
SPACE = {
    "ppo.gae_lambda": FloatDistribution(0.7, 0.98),
    "ppo.learning_rate": FloatDistribution(1e-4, 5e-4, log=True),
}


def new_search(folder, config=None, **options):
    """A search directory with its trials, none of which has started; returns its options."""
    search = SearchConfig(**{"space": SPACE, "trials": 6, "grace_env_steps": 1000, "seed": 3} | options)
    config = config or Config(name="small", total_env_steps=9000)
    write_json(folder / "search.json", {"config": config.to_dict(), "search": search.to_dict()})
    study = open_study(folder, search)
    for _ in range(search.trials):
        study.enqueue_trial({})
    return search


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


UNUSABLE = [
    ({}, "search.space = {}"),
    ({"ppo.gae_lamda": FloatDistribution(0.7, 0.9)}, "did you mean ppo.gae_lambda?"),
    ({"ppo.gae_lambda": [0.9, 0.95]}, "search.space = 'ppo.gae_lambda'"),
    ({"seed": IntDistribution(0, 3)}, "search.space = 'seed'"),
    ({"ppo.gae_lambda": FloatDistribution(0.9, 1.1)}, "ppo.gae_lambda = 1.1"),
    ({"ppo.epochs": FloatDistribution(1, 4)}, "ppo.epochs = 1.0"),
    ({"ppo.coefficients.no_such_one": FloatDistribution(0, 1)}, "expected a coefficient of algorithm = ppo"),
    (
        {
            "env.num_envs": CategoricalDistribution((8, 16)),
            "ppo.minibatch_size": CategoricalDistribution((256, 2048)),
        },
        "= 1024 samples",
    ),
]


def test_a_space_that_cannot_be_used_is_an_error_that_names_the_field():
    for space, words in UNUSABLE:
        with pytest.raises(ConfigError) as caught:
            check_search(Config(), SearchConfig(space=space))
        assert words in str(caught.value)


def test_options_that_cannot_be_used():
    for options, words in (
        (["--total-env-steps", "100000"], "search.grace_env_steps = 500000: expected less"),
        (["--search.resources.gpu", "1.5"], "resources.gpu = 1.5"),
    ):
        with pytest.raises(UserError, match=words):
            command.parse_options([*QBERT, *options])


def test_a_search_that_continues_may_have_more_trials_but_no_other_options(tmp_path):
    space = {
        **SPACE,
        "ppo.epochs": IntDistribution(1, 8),
        "ppo.target_kl": CategoricalDistribution((None, 0.1)),
        "network.name": CategoricalDistribution(("nature", "impala")),
    }
    search = new_search(tmp_path, space=space, resources=ResourcesConfig(gpu=0.25))
    more, before = command.parse_options(["--resume", str(tmp_path), "--search.trials", "9"])
    assert (before.search, more.directory) == (search, tmp_path)
    assert more.search == dataclasses.replace(search, trials=9)
    with pytest.raises(ConfigError, match=r"search\.reduction = 4: expected 3, its value in this search"):
        command.parse_options(["--run-dir", str(tmp_path), "--search.reduction", "4"])
    with pytest.raises(ConfigError, match=r"ppo\.epochs = 2: expected 4"):
        command.parse_options(["--resume", str(tmp_path), "--ppo.epochs", "2"])
    with pytest.raises(UserError, match="nowhere: not a search directory"):
        command.parse_options(["--resume", str(tmp_path / "nowhere")])


# --- The record --------------------------------------------------------------------------------------------------


def test_random_samples_depend_on_seed_and_number_alone(tmp_path):
    def sampled(name, seed, order):
        (tmp_path / name).mkdir()
        search = new_search(tmp_path / name, sampler="random", trials=40, seed=seed)
        return {number: start_trial(tmp_path / name, search, number).params for number in order}

    samples = sampled("one", 0, range(40))
    assert sampled("two", 0, [5, 3]) == {5: samples[5], 3: samples[3]}
    assert sampled("three", 1, [5])[5] != samples[5]


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
            writer.write({"env_steps": env_steps, "return_ma": score, "return_mean": score and 2 * score})
        state = open_study(tmp_path, search).trials[number].state
        assert writer.pruned == (state == TrialState.PRUNED)
        return writer.pruned

    for number, score in enumerate((10.0, 20.0, 30.0, 40.0)):
        assert not stopped(number, (500, 0.0), (1000, score))
    assert stopped(4, (1000, 25.0), (1100, 99.0))  # the better half continues; the last point comes after the stop
    assert open_study(tmp_path, search).trials[4].value == 25.0
    assert open_study(tmp_path, search).trials[4].user_attrs["return_mean"] == 50.0
    assert not stopped(5, (900, None), (1000, math.nan), (1100, 35.0))  # both mean: no finished game yet
    assert stopped(5, (2100, 1.0)) is False  # the only one at the second comparison
    assert not stopped(2, (8900, 0.0))  # its budget is spent


def test_resources():
    def split(gpu, cpu, *machines, option="auto"):
        return dataclasses.astuple(allot(ResourcesConfig(gpu, cpu), machines, DevicesConfig(gpu=option)))

    assert split(0.25, 0, {"GPU": 2.0, "CPU": 16.0}) == (0.25, 2)
    assert split(1.0, 0, {"CPU": 32.0}, {"GPU": 2.0, "CPU": 8.0}) == (1.0, 4)
    assert split(1.0, 0, {"GPU": 1.0, "CPU": 8.0}, {"GPU": 2.0, "CPU": 4.0}) == (1.0, 2)
    assert split(0.25, 0, {"CPU": 2.0}) == (0.0, 1)
    assert split(0.25, 3, {"GPU": 2.0, "CPU": 16.0}, option=False) == (0.0, 3)
    with pytest.raises(UserError, match="a machine with 2 GPUs and 1 core; found 1 GPU and 8 cores; 1 GPU and 8"):
        split(2.0, 0, {"GPU": 1.0, "CPU": 8.0}, {"GPU": 1.0, "CPU": 8.0})


# --- Results -----------------------------------------------------------------------------------------------------


def test_results(tmp_path):
    config = Config(name="small", total_env_steps=9000, env=EnvConfig(num_envs=8), ppo=PPOConfig(epochs=2))
    search = new_search(
        tmp_path, config, space={**SPACE, "network.name": CategoricalDistribution(("nature", "impala"))}
    )
    end_trial(tmp_path, search, 0, [1.0, 50.0], TrialState.PRUNED)
    best = end_trial(tmp_path, search, 1, [2.0, 5.0, 12.5], return_mean=7.25)
    end_trial(tmp_path, search, 2, [3.0], TrialState.RUNNING, failure="the loss | is nan")
    end_trial(tmp_path, search, 3, [], TrialState.RUNNING)
    save_results(tmp_path, config, open_study(tmp_path, search))

    rows = read_csv(tmp_path / "trials.csv")
    assert [(row["trial"], row["status"]) for row in rows] == [
        ("1", "finished"), ("0", "stopped by ASHA"), ("2", "failed: the loss | is nan"), ("3", "unfinished"),
    ]  # fmt: skip
    assert (float(rows[0]["score"]), rows[0]["env_steps"], rows[3]["score"]) == (6.5, "300", "")
    assert [row["return_mean"] for row in rows] == ["7.25", "", "", ""]  # of a short budget
    assert float(rows[0]["ppo.gae_lambda"]) == best["ppo.gae_lambda"]
    assert len({line.count("|") for line in (tmp_path / "trials.md").read_text().splitlines()}) == 1

    file = tmp_path / "small_best.py"
    expected = dataclasses.replace(set_fields(config, best), name="small_best", seed=1)
    assert load_config(file) == expected
    chosen = train.parse_options(["--config", str(file), "--sessions", "4"]).config
    assert (chosen.sessions, chosen.ppo) == (4, expected.ppo)


def test_the_choice_none_is_a_value_and_no_gap_in_the_results(tmp_path):
    config = Config(name="small", total_env_steps=9000)
    search = new_search(tmp_path, config, space={"ppo.target_kl": CategoricalDistribution((None,))}, trials=1)
    end_trial(tmp_path, search, 0, [1.0])
    save_results(tmp_path, config, open_study(tmp_path, search))
    assert [row["ppo.target_kl"] for row in read_csv(tmp_path / "trials.csv")] == ["None"]
    assert "ppo.target_kl None" in (tmp_path / "small_best.py").read_text()


def test_a_search_all_of_whose_trials_failed_has_status_1_at_every_start(tmp_path, capsys):
    """Also where an earlier start has tried them: a trial in which no game has ended does not run again."""
    config = Config(name="small", total_env_steps=9000, log=LogConfig(graphs=False))
    search = new_search(tmp_path, config, trials=2)
    end_trial(tmp_path, search, 0, [1.0], TrialState.FAIL, failure="an earlier reason")
    end_trial(tmp_path, search, 1, [], TrialState.FAIL)
    for _ in range(2):
        with pytest.raises(SessionsFailed, match=r"all of 2 trials failed: no game ended") as error:
            command.main(["--resume", str(tmp_path)])
        assert error.value.exit_status == 1
        assert f"resuming {tmp_path}\n" in capsys.readouterr().out


def test_a_finished_search_is_resumed(tmp_path):
    config = Config(name="small", total_env_steps=9000, log=LogConfig(graphs=False))
    search = new_search(tmp_path, config, trials=2)
    for number in range(2):
        end_trial(tmp_path, search, number, [1.0 + number])
    command.main(["--resume", str(tmp_path)])
    assert [row["status"] for row in read_csv(tmp_path / "trials.csv")] == ["finished"] * 2
