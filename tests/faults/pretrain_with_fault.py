"""The trainer, with the fault that the variable FAULT describes in JSON, for the campaign of bad numbers."""

import json
import os
import sys

from deepspeed.accelerator import get_accelerator

from tests.faults.injection import Fault, injected


def main() -> int:
    """Train. Returns the exit code of the trainer."""
    import pretrain_gpt

    # DeepSpeed asks for a CPU with fast fp16; slow will do.
    get_accelerator().is_fp16_supported = lambda: True
    described = os.environ.get("FAULT")
    with injected(None if described is None else Fault(**json.loads(described))):
        return pretrain_gpt.main()


if __name__ == "__main__":
    sys.exit(main())
