"""Seconds of an iteration of ZeRO 3 with Ulysses, by the op times and links that price our own strategies.

Each of R ranks computes its tokens of every layer, and a part of the heads for all tokens. A layer's weights are
gathered before its forward and again before its backward, and its gradients reduced behind it; all of that runs under
the ops of other layers (`cost.step_costs`, `shards_weights`). Four exchanges turn parts of tokens into parts of heads:
queries, keys and values there, the output back. The recomputation repeats them, and gradients go the other way.
Copies of checkpoints to the host and back wait for each other and for the layer: memory there is not page-locked
(ArcticTraining, `monkey_patches.py`, `CheckpointFunctionWithCPUOffload`). MLPs run in tiles of h tokens, and forward
three times: the tiled backward repeats what the recomputation has just computed (DeepSpeed, `TiledMLP`).
"""

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.search.cost.cost_model import CostModel
from megatron_terapipe.search.cost.links.rank_groups import ALONE, GroupTopology, LayerLinks, RankGroups
from megatron_terapipe.search.cost.stage_ops import layer_ops
from megatron_terapipe.search.cost.step_costs import CoveringOps, StepCosts, shown_reduction_s, step_costs
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
    """Seconds of one iteration by what they are spent on; they add up to it."""

    compute_s: float
    """Ops of all layers, with recomputation."""
    exchange_s: float
    """Exchanges between parts of tokens and parts of heads."""
    gather_s: float
    """Gathers of weights and reductions of gradients that no op hides."""
    copy_s: float
    """Copies of checkpoints between device and host."""
    optimizer_s: float
    """The step, with the copies of gradients and weights that it needs on the host."""
    fixed_s: float
    """What an iteration takes however small it is."""

    @property
    def total_s(self) -> float:
        """The iteration."""
        return float(sum(getattr(self, each.name) for each in fields(self)))


class _Ops(NamedTuple):
    """Seconds of layers on one rank."""

    forward: float = 0.0
    backward: float = 0.0
    """Of a micro-batch, with what is computed again."""
    exchange: float = 0.0
    """How much of both is head exchanges, a third of it in the forward."""

    def plus(self, other: "_Ops", times: float = 1.0) -> "_Ops":
        """Return these and others, so many times."""
        return _Ops(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))


