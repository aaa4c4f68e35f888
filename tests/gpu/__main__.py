"""Proofs and measurements on one CUDA device, in three commands of at most 9 minutes each.

python3 -m tests.gpu facts       # versions, marked tests, context, loading, products, attention by shape
python3 -m tests.gpu engine      # a step without waits, numbers, two ranks that share the device
python3 -m tests.gpu speed       # Llama with and without token slices
python3 -m tests.gpu             # facts, then engine
python3 -m tests.gpu cases       # every schedule and shape with every drain: hours
python3 -m tests.gpu facts --cpu # on CPUs over gloo, to try the program itself
"""

import sys
from collections.abc import Sequence

from benchmarks.measuring.steps import LIMIT_S, Step, main
from tests.gpu.commands import CASES, ENGINE, FACTS

COMMANDS = {"facts": FACTS, "engine": ENGINE, "cases": CASES}


def run(argv: Sequence[str]) -> int:
    """Run the command that the first word names, or those of `make gpu`; return the largest exit code."""
    named, words = (argv[:1], argv[1:]) if argv[:1] and not argv[0].startswith("-") else (["facts", "engine"], argv)
    codes = []
    for name in named:
        codes.append(_command(name, words))
        if codes[-1] == 2:  # Refused, as the next would be.
            break
    return max(codes)


def _command(name: str, words: Sequence[str]) -> int:
    steps = _steps(name)
    if steps is None:
        print(f"{name} is no command of tests.gpu: give {', '.join([*COMMANDS, 'speed'])}, or none", file=sys.stderr)
        return 2
    limit_s = LIMIT_S if name != "cases" else sum(step.limit_s for step in steps)
    return main(name, steps, words, description=__doc__, limit_s=limit_s)


def _steps(name: str) -> Sequence[Step] | None:
    if name != "speed":
        return COMMANDS.get(name)
    from benchmarks.gpu import STEPS

    return STEPS


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
