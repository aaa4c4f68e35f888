"""Command `terapipe plan`: simulate a schedule, say how good it is, draw it; or show what was measured.

options -> request (shape, costs, orders) -> simulated --.
        -> timeline of a run ------------> compared -----'--> figures, drawings
"""

from collections.abc import Sequence

from deepspeed_ext.plan.command.compared import show_measured
from deepspeed_ext.plan.command.options import build_parser
from deepspeed_ext.plan.command.simulated import show_simulated
from deepspeed_ext.plan.terminal import run_command

__all__ = ["build_parser", "main"]


def main(argv: Sequence[str] | None = None, prog: str = "python -m deepspeed_ext.plan") -> int:
    """Run the command and return its exit code: 1 if the schedule deadlocks, 2 for bad input."""
    return run_command(lambda: _run(argv, prog))


def _run(argv: Sequence[str] | None, prog: str) -> int:
    options = build_parser(prog).parse_args(argv)
    return show_simulated(options) if options.timeline is None else show_measured(options)
