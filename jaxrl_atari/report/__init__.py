"""Reading runs back: metrics, statistics, tables, graphs, and HTML reports.

In reading order:

| module | content |
|---|---|
| summary | a run as it was read; which of its sessions count; the content of trial.json |
| metrics | metrics of a session: pure functions of its log points |
| score_statistics | statistics over sessions and games, with intervals: pure functions of scores |
| aggregates | the statistics over the games of a suite: records of them, tables, and files for rliable |
| suites | a suite as it was read, and its results: results.md, results.csv and results.json |
| comparison | suites beside each other |
| evaluations | the results that `evaluate` has written |
| tables | tables of results as Markdown, CSV and JSON; numbers as text |
| text | scores, summaries and differences as text |
| figures | the form of all graphs: style, axes, and files |
| graphs, search_graphs | the graphs of runs and suites, with matplotlib; those of searches, by Optuna |
| sections | what the page of a run, suite, sweep or search shows; its graphs are drawn |
| page | report.html |
"""
