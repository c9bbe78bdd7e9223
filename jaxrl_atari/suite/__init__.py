"""Suites of games and sweeps, and their results. A launcher of `trials/` trains their sessions.

A suite is a trial for each game. A sweep is a suite for each setting of the fields that vary; a suite on its own
is a sweep in which nothing varies.

    __main__.py        the command: plans the devices, makes the directory, and has the jobs trained
    suite.py           the games of a suite; suite.json; its jobs
    sweep.py           the settings of a sweep; sweep.json; its jobs
    results.py         what is saved, shown and drawn when a job ends, and at the end
    sweep_results.py   the table and the graph of a sweep
"""
