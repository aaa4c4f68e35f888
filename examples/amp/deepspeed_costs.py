"""Costs of DeepSpeed 0.3.13 with Megatron-LM 1.1.5 outside of ops, as AMP's trials ran it.

Facts of its source (deepspeed/runtime/pipe/engine.py and p2p.py, deepspeed/runtime/engine.py), none of them fitted:

  * A message between stages is a broadcast in a group of two. Its sender continues as soon as it is in the buffers of
    the communicator, its receiver waits without computing.
  * The attention mask goes along with each activation, not with gradients. Tensor-parallel ranks send their part of an
    activation each, its sizes, and all of the mask; the next stage gathers the parts.
  * Gradients are not parted (`is_grad_partitioned` is False): every tensor-parallel rank sends all of the gradient. The
    stage that gets it has parted its activation, and gathers that again before its backward.
  * Gradients are reduced in single precision (`fp32_allreduce`) after the last backward; the tied embedding's in
    half precision between first and last stage. There is no ZeRO and no recomputation.

Forward times come from the profiles of AMP's repository. AMP (Li et al., "AMP: Automatically Finding Model Parallel
Strategies with Heterogeneity Awareness", NeurIPS 2022,
github.com/DachengLi1/AMP) keeps in `src/known_cost` a vector for each model, device and tensor-parallel size: seconds
of the forward of one sequence through each DeepSpeed pipeline layer, on one node, reductions included, with a
synchronisation after every layer (its `deepspeed/runtime/pipe/module.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.costs import OpCosts, TransferCosts
from megatron_terapipe.devices import Device
from megatron_terapipe.errors import DataError
from megatron_terapipe.search.machine.trainers import DEEPSPEED
from megatron_terapipe.search.price.cost_model import CostModel, Prediction, TimeBreakdown
from megatron_terapipe.search.price.layer_times import LayerQuery
from megatron_terapipe.search.price.links import RankGroups, all_gather_s, transfer_s
from megatron_terapipe.search.price.stages import pipeline_shape
from megatron_terapipe.search.price.step import StepCosts
from megatron_terapipe.search.price.workload import Layer
from megatron_terapipe.strategy import Strategy

FOLDER = Path("src", "known_cost")
TENSOR_PARALLEL_SIZES = (1, 2, 4)

NUM_LAYERS: Mapping[str, int] = MappingProxyType({"gpt2_G4": 30, "gpt2_P3": 30, "transgan_P3": 56})
"""Pipeline layers of each profile: the model, then the EC2 instances that it was measured on."""

LayerSeconds = tuple[Mapping[int, float], ...]
"""Per layer the seconds of its forward, by tensor-parallel size."""


def read_profile(repository: Path, name: str) -> LayerSeconds:
    """Read a profile for every tensor-parallel size that AMP measured.

    Raises:
        DataError: if a file is missing, cannot be read, or holds anything but one positive time per layer.
    """
    by_size = {
        size: _read(repository / FOLDER / f"{name}_{size}.npy", NUM_LAYERS[name]) for size in TENSOR_PARALLEL_SIZES
    }
    return tuple(
        MappingProxyType({size: seconds[layer] for size, seconds in by_size.items()})
        for layer in range(NUM_LAYERS[name])
    )


def unthrottled(layers: Sequence[Layer], seconds: LayerSeconds) -> Mapping[str, Mapping[int, float]]:
    """Seconds of the forward by layer name and tensor-parallel size; equal blocks have the time of the fastest.

    The last of the 24 equal blocks took a T4 18 % longer than the first: the profile has no waits, so that the
    power limit lowers the clock while it runs. In training the clock recovers in bubbles and reductions. Blocks of a
    V100, which stays below its limit, differ by 3 %.
    """
    fastest: dict[Layer, Mapping[int, float]] = {}
    keys = [replace(layer, name="") if layer.kind == "block" else layer for layer in layers]
    for key, by_size in zip(keys, seconds, strict=True):
        least = fastest.get(key, by_size)
        fastest[key] = {size: min(least[size], each) for size, each in by_size.items()}
    return {layer.name: fastest[key] for layer, key in zip(layers, keys, strict=True)}


def _read(path: Path, num_layers: int) -> list[float]:
    import numpy as np

    if not path.is_file():
        raise DataError(
            f"{path}: there is no such file: give a checkout of AMP's repository, the folder that holds {FOLDER}"
        )
    try:
        times = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: not an array that numpy can read ({error}): check the file out again") from None
    if times.dtype.kind != "f":
        raise DataError(f"{path}: holds {times.dtype}, and times are floating-point numbers: check the file out again")
    if times.shape != (num_layers,):
        raise DataError(
            f"{path}: has shape {times.shape}, and this model has {num_layers} layers, so that it must be "
            f"({num_layers},): check the file out again"
        )
    wrong = np.flatnonzero(~(np.isfinite(times) & (times > 0)))
    if wrong.size:
        raise DataError(
            f"{path}: entry {wrong[0]} is {times[wrong[0]]}, and a time is finite and above 0: check the file out again"
        )
    return [float(time) for time in times]


Floats = NDArray[np.float64]

REDUCTION_BYTES = 4
"""Bytes of an entry of a gradient on its way."""

AMP_DEEPSPEED = replace(
    DEEPSPEED,
    name="deepspeed-0.3.13",
    communication=replace(DEEPSPEED.communication, reduction_bytes=REDUCTION_BYTES),
)
"""Gradients travel in single precision; the rest as Megatron does."""

BUFFERED_BYTES = 2 * 4 * 2**20
"""Bytes that the buffers between two ranks take: two channels of 4 MiB (NCCL user guide, NCCL_BUFFSIZE)."""
# With tensor parallelism, messages of 2 and 4 MiB between a p3 and a g4dn were some 50 ms slower a sequence in AMP's
# trials, and those of 8 MiB were not. No source explains it (examples/README.md), so that nothing here models it.

SHARED_WEIGHT_BYTES = 2
"""Bytes of an entry of the tied embedding's gradient on its way."""


