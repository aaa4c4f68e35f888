"""Measured steps: as the trainer records them, beside what the simulator predicts, and on what the difference went."""

from deepspeed_ext.plan.measured.comparison import Comparison, Difference, measured_costs
from deepspeed_ext.plan.measured.step_record import StepRecord

__all__ = ["Comparison", "Difference", "StepRecord", "measured_costs"]
