"""Sums gradients over the replicas of the model while the last backward of the iteration is still running.

The plan says which op completes the gradients of a stage (`plan.programs.reductions`). Autograd runs that op's
backward layer by layer, last to first, so a hook on what enters a layer tells that nothing more will be added to the
gradients of that layer and of those behind it:

    forward     embedding -x-> layer 0 -x-> layer 1     x: a hook, in the forward of the token slice that comes last
    backward    layer 1   x: sum those of layer 1   layer 0   x: those of layer 0   embedding   end: those left

Messages are posted in one order on all replicas, whatever the hooks do: by stage as they are completed, then by layer,
last to first. Nothing waits for them but the optimizer step, and on an accelerator not even the host does then.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import Op
from deepspeed_ext.runtime.gradients.gradient_sums import summed_before_replicas
from deepspeed_ext.runtime.gradients.replica_gradients import Part, ReplicaGradients, replica_gradients

REDUCTION_BUCKET_BYTES = 1 << 23
"""Layers are reduced together until they have so many bytes of parameters: below it, latency costs more than bytes."""

ALONE_BYTES = 1 << 20
"""Parts from this size on travel from where they lie; smaller ones are copied together."""

Entering = Callable[[int, Any], None]
"""Told of each layer that a forward enters: its place among this rank's layers, and what goes into it."""


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
        """Expect an iteration.

        Args:
            completing: the op that completes the gradients of each stage of this rank, in the order in which they run.
        """
        self._completing = {op[1:]: stage for stage, op in completing.items()}
        self._waiting = self._buckets(list(completing))
        self._reduced = set()

    def entering(self, op: Op, defer: Callable[[Callable[[], None]], bool]) -> Entering | None:
        """Return the function that the forward of an op calls for each layer; None if its backward completes no stage.

        Args:
            defer: takes a function to call with the weight gradients of this backward, and returns whether they are
                deferred.
        """
        stage = self._completing.get(op[1:])
        if stage is None:
            return None

        def entering(layer: int, inputs: Any) -> None:
            def passed(_: Tensor) -> None:
                if not defer(lambda: self._reduce(stage, layer, inside=True)):
                    self._reduce(stage, layer, inside=True)

            # Autograd runs what was recorded last first: once it is about to run what gave one of these tensors, all
            # that came after is done. Of a leaf it knows no such thing.
            for tensor in inputs if isinstance(inputs, tuple) else (inputs,):
                if torch.is_tensor(tensor) and tensor.grad_fn is not None:
                    tensor.register_hook(passed)

        return entering

    def reduce_stage(self, stage: int) -> None:
        """Start what has not been started of a stage, whose last backward is done."""
        self._reduce(stage, 0, inside=False)

    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start what has not been started of any parameter, wait for all sums, and hand them to the optimizer.

        Raises:
            UserError: if a gradient changed after its reduction had started.
        """
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
