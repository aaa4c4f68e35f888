"""Sums of gradients: over the ranks of one replica once a step, and over replicas during the last backward.

All sums come before DeepSpeed's own reduction over replicas, and find a gradient wherever DeepSpeed accumulates it.
Gradients of one dtype that go the same way travel together: a message for each costs more than its bytes.

- Of torch's own optimizer, which is that of fp32 without ZeRO, every replica needs all of `parameter.grad`.
- `BF16_Optimizer` has a flat buffer of gradients for each group of parameters. Every replica needs all of it, though it
  steps a part: the norm is taken of whole gradients.
- Of ZeRO 1 a replica needs those of `parameter.grad` that its partition of the optimizer's state is for.

The plan names the op that completes the gradients of a stage (`plan.programs.reductions`). Autograd runs that op's
backward layer by layer, last to first. Once a hook on the input of a layer runs, the gradients of that layer and of
those after it are complete:

    forward     embedding -x-> layer 0 -x-> layer 1     x: a hook, in the forward of the token slice that comes last
    backward    layer 1   x: sum those of layer 1   layer 0   x: those of layer 0   embedding   end: those left

Messages are posted in one order on all replicas, whatever the hooks do: by stage as they are completed, then by layer,
last to first. Nothing waits for them but the optimizer step, and on an accelerator not even the host does then.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import Op

SUM_BUCKET_BYTES = 1 << 26
"""A message of 64 MiB keeps any network busy, and its copy is small beside the gradients."""


def sum_over_sharing_ranks(weights_and_groups: Iterable[tuple[nn.Parameter, dist.ProcessGroup]]) -> None:
    """Sum the gradients of weights that several ranks of a pipeline hold together: those of tied layers.

    The weights come in one order on all ranks of their group.
    """
    gradients: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for weight, group in weights_and_groups:
        ranks = tuple(dist.get_process_group_ranks(group))
        if weight.requires_grad and len(ranks) > 1:
            groups.setdefault(ranks, group)
            gradients[ranks].append(accumulated_gradient(weight))
    # In one order on all ranks: where three pairs of three ranks share, each would otherwise wait for another.
    for ranks in sorted(groups):
        sum_in_buckets(gradients[ranks], groups[ranks])


def sum_over_tensor_parallel_ranks(module: nn.Module, grid: Any) -> None:
    """Sum the gradients of weights that every tensor-parallel rank holds whole, but applies to its part of the tokens.

    Such a weight has an attribute `sequence_parallel`, as Megatron's do: norms, and the biases after a reduction. So do
    norms of queries and keys, which a rank applies to its part of the heads, with sequence parallelism or without.
    """
    weights = _applied_to_a_part(module, grid)
    if weights:
        sum_in_buckets(map(accumulated_gradient, weights), grid.get_slice_parallel_group())


def summed_before_replicas(module: Any, grid: Any) -> set[nn.Parameter]:
    """Weights whose gradients the two functions above complete, before anybody may sum them over replicas."""
    groups = module.get_tied_weights_and_groups()
    return {weight for weight, group in groups if dist.get_world_size(group) > 1} | {*_applied_to_a_part(module, grid)}


def _applied_to_a_part(module: nn.Module, grid: Any) -> list[nn.Parameter]:
    if grid.get_slice_parallel_world_size() == 1:
        return []
    weights = module.parameters()
    return [weight for weight in weights if getattr(weight, "sequence_parallel", False) and weight.requires_grad]


def sum_in_buckets(
    tensors: Iterable[Tensor], group: dist.ProcessGroup, *, bucket_bytes: int = SUM_BUCKET_BYTES
) -> None:
    """Sum tensors [...] in place over the ranks of a group, in messages of at most `bucket_bytes`.

    They have the same shapes and dtypes, in the same order, on every rank. Larger tensors are not copied.
    """
    for bucket in buckets(tensors, bucket_bytes):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0], group=group)
            continue
        message = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(message, group=group)
        for tensor, summed in zip(bucket, message.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(summed.view_as(tensor))


def buckets(tensors: Iterable[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Group tensors [...] by dtype, in their order, so that no group of several tensors is larger than a bucket."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_dtype[tensor.dtype].append(tensor)
    for of_one_dtype in by_dtype.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in of_one_dtype:
            if bucket and size + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def gradient_so_far(weight: nn.Parameter) -> Tensor | None:
    """Tensor [...] in which the gradient of a weight is summed, whatever the optimizer; None if there is none yet."""
    held = (getattr(weight, attribute, None) for attribute in ("_hp_grad", "grad_accum", "grad"))
    return next((gradient for gradient in held if gradient is not None), None)


def accumulated_gradient(weight: nn.Parameter) -> Tensor:
    """Tensor [...] in which the gradient of a weight is summed; zeros on a rank without a gradient."""
    if (gradient := gradient_so_far(weight)) is not None:
        return gradient
    weight.grad = torch.zeros_like(weight)
    return weight.grad


class Part(NamedTuple):
    """A flat part of a gradient."""

    values: Tensor
    """[n], a view of where the gradient adds up."""
    owner: int | None = None
    """Rank in the data-parallel group that alone needs the sum; None if every one does."""


class ReplicaGradients:
    """Gradients of parameters, needed by every replica."""

    in_flat_buffers = False
    """Whether they lie one after the other in few buffers, in one order on all replicas. Those of a buffer share its
    version counter."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.group = engine.grid.get_data_parallel_group()
        """The replicas of this rank."""
        size, self._averages = dist.get_world_size(self.group), engine.gradient_average
        predivided = engine.gradient_predivide_factor() if engine.postscale_gradients() else size
        # The same factors as DeepSpeed's, computed as it computes them, so that the same bits come out.
        self._before, self._after = 1.0 / predivided, predivided / size

    @property
    def communication_type(self) -> torch.dtype:
        """Type of the messages, by the settings."""
        return self._engine.communication_data_type

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """Bring the results of the backward that runs now to where the gradients of some parameters add up."""

    def parts(self, parameter: nn.Parameter) -> Iterator[Part]:
        """The gradient of a parameter; zeros if it has none, so that every replica can join in."""
        yield Part(_flat(parameter))

    def scale_before(self, values: Tensor) -> None:
        """Scale gradients [elements] that are about to be summed, in place."""
        if self._averages and self._before != 1:
            values.mul_(self._before)

    def scale_after(self, values: Tensor) -> None:
        """Scale a sum [elements] to a mean, in place."""
        if self._averages and self._after != 1:
            values.mul_(self._after)

    def finish(self) -> None:
        """All sums are there."""


