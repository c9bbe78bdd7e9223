"""What a user reads: errors and counts."""

import pytest

from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.output import counted


def test_an_error_is_one_line_that_may_name_the_option_of_a_command():
    assert str(UserError("one\n  line")) == "one line"
    error = ConfigError("ppo.gamma", 2.0, "a number from 0 to 1", "lower it")
    assert str(error) == "ppo.gamma = 2.0: expected a number from 0 to 1; lower it"
    assert str(error.renamed("ppo.gamma", "--gamma")).startswith("--gamma = 2.0: ")
    assert error.renamed("ppo.epochs", "--epochs") is error


@pytest.mark.parametrize(
    ("count", "text"), [(1, "1 game"), (0, "0 games"), (1_234_567, "1,234,567 games"), (0.25, "0.25 games")]
)
def test_counts(count, text):
    assert counted(count, "game") == text
