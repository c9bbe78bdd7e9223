"""What a user reads: errors and counts."""

from jaxrl_atari.errors import ConfigError, UserError


def test_an_error_is_one_line_that_may_name_the_option_of_a_command():
    assert str(UserError("one\n  line")) == "one line"
    error = ConfigError("ppo.gamma", 2.0, "a number from 0 to 1", "lower it")
    assert str(error) == "ppo.gamma = 2.0: expected a number from 0 to 1; lower it"
    assert str(error.renamed("ppo.gamma", "--gamma")).startswith("--gamma = 2.0: ")
    assert error.renamed("ppo.epochs", "--epochs") is error
