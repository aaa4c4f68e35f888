"""Prices of ZeRO 3 with Ulysses (DeepSpeed's ALST), for the advice when not to use this trainer.

    all_settings -> rival_memory, RivalTimes -> best_rival: the fastest that fits, or the nearest to fitting

Bytes. Each of R ranks keeps an R-th of weights, gradients and optimizer state. A layer is recomputed from its input,
of 2h bytes for each token (arXiv 2506.13996 section 3). A rank needs the most in the
backward of one attention, whose heads have all tokens. With n = tokens of a rank, u = 2nh bytes of a hidden state and
q = 2nd a bytes of its queries (a heads of d numbers) there are

    5 u      input of the layer, both norms, the residual, and the gradient of the residual
    q        output of attention, as the product after it reads it
    2 q      queries and output, as FlashAttention's backward reads them
    2 q      gradient of the output, before and after the exchange; one where there is none
    q + 2 q  gradient of the queries, and its sum in fp32 (`dq_accum` of flash_attn 2)
    4 k      keys, values and their gradients, k = 2nd x heads of keys, copied where ranks are more than these
    2 q      gradients of keys and values for each head of queries, where heads of keys are fewer
    4na      logarithms of the softmax' sums

With h = da that is 15 u + 4 k. `tests/search/rank/test_rivals.py` holds it against ArcticTraining's longest sequences.

Seconds, by the op times and links that price our own strategies. Each rank computes its tokens of every layer, and a
part of the heads for all tokens. A layer's weights are gathered before its forward and again before its backward, and
its gradients reduced after it; all of that runs under the ops of other layers (ZeRO 3). Four exchanges turn
parts of tokens into parts of heads: queries, keys and values there, the output back. The recomputation repeats them,
and gradients go the other way. Copies of checkpoints to the host and back wait for each other and for the layer: memory
there is not page-locked (ArcticTraining, `monkey_patches.py`, `CheckpointFunctionWithCPUOffload`). MLPs run in tiles of
h tokens, and forward three times: the tiled backward repeats the recomputation (DeepSpeed, `TiledMLP`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.config.flops import LOG_SUM_EXP_BYTES
from megatron_terapipe.devices import Device
from megatron_terapipe.search.machine.trainers import ALST
from megatron_terapipe.search.price.cost_model import CostModel, Pricing
from megatron_terapipe.search.price.efficiency import reachable_bandwidth
from megatron_terapipe.search.price.layer_times import LayerQuery
from megatron_terapipe.search.price.links import ALONE, GroupTopology, LayerLinks, ShardLinks
from megatron_terapipe.search.price.memory import MemoryOverheads, default_overheads
from megatron_terapipe.search.price.roofline import Roofline
from megatron_terapipe.search.price.stages import LayerPrices
from megatron_terapipe.search.price.step import CoveringOps, exposed_reduction_s, step_costs
from megatron_terapipe.search.price.workload import Attention, Layer, Workload
from megatron_terapipe.search.rank.space import SearchProblem, divisors


@dataclass(frozen=True, kw_only=True, slots=True)
class RivalSettings:
    """One way to run it."""

    sequence_parallel_size: int
    """Ranks that share the tokens of a sequence, and the heads of its attention."""
    data_parallel_size: int
    """Groups of such ranks, each with its own sequences."""
    micro_batch_size: int
    num_micro_batches: int
    """Of each group in an iteration."""
    on_host: tuple[str, ...] = ()
    """Kept in the host's memory: `checkpoints` (inputs of layers), `optimizer` (gradients and state; the host steps),
    `weights` (the ranks' parts of them)."""

    @property
    def num_ranks(self) -> int:
        """Ranks that it uses, which divide the weights among themselves."""
        return self.sequence_parallel_size * self.data_parallel_size

    @property
    def num_sequences(self) -> int:
        """Sequences of one optimizer step."""
        return self.data_parallel_size * self.micro_batch_size * self.num_micro_batches


ON_HOST = (
    (),
    ("checkpoints",),
    ("optimizer",),
    ("checkpoints", "optimizer"),
    ("optimizer", "weights"),
    ("checkpoints", "optimizer", "weights"),
)
"""Combinations that are tried; the recipes move weights last."""


def all_settings(workload: Workload, num_devices: int, global_batch_size: int) -> Iterator[RivalSettings]:
    """Yield every way to run a model on as many devices as it can use.

    A group has at most as many ranks as the attention has heads, and needs a sequence: a small batch leaves devices
    unused. Only sizes that use most of them are tried.
    """
    sizes = [
        (sequence, data)
        for sequence in divisors(num_devices)
        if _can_share(workload, sequence)
        for data in divisors(num_devices // sequence)
        if global_batch_size % data == 0
    ]
    most = max((sequence * data for sequence, data in sizes), default=0)
    for sequence, data in sizes:
        if sequence * data < most:
            continue
        of_group = global_batch_size // data
        for micro_batch, on_host in product(divisors(of_group), ON_HOST):
            yield RivalSettings(
                sequence_parallel_size=sequence,
                data_parallel_size=data,
                micro_batch_size=micro_batch,
                num_micro_batches=of_group // micro_batch,
                on_host=on_host,
            )


def _can_share(workload: Workload, ranks: int) -> bool:
    """Whether ranks can share a sequence: its tokens, and all heads as `UlyssesSPAttentionHF` asks for.

    Heads of keys are copied where ranks are more.
    """
    attentions = {layer.attention for layer in workload.layers if layer.attention is not None}
    return workload.seq_length % ranks == 0 and all(
        each.query_heads % ranks == 0 and (each.key_value_heads % ranks == 0 or ranks % each.key_value_heads == 0)
        for each in attentions
    )


NUMBER = 2  # bytes of a number in bf16
OPTIMIZER_BYTES = 12  # bytes of a parameter's copy in fp32 and of its two moments (arXiv 1910.02054 section 3.1)

BUCKET_ELEMENTS = 500_000_000
"""Elements of the bucket in which gradients are reduced (`reduce_bucket_size` of DeepSpeed)."""

HOST_PARAMETER_BYTES = 26
"""Bytes of the host for each parameter whose optimizer is there. 16 are counted: copy, moments and gradient in fp32.
The rest is fitted to the longest sequences of Llama-70B on 8 to 64 H100, one of which is at the limit of the host's
memory; page-locked buffers are rounded up to powers of two."""

GATHERED_LAYERS = 2  # layers whose weights are whole at once: one computes, the next is gathered


@dataclass(frozen=True, kw_only=True, slots=True)
class RivalMemory:
    """Bytes on one device, which add up, and on the fullest host."""

    states: float
    """Parts of weights, gradients and optimizer state."""
    gathered: float
    """Weights of whole layers, their gradients, and the bucket."""
    checkpoints: float
    """Inputs of all layers, where they stay on the device."""
    working: float
    """Bytes of the backward of one layer."""
    framework: float
    """Context of the device and communicators."""
    host: float
    """Bytes on one host."""

    @property
    def device(self) -> float:
        """Bytes on one device."""
        return float(sum(getattr(self, each.name) for each in fields(self) if each.name != "host"))


def rival_memory(
    workload: Workload, settings: RivalSettings, overheads: MemoryOverheads, ranks_of_host: int
) -> RivalMemory:
    """Return the bytes of a way to run a model."""
    parameters = workload.parameters
    part = parameters / settings.num_ranks
    tokens = settings.micro_batch_size * workload.seq_length / settings.sequence_parallel_size
    on_host = settings.on_host
    weights = NUMBER * ("weights" not in on_host)
    stepped = (NUMBER + OPTIMIZER_BYTES) * ("optimizer" not in on_host)
    whole = max(layer.parameters for layer in workload.layers)
    checkpoints = sum(tokens * NUMBER * layer.hidden_size for layer in workload.layers if layer.kind == "block")
    working = max(working_bytes(layer, tokens, settings.sequence_parallel_size) for layer in workload.layers)
    held = checkpoints * ("checkpoints" in on_host) + part * (
        HOST_PARAMETER_BYTES * ("optimizer" in on_host) + NUMBER * ("weights" in on_host)
    )
    communicators = (settings.num_ranks > 1) + (settings.sequence_parallel_size > 1)
    return RivalMemory(
        states=overheads.state_factor * part * (weights + stepped),
        gathered=NUMBER * (GATHERED_LAYERS * whole + min(BUCKET_ELEMENTS, parameters)),
        checkpoints=overheads.activation_factor * checkpoints * ("checkpoints" not in on_host),
        working=overheads.activation_factor * working,
        framework=overheads.framework_bytes + communicators * overheads.communicator_bytes,
        host=ranks_of_host * held,
    )


def working_bytes(layer: Layer, tokens: float, sequence_parallel_size: int) -> float:
    """Return the bytes that the backward of one layer holds on a rank, at its fullest.

    Args:
        sequence_parallel_size: ranks that share them.
    """
    hidden = tokens * NUMBER * layer.hidden_size
    if layer.kind != "block":
        # Hidden states and gradients around the head; its logits are computed as many numbers at a time.
        return 6 * hidden
    # Tiles of h tokens: the numbers between its products, and their gradients.
    tile = min(tokens, layer.hidden_size) * NUMBER * 2 * (2 + layer.gated) * layer.activation_width
    if layer.attention is None:
        return 5 * hidden + tile
    return 5 * hidden + max(attention_bytes(layer.attention, tokens, sequence_parallel_size), tile)


def attention_bytes(attention: Attention, tokens: float, sequence_parallel_size: int) -> float:
    """Return the bytes that the backward of one attention holds on a rank, as the text above counts them.

    Args:
        sequence_parallel_size: ranks that share them.
    """
    copies = max(sequence_parallel_size / attention.key_value_heads, 1.0)
    queries = tokens * NUMBER * attention.query_heads * attention.head_size
    keys = tokens * NUMBER * attention.key_value_heads * copies * attention.head_size
    grouped = attention.query_heads > attention.key_value_heads * copies
    logarithms = tokens * LOG_SUM_EXP_BYTES * attention.query_heads
    return (7 + (sequence_parallel_size > 1) + 2 * grouped) * queries + 4 * keys + logarithms


PAGEABLE_SHARE = 0.25
"""Speed of a copy from or to memory of the host that is not page-locked, in that of one that is. A guess."""

HOST_STEP_PARAMETERS_PER_S = 4e9
"""Parameters that the Adam of one host steps in a second: ten billion took 2.6 s (ZeRO-Offload, arXiv 2101.06840 table
4; from memory)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RivalTime:
    """Seconds of one iteration by their cause; they add up to it."""

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
    """Fixed cost of an iteration."""

    @property
    def total(self) -> float:
        """The iteration."""
        return float(sum(getattr(self, each.name) for each in fields(self)))


Ops = NDArray[np.float64]
"""[3] seconds of layers on one rank: forward; backward of a micro-batch, with recomputation; and the head exchanges in
both, a third of them in the forward."""


class RivalTimes:
    """Prices ways to run one model on one cluster."""

    def __init__(self, cost_model: CostModel) -> None:
        self._model = cost_model
        self._workload = cost_model.workload
        self._efficiency = cost_model.efficiency
        self._op_times = Roofline(cost_model.efficiency, ALST, cost_model.precision)
        self._known_ops = cache(self._ops)

    def price(self, settings: RivalSettings) -> RivalTime:
        """Return the seconds of an iteration."""
        micro_batches, efficiency = settings.num_micro_batches, self._efficiency
        forward, backward, exchange = self._of_micro_batch(settings).tolist()
        ranks = self._model.groups_of(ParallelLayout(data_parallel_size=settings.num_ranks))
        step = step_costs(
            float(self._workload.parameters),
            0.0,
            ShardLinks(ranks.data.at(0)),
            ranks.ends.at(0),
            min(reachable_bandwidth(device) for device in ranks.devices[0]),
            zero_stage=3,
            precision=self._model.precision,
            software=ALST,
            efficiency=efficiency,
        )
        nodes = [self._model.cluster.nodes[index] for index in set(ranks.nodes.reshape(-1).tolist())]
        to_host = min(node.host.bandwidth for node in nodes) * efficiency.host_efficiency
        part = NUMBER * self._workload.parameters / settings.num_ranks
        if "weights" in settings.on_host:
            # A rank's part of the weights comes from the host before it is gathered.
            step = step._replace(weight_gather=step.weight_gather + part / to_host)
        covering = CoveringOps(
            completing=0.0,
            forward=forward - exchange / 3,
            backward=backward - exchange * 2 / 3,
            layers=float(len(self._workload.layers)),
            num_micro_batches=micro_batches,
        )
        copied = optimizer_s = 0.0
        if "checkpoints" in settings.on_host:
            sequences = settings.micro_batch_size / settings.sequence_parallel_size
            blocks = (layer for layer in self._workload.layers if layer.kind == "block")
            inputs = sum(NUMBER * sequences * layer.output_elements for layer in blocks)
            copied = 2 * inputs / (to_host * PAGEABLE_SHARE)
        if "optimizer" in settings.on_host:
            # Gradients go to the host after each micro-batch, and weights come back.
            stepping = self._workload.parameters / len(nodes) / HOST_STEP_PARAMETERS_PER_S
            optimizer_s = stepping + (micro_batches + 1) * part / to_host
        return RivalTime(
            compute_s=micro_batches * (forward + backward - exchange),
            exchange_s=micro_batches * exchange,
            gather_s=float(exposed_reduction_s(step, covering, ALST.communication, efficiency, zero_stage=3)),
            copy_s=micro_batches * copied,
            optimizer_s=optimizer_s or float(step.optimizer),
            fixed_s=efficiency.iteration_s,
        )

    def _of_micro_batch(self, settings: RivalSettings) -> Ops:
        """Seconds of all layers on the slowest device."""
        data, sequence = settings.data_parallel_size, settings.sequence_parallel_size
        groups = self._model.groups_of(ParallelLayout(data_parallel_size=data, sequence_parallel_size=sequence))
        size, topology = settings.micro_batch_size, groups.sequence.at(0)
        on_devices = (self._known_ops(device, sequence, size, topology) for device in groups.devices[0])
        return max(on_devices, key=lambda ops: float(ops[0] + ops[1]))

    def _ops(self, device: Device, sequence: int, micro_batch: float, topology: GroupTopology) -> Ops:
        """Seconds of all layers on a device."""

        def ops(layer: Layer, sequences: float) -> Ops:
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
            prices = LayerPrices(self._op_times, self._efficiency, NUMBER, ALST.communication)
            found = prices.of_layer(query, LayerLinks(ALONE, topology))
            return np.array([found.forward, found.backward, found.head_exchange], dtype=float)

        total = np.zeros(3)
        for layer, count in Counter(self._workload.layers).items():
            rest, mlp = parts(layer)
            total += count * ops(rest, micro_batch)
            if mlp is not None:
                tiles = max(micro_batch * mlp.tokens / sequence / mlp.hidden_size, 1.0)
                tile = ops(mlp, micro_batch / tiles)
                # The tiled backward runs the forward once more.
                total += count * tiles * tile
                total[1] += count * tiles * tile[0]
        return total


def parts(layer: Layer) -> tuple[Layer, Layer | None]:
    """Return a layer without its MLP, and the MLP; None if it has none."""
    if not layer.activation_width:
        return layer, None
    of_attention = 2 if layer.attention is not None else 0
    rest = replace(layer, products=layer.products[:of_attention], activation_width=0)
    mlp = replace(
        layer, products=layer.products[of_attention:], attention=None, num_norms=0, num_biases=0, rotary_channels=0
    )
    return rest, mlp


LEAST_TOKENS = 32_768
"""Tokens of a sequence from which a rival is priced: in shorter ones recomputation is useless, and `--software fsdp`
prices ZeRO 3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """A way to run ZeRO 3 with Ulysses, priced."""

    settings: RivalSettings
    time: RivalTime
    memory: RivalMemory
    device_limit: float
    """Bytes that may be used of a device."""
    host_limit: float
    """Bytes of the host with the least."""

    @property
    def fits(self) -> bool:
        """Whether devices and hosts have the memory."""
        return self.memory.device <= self.device_limit and self.memory.host <= self.host_limit


def rival_of(problem: SearchProblem, pricing: Pricing) -> Rival | None:
    """Return the best rival; None but for a GPT without experts in bf16 on GPUs with a long sequence."""
    workload = problem.workload
    if (
        workload.config is None
        or workload.experts is not None
        or workload.seq_length < LEAST_TOKENS
        or problem.precision != "bf16"
    ):
        return None
    if not all(node.device.is_gpu for node in problem.cluster.nodes):
        return None
    return best_rival(pricing, problem.global_batch_size, headroom=problem.memory_headroom)


def best_rival(pricing: Pricing, global_batch_size: int, *, headroom: float = 0.0) -> Rival | None:
    """Return the fastest way to run ZeRO 3 with Ulysses that fits, else the one nearest to fitting.

    None if there is no way: its ranks cannot share the heads, or the batch. Model, cluster and constants are those of
    our own strategies; `headroom` is the share of each device that stays free.
    """
    workload, nodes = pricing.workload, pricing.cluster.nodes
    overheads = default_overheads(pricing.cluster, ALST)
    device_limit = min(node.device.memory_bytes for node in nodes) * overheads.usable_share * (1 - headroom)
    host_limit = min(node.host.memory_bytes for node in nodes)
    ranks_of_host = max(node.num_devices for node in nodes)
    held = {
        settings: rival_memory(workload, settings, overheads, min(ranks_of_host, settings.num_ranks))
        for settings in all_settings(workload, pricing.cluster.num_devices, global_batch_size)
    }
    if not held:
        return None
    fullness = {
        settings: max(memory.device / device_limit, memory.host / host_limit) for settings, memory in held.items()
    }
    fitting = [settings for settings in held if fullness[settings] <= 1] or [min(held, key=fullness.__getitem__)]
    times = RivalTimes(pricing.cost_model)
    priced = {settings: times.price(settings) for settings in fitting}
    fastest = min(priced, key=lambda settings: priced[settings].total)
    return Rival(
        settings=fastest,
        time=priced[fastest],
        memory=held[fastest],
        device_limit=device_limit,
        host_limit=host_limit,
    )
