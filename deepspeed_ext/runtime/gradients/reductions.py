"""Sums of gradients: over the ranks of one replica once a step, and over replicas during the last backward.

All sums come before DeepSpeed's own reduction over replicas, and use the tensors in which DeepSpeed accumulates.
Gradients of one dtype for the same ranks are sent together: a message for each costs more than its bytes.

- With torch's own optimizer, in fp32 without ZeRO, every replica needs all of `parameter.grad`.
- `BF16_Optimizer` has a flat buffer of gradients for each group of parameters. Every replica needs all of it, though it
  steps a part, for the norm.
- With ZeRO 1 a replica needs the parts of `parameter.grad` that belong to its partition of the optimizer's state.

The plan names the op that completes the gradients of a stage (`plan.programs.reductions`). Autograd runs that op's
backward layer by layer, last to first. Once a hook on the input of a layer runs, the gradients of that layer and of
those after it are complete:

    forward     embedding -x-> layer 0 -x-> layer 1     x: a hook, in the forward of the token slice that comes last
    backward    layer 1   x: sum layer 1   layer 0   x: sum layer 0   embedding   end: sum the rest

Messages are posted in one order on all replicas, for any order of the hooks: by stage as they are completed, then by
layer, last to first. Only the optimizer step waits for them, on an accelerator without the host.

DeepSpeed's own overlap cannot be used: its hooks on parameters run at every backward, of which a step has one for each
token slice and micro-batch. Hooks on parameters would also miss the products that add to gradients outside autograd.
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
from deepspeed_ext.runtime.topology import is_of_experts

SUM_BUCKET_BYTES = 1 << 26
"""A message of 64 MiB keeps any network busy, and its copy is small compared with the gradients."""


def sum_over_sharing_ranks(weights_and_groups: Iterable[tuple[nn.Parameter, dist.ProcessGroup]]) -> None:
    """Sum the gradients of weights of which several ranks of a pipeline have copies: tied layers and shared modules.

    The weights come in one order on all ranks of their group.
    """
    gradients: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for weight, group in weights_and_groups:
        ranks = tuple(dist.get_process_group_ranks(group))
        if weight.requires_grad and len(ranks) > 1:
            groups.setdefault(ranks, group)
            gradients[ranks].append(accumulated_gradient(weight))
    # In one order on all ranks: otherwise three pairs of three ranks could wait for each other.
    for ranks in sorted(groups):
        sum_in_buckets(gradients[ranks], groups[ranks])


def sum_over_tensor_parallel_ranks(module: nn.Module, grid: Any) -> None:
    """Sum the gradients of weights that tensor-parallel ranks have whole, but apply to their part of the tokens.

    Such a weight has an attribute `sequence_parallel`, as Megatron's do: norms, and biases after a reduction. So do
    norms of queries and keys, which a rank applies to its part of the heads, with or without sequence parallelism.
    """
    weights = _applied_to_a_part(module, grid)
    if weights:
        sum_in_buckets(map(accumulated_gradient, weights), grid.get_slice_parallel_group())


def summed_before_replicas(module: Any, grid: Any) -> set[nn.Parameter]:
    """Weights with gradients that the two functions above complete, before they are summed over replicas."""
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


def current_gradient(weight: nn.Parameter) -> Tensor | None:
    """Tensor [...] in which the gradient of a weight is summed, for any optimizer; None if there is none yet."""
    held = (getattr(weight, attribute, None) for attribute in ("_hp_grad", "grad_accum", "grad"))
    return next((gradient for gradient in held if gradient is not None), None)


def accumulated_gradient(weight: nn.Parameter) -> Tensor:
    """Tensor [...] in which the gradient of a weight is summed; zeros on a rank without a gradient."""
    if (gradient := current_gradient(weight)) is not None:
        return gradient
    weight.grad = torch.zeros_like(weight)
    return weight.grad


class GradientPart(NamedTuple):
    """A flat part of a gradient."""

    values: Tensor
    """[n], a view of the tensor in which the gradient is summed."""
    owner: int | None = None
    """The only rank in the data-parallel group that needs the sum; None if every one does."""


class ReplicaGradients:
    """Gradients of parameters, needed by every replica."""

    in_flat_buffers = False
    """Whether they are adjacent in few buffers, in one order on all replicas. Gradients of a buffer share its version
    counter."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.group = engine.grid.get_data_parallel_group()
        """The replicas of this rank."""
        self.expert_copies = engine.module.expert_ranks.copies
        """The ranks with the same experts; None if all have the same."""
        size, self._averages = dist.get_world_size(self.group), engine.gradient_average
        predivided = engine.gradient_predivide_factor() if engine.postscale_gradients() else size
        # The same factors as DeepSpeed's, computed in the same way, so that results are equal to the bit.
        self._before, self._after = 1.0 / predivided, predivided / size

    @property
    def communication_type(self) -> torch.dtype:
        """Type of the messages."""
        return self._engine.communication_data_type

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the results of the current backward to the sums of some parameters."""

    def parts(self, parameter: nn.Parameter) -> Iterator[GradientPart]:
        """The gradient of a parameter; zeros if it has none, so that every replica can take part."""
        yield GradientPart(_flat(parameter))

    def scale_before(self, values: Tensor) -> None:
        """Scale gradients [elements] that are about to be summed, in place."""
        if self._averages and self._before != 1:
            values.mul_(self._before)

    def scale_after(self, values: Tensor) -> None:
        """Scale a sum [elements] to a mean, in place."""
        if self._averages and self._after != 1:
            values.mul_(self._after)

    def finish(self) -> None:
        """Complete the step after all sums."""


class _Bf16(ReplicaGradients):
    """Gradients in the flat buffers of `BF16_Optimizer`, to which the bf16 gradients of backwards are added."""

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

    def parts(self, parameter: nn.Parameter) -> Iterator[GradientPart]:
        group, index = self._places[parameter]
        yield GradientPart(self._optimizer.fp32_groups_gradients[group][index])


class _Partitioned(ReplicaGradients):
    """Gradients of which each replica needs the parts of its partition of the optimizer's state."""

    def __init__(self, engine: Any) -> None:
        optimizer = self._optimizer = engine.optimizer
        self.group, self.expert_copies = optimizer.dp_process_group, engine.module.expert_ranks.copies
        self._size = dist.get_world_size(self.group)
        groups = enumerate(optimizer.round_robin_bit16_groups)
        self._groups = {weight: group for group, weights in groups for weight in weights}

    @property
    def communication_type(self) -> torch.dtype:
        return self._optimizer.communication_data_type

    def parts(self, parameter: nn.Parameter) -> Iterator[GradientPart]:
        optimizer, gradient = self._optimizer, _flat(parameter)
        if not optimizer.reduce_scatter:
            yield GradientPart(gradient)
            return
        group, number = self._groups[parameter], optimizer.get_param_id(parameter)
        owners = optimizer.param_to_partition_ids[group][number]
        starts = sorted((int(optimizer.grad_start_offset[group][owner][number]), owner) for owner in owners)
        ends = [*(start for start, _ in starts[1:]), gradient.numel()]
        for (start, owner), end in zip(starts, ends, strict=True):
            yield GradientPart(gradient[start:end], owner)

    def scale_before(self, values: Tensor) -> None:
        if self._optimizer.gradient_average:
            values.div_(self._size)

    def scale_after(self, values: Tensor) -> None:
        """A sum is a mean already."""

    def finish(self) -> None:
        # ZeRO copies its partition of the gradients.
        self._optimizer.set_gradient_accumulation_boundary(True)
        self._optimizer.overlapping_partition_gradients_reduce_epilogue()