class _Bf16(ReplicaGradients):
    """Gradients in the flat buffers of `BF16_Optimizer`, to which each backward's bf16 gradients are added."""

    in_flat_buffers = True

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._optimizer = engine.optimizer
        groups = enumerate(self._optimizer.bf16_groups)
        self._places = {weight: (group, index) for group, weights in groups for index, weight in enumerate(weights)}

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        # Not added again at the end of the backward.
        if self._optimizer.immediate_grad_update:
            return
        with torch.no_grad():
            for parameter in parameters:
                self._optimizer._update_hp_grad(parameter, *self._places[parameter], clear_lp_grads=False)
                parameter.grad = None

    def parts(self, parameter: nn.Parameter) -> Iterator[Part]:
        group, index = self._places[parameter]
        yield Part(self._optimizer.fp32_groups_gradients[group][index])


class _Partitioned(ReplicaGradients):
    """Gradients of which each replica needs those that its partition of the optimizer's state is for."""

    def __init__(self, engine: Any) -> None:
        optimizer = self._optimizer = engine.optimizer
        self.group = optimizer.dp_process_group
        self._size = dist.get_world_size(self.group)
        groups = enumerate(optimizer.round_robin_bit16_groups)
        self._groups = {weight: group for group, weights in groups for weight in weights}

    @property
    def communication_type(self) -> torch.dtype:
        return self._optimizer.communication_data_type

    def parts(self, parameter: nn.Parameter) -> Iterator[Part]:
        optimizer, gradient = self._optimizer, _flat(parameter)
        if not optimizer.reduce_scatter:
            yield Part(gradient)
            return
        group, number = self._groups[parameter], optimizer.get_param_id(parameter)
        owners = optimizer.param_to_partition_ids[group][number]
        starts = sorted((int(optimizer.grad_start_offset[group][owner][number]), owner) for owner in owners)
        ends = [*(start for start, _ in starts[1:]), gradient.numel()]
        for (start, owner), end in zip(starts, ends, strict=True):
            yield Part(gradient[start:end], owner)

    def scale_before(self, values: Tensor) -> None:
        if self._optimizer.gradient_average:
            values.div_(self._size)

    def scale_after(self, values: Tensor) -> None:
        """A sum is a mean already."""

    def finish(self) -> None:
        # ZeRO takes its partition of the gradients.
        self._optimizer.set_gradient_accumulation_boundary(True)
        self._optimizer.overlapping_partition_gradients_reduce_epilogue()


