"""The JSON documents of the search: their fields, and the JSON Schema that follows from them.

Programs read these documents. A key that goes away, or means something else, makes another `SCHEMA_VERSION`; a new key
does not.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter

from megatron_terapipe.search.report.schema.advice_schema import AdvicePart
from megatron_terapipe.search.report.schema.schema_parts import BreakdownObject, MemoryObject, Part, StrategyObject

SCHEMA_VERSION: Final = 1
"""Version of the documents of all commands."""


class ModelPart(Part):
    """The model."""

    name: str
    """Name of the preset, of the file, or its sizes."""
    parameters: int
    """Parameters, those of a shared weight once."""
    num_layers: int
    """Layers that are dealt to pipeline stages."""
    seq_length: int
    """Tokens of one sequence."""
    settings: dict[str, Any] | None
    """Fields of the trainer's model section, those that follow from others left out: a model file. Null = a model that
    is given layer by layer."""


class ClusterPart(Part):
    """The cluster."""

    name: str
    """Its name."""
    num_nodes: int
    """Nodes."""
    num_devices: int
    """Devices of all nodes."""
    devices: dict[str, int]
    """Number of devices of each kind."""
    nodes: list[dict[str, Any]]
    """Groups of equal nodes, every figure said, as a cluster file has them."""


class Speed(Part):
    """What a time of one iteration means, in the figures that are published."""

    iteration_time_s: float
    """Predicted seconds of one iteration."""
    tokens_per_s: float
    """Tokens trained on in a second."""
    tokens_per_s_per_device: float
    """The same, divided by the devices in use."""
    tflops_per_device: float
    """FLOPs of the model in a second and device, in 10^12, counted as for `mfu`."""
    mfu: float | None
    """FLOPs of the model over the peak of the devices in use, counted as published figures are: each token attends to
    the whole sequence, and nothing is recomputed. Null where the peak is a guess."""
    mfu_causal: float | None
    """The same, but only scores that are computed are counted: a token attends to itself and those before it, or in its
    window."""


class Predicted(Speed):
    """Predicted cost of a strategy."""

    interval_s: tuple[float, float] | None
    """Bounds that contain the measured seconds with the probability `interval_coverage`; null = not known."""
    interval_coverage: float
    """That probability, in [0, 1]."""
    bubble_ratio: float
    """Idle time / (pipeline ranks x makespan), in [0, 1]."""
    peak_memory_bytes: float
    """Bytes of the fullest rank; 0 = not predicted."""
    breakdown: BreakdownObject
    """Seconds of the busiest pipeline rank by what they are spent on; they add up to the iteration."""
    memory_per_rank: list[MemoryObject]
    """Peak bytes of each pipeline rank by what they hold; empty = not predicted."""
    simulated: bool
    """Whether the schedule was simulated; else its time is a closed form."""
    notes: list[str]
    """Warnings about this prediction."""


class Entry(Part):
    """A strategy and its price."""

    rank: int
    """Place in the ranking from 1; strategies that cannot run come last."""
    index: int
    """Place in the file of strategies from 0; in answers of `rank` always 0."""
    strategy: StrategyObject
    """The strategy."""
    predicted: Predicted | None
    """Its cost; null where it cannot be priced."""
    feasible: bool
    """Whether it can run."""
    reason: str | None
    """Why it cannot run; null where it can."""


class SearchPart(Part):
    """What the search did."""

    considered: int
    """Strategies of the whole space."""
    rejected: dict[str, int]
    """How many strategies each rule was the first to reject."""
    priced: int
    """Strategies that were priced in closed form."""
    simulated: int
    """Strategies that were priced on their schedule."""
    proven: bool
    """Whether no other strategy can be faster than the winner, under this model."""
    could_save: float
    """Share of the winner's time that a strategy that was not simulated could save at most."""


class LaunchPart(Part):
    """What runs the winner."""

    command: str | None
    """Its command; null = nothing can launch it."""
    files: list[str]
    """Files that were written."""
    why_not: str | None
    """Why nothing can launch it; null where something can."""


class Document(Part):
    """What the answers of all commands say: the question, and notes on the answer."""

    schema_version: Literal[1] = SCHEMA_VERSION
    """Version of this document."""
    model: ModelPart
    """The model."""
    cluster: ClusterPart
    """The cluster."""
    software: str
    """The trainer that is predicted."""
    precision: str
    """Type of matrix products: `bf16`, `fp16` or `fp32`."""
    global_batch_size: int | None
    """Sequences of one optimizer step; null = each strategy has its own."""
    constraints: dict[str, list[Any]]
    """Values that flags allow for dimensions of the strategy; others are free."""
    notes: list[str]
    """Assumptions and warnings, as they stand below the table."""


class RankDocument(Document):
    """Answer of `rank`."""

    command: Literal["rank"] = "rank"
    """Command that wrote it."""
    entries: list[Entry]
    """The best strategies, best first."""
    advice: AdvicePart
    """What to change, and what to doubt; the notes have it in words."""
    search: SearchPart
    """What the search did."""
    why_none: str | None
    """Why no strategy can run; null where one can."""
    launch: LaunchPart
    """What runs the winner."""


class PredictDocument(Document):
    """Answer of `predict`."""

    command: Literal["predict"] = "predict"
    """Command that wrote it."""
    entries: list[Entry]
    """The strategies in the order of their file."""


class Cut(Speed):
    """Token slices of a sequence, and what they bring."""

    num_token_slices: int
    """Number of token slices."""
    token_slices: list[int]
    """Their lengths in tokens."""
    speedup: float | None
    """Seconds with whole sequences / seconds with these token slices; null = whole sequences were not priced."""


class TokenSlicesDocument(Document):
    """Answer of `slices`."""

    command: Literal["slices"] = "slices"
    """Command that wrote it."""
    strategy: StrategyObject
    """The strategy that was asked about."""
    best: Cut
    """The best token slices."""
    curve: list[Cut]
    """The best token slices of each number that was priced."""
    flags: str
    """Flags of the trainer that ask for the best ones."""


class TrialEntry(Part):
    """A strategy that was run, and its predictions."""

    trial_id: str
    """Its name in the file of trials."""
    strategy: StrategyObject
    """The strategy, its token slices and stages written out."""
    iteration_time_s: float | None
    """Measured seconds of one iteration; null = it failed."""
    peak_memory_bytes: float | None
    """Measured bytes of the fullest device; null = not measured."""
    out_of_memory: bool | None
    """Whether memory ran out; null = not said."""
    predicted: Predicted
    """Its prediction without these trials."""
    calibrated: Predicted | None
    """Its prediction with constants that were fitted to these trials; null = nothing was measured."""


class Errors(Part):
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
    """Command that wrote it."""
    trials: str
    """File that has the trials, for `--calibrate`."""
    entries: list[TrialEntry]
    """All trials of this model, cluster, precision and batch in the file, in its order."""
    errors: Errors | None
    """Errors of `predicted`; null = nothing was measured."""
    errors_calibrated: Errors | None
    """Errors of `calibrated`, which has seen these trials."""


AnyDocument = Annotated[
    RankDocument | PredictDocument | TokenSlicesDocument | TrialDocument, Field(discriminator="command")
]


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the documents of all commands, which `command` tells apart."""
    schema = TypeAdapter(AnyDocument).json_schema(mode="serialization")
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Answer of the strategy search"}
    return {**about, **schema}
