"""The command `search`: checks that Optuna is installed before `command.py` imports it."""

from jaxrl_atari import cli
from jaxrl_atari.search import require_extra


def main() -> None:
    """Runs the command. Raises `UserError` without Optuna."""
    require_extra()
    from jaxrl_atari.search import command

    command.main()


if __name__ == "__main__":
    cli.run(main)
