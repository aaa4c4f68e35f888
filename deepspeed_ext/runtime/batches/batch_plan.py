"""What is known of a batch before it runs."""

from collections.abc import Callable
from dataclasses import dataclass

from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.runtime.batches.cuts import Cuts


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Facts about a batch that are known before it runs.

    Attributes:
        shape: sizes of the pipeline.
        cuts: lengths of the token slices of each micro-batch, and of this rank's parts of them.
        rows: sequences of a micro-batch.
        training: whether a backward follows.
        first_sequence: number of a micro-batch's first row among all sequences of the run, which dropout depends on.
        computes_loss: whether to call the loss function.
        keeps_outputs: whether to keep the last layer's outputs, and the labels.
        reduces: whether gradients are summed over replicas as they are completed.
    """

    shape: PipelineShape
    cuts: Cuts
    rows: int
    training: bool
    first_sequence: Callable[[int], int]
    computes_loss: bool = True
    keeps_outputs: bool = False
    reduces: bool = False
