"""Run directories: what a run writes, and how it is read back.

layout.py       the names of files and folders         run_dir.py   makes, locks and describes a run (config.json)
files.py        atomic writes, the lock                progress.py  counters and returns of games; the score
session_log.py  when a log point is due, and its row   columns.py   the names of its columns
writers.py      the interface `Writer`, the terminal   csv_writer.py, tracking.py   CSV; TensorBoard and W&B
logs.py         cuts the logs back at a resume, and opens their writers
tables.py       parses a CSV                           reading.py   the metrics of a session as arrays
checkpoints.py  saves and restores                     arrays.py    arrays and their digests
digests.py      of all checkpoints, for `retrain`      actions.py   the log of actions, for `verify`
journal.py      the study of a search
"""
