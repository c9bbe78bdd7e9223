"""Trials, and the training of their sessions: on which devices, and in which processes.

A trial is one config in one run directory, with the sessions 0, 1, ... A session that is left to train is a `Job`.
A launcher trains jobs: one after the other, or several at a time in processes of their own. In reading order:

    trial.py         run_training: a whole trial, for `python -m jaxrl_atari.train` and for scripts. It makes the
                     jobs, plans the slots, chooses run_here or run_processes, and summarises the results
    sessions.py      unfinished_jobs: makes the jobs of a trial; train_job: trains one with `session.run_session`,
                     wherever its launcher has put it
    slots.py         plan_slots: the devices of this machine on which jobs train in turn
    launch.py        the interface `Launcher`, and the launcher run_here: one job after the other, in this process
    processes.py     the launcher run_processes: each job in a process of its own, on a slot of this machine

Suites and sweeps (`suite/`) make the jobs of many trials, for run_processes or for a Ray cluster. There, each job
is a task, as is each trial of a search (`search/`):

    ray_tasks.py     run_tasks: runs tasks on a cluster, each in a process; run_on_ray: the launcher of jobs there
    ray_worker.py    the process of a task
    ray_cluster.py   a Ray cluster: how a command starts it or connects to it
    resources.py     the share of a machine that each task gets
    varied_fields.py which fields may differ between the settings of a sweep or the trials of a search
"""
