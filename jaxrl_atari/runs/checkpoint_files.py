"""Writing the files of a checkpoint, with orbax."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxrl_atari.runs.arrays import this_process


class _WithoutLateReports:
    """A `sys.unraisablehook` that drops what TensorStore's threads report after a save has failed.

    If one file cannot be written, because the disk is full for example, orbax closes its event loop while other
    files are still being written. For each of them Python would then print a traceback, "Event loop is closed",
    and the one line that says what is wrong would be lost among them.

    Args:
        report: the hook that gets all other reports.
    """

    def __init__(self, report: Callable[[Any], object]):
        self.report = report

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self.report(unraisable)


@contextlib.contextmanager
def without_late_reports() -> Iterator[None]:
    """Installs `_WithoutLateReports` for the block, which saves a checkpoint.

    If the block fails, the hook stays until a later save succeeds: the reports may come later than the error.
    """
    if not isinstance(sys.unraisablehook, _WithoutLateReports):
        sys.unraisablehook = _WithoutLateReports(sys.unraisablehook)
    yield
    if isinstance(sys.unraisablehook, _WithoutLateReports):
        sys.unraisablehook = sys.unraisablehook.report


def write_checkpoint(path: Path, items: dict[str, Any], meta: dict[str, Any], chunk_bytes: int | None) -> None:
    """Writes a checkpoint with orbax.

    Args:
        path: its directory, which does not exist.
        items: name -> pytree of NumPy arrays.
        meta, chunk_bytes: see `Checkpoints.save`.
    """
    chunked = ocp.SaveArgs(chunk_byte_size=chunk_bytes)
    arguments = {
        name: ocp.args.StandardSave(tree, save_args=jax.tree.map(lambda _: chunked, tree))
        for name, tree in items.items()
    }
    # A folder for each array: with one database for all (OCDBT), TensorStore 0.1.86 leaks memory at each save.
    alone = this_process()
    handlers: dict[str, Any] = {
        name: ocp.StandardCheckpointHandler(use_ocdbt=False, multiprocessing_options=alone) for name in items
    }
    handlers["meta"] = ocp.JsonCheckpointHandler(multiprocessing_options=alone)
    # If a folder could not be made in the background, orbax's threads would wait for it for 5 minutes.
    at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    options = ocp.CompositeOptions(multiprocessing_options=alone, async_options=at_once)
    handler = ocp.CompositeCheckpointHandler(composite_options=options, **handlers)
    ocp.Checkpointer(handler, multiprocessing_options=alone).save(
        path.absolute(), args=ocp.args.Composite(**arguments, meta=ocp.args.JsonSave(meta))
    )
