"""Published training runs that predictions are compared with, the trainers that ran them, and rows as trials."""

from pathlib import Path

HERE = Path(__file__).parent
RUNS = HERE / "runs.jsonl"
"""Large runs, a trial a line, with their sources."""
TRAINERS = HERE / "trainers.yaml"
"""Trainers of published trials, for `terapipe search validate --trainers`."""
