"""Trials, and the training of their sessions: on which devices, and in which processes.

A trial is one config in one run directory, with the sessions 0, 1, ... Where several sessions train at a time,
each is a job: a command that needs nothing but the run directory. In reading order:

| module | content |
|---|---|
| trial | `run_training`: a whole trial; `train_session`: one session, with `session.run_session` |
| slots | the devices on which jobs train, and the share of a machine that each gets |
| launch | `run_jobs`: several jobs at a time on this machine |
| ray_jobs | `run_jobs_on_ray`: on a Ray cluster |

Suites and sweeps (`suite/`) make the jobs of many trials. Each trial of a search (`search/`) is a job too.
`cli/job.py` has what a job is to its own process.
"""
