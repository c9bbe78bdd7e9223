"""Names of options: what options a command has, and which of them a user meant by a name that does not exist."""

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from jaxrl_atari.checks import option_name
from jaxrl_atari.cli.config_files import config_names

FAMILIAR = {
    "lr": "ppo.learning-rate",
    "lambda": "ppo.gae-lambda",
    "discount": "ppo.gamma",
    "batch-size": "ppo.minibatch-size",
    "num-steps": "ppo.rollout-length",
    "n-steps": "ppo.rollout-length",
    "update-epochs": "ppo.epochs",
    "n-epochs": "ppo.epochs",
    "ent-coef": "ppo.entropy-coef",
    "vf-coef": "ppo.value-coef",
    "clip-coef": "ppo.clip-epsilon",
    "clip-range": "ppo.clip-epsilon",
    "anneal-lr": "ppo.anneal-learning-rate",
    "norm-adv": "ppo.normalize-advantages",
    "clip-vloss": "ppo.clip-value-loss",
    "env-id": "env.game",
    "env": "env.game",
    "n-envs": "env.num-envs",
    "timesteps": "total-env-steps",
    "total-timesteps": "total-env-steps",
    "total-steps": "total-env-steps",
    "num-timesteps": "total-env-steps",
    "steps": "total-env-steps",
    "device": "devices.gpu",
    "cuda": "devices.gpu",
    "gpus": "devices.data-parallel",
    "cpu": "devices.gpu",
    "num-seeds": "sessions",
    "n-seeds": "sessions",
    "seeds": "sessions",
    "track": "log.wandb",
    "wandb-project-name": "log.wandb-project",
    "num-trials": "search.trials",
    "n-trials": "search.trials",
    "games": "env.game",
    "record": "video",
    "capture-video": "video",
    "num-episodes": "episodes",
    "n-episodes": "episodes",
    "n-eval-episodes": "episodes",
    "out": "output",
    "to": "output",
    "log-dir": "output-dir",
    "logdir": "output-dir",
}
"""Names of options in other programs -> their names here, if the command has them."""


def option_types(options: type, prefix: str = "") -> dict[str, Any]:
    """The options of a dataclass and of the dataclasses in it: name, such as `ppo.gae-lambda`, -> type.

    Args:
        options: the dataclass.
        prefix: stands before the names, such as `ppo.`.
    """
    types: dict[str, Any] = {}
    hints = get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        hint = hints[field.name]
        kind, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        name = prefix + option_name(field.name, metadata)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            types |= option_types(kind, f"{name}." if name else "")
        else:
            types[name] = kind
    return types


def unknown_option(words: Sequence[str], options: type, command: str) -> str:
    """The error message for the words of a command line that belong to no option.

    Args:
        words: at least one.
        options: the dataclass of the command's options.
        command: name of the command, such as `train`.
    """
    word = next((word for word in words if word.startswith("--")), words[0])
    names = list(option_types(options))
    if word.startswith("--"):
        option = word.partition("=")[0]
        meant = " or ".join(f"--{name}" for name in similar_options(option, names))
        problem = f"{option}: {command} has no such option"
    else:
        path = Path(word).expanduser()
        meant = ""
        if "resume" in names and path.is_dir():
            meant = f"--resume {word}"
        elif "config" in names and (path.suffix == ".py" or path.name in config_names()):
            meant = f"--config {word}"
        problem = f"{word}: belongs to no option of {command}"
    question = f"; did you mean {meant}?" if meant else ""
    return f"{problem}{question} (--help lists all options)"


def similar_options(option: str, names: Sequence[str]) -> list[str]:
    """At most three options that may have been meant by one that does not exist.

    Args:
        option: an option that does not exist, such as `--lr`.
        names: names of the existing options, such as `ppo.learning-rate`.
    """
    wanted = option.lstrip("-").replace("_", "-").lower()
    leaf = wanted.rpartition(".")[2]
    for familiar in (wanted, leaf):
        if FAMILIAR.get(familiar) in names:
            return [FAMILIAR[familiar]]
    same = [name for name in names if name.rpartition(".")[2] == leaf.removeprefix("no-")]
    if same:
        return same[:3]
    spelt_alike = difflib.get_close_matches(wanted, names, 1, 0.9)
    if spelt_alike:
        return spelt_alike
    by_leaf = {name.rpartition(".")[2]: name for name in reversed(names)}
    close = difflib.get_close_matches(wanted, names, 3, 0.75)
    close += [by_leaf[name] for name in difflib.get_close_matches(leaf, by_leaf, 3, 0.75)]
    return list(dict.fromkeys(close))[:3]
