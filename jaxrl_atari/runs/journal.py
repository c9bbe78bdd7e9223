"""The journal of a search, SEARCH_DIR/journal.log: the file in which Optuna keeps the study.

Optuna is imported only where the study is opened.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.runs.layout import JOURNAL_FILE

if TYPE_CHECKING:
    import optuna
    from optuna.storages import JournalStorage

STUDY_NAME = "search"
"""The name of the study in the journal, which holds no other."""


def open_journal(search_dir: Path) -> "JournalStorage":
    """Opens the journal of a search. Several processes may use it at the same time.

    Raises:
        UserError: it is damaged.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = search_dir / JOURNAL_FILE
    try:
        return JournalStorage(JournalFileBackend(str(path)))
    except ValueError as error:
        raise UserError(f"{path}: cannot be used ({reason(error)}); restore it from a copy") from error


def read_study(search_dir: Path) -> "optuna.Study | None":
    """Reads the study of a search. None if the search has none yet, or if Optuna is not installed.

    Raises:
        UserError: the journal is damaged.
    """
    if not (search_dir / JOURNAL_FILE).is_file() or find_spec("optuna") is None:
        return None
    import optuna

    try:
        return optuna.load_study(study_name=STUDY_NAME, storage=open_journal(search_dir))
    except KeyError:  # the process died before it wrote the study
        return None
