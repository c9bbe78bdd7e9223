"""Suite of games: a trial for each game, and one table of all scores."""
