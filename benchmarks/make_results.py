"""Results of published length: scores.csv, curves/, and what the documentation shows of them.

    python benchmarks/make_results.py [RUN_DIR... --hardware "AMD EPYC, 2 cores"]

writes a row of scores.csv for each session of the runs, finished or not, and its metrics.csv, thinned to 200 rows,
into curves/. Then, also without a run, it makes from scores.csv the results tables of README.md and
docs/reproduce.md and the picture docs/images/results.png. The row of a session that is known already (same game,
protocol, seed, arithmetic, weight decay and commit) is replaced.
"""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from jaxrl_atari import cli
from jaxrl_atari.envs.games import game_under
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.figures import COLOURS, default_style, new_figure
from jaxrl_atari.report.graphs import finish_returns
from jaxrl_atari.report.metrics import session_metrics
from jaxrl_atari.report.summary import read_run
from jaxrl_atari.report.tables import markdown_table, number_text
from jaxrl_atari.report.text import interval_text
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.layout import session_number
from jaxrl_atari.runs.reading import latest_meta

ROOT = Path(__file__).resolve().parents[1]
COLUMNS: tuple[str, ...] = (
    "game", "seed", "env_steps", "return_ma", "return_mean", "hours", "sps", "compute_dtype", "hardware", "commit",
    "protocol", "weight_decay",
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
    run = read_run(run_dir)
    if run.config.total_env_steps != BUDGET:
        budget = run.config.total_env_steps
        raise UserError(f"{run_dir}: total_env_steps = {budget:,}; expected {BUDGET:,}, as for the references")
    revision = run.description.get("git_revision") or "unknown"  # of the start
    commit = revision[:7]
    if revision.endswith("+"):  # a checkout with changes
        commit += "+"
    rows = {key(row): row for row in read_rows(folder)}
    (folder / "curves").mkdir(exist_ok=True)
    for session_dir, table in run.tables.items():
        figures = session_metrics(table, run.game)
        if figures["final_return_ma"] is None:
            raise UserError(f"{session_dir}: no game has ended yet; wait for the first one")
        row = {
            "game": run.game.name,
            "seed": str(run.config.seed + session_number(session_dir)),
            "env_steps": f"{figures['env_steps']:.0f}",
            "return_ma": f"{figures['final_return_ma']:.6g}",
            "return_mean": f"{table['return_mean'][np.isfinite(table['return_mean'])][-1]:.6g}",
            "hours": f"{figures['wall_hours']:.2f}",
            "sps": f"{figures['sps']:.0f}",
            "compute_dtype": latest_meta(session_dir).get("compute_dtype") or run.config.network.compute_dtype,
            "hardware": hardware,
            "commit": commit,
            "protocol": run.protocol,
            "weight_decay": f"{run.config.ppo.weight_decay:g}",
        }
        rows[key(row)] = row
        write_file(curve_file(folder, row), thinned((session_dir / "metrics.csv").read_text(encoding="utf-8")))
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[found] for found in sorted(rows))
    write_file(folder / "scores.csv", text.getvalue())


def thinned(metrics: str, count: int = CURVE_ROWS) -> str:
    """A metrics.csv with at most `count` of its rows, evenly spaced, the first and the last included."""
    header, *rows = [line for line in metrics.splitlines(keepends=True) if line.endswith("\n")]
    kept = np.unique(np.linspace(0, len(rows) - 1, count).round().astype(int))
    return header + "".join(rows[i] for i in kept)


def session_table(rows: Sequence[Row]) -> str:
    """Markdown: a row for each session, under the names of the columns of scores.csv."""

    def cells(row: Row) -> list[str]:
        scores = {name: number_text(float(row[name])) for name in ("return_ma", "return_mean")}
        return list((row | scores | {"env_steps": f"{int(row['env_steps']):,}"}).values())

    return markdown_table([[f"`{name}`" for name in COLUMNS], *map(cells, rows)])


