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
| searches | the trials of a search, and its table |
| evaluations | the results that `evaluate` has written |
| text | numbers, scores and summaries as text |
| figures | the form of all graphs: style, axes, and files that know what they show |
| graphs, search_graphs | the graphs of runs, suites and searches, with matplotlib |
| run_page, suite_page, search_page | what the page of a run, a suite or a search shows; its graphs are drawn |
| page_content | the form of that, and what all pages show: config, software and hardware |
| page | report.html |
"""
