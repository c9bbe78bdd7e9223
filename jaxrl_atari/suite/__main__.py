"""The whole benchmark: a trial for each of a list of games, and one table of all scores.

    python -m jaxrl_atari.suite [--games Pong Breakout ...] [--sessions 4 --total-env-steps 1000000 ...]
    python -m jaxrl_atari.suite --resume data/suite_20260101_120000

Without --games: all games that have a reference score. --config takes a config file; every field of the config is an
option, and ppo.gae_lambda is the one tuned for each game unless it is given.

SUITE_DIR/suite.json             the games and the config
SUITE_DIR/<Game>/                a run directory, like any other
SUITE_DIR/results.{md,csv,json}  written again whenever a game ends
"""

import csv
import dataclasses
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_atari import cli
from jaxrl_atari.config import Config
from jaxrl_atari.config_files import CONFIG_FILE, config_from_dict, load_config_file
from jaxrl_atari.errors import ConfigError, SessionsFailed, UserError
from jaxrl_atari.games import GAMES
from jaxrl_atari.hardware.gpus import place_session, visible
from jaxrl_atari.run_dir.metrics import aggregate_games, reference_normalised
from jaxrl_atari.run_dir.results import write_trial_summary
from jaxrl_atari.trial import trial
from jaxrl_atari.trial.processes import Task, run_processes

SUITE_FILE = "suite.json"
COLUMNS = {
    "game": "game",
    "gae_lambda": "λ",
    "sessions": "sessions",
    "env_steps": "env steps",
    "score": "ours",
    "score_std": "± std",
    "reference_score": "reference",
    "reference_normalised_score": "ratio",
    "human_normalised_score": "human-normalised",
    "hours": "hours",
    "status": "status",
}
"""The table's columns: the name in CSV, the title in Markdown."""

EXPLANATION = (
    "ours: `return_ma` at the end, mean and standard deviation over sessions. reference: SLM Lab's PPO, protocol v5, "
    "10,000,000 env steps. ratio: (ours - random) / (reference - random), which keeps its sense where scores are "
    "negative. human-normalised: (ours - random) / (human - random), the customary pair of DQN papers. hours: of "
    "training, mean of a session. env steps: mean of the sessions so far."
)


def default_games() -> list[str]:
    """The games that have a reference score."""
    return [name for name, game in GAMES.items() if game.reference_score is not None]


def game_configs(config: Config, games: Sequence[str]) -> dict[str, Config]:
    """ALE's name of each game -> its trial's config.

    Raises:
        ConfigError: no such game, one that is named twice, or none at all.
    """
    configs: dict[str, Config] = {}
    for game in games:
        env = dataclasses.replace(config.env, game=game)
        if env.game_name in configs:
            raise ConfigError("games", game, "each game once")
        configs[env.game_name] = dataclasses.replace(config, name=env.game_name, env=env)
    if not configs:
        raise ConfigError("games", "", "at least one game", "leave --games out for all with a reference score")
    return configs


def make_suite_dir(config: Config, games: Sequence[str]) -> Path:
    """Makes `OUTPUT_DIR/NAME_TIMESTAMP` and writes its suite.json."""
    suite_dir = trial.make_run_dir(config)
    write_suite_file(suite_dir, config, games)
    return suite_dir


def write_suite_file(suite_dir: Path, config: Config, games: Sequence[str]) -> None:
    """What is needed to run this suite again."""
    described = {
        key: value for key, value in trial.describe(config, config.seed).items() if key not in ("game", "gae_lambda")
    }
    trial.write_json(suite_dir / SUITE_FILE, {"games": list(games), **described})


def read_suite_file(suite_dir: Path) -> tuple[Config, list[str]]:
    """The config and the games of a suite.

    Raises:
        UserError: it is no suite's directory, or its suite.json cannot be used.
    """
    path = suite_dir / SUITE_FILE
    if not path.is_file():
        raise UserError(f"{suite_dir}: not a suite's directory (it has no {SUITE_FILE}); expected data/suite_TIMESTAMP")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return config_from_dict(values["config"]), [str(game) for game in values["games"]]
    except (ValueError, KeyError, TypeError) as error:
        reason = str(error) if isinstance(error, UserError) else type(error).__name__
        raise UserError(f"{path}: is not the description of a suite ({reason})") from error


def is_done(config: Config, run_dir: Path) -> bool:
    """Whether all sessions of a game have spent their budget."""
    return all(trial.is_finished(config, trial.session_dir(run_dir, i)) for i in range(config.sessions))


