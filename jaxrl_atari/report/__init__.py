"""Reading runs back: figures of merit, statistics, tables, graphs, and HTML reports.

| module | content |
|---|---|
| summary | a run as it was read, which of its sessions count, and trial.json |
| metrics, statistics | figures of merit of sessions; statistics over games, with intervals |
| suites, searches | the results of suites and of searches, as tables |
| aggregates, comparison | aggregates over the games of suites; suites beside each other |
| graphs, search_graphs | drawings with matplotlib |
| evaluations | the files that `evaluate` writes |
| text | numbers, scores and summaries in words |
| page | report.html |
"""
