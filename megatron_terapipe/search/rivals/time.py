"""Seconds of an iteration of ZeRO 3 with Ulysses, by the op times and links that price our own strategies.

Each of R ranks computes its tokens of every layer, and a part of the heads for all tokens. A layer's weights are
gathered before its forward and again before its backward, and its gradients reduced behind it; all of that runs under
the ops of other layers (`cost.step_costs`, `shards_weights`). Four exchanges turn parts of tokens into parts of heads:
queries, keys and values there, the output back. The recomputation repeats them, and gradients go the other way.
Copies of checkpoints to the host and back wait for each other and for the layer: memory there is not page-locked
(ArcticTraining, `monkey_patches.py`, `CheckpointFunctionWithCPUOffload`). MLPs run in tiles of h tokens, and forward
three times: the tiled backward repeats what the recomputation has just computed (DeepSpeed, `TiledMLP`).
"""

from dataclasses import dataclass, fields, replace
from functools import cache

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.search.cost.collectives import all_to_all_s
from megatron_terapipe.search.cost.cost_model import CostModel
from megatron_terapipe.search.cost.rank_groups import ALONE, LayerLinks, RankGroups
from megatron_terapipe.search.cost.stage_ops import layer_ops
from megatron_terapipe.search.cost.step_costs import CoveringOps, shown_reduction_s, step_costs
from megatron_terapipe.search.inputs.cluster import Device
from megatron_terapipe.search.inputs.layer import Layer
from megatron_terapipe.search.op_times.kernel_efficiency import reachable_bandwidth
from megatron_terapipe.search.op_times.layer_times import LayerQuery
from megatron_terapipe.search.op_times.roofline import Roofline
from megatron_terapipe.search.rivals.memory import NUMBER
from megatron_terapipe.search.rivals.settings import RivalSettings
from megatron_terapipe.search.software.alst import ALST

PAGEABLE_SHARE = 0.25
"""Speed of a copy from or to memory of the host that is not page-locked, in that of one that is. A guess."""

