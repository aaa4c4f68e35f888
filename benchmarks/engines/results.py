"""Results of a measurement: every time, the engines compared, how quiet the machine was, and the names in tables."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple


class Name(NamedTuple):
    """An engine under one schedule."""

    engine: str
    """Whose it is, and how sequences are cut."""
    schedule: str

    def __str__(self) -> str:
        return f"{self.engine}: {self.schedule}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """An engine under one schedule."""

    engine: str
    schedule: str
    seconds: tuple[float, ...] = ()
    cpu_seconds: tuple[float, ...] = ()
    """Of all ranks together, of every round."""
    peak_bytes: tuple[int, ...] = ()
    """Most bytes alive on each rank, of those that a step made."""
    loss_difference: float | None = None
    """From plain torch, as a share of the loss."""
    gradient_difference: float | None = None
    """From plain torch, as a share of the largest element of each gradient."""
    problem: str | None = None
    """Why there are no times; None where there are."""
    needs: int | None = None
    """Fewest micro-batches that it takes, where it refused these; None if it refuses for another reason."""

    @property
    def name(self) -> Name:
        """Engine and schedule."""
        return Name(self.engine, self.schedule)

    @property
    def median_s(self) -> float:
        """Median of the rounds."""
        return median(self.seconds)

    @property
    def fullest_bytes(self) -> int:
        """Most bytes alive on the fullest rank."""
        return max(self.peak_bytes, default=0)

    def idle_share(self, num_ranks: int) -> float:
        """Share of the time in which the cores of the ranks computed nothing, in [0, 1]."""
        return max(0.0, 1 - median(self.cpu_seconds) / (num_ranks * self.median_s))


@dataclass(frozen=True, kw_only=True)
class Run:
    """All engines with one number of micro-batches."""

    num_micro_batches: int
    engines: tuple[Measured, ...]
    """Measurements, in the order of the catalogue."""

    @property
    def num_rounds(self) -> int:
        """Steps of each engine that were timed."""
        return max((len(each.seconds) for each in self.engines), default=0)

    @property
    def timed(self) -> list[Measured]:
        """The engines that have times."""
        return [each for each in self.engines if each.seconds]


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How quiet the machine was."""

    load_at_start: float
    """Processes that ran or waited to run, mean of the minute before."""
    others_share: float
    """Share of the cores' time that other processes took."""
    steal_share: float
    """Share that the host of a virtual machine took."""
    product_s: tuple[float, ...]
    """Times of one matrix product, before each round."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One run of the command."""

    command: str
    date: str
    machine: str
    software: Mapping[str, str]
    model: Mapping[str, int]
    num_ranks: int
    micro_batch_size: int
    wall_s: float
    """Seconds of all."""
    noise: Noise
    """How quiet the machine was."""
    runs: tuple[Run, ...]

    def write(self, path: Path) -> None:
        """Write all of it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Document":
        """Read a file of `write`."""
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        runs = tuple(
            Run(num_micro_batches=run["num_micro_batches"], engines=tuple(map(_measured, run["engines"])))
            for run in fields.pop("runs")
        )
        noise = Noise(**{name: _frozen(value) for name, value in fields.pop("noise").items()})
        return cls(**fields, noise=noise, runs=runs)


def _measured(fields: Mapping[str, Any]) -> Measured:
    return Measured(**{name: _frozen(value) for name, value in fields.items()})


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


PLAIN = "plain torch"
DEEPSPEED = "DeepSpeed"
TORCH = "torch.distributed.pipelining"
OURS = "ours"
IN_ONE_THREAD = Name(PLAIN, "one process, 1 thread")
IN_TWO_THREADS = Name(PLAIN, "one process, 2 threads")
PIPELINE_ENGINE = Name(DEEPSPEED, "PipelineEngine (1F1B)")


OURS_AUTO = f"{OURS}, --token-slices auto"


def ours_with(num_token_slices: int) -> str:
    """Return the name of our engine with so many token slices."""
    return OURS if num_token_slices == 1 else f"{OURS}, {num_token_slices} token slices"


def is_ours(each: Measured) -> bool:
    """Whether this is our engine, with token slices or without."""
    return each.engine.startswith(OURS)


def is_rival(each: Measured) -> bool:
    """Whether this is a pipeline of others."""
    return each.engine in (DEEPSPEED, TORCH)
