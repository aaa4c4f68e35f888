"""Command `terapipe plan`: simulate a schedule, say how good it is, draw it; or show what was measured.

options -> request (shape, costs, orders) -> simulated --.
        -> timeline of a run ------------> compared -----'--> figures, drawings
"""

from deepspeed_ext.plan.command.main import main
from deepspeed_ext.plan.command.options import build_parser

__all__ = ["build_parser", "main"]
