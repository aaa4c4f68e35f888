"""The best way to run a rival: the fastest that fits, or the one that is nearest to fitting."""

from dataclasses import dataclass

from megatron_terapipe.search.cost.memory.overheads import MemoryOverheads, default_overheads
from megatron_terapipe.search.cost.pricing import Pricing
from megatron_terapipe.search.rivals.memory import RivalMemory, rival_memory
from megatron_terapipe.search.rivals.settings import RivalSettings, all_settings
from megatron_terapipe.search.rivals.time import RivalTime, RivalTimes
from megatron_terapipe.search.software.alst import ALST

LONG_SEQUENCE = 32_768
"""Tokens from which a sequence is long: below, ZeRO 3 recomputes for nothing, and `--software fsdp` prices it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimits:
    """Bytes that may be used."""

    device: float
    host: float
    """Of the host with the least."""
    ranks_of_host: int
    """Devices of a full host."""

    def fullness(self, memory: RivalMemory) -> float:
        """Share that is used of what may be, on the device or on the host, whichever is fuller; it fits up to 1."""
        return max(memory.device / self.device, memory.host / self.host)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """A way to run ZeRO 3 with Ulysses, priced."""

    settings: RivalSettings
    time: RivalTime
    """Seconds of an iteration."""
    memory: RivalMemory
    """Bytes on a device and on a host."""
    limits: MemoryLimits
    """Bytes that may be used."""

    @property
    def fits(self) -> bool:
        """Whether devices and hosts have the memory."""
        return self.limits.fullness(self.memory) <= 1


def has_rival(pricing: Pricing) -> bool:
    """Whether the rival can be priced, and says something: for a GPT in bf16 on GPUs, with a long sequence."""
    cluster, workload = pricing.cluster, pricing.workload
    return (
        workload.config is not None
        and workload.seq_length >= LONG_SEQUENCE
        and pricing.cost_model.precision == "bf16"
        and all(node.device.is_gpu for node in cluster.nodes)
    )


def best_rival(pricing: Pricing, global_batch_size: int, *, headroom: float = 0.0) -> Rival | None:
    """Return the fastest way to run ZeRO 3 with Ulysses that fits, else the one nearest to fitting.

    None if there is no way: its ranks cannot share the heads, or the batch.

    Args:
        pricing: of our own strategies; its model, cluster and constants are taken.
        headroom: share of each device that stays free.
    """
    workload, cluster = pricing.workload, pricing.cluster
    overheads = default_overheads(cluster, ALST)
    limits = memory_limits(pricing, overheads, headroom)
    held = {
        settings: rival_memory(workload, settings, overheads, min(limits.ranks_of_host, settings.num_ranks))
        for settings in all_settings(workload, cluster.num_devices, global_batch_size)
    }
    if not held:
        return None
    fitting = [settings for settings, memory in held.items() if limits.fullness(memory) <= 1]
    times = RivalTimes(pricing.cost_model)
    nearest = min(held, key=lambda settings: limits.fullness(held[settings]))
    priced = {settings: times.price(settings) for settings in fitting or [nearest]}
    fastest = min(priced, key=lambda settings: priced[settings].total_s)
    return Rival(settings=fastest, time=priced[fastest], memory=held[fastest], limits=limits)


def memory_limits(pricing: Pricing, overheads: MemoryOverheads, headroom: float) -> MemoryLimits:
    """Return the bytes that may be used.

    Args:
        overheads: say what part of a device predictions may fill.
        headroom: share of each device that stays free.
    """
    nodes = pricing.cluster.nodes
    return MemoryLimits(
        device=min(node.device.memory_bytes for node in nodes) * overheads.usable_share * (1 - headroom),
        host=min(node.host.memory_bytes for node in nodes),
        ranks_of_host=max(node.num_devices for node in nodes),
    )
