"""MkDocs hook: replaces a mark in a page with the table of all options, made from jaxrl_atari/config.py."""

import ast
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxrl_atari import config
from jaxrl_atari.config import flat

MARK = "<!-- table of all options -->"


def on_page_markdown(markdown: str, **page: Any) -> str:
    """Puts the table where the mark is."""
    return markdown.replace(MARK, option_table()) if MARK in markdown else markdown


def option_table() -> str:
    """Markdown: option, default and meaning of each field of `Config`."""
    default = config.Config()
    meanings = {"": _meanings(config.Config)}
    meanings |= {
        name: _meanings(type(group)) for name, group in vars(default).items() if hasattr(group, "__dict__")
    }
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, value in flat(default.to_dict()).items():
        group, _, field = name.rpartition(".")
        shown = f"{value:,}" if type(value) is int else value
        meaning = " ".join(meanings[group][field].split()).replace("|", r"\|")
        rows.append(f"| `--{name.replace('_', '-')}` | `{shown}` | {meaning} |")
    return "\n".join(rows)


def _meanings(kind: type) -> dict[str, str]:
    """The docstring of each field of a dataclass, which stands below it."""
    tree = ast.parse(Path(str(config.__file__)).read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    return {
        node.target.id: below.value.value
        for node, below in pairwise(found.body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }  # fmt: skip
