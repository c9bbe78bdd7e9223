import pickle

import pytest

from jaxrl_atari.cli.errors import ConfigError, UserError, require


def test_errors_are_one_line_and_cross_processes():
    error = ConfigError("ppo.gamma", 2, "a number\nfrom 0 to 1", "use 0.99")
    assert str(error) == "ppo.gamma = 2: expected a number from 0 to 1; use 0.99"
    assert isinstance(error, UserError)
    assert isinstance(error, ValueError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(pickle.loads(pickle.dumps(UserError("no\n  such file")))) == "no such file"


def test_require():
    require(True, "ppo.gamma", 2, "a number from 0 to 1")
    with pytest.raises(ConfigError, match=r"ppo\.gamma = 2: expected a number from 0 to 1; use 0.99"):
        require(False, "ppo.gamma", 2, "a number from 0 to 1", "use 0.99")
