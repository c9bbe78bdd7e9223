"""Trials of a search that train: one that ASHA stops, and one in which no game ends."""

import dataclasses

import pytest
from sample_runs import read_csv
from small_training import TINY

pytest.importorskip("optuna", reason="search mode needs Optuna: pip install 'jaxrl_atari[search]'")

from optuna.trial import TrialState

from jaxrl_atari.runs.files import write_json
from jaxrl_atari.runs.layout import checkpoint_env_steps
from jaxrl_atari.search.space import FloatDistribution, SearchConfig, read_search
from jaxrl_atari.search.study import StudyWriter, open_study, save_results, start_trial, train_trial


def new_search(folder, config, **options):
    """A search directory with its trials, none of which has started; returns its options."""
    search = SearchConfig(space={"ppo.gae_lambda": FloatDistribution(0.7, 0.98)}, **options)
    write_json(folder / "search.json", {"config": config.to_dict(), "search": search.to_dict()})
    study = open_study(folder, search)
    for _ in range(search.trials):
        study.enqueue_trial({})
    return search


def results(folder):
    """The rows of trials.csv by their trials."""
    config, search = read_search(folder)
    save_results(folder, config, open_study(folder, search))
    return {row["trial"]: row for row in read_csv(folder / "trials.csv")}


def test_a_trial_that_asha_stops_trains_no_further(tmp_path):
    config = dataclasses.replace(TINY, total_env_steps=2048)
    search = new_search(tmp_path, config, trials=3, grace_env_steps=192, reduction=2)
    for number in range(2):  # two trials beyond its reach
        writer = StudyWriter(start_trial(tmp_path, search, number), config)
        writer.write({"env_steps": 192, "return_ma": 1e6 + number, "return_mean": 1e6})
    train_trial(tmp_path, 2)
    row = results(tmp_path)["2"]
    assert row["status"] == "stopped by ASHA"
    assert 192 <= int(row["env_steps"]) == checkpoint_env_steps(tmp_path / "trial_2/session_0")[-1] < 2048
    assert open_study(tmp_path, search).trials[2].value == pytest.approx(float(row["score"]))


def test_a_trial_without_a_finished_game_has_one_status(tmp_path):
    """In Optuna's journal and in the table. It has spent its budget, so it does not run again."""
    config = dataclasses.replace(TINY, total_env_steps=64)  # 16 steps in each environment; games last 32
    search = new_search(tmp_path, config, trials=1, early_stopping="none")
    train_trial(tmp_path, 0)
    (trial,) = open_study(tmp_path, search).trials
    status = results(tmp_path)["0"]["status"]
    assert (trial.state, status) == (TrialState.FAIL, "failed: no game ended within the budget")
    assert not (tmp_path / "tiny_best.py").exists()
