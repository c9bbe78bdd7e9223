"""What a search leaves for people: a table of its trials, graphs, and the best trial's config as a file for `train`.

    python -m jaxrl_atari.search_results SEARCH_DIR

writes them anew, also while the search runs.
"""

import csv
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_atari import cli
from jaxrl_atari import config as config_module
from jaxrl_atari.config import Config
from jaxrl_atari.run_dir.results import score_text
from jaxrl_atari.search.space import SearchConfig, read_search, set_fields
from jaxrl_atari.search.worker import Record, ranked, read_records, short


def write_results(search_dir: Path) -> str:
    """Writes trials.csv, trials.md, graphs/ and, once a trial has a score, NAME_best.py; returns the Markdown table.

    Raises:
        UserError: it is no search directory, or it cannot be written to.
    """
    from jaxrl_atari.search.plots import plot_search

    config, search = read_search(search_dir)
    records = list(read_records(search_dir).values())
    order = [*ranked(records), *(record for record in records if record not in ranked(records))]
    names = list(search.space)
    with (search_dir / "trials.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["trial", *names, "score", "env_steps", "status", "reason"])
        for r in order:
            values = [r.fields[name] for name in names]
            writer.writerow([r.number, *values, "" if r.score is None else r.score, r.env_steps, r.status, r.reason])
    table = markdown(order, names)
    write_text(search_dir / "trials.md", table)
    if records:
        plot_search(search_dir, search, records)
    if best := ranked(records)[:1]:
        write_text(search_dir / f"{config.name}_best.py", config_file(config, search, best[0], len(records)))
    return table


def markdown(records: Sequence[Record], names: Sequence[str]) -> str:
    """The trials as a Markdown table, in the order given."""
    rows = [["trial", *names, "score", "env steps", "status", "why it ended"]]
    for record in records:
        fields = [short(record.fields[name]) for name in names]
        score = "-" if record.score is None else score_text(record.score)
        reason = record.reason.replace("|", "/")
        rows.append([str(record.number), *fields, score, f"{record.env_steps:,}", record.status, reason])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [False, *[True] * (len(names) + 2), False, False]
    layout = "| " + " | ".join(f"{{:{'>' if r else '<'}{w}}}" for w, r in zip(widths, right, strict=True)) + " |"
    lines = [layout.format(*row) for row in rows]
    rule = "|" + "|".join("-" * (w + 1) + ":" if r else "-" * (w + 2) for w, r in zip(widths, right, strict=True)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def config_file(config: Config, search: SearchConfig, best: Record, trials: int) -> str:
    """The text of a config file with the best trial's fields, for the confirming run."""
    name = f"{config.name}_best"
    chosen = dataclasses.replace(set_fields(config, best.fields), name=name)
    used: set[str] = set()
    body = _source(chosen, used)
    score = score_text(best.score or 0.0)
    drawn = "".join(f"    {field} = {short(value)}\n" for field, value in best.fields.items())
    return (
        f'"""{chosen.env.game_name}: the best of {trials} trials of a search (trial {best.number}).\n\n'
        f"    python -m jaxrl_atari.train --config configs/{name}.py --sessions 4\n\n"
        f"{drawn}\nScore: {score} after {best.env_steps:,} env steps; confirm it with other seeds.\n"
        f'"""\n\nfrom jaxrl_atari.config import {", ".join(sorted(used))}\n\n\n'
        f"def get_config() -> Config:\n    return {body}\n"
    )


def _source(value: Any, used: set[str]) -> str:
    """Python source of a config: the fields that differ from the defaults."""
    if isinstance(value, str):
        return json.dumps(value)  # in double quotes
    if not dataclasses.is_dataclass(value):
        return repr(value)
    cls = type(value)
    assert getattr(config_module, cls.__name__) is cls
    used.add(cls.__name__)
    default = cls()  # pyright: ignore[reportCallIssue]
    changed = [f.name for f in dataclasses.fields(value) if getattr(value, f.name) != getattr(default, f.name)]
    items = [f"{name}={_source(getattr(value, name), used)}" for name in changed]
    if cls is not Config and len(line := f"{cls.__name__}({', '.join(items)})") <= 80:
        return line
    margin = "    " if cls is Config else "        "
    return f"{cls.__name__}(\n" + "".join(f"{margin}    {item},\n" for item in items) + f"{margin})"


def write_text(path: Path, text: str) -> None:
    """Writes a file that is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def main() -> None:
    """The command."""
    parser = cli.Parser(prog="python -m jaxrl_atari.search_results", description=__doc__)
    parser.add_argument("search_dir", type=Path)
    print(write_results(parser.parse_args().search_dir))


if __name__ == "__main__":
    cli.run(main)
