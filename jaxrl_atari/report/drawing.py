"""Drawing helpers shared by all graphs: colours, axes, and figures saved as PNG and SVG.

The helpers use no pyplot and do not change matplotlib's global state.
"""

import io
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from jaxrl_atari.errors import UserError
from jaxrl_atari.runs.files import write_file

# Okabe & Ito 2008, "Color Universal Design", without yellow (too pale for a line) and black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
LINE_STYLES = ("-", "--", "-.", ":")  # for more lines than colours
GREY = "#555555"


def new_figure(title: str, width: float, height: float) -> Figure:
    """A figure with a title; its size is in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(plain_text(title), fontsize="large", fontweight="bold")
    return figure


def plain_text(name: str) -> str:
    """A name that a user has chosen, as matplotlib shows it: `$` begins no formula, `_` hides no line of a legend."""
    return f"{' ' * name.startswith('_')}{name}".replace("$", r"\$")


def save_figure(figure: Figure, directory: Path, name: str) -> list[Path]:
    """Writes NAME.png and NAME.svg, each atomically, and returns their paths.

    Raises:
        UserError: the directory cannot be written to.
    """
    paths = [directory / f"{name}.png", directory / f"{name}.svg"]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, metadata in zip(paths, (None, {"Date": None}), strict=True):
            image = io.BytesIO()
            figure.savefig(image, format=path.suffix[1:], dpi=150, metadata=metadata)
            figure.set_layout_engine("none")  # the SVG keeps the layout of the PNG: computing it is slow
            write_file(path, image.getvalue())
    except OSError as error:
        raise UserError(
            f"{directory}: cannot write graphs there ({error.strerror}); choose a folder that can be written to"
        ) from error
    return paths


def plain_numbers() -> FuncFormatter:
    """A tick formatter: 0.5, 20, 15,000."""
    return FuncFormatter(lambda value, _position: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}")


def open_axes(axes: Axes) -> None:
    """A light grid behind the data, and no box: only the left and the lower spine."""
    axes.grid(color="#E0E0E0", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def env_step_axes(axes: Axes, last_env_step: float, ylabel: str = "") -> None:
    """`open_axes` with env steps from 0 along x (400k, 2M) and plain numbers along y."""
    axes.set_xlim(0, max(last_env_step, 1))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(plain_numbers())
    axes.set_ylabel(ylabel)
    open_axes(axes)
