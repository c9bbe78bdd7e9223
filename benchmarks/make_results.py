"""Results of published length: scores.csv, curves/, and what the documentation shows of them.

    python benchmarks/make_results.py [RUN_DIR... --hardware "AMD EPYC, 2 cores"]

writes a row of scores.csv for each session of the runs, finished or not, and its metrics.csv, thinned to 200 rows,
into curves/. Then, also without a run, it makes from scores.csv the results tables of README.md and docs/reproduce.md
and the picture docs/images/results.png. The row of a session that is known already (same game, protocol, seed,
arithmetic, weight decay and commit) is replaced.
"""

import argparse
import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_atari import cli
from jaxrl_atari.config import PPOConfig
from jaxrl_atari.envs.games import Game, comparable
from jaxrl_atari.envs.protocols import REFERENCE_PROTOCOL
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.drawing import COLOURS, GREY, env_step_axes, new_figure
from jaxrl_atari.report.metrics import session_figures
from jaxrl_atari.report.statistics import score_interval
from jaxrl_atari.report.summary import score_text
from jaxrl_atari.runs.config_file import read_config
from jaxrl_atari.runs.description import latest_text
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.reading import read_sessions

ROOT = Path(__file__).resolve().parents[1]
COLUMNS: tuple[str, ...] = (
    "game", "seed", "env_steps", "return_ma", "return_mean", "reference_tutorial", "reference_table", "hours", "sps",
    "compute_dtype", "hardware", "commit", "protocol", "weight_decay",
)  # fmt: skip
CURVE_ROWS = 200
BUDGET = 10_000_000
ENOUGH = 0.999
"""Share of the budget from which a session counts as finished: the last rollout may end slightly before it."""
START, END = "<!-- results: made by benchmarks/make_results.py -->", "<!-- end of results -->"

Row = dict[str, str]


def key(row: Row) -> tuple[str, ...]:
    """What identifies a session."""
    return tuple(row[name] for name in ("game", "protocol", "seed", "compute_dtype", "weight_decay", "commit"))


def curve_file(folder: Path, row: Row) -> Path:
    """The learning curve of a session."""
    return folder / "curves" / f"{'_'.join(key(row))}.csv"


def read_rows(folder: Path) -> list[Row]:
    """The rows of scores.csv."""
    path = folder / "scores.csv"
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.is_file() else []


def add_run(folder: Path, run_dir: Path, hardware: str) -> None:
    """Adds the sessions of a run to scores.csv and curves/, or replaces what is there of them.

    Raises:
        UserError: not a run directory, another budget, no finished game yet, or metrics that cannot be read.
    """
    config = read_config(run_dir)
    if config.total_env_steps != BUDGET:
        raise UserError(
            f"{run_dir}: total_env_steps = {config.total_env_steps:,}; expected {BUDGET:,}, as for the references"
        )
    protocol = config.env.resolved_protocol
    game = comparable(config.env.game_name, protocol)
    described = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    revision = described.get("git_revision") or "unknown"  # of the start; + is a checkout with changes
    rows = {key(row): row for row in read_rows(folder)}
    (folder / "curves").mkdir(exist_ok=True)
    for session_dir, table in read_sessions(run_dir).items():
        figures = session_figures(table, game)
        if figures["final_return_ma"] is None:
            raise UserError(f"{session_dir}: no game has ended yet; wait for the first one")
        dtype = latest_text(session_dir, "compute_dtype") or config.network.compute_dtype
        if dtype == "auto":  # a run from before checkpoints named it, when `auto` was float32 on every CPU
            dtype = "float32" if figures["gpu_busy_percent"] is None else "bfloat16"
        row = {
            "game": game.name,
            "seed": str(config.seed + int(session_dir.name.removeprefix("session_"))),
            "env_steps": f"{table['env_steps'][-1]:.0f}",
            "return_ma": f"{figures['final_return_ma']:.6g}",
            "return_mean": f"{table['return_mean'][np.isfinite(table['return_mean'])][-1]:.6g}",
            "reference_tutorial": "" if game.tutorial_score is None else f"{game.tutorial_score:g}",
            "reference_table": "" if game.reference_score is None else f"{game.reference_score:.10g}",
            "hours": f"{table['wall_seconds'][-1] / 3600:.2f}",
            "sps": "" if figures["sps"] is None else f"{figures['sps']:.0f}",
            "compute_dtype": dtype,
            "hardware": hardware,
            "commit": revision[:7] + "+" * revision.endswith("+"),
            "protocol": protocol,
            "weight_decay": f"{described['config']['ppo'].get('weight_decay', 0):g}",  # 0 before it was an option
        }
        rows[key(row)] = row
        write_file(curve_file(folder, row), thinned((session_dir / "metrics.csv").read_text(encoding="utf-8")))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[found] for found in sorted(rows))
    write_file(folder / "scores.csv", text.getvalue())


