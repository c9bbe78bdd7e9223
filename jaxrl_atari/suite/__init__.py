"""Suites of games and sweeps, and their results. A launcher of `trials/` trains their sessions.

A suite is a trial for each game. A sweep is a suite for each setting of the fields that vary; a suite on its own
is a sweep in which nothing varies. A plan (`SweepPlan`) says what is to be trained. Results (`SuiteResults`,
`SweepResults`) are what has come of it; `SuiteResults`, which reports show too, is in `report/suites.py`. In
reading order:

| module | content |
|---|---|
| __main__ | the command: makes a plan and the directory, has the jobs trained, and shows the results |
| vary | the option --vary |
| sweep | `SweepPlan`: config, games and the values that vary, hence the settings; suite.json, sweep.json |
| jobs | the jobs of a plan: whether they can be trained, which are left, and their training |
| results | `SuiteResultsKeeper`: saves the results when a job ends; at the end it shows, saves and draws them |
| sweep_results | `SweepResults`: the table of a sweep, and its graph |
"""
