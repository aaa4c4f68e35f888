"""What is known of a batch before it runs."""

from collections.abc import Callable
from dataclasses import dataclass

from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.runtime.batches.cuts import Cuts


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Facts about a batch that are known before it runs."""

    shape: PipelineShape
    cuts: Cuts
    """Lengths of the token slices of each micro-batch, and of this rank's parts of them."""
    rows: int
    training: bool
    """Whether a backward follows."""
    first_sequence: Callable[[int], int]
    """Number of a micro-batch's first row among all sequences of the run, which dropout depends on."""
    computes_loss: bool = True
    """Whether to call the loss function."""
    keeps_outputs: bool = False
    """Whether to keep the last layer's outputs, and the labels."""
    reduces: bool = False
    """Whether gradients are summed over replicas as they are completed."""
