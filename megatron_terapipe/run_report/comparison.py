"""The search's prediction of a run beside its measurements: figures, differences, and their known causes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from deepspeed_ext.plan.draw import Panel
from deepspeed_ext.plan.errors import PlanError, UserError
from deepspeed_ext.plan.layout import StagePartition
from deepspeed_ext.plan.measured import Comparison, RankTime, alike, name_of, read_steps
from deepspeed_ext.plan.text_files import read_text
from megatron_terapipe.dimensions import in_places
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.run_report.figures import Figures
from megatron_terapipe.search.answer.figures import bytes_text, time_text
from megatron_terapipe.strategy import DIMENSIONS, Strategy
from megatron_terapipe.training.records import RunStart

MOST_OPS = 12_000
"""Ops of a timeline that is drawn at most: a page of them is 2 MB."""


class MeasuredSteps:
    """Measured steps of a run.

    Args:
        path: a file of a step, or the directory of several.

    Raises:
        UserError: if there is none, or they are damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        steps = alike(read_steps(path))
        self.title = name_of(path, steps)
        try:
            self.comparison = Comparison(tuple(step.timeline for step in steps))
            # Simulated here, so that what cannot be is said here.
            self.simulated = self.comparison.simulated
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None

    @property
    def num_steps(self) -> int:
        """Steps that were measured."""
        return len(self.comparison.steps)

    @property
    def measured(self) -> float:
        """Measured bubble ratio, of the median step."""
        return self.comparison.measured.bubble_ratio

    @property
    def panels(self) -> list[Panel]:
        """Its measured and its simulated timeline; empty if they have too many ops to draw."""
        if sum(map(len, self.simulated.spans)) > MOST_OPS:
            return []
        return [
            Panel(f"{self.title}: measured", self.comparison.measured),
            Panel("simulated with the measured op times", self.simulated),
        ]


def directory_of(start: RunStart | None) -> Path | None:
    """Return the directory of timelines of a run; None if it wrote none, or it is gone."""
    if start is None or start.timeline is None:
        return None
    path = Path(start.directory) / start.timeline
    return path if path.is_dir() else None


UNKNOWN = "strategy: the metrics file does not say what ran, and the best of the answer is taken"

ANSWER_FILE = "ranking.json"
"""Name of the answer of the search in the directory of `--output`."""


