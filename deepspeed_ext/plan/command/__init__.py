"""Command `python -m deepspeed_ext.plan`: simulate a schedule, say how good it is, draw it; or show what was measured.

options -> request (shape, costs, orders) -> simulated --.
        -> timeline of a run ------------> compared -----'--> figures, drawings
"""

from deepspeed_ext.plan.command.main import main

__all__ = ["main"]
