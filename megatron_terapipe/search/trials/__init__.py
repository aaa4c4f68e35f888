"""Measured runs: the file they stand in, read and written."""

from megatron_terapipe.search.trials.read import read_trials
from megatron_terapipe.search.trials.trial import Trial
from megatron_terapipe.search.trials.write import trial_line

__all__ = ["Trial", "read_trials", "trial_line"]
