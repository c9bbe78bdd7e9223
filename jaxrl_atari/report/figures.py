"""The form that all graphs share: colours, style, axes and files.

matplotlib is imported only when something is drawn, without pyplot. It draws with Agg, whatever back end the user
has configured.
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

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe & Ito 2008, "Color Universal Design", without black, and without yellow, which is too pale for lines."""
GREY = "#555555"


@contextlib.contextmanager
def default_style() -> Iterator[None]:
    """Draws a block or a decorated function in the style of figures.mplstyle, whatever the user has configured."""
    # A notebook exports its back end to `!python`, where matplotlib may not find it and then fails.
    backend = os.environ.pop("MPLBACKEND", None)
    import matplotlib.style

    if backend is not None:
        os.environ["MPLBACKEND"] = backend
    with matplotlib.style.context(Path(__file__).with_suffix(".mplstyle"), after_reset=True):
        yield


def new_figure(title: str, width: float, height: float) -> "Figure":
    """A figure with a title. Width and height are in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    figure.suptitle(title)
    return figure


def save_figure(figure: "Figure", directory: Path, name: str) -> list[Path]:
    """Writes NAME.png and NAME.svg, each atomically, and returns their paths."""
    paths = [directory / f"{name}.png", directory / f"{name}.svg"]
    directory.mkdir(parents=True, exist_ok=True)
    for path in paths:
        image = io.BytesIO()
        figure.savefig(image, format=path.suffix[1:], metadata={"Date": None} if path.suffix == ".svg" else None)
        figure.set_layout_engine("none")  # the SVG keeps the layout of the PNG, which is slow to compute
        write_file(path, image.getvalue())
    return paths


def finish_axes(axes: "Axes", x_label: str = "env steps", y_label: str = "", x_end: float | None = None) -> None:
    """Sets limits, labels and number formats (400k, 2M; 10,000) of axes that hold their data.

    x starts at 0, or at the first point if that is negative.

    Args:
        x_end: end of x; None: the last point that is drawn.
    """
    from matplotlib.ticker import EngFormatter, StrMethodFormatter

    axes.margins(x=0)
    first = axes.get_xlim()[0] if axes.has_data() else 0
    axes.set_xlim(left=min(0, first), right=x_end)
    if axes.get_xlim()[1] >= 1000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    low, high = axes.dataLim.intervaly
    if low == high:  # matplotlib would invent a scale around the single value
        axes.set_yticks([low])
    axes.set(xlabel=x_label, ylabel=y_label)
