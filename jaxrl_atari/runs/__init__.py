"""Run directories: what a run writes, and how it is read back.

The modules, in the order in which a reader needs them:

The directory
    layout.py        the names of files and folders
    files.py         atomic writes, JSON files, and the lock on a directory
    run_dir.py       makes, locks and removes directories, and keeps the user's code in a run
    description.py   config.json, from which a run can be repeated

What a session logs: counters -> log points -> writers -> files
    progress.py      counters of a session, the returns of its games, and the score
    columns.py       the columns of a log point
    session_log.py   when a log point is due, and what is in it
    writers.py       the interface of those who receive log points; the terminal
    tables.py        reads and writes metrics.csv and evaluations.csv
    logs.py          the writers for TensorBoard and Weights & Biases; opens all writers, and cuts their files back
                     to the checkpoint at a resume
    reading.py       reads back what a session has written

What a session resumes from
    checkpoints.py   saves and restores checkpoints, and decides which are kept
    arrays.py        arrays in orbax's files, and their digests

What `verify` needs
    actions.py       the log of actions, with the seeds and scores of all games
"""
