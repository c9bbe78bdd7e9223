"""`python -m jaxrl_atari`: the list of commands. `jaxrl_atari train` is `python -m jaxrl_atari.train`."""

import runpy
import sys

from jaxrl_atari import cli

COMMANDS = {
    "train": "train one or several sessions of a game",
    "evaluate": "play full games with a checkpoint; record a video",
    "plots": "draw graphs of sessions and trials; compare trials or suites",
    "report": "write one HTML page for a run, a suite or a search",
    "suite": "train many games; one table of all scores",
    "search": "search hyperparameters with Optuna",
    "verify": "recompute the scores of a run from its seeds and actions; train a part of it again",
    "devices": "check devices and drivers; estimate the memory of training",
    "benchmark": "measure the speed of training and of its parts",
    "export": "write a policy for ONNX and for JAX, to play without this package",
    "hub": "push a run to the Hugging Face Hub, or pull one",
}


def main() -> None:
    """Runs a command, or lists all."""
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        runpy.run_module(f"jaxrl_atari.{sys.argv.pop(1)}", run_name="__main__", alter_sys=True)
        return
    cli.run(lambda: cli.list_commands(sys.argv[1:], COMMANDS, "python -m jaxrl_atari."))


if __name__ == "__main__":
    main()
