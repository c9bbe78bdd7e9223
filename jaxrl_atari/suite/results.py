"""Results of a suite: results.md, results.csv and results.json, and its scores as rliable's dictionary."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from jaxrl_atari.cli import counted, say
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.report.page import try_report
from jaxrl_atari.report.statistics import INTERVALS
from jaxrl_atari.report.suites import (
    COLUMNS,
    aggregate_rows,
    aggregates,
    game_rows,
    normalised,
    read_suite,
    text_rows,
    write_rliable,
)
from jaxrl_atari.report.summary import markdown_table, trial_summary
from jaxrl_atari.runs.files import write_file, write_json

EXPLANATION = (
    "ours: `return_ma` at the end, mean and standard deviation over sessions, and the 95% interval of the mean (from 3 "
    "sessions on). reference: PPO after 10,000,000 env steps of the same protocol. ratio: (ours - random) / (reference "
    "- random), which is meaningful for negative scores too. human-normalised: (ours - random) / (human - random), "
    "with the random and human scores of DQN Zoo. hours: training time, mean over sessions. env steps: mean over the "
    "sessions so far. A game in which a session has no score is left out of the statistics over games."
)


def write_results(suite_dir: Path, failures: Mapping[str, str], final: bool = False) -> None:
    """Writes results.md, results.csv, results.json and the scores in rliable's form, and trial.json of each game.

    Args:
        failures: game -> why it failed.
        final: print the tables, and draw the graphs and the report if the config asks for them.
    """
    suite = read_suite(suite_dir)
    name, config, protocol = suite_dir.absolute().name, suite.config, suite.config.env.resolved_protocol
    rows = game_rows(suite, failures)
    for game, run in suite.runs.items():
        write_json(suite_dir / game / "trial.json", trial_summary(run))
    raw = suite.scores()
    scores = normalised(raw, protocol)
    found = aggregates(scores)

    writer = csv.DictWriter(file := io.StringIO(), COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(suite_dir / "results.csv", file.getvalue())
    results = {
        "protocol": protocol,
        "games": rows,
        "failures": dict(failures),
        "scores": raw,
        "aggregates": found,
        "rliable_games": write_rliable(suite_dir, {name: scores}),
    }
    write_json(suite_dir / "results.json", results)

    count = f"{counted(len(rows), 'game')}, {counted(config.sessions, 'session')}"
    parts = [
        f"# {name}: {count} of {config.total_env_steps:,} env steps each",
        markdown_table(text_rows(rows)),
        f"Protocol {protocol}. {EXPLANATION}",
    ]
    if found:
        parts += [markdown_table(aggregate_rows(found, "over the complete games")), INTERVALS]
    else:
        parts.append(f"No aggregates: {comparison_note(protocol) or 'no complete game has a score to compare with'}.")
    text = "\n\n".join(parts) + "\n"
    write_file(suite_dir / "results.md", text)
    if final:
        say(f"\n{text}")
    if final and config.log.graphs:
        try_report(suite_dir)
