"""The command `search`: checks that Optuna is installed before `command.py` imports it."""

from jaxrl_atari import cli
from jaxrl_atari.errors import require_package


def main() -> None:
    """Runs the command. Raises `UserError` without Optuna."""
    require_package("optuna", "search")
    from jaxrl_atari.search import command

    command.main()


if __name__ == "__main__":
    cli.run(main)
