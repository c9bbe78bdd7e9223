"""Options, errors and output of every command."""

from jaxrl_atari.cli.command import INTERRUPTED, drop_output, is_command, run, say, write
from jaxrl_atari.cli.options import (
    Parser,
    call_config_file,
    changed_fields,
    flat,
    parse,
    report_changes,
    say_changes,
)

__all__ = [
    "INTERRUPTED",
    "Parser",
    "call_config_file",
    "changed_fields",
    "drop_output",
    "flat",
    "is_command",
    "parse",
    "report_changes",
    "run",
    "say",
    "say_changes",
    "write",
]
