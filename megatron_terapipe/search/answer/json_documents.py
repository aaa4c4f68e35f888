"""The JSON documents of the search: classes whose fields are the keys, written by all commands with `--json`.

Programs read these documents. A key that goes away, or means something else, makes another `SCHEMA_VERSION`; a new key
does not.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, PlainSerializer, PlainValidator

from megatron_terapipe.search.machine.entries import ClosedModel
from megatron_terapipe.search.price.price_document import PredictedPart, Speed
from megatron_terapipe.strategy import Strategy

StrategyObject = Annotated[
    Strategy,
    PlainValidator(lambda given: given if isinstance(given, Strategy) else Strategy.from_json(given)),
    PlainSerializer(Strategy.to_json),
]
"""A strategy, as `--strategies` and the trainer's `--strategy` read it."""


class WhatIfPart(ClosedModel):
    """The question with one change, and its answer."""

    name: str
    """The kind of change: `found_order`, `memory_headroom`, `fewer_devices`, `published_mfu`, `effort`, `constant`,
    `network`, or the name of another trainer. Where nothing fits: `nearest` for the strategy nearest to fitting, then
    the changes with which one fits: `memory_headroom`, `constraint` (a flag that is dropped), `key_value_gradients`,
    `devices`, `seq_length`, `global_batch_size`, `device_memory`."""
    value: int | float | str | None = None
    """The new value: the headroom, the number of devices, the name of a constant, ...; null = none is needed."""
    strategy: StrategyObject | None = None
    """The best strategy then; null = none can run."""
    iteration_time_s: float | None = None
    change: float
    """Share of the time that it saves, or of device hours or of the price; of a constant, the share that rank 1 would
    lose. 1 where it decides whether a strategy can run."""
    line: str
    """The answer in one line."""
    more: str = ""
    """The rest in full sentences; may be empty."""


SCHEMA_VERSION: Final = 2
"""Version of the documents of all commands."""


class ModelPart(ClosedModel):
    """The model."""

    name: str
    """Name of the preset, of the file, or its sizes."""
    parameters: int
    """Parameters; a shared weight counts once."""
    num_layers: int
    """Layers that are dealt to pipeline stages."""
    seq_length: int
    settings: dict[str, Any] | None
    """Fields of the trainer's model section, those that follow from others left out: a model file. Null = a model that
    is given layer by layer."""


class ClusterPart(ClosedModel):
    """The cluster."""

    name: str
    num_nodes: int
    num_devices: int
    devices: dict[str, int]
    nodes: list[dict[str, Any]]
    """Groups of equal nodes with all figures, as a cluster file has them."""


class DecisionPart(ClosedModel):
    """A whole training with a strategy."""

    tokens: float
    """Tokens that device hours and price are of: `--tokens`, else a million."""
    days: float | None
    """Days of training; null = without `--tokens`."""
    device_hours: float
    cost: float | None
    """Price, in the unit of `--price`; null = without it."""


class RankedEntry(ClosedModel):
    """A strategy, its price and its place in a ranking."""

    rank: int
    """Place in the ranking from 1; strategies that cannot run come last."""
    index: int
    """Place in the file of strategies from 0; in answers of `rank` always 0."""
    variants: int | None
    """Strategies of the same parallel layout that can run, by their closed form, of which this is the best; null = all
    strategies are listed."""
    strategy: StrategyObject
    predicted: PredictedPart | None
    """Its cost; null where it cannot be priced."""
    decision: DecisionPart | None
    """Days, device hours and price; null = no flag of a training is given, or no strategy that runs."""
    feasible: bool
    reason: str | None
    """Why it cannot run; null where it can."""

    @property
    def price(self) -> PredictedPart:
        """The prediction of a strategy that could be priced."""
        assert self.predicted is not None
        return self.predicted


