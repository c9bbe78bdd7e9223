"""Drawing helpers shared by all graphs: colours, axes, and figures saved as PNG and SVG.

matplotlib is imported when something is drawn, and not pyplot: files are drawn with Agg, whatever the user's backend.
"""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_atari.runs.files import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito 2008, "Color Universal Design", without yellow (too pale for a line) and black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
GREY = "#555555"


@contextlib.contextmanager
def default_style() -> Iterator[None]:
    """matplotlib's own style within a block or a decorated function, whatever the user has configured.

    Names that a user has chosen are shown as they are (`$` starts no formula), and the same graph is the same file.
    """
    backend = os.environ.pop("MPLBACKEND", None)
    import matplotlib.style

    if backend is not None:  # a notebook exports its own to `!python`, where matplotlib refuses it if it is missing
        os.environ["MPLBACKEND"] = backend
    style = {"svg.hashsalt": "jaxrl_atari", "text.parse_math": False}
    with matplotlib.style.context(style, after_reset=True):
        yield


def new_figure(title: str, width: float, height: float) -> "Figure":
    """A figure with a title; its size is in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize="large", fontweight="bold")
    return figure


def save_figure(figure: "Figure", directory: Path, name: str) -> list[Path]:
    """Writes NAME.png and NAME.svg, each atomically, and returns their paths."""
    paths = [directory / f"{name}.png", directory / f"{name}.svg"]
    directory.mkdir(parents=True, exist_ok=True)
    for path, metadata in zip(paths, (None, {"Date": None}), strict=True):
        figure.savefig(image := io.BytesIO(), format=path.suffix[1:], dpi=150, metadata=metadata)
        figure.set_layout_engine("none")  # the SVG keeps the layout of the PNG: computing it is slow
        write_file(path, image.getvalue())
    return paths


def finish_axes(axes: "Axes", x_label: str = "env steps", y_label: str = "") -> None:
    """Finishes axes that hold their data: x to the last point (400k, 2M), plain numbers along y, a light grid."""
    from matplotlib.ticker import EngFormatter, StrMethodFormatter

    axes.margins(x=0)
    axes.set_xlim(left=min(0, axes.get_xlim()[0]))
    if axes.get_xlim()[1] >= 1000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(color="#E0E0E0", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