def has_copies(engine: Any) -> bool:
    """Whether other ranks have the same weights, or the same experts."""
    copies = engine.module.expert_ranks.copies
    return engine.dp_world_size > 1 or (copies is not None and dist.get_world_size(copies) > 1)


def replica_gradients(engine: Any) -> ReplicaGradients | None:
    """The gradients of an engine; None with one replica, or if DeepSpeed must reduce them.

    It must reduce gradients of its own experts, sparse gradients, and ZeRO's buckets that its own hooks fill.
    """
    special = engine.has_moe_layers or any(getattr(layer, "sparse", False) for layer in engine.module.modules())
    if not has_copies(engine) or special or not engine.pipeline_enable_backward_allreduce:
        return None
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        return _Bf16(engine)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        by_deepspeed = optimizer.use_grad_accum_attribute or reduced_by_hooks(optimizer)
        return None if by_deepspeed else _Partitioned(engine)
    return ReplicaGradients(engine) if isinstance(optimizer, torch.optim.Optimizer) else None


def reduced_by_hooks(optimizer: Any) -> bool:
    """Whether hooks of DeepSpeed reduce the gradients of an optimizer in each backward."""
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return False
    hooked = optimizer.contiguous_gradients or optimizer.overlap_comm
    return hooked or optimizer.cpu_offload or optimizer.partition_gradients


