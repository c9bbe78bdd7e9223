"""Drawing helpers shared by all graphs: colours, axes, and figures saved as PNG and SVG.

matplotlib is imported when something is drawn, and not pyplot: files are drawn with Agg, whatever the user's backend.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_atari.runs.files import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito 2008, "Color Universal Design", without yellow (too pale for a line) and black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
LINE_STYLES = ("-", "--", "-.", ":")  # for more lines than colours
GREY = "#555555"


@contextlib.contextmanager
def default_style() -> Iterator[None]:
    """matplotlib's own defaults within a block or a decorated function, whatever the user has configured."""
    backend = None if "matplotlib" in sys.modules else os.environ.pop("MPLBACKEND", None)
    import matplotlib

    if backend is not None:  # a notebook exports its own to `!python`: where that is missing, matplotlib does not start
        os.environ["MPLBACKEND"] = backend
        with contextlib.suppress(ValueError):
            matplotlib.rcParams["backend"] = backend
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["svg.hashsalt"] = "jaxrl_atari"  # the same graph is the same file
        yield


def new_figure(title: str, width: float, height: float) -> "Figure":
    """A figure with a title; its size is in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(plain_text(title), fontsize="large", fontweight="bold")
    return figure


def plain_text(name: str) -> str:
    """A name that a user has chosen, as matplotlib shows it: `$` begins no formula, `_` hides no line of a legend."""
    return f"{' ' * name.startswith('_')}{name}".replace("$", r"\$")


def save_figure(figure: "Figure", directory: Path, name: str) -> list[Path]:
    """Writes NAME.png and NAME.svg, each atomically, and returns their paths."""
    paths = [directory / f"{name}.png", directory / f"{name}.svg"]
    directory.mkdir(parents=True, exist_ok=True)
    for path, metadata in zip(paths, (None, {"Date": None}), strict=True):
        figure.savefig(image := io.BytesIO(), format=path.suffix[1:], dpi=150, metadata=metadata)
        figure.set_layout_engine("none")  # the SVG keeps the layout of the PNG: computing it is slow
        write_file(path, image.getvalue())
    return paths


def open_axes(axes: "Axes") -> None:
    """A light grid behind the data, and no box: only the left and the lower spine."""
    axes.grid(color="#E0E0E0", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def x_axis(axes: "Axes", last: float, x_label: str = "env steps", y_label: str = "") -> None:
    """`open_axes` with x from 0 to the last point (400k, 2M), and plain numbers along y (0.5, 20, 15,000)."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    axes.set_xlim(0, last or 1)
    if last >= 1000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    plain = FuncFormatter(lambda value, _position: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    open_axes(axes)