class Read(BaseModel):
    """An object of an answer, of which only what is needed is read: later versions say more."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class Predicted(Read):
    """Predicted cost of a strategy; `megatron_terapipe/search/answer/json_schema.py` says what each field means."""

    iteration_time_s: float
    interval_s: tuple[float, float] | None
    interval_coverage: float
    tokens_per_s: float
    mfu: float | None
    bubble_ratio: float
    peak_memory_bytes: float
    breakdown: dict[str, float]
    memory_per_rank: list[dict[str, float]]


class Entry(Read):
    """A strategy and its price."""

    rank: int
    strategy: dict[str, Any]
    predicted: Predicted | None


class Model(Read):
    """The model."""

    parameters: int
    seq_length: int


class Cluster(Read):
    """The cluster."""

    name: str
    devices: dict[str, int]


class Answer(Read):
    """Answer of `rank` or `predict`."""

    schema_version: Literal[1]
    command: Literal["rank", "predict"]
    model: Model
    cluster: Cluster
    precision: str
    entries: list[Entry]


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """Prediction for a run."""

    path: Path
    """Answer of the search that has it."""
    rank: int
    """Place of the strategy in the ranking."""
    strategy: Strategy
    """The strategy that was priced."""
    predicted: Predicted
    """Its price."""
    cluster: str
    """Name of the cluster, and its devices."""
    differences: tuple[str, ...]
    """In what the run differs from what was priced, a line each."""


def answer_beside(start: RunStart | None) -> Path | None:
    """Return the answer of the search that lies beside the strategy file of a run; None if there is none."""
    if start is None or start.strategy_file is None:
        return None
    path = (Path(start.directory) / start.strategy_file).parent / ANSWER_FILE
    return path if path.is_file() else None


def read_promise(path: Path, start: RunStart | None) -> Promise:
    """Read what the search predicted of a run.

    Args:
        path: answer of `search rank` or `search predict`, or the directory with it.
        start: how the run started; without it the best strategy of the answer is taken.

    Raises:
        UserError: if the file cannot be read, is no such answer, or has no price.
    """
    path = path / ANSWER_FILE if path.is_dir() else path
    text = read_text(path)
    try:
        document = Answer.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
        raise ConfigError(f"{path} is no answer of `search rank` or `predict` ({reason}): write it again") from None
    seq_length = document.model.seq_length
    priced = [(entry, entry.predicted) for entry in document.entries if entry.predicted is not None]
    if not priced:
        raise ConfigError(f"{path} has no strategy with a price: search again with other constraints")
    ran = None if start is None else _strategy(start.strategy)
    entry, predicted = min(priced, key=lambda each: _distance(each[0], ran, seq_length))
    strategy = Strategy.from_json(entry.strategy)
    differences = [UNKNOWN] if ran is None else list(_differences(strategy, ran, seq_length))
    if start is not None:
        differences += _other_conditions(document, start)
    devices = ", ".join(f"{number} x {name}" for name, number in document.cluster.devices.items())
    return Promise(
        path=path,
        rank=entry.rank,
        strategy=strategy,
        predicted=predicted,
        cluster=f"{document.cluster.name or 'cluster'}: {devices}",
        differences=tuple(differences),
    )


def _strategy(document: object) -> Strategy | None:
    if document is None:
        return None
    try:
        return Strategy.from_json(document)
    except UserError:  # of a later version, with more dimensions
        return None


def _distance(entry: Entry, ran: Strategy | None, seq_length: int) -> tuple[int, int]:
    """How many dimensions differ, and the place in the ranking."""
    if ran is None:
        return 0, entry.rank
    return len(list(_differences(Strategy.from_json(entry.strategy), ran, seq_length))), entry.rank


def _differences(priced: Strategy, ran: Strategy, seq_length: int) -> Iterator[str]:
    here, there = _normal(priced, seq_length), _normal(ran, seq_length)
    for each, label in in_places(DIMENSIONS, "label"):
        values = getattr(here, each.name), getattr(there, each.name)
        if values[0] != values[1]:
            yield f"{label}: {_text(values[1])} ran, {_text(values[0])} was priced"


def _normal(strategy: Strategy, seq_length: int) -> Strategy:
    """The strategy as the run writes it: token slices written out, places of ranks left to the launcher."""
    sequences = strategy.micro_batch_size * strategy.data_parallel_size
    partition = strategy.stage_partition
    if isinstance(partition, tuple):
        uniform = StagePartition.uniform(partition[-1], len(partition) - 1)
        partition = "uniform" if partition == uniform.bounds else partition
    return replace(
        strategy,
        token_slices=strategy.cut(seq_length).lengths,
        global_batch_size=strategy.global_batch_size or sequences,
        stage_partition=partition,
        placement=None,
    )


def _other_conditions(document: Answer, start: RunStart) -> Iterator[str]:
    if document.model.parameters != start.parameters:
        yield f"model: {start.parameters:,} parameters ran, {document.model.parameters:,} were priced"
    if document.precision != start.precision:
        yield f"precision: {start.precision} ran, {document.precision} was priced"
    if document.model.seq_length != start.model.get("seq_length"):
        yield f"sequence: {start.model.get('seq_length')} tokens ran, {document.model.seq_length} were priced"


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


COMPUTE = ("compute_s", "tensor_parallel_s", "head_exchange_s")
"""Parts of a predicted iteration that are inside its ops."""

BUBBLE_POINTS = 0.03
"""Difference of bubble ratios from which on op times are told to be others."""

ON_CPU = "a CPU counts the whole process with its libraries, a device the tensors alone"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A figure that was promised, and what came."""

    name: str
    """Of the figure."""
    unit: Literal["s", "bytes", "tokens/s", "share"]
    """Of both: `s`, `bytes`, `tokens/s` or `share`."""
    promised: float
    """What was predicted."""
    came: float
    """What was measured."""
    why: str = ""
    """The cause of the difference, as far as it is known; empty = unknown."""

    @property
    def difference(self) -> float:
        """What came relative to what was promised, less 1; of shares, the points between them."""
        if self.unit == "share":
            return self.came - self.promised
        return self.came / self.promised - 1 if self.promised else 0.0

    def text(self, value: float) -> str:
        """Return one of the two figures as text."""
        if self.unit == "s":
            return time_text(value)
        if self.unit == "bytes":
            return bytes_text(value)
        return f"{value:.1%}" if self.unit == "share" else f"{value:,.0f}"

    @property
    def difference_text(self) -> str:
        """The difference as text."""
        return f"{100 * self.difference:+.1f} points" if self.unit == "share" else f"{self.difference:+.1%}"


