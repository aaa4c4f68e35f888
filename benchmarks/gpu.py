"""Speed on one CUDA device, in at most 9 minutes: `make gpu-bench`.

python -m benchmarks.gpu                  # llama3-1b in bf16 at 32k and 8k tokens, with and without token slices
python -m benchmarks.gpu --cpu            # a tiny model on a CPU, to try the program itself

Times, memory and MFU with full and with causal attention; then, of one more step, the longest kernels, launches, the
idle share of the device and the time of the host. The plain torch loop comes last.
"""

import os
import sys
from collections.abc import Sequence

from benchmarks.measuring import steps
from benchmarks.measuring.steps import Step
from deepspeed_ext.runtime.cuda_environment import prepare_cuda_environment


def _variables() -> dict[str, str]:
    """Variables that the trainer sets before it imports torch, where they are not set."""
    environment = dict(os.environ)
    prepare_cuda_environment(environment, num_pipeline_ranks=1)
    return {name: value for name, value in environment.items() if name not in os.environ}


def _step(name: str, limit_s: float, seq_length: int, token_slices: int) -> Step:
    return Step(
        name,
        "benchmarks.measuring.llama_steps:training",
        limit_s,
        {"model": "llama3-1b", "seq_length": seq_length, "token_slices": token_slices},
        on_cpu={"model": "tiny", "seq_length": seq_length // 512, "token_slices": min(token_slices, 4)},
        variables=_variables(),
    )


# The first compiles, for those after it, too.
STEPS = (
    _step("32k tokens, 16 token slices", 200, 32768, 16),
    _step("32k tokens, unsliced", 120, 32768, 1),
    _step("8k tokens, 16 token slices", 90, 8192, 16),
    _step("8k tokens, unsliced", 90, 8192, 1),
    _step("8k tokens, plain torch", 90, 8192, 0),
    _step("32k tokens, plain torch", 120, 32768, 0),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps, and print the tables."""
    return steps.main("speed", STEPS, argv, description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