def _flat(parameter: nn.Parameter) -> Tensor:
    gradient = accumulated_gradient(parameter)
    if not gradient.is_contiguous():
        gradient = parameter.grad = gradient.contiguous()
    return gradient.view(-1)


REDUCTION_BUCKET_BYTES = 1 << 23
"""Layers are reduced together up to this many bytes of parameters: below it, latency costs more than bytes."""

IN_PLACE_BYTES = 1 << 20
"""Parts from this size on are sent in place; smaller ones are copied together."""

Entering = Callable[[int, Any], None]
"""Called with each layer that a forward enters: its place among this rank's layers, and its inputs."""


def gradient_reductions(engine: Any) -> "GradientReductions | None":
    """The reductions of an engine; None if there are none, or if DeepSpeed must do them."""
    gradients, module = replica_gradients(engine), engine.module
    if gradients is None:
        if module.expert_ranks.size > 1 and has_copies(engine):
            raise UserError(
                "zero_optimization has settings with which DeepSpeed reduces gradients, also over ranks with other "
                "experts: set contiguous_gradients and overlap_comm to false, without offload and stage 2"
            )
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
    """A pending sum."""

    work: dist.Work
    buffer: Tensor
    targets: list[Tensor]
    """Tensors to which the sum is copied; none if it is in place, or not for this rank."""