def thinned(metrics: str, count: int = CURVE_ROWS) -> str:
    """A metrics.csv with at most `count` of its rows, evenly spaced, the first and the last included."""
    header, *rows = [line for line in metrics.splitlines(keepends=True) if line.endswith("\n")]
    kept = np.unique(np.linspace(0, len(rows) - 1, count).round().astype(int)) if rows else []
    return header + "".join(rows[i] for i in kept)


def _number(text: str) -> str:
    return score_text(float(text)) if text else "-"


def _steps(env_steps: float) -> str:
    return f"{env_steps / 1e6:.3g}M"


def session_table(rows: Sequence[Row]) -> str:
    """Markdown: a row for each session."""
    lines = [
        "| game | seed | env steps | last 100 games | `return_ma` | tutorial | SLM Lab's table | hours | SPS | "
        "arithmetic | weight decay | hardware | commit |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|---:|---|---|",
    ]
    for row in rows:
        env_steps = float(row["env_steps"])
        state = "" if env_steps >= ENOUGH * BUDGET else f" of {_steps(BUDGET)}"
        cells = [
            row["game"], row["seed"], _steps(env_steps) + state, _number(row["return_mean"]), _number(row["return_ma"]),
            _number(row["reference_tutorial"]), _number(row["reference_table"]), f"{float(row['hours']):.1f}",
            row["sps"] or "-", row["compute_dtype"], row["weight_decay"], row["hardware"], f"`{row['commit']}`",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def game_table(rows: Sequence[Row]) -> str:
    """Markdown: a row for each game, protocol and weight decay, over its finished sessions or else the furthest one."""
    lines = [
        "| game | protocol | sessions | env steps | `return_ma` | 95% interval | tutorial | SLM Lab's table | random |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["game"], row["protocol"], row["weight_decay"]), []).append(row)
    for (game, protocol, weight_decay), sessions in groups.items():
        finished = [row for row in sessions if float(row["env_steps"]) >= ENOUGH * BUDGET]
        shown = finished or [max(sessions, key=lambda row: float(row["env_steps"]))]
        scores = [float(row["return_ma"]) for row in shown]
        interval = score_interval(scores)
        random = comparable(game, protocol).random_mean
        usual = float(weight_decay) == PPOConfig().weight_decay
        cells = [
            game, protocol if usual else f"{protocol}, weight decay {weight_decay}", str(len(shown)),
            _steps(float(shown[0]["env_steps"])) + ("" if finished else f" of {_steps(BUDGET)}, not finished"),
            score_text(float(np.mean(scores))),
            "-" if interval is None else f"{score_text(interval[0])} to {score_text(interval[1])}",
            _number(shown[0]["reference_tutorial"]), _number(shown[0]["reference_table"]),
            score_text(random),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def replace_table(page: Path, table: str) -> None:
    """Replaces what stands between the two marks of a page.

    Raises:
        UserError: the page lacks the marks.
    """
    text = page.read_text(encoding="utf-8")
    found, count = re.subn(
        f"{re.escape(START)}.*?{re.escape(END)}", lambda _: f"{START}\n\n{table}\n\n{END}", text, flags=re.S
    )
    if count != 1:
        raise UserError(f"{page}: expected the line {START} and, after it, {END}, once each; add them")
    write_file(page, found)


def read_curve(path: Path) -> dict[str, np.ndarray]:
    """A file of curves/: column -> float64 `[N]`."""
    header, *rows = csv.reader(path.read_text(encoding="utf-8").splitlines())
    values = np.array([[float(cell or "nan") for cell in row] for row in rows])
    return dict(zip(header, values.T, strict=True))


def draw(folder: Path, rows: Sequence[Row], path: Path) -> None:
    """Draws the learning curves of all games, a panel each, with the reference lines."""
    games = list(dict.fromkeys(row["game"] for row in rows))
    columns = min(len(games), 2)
    figure = new_figure(
        "return_ma (thin: mean return of the last 100 games)", 6 * columns, 4 * -(-len(games) // columns)
    )
    for index, game in enumerate(games):
        axes = figure.add_subplot(-(-len(games) // columns), columns, index + 1)
        for number, row in enumerate(row for row in rows if row["game"] == game):
            colour = COLOURS[number % len(COLOURS)]
            label = f"seed {row['seed']}, {row['protocol']}, {row['compute_dtype']}, weight decay {row['weight_decay']}"
            curve = curve_file(folder, row)
            if curve.is_file():
                values = read_curve(curve)
                axes.plot(values["env_steps"], values["return_mean"], color=colour, alpha=0.4, linewidth=0.8)
                axes.plot(values["env_steps"], values["return_ma"], color=colour, linewidth=2)
            else:
                label += " (the end: no curve was kept)"
            end = float(row["env_steps"]), float(row["return_ma"])
            axes.plot(*end, "o", color=colour, clip_on=False, zorder=3, label=label)
        env_step_axes(axes, BUDGET, "" if index % columns else "raw return of a full game")
        protocols = {row["protocol"] for row in rows if row["game"] == game}
        _draw_references(axes, comparable(game, REFERENCE_PROTOCOL if REFERENCE_PROTOCOL in protocols else ""))
        axes.set_title(game)
        axes.set_xlabel("env steps")
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.14), frameon=False, fontsize="small", borderaxespad=0)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    write_file(path, image.getvalue())


def _draw_references(axes: Any, game: Game) -> None:
    lines = {
        "SLM Lab's table": (game.reference_score, (0, (6, 3))),
        "tutorial": (game.tutorial_score, (0, (2, 2))),
        "random": (game.random_mean, (0, (1, 2))),
    }
    known = [(score, name, dashes) for name, (score, dashes) in lines.items() if score is not None]
    scores = [score for score, *_ in known]
    low, high = min([0.0, *scores]), max([axes.get_ylim()[1], *scores])
    axes.set_ylim(low, high + 0.05 * (high - low))
    references = sorted(score for score, name, _ in known if name != "random")
    for score, name, dashes in known:
        axes.axhline(score, color=GREY, linestyle=dashes, linewidth=1.1)
        # The two references are close together: their labels stand above and below.
        align = "center" if name == "random" or len(references) < 2 else "bottom" if score == references[-1] else "top"
        axes.annotate(
            f"{name} {score_text(score)}", (1.0, score), xycoords=axes.get_yaxis_transform(), xytext=(5, 0),
            textcoords="offset points", va=align, color=GREY, fontsize="small",
        )  # fmt: skip


def make(root: Path = ROOT) -> None:
    """Makes the tables and the picture from scores.csv."""
    rows = read_rows(root / "benchmarks")
    replace_table(root / "README.md", game_table(rows))
    replace_table(root / "docs" / "reproduce.md", session_table(rows))
    draw(root / "benchmarks", rows, root / "docs" / "images" / "results.png")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", nargs="*", type=Path, metavar="RUN_DIR", help="directory of a run to add")
    parser.add_argument("--hardware", help="what the runs were trained on, for example 'AMD EPYC, 2 cores'")
    options = parser.parse_args(arguments)
    if options.run_dirs and not options.hardware:
        raise UserError("--hardware: missing; name what the runs were trained on, for example 'AMD EPYC, 2 cores'")
    for run_dir in options.run_dirs:
        add_run(ROOT / "benchmarks", run_dir, options.hardware)
    make()


if __name__ == "__main__":
    cli.run(main)