def kept(promise: Promise, figures: Figures, steps: MeasuredSteps | None, start: RunStart | None) -> list[Kept]:
    """Return the figures that were promised, each beside what came.

    Args:
        steps: its measured timeline, if there is one.
        start: how it started, if the file says so.
    """
    predicted = promise.predicted
    middle = figures.iteration_time_s.median
    found = [
        Kept(
            name="iteration",
            unit="s",
            promised=predicted.iteration_time_s,
            came=middle,
            why="; ".join(_why_time(promise, middle, steps)),
        ),
        Kept(
            name="tokens a second",
            unit="tokens/s",
            promised=predicted.tokens_per_s,
            came=figures.tokens_per_s.median,
            why="follows from the time of an iteration",
        ),
    ]
    if predicted.mfu is not None and figures.mfu is not None:
        found.append(Kept(name="MFU", unit="share", promised=predicted.mfu, came=figures.mfu, why="as above"))
    if steps is not None:
        why = "; ".join(_why_bubble(steps, predicted.bubble_ratio))
        found.append(
            Kept(name="bubble ratio", unit="share", promised=predicted.bubble_ratio, came=steps.measured, why=why)
        )
    of_process = start is not None and start.machine.device == "cpu"
    for rank, (memory, came) in enumerate(zip(predicted.memory_per_rank, figures.peak_memory_bytes, strict=False)):
        why = ON_CPU if of_process else ""
        found.append(Kept(name=f"memory, stage {rank}", unit="bytes", promised=memory["total"], came=came, why=why))
    return found


def _why_time(promise: Promise, seconds: float, steps: MeasuredSteps | None) -> Iterator[str]:
    interval = promise.predicted.interval_s
    if interval is not None:
        low, high = interval
        share = f"{promise.predicted.interval_coverage:.0%}"
        if low <= seconds <= high:
            yield f"within {time_text(low)} to {time_text(high)}, where {share} of runs were expected"
        else:
            yield f"outside {time_text(low)} to {time_text(high)}, where {share} of runs were expected"
    if promise.differences:
        yield "what ran may not be what was priced (see above)"
    if steps is not None:
        spent = max(steps.comparison.rank_times, key=lambda each: each.busy)
        parts = promise.predicted.breakdown
        compute = sum(parts[name] for name in COMPUTE)
        yield f"ops of the busiest rank took {time_text(spent.busy)}, {time_text(compute)} were promised"


def _why_bubble(steps: MeasuredSteps, promised: float) -> Iterator[str]:
    simulated = steps.simulated.bubble_ratio
    yield f"the same order with the measured op times has {simulated:.1%}; the rest are transfers and the host"
    if abs(simulated - promised) > BUBBLE_POINTS:
        yield "so the times of ops are in other proportions than was promised"
    ops = steps.comparison.mean_times()
    spans = [span.end - span.start for row in steps.comparison.measured.spans for span in row]
    if ops and min(spans, default=1.0) < 1e-3:
        yield f"ops are as short as {time_text(min(spans))}, so a wait of the host weighs much"


def time_by_rank(steps: MeasuredSteps) -> list[RankTime]:
    """Return on what each rank spent the measured step, in seconds."""
    return steps.comparison.rank_times
