"""The page of the benchmark, its picture and its times, written from the JSON of a measurement.

python -m benchmarks.engines.page runs/engines.json
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engines.picture import draw
from benchmarks.engines.results import Document
from benchmarks.engines.table import results_markdown
from benchmarks.measuring.markers import written_between

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "benchmarks" / "engines_2-core-cpu_202611.md"
PICTURE = DOCS / "img" / "engines.svg"


def main(argv: Sequence[str] | None = None) -> int:
    """Write page and picture, and the times beside the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("times", type=Path, help="the JSON of a measurement")
    parser.add_argument("--document", type=Path, default=PAGE, metavar="FILE", help="the page, with its markers")
    parser.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE")
    options = parser.parse_args(argv)
    measurement = Document.read(options.times)
    options.picture.write_text(draw(measurement), encoding="utf-8")
    link = Path(os.path.relpath(options.picture, options.document.parent)).as_posix()
    page = written_between(options.document.read_text(encoding="utf-8"), results_markdown(measurement, link))
    options.document.write_text(page, encoding="utf-8")
    measurement.write(options.document.with_suffix(".json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
