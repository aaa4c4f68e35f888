"""Gives an engine the weights and the optimizer's state of a checkpoint, however each of them lies on ranks.

Every parameter is read as this rank's part of the whole, and goes to where DeepSpeed keeps it. So neither side knows
how the other is laid out.
"""

from functools import cache, partial
from pathlib import Path

from deepspeed.pipe import TiedLayerSpec
from torch import Tensor

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from megatron_terapipe.checkpoint.engine_state import destination_of
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.saved_optimizer import SavedOptimizer, saved_optimizer
from megatron_terapipe.checkpoint.saved_weights import SavedWeights, cut_dimension, reshare
from megatron_terapipe.errors import CheckpointError


def restore(engine: TokenSlicePipelineEngine, directory: Path, info: CheckpointInfo, *, weights_only: bool) -> None:
    """Read this rank's part of a checkpoint, on every rank.

    Args:
        engine: a fresh engine.
        directory: of the checkpoint.
        info: what it says of its run.
        weights_only: leave the optimizer as it is.

    Raises:
        CheckpointError: if a file cannot be read, or lacks a parameter.
    """
    module = engine.module
    rank, size = engine.grid.get_slice_parallel_rank(), engine.grid.get_slice_parallel_world_size()
    weights = SavedWeights(directory, info.tensor_parallel_size)
    optimizer = None if weights_only else saved_optimizer(directory, info)
    destination = destination_of(engine)
    for name, parameter in module.named_parameters():
        cut = cut_dimension(parameter)
        share = partial(reshare, num_parts=info.tensor_parallel_size, rank=rank, size=size, cut=cut)
        layer, name_in_layer = _place(module, name)
        weight = share(partial(weights.weight, layer, name_in_layer))
        if weight.shape != parameter.shape:
            raise CheckpointError(
                f"checkpoint {directory} has {name} as {tuple(weight.shape)}, and this run needs "
                f"{tuple(parameter.shape)}: load a checkpoint of the same model"
            )
        if optimizer is not None and parameter.requires_grad:
            saved = _SavedParameter(optimizer, weights, name, layer, name_in_layer)
            moments = {key: share(partial(saved.moment, key)) for key in saved.state(0).moments}
            destination.set_state(parameter, moments, saved.state(0).step)
            # The optimizer's own weight has digits that the model's lost.
            weight = share(saved.weight)
        destination.set_weight(parameter, weight)
    destination.finish()


class _SavedParameter:
    """What was saved of one parameter, in the shape of each tensor-parallel rank's part."""

    def __init__(
        self, optimizer: SavedOptimizer, weights: SavedWeights, name: str, layer: int, name_in_layer: str
    ) -> None:
        self.state = cache(partial(optimizer.of, name))
        self._model_weight = partial(weights.weight, layer, name_in_layer)

    def moment(self, key: str, tensor_parallel_rank: int) -> Tensor:
        """One of the optimizer's moments."""
        shape = self._model_weight(tensor_parallel_rank).shape
        return self.state(tensor_parallel_rank).moments[key].view(shape)

    def weight(self, tensor_parallel_rank: int) -> Tensor:
        """The weight that the optimizer works on."""
        saved, own = self._model_weight(tensor_parallel_rank), self.state(tensor_parallel_rank).weight
        return saved if own is None else own.view(saved.shape)


def _place(module: TokenSlicePipelineModule, name: str) -> tuple[int, str]:
    """Layer in whose file a parameter of a stage stands, and its name there: that of tied weights is the first."""
    first, _, rest = name.partition(".")
    if first != "tied_modules":
        return int(first), rest
    key, _, rest = rest.partition(".")
    specs = enumerate(module._layer_specs)
    return next(index for index, spec in specs if isinstance(spec, TiedLayerSpec) and spec.key == key), rest
