"""Reading runs back: metrics, statistics, tables, graphs, and HTML reports.

In reading order:

| module | content |
|---|---|
| summary | a run as it was read; which of its sessions count; the content of trial.json |
| metrics | metrics of a session: pure functions of its log points |
| score_statistics | statistics over sessions and games, with intervals: pure functions of scores |
| suites | the games of a suite: results.md, results.csv and results.json |
| aggregates | the statistics over games as tables, and as files for rliable |
| comparison | suites beside each other |
| searches | the trials of a search, and its table |
| evaluations | the results that `evaluate` has written |
| text | numbers, scores and summaries as text |
| graphs, search_graphs | drawings, with matplotlib |
| run_page, suite_page, search_page | what the page of a run, a suite or a search shows; its graphs are drawn |
| page_content | the form of that, and what all pages show: config, software and hardware |
| page | report.html |
"""