def replica_gradients(engine: Any) -> ReplicaGradients | None:
    """The gradients of an engine; None with one replica, or where the settings ask for reductions of DeepSpeed's own.

    These are of experts, of sparse gradients, and ZeRO's of buckets that its own hooks fill.
    """
    special = engine.has_moe_layers or any(getattr(layer, "sparse", False) for layer in engine.module.modules())
    if engine.dp_world_size == 1 or special or not engine.pipeline_enable_backward_allreduce:
        return None
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        return _Bf16(engine)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        hooked = optimizer.contiguous_gradients or optimizer.overlap_comm or optimizer.use_grad_accum_attribute
        return None if hooked or optimizer.cpu_offload or optimizer.partition_gradients else _Partitioned(engine)
    return ReplicaGradients(engine) if isinstance(optimizer, torch.optim.Optimizer) else None


def _flat(parameter: nn.Parameter) -> Tensor:
    gradient = accumulated_gradient(parameter)
    if not gradient.is_contiguous():
        gradient = parameter.grad = gradient.contiguous()
    return gradient.view(-1)


REDUCTION_BUCKET_BYTES = 1 << 23
"""Layers are reduced together until they have so many bytes of parameters: below it, latency costs more than bytes."""

ALONE_BYTES = 1 << 20
"""Parts from this size on travel from where they lie; smaller ones are copied together."""

Entering = Callable[[int, Any], None]
"""Called with each layer that a forward enters: its place among this rank's layers, and its inputs."""


def gradient_reductions(engine: Any) -> "GradientReductions | None":
    """The reductions of an engine; None where there are none, or only DeepSpeed can do them."""
    gradients, module = replica_gradients(engine), engine.module
    if gradients is None:
        return None
    layers = {stage: module.layer_parameters(stage) for stage in module.pipeline.stages_of(module.stage_id)}
    apart = summed_before_replicas(module, engine.grid)
    return GradientReductions(layers, gradients, apart=apart, bucket_bytes=REDUCTION_BUCKET_BYTES)


class Bucket(NamedTuple):
    """Parameters that are reduced together."""

    layer: int
    """The first of their layers, by its place among this rank's: they are complete once it is."""
    parameters: list[nn.Parameter]


class _Message(NamedTuple):
    """A sum that is on its way."""

    work: dist.Work
    buffer: Tensor
    targets: list[Tensor]
    """Where the sum belongs; empty if the buffer is the place, or the sum is not for this rank."""


