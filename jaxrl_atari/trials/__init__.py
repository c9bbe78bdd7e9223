"""Trials: which of their sessions are left to train, on which devices, and by which launcher.

A trial is one config in one directory, with the sessions 0, 1, ... A session that is left to train is a `Job`. The
trials of suites and sweeps (`suite/`) become jobs, too. From the top down:

    trial.py         run_training: trains a trial, for `python -m jaxrl_atari.train` and for scripts
    slots.py         plan_slots: the devices of this machine, as slots; choose_launcher: the launcher for them
    launch.py        the interface `Launcher`: train these jobs, and report each that ends. Its implementations:
                       run_here, in this file: one job after the other, in this process
      processes.py     run_processes: several jobs at a time, each in a process of its own
      ray_tasks.py     run_on_ray: each job in a process of a Ray cluster
    sessions.py      unfinished_jobs: the jobs of a trial; train_job: trains one, wherever its launcher has put it
    ray_cluster.py   the Ray cluster of a suite or a search, and the share of a machine that each process gets
"""
