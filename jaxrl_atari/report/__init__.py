"""Reading runs back: metrics, statistics, tables, graphs, and HTML reports.

In reading order:

| module | content |
|---|---|
| summary | a run as it was read; which of its sessions count; the content of trial.json |
| metrics | metrics of a session: pure functions of its log points |
| score_statistics | statistics over sessions and games, with intervals: pure functions of scores |
| tables | tables of results as Markdown and CSV; sections of a page; numbers as text |
| text | scores, summaries and differences as text |
| suites | the results of suites and sweeps, and comparisons of suites: tables, statistics, files |
| graphs | the graphs of runs and suites |
| searches | the study and the results of a search: the table of its trials, and graphs, which Optuna draws |
| page | report.html: what the page of a run, suite, sweep or search shows |
"""
