"""Predicted and measured figures of a run: differences, and their known causes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from deepspeed_ext.plan.draw import Panel
from deepspeed_ext.plan.layout import StagePartition
from deepspeed_ext.plan.measured import Comparison, read_comparison
from deepspeed_ext.plan.text_files import parse_json, read_text
from megatron_terapipe.dimensions import ordered_for
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.records import RunStart
from megatron_terapipe.run_report.figures import Figures
from megatron_terapipe.search.price.price_document import PredictedPart
from megatron_terapipe.strategy import DIMENSIONS, Strategy
from megatron_terapipe.texts import bytes_text, time_text

MOST_OPS = 12_000
"""Most ops of a timeline that is drawn: a page of them is 2 MB."""


@dataclass(frozen=True)
class MeasuredSteps:
    """Measured steps of a run, compared with a simulation with the same op times."""

    path: Path
    """A file of a step, or the directory of several."""
    title: str
    comparison: Comparison

    @classmethod
    def read(cls, path: Path) -> "MeasuredSteps":
        """Return the measured steps of a file or of a directory."""
        title, _, comparison = read_comparison(path)
        return cls(path, title, comparison)

    @property
    def bubble_ratio(self) -> float:
        """Measured bubble ratio of the median step."""
        return self.comparison.measured.bubble_ratio

    @cached_property
    def panels(self) -> list[Panel]:
        """Measured and simulated timeline; empty if they have too many ops to draw."""
        if sum(map(len, self.comparison.simulated.spans)) > MOST_OPS:
            return []
        return [
            Panel(f"{self.title}: measured", self.comparison.measured),
            Panel("simulated with the measured op times", self.comparison.simulated),
        ]


UNKNOWN = "strategy: not in the metrics file, so the best strategy of the answer is used"

ANSWER_FILE = "ranking.json"
"""Name of the answer of the search in the directory of `--output`."""


class PredictedCost(PredictedPart, extra="ignore"):
    """Predicted cost of a strategy."""


class PricedStrategy(BaseModel):
    """A strategy and its price."""

    rank: int
    strategy: dict[str, Any]
    predicted: PredictedCost | None


class Model(BaseModel):
    """The model of an answer."""

    parameters: int
    seq_length: int


class Cluster(BaseModel):
    """The cluster of an answer."""

    name: str
    devices: dict[str, int]


class Answer(BaseModel):
    """Answer of `rank` or `predict`, without the keys that the report does not need."""

    schema_version: Literal[2]
    command: Literal["rank", "predict"]
    model: Model
    cluster: Cluster
    precision: str
    entries: list[PricedStrategy]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Prediction for a run."""

    path: Path
    """File of the answer of the search."""
    rank: int
    """Place of the strategy in the ranking."""
    predicted: PredictedCost
    cluster: str
    """Name of the cluster, and its devices."""
    differences: tuple[str, ...]
    """Differences between the run and the priced strategy, a line each."""


def read_prediction(path: Path, start: RunStart) -> Prediction:
    """Return the prediction of the search for a run.

    Args:
        path: answer of `search rank` or `search predict`, or the directory with it.
    """
    path = path / ANSWER_FILE if path.is_dir() else path
    try:
        answer = Answer.model_validate(parse_json(read_text(path), str(path)))
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
        raise ConfigError(f"{path} is not an answer of `search rank` or `predict` ({reason}): write it again") from None
    ran = None if start.strategy is None else Strategy.from_json(start.strategy)

    def differences(entry: PricedStrategy) -> list[str]:
        if ran is None:
            return []
        priced = _normal(Strategy.from_json(entry.strategy), answer.model.seq_length)
        return list(_differences(priced, _normal(ran, start.model.get("seq_length"))))

    priced = [(entry, entry.predicted) for entry in answer.entries if entry.predicted is not None]
    if not priced:
        raise ConfigError(f"{path} has no strategy with a price: search again with other constraints")
    entry, predicted = min(priced, key=lambda each: (len(differences(each[0])), each[0].rank))
    lines = [UNKNOWN] if ran is None else differences(entry)
    lines += _other_conditions(answer, start)
    devices = ", ".join(f"{number} x {name}" for name, number in answer.cluster.devices.items())
    return Prediction(
        path=path,
        rank=entry.rank,
        predicted=predicted,
        cluster=f"{answer.cluster.name or 'cluster'}: {devices}",
        differences=tuple(lines),
    )


def _differences(priced: Strategy, ran: Strategy) -> Iterator[str]:
    for each, label in ordered_for(DIMENSIONS, "label"):
        was, did = getattr(priced, each.name), getattr(ran, each.name)
        if was != did:
            yield f"{label}: {_text(did)} ran, {_text(was)} was priced"


