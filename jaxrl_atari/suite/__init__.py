"""Suites of games and sweeps, and their results. A launcher of `trials/` trains their sessions.

A suite is a trial for each game. A sweep is a suite for each setting of the fields that vary; a suite on its own
is a sweep in which nothing varies. In reading order:

| module | content |
|---|---|
| __main__ | the command: makes a plan and the directory, has the jobs trained, and shows the results |
| sweep | `SweepPlan`: config, games and values that vary (`--vary`), hence the settings; suite.json, sweep.json |
"""
