"""The command `export`: writes a policy to a folder that does not need this package.

    python -m jaxrl_atari.export RUN_DIR [--checkpoint best|latest|STEP] [--session best|N] [--output DIR]

| file | content |
|---|---|
| policy.onnx | a program for any ONNX runtime, from frame stacks to logits and value |
| play.py | plays games with policy.onnx, on onnxruntime and ale-py |
| policy.jaxexport | a program for JAX (StableHLO), serialised by `jax.export` |
| README.md | game, protocol, preprocessing, score, and how to use each file |

The command needs pip install 'jaxrl_atari[export]'. Both programs compute in float32. Before the command writes
anything, it runs them on the same inputs and compares their outputs. A network of the user's own has no graph for
ONNX; it is exported for JAX alone.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jaxrl_atari import cli
from jaxrl_atari.cli.options import CheckpointOption, RunDir, WithImports, parse
from jaxrl_atari.config import NonNegativeInt
from jaxrl_atari.errors import UserError, require_package
from jaxrl_atari.evaluate.policy import load_policy
from jaxrl_atari.hardware.gpus import limit_to_cpu
from jaxrl_atari.output import say
from jaxrl_atari.report.summary import read_run
from jaxrl_atari.runs.files import require_new_folder, unused
from jaxrl_atari.runs.layout import session_number


@dataclasses.dataclass(frozen=True)
class Options(WithImports):
    """Exports a policy to a folder that does not need this package."""

    run_dir: RunDir
    """Directory of a run."""
    checkpoint: CheckpointOption = "best"
    session: Literal["best"] | NonNegativeInt = "best"
    """`best` (the one with the best checkpoint), or the number of a session."""
    output: Path | None = None
    """New folder. None: export_STEP in the session's directory (or export_STEP_2, ...)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes a policy to a new folder."""
    options = parse(Options, arguments, "export")
    for package in ("onnx", "onnxruntime"):
        require_package(package, "export")
    from jaxrl_atari.export.folder import export_policy

    if options.output is not None:
        require_new_folder(options.output)
    limit_to_cpu()  # a GPU may be training
    run = read_run(options.run_dir)
    env = run.config.env
    if env.backend == "gymnasium":
        raise UserError(f"env.backend = 'gymnasium': only ALE games can be exported, not {env.game_name}")
    session = None if options.session == "best" else options.session
    policy = load_policy(options.run_dir, options.checkpoint, session=session)
    directory = options.output or unused(policy.session_dir / f"export_{policy.env_steps}")
    export_policy(policy, run, directory)
    session_name = f"session {session_number(policy.session_dir)}"
    say(f"{env.game_name}, {session_name}, env step {policy.env_steps:,}\nexported: {directory}")


if __name__ == "__main__":
    cli.run(main)
