"""Trials, and the training of their sessions: on which devices, and in which processes.

A trial is one config in one run directory, with the sessions 0, 1, ... A session that is left to train is a `Job`.
A launcher trains jobs: one after the other, or several at a time in processes of their own. In reading order:

| module | content |
|---|---|
| trial | `run_training`: a whole trial, for `python -m jaxrl_atari.train` and for scripts |
| sessions | the jobs of a trial, and the training of one with `session.run_session` |
| slots | the devices of this machine on which jobs train in turn |
| launch | what launchers share; the launcher `run_here`: one job after the other, in this process |
| processes | the launcher `run_processes`: each job in a process of its own, on a slot of this machine |

Suites and sweeps (`suite/`) make the jobs of many trials, for `run_processes` or for a Ray cluster. There, each
job is a task, as is each trial of a search (`search/`):

| module | content |
|---|---|
| ray_tasks | `run_tasks`: runs tasks on a cluster, each in a process; `run_on_ray`: the launcher of jobs there |
| ray_worker | the process of a task |
| ray_cluster | a Ray cluster: how a command starts it or connects to it |
| resources | the share of a machine that each task gets |
| varied_fields | which fields may differ between the settings of a sweep or the trials of a search |
"""
