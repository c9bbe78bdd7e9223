"""A trial that ends early by a rule, and is interrupted in its last evaluation."""

import threading

import pytest
from sample_runs import read_csv
from small_training import TINY

from jaxrl_atari import run_training
from jaxrl_atari.config import set_fields
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.trials.trial import begin_run, train_session


def test_an_early_end_holds_where_the_last_evaluation_was_interrupted(tmp_path):
    """The resume evaluates the session, and trains it no further, although its command line has no `stop`."""
    config = set_fields(TINY, {"evaluation.every_env_steps": 64, "evaluation.episodes": 1})
    ended = threading.Event()

    def stop(row):
        if row["env_steps"] >= 64:
            ended.set()
        return ended.is_set()

    begin_run(config, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train_session(config, tmp_path, 0, stop=stop, stop_requested=ended.is_set)
    summary = run_training(config, tmp_path).summary
    expected = {"env_steps": 64, "reason": "stop(row) was true at this log point"}
    assert summary["stopped"] == {"session_0": expected}
    assert Checkpoints(tmp_path / "session_0").env_steps() == [64]
    assert [row["env_steps"] for row in read_csv(tmp_path / "session_0" / "evaluations.csv")] == ["64"]
