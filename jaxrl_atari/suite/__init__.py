"""Suites of games and sweeps, and their results. A launcher of `trials/` trains their sessions."""
