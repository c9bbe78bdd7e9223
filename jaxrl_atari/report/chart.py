"""Charts as data for the templates: SVG paths in a square of 1000 x 1000, and tick labels in percent of it.

The page stretches the square to the place it has, and writes the labels as text beside it, so that a chart is as sharp
and its text as large on a phone as on a wide screen.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import ArrayLike

from jaxrl_atari.report.drawing import plain_numbers

SIZE = 1000
MAX_POINTS = 240
NUM_COLOURS = 6
"""Colours of the page, `--c0` to `--c5`."""


class Series(NamedTuple):
    """A line of a chart; NaN is a gap."""

    x: ArrayLike
    y: ArrayLike
    colour: int = 0
    look: str = "strong"  # "faint", "strong" or "dots"
    low: ArrayLike | None = None  # band
    high: ArrayLike | None = None


class Shape(NamedTuple):
    """An SVG path."""

    d: str
    colour: int
    look: str  # as `Series`, or "band"


class Chart(NamedTuple):
    """A chart, ready for the template."""

    title: str
    shapes: list[Shape]
    x_ticks: list[tuple[float, str]]  # percent from the left, label
    y_ticks: list[tuple[float, str]]  # percent from the top, label
    rules: list[tuple[float, str]]  # horizontal lines: percent from the top, label
    x_label: str


def thin(x: ArrayLike, y: ArrayLike, count: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most `count` points: means of neighbours. NaN is left out where a neighbour has a value."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(x) <= count:
        return x, y
    parts = np.array_split(np.arange(len(x)), count)
    means = [float(np.mean(known)) if (known := y[part][np.isfinite(y[part])]).size else np.nan for part in parts]
    return np.array([x[part].mean() for part in parts]), np.array(means)


def draw(
    title: str,
    series: Sequence[Series],
    x_label: str = "env steps",
    rules: Sequence[tuple[float, str]] = (),
    x_from: float | None = 0.0,
) -> Chart | None:
    """A chart of some series, or None where no point is known.

    Args:
        rules: heights of horizontal lines, with their labels. One that lies so far from the data that it would flatten
            them is left out.
        x_from: left end of the x axis; None: the smallest x.
    """
    lines = [(*thin(one.x, one.y, np.size(one.x) if one.look == "dots" else MAX_POINTS), one) for one in series]
    known = [(x[np.isfinite(y)], y[np.isfinite(y)]) for x, y, _ in lines]
    if not any(x.size for x, _ in known):
        return None
    xs = np.concatenate([np.asarray(one.x, np.float64) for one in series])
    bounds = [np.asarray(b, np.float64) for one in series for b in (one.low, one.high) if b is not None]
    ys = np.concatenate([*(y for _, y in known), *(b[np.isfinite(b)] for b in bounds)])
    left, right = float(xs.min()) if x_from is None else x_from, float(xs.max())
    low, high = float(ys.min()), float(ys.max())
    reach = 2 * (high - low)
    near = [(height, text) for height, text in rules if low - reach <= height <= high + reach]
    low, high = min([low, *(h for h, _ in near)]), max([high, *(h for h, _ in near)])
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    low, high = low - margin, high + margin
    right = right if right > left else left + 1.0

    def across(x: Any) -> np.ndarray:
        return (np.asarray(x, np.float64) - left) / (right - left) * SIZE

    def down(y: Any) -> np.ndarray:
        return (high - np.asarray(y, np.float64)) / (high - low) * SIZE

    shapes = []
    for x, y, one in lines:
        colour = one.colour % NUM_COLOURS
        if one.low is not None and one.high is not None:
            edge = [*zip(across(one.x), down(one.high), strict=True)]
            edge += [*zip(across(one.x), down(one.low), strict=True)][::-1]
            shapes.append(Shape(_path([edge]) + "Z", colour, "band"))
        points = [*zip(across(x), down(y), strict=True)]
        pieces = [points[run] for run in np.ma.clump_unmasked(np.ma.masked_invalid(y))]  # without the gaps
        if one.look != "dots":
            shapes.append(Shape(_path(pieces), colour, one.look))
        if one.look == "dots" or sum(map(len, pieces)) <= 3:
            shapes.append(Shape("".join(f"M{a:.0f} {b:.0f}h0" for piece in pieces for a, b in piece), colour, "dots"))
    shapes.sort(key=lambda shape: ("band", "faint", "strong", "dots").index(shape.look))
    plain = plain_numbers()
    along = EngFormatter(sep="") if right >= 1000 else plain
    return Chart(
        title=title,
        shapes=[shape for shape in shapes if shape.d],
        x_ticks=[(float(across(t)) / 10, along(t)) for t in _ticks(left, right)],
        y_ticks=[(float(down(t)) / 10, plain(t)) for t in _ticks(low, high)],
        rules=[(float(down(height)) / 10, text) for height, text in near],
        x_label=x_label,
    )


def _path(pieces: Sequence[Sequence[tuple[float, float]]]) -> str:
    return "".join("M" + "L".join(f"{a:.0f} {b:.0f}" for a, b in piece) for piece in pieces)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high."""
    values = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    slack = 1e-9 * (high - low)
    return [float(value) + 0.0 for value in values if low - slack <= value <= high + slack]


class Mark(NamedTuple):
    """A score on a common scale."""

    name: str
    text: str
    at: float  # percent
    interval: tuple[float, float] | None  # percent
    ours: bool


def scale(scores: Sequence[tuple[str, float, str]], interval: Sequence[float] | None) -> list[Mark]:
    """Scores (name, value, text) as marks on a common scale; the first one is ours and has the interval."""
    values = [value for _, value, _ in scores] + list(interval or ())
    low, high = min(values), max(values)
    span = (high - low) or 1.0

    def percent(value: float) -> float:
        return 2.0 + 96.0 * (value - low) / span

    return [
        Mark(
            name, text, percent(value),
            (percent(interval[0]), percent(interval[1])) if interval is not None and index == 0 else None,
            index == 0,
        )
        for index, (name, value, text) in enumerate(scores)
    ]  # fmt: skip
