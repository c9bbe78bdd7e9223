"""Trials, suites and sweeps: which sessions are to be trained, on which devices, and by which launcher.

A trial is one config in one directory, with the sessions 0, 1, ... A suite is a trial for each game. A sweep is a
suite for each setting of the fields that vary. Read from the commands downwards:

    trial.py         run_training: a trial, for `python -m jaxrl_atari.train` and for scripts
    __main__.py      a suite or a sweep, for `python -m jaxrl_atari.suite`
    suite.py         the games of a suite; suite.json
    sweep.py         the settings of a sweep; sweep.json. sweep_results.py: its table and its graph
    results.py       what the command saves and shows of a suite or a sweep
    slots.py         the devices of this machine, as slots, and the launcher that suits them
    launch.py        the interface `Launcher`: train these jobs, and report each that ends. It has three
                     implementations: `run_here` (one after the other, in this process), `run_processes` in
                     processes.py (a process each, several at a time) and `run_on_ray` in ray_tasks.py
    sessions.py      unfinished_jobs: a `Job` for each session that is left; train_job: trains one of them, in
                     whatever process the launcher has put it
    ray_cluster.py   the Ray cluster of a suite or a search
"""
