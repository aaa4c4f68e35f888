"""The report of a training run: its curves, what it used and did, and what came of what the search had promised."""
