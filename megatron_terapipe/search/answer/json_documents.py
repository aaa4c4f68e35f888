"""The JSON documents of the search: classes whose fields are the keys, written by all commands with `--json`.

Programs read these documents. A key that goes away, or means something else, makes another `SCHEMA_VERSION`; a new key
does not.
"""

from dataclasses import fields
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from megatron_terapipe.search.machine.entries import ClosedModel
from megatron_terapipe.search.price.cost_model import OPTIONAL_PARTS, TimeBreakdown
from megatron_terapipe.search.price.memory import RankMemory
from megatron_terapipe.search.rank.space import MEMORY_HEADROOM

Amount = Annotated[float, Field(ge=0, le=1e40)]
"""Seconds, bytes or bytes per second. Their sums have no overflow."""


def _with_all_fields(kind: type[Any], *more: str) -> AfterValidator:
    """Return a validator of objects that have the fields of a dataclass as keys, and `more`."""
    required = [name for name in (*(each.name for each in fields(kind)), *more) if name not in OPTIONAL_PARTS]

    def whole(amounts: dict[str, float]) -> dict[str, float]:
        if missing := [name for name in required if name not in amounts]:
            raise ValueError(f"{missing[0]} is missing")
        return amounts

    return AfterValidator(whole)


StrategyObject = dict[str, Any]
"""A strategy, as `--strategies` and the trainer's `--strategy` read it."""

BreakdownObject = Annotated[dict[str, Amount], _with_all_fields(TimeBreakdown)]
"""Seconds of an iteration by their cause."""

MemoryObject = Annotated[dict[str, Amount], _with_all_fields(RankMemory, "total")]
"""Bytes of a pipeline rank by their use, and their sum."""


class AlternativePart(ClosedModel):
    """Another strategy than the winner."""

    strategy: StrategyObject
    iteration_time_s: float


class TooFullPart(AlternativePart):
    """The fastest strategy that fits the devices and does not leave the headroom free."""

    left_free: float
    """Share of the fullest device that it leaves free."""
    could_save: float | None
    """Share of the winner's time that it would save; null = no strategy leaves the headroom free."""


class FoundOrderPart(AlternativePart):
    """The winner with an order of its ops that was searched for: with the schedule `optimised`."""

    peak_memory_bytes: float
    """Bytes on the fullest device."""
    could_save: float
    """Share of the winner's time that it saves."""


class FewerDevicesPart(AlternativePart):
    """A part of the cluster, and the best strategy found on it."""

    num_devices: int
    nodes: list[str]
    time_ratio: float
    """The same in seconds of the winner on all devices; below 1 fewer devices are faster."""
    cost_ratio: float
    """Seconds x devices, relative to the winner; below 1 fewer devices need less device time for each token."""
    device_hours_ratio: dict[str, float]
    """The same for each kind of device of the cluster; 0 = the part has none."""
    price_ratio: float | None
    """Price of a token, relative to the winner; null = no prices are given."""


class OtherWinnerPart(ClosedModel):
    """A constant of the cost model with which another strategy is better than the winner."""

    constant: str
    change: float
    """As a share of the constant: its uncertainty."""
    strategy: StrategyObject | None
    """The better strategy then; null = none of those that were compared fits the devices then."""
    regret: float
    """How much longer the winner takes then, as a share; for memory, how much longer the one that fits takes."""
    is_memory: bool
    """Whether it is a constant of the memory, with which the winner does not fit the devices."""


class NetworkPart(ClosedModel):
    """A bandwidth from which the winner changes."""

    bandwidth: float
    """Bytes per second of all network cards of a node, from which another strategy is more than 1 % faster."""
    strategy: StrategyObject | None
    """The fastest at the last bandwidth that was tried, a quarter of the given or four times as much."""
    regret: float
    """How much longer the winner takes there, as a share."""


class SensitivityPart(ClosedModel):
    """The constants that decide the winner."""

    changes: list[OtherWinnerPart]
    """Constants that change the winner by more than 1 %, those with the largest regret first."""
    network: list[NetworkPart]
    """Bandwidths of a node's network cards, at most one below and one above the given, that change it so."""
    network_bandwidth: float | None
    """The given bytes per second of the slowest node, of which a quarter to four times were tried. Null = known, or
    there is one node."""
    num_constants: int
    num_contenders: int


class UtilizationPart(ClosedModel):
    """An MFU above all published ones."""

    predicted: float
    predicted_causal: float
    """The same without the scores that causal attention never computes."""
    published: float
    published_causal: float
    published_run: str
    published_time_s: float | None
    """Seconds of an iteration at that causal MFU; null = it is no less than the predicted one."""


RemedyKind = Literal["devices", "seq_length", "global_batch_size", "key_value_gradients", "constraint"]


class RemedyPart(ClosedModel):
    """One change with which the model fits."""

    kind: RemedyKind
    value: int | str
    """Devices, tokens or sequences; the dimension whose flag is dropped, empty = all of them."""
    strategy: StrategyObject
    """A strategy that then fits."""