class GradientReductions:
    """The reductions of one rank.

    Args:
        layers: by stage, its layers from first to last: each with its place among this rank's and its parameters.
        apart: parameters with gradients that are summed over other ranks first: they are reduced last.
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
        self._messages: list[_Message] = []
        self._versions: list[tuple[Tensor, int]] = []
        self._reduced: set[nn.Parameter] = set()
        self._waiting: dict[int, list[Bucket]] = {}
        self._completing: dict[tuple[int, ...], int] = {}

    def begin(self, completing: Mapping[int, Op]) -> None:
        """Start an iteration, given the op that completes each stage of this rank, in their order."""
        self._completing = {op[1:]: stage for stage, op in completing.items()}
        self._waiting = self._buckets(list(completing))
        self._reduced = set()

    def entering(self, op: Op, defer: Callable[[Callable[[], None]], bool]) -> Entering | None:
        """The function that the forward of an op calls for each layer; None if its backward completes no stage.

        `defer` adds a function to the deferred products of this backward; False if they are not deferred.
        """
        stage = self._completing.get(op[1:])
        if stage is None:
            return None

        def entering(layer: int, inputs: Any) -> None:
            def passed(_: Tensor) -> None:
                if not defer(lambda: self._reduce(stage, layer, inside=True)):
                    self._reduce(stage, layer, inside=True)

            # Autograd runs the last recorded node first: before it runs the node of one of these tensors, all later
            # ones are done. A leaf has no such order.
            for tensor in inputs if isinstance(inputs, tuple) else (inputs,):
                if torch.is_tensor(tensor) and tensor.grad_fn is not None:
                    tensor.register_hook(passed)

        return entering

    def reduce_stage(self, stage: int) -> None:
        """Start the other sums of a stage after its last backward."""
        self._reduce(stage, 0, inside=False)

    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start the sums of all other parameters, wait for all sums, and pass them to the optimizer."""
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
        """Start the reductions of a stage's layers from `layer` on, which are complete, inside an op or after it."""
        waiting = self._waiting.get(stage, [])
        while waiting and waiting[0].layer >= layer:
            parameters = waiting.pop(0).parameters
            if inside:
                self._gradients.complete(parameters)
            self._start(parameters)

    def _start(self, parameters: Sequence[nn.Parameter]) -> None:
        self._reduced.update(parameters)
        experts = [parameter for parameter in parameters if is_of_experts(parameter)]
        self._start_over(self._gradients.group, [each for each in parameters if not is_of_experts(each)])
        if experts:
            # By the same factors: they see the tokens of all replicas, too.
            self._start_over(self._gradients.expert_copies, experts)

    def _start_over(self, group: dist.ProcessGroup, parameters: Sequence[nn.Parameter]) -> None:
        parts = [part for parameter in parameters for part in self._gradients.parts(parameter)]
        sent = self._gradients.communication_type
        small: dict[tuple[int | None, torch.dtype], list[Tensor]] = {}
        with torch.no_grad():
            for values, owner in adjacent(parts) if self._gradients.in_flat_buffers else parts:
                if dist.get_world_size(group) == 1 or (values.nbytes >= IN_PLACE_BYTES and values.dtype == sent):
                    self._post(group, values, owner, [])
                else:
                    small.setdefault((owner, values.dtype), []).append(values)
            for (owner, _), values in small.items():
                mine = owner is None or owner == dist.get_rank(group)
                self._post(group, torch.cat(values).to(sent), owner, values if mine else [])
        if not self._gradients.in_flat_buffers:
            self._versions += [(part.values, part.values._version) for part in parts]

    def _post(self, group: dist.ProcessGroup, buffer: Tensor, owner: int | None, targets: list[Tensor]) -> None:
        self._gradients.scale_before(buffer)
        if dist.get_world_size(group) == 1:
            self._gradients.scale_after(buffer)
            return
        if owner is None:
            work = dist.all_reduce(buffer, group=group, async_op=True)
        else:
            work = dist.reduce(buffer, group=group, group_dst=owner, async_op=True)
        self._messages.append(_Message(work, buffer, targets))

    def _buckets(self, completing: Sequence[int]) -> dict[int, list[Bucket]]:
        """By stage, its buckets in the order of their completion.

        A parameter that several layers use belongs to the layer with the last backward.
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


def adjacent(parts: Iterable[GradientPart]) -> Iterator[GradientPart]:
    """Yield the same parts, where parts that are adjacent in memory and have the same owner are joined."""
    for ordered in _by_storage(parts):
        run, *others = ordered
        for part in others:
            follows = run.values.storage_offset() + run.values.numel() == part.values.storage_offset()
            if follows and part.owner == run.owner:
                length = run.values.numel() + part.values.numel()
                run = GradientPart(run.values.as_strided((length,), (1,)), run.owner)
            else:
                yield run
                run = part
        yield run


def _by_storage(parts: Iterable[GradientPart]) -> Iterator[list[GradientPart]]:
    storages: dict[tuple[int, torch.dtype], list[GradientPart]] = {}
    for part in parts:
        if part.values.numel():
            key = part.values.untyped_storage().data_ptr(), part.values.dtype
            storages.setdefault(key, []).append(part)
    for of_one in storages.values():
        yield sorted(of_one, key=lambda part: part.values.storage_offset())
