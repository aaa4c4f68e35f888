"""The promise of the search: what it predicted of the strategy that a run has."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.partition import StagePartition
from deepspeed_ext.plan.text.text_files import read_text
from megatron_terapipe.dimensions import in_places
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.strategy import DIMENSIONS, Strategy
from megatron_terapipe.training.records.events import RunStart

UNKNOWN = "strategy: the metrics file does not say what ran, and the best of the answer is taken"

ANSWER_FILE = "ranking.json"
"""Name of the answer of the search in the directory of `--output`."""


class Read(BaseModel):
    """An object of an answer, of which only what is needed is read: later versions say more."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())


class Predicted(Read):
    """Predicted cost of a strategy; `search/report/schema/schema.py` says what each field means."""

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
