"""`python -m jaxrl_atari`: the list of commands."""

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

if __name__ == "__main__":
    print("usage: python -m jaxrl_atari.COMMAND [--help]\n")
    print("\n".join(f"  {name:11}{purpose}" for name, purpose in COMMANDS.items()))
