"""The whole benchmark: a trial for each game, and one table."""
