"""A run as its metrics file has it: pieces, each from a start to an end, and the iterations that count."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megatron_terapipe.run_report.metrics_lines import Line, read_metrics_lines
from megatron_terapipe.training.records.events import Note, RunEnd, RunStart, Saved
from megatron_terapipe.training.records.metrics import EvaluationMetrics, IterationMetrics

METRICS_FILE = "metrics.jsonl"
"""Name under which the metrics file is looked for where a run is given as a directory."""

WARM_UP = 2
"""Iterations after each start that are no part of the figures: the first makes buffers and the optimizer's state, the
second is the first that finds them."""


@dataclass
class Piece:
    """A run from one start to its end."""

    start: RunStart | None = None
    """How it started; None if the file does not say."""
    iterations: list[IterationMetrics] = field(default_factory=list)
    """In their order."""
    evaluations: list[EvaluationMetrics] = field(default_factory=list)
    """In their order."""
    saves: list[Saved] = field(default_factory=list)
    """Checkpoints for which it waited."""
    notes: list[Note] = field(default_factory=list)
    """Lines of its log."""
    end: RunEnd | None = None
    """How it ended; None if it was killed, goes on, or the file does not say."""

    @property
    def first(self) -> int:
        """Its first iteration."""
        if self.iterations:
            return self.iterations[0].iteration
        return 1 if self.start is None else self.start.iteration + 1

    def add(self, line: Line) -> None:
        """Take one more line."""
        if isinstance(line, IterationMetrics):
            self.iterations.append(line)
        elif isinstance(line, EvaluationMetrics):
            self.evaluations.append(line)
        elif isinstance(line, Saved):
            self.saves.append(line)
        elif isinstance(line, Note):
            self.notes.append(line)
        elif isinstance(line, RunEnd):
            self.end = line
        else:
            self.start = line


@dataclass(frozen=True)
class TrainingRun:
    """A run."""

    name: str
    """For legends."""
    path: Path
    """Its metrics file."""
    pieces: tuple[Piece, ...]
    """In the order in which they ran."""
    faults: tuple[str, ...] = ()
    """What of its files was left out, a line each."""

    @property
    def start(self) -> RunStart | None:
        """How its last piece started, which says how it was trained."""
        return next((piece.start for piece in reversed(self.pieces) if piece.start is not None), None)

    @property
    def end(self) -> RunEnd | None:
        """How it ended."""
        return self.pieces[-1].end

    @cached_property
    def counted(self) -> list[tuple[Piece, list[IterationMetrics]]]:
        """The iterations of each piece that no later piece did again."""
        kept = []
        next_first: float = float("inf")
        for piece in reversed(self.pieces):
            kept.append((piece, [each for each in piece.iterations if each.iteration < next_first]))
            next_first = min(next_first, piece.first)
        return kept[::-1]

    @cached_property
    def iterations(self) -> list[IterationMetrics]:
        """Its iterations, each once, in rising order."""
        return [each for _, iterations in self.counted for each in iterations]

    @cached_property
    def steady(self) -> list[IterationMetrics]:
        """Iterations of the last batch size, without the first ones after each start; all, where that leaves none."""
        last = self.iterations[-1].global_batch_size
        found = [
            each
            for piece, iterations in self.counted
            for each in iterations
            if each.iteration >= piece.first + WARM_UP and each.global_batch_size == last
        ]
        return found or self.iterations

    @property
    def num_repeated(self) -> int:
        """Iterations that were done again after a restart."""
        return sum(len(piece.iterations) for piece in self.pieces) - len(self.iterations)

    def evaluations(self, part: str = "validation") -> list[EvaluationMetrics]:
        """Return its evaluations on a part of the data, those that a later piece did again left out."""
        kept: list[EvaluationMetrics] = []
        for piece in self.pieces:
            kept = [each for each in kept if each.iteration < piece.first]
            kept += [each for each in piece.evaluations if each.part == part]
        return kept


def read_runs(paths: Sequence[str], *, join: bool = False) -> list[TrainingRun]:
    """Read runs.

    Args:
        join: whether they are pieces of one run, in their order.

    Raises:
        UserError: if a file cannot be read, or holds no iteration.
    """
    files = [metrics_file(path) for path in paths]
    names = _names(files)
    runs = [_read_run(path, name) for path, name in zip(files, names, strict=True)]
    if not join:
        return runs
    pieces = tuple(piece for run in runs for piece in run.pieces)
    return [TrainingRun(names[0], files[0], pieces, tuple(fault for run in runs for fault in run.faults))]


def metrics_file(path: str) -> Path:
    """Return the metrics file of a run that is given as a file or as a directory."""
    given = Path(path)
    return given / METRICS_FILE if given.is_dir() else given


def _read_run(path: Path, name: str) -> TrainingRun:
    read = read_metrics_lines(path)
    return TrainingRun(name, path, tuple(_pieces(read.lines)), read.faults)


def _pieces(lines: Sequence[Line]) -> Iterator[Piece]:
    """Divide lines at each start; where the file has none, where iterations go back."""
    piece, begun, last = Piece(), False, 0
    for line in lines:
        goes_back = isinstance(line, IterationMetrics) and line.iteration <= last
        if begun and (isinstance(line, RunStart) or (goes_back and piece.start is None)):
            yield piece
            piece, last = Piece(), 0
        piece.add(line)
        begun = True
        if isinstance(line, IterationMetrics):
            last = line.iteration
    yield piece


def _names(files: Sequence[Path]) -> list[str]:
    """The shortest names that tell files apart."""
    stems = [path.parent.name if path.name == METRICS_FILE and path.parent.name else path.stem for path in files]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in files]