def share_gpus(config: Config, games: int, gpus: int) -> list[tuple[int, ...]]:
    """The GPUs of each game that runs at the same time; `[()]` is one game at a time, with all that is visible.

    A game gets as many GPUs as one session needs, or more where there are fewer games than GPUs: many games are
    better spread one a GPU, with their sessions one after the other, than one game over all GPUs.
    """
    devices = config.devices
    elsewhere = [place for place in (devices.gpu, devices.actor, devices.evaluator) if not isinstance(place, bool)]
    indexed = any(isinstance(place, int) for place in elsewhere)
    if gpus == 0 or devices.gpu is False or indexed or devices.data_parallel == "all":
        return [()]
    at_once = max(1, min(gpus // devices.data_parallel, games))
    width = gpus // at_once
    return [()] if at_once == 1 else [tuple(range(i * width, (i + 1) * width)) for i in range(at_once)]


def run_suite(suite_dir: Path, config: Config, games: Sequence[str]) -> dict[str, str]:
    """Trains what is not done yet, each game in a process of its own; returns why games failed.

    Raises:
        KeyboardInterrupt: after SIGINT or SIGTERM, once every session has written its last checkpoint.
    """
    waiting = {}
    for name, of_game in game_configs(config, games).items():
        run_dir = suite_dir / name
        if is_done(of_game, run_dir):
            print(f"game {name}  finished already", flush=True)
            continue
        run_dir.mkdir(exist_ok=True)
        trial.write_json(run_dir / CONFIG_FILE, trial.describe(of_game, of_game.seed))
        waiting[name] = run_dir
    if not waiting:
        return {}
    gpus = visible().gpus
    shares = share_gpus(config, len(waiting), len(gpus))
    tasks = []
    for index, (name, run_dir) in enumerate(waiting.items()):
        share = shares[index % len(shares)]
        environment = dict(os.environ)
        if share:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[i].name for i in share)
        tasks.append(Task(name, ("jaxrl_atari.suite.worker", str(run_dir)), environment, share, kind="game"))
    print(f"{len(waiting)} games to train, {len(shares)} at a time", flush=True)
    return {str(name): reason for name, reason in run_processes(tasks, len(shares)).items()}


def read_rows(suite_dir: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row of `COLUMNS` for each game of a suite, and the aggregates over the complete games."""
    config, games = read_suite_file(suite_dir)
    rows: list[dict[str, Any]] = []
    normalised: dict[str, dict[str, list[float]]] = {"human-normalised": {}, "ratio": {}}
    for name, of_game in game_configs(config, games).items():
        row = dict.fromkeys(COLUMNS) | {
            "game": name,
            "gae_lambda": of_game.gae_lambda,
            "sessions": 0,
            "reference_score": GAMES[name].reference_score,
            "status": "waiting",
        }
        rows.append(row)
        try:
            summary = write_trial_summary(suite_dir / name)
        except UserError:
            continue  # no log point yet
        row |= {key: summary[key] for key in row if key in summary and key not in ("sessions", "game")}
        row["sessions"] = len(summary["sessions"])
        row["env_steps"], row["hours"] = summary["mean"]["env_steps"], summary["mean"]["wall_hours"]
        row["status"] = "complete" if summary["complete"] else "not complete"
        scores = [session["final_return_ma"] for session in summary["sessions"]]
        if summary["complete"] and None not in scores:
            if summary["human_normalised_score"] is not None:
                human = [session["human_normalised_score"] for session in summary["sessions"]]
                normalised["human-normalised"][name] = human
            if summary["reference_normalised_score"] is not None:
                ratios = [reference_normalised(score, GAMES[name]) for score in scores]
                normalised["ratio"][name] = [ratio for ratio in ratios if ratio is not None]
    return rows, {kind: aggregate_games(scores) for kind, scores in normalised.items() if scores}


def _cell(name: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    if name in ("sessions", "env_steps"):
        return f"{value:,.0f}"
    if name in ("reference_normalised_score", "human_normalised_score"):
        return f"{value:.3f}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.2f}"


def markdown(config: Config, rows: Sequence[Mapping[str, Any]], aggregates: Mapping[str, Any]) -> str:
    """The results as people read them."""
    lines = [
        f"# {config.name}: {len(rows)} games, {config.sessions} sessions of {config.total_env_steps:,} env steps each",
        "",
        "| " + " | ".join(COLUMNS.values()) + " |",
        "|---|" + "---:|" * (len(COLUMNS) - 2) + "---|",
        *("| " + " | ".join(_cell(name, row[name]) for name in COLUMNS) + " |" for row in rows),
        "",
        f"Protocol {config.env.resolved_protocol}. {EXPLANATION}",
        "",
    ]
    if not aggregates:
        return "\n".join([*lines, "No game is complete with a score to compare with: no aggregates yet.", ""])
    lines += ["| over the complete games | games | median | interquartile mean |", "|---|---:|---:|---:|"]
    for kind, found in aggregates.items():
        cells = []
        for figure in ("median", "iqm"):
            low, high = found[f"{figure}_interval"]
            cells.append(f"{found[figure]:.3f} ({low:.3f} to {high:.3f})")
        lines.append(f"| {kind} | {found['games']} | {cells[0]} | {cells[1]} |")
    note = "In parentheses: 95% intervals of the stratified bootstrap over sessions (Agarwal et al. 2021)."
    return "\n".join([*lines, "", note, ""])


def write_results(suite_dir: Path, failures: Mapping[str, str] | None = None) -> str:
    """Writes results.md, results.csv and results.json; returns the Markdown.

    Args:
        failures: game -> why it failed; None if that is not known yet.
    """
    config, _ = read_suite_file(suite_dir)
    rows, aggregates = read_rows(suite_dir)
    for row in rows:
        if failures and row["game"] in failures:
            row["status"] = "failed: " + failures[row["game"]].replace("|", "/")
    text, table = markdown(config, rows, aggregates), io.StringIO()
    writer = csv.DictWriter(table, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    figures = json.dumps({"games": rows, "aggregates": aggregates}, indent=2) + "\n"
    for name, content in (("results.md", text), ("results.csv", table.getvalue()), ("results.json", figures)):
        partial = suite_dir / f".{name}.{os.getpid()}.partial"  # several games may end at once
        partial.write_text(content, encoding="utf-8")
        os.replace(partial, suite_dir / name)
    return text


def parse(arguments: Sequence[str]) -> tuple[Config, list[str], Path | None]:
    """Command line -> config, games, and the suite's directory if one is to be resumed.

    Raises:
        UserError: a value that cannot be used.
    """
    first = cli.Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    first.add_argument("--resume")
    first.add_argument("--games", nargs="*")
    known, rest = first.parse_known_args(arguments)
    if known.resume and (known.config or known.games is not None):
        raise UserError("--resume: a suite has its games and config already; leave --games and --config out")
    if any(word.partition("=")[0] in ("--env.game", "--name") for word in rest):
        raise UserError("--env.game and --name: each game of a suite has its own; choose with --games Pong Breakout")
    suite_dir = Path(known.resume) if known.resume else None
    if suite_dir is not None:
        default, games = read_suite_file(suite_dir)
    else:
        file_config = load_config_file(known.config) if known.config else Config()
        default, games = dataclasses.replace(file_config, name="suite"), known.games
        games = default_games() if games is None else games
    config = cli.parse(Config, rest, default=default, prog="python -m jaxrl_atari.suite", description=__doc__)
    return config, list(game_configs(config, games)), suite_dir


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    config, games, suite_dir = parse(sys.argv[1:] if arguments is None else arguments)
    place_session(config, 0)  # devices that are not there are refused before anything is made
    if suite_dir is None:
        suite_dir = make_suite_dir(config, games)
    else:
        write_suite_file(suite_dir, config, games)
    print(f"suite: {suite_dir}, {len(games)} games", flush=True)
    failures = run_suite(suite_dir, config, games)
    print("\n" + write_results(suite_dir, failures), flush=True)
    if config.log.graphs:
        draw(suite_dir, games)
    if failures:
        reasons = "; ".join(f"{game}: {reason}" for game, reason in failures.items())
        raise SessionsFailed(
            f"{len(failures)} of {len(games)} games failed ({reasons}); --resume {suite_dir} runs what is missing"
        )


def draw(suite_dir: Path, games: Sequence[str]) -> None:
    """All learning curves in one picture, a panel a game, as far as there are any."""
    from jaxrl_atari.plots import plot_comparison

    runs = [suite_dir / game for game in games if (suite_dir / game / "trial.json").is_file()]
    if runs:
        print(*plot_comparison(runs, suite_dir / "graphs"), sep="\n", flush=True)


if __name__ == "__main__":
    cli.run(main)
