"""Results of a search: a table of its trials, graphs, and the best trial's config as a file for `train`.

    python -m jaxrl_atari.search.results SEARCH_DIR

writes them again, also while the search runs.
"""

import argparse
import csv
import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_atari import cli
from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.search_records import Record, best_first, ranked, read_records, trial_dir, value_text
from jaxrl_atari.report.summary import score_text
from jaxrl_atari.runs.files import write_file, write_json
from jaxrl_atari.search.files import read_search
from jaxrl_atari.search.plots import plot_search
from jaxrl_atari.search.space import SearchConfig, set_fields


def write_results(search_dir: Path) -> str:
    """Writes trials.csv, trials.md, importances.json, graphs/ and, once a trial has a score, NAME_best.py.

    Returns:
        The content of trials.md: a table, and a line with the importance of each field.

    Raises:
        UserError: the directory is not a search directory, a record is damaged, or it cannot be written to.
    """
    config, search = read_search(search_dir)
    records = list(read_records(search_dir).values())
    order, names = best_first(records), list(search.space)
    for record in records:
        if set(record.fields) != set(names):
            path = trial_dir(search_dir, record.number) / "record.json"
            raise UserError(
                f"{path}: its fields are not those of the search ({', '.join(names)}); restore it from a copy"
            )
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["trial", *names, "score", "env_steps", "status", "reason"])
    for r in order:
        writer.writerow([r.number, *(r.fields[name] for name in names), r.score, r.env_steps, r.status, r.reason])
    write_file(search_dir / "trials.csv", file.getvalue())
    try:
        from jaxrl_atari.search.study import importances
    except ImportError:  # Optuna is not installed, as on a machine that only shows the results
        shares = {}
    else:
        shares = importances(search, records)
    write_json(search_dir / "importances.json", shares)
    text = markdown(order, names)
    if shares:
        shown = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
        text += f"\nimportance for the score: {shown}\n"
    write_file(search_dir / "trials.md", text)
    if records:
        plot_search(search_dir, search, records, shares)
    if ranked(records):
        write_file(search_dir / f"{config.name}_best.py", config_file(config, search, order[0], len(records)))
    return text


def markdown(records: Sequence[Record], names: Sequence[str]) -> str:
    """The trials as an aligned Markdown table, in the given order."""
    rows = [["trial", *names, "score", "env steps", "status", "why it ended"]]
    for record in records:
        fields = [value_text(record.fields[name]) for name in names]
        score = score_text(record.score)
        reason = record.reason.replace("|", "/")
        rows.append([str(record.number), *fields, score, f"{record.env_steps:,}", record.status, reason])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = ["<", *">" * (len(names) + 2), "<", "<"]
    layout = "| " + " | ".join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths, strict=True)) + " |\n"
    rules = ["-" * (w + 1) + (":" if sign == ">" else "-") for sign, w in zip(signs, widths, strict=True)]
    header, *lines = [layout.format(*row) for row in rows]
    return "".join([header, "|" + "|".join(rules) + "|\n", *lines])


def config_file(config: Config, search: SearchConfig, best: Record, trials: int) -> str:
    """Text of a config file with the fields of the best trial, for a run that confirms its score."""
    name = f"{config.name}_best"
    best_config = dataclasses.replace(set_fields(config, best.fields), name=name)
    used: set[str] = set()
    body = _source(best_config, used)
    fields = "".join(f"    {field} = {value_text(value)}\n" for field, value in best.fields.items())
    return (
        f'"""{best_config.env.game_name}: the best of {trials} trials of a search (trial {best.number}).\n\n'
        f"    python -m jaxrl_atari.train --config SEARCH_DIR/{name}.py --sessions 4\n\n{fields}\n"
        f"Score: {score_text(best.score or 0.0)} after {best.env_steps:,} env steps; confirm it with other seeds.\n"
        f'"""\n\nfrom jaxrl_atari.config import {", ".join(sorted(used))}\n\n\n'
        f"def get_config() -> Config:\n    return {body}\n"
    )


def _source(value: Any, used: set[str]) -> str:
    """Python source of a config, with the fields that differ from the defaults; adds the classes to `used`."""
    if isinstance(value, str):
        return json.dumps(value)  # in double quotes
    if not dataclasses.is_dataclass(value):
        return repr(value)
    name, default = type(value).__name__, type(value)()  # pyright: ignore[reportCallIssue]
    used.add(name)
    changed = [f.name for f in dataclasses.fields(value) if getattr(value, f.name) != getattr(default, f.name)]
    items = [f"{name}={_source(getattr(value, name), used)}" for name in changed]
    if name != "Config" and len(line := f"{name}({', '.join(items)})") <= 80:
        return line
    margin = "    " if name == "Config" else "        "
    return f"{name}(\n" + "".join(f"{margin}    {item},\n" for item in items) + f"{margin})"


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_atari.search.results",
        description="Writes the results of a search again: results.md, results.csv and the config of the best trial.",
    )
    parser.add_argument("search_dir", type=Path)
    print(write_results(parser.parse_args().search_dir))


if __name__ == "__main__":
    cli.run(main)
