"""Tables of what a program found: markdown to paste, JSON, and results written into a page between two comments."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measuring.worlds import RankFailed

BEGIN, END = "<!-- begin results -->", "<!-- end results -->"


def written_between(page: str, results: str) -> str:
    """Return a page with other results between its markers.

    Raises:
        SystemExit: if the page has no markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"the page has no lines {BEGIN} and {END}: write them where the results are to stand")
    return f"{before}{BEGIN}\n\n{results}\n\n{END}{after}"


_LONGEST_CELL = 160


@dataclass
class Section:
    """A table."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    """Cells as text, as many as there are columns, or fewer."""
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Append a row."""
        self.rows.append(tuple(map(str, cells)))

    def guarded(self, name: str, measure: Callable[[], Sequence[object]]) -> bool:
        """Append the row that a function returns after its name; if it fails, the row says why.

        Args:
            name: first cell of the row.

        Returns:
            Whether it was measured.
        """
        try:
            self.add(name, *measure())
        except Exception as error:  # A row that fails must not take the others with it.
            self.fail(name, error)
            return False
        return True

    def fail(self, name: str, error: Exception) -> None:
        """Append a row that says why nothing was measured.

        Args:
            name: first cell of the row.
        """
        text = str(error) if isinstance(error, RankFailed) else f"{type(error).__name__}: {error}"
        self.add(name, f"failed: {one_line(text)}")

    def markdown(self) -> str:
        """The table, with its title above and its notes below."""
        filled = [tuple(_cell(cell) for cell in row) + ("",) * (len(self.columns) - len(row)) for row in self.rows]
        lines = [self.columns, ("---",) * len(self.columns), *filled]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return "\n\n".join([f"### {self.title}", table, *self.notes])


def one_line(text: str) -> str:
    """Return the line of a message that says what went wrong; in a traceback, the first line after the last frame."""
    lines = [line for line in text.splitlines() if line.strip()]
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    after = lines[frames[-1] + 1 :] if frames else lines
    return (after or lines or ["no message"])[0].strip()


def markdown(title: str, software: Mapping[str, str], sections: Sequence[Section]) -> str:
    """Return all tables under one heading, after the names of the software."""
    names = ", ".join(f"{name} {version}" for name, version in software.items())
    return "\n\n".join([f"## {title}", names, *(section.markdown() for section in sections)]) + "\n"


def publish(title: str, software: Mapping[str, str], sections: Sequence[Section], folder: Path) -> str:
    """Write `report.md` and `report.json` into a folder, and return the markdown."""
    text = markdown(title, software, sections)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(text)
    fields: dict[str, Any] = {
        "title": title,
        "software": dict(software),
        "sections": [asdict(each) for each in sections],
    }
    (folder / "report.json").write_text(json.dumps(fields, indent=1) + "\n")
    return text


def progress(line: str) -> None:
    """Say what is being done, beside the report."""
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 3]}..."
