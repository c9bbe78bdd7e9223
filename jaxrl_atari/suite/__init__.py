"""Trials and suites of games: their sessions in this process, in processes of their own, or on a Ray cluster."""
