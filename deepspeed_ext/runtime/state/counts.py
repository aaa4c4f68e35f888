"""Numbers that layers count in forwards, for backwards and updates that depend on more than one token.

A layer of experts counts how many tokens choose each expert. The gradient of its balance loss needs these counts of a
whole sequence or micro-batch, but no other value of the other token slices; and on a stage all forwards of a
micro-batch precede its first backward (`DEPENDENCIES` in `plan/ops.py`). So the loss of the whole is exact in slices:

    forward of each token slice     the layer adds to its counts
    after the last one              the counts of all layers of the stage are summed over the ranks that share the
                                    micro-batch, in one message, which travels under the next ops
    backward of each token slice    the layer reads the sums
    end of the step                 the counts of the step are summed over all ranks of the stage

A layer that counts is a `CountingLayer`. Every rank of a stage has the same layers and the same program, so that all
post the same messages in the same order, on communicators that they have already.
"""

from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn


class CountingLayer(nn.Module):
    """A layer, or a module in it, that counts. All of a model count as many numbers, and read the same.

    Args:
        width: numbers that it counts.
        num_values: sums that it adds up in backwards, such as losses.
        reads: counts that backwards read: of the micro-batch, or of the step so far on all replicas.
    """

    def __init__(self, *, width: int, num_values: int, reads: Literal["micro-batch", "step"] | None) -> None:
        super().__init__()
        self.width, self.num_values, self.reads = width, num_values, reads
        self.counted_in_step: Tensor | None = None
        """Counts [width] of this rank in the step so far, float64; None without an engine."""
        self.values_in_step: Tensor | None = None
        """Sums [values] of this rank in the step so far, float64; None without an engine."""

    def after_step(self, counts: Tensor, updated: bool | Tensor) -> None:
        """Act after the optimizer step, given the counts [width] of the step, float64.

        Args:
            updated: whether weights were updated; may be [] on the device, so that the host does not wait.
        """


class Counts:
    """The numbers of one layer in one micro-batch, for each of its groups of tokens."""

    def __init__(self, layer: CountingLayer, num_groups: int, device: torch.device) -> None:
        self.layer = layer
        self.own = torch.zeros(num_groups, layer.width, dtype=torch.int64, device=device)
        """Counts [groups, width] of the tokens of this rank."""
        self.total: tuple[_Sum, int] | None = None
        """The sum over ranks, and the place of these counts in it."""

    def summed(self) -> Tensor:
        """Counts [groups, width] of all tokens, in a backward."""
        assert self.total is not None, "the forwards of a micro-batch precede its backwards"
        total, index = self.total
        return total.read()[index]


class StepTally(NamedTuple):
    """Numbers of some steps, by layer of the whole model; 0 where a layer counts nothing."""

    steps: int
    counts: Tensor
    """[layers, width], int64, over all tokens of these steps."""
    values: Tensor
    """[layers, values], float64, means over the micro-batches of a replica, the replicas, and the steps."""