def groups(rows: Sequence[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    """The rows that have equal values in some columns."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def game_table(rows: Sequence[Row]) -> str:
    """Markdown: a row for each game, protocol and weight decay, with a column for each source of a reference.

    It is over the finished sessions or, if there are none, over the one with the most env steps. A column without
    content is left out.
    """
    found: list[dict[str, str]] = []
    for (game, protocol, weight_decay), sessions in groups(rows, "game", "protocol", "weight_decay").items():
        finished = [row for row in sessions if float(row["env_steps"]) >= ENOUGH * BUDGET]
        shown = finished or [max(sessions, key=lambda row: float(row["env_steps"]))]
        scores = [float(row["return_ma"]) for row in shown]
        known = game_under(game, protocol)
        cells = {
            "game": game,
            "protocol": protocol,
            "weight decay": weight_decay,
            "sessions": str(len(shown)),
            "env steps": f"{float(shown[0]['env_steps']) / 1e6:.3g}M of {BUDGET / 1e6:.3g}M",
            "`return_ma`": number_text(float(np.mean(scores))),
            "interval": interval_text(scores),
            "random play": number_text(known.random.score) if known.random else "",
        }
        references = {each.source.partition(" (")[0]: number_text(each.score) for each in known.references}
        found.append(cells | references)
    header = dict.fromkeys(["game", *(name for cells in found for name, text in cells.items() if text)])
    return markdown_table([[*header], *([cells.get(name) or "-" for name in header] for cells in found)])


def replace_table(page: Path, table: str) -> None:
    """Replaces what stands between the two marks of a page.

    Raises:
        UserError: the page lacks the marks.
    """
    text = page.read_text(encoding="utf-8")
    between = f"{re.escape(START)}.*?{re.escape(END)}"
    found, count = re.subn(between, lambda _: f"{START}\n\n{table}\n\n{END}", text, flags=re.S)
    if count != 1:
        raise UserError(f"{page}: expected the line {START} and, after it, {END}, once each; add them")
    write_file(page, found)


@default_style()
def draw(folder: Path, rows: Sequence[Row], path: Path) -> None:
    """Draws the learning curves, a panel for each game and protocol, with the reference lines."""
    panels = groups(rows, "game", "protocol")
    columns = min(len(panels), 2)
    height = -(-len(panels) // columns)
    figure = new_figure("return_ma (thin: mean return of the last 100 games)", 6 * columns, 4.6 * height)
    for index, ((game, protocol), sessions) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(height, columns, index)
        for row, colour in zip(sessions, COLOURS, strict=False):
            label = f"seed {row['seed']}, {row['compute_dtype']}, weight decay {row['weight_decay']}"
            curve = curve_file(folder, row)
            if curve.is_file():
                values = np.genfromtxt(curve, delimiter=",", names=True)
                axes.plot(values["env_steps"], values["return_mean"], color=colour, alpha=0.4, linewidth=0.8)
                axes.plot(values["env_steps"], values["return_ma"], color=colour, linewidth=2)
            else:
                label += " (no curve was kept)"
            end = float(row["env_steps"]), float(row["return_ma"])
            axes.plot(*end, "o", color=colour, clip_on=False, zorder=3, label=label)
        finish_returns(axes, game_under(game, protocol))
        axes.set_xlim(0, BUDGET)
        axes.set_title(f"{game}, protocol {protocol}")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    write_file(path, image.getvalue())


def make(root: Path = ROOT) -> None:
    """Makes the tables and the picture from scores.csv."""
    rows = read_rows(root / "benchmarks")
    replace_table(root / "README.md", game_table(rows))
    replace_table(root / "docs" / "reproduce.md", session_table(rows))
    draw(root / "benchmarks", rows, root / "docs" / "images" / "results.png")


@dataclass(frozen=True)
class Options:
    """Adds runs to the record of results, and makes the tables and the picture of the documentation from it."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Directories of runs to add."""
    hardware: str = ""
    """What they were trained on, for example 'AMD EPYC, 2 cores'."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options = tyro.cli(Options, args=arguments)
    if options.run_dirs and not options.hardware:
        raise UserError("--hardware: missing; name what the runs were trained on, for example 'AMD EPYC, 2 cores'")
    for run_dir in options.run_dirs:
        add_run(ROOT / "benchmarks", run_dir, options.hardware)
    make()


if __name__ == "__main__":
    cli.run(main)
