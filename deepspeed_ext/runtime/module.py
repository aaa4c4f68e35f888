"""A model as a sequence of layers, of which each stage holds some, computed one token slice at a time."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.partition import StagePartition
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.batch import SplitBatch, split_along_sequence
from deepspeed_ext.runtime.channels import MessageSpec
from deepspeed_ext.runtime.documents import Documents
from deepspeed_ext.runtime.sequence_state import SequenceState
from deepspeed_ext.runtime.topology import TokenSliceTopology

ActivationSpec = Callable[[int, int, torch.dtype], MessageSpec]
"""Called with micro-batch size, tokens of a token slice and the model's dtype: what passes between two stages."""


class TokenSlicePipelineModule(PipelineModule):
    """DeepSpeed's `PipelineModule`, computed token slice by token slice.

    A layer takes the output of the layer before it. A layer whose forward (or whose `forward_fn`, for a tied layer)
    has an argument named `past` also gets the `Past` of its token slice: the way to see earlier tokens.

    Args:
        layers: layers, `LayerSpec`s, `TiedLayerSpec`s or functions, first to last.
        layout: the parallel layout; its world size is that of the process group.
        token_slices: how every sequence is cut.
        loss_fn: called with the last layer's output and the labels of a token slice; returns the mean over its tokens.
            None if the last layer returns that.
        partition: `parameters`, `uniform`, bounds such as `0,5,12`, a JSON file of them, or a `StagePartition`.
        split_batch: cuts what the data iterator yields for one micro-batch.
        documents: reads off what the data iterator yields where its documents begin, which keeps them apart in
            attention and positions; every stage then reads the data. None if every row is one document.
        activation_spec: what passes between stages, so that shapes need never be sent; None to send them once.
        activation_checkpoint_interval: recompute activations in backward, this many layers at a time; 0 for never.
        dynamic_shape: shapes between stages may change from one micro-batch to the next, and are sent with each.
        base_seed: layer i initialises with seed `base_seed + i`, whatever stage it is on.

    Raises:
        PlanError: if the partition does not fit the layers and stages.
        UserError: if the layout and the token slices disagree, or a stage would have nothing to train.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        *,
        layout: ParallelLayout,
        token_slices: TokenSlices,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        partition: str | StagePartition = "parameters",
        split_batch: SplitBatch = split_along_sequence,
        documents: Callable[[Any], Documents] | None = None,
        activation_spec: ActivationSpec | None = None,
        activation_checkpoint_interval: int = 0,
        dynamic_shape: bool = False,
        base_seed: int = 1234,
    ) -> None:
        if len(token_slices) != layout.num_token_slices:
            raise UserError(
                f"the layout has {layout.num_token_slices} token slices, but the cut {token_slices} has "
                f"{len(token_slices)}: give the layout num_token_slices={len(token_slices)}"
            )
        layers = list(layers)
        weights = [_trainable_parameters(layer) for layer in layers]
        bounds = stage_partition(partition, weights, layout.pipeline_parallel_size)
        for stage in range(bounds.num_stages):
            if not sum(weights[layer] for layer in bounds.layers(stage)):
                raise UserError(
                    f"stage {stage} of the partition {bounds} has no parameters to train, and optimizers cannot do "
                    "with none: move a layer with parameters to it"
                )
        # Read by `_partition_layers`, which DeepSpeed calls before this class has anything else.
        self._stage_partition = bounds
        super().__init__(
            layers,
            topology=TokenSliceTopology(layout),
            loss_fn=loss_fn,
            seed_layers=True,
            base_seed=base_seed,
            activation_checkpoint_interval=activation_checkpoint_interval,
            dynamic_shape=dynamic_shape,
        )
        self.token_slices = token_slices
        self.split_batch = split_batch
        self.documents = documents
        self.activation_spec = activation_spec
        self._takes_past = [takes_past(function) for function in self.forward_funcs]

    def _partition_layers(self, method: str = "") -> None:
        self.parts = list(self._stage_partition.bounds)
        self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

    def _synchronize_tied_weights(self) -> None:
        # Without no_grad, autograd would record the broadcast of a weight as part of every later backward.
        with torch.no_grad():
            super()._synchronize_tied_weights()

    def forward(self, inputs: Any, state: SequenceState | None = None, token_slice: int = 0) -> Any:
        """Run this stage's layers on one token slice.

        Args:
            inputs: tensor or tuple: the model's inputs on the first stage, else the output of the stage before.
            state: what earlier token slices of the micro-batch left; None for a whole sequence in one piece.
            token_slice: index of the token slice.

        Returns:
            Output of this stage's last layer.
        """
        if state is None:
            state = SequenceState(TokenSlices((self.token_slices.seq_length,)))

        def run(hidden: Any, start: int, end: int) -> Any:
            for index in range(start, end):
                function = self.forward_funcs[index]
                if self._takes_past[index]:
                    hidden = function(hidden, past=state.past(self._local_start + index, token_slice))
                else:
                    hidden = function(hidden)
            return hidden

        num_layers = len(self.forward_funcs)
        interval = self.activation_checkpoint_interval
        if not interval or not torch.is_grad_enabled():
            return run(inputs, 0, num_layers)
        for start in range(0, num_layers, interval):
            # Not reentrant: a reentrant checkpoint drops the gradient of layers whose input needs none, as embeddings'.
            inputs = checkpoint(run, inputs, start, min(start + interval, num_layers), use_reentrant=False)
        return inputs


def stage_partition(partition: str | StagePartition, weights: Sequence[float], num_stages: int) -> StagePartition:
    """The stage partition that a setting asks for.

    Args:
        partition: as the module takes it.
        weights: trainable parameters of each layer.
        num_stages: stages of the pipeline.

    Raises:
        PlanError: if the setting names no partition, or one of another shape.
    """
    if partition == "uniform":
        return StagePartition.uniform(len(weights), num_stages)
    if partition == "parameters":
        return StagePartition.balanced(weights, num_stages)
    if isinstance(partition, str):
        partition = StagePartition.parse(partition)
    return partition.covering(len(weights), num_stages)


def _trainable_parameters(layer: Any) -> int:
    if isinstance(layer, LayerSpec):
        # DeepSpeed would build every layer on every rank to count; on the meta device that costs no memory.
        with torch.device("meta"):
            layer = layer.build()
    if not isinstance(layer, nn.Module):
        return 0
    return sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)


def takes_past(function: Callable[..., Any]) -> bool:
    """Whether a layer wants to see what came before its token slice: it then has an argument named `past`."""
    forward = function.forward if isinstance(function, nn.Module) else function
    return "past" in inspect.signature(forward).parameters
