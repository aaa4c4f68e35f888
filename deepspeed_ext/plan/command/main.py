"""The entry of the command: what is asked for, and errors in one line."""

import sys
from collections.abc import Sequence

from deepspeed_ext.plan.command.compared import show_measured
from deepspeed_ext.plan.command.options import parser
from deepspeed_ext.plan.command.simulated import show_simulated
from deepspeed_ext.plan.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        options = parser().parse_args(argv)
        if options.timeline is not None:
            return show_measured(options)
        return show_simulated(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
