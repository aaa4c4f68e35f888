"""Command `python -m megatron_terapipe.search`: how to train a model on a cluster, and what it will cost."""

import os
import sys
from collections.abc import Sequence

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.search.command.frame import run_command

INTERRUPTED = 130
"""Exit code of a command that ended by Ctrl-C, as shells know it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for bad input, said in one line."""
    try:
        return run_command(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except BrokenPipeError:
        # What reads the output, such as `head`, has enough. Python would complain again when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
