"""Trials, suites of games and sweeps: sessions in this process, in processes of their own, or on a Ray cluster."""
