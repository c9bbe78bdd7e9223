"""Writing the files of a checkpoint, with orbax."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxrl_atari.runs.arrays import this_process


class _WithoutLateReports:
    """A `sys.unraisablehook` that drops what the threads of orbax report after a save or a restore has failed.

    If one file cannot be written or read, because the disk is full for example, orbax closes its event loop while
    it still works on other files. For each of them Python would then print a traceback, "Event loop is closed",
    and the one line that says what is wrong would be lost among them.

    Args:
        report: the hook that gets all other reports.
    """

    def __init__(self, report: Callable[[Any], object]):
        self.report = report

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self.report(unraisable)


def _is_no_late_report(record: logging.LogRecord) -> bool:
    """A filter for the log of asyncio, which reports the files that failed at the same time as the first.

    Such a report is "Task exception was never retrieved", with a traceback that names a file of a checkpoint.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not ("never retrieved" in record.getMessage() and ".orbax-checkpoint-tmp" in str(error))


@contextlib.contextmanager
def without_late_reports() -> Iterator[None]:
    """Keeps late reports by orbax's threads and its event loop from standard error, if a save or a restore fails.

    If the block fails, this stays so until `show_late_reports` is called: the reports may come later than the
    error, while another checkpoint is restored.
    """
    is_installed = isinstance(sys.unraisablehook, _WithoutLateReports)
    if not is_installed:
        sys.unraisablehook = _WithoutLateReports(sys.unraisablehook)
    logging.getLogger("asyncio").addFilter(_is_no_late_report)  # once, however often it is added
    yield
    if not is_installed:
        show_late_reports()


def show_late_reports() -> None:
    """Ends what a failed block of `without_late_reports` has left."""
    logging.getLogger("asyncio").removeFilter(_is_no_late_report)
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
