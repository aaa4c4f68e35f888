"""Try every configuration of checkouts of Megatron-LM, Megatron-DeepSpeed and GPT-NeoX, and print what runs.

python -m benchmarks.migration_survey [--megatron-lm DIR] [--megatron-deepspeed DIR] [--gpt-neox DIR] [--lines] [--json]

Each configuration is parsed and checked as `--dry-run` checks it, without its tokenizer, data, checkpoints and devices.
The shell scripts of the checkouts are run, in a copy and with every program replaced (`shell_scripts.py`), so give
checkouts that you trust.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.migration_survey import gpt_neox, megatron_deepspeed, megatron_lm
from benchmarks.migration_survey.attempts import Attempt, outcome_of
from benchmarks.migration_survey.table import as_json, table

ORIGINS: Mapping[str, Callable[[Path, Path], Iterator[Attempt]]] = {
    "megatron_lm": megatron_lm.attempts,
    "megatron_deepspeed": megatron_deepspeed.attempts,
    "gpt_neox": gpt_neox.attempts,
}
"""By name, what yields the attempts of a checkout; each takes the checkout and a folder for files of its own."""


def main() -> int:
    """Run the survey. Returns the exit code: 1 if an attempt ended in anything but one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megatron-lm", type=Path, metavar="DIR", help="a checkout of Megatron-LM")
    parser.add_argument("--megatron-deepspeed", type=Path, metavar="DIR", help="a checkout of Megatron-DeepSpeed")
    parser.add_argument("--gpt-neox", type=Path, metavar="DIR", help="a checkout of GPT-NeoX")
    parser.add_argument("--lines", action="store_true", help="show the line of every refusal, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    outcomes = []
    with TemporaryDirectory() as folder:
        for name, attempts in ORIGINS.items():
            checkout = getattr(options, name)
            if checkout is None:
                continue
            own = Path(folder, name)
            own.mkdir()
            for attempt in attempts(checkout.resolve(), own):
                outcomes.append(outcome_of(attempt))
                if sys.stderr.isatty():
                    print(f"\r{len(outcomes)} tried", end="", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(as_json(outcomes), indent=2))
    else:
        print(*table(outcomes, shows_lines=options.lines), sep="\n")
    return int(any(outcome.is_defect for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
