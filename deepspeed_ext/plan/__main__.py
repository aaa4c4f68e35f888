"""Command `terapipe plan`."""

import sys

from deepspeed_ext.plan.command import main

if __name__ == "__main__":
    sys.exit(main())
