"""Lists of commands: those of the package, and those of a command that has commands of its own."""

from collections.abc import Mapping, Sequence

from jaxrl_atari.errors import UserError, did_you_mean
from jaxrl_atari.output import say


def list_commands(words: Sequence[str], purposes: Mapping[str, str], program: str) -> None:
    """Prints all commands, for a command line that begins with none of them.

    Args:
        words: the words of the command line.
        purposes: name of a command -> what it does.
        program: the words before the name of a command, up to a dot or a space: `python -m jaxrl_atari.`.

    Raises:
        UserError: the first word is not `--help`; the message names the command that was probably meant.
    """
    if words and words[0] not in ("--help", "-h"):
        meant = did_you_mean(words[0], purposes)
        raise UserError(f"{words[0]}: no such command; {meant}expected one of {', '.join(purposes)}")
    say(f"usage: {program}COMMAND [--help]\n")
    for name, purpose in purposes.items():
        say(f"  {name:11}{purpose}")
