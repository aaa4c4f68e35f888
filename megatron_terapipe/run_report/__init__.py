"""The report of a training run: its figures compared with the search's prediction, times by rank, and incidents."""
