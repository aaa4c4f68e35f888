"""Gathers stepped weights over the replicas while the next forward runs, instead of at the end of the step.

Under ZeRO 1, and in bf16, each replica steps its partition of a flat group of weights and gathers the others'. A layer
needs its weights when the next forward enters it, so they are gathered during the layers before it:

    step | [gather piece 0][piece 1][piece 2]
         |           [F: layer 0 | layer 1   | layer 2]        each layer waits for the pieces with its weights

Until then weights have values of the step before, of this one, or of both. Any other reader waits for all.

NCCL gathers a piece into a tensor of its own, from which it is copied. On accelerators the pieces are posted from a
stream that waits for each, so that all use the memory of one. The memory estimate counts ZeRO's bucket for it.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from deepspeed_ext.runtime.gradients.reductions import has_copies

PIECE_ELEMENTS = 1 << 25
"""Elements of all partitions that are gathered at a time, unless ZeRO's bucket for gathers has fewer."""

_NAME = "all_gather_dp_groups"
"""Function that DeepSpeed's optimizers call at the end of their step, by this name in their own modules."""


class _Piece(NamedTuple):
    """A pending gather of a part of every partition of a flat group."""

    wait: Callable[[], Any]
    """Lets work that is queued later wait for it."""
    flat: Tensor
    partition: int
    """Elements of each partition; those from `start` to `stop` (exclusive) are gathered."""
    start: int
    stop: int

    def holds(self, weight: Tensor) -> bool:
        """Whether it includes elements of a weight."""
        if weight.untyped_storage().data_ptr() != self.flat.untyped_storage().data_ptr():
            return False
        first = weight.storage_offset() - self.flat.storage_offset()
        end = first + weight.numel()
        partitions = range(first // self.partition, (end - 1) // self.partition + 1)
        starts = (each * self.partition + self.start for each in partitions)
        return any(start < end and first < start + self.stop - self.start for start in starts)


class ParameterGathers:
    """The gathers of one rank: of `layers`, by their place among this rank's, and of other parameters."""

    def __init__(
        self, optimizer: Any, layers: Mapping[int, Sequence[nn.Parameter]], others: Sequence[nn.Parameter]
    ) -> None:
        self._home = sys.modules[type(optimizer).__module__]
        self._layers, self._others = layers, others
        self._pieces: list[_Piece] = []
        accelerator = get_accelerator()
        self._stream = None if accelerator.Stream is None else accelerator.Stream()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Around a step: its gathers are started without a wait."""
        self.finish()
        gather = getattr(self._home, _NAME)
        setattr(self._home, _NAME, self._start)
        try:
            yield
        finally:
            setattr(self._home, _NAME, gather)

    @property
    def pending(self) -> bool:
        """Whether gathers are pending."""
        return bool(self._pieces)

    def entering(self, layer: int, _: Any) -> None:
        """Wait for the weights of the next layer."""
        if self._pieces:
            self._wait([*self._layers[layer], *self._others])

    def finish(self) -> None:
        """Wait for all weights."""
        for piece in self._pieces:
            piece.wait()
        self._pieces = []

    def _start(
        self,
        groups_flat: Sequence[Tensor],
        partitioned_param_groups: Sequence[Sequence[Tensor]],
        dp_process_group: Sequence[dist.ProcessGroup],
        *,
        allgather_bucket_size: int,
        **_: Any,
    ) -> None:
        if self._stream is not None:
            self._stream.wait_stream(get_accelerator().current_stream())
        # Small groups, such as norms, have weights of every layer.
        for number in sorted(range(len(groups_flat)), key=lambda number: groups_flat[number].numel()):
            flat, partitions, group = (
                each[number] for each in (groups_flat, partitioned_param_groups, dp_process_group)
            )
            rank, size = dist.get_rank(group), partitions[0].numel()
            step = max(min(PIECE_ELEMENTS, allgather_bucket_size) // len(partitions), 1)
            for start in range(0, size, step):
                stop = min(start + step, size)
                views = [partition.detach()[start:stop] for partition in partitions]
                self._pieces.append(_Piece(self._gathered(views, rank, group), flat, size, start, stop))

    def _gathered(self, views: list[Tensor], rank: int, group: dist.ProcessGroup) -> Callable[[], Any]:
        """Post a gather, and return the function that waits for it."""
        accelerator = get_accelerator()
        with accelerator.stream(self._stream):
            work = dist.all_gather(views, views[rank], group=group, async_op=True)
            if self._stream is None:
                return work.wait
            # Of the stream only, and the memory that was gathered into is free for the next piece.
            work.wait()
            ended = accelerator.Event()
            ended.record(self._stream)
        return lambda: accelerator.current_stream().wait_event(ended)

    def _wait(self, parameters: Iterable[nn.Parameter]) -> None:
        weights = [parameter.data for parameter in parameters]
        waiting = []
        for piece in self._pieces:
            if any(piece.holds(weight) for weight in weights if weight.numel()):
                piece.wait()
            else:
                waiting.append(piece)
        self._pieces = waiting


def parameter_gathers(engine: Any) -> ParameterGathers | None:
    """The gathers of an engine; None if every replica steps all weights."""
    home = sys.modules[type(engine.optimizer).__module__]
    if not has_copies(engine) or not hasattr(home, _NAME):
        return None
    module = engine.module
    stages = module.pipeline.stages_of(module.stage_id)
    layers = {place: held for stage in stages for place, held in module.layer_parameters(stage)}
    of_layers = {parameter for held in layers.values() for parameter in held}
    others = [parameter for parameter in module.parameters() if parameter not in of_layers]
    gathers = ParameterGathers(engine.optimizer, layers, others)
    # Checkpoints are saved and loaded layer by layer.
    for layer in module.modules():
        layer.register_state_dict_pre_hook(lambda *_: gathers.finish())
        layer.register_load_state_dict_pre_hook(lambda *_: gathers.finish())
    return gathers