class GradientReductions:
    """The reductions of one rank.

    Args:
        layers: by stage, its layers from first to last: each with its place among this rank's and its parameters.
        apart: parameters whose gradients are summed over other ranks first: they are reduced last.
    """

    def __init__(
        self,
        layers: Mapping[int, Sequence[tuple[int, Sequence[nn.Parameter]]]],
        gradients: ReplicaGradients,
        *,
        apart: Container[nn.Parameter],
        bucket_bytes: int,
    ) -> None:
        self._layers, self._gradients, self._apart = layers, gradients, apart
        self._bucket_bytes = bucket_bytes
        self._rank = dist.get_rank(gradients.group)
        self._messages: list[_Message] = []
        self._versions: list[tuple[Tensor, int]] = []
        self._reduced: set[nn.Parameter] = set()
        self._waiting: dict[int, list[Bucket]] = {}
        self._completing: dict[tuple[int, ...], int] = {}

    def begin(self, completing: Mapping[int, Op]) -> None:
        """Expect an iteration, given the op that completes each stage of this rank, in the order in which they run."""
        self._completing = {op[1:]: stage for stage, op in completing.items()}
        self._waiting = self._buckets(list(completing))
        self._reduced = set()

    def entering(self, op: Op, defer: Callable[[Callable[[], None]], bool]) -> Entering | None:
        """Return the function that the forward of an op calls for each layer; None if its backward completes no stage.

        `defer` takes a function to call with the weight gradients of this backward; False if they are not deferred.
        """
        stage = self._completing.get(op[1:])
        if stage is None:
            return None

        def entering(layer: int, inputs: Any) -> None:
            def passed(_: Tensor) -> None:
                if not defer(lambda: self._reduce(stage, layer, inside=True)):
                    self._reduce(stage, layer, inside=True)

            # Autograd runs what was recorded last first: once it is about to run what gave one of these tensors, all
            # that came after is done. A leaf has no such order.
            for tensor in inputs if isinstance(inputs, tuple) else (inputs,):
                if torch.is_tensor(tensor) and tensor.grad_fn is not None:
                    tensor.register_hook(passed)

        return entering

    def reduce_stage(self, stage: int) -> None:
        """Start the other sums of a stage, whose last backward is done."""
        self._reduce(stage, 0, inside=False)

    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start the sums of all other parameters, wait for all sums, and hand them to the optimizer."""
        rest = [weight for weight in parameters if weight.requires_grad and weight.numel()]
        self._start([weight for weight in rest if weight not in self._reduced])
        changed = [gradient for gradient, version in self._versions if gradient._version != version]
        for message in self._messages:
            message.work.wait()
            self._gradients.scale_after(message.buffer)
            if message.targets:
                sums = message.buffer.split([target.numel() for target in message.targets])
                for target, values in zip(message.targets, sums, strict=True):
                    target.copy_(values)
        self._messages, self._versions, self._reduced = [], [], set()
        if changed:
            raise UserError(
                f"gradients of {changed[0].numel()} elements changed after their reduction over the replicas had "
                "started: a layer uses a weight of a later layer; pass --no-overlap-grad-reduce "
                "(overlap_grad_reduce=False), or name the weight in both layers"
            )
        self._gradients.finish()

    # ------------------------------------------------------------------ parts of the above

    def _reduce(self, stage: int, layer: int, *, inside: bool) -> None:
        """Start the reductions of a stage's layers from `layer` on, which are complete; perhaps inside an op."""
        waiting = self._waiting.get(stage, [])
        while waiting and waiting[0].layer >= layer:
            parameters = waiting.pop(0).parameters
            if inside:
                self._gradients.complete(parameters)
            self._start(parameters)

    def _start(self, parameters: Sequence[nn.Parameter]) -> None:
        self._reduced.update(parameters)
        parts = [part for parameter in parameters for part in self._gradients.parts(parameter)]
        sent = self._gradients.communication_type
        small: dict[tuple[int | None, torch.dtype], list[Tensor]] = {}
        with torch.no_grad():
            for values, owner in adjacent(parts) if self._gradients.in_flat_buffers else parts:
                if values.nbytes >= ALONE_BYTES and values.dtype == sent:
                    self._post(values, owner, [])
                else:
                    small.setdefault((owner, values.dtype), []).append(values)
            for (owner, _), values in small.items():
                mine = owner is None or owner == self._rank
                self._post(torch.cat(values).to(sent), owner, values if mine else [])
        if not self._gradients.in_flat_buffers:
            self._versions += [(part.values, part.values._version) for part in parts]

    def _post(self, buffer: Tensor, owner: int | None, targets: list[Tensor]) -> None:
        group = self._gradients.group
        self._gradients.scale_before(buffer)
        if owner is None:
            work = dist.all_reduce(buffer, group=group, async_op=True)
        else:
            work = dist.reduce(buffer, group=group, group_dst=owner, async_op=True)
        self._messages.append(_Message(work, buffer, targets))

    def _buckets(self, completing: Sequence[int]) -> dict[int, list[Bucket]]:
        """By stage, its buckets in the order in which they are complete.

        A parameter that several layers use belongs to the one whose backward runs last.
        """
        turns = [
            (stage, layer, parameters)
            for stage in completing
            for layer, parameters in sorted(self._layers[stage], key=lambda entry: -entry[0])
        ]
        last = {parameter: (stage, layer) for stage, layer, parameters in turns for parameter in parameters}
        buckets: dict[int, list[Bucket]] = {stage: [] for stage in completing}
        gathered: list[nn.Parameter] = []
        for number, (stage, layer, parameters) in enumerate(turns):
            gathered += [
                parameter
                for parameter in dict.fromkeys(parameters)
                if last[parameter] == (stage, layer) and parameter.requires_grad and parameter not in self._apart
            ]
            ends = number + 1 == len(turns) or turns[number + 1][0] != stage
            if gathered and (ends or sum(parameter.nbytes for parameter in gathered) >= self._bucket_bytes):
                buckets[stage].append(Bucket(layer, gathered))
                gathered = []
        return buckets


def adjacent(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the same parts, where parts that are adjacent in memory and have the same owner are joined."""
    for ordered in _by_storage(parts):
        run, *others = ordered
        for part in others:
            behind = run.values.storage_offset() + run.values.numel() == part.values.storage_offset()
            if behind and part.owner == run.owner:
                length = run.values.numel() + part.values.numel()
                run = Part(run.values.as_strided((length,), (1,)), run.owner)
            else:
                yield run
                run = part
        yield run


def _by_storage(parts: Iterable[Part]) -> Iterator[list[Part]]:
    storages: dict[tuple[int, torch.dtype], list[Part]] = {}
    for part in parts:
        if part.values.numel():
            key = part.values.untyped_storage().data_ptr(), part.values.dtype
            storages.setdefault(key, []).append(part)
    for of_one in storages.values():
        yield sorted(of_one, key=lambda part: part.values.storage_offset())
