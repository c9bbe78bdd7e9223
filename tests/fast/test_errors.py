"""Errors: what a user reads, also when the error comes from another process."""

import pickle
from pathlib import Path

import pytest

from jaxrl_atari import errors
from jaxrl_atari.output import counted


@pytest.mark.parametrize(
    "error",
    [
        errors.UserError("one  line"),
        errors.ConfigError("ppo.gamma", 2.0, "a number from 0 to 1", "lower it"),
        errors.InterfaceError("loss", 1, "a pair"),
        errors.ParametersOnly(Path("data/run")),
        errors.SessionsFailed("1 of 2 sessions failed"),
    ],
)
def test_an_error_survives_pickle(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.exit_status) == (type(error), str(error), error.exit_status)
    if isinstance(error, errors.ConfigError):
        assert str(copy.renamed("ppo.gamma", "--gamma")).startswith("--gamma = 2.0: expected")


@pytest.mark.parametrize(
    ("count", "text"), [(1, "1 game"), (0, "0 games"), (1_234_567, "1,234,567 games"), (0.25, "0.25 games")]
)
def test_counts(count, text):
    assert counted(count, "game") == text