HOST_STEP_PARAMETERS_PER_S = 4e9
"""Parameters that the Adam of one host steps in a second: ten billion took 2.6 s (ZeRO-Offload, arXiv 2101.06840 table
4; from memory)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RivalTime:
    """Seconds of one iteration by what they are spent on; they add up to it.

    Attributes:
        compute_s: ops of all layers, with recomputation.
        exchange_s: exchanges between parts of tokens and parts of heads.
        gather_s: gathers of weights and reductions of gradients that no op hides.
        copy_s: copies of checkpoints between device and host.
        optimizer_s: the step, with the copies of gradients and weights that it needs on the host.
        fixed_s: what an iteration takes however small it is.
    """

    compute_s: float
    exchange_s: float
    gather_s: float
    copy_s: float
    optimizer_s: float
    fixed_s: float

    @property
    def total_s(self) -> float:
        """The iteration."""
        return float(sum(getattr(self, each.name) for each in fields(self)))


class RivalTimes:
    """Prices ways to run one model on one cluster; what they have in common is computed once."""

    def __init__(self, cost_model: CostModel) -> None:
        """Prepare.

        Args:
            cost_model: of our own strategies; its model, cluster and constants are taken.
        """
        self._model = cost_model
        self._workload = cost_model.workload
        self._efficiency = cost_model.efficiency
        self._op_times = Roofline(cost_model.efficiency, ALST, cost_model.precision)
        self.of_blocks = cache(self._of_blocks)
        """Forward and backward seconds of a micro-batch, by tokens of a rank and their sequences' share."""

    def price(self, settings: RivalSettings) -> RivalTime:
        """Return the seconds of an iteration."""
        efficiency, workload = self._efficiency, self._workload
        sequence, micro_batches = settings.sequence_parallel_size, settings.num_micro_batches
        share = settings.micro_batch_size / sequence
        forward, backward = self.of_blocks(share)
        ranks = self._model.groups_of(layout(data=settings.num_ranks))
        step = step_costs(
            float(workload.parameters),
            0.0,
            ranks.data.at(0),
            ranks.ends.at(0),
            min(reachable_bandwidth(device) for device in ranks.devices[0]),
            zero_stage=1,
            precision=self._model.precision,
            software=ALST,
            efficiency=efficiency,
        )
        part = NUMBER * workload.parameters / settings.num_ranks
        locked = self._host_bandwidth(ranks) * efficiency.host_efficiency
        if settings.offloads_weights:
            # A rank's part of the weights comes from the host before it is gathered.
            step = step._replace(weight_gather=step.weight_gather + part / locked)
        covering = CoveringOps(
            completing=0.0,
            forward=forward,
            backward=backward,
            layers=float(len(workload.layers)),
            num_micro_batches=micro_batches,
        )
        copied = 0.0
        if settings.offloads_checkpoints:
            copied = 2 * self._checkpoint_bytes(share) / (locked * PAGEABLE_SHARE)
        optimizer_s = float(step.optimizer)
        if settings.offloads_optimizer:
            hosts = len(set(ranks.nodes.reshape(-1).tolist()))
            # Gradients go to the host after each micro-batch, and weights come back.
            optimizer_s = workload.parameters / hosts / HOST_STEP_PARAMETERS_PER_S + (micro_batches + 1) * part / locked
        exchanges = self._exchange_s(
            share, self._model.groups_of(layout(data=settings.data_parallel_size, sequence=sequence))
        )
        return RivalTime(
            compute_s=micro_batches * (forward + backward),
            exchange_s=micro_batches * exchanges,
            gather_s=float(shown_reduction_s(step, covering, ALST.communication, efficiency)),
            copy_s=micro_batches * copied,
            optimizer_s=optimizer_s,
            fixed_s=efficiency.iteration_s,
        )

    def _of_blocks(self, share: float) -> tuple[float, float]:
        """Forward and backward seconds of all layers on the slowest device, for a share of a sequence."""
        devices = {node.device for node in self._model.cluster.nodes}
        return max((self._on(device, share) for device in devices), key=sum)

    def _on(self, device: Device, share: float) -> tuple[float, float]:
        forward = backward = 0.0
        for layer, count in self._kinds().items():
            there, back = self._layer(layer, device, share)
            forward, backward = forward + count * there, backward + count * back
        return forward, backward

    def _kinds(self) -> dict[Layer, int]:
        kinds: dict[Layer, int] = {}
        for layer in self._workload.layers:
            kinds[layer] = kinds.get(layer, 0) + 1
        return kinds

    def _layer(self, layer: Layer, device: Device, share: float) -> tuple[float, float]:
        """Forward and backward seconds of a layer for a share of a sequence, with what is computed again."""
        if layer.kind != "block":
            return self._ops(layer, device, share)
        attention, mlp = parts(layer)
        forward, backward = self._ops(attention, device, share)
        if mlp is not None:
            tokens = share * layer.tokens
            tiles = max(tokens / layer.hidden_size, 1.0)
            there, back = self._ops(mlp, device, share / tiles)
            forward, backward = forward + tiles * there, backward + tiles * (back + there)
        return forward, backward + forward

    def _ops(self, layer: Layer, device: Device, share: float) -> tuple[float, float]:
        """Seconds of forward and backward; a rank's part of a sequence is as much work as that share of sequences."""
        query = LayerQuery(
            layer,
            device,
            tensor_parallel_size=1.0,
            micro_batch_size=share,
            start=0.0,
            end=float(layer.tokens),
        )
        ops = layer_ops(query, self._op_times, self._efficiency, LayerLinks(ALONE), ALST.communication, NUMBER)
        return float(ops.forward), float(ops.backward)

    def _exchange_s(self, share: float, groups: RankGroups) -> float:
        """Seconds of all exchanges of a micro-batch: of the forward, once more, and of the gradients."""
        topology = groups.tensor.at(0)
        seconds = 0.0
        for layer in self._workload.layers:
            if layer.attention is None or topology.size == 1:
                continue
            numbers = NUMBER * share * layer.tokens * layer.attention.head_size
            copies = max(float(topology.size) / layer.attention.key_value_heads, 1.0)
            queries, keys = numbers * layer.attention.query_heads, numbers * layer.attention.key_value_heads * copies
            for num_bytes in (queries, keys, keys, queries):
                seconds += 3 * float(all_to_all_s(num_bytes, topology, self._efficiency))
        return seconds

    def _checkpoint_bytes(self, share: float) -> float:
        """Bytes of the inputs of all blocks on a rank."""
        blocks = (layer for layer in self._workload.layers if layer.kind == "block")
        return sum(NUMBER * share * layer.output_elements for layer in blocks)

    def _host_bandwidth(self, groups: RankGroups) -> float:
        """Bytes per second of the slowest link between a device and its host."""
        return min(self._model.cluster.nodes[node].host.bandwidth for node in set(groups.nodes.reshape(-1).tolist()))


def layout(*, data: int, sequence: int = 1) -> ParallelLayout:
    """Return the layout of a rival, whose ranks of a sequence stand next to each other, as tensor-parallel ranks do.

    Args:
        data: groups of ranks that share a sequence.
        sequence: ranks of a group.
    """
    return ParallelLayout(data_parallel_size=data, tensor_parallel_size=sequence)


def parts(layer: Layer) -> tuple[Layer, Layer | None]:
    """Return a block without its MLP, and the MLP alone; None if it has none."""
    if not layer.activation_width:
        return layer, None
    of_attention = 2 if layer.attention is not None else 0
    rest = replace(layer, products=layer.products[:of_attention], activation_width=0, num_biases=0)
    mlp = replace(
        layer, products=layer.products[of_attention:], attention=None, num_norms=0, num_biases=0, rotary_channels=0
    )
    return rest, mlp
