"""`python -m megatron_terapipe`: the same as the command `terapipe`."""

import sys

from megatron_terapipe.command.main import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m megatron_terapipe"))