class Messages(NamedTuple):
    """Seconds of the messages of one micro-batch, [boundaries, L], or only of one layer before each boundary."""

    there: Floats
    """Of an activation and its mask."""
    back: Floats
    holding_there: Floats
    """For which the activation keeps its sender."""
    holding_back: Floats
    """For which the gradient does."""


class DeepSpeedCosts(CostModel):
    """The product's cost model with the messages and reductions of DeepSpeed 0.3.13.

    Layers are priced once for each device, messages once for each layout.
    """

    def __init__(self, *given: Any, published: Mapping[str, LayerSeconds], **options: Any) -> None:
        """Prepare.

        Args:
            published: AMP's profiles by name of the device, as it reads them itself.
        """
        super().__init__(*given, **options)
        self.published = published
        """AMP's profiles by name of the device."""
        self._layers: dict[tuple[object, ...], tuple[Floats, Floats]] = {}
        self._messages_of: dict[tuple[object, ...], Messages] = {}

    def predict_time(
        self, strategy: Strategy, *, activation_limit: float | None = None, of_interest_s: float = inf
    ) -> Prediction:
        """Price one strategy on its real schedule; see `CostModel.predict_time`."""
        step = self.end_of_iteration(strategy)
        each = (self._with_replicas(strategy, groups, step) for groups in self.groups(strategy).by_replica)
        return max(each, key=lambda time: time.iteration_time_s)

    def _with_replicas(self, strategy: Strategy, groups: RankGroups, step: StepCosts) -> Prediction:
        """Time with the devices and links of one kind of replica."""
        shape = pipeline_shape(strategy)
        stages = self.stages(strategy)
        forward, backward = self._computing_s(strategy, stages, groups)
        costs = self._with_messages(strategy, stages, forward, backward, groups)
        makespan = self.simulator.simulate(strategy.schedule, shape, costs).makespan
        micro_batches, computing = shape.num_micro_batches, forward + backward
        busy = np.array(costs.forward)[:, 0] + np.array(costs.backward)[:, 0]
        busiest = int(np.argmax(busy))
        breakdown = TimeBreakdown(
            compute_s=micro_batches * float(computing[busiest]),
            tensor_parallel_s=0.0,
            bubble_s=max(makespan - micro_batches * float(busy[busiest]), 0.0),
            transfer_s=micro_batches * float(busy[busiest] - computing[busiest]),
            gradient_reduction_s=float(np.max(step.gradient_reduction)),
            shared_weight_s=float(np.max(step.shared_weight)),
            optimizer_s=float(np.max(step.optimizer)),
            fixed_s=self.efficiency.iteration_s,
        )
        return Prediction(
            iteration_time_s=breakdown.total_s,
            bubble_ratio=max(1 - micro_batches * float(computing.sum()) / (len(computing) * makespan), 0.0),
            breakdown=breakdown,
            memory=(),
            notes=("reductions between tensor-parallel ranks are in compute_s, as in the measured profile",),
        )

    def pipeline_costs(self, strategy: Strategy) -> OpCosts:
        """Seconds of ops per stage, with the messages that keep them waiting."""
        stages, groups = self.stages(strategy), self.groups(strategy)
        return self._with_messages(strategy, stages, *self._computing_s(strategy, stages, groups), groups)

    def layer_times_s(self, strategy: Strategy, groups: RankGroups | None = None) -> tuple[Floats, Floats]:
        """[stages, L] seconds of the forward, and of the backward, of one micro-batch.

        Args:
            groups: devices of the stages, of which the slowest counts; None = of all replicas.
        """
        rows = []
        for devices in (groups or self.groups(strategy)).devices:
            by_device = [self._on_device(device, strategy) for device in devices]
            rows.append(max(by_device, key=lambda times: float(times[0].sum() + times[1].sum())))
        forward, backward = zip(*rows, strict=True)
        return np.array(forward), np.array(backward)

    def messages_s(self, strategy: Strategy, groups: RankGroups | None = None) -> "Messages":
        """Seconds of messages if a layer is the last before a boundary.

        Args:
            groups: links of the stages, of which the slowest count; None = of all replicas.
        """
        tensor, ranks = strategy.tensor_parallel_size, strategy.pipeline_parallel_size
        groups = groups or self.groups(strategy)
        key = (groups.layout, groups.placement, groups.replicas, strategy.micro_batch_size)
        known = self._messages_of.get(key)
        if known is not None:
            return known
        layers = self.workload.layers
        activation = (
            self.element_bytes * strategy.micro_batch_size * np.array([each.output_elements for each in layers])
        )
        mask = self.element_bytes * np.array([each.extra_output_elements for each in layers])
        links = groups.pipe.at((slice(0, ranks - 1), None))

        def sent(num_bytes: Floats) -> Floats:
            return np.asarray(transfer_s(num_bytes, links, self.efficiency))

        part = activation / tensor
        there, back = sent(part) + np.where(mask > 0, sent(mask), 0.0), sent(activation)
        # The sender waits for the bytes beyond the communicator's buffers.
        over = sent(np.zeros(len(layers)))
        holding_there = sent(np.maximum(part + mask - BUFFERED_BYTES, 0.0)) - over
        holding_back = sent(np.maximum(activation - BUFFERED_BYTES, 0.0)) - over
        if tensor > 1:
            of_rank = (groups.tensor.at(rank) for rank in range(ranks))
            gathered = np.array([all_gather_s(activation, each, self.efficiency) for each in of_rank])
            # The sizes of the parts are a message of their own. Parts are gathered where an activation arrives, and
            # where its gradient does.
            there, back = there + over + gathered[1:], back + gathered[:-1]
        messages = Messages(there, back, holding_there, holding_back)
        self._messages_of[key] = messages
        return messages

    def _on_device(self, device: Device, strategy: Strategy) -> tuple[Floats, Floats]:
        """[L] seconds of forward and backward."""
        key = device.name, strategy.tensor_parallel_size, strategy.micro_batch_size
        known = self._layers.get(key)
        if known is None:
            ops = [
                self.op_times(
                    LayerQuery(
                        layer,
                        device,
                        tensor_parallel_size=float(strategy.tensor_parallel_size),
                        micro_batch_size=float(strategy.micro_batch_size),
                        start=0.0,
                        end=float(layer.tokens),
                    )
                )
                for layer in self.workload.layers
            ]
            forward = np.array([float(op.forward) for op in ops])
            backward = np.array([float(op.input_gradient + op.weight_gradient) for op in ops])
            known = self._layers[key] = forward, backward
        return known

    def _computing_s(self, strategy: Strategy, stages: list[range], groups: RankGroups) -> tuple[Floats, Floats]:
        """[stages] seconds of forward and backward of one micro-batch."""
        starts = np.array([layers.start for layers in stages])
        of_stage = np.arange(len(stages))
        forward, backward = (
            np.add.reduceat(times, starts, axis=1)[of_stage, of_stage] for times in self.layer_times_s(strategy, groups)
        )
        return forward, backward

    def _with_messages(
        self, strategy: Strategy, stages: list[range], forward: Floats, backward: Floats, groups: RankGroups
    ) -> OpCosts:
        forward, backward = forward.copy(), backward.copy()
        transfer: float | TransferCosts = 0.0
        if len(stages) > 1:
            last = [layers[-1] for layers in stages[:-1]]
            each = Messages(*(times[np.arange(len(last)), last] for times in self.messages_s(strategy, groups)))
            forward[:-1] += each.holding_there
            backward[1:] += each.holding_back
            # The plan has one size for messages both ways: their mean takes as long there and back.
            travelling = (each.there + each.back - each.holding_there - each.holding_back) / 2
            transfer = TransferCosts(
                latency=(0.0,) * len(last),
                bandwidth=tuple((1 / travelling).tolist()),
                message_bytes=(1.0,),
            )
        return OpCosts(tuple((time,) for time in forward), tuple((time,) for time in backward), None, transfer)

    def stages(self, strategy: Strategy) -> list[range]:
        """Return the indices of the layers of each stage."""
        return self.workload.stages(self.workload.partition(strategy.stage_partition, strategy.pipeline_parallel_size))

    def end_of_iteration(self, strategy: Strategy) -> StepCosts:
        """Return the costs at the end of the iteration, arrays of [stages] seconds."""
        ranks = strategy.pipeline_parallel_size
        partition = self.workload.partition(strategy.stage_partition, ranks)
        counts = self.counter.count(partition, ranks, strategy.tensor_parallel_size)
        step = self.step([counts], self.groups(strategy), strategy.zero_stage)
        return step._replace(shared_weight=step.shared_weight * (SHARED_WEIGHT_BYTES / REDUCTION_BYTES))
