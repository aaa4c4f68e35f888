"""AMP's three experiments: model, cluster, batch, profiles, and the reached share of the hardware.

No constant was fitted to AMP's trials. Sources of those that are not of data sheets:

  * links: NCCL over TCP passes about 4.7 GB/s however fast the card is (github.com/NVIDIA/nccl/issues/398 and /209, on
    EC2), which is 0.75 of 50 Gbit/s; 10 Gbit/s is passed at line rate, less the headers of Ethernet and TCP.
  * matrix products and memory: round shares of the peaks; the measured profiles set the scale, see `MeasuredLayers`.
    They have the losses of small matrices in them, so that the roofline's are left out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from examples.amp import clusters, models
from examples.amp.deepspeed_costs import AMP_DEEPSPEED, DeepSpeedCosts, read_profile, unthrottled
from examples.amp.measured_layers import MeasuredDevice, MeasuredLayers
from megatron_terapipe.search.machine.cluster import Cluster, Node
from megatron_terapipe.search.machine.software import Operator, Software
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.search.price.roofline import Roofline
from megatron_terapipe.search.price.workload import Workload

PRECISION = "fp16"
TENSOR_PARALLEL_SIZES = (1, 2, 4)

_REACHED = replace(
    HardwareEfficiency(),
    gemm_efficiency=0.75,
    gemm_depth=0.0,
    gemm_area=0.0,
    attention_efficiency=0.35,
    memory_efficiency=0.75,
    whole_loss_factor=1.0,
    inside_efficiency=0.65,
    transfer_inside_efficiency=0.65,
    collective_s=20e-6,
    transfer_s=30e-6,
    optimizer_passes=2.0,
    iteration_s=0.01,
)

FAST_NETWORK = replace(_REACHED, network_efficiency=0.75, transfer_network_efficiency=0.75)
"""50 Gbit/s and TCP."""

SLOW_NETWORK = replace(_REACHED, network_efficiency=0.92, transfer_network_efficiency=0.92)
"""10 Gbit/s and TCP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """One of the three."""

    name: str
    """As on the command line."""
    workload: Callable[[], Workload]
    cluster: Callable[[], Cluster]
    global_batch_size: int
    """Sequences of one iteration."""
    profiles: Mapping[str, Node]
    """Name of AMP's profile, and the node that it was measured on."""
    efficiency: HardwareEfficiency
    """Reached share of the hardware."""
    software: Software = AMP_DEEPSPEED

    def pricing(self, repository: Path) -> Pricing:
        """Prices of strategies.

        Raises:
            DataError: if it lacks a profile.
        """
        workload, cluster = self.workload(), self.cluster()
        published = {node.device.name: read_profile(repository, name) for name, node in self.profiles.items()}
        measured = {
            node.device.name: MeasuredDevice(
                device=node.device,
                roofline=Roofline(self.efficiency, self.software, PRECISION),
                inside=node.inside,
                forward_s=unthrottled(workload.layers, published[node.device.name]),
            )
            for node in self.profiles.values()
        }
        op_times = MeasuredLayers(workload=workload, devices=measured)
        software, efficiency = self.software, self.efficiency
        pricing = Pricing(
            workload, cluster, software=software, efficiency=efficiency, op_times=op_times, precision=PRECISION
        )
        pricing.cost_model = DeepSpeedCosts(
            workload,
            cluster,
            published=published,
            software=software,
            efficiency=efficiency,
            op_times=op_times,
            precision=PRECISION,
        )
        return pricing


# Always both profiles of GPT-2: the time of the faster device is a limit of the launch time on the slower one.
_GPT2_PROFILES = MappingProxyType({"gpt2_G4": clusters.g4dn(0), "gpt2_P3": clusters.p3(0)})

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {
        "homogeneous": Experiment(
            name="homogeneous",
            workload=models.gpt2,
            cluster=clusters.homogeneous,
            global_batch_size=32,
            profiles=_GPT2_PROFILES,
            efficiency=FAST_NETWORK,
        ),
        "het_cluster": Experiment(
            name="het_cluster",
            workload=models.gpt2,
            cluster=clusters.het_cluster,
            global_batch_size=32,
            profiles=_GPT2_PROFILES,
            efficiency=SLOW_NETWORK,
        ),
        "het_model": Experiment(
            name="het_model",
            workload=models.transgan,
            cluster=clusters.het_model,
            global_batch_size=64,
            profiles=MappingProxyType({"transgan_P3": clusters.p3(0)}),
            efficiency=SLOW_NETWORK,
            # A generator without dropout is an assumption; the peaks of memory then agree with the trials that ran.
            software=replace(
                AMP_DEEPSPEED,
                operators=replace(AMP_DEEPSPEED.operators, residual=Operator(forward=3, backward=4.5)),
                attention=replace(AMP_DEEPSPEED.attention, keeps_dropped=False),
                residual_dropout=False,
            ),
        ),
    }
)
"""By name."""