class Tallies:
    """The layers of one rank that count.

    Args:
        layers: each layer of this rank with its number in the model, in one order on all ranks of a stage.
        micro_batch_groups: groups of ranks; a sum over one after the other is over the ranks that share a micro-batch.
        stage_groups: the same for all ranks of a stage.
    """

    def __init__(
        self,
        layers: Iterable[tuple[int, nn.Module]],
        device: torch.device,
        *,
        micro_batch_groups: Iterable[dist.ProcessGroup | None],
        stage_groups: Iterable[dist.ProcessGroup | None],
    ) -> None:
        found = [
            (number, part) for number, layer in layers for part in layer.modules() if isinstance(part, CountingLayer)
        ]
        self._numbers, self._layers = [number for number, _ in found], [part for _, part in found]
        self._micro_batch_groups, self._stage_groups = _with_others(micro_batch_groups), _with_others(stage_groups)
        self.any = bool(found)
        """Whether a layer of this rank counts."""
        self._device, self._extent = device, [0, 0]
        self._whole_step, self._open = False, dict[int, list[Counts]]()
        self.reads = self._layers[0].reads if self._layers else None
        """Counts that backwards read, as in `CountingLayer`."""
        self._steps = 0
        """Steps since the last call of `take`."""
        if self._layers:
            self._extent = [self._layers[0].width, self._layers[0].num_values]
            self._step = torch.zeros(len(self._layers), sum(self._extent), dtype=torch.float64, device=device)
            """Counts and values of the step so far."""
            self._total = torch.zeros_like(self._step)
            """Counts and values of the steps since the last call of `take`."""
            for layer, row in zip(self._layers, self._step, strict=True):
                layer.counted_in_step, layer.values_in_step = row.split(self._extent)

    def begin(self, *, whole_step: bool) -> None:
        """Start a step of training.

        Args:
            whole_step: whether all forwards of the step precede its backwards, so that its counts are known to these.
        """
        self._whole_step, self._open = whole_step, {}
        self._step.zero_()

    def close(self, found: Collection[Counts], stage: int, num_micro_batches: int) -> None:
        """Start the sums of a micro-batch after its last forward on a stage.

        Args:
            found: counts of the layers of the stage, in their order.
            num_micro_batches: micro-batches of the step, on this replica.
        """
        if not found:
            return
        for counts in found:
            counts.layer.counted_in_step += counts.own.sum(0)
        if self.reads == "micro-batch":
            total = _Sum([each.own for each in found], self._micro_batch_groups)
            for index, each in enumerate(found):
                each.total = total, index
        elif self.reads == "step":
            waiting = self._open.setdefault(stage, [])
            waiting += found
            if not self._whole_step or len(waiting) == len(found) * num_micro_batches:
                total = _Sum([each.layer.counted_in_step.unsqueeze(0) for each in found], self._stage_groups)
                # Each micro-batch has the same layers.
                for index, each in enumerate(self._open.pop(stage)):
                    each.total = total, index % len(found)

    def finish_step(self, updated: bool | Tensor, num_micro_batches: int) -> None:
        """Sum the counts of a step over the stage, and call the layers with them; see `CountingLayer.after_step`.

        Args:
            num_micro_batches: micro-batches of the step, on all replicas.
        """
        for group in self._stage_groups:
            dist.all_reduce(self._step, group=group)
        for layer in self._layers:
            layer.after_step(layer.counted_in_step, updated)
            layer.values_in_step /= num_micro_batches
        self._total += self._step
        self._steps += 1

    def take(self, num_layers: int, pipeline: dist.ProcessGroup | None) -> StepTally:
        """Numbers of the steps since the last call, on the host of every rank, each of which must call this.

        Args:
            num_layers: layers of the whole model.
            pipeline: ranks of this rank's pipeline; None with one stage.
        """
        extent = torch.tensor([self._steps, *self._extent], device=self._device)
        if pipeline is not None:
            dist.all_reduce(extent, dist.ReduceOp.MAX, group=pipeline)
        steps, width, num_values = extent.tolist()
        found = torch.zeros(num_layers, width + num_values, dtype=torch.float64, device=self._device)
        if self._layers:
            found[self._numbers] = self._total
            self._total.zero_()
        if pipeline is not None:
            dist.all_reduce(found, group=pipeline)
        self._steps, found = 0, found.cpu()
        return StepTally(steps, found[:, :width].to(torch.int64), found[:, width:] / max(steps, 1))


class _Sum:
    """A sum over groups of ranks, one after the other, of tensors of one shape; under way."""

    def __init__(self, tensors: list[Tensor], groups: list[dist.ProcessGroup | None]) -> None:
        self._total = torch.stack(tensors)
        self._works = (dist.all_reduce(self._total, group=group, async_op=True) for group in groups)
        self._work = next(self._works, None)

    def read(self) -> Tensor:
        """Wait for the sums [tensors, ...]."""
        while self._work is not None:
            self._work.wait()
            self._work = next(self._works, None)
        return self._total


def _with_others(groups: Iterable[dist.ProcessGroup | None]) -> list[dist.ProcessGroup | None]:
    return [group for group in groups if group is not None and dist.get_world_size(group) > 1]
