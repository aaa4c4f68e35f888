"""The price of one strategy: its time on the real schedule, and its memory."""

from deepspeed_ext.plan.programs.copy_lanes import HostCopyPlan
from deepspeed_ext.plan.schedules import OPTIMISED
from megatron_terapipe.search.cost.cost_model import CostModel
from megatron_terapipe.search.cost.memory.overheads import MemoryOverheads, default_overheads
from megatron_terapipe.search.cost.memory.peaks import MemoryModel
from megatron_terapipe.search.cost.prediction import Prediction, RankMemory
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.workload import Workload
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.layer_times import OpTimes
from megatron_terapipe.search.software.description import Software
from megatron_terapipe.search.software.terapipe import TERAPIPE
from megatron_terapipe.strategy import Strategy

__all__ = ["Pricing"]

GIB = 2**30


class Pricing:
    """Prices strategies of one model on one cluster, time and memory."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        *,
        software: Software = TERAPIPE,
        efficiency: HardwareEfficiency | None = None,
        memory_overheads: MemoryOverheads | None = None,
        op_times: OpTimes | None = None,
        precision: str = "bf16",
        measured_cluster: Cluster | None = None,
    ) -> None:
        """Prepare.

        Args:
            efficiency: what is reached of data sheets; None = the defaults.
            memory_overheads: what no count of tensors says; None = the defaults of its devices.
            op_times: times of layers; None = the roofline.
            precision: `bf16`, `fp16` or `fp32`.
            measured_cluster: the same nodes with links as they were measured; None = as data sheets say.
        """
        self.workload = workload
        self.cluster = cluster
        self.cost_model = CostModel(
            workload,
            measured_cluster or cluster,
            software=software,
            efficiency=efficiency,
            op_times=op_times,
            precision=precision,
        )
        self.memory_model = MemoryModel(
            workload=workload,
            cluster=cluster,
            software=software,
            precision=precision,
            overheads=memory_overheads or default_overheads(cluster, software),
        )

    def predict(self, strategy: Strategy, memory: tuple[RankMemory, ...] | None = None) -> Prediction:
        """Price one strategy.

        Args:
            memory: memory of each pipeline rank, if it is known already.

        Raises:
            ConfigError: if it does not fit the cluster or the model.
            PlanError: if its schedule does not take its shape.
        """
        time = self.cost_model.predict_time(strategy)
        return Prediction(
            iteration_time_s=time.iteration_time_s,
            bubble_ratio=time.bubble_ratio,
            breakdown=time.breakdown,
            memory=memory or self.memory(strategy),
            notes=time.notes,
        )

    def memory(self, strategy: Strategy) -> tuple[RankMemory, ...]:
        """Return the peak memory of each pipeline rank; what waits on hosts is not on its device meanwhile.

        Raises:
            ConfigError: if it does not fit the cluster or the model.
        """
        return self.memory_model.predict(strategy, copies=self.host_copies(strategy))

    def host_copies(self, strategy: Strategy) -> HostCopyPlan | None:
        """Return what waits on hosts until every rank has reached its peak; None where nothing does.

        What an `optimised` order lets wait is not known before it is found: its memory counts as if nothing did, which
        is more than it needs.
        """
        if not strategy.offload or strategy.schedule == OPTIMISED:
            return None
        return self.cost_model.host_copies(strategy, self.memory_model.micro_batches_of_peak(strategy))

    def why_it_does_not_fit(
        self, strategy: Strategy, memory: tuple[RankMemory, ...], headroom: float = 0.0
    ) -> str | None:
        """Return which pipeline rank needs more memory than its smallest device has; None if none does.

        Args:
            memory: memory of each pipeline rank.
            headroom: share of each device that must stay free.
        """
        usable_share = self.memory_model.overheads.usable_share * (1 - headroom)
        kept_free = f", {100 * headroom:.3g} % kept free" if headroom else ""
        for rank, devices in enumerate(self.cost_model.groups(strategy).devices):
            smallest = min(devices, key=lambda device: device.memory_bytes)
            usable, needed = usable_share * smallest.memory_bytes, memory[rank].total
            if needed > usable:
                return (
                    f"out of memory: pipeline rank {rank} needs {needed / GIB:.1f} GiB of {usable / GIB:.1f} GiB "
                    f"({smallest.name}{kept_free})"
                )
        return None