class RivalTimes:
    """Prices ways to run one model on one cluster."""

    def __init__(self, cost_model: CostModel) -> None:
        """Prepare.

        Args:
            cost_model: of our own strategies; its model, cluster and constants are taken.
        """
        self._model = cost_model
        self._workload = cost_model.workload
        self._efficiency = cost_model.efficiency
        self._op_times = Roofline(cost_model.efficiency, ALST, cost_model.precision)
        self._known_ops: dict[tuple[int, int, GroupTopology], _Ops] = {}
        """By ranks of a sequence, sequences, and the links between these ranks."""

    def price(self, settings: RivalSettings) -> RivalTime:
        """Return the seconds of an iteration."""
        micro_batches, efficiency = settings.num_micro_batches, self._efficiency
        ops = self._of_micro_batch(settings)
        ranks = self._model.groups_of(ParallelLayout(data_parallel_size=settings.num_ranks))
        step = self._step(ranks)
        nodes = [self._model.cluster.nodes[index] for index in set(ranks.nodes.reshape(-1).tolist())]
        to_host = min(node.host.bandwidth for node in nodes) * efficiency.host_efficiency
        part = NUMBER * self._workload.parameters / settings.num_ranks
        if settings.offloads_weights:
            # A rank's part of the weights comes from the host before it is gathered.
            step = step._replace(weight_gather=step.weight_gather + part / to_host)
        covering = CoveringOps(
            completing=0.0,
            forward=ops.forward - ops.exchange / 3,
            backward=ops.backward - ops.exchange * 2 / 3,
            layers=float(len(self._workload.layers)),
            num_micro_batches=micro_batches,
        )
        copied = optimizer_s = 0.0
        if settings.offloads_checkpoints:
            copied = 2 * self._checkpoint_bytes(settings) / (to_host * PAGEABLE_SHARE)
        if settings.offloads_optimizer:
            # Gradients go to the host after each micro-batch, and weights come back.
            stepping = self._workload.parameters / len(nodes) / HOST_STEP_PARAMETERS_PER_S
            optimizer_s = stepping + (micro_batches + 1) * part / to_host
        return RivalTime(
            compute_s=micro_batches * (ops.forward + ops.backward - ops.exchange),
            exchange_s=micro_batches * ops.exchange,
            gather_s=float(shown_reduction_s(step, covering, ALST.communication, efficiency)),
            copy_s=micro_batches * copied,
            optimizer_s=optimizer_s or float(step.optimizer),
            fixed_s=efficiency.iteration_s,
        )

    def _step(self, ranks: RankGroups) -> StepCosts:
        return step_costs(
            float(self._workload.parameters),
            0.0,
            ranks.data.at(0),
            ranks.ends.at(0),
            min(reachable_bandwidth(device) for device in ranks.devices[0]),
            zero_stage=1,
            precision=self._model.precision,
            software=ALST,
            efficiency=self._efficiency,
        )

    def _of_micro_batch(self, settings: RivalSettings) -> _Ops:
        """Seconds of all layers on the slowest device."""
        data, sequence = settings.data_parallel_size, settings.sequence_parallel_size
        groups = self._model.groups_of(ParallelLayout(data_parallel_size=data, sequence_parallel_size=sequence))
        key = sequence, settings.micro_batch_size, groups.sequence.at(0)
        if key not in self._known_ops:
            on_devices = (self._on(device, *key) for device in groups.devices[0])
            self._known_ops[key] = max(on_devices, key=lambda ops: ops.forward + ops.backward)
        return self._known_ops[key]

    def _on(self, device: Device, sequence: int, micro_batch: float, topology: GroupTopology) -> _Ops:
        """Seconds of all layers on a device."""

        def ops(layer: Layer, sequences: float) -> _Ops:
            """Seconds of one layer; blocks are computed again in the backward, with their exchanges."""
            query = LayerQuery(
                layer,
                device,
                tensor_parallel_size=1.0,
                sequence_parallel_size=float(sequence),
                micro_batch_size=sequences,
                start=0.0,
                end=float(layer.tokens),
                recompute="full",
            )
            found = layer_ops(
                query, self._op_times, self._efficiency, LayerLinks(ALONE, topology), ALST.communication, NUMBER
            )
            return _Ops(float(found.forward), float(found.backward), float(found.head_exchange))

        total = _Ops()
        for layer, count in Counter(self._workload.layers).items():
            rest, mlp = parts(layer)
            total = total.plus(ops(rest, micro_batch), count)
            if mlp is not None:
                tiles = max(micro_batch * mlp.tokens / sequence / mlp.hidden_size, 1.0)
                tile = ops(mlp, micro_batch / tiles)
                # The tiled backward runs the forward once more.
                total = total.plus(tile, count * tiles).plus(_Ops(backward=tile.forward), count * tiles)
        return total

    def _checkpoint_bytes(self, settings: RivalSettings) -> float:
        """Bytes of the inputs of all blocks on a rank."""
        sequences = settings.micro_batch_size / settings.sequence_parallel_size
        blocks = (layer for layer in self._workload.layers if layer.kind == "block")
        return sum(NUMBER * sequences * layer.output_elements for layer in blocks)


def parts(layer: Layer) -> tuple[Layer, Layer | None]:
    """Return a layer without its MLP, and the MLP alone; None if it has none."""
    if not layer.activation_width:
        return layer, None
    of_attention = 2 if layer.attention is not None else 0
    rest = replace(layer, products=layer.products[:of_attention], activation_width=0)
    mlp = replace(
        layer, products=layer.products[of_attention:], attention=None, num_norms=0, num_biases=0, rotary_channels=0
    )
    return rest, mlp
