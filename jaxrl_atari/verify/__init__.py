"""Verification of runs: their scores are recomputed from seeds and actions, or a part is trained again.

| module | content |
|---|---|
| games | the games of a log of actions, played again |
| rows | the rows of metrics.csv, recomputed from the games of the log |
| recompute | verifies a session with both |
| retrain | trains a part of a session again, and compares bits |
| __main__ | the command |
"""
