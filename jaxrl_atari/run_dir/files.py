"""Files that are there whole or not at all, and names that are free."""

import itertools
import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes a file that is there whole or not at all. NaN is refused."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def unused(path: Path) -> Path:
    """The path, or where there is such a file already, the first of NAME_2, NAME_3, ... that is free."""
    numbered = (path.with_stem(f"{path.stem}_{number}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], numbered) if not candidate.exists())