class SearchPart(ClosedModel):
    """Numbers of strategies in the steps of the search."""

    considered: int
    rejected: dict[str, int]
    """How many strategies each rule was the first to reject."""
    priced: int
    simulated: int
    proven: bool
    """Whether no other strategy can be more than 1 % faster than the winner, under this model."""
    could_save: float
    """Share of the winner's time that a strategy that was not simulated could save at most."""


class LaunchPart(ClosedModel):
    """Command and files that launch the winner."""

    command: str | None = None
    files: list[str] = Field(default_factory=list)
    why_not: str | None = None
    """Why there is no command; null where there is one."""


class Document(ClosedModel):
    """The question, and notes on the answer."""

    schema_version: Literal[2] = SCHEMA_VERSION
    model: ModelPart
    cluster: ClusterPart
    software: str
    precision: str
    """Type of matrix products: `bf16`, `fp16` or `fp32`."""
    global_batch_size: int | None
    """Sequences of one optimizer step; null = each strategy has its own."""
    constraints: dict[str, list[Any]]
    """Values that flags allow for dimensions of the strategy; others are free."""
    notes: list[str]
    """Assumptions and warnings in full sentences."""


class Ranking(Document):
    """Strategies with their prices."""

    answer: str
    """The answer in words."""
    entries: list[RankedEntry]
    """The strategies: of `rank` best first, of `predict` in the order of their file."""

    @property
    def priced(self) -> list[RankedEntry]:
        """Entries that can run and have a price, best first."""
        return sorted((each for each in self.entries if each.feasible and each.predicted), key=lambda each: each.rank)


class RankDocument(Ranking):
    """Answer of `rank`."""

    command: Literal["rank"] = "rank"
    advice: list[WhatIfPart]
    """The same question with one change, where it is worth saying; those first that can change most."""
    search: SearchPart
    why_none: str | None
    """Why no strategy can run; null where one can."""
    launch: LaunchPart = LaunchPart()


class PredictDocument(Ranking):
    """Answer of `predict`."""

    command: Literal["predict"] = "predict"


class Cut(Speed):
    """Token slices of a sequence, and their speed-up."""

    num_token_slices: int
    token_slices: list[int]
    speedup: float | None
    """Seconds with whole sequences / seconds with these token slices; null = whole sequences were not priced."""


class TokenSlicesDocument(Document):
    """Answer of `slices`."""

    command: Literal["slices"] = "slices"
    strategy: StrategyObject
    best: Cut
    curve: list[Cut]
    """The best token slices of each number that was priced."""
    flags: str
    """Flags of the trainer for the best ones."""


class TrialResult(ClosedModel):
    """A strategy that was run, and its predictions."""

    trial_id: str
    strategy: StrategyObject
    """The strategy, its token slices and stages written out."""
    iteration_time_s: float | None
    peak_memory_bytes: float | None
    """Measured bytes of the fullest device; null = not measured."""
    out_of_memory: bool | None
    """Whether memory ran out; null = unknown."""
    predicted: PredictedPart
    """Its prediction without these trials."""
    calibrated: PredictedPart | None
    """Its prediction with constants that were fitted to these trials; null = no trial has a time."""


class Errors(ClosedModel):
    """Errors of predictions of measured trials."""

    mean_error: float
    """Mean of |predicted / measured - 1|."""
    spearman: float | None
    """Rank correlation of predicted and measured times; null = too few trials."""
    top1_regret: float | None
    """How much slower the trial that was predicted best is than the best, as a share of the best; null = too few."""


class TrialDocument(Document):
    """Answer of `trial`."""

    command: Literal["trial"] = "trial"
    trials: str
    """File that has the trials, for `--calibrate`."""
    entries: list[TrialResult]
    """All trials of this model, cluster, precision and batch in the file, in its order."""
    errors: Errors | None
    """Errors of `predicted`; null = no trial has a time."""
    errors_calibrated: Errors | None
    """Errors of `calibrated`, which was fitted to these trials."""
