"""Verification of runs: their scores are recomputed from seeds and actions, or a part is trained again.

| module | content |
|---|---|
| recompute | verifies a session: the rows of metrics.csv from the games of the log, and the games themselves |
| retrain | trains a part of a session again, and compares bits |
| __main__ | the command |
"""
