"""The journal of a search, SEARCH_DIR/journal.log: the file in which Optuna keeps the study, a JSON object a line.

Optuna is imported only where the study is opened.
"""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.runs.files import unused, write_file
from jaxrl_atari.runs.layout import JOURNAL_FILE, session_dirs, trial_dirs

if TYPE_CHECKING:
    import optuna
    from optuna.storages import JournalStorage

STUDY_NAME = "search"
"""The name of the study in the journal, which holds no other."""


def open_journal(search_dir: Path) -> "JournalStorage":
    """Opens the journal of a search. Several processes may use it at the same time."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return JournalStorage(JournalFileBackend(str(search_dir / JOURNAL_FILE)))


def read_study(search_dir: Path) -> "optuna.Study | None":
    """Reads the study of a search. None if the search has none yet, or if Optuna is not installed.

    Raises:
        UserError: as `check_journal`.
    """
    check_journal(search_dir)
    if not (search_dir / JOURNAL_FILE).is_file() or find_spec("optuna") is None:
        return None
    import optuna

    try:
        return optuna.load_study(study_name=STUDY_NAME, storage=open_journal(search_dir))
    except KeyError:  # the process died before it wrote the study
        return None


def check_journal(search_dir: Path) -> None:
    """Refuses a damaged journal. Optuna would raise an error of its own or start a new study.

    A last line without an end is accepted: it is being written, or a killed process has left it.

    Raises:
        UserError: a line is not understood.
    """
    _read_lines(search_dir / JOURNAL_FILE)


def repair_journal(search_dir: Path) -> str:
    """Prepares the journal of a search that is about to be resumed: a last line without an end is removed.

    Optuna would append to such a line, and could then read neither. The file as it was is kept beside it.

    Returns:
        What was done, for the user; empty if nothing was.

    Raises:
        UserError: a line is not understood, or there is none although trials have trained.
    """
    journal = search_dir / JOURNAL_FILE
    lines, unfinished = _read_lines(journal)
    trained = [path for path in trial_dirs(search_dir) if session_dirs(path)]
    if trained and not lines:
        raise UserError(
            f"{journal}: holds no trial, although {trained[0].name} has trained; restore it from a copy, or start"
            " a new search"
        )
    if not unfinished:
        return ""
    copy = unused(journal)
    shutil.copy2(journal, copy)
    write_file(journal, b"".join(line + b"\n" for line in lines))
    return f"{journal.name}: the last line does not end, and is left out; the file as it was is now {copy.name}"


def _read_lines(journal: Path) -> tuple[list[bytes], bytes]:
    """The lines of a journal, checked, and what follows the last one; nothing if the file does not exist."""
    content = journal.read_bytes() if journal.is_file() else b""
    *lines, unfinished = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            json.loads(line)
        except ValueError as error:
            raise UserError(
                f"{journal}: line {number} is not understood ({reason(error)}); restore it from a copy"
            ) from error
    return lines, unfinished
