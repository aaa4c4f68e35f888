"""The prediction for a strategy: seconds and bytes, and their parts."""

from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["Prediction", "RankMemory", "TimeBreakdown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeBreakdown:
    """Seconds of one iteration on the busiest pipeline rank; they add up to the iteration."""

    compute_s: float
    """Its ops, without collectives between ranks that share its layers."""
    tensor_parallel_s: float
    """Collectives between tensor-parallel ranks, inside its ops."""
    head_exchange_s: float = 0.0
    """Head exchanges between sequence-parallel ranks, inside its ops."""
    expert_exchange_s: float = 0.0
    """Exchanges of tokens between expert-parallel ranks, inside its ops; left out of JSON objects where it is 0."""
    host_copy_s: float = 0.0
    """Waiting for copies from hosts."""
    bubble_s: float
    """Waiting for other pipeline ranks; transfers that no op hides are in `transfer_s`."""
    transfer_s: float
    """Messages between stages that no op hides."""
    gradient_reduction_s: float
    """Data-parallel reductions (ZeRO: reduce-scatter and all-gather) that no op hides."""
    shared_weight_s: float
    """Reductions of the tied embedding between its stages."""
    optimizer_s: float
    """Norm of the gradient and optimizer step."""
    fixed_s: float
    """Fixed time of an iteration, whatever its size."""

    @property
    def total_s(self) -> float:
        """The iteration."""
        return float(sum(getattr(self, each.name) for each in fields(self)))


OPTIONAL_PARTS = ("expert_exchange_s",)
"""Parts of an iteration that JSON objects leave out where they are 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Peak bytes of one pipeline rank (its largest tensor-, sequence- and data-parallel peer), by kind."""

    weights: float
    """Parameters as products read them."""
    gradients: float
    """Their gradients."""
    optimizer: float
    """Fp32 copies and moments that this rank keeps."""
    activations: float
    """Kept from forward to backward, without keys and values."""
    key_values: float
    """Keys and values of live token slices, and their gradients."""
    logits: float
    """Logits, and the tensors that the loss keeps."""
    buffers: float
    """Of transfers and reductions, and temporary memory of ops."""
    framework: float
    """Context of the device, communicators, fragmentation of the allocator."""

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(getattr(self, each.name) for each in fields(self)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One strategy, priced."""

    iteration_time_s: float
    bubble_ratio: float
    """Idle time / (pipeline ranks x makespan)."""
    breakdown: TimeBreakdown
    memory: tuple[RankMemory, ...]
    network_s: float = 0.0
    """Seconds of all messages between nodes on the pipeline rank with most of them, hidden or not: its traffic."""
    interval_s: tuple[float, float] | None = None
    """Shortest and longest that `interval_coverage` of iterations take; None = no interval is known."""
    interval_coverage: float = 0.9
    """Share of measurements that shall be inside, such as 0.9."""
    simulated: bool = True
    """Whether the real schedule was simulated; else priced in closed form."""
    notes: tuple[str, ...] = ()
    """Extrapolations and other warnings, a line each."""

    @property
    def peak_memory_bytes(self) -> float:
        """Bytes of the fullest rank."""
        return max((rank.total for rank in self.memory), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of a prediction."""
        found = asdict(self) | {"peak_memory_bytes": self.peak_memory_bytes}
        del found["memory"], found["network_s"]
        found["memory_per_rank"] = [{**asdict(rank), "total": rank.total} for rank in self.memory]
        for name in OPTIONAL_PARTS:
            if not found["breakdown"][name]:
                del found["breakdown"][name]
        return found