class DistancePart(ClosedModel):
    """How far the model is from fitting."""

    strategy: StrategyObject
    pipeline_rank: int
    memory: MemoryObject
    """Bytes that it needs, by their use."""
    device: str
    usable_bytes: float
    """Bytes of it that may be used."""
    device_bytes: float
    """Memory of a device that it would fit."""
    fits_with_optimizer_on_host: bool
    """Whether it fits with the optimizer state of each device in the memory of its host."""
    remedies: list[RemedyPart]
    """Single changes with which a strategy fits, each the smallest that was found."""

    @property
    def fullness(self) -> float:
        """Needed memory as a share of the usable one; it fits up to 1."""
        return self.memory["total"] / self.usable_bytes


class TrainerPart(ClosedModel):
    """The best strategy of another trainer on all devices, found by the same search with the same constants."""

    software: str
    title: str
    strategy: StrategyObject | None
    """Null = none can run."""
    iteration_time_s: float | None
    interval_s: tuple[float, float] | None
    memory: MemoryObject | None
    """Bytes of the fullest device, by their use."""
    on_host: list[str]
    """Offloaded to the host: `checkpoints`, `optimizer`, `weights`."""
    why_not: str | None
    """Why it does not fit, or none can run; null = it fits."""
    measured_run: str | None
    """Published run of a model of this kind, dense or with experts, on each kind of device; null = none is known."""


class AdvicePart(ClosedModel):
    """Possible changes, and doubts."""

    memory_headroom: float = MEMORY_HEADROOM
    """Share of each device that every ranked strategy leaves free."""
    too_full: TooFullPart | None = None
    """A faster strategy without headroom; null = there is none."""
    fewer_devices: list[FewerDevicesPart] = Field(default_factory=list)
    """Parts of the cluster that were tried, largest first."""
    sensitivity: SensitivityPart | None = None
    """Constants that decide the winner; null = there is no winner."""
    utilization: UtilizationPart | None = None
    """Null = the MFU of the winner is at most 3 points above the best published, or none is known."""
    distance_to_fit: DistancePart | None = None
    """Null = the model fits, or memory is not the reason why no strategy can run."""
    found_order: FoundOrderPart | None = None
    """The winner with an order of its ops that was searched for; null = none saves time, or none was looked for."""
    interleaved_slices: FoundOrderPart | None = None
    """The best interleaved schedule with token slices on the layout of the winner; null = it saves no time, or rankings
    have it."""


SCHEMA_VERSION: Final = 1
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


class Speed(ClosedModel):
    """Published figures that follow from the time of one iteration."""

    iteration_time_s: Amount
    tokens_per_s: Amount
    tokens_per_s_per_device: Amount
    """The same, divided by the devices in use."""
    tflops_per_device: Amount
    """FLOPs of the model in a second and device, in 10^12, counted as for `mfu`."""
    mfu: Amount | None
    """FLOPs of the model over the peak of the devices in use: each token attends to the whole sequence, without
    recomputation, as most published figures are counted. Null where the peak is a guess."""
    mfu_causal: Amount | None
    """The same, but only scores that are computed are counted: a token attends to itself and those before it, or in its
    window."""
    tflops_per_device_causal: Amount
    """FLOPs of the model in a second and device, in 10^12, counted as for `mfu_causal`."""


class PredictedPart(Speed):
    """PredictedPart cost of a strategy."""

    interval_s: tuple[Amount, Amount] | None
    """Bounds that contain the measured seconds with the probability `interval_coverage`; null = not known."""
    interval_coverage: Amount
    """That probability, in [0, 1]."""
    bubble_ratio: Amount
    """Idle time / (pipeline ranks x makespan), in [0, 1]."""
    peak_memory_bytes: Amount
    """Bytes of the fullest rank; 0 = not predicted."""
    breakdown: BreakdownObject
    """Seconds of the busiest pipeline rank by their cause; they add up to the iteration."""
    memory_per_rank: list[MemoryObject]
    """Peak bytes of each pipeline rank by their use; empty = not predicted."""
    simulated: bool
    """Whether the schedule was simulated; else its time is a closed form."""
    notes: list[str]
    """Warnings about this prediction."""


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

    schema_version: Literal[1] = SCHEMA_VERSION
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
    """Assumptions and warnings, as below the table."""


class Ranking(Document):
    """Strategies with their prices."""

    entries: list[RankedEntry]
    """The strategies: of `rank` best first, of `predict` in the order of their file."""

    @property
    def priced(self) -> list[RankedEntry]:
        """Entries that can run and have a price, best first."""
        return sorted((each for each in self.entries if each.feasible and each.predicted), key=lambda each: each.rank)


class RankDocument(Ranking):
    """Answer of `rank`."""

    command: Literal["rank"] = "rank"
    trainers: list[TrainerPart]
    """Other trainers for the same question; empty on CPUs, or with `--no-rivals`."""
    advice: AdvicePart
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
