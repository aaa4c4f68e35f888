"""Command `terapipe plan`: simulate a schedule, show its figures, draw it; or show measured steps.

options -> request (shape, costs, orders) -> simulated --.
        -> timeline of a run ------------> compared -----'--> figures, drawings
"""

import argparse

from deepspeed_ext.plan.command.compared import show_measured
from deepspeed_ext.plan.command.options import build_parser
from deepspeed_ext.plan.command.simulated import show_simulated
from deepspeed_ext.plan.terminal import command_main

__all__ = ["build_parser", "main"]


def _run(options: argparse.Namespace, prog: str) -> int:
    return show_simulated(options) if options.timeline is None else show_measured(options)


main = command_main(build_parser, _run, "python -m deepspeed_ext.plan")
