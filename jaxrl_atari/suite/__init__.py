"""Suites of games and sweeps, and their results. A launcher of `trials/` trains their sessions.

A suite is a trial for each game. A sweep is a suite for each setting of the fields that vary; a suite on its own
is a sweep in which nothing varies. A plan (`SuitePlan`, `SweepPlan`) says what is to be trained, and results
(`SuiteResults`, `SweepResults`) are what has come of it. In reading order:

    __main__.py        the command: makes a plan and the directory, has the jobs trained, and shows the results
    suite.py           SuitePlan: config and games; suite.json
    vary.py            the option --vary
    sweep.py           SweepPlan: config, games and the values that vary, hence the settings; sweep.json
    jobs.py            the jobs of a plan: whether they can be trained, which are left, and their training
    results.py         ResultsKeeper: saves the results when a job ends; at the end it shows, saves and draws them
    sweep_results.py   SweepResults: the table of a sweep, and its graph. SuiteResults, which reports show
                       too, is in report/suites.py
"""
