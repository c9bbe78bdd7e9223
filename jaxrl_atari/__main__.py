"""`python -m jaxrl_atari`: the list of commands. `jaxrl_atari train` is `python -m jaxrl_atari.train`."""

import runpy
import sys

COMMANDS = {
    "train": "train one or several sessions of a game",
    "evaluate": "play full games with a checkpoint; record a video",
    "plots": "draw graphs of sessions and trials; compare trials or suites",
    "report": "write one HTML page for a run, a suite or a search",
    "suite": "train many games; one table of all scores",
    "search": "search hyperparameters with Ray Tune and Optuna",
    "verify": "recompute the scores of a run from its seeds and actions",
    "devices": "check devices and drivers; estimate the memory of training",
    "benchmark": "measure the speed of training and of its parts",
    "hub": "push a run to the Hugging Face Hub, or pull one",
}


def main() -> None:
    """Runs a command, or lists all."""
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        runpy.run_module(f"jaxrl_atari.{sys.argv.pop(1)}", run_name="__main__", alter_sys=True)
        return
    print("usage: python -m jaxrl_atari.COMMAND [--help]\n")
    print("\n".join(f"  {name:11}{purpose}" for name, purpose in COMMANDS.items()))
    sys.exit(2 if sys.argv[1:] and sys.argv[1:] != ["--help"] else 0)


if __name__ == "__main__":
    main()