def _normal(strategy: Strategy, seq_length: Any) -> Strategy:
    """Return a strategy as the run writes it: lengths of all token slices, no placement of ranks."""
    sequences = strategy.micro_batch_size * strategy.data_parallel_size
    partition = strategy.stage_partition
    if isinstance(partition, tuple) and StagePartition(partition).is_uniform:
        partition = "uniform"
    return replace(
        strategy,
        token_slices=strategy.cut(seq_length).lengths if isinstance(seq_length, int) else None,
        global_batch_size=strategy.global_batch_size or sequences,
        stage_partition=partition,
        placement=None,
    )


def _other_conditions(answer: Answer, start: RunStart) -> Iterator[str]:
    if answer.model.parameters != start.parameters:
        yield f"model: {start.parameters:,} parameters ran, {answer.model.parameters:,} were priced"
    if answer.precision != start.precision:
        yield f"precision: {start.precision} ran, {answer.precision} was priced"
    if answer.model.seq_length != start.model.get("seq_length"):
        yield f"sequence: {start.model.get('seq_length')} tokens ran, {answer.model.seq_length} were priced"


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


COMPUTE = ("compute_s", "tensor_parallel_s", "head_exchange_s", "expert_exchange_s")
"""Parts of a predicted iteration that are in its ops."""

BUBBLE_POINTS = 0.03
"""Difference of bubble ratios above which the proportions of op times are given as a cause."""

ON_CPU = "on a CPU the whole process with its libraries is measured, on a device only the tensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedFigure:
    """A predicted and the measured figure."""

    name: str
    """Name of the figure."""
    unit: Literal["s", "bytes", "tokens/s", "share"]
    """Unit of both."""
    promised: float
    """Predicted value."""
    came: float
    """Measured value."""
    difference: float
    """Measured over predicted, less 1; of shares, measured less predicted."""
    why: str = ""
    """Known causes of the difference; empty = unknown."""

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


def compared_figures(
    prediction: Prediction, figures: Figures, steps: MeasuredSteps | None, start: RunStart
) -> Iterator[ComparedFigure]:
    """Yield the predicted figures with the measured ones."""

    def compared(
        name: str, unit: Literal["s", "bytes", "tokens/s", "share"], promised: float, came: float, why: str
    ) -> ComparedFigure:
        relative = came / promised - 1 if promised > 1e-99 else 0.0  # A quotient of less may overflow.
        difference = came - promised if unit == "share" else relative
        return ComparedFigure(name=name, unit=unit, promised=promised, came=came, difference=difference, why=why)

    predicted, seconds = prediction.predicted, figures.iteration_time_s.median
    why = "; ".join(_why_time(prediction, seconds, steps))
    yield compared("iteration", "s", predicted.iteration_time_s, seconds, why)
    why = "follows from the time of an iteration"
    yield compared("tokens a second", "tokens/s", predicted.tokens_per_s, figures.tokens_per_s.median, why)
    for name, promised, came in (
        ("MFU", predicted.mfu, figures.mfu),
        ("causal MFU", predicted.mfu_causal, figures.mfu_causal),
    ):
        if promised is not None and came is not None:
            yield compared(name, "share", promised, came, "as above")
    if steps is not None:
        why = "; ".join(_why_bubble(steps, predicted.bubble_ratio))
        yield compared("bubble ratio", "share", predicted.bubble_ratio, steps.bubble_ratio, why)
    why = ON_CPU if start.machine.device == "cpu" else ""
    for stage, (memory, came) in enumerate(zip(predicted.memory_per_rank, figures.peak_memory_bytes, strict=False)):
        yield compared(f"memory, stage {stage}", "bytes", memory["total"], came, why)


def _why_time(prediction: Prediction, seconds: float, steps: MeasuredSteps | None) -> Iterator[str]:
    predicted = prediction.predicted
    if predicted.interval_s is not None:
        low, high = predicted.interval_s
        where = "within" if low <= seconds <= high else "outside"
        share = f"{predicted.interval_coverage:.0%}"
        yield f"{where} {time_text(low)} to {time_text(high)}, the interval of {share} of runs"
    if prediction.differences:
        yield "the run differs from the priced strategy (see above)"
    if steps is not None:
        busiest = max(spent.busy for spent in steps.comparison.rank_times)
        compute = sum(predicted.breakdown.get(name, 0.0) for name in COMPUTE)
        yield f"ops of the busiest rank took {time_text(busiest)}, predicted {time_text(compute)}"


def _why_bubble(steps: MeasuredSteps, predicted: float) -> Iterator[str]:
    simulated = steps.comparison.simulated.bubble_ratio
    yield f"a simulation with the measured op times has {simulated:.1%}; the rest are transfers and the host"
    if abs(simulated - predicted) > BUBBLE_POINTS:
        yield "so the proportions of op times differ from the predicted ones"
    shortest = min((span.end - span.start for row in steps.comparison.measured.spans for span in row), default=1.0)
    if steps.comparison.mean_times() and shortest < 1e-3:
        yield f"ops are as short as {time_text(shortest)}, so waits of the host are a large part"
