"""The advice in a JSON document: what to change, and what to doubt."""

from megatron_terapipe.search.rank.distance_to_fit import RemedyKind
from megatron_terapipe.search.report.schema.schema_parts import MemoryObject, Part, StrategyObject


class TooFullPart(Part):
    """The fastest strategy that fits the devices and does not leave the headroom free."""

    strategy: StrategyObject
    """The strategy."""
    iteration_time_s: float
    """Predicted seconds of one iteration."""
    left_free: float
    """Share of the fullest device that it leaves free."""
    could_save: float | None
    """Share of the winner's time that it would save; null = nothing leaves the headroom free."""


class FoundOrderPart(Part):
    """The winner with an order of its ops that was searched for."""

    strategy: StrategyObject
    """The strategy, with the schedule `optimised`."""
    iteration_time_s: float
    """Predicted seconds of one iteration."""
    peak_memory_bytes: float
    """Bytes on the fullest device."""
    could_save: float
    """Share of the winner's time that it saves."""


class FewerDevicesPart(Part):
    """A part of the cluster, and the best strategy found on it."""

    num_devices: int
    """Devices of the part, as `--devices-at-most` takes them."""
    nodes: list[str]
    """Names of its nodes."""
    strategy: StrategyObject
    """The strategy."""
    iteration_time_s: float
    """Predicted seconds of one iteration."""
    time_ratio: float
    """The same in seconds of the winner on all devices; below 1 fewer devices are faster."""
    cost_ratio: float
    """Seconds x devices in those of the winner; below 1 fewer devices are cheaper for each token."""


class OtherWinnerPart(Part):
    """A constant of the cost model with which another strategy is better than the winner."""

    constant: str
    """Name of the constant."""
    change: float
    """By how much it is moved, as a share of it."""
    strategy: StrategyObject | None
    """What is better then; null = nothing that was compared fits the devices then."""
    regret: float
    """How much longer the winner takes then, as a share; for memory, how much longer what fits takes."""
    is_memory: bool
    """Whether it is a constant of the memory, with which the winner does not fit the devices."""


class SensitivityPart(Part):
    """The constants that decide who wins."""

    changes: list[OtherWinnerPart]
    """Constants that change the winner if they are 10 % off, those with the largest regret first."""
    nearest: OtherWinnerPart | None
    """Where there are none, the constant that changes it first, about; null = none within a factor of two."""
    num_constants: int
    """Constants that were moved."""
    num_contenders: int
    """Strategies that were compared."""


class UtilizationPart(Part):
    """An MFU that nobody has published, and what it rests on."""

    predicted: float
    """MFU of the winner."""
    predicted_causal: float
    """The same without the scores that causal attention never computes."""
    published: float
    """The best published MFU for such devices."""
    published_causal: float
    """The same run without these scores."""
    published_run: str
    """The run that it was."""
    constant: str | None
    """Constant of the cost model that moves the time most; null = the causal MFU is one that was published."""
    value: float | None
    """What it is; null = there is none."""
    needed: float | None
    """What it would have to be for the published MFU; null = no value of it alone does that, or there is none."""


class RemedyPart(Part):
    """One change with which the model fits."""

    kind: RemedyKind
    """What is changed."""
    value: int | str
    """Devices, tokens or sequences; the dimension whose flag is dropped, empty = all of them."""
    strategy: StrategyObject
    """A strategy that then fits."""


class DistancePart(Part):
    """How far the model is from fitting."""

    strategy: StrategyObject
    """The strategy nearest to fitting."""
    pipeline_rank: int
    """The pipeline rank that is too full."""
    memory: MemoryObject
    """Bytes that it needs, by what they hold."""
    device: str
    """Its smallest device."""
    usable_bytes: float
    """Bytes of it that may be used."""
    device_bytes: float
    """Memory of a device that it would fit."""
    remedies: list[RemedyPart]
    """Single changes with which a strategy fits, each the smallest that was found."""


class RivalPart(Part):
    """What a user would run in place of this trainer, priced by the same constants."""

    name: str
    """What it is."""
    trainer: str
    """Who runs it so."""
    sequence_parallel_size: int
    """Ranks that share the tokens of a sequence, and the heads of its attention."""
    data_parallel_size: int
    """Groups of such ranks, each with sequences of its own; together they may be fewer than the devices."""
    micro_batch_size: int
    """Sequences of a group at once."""
    on_host: list[str]
    """What is kept in the host's memory: `checkpoints`, `optimizer`, `weights`."""
    iteration_time_s: float
    """Predicted seconds of one iteration."""
    breakdown: dict[str, float]
    """These seconds by what they are spent on."""
    time_ratio: float | None
    """The same in seconds of the winner; below 1 the rival is faster; null = nothing of ours fits."""
    mfu_causal: float | None
    """FLOPs of the model over the peak of the devices in use, counted as `mfu_causal` of entries is."""
    device_bytes: float
    """Bytes of a device."""
    host_bytes: float
    """Bytes of a host."""
    why_not: str | None
    """Why it does not fit; null = it fits."""


class AdvicePart(Part):
    """What to change, and what to doubt."""

    memory_headroom: float
    """Share of each device that every ranked strategy leaves free."""
    too_full: TooFullPart | None
    """A faster strategy without headroom; null = there is none."""
    fewer_devices: list[FewerDevicesPart]
    """Parts of the cluster that were tried, largest first."""
    sensitivity: SensitivityPart | None
    """Constants that decide who wins; null = there is no winner."""
    utilization: UtilizationPart | None
    """Null = the MFU of the winner is at most 3 points above the best published, or none is known."""
    distance_to_fit: DistancePart | None
    """Null = the model fits, or memory is not the reason why nothing can run."""
    rivals: list[RivalPart]
    """What would be run in place of this trainer; empty where sequences are short, or `--no-rivals` was given."""
    found_order: FoundOrderPart | None
    """The winner with an order of its ops that was searched for; null = none saves time, or none was looked for."""
