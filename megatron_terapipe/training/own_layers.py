"""The layers and the loss of a user's own model: their stages, the weights that ranks divide, and checks of both."""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.layout import StagePartition
from deepspeed_ext.runtime.first_batch_checks import TOLERANCES
from deepspeed_ext.runtime.micro_batch import ForwardArguments, map_tensors, tensors_in
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.topology import is_of_experts
from megatron_terapipe.checkpoint.info import EXPERTS
from megatron_terapipe.config.parallel import ParallelConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from megatron_terapipe.training.trained_model import Loss


def check_layers_of(layers: Any, program: str) -> None:
    """Refuse layers that no stage can run."""
    if not isinstance(layers, Sequence) or not layers:
        raise UserError(
            f"layers of {program} returns a {type(layers).__name__}: return a list of layers, first to last"
        )
    for number, layer in enumerate(layers):
        if not isinstance(layer, LayerSpec) and not callable(layer):
            raise UserError(
                f"layer {number} of {program} is a {type(layer).__name__}: give modules, LayerSpecs, TiedLayerSpecs or "
                "functions"
            )


def blocks_of(layers: Sequence[Any], num_layers: int) -> range:
    """Return the numbers of the layers that `--num-layers` counts, which are dealt to the stages.

    They are the span of the layers whose class occurs more than once, tied layers left out; all layers, if these are
    not as many as `num_layers`.
    """
    kinds = [
        None if isinstance(each, TiedLayerSpec) else each.typename if isinstance(each, LayerSpec) else type(each)
        for each in layers
    ]
    repeated = [number for number, kind in enumerate(kinds) if kind is not None and kinds.count(kind) > 1]
    span = range(repeated[0], repeated[-1] + 1) if repeated else range(0)
    return span if len(span) == num_layers else range(len(layers))


def partition_of(
    layers: Sequence[Any], parallel: ParallelConfig, num_layers: int, program: str
) -> StagePartition | str:
    """Return the stages of all layers: the first one also has those before the blocks, the last one those after.

    Raises:
        ConfigError: if there are fewer layers than stages, or a partition of the flags is of another number of layers.
    """
    if len(layers) < parallel.num_stages:
        raise ConfigError(
            f"--pipeline-model-parallel-size {parallel.pipeline_model_parallel_size} makes {parallel.num_stages} "
            f"stages, and {program} has {len(layers)} layers: give each stage one or more"
        )
    if parallel.stage_partition == "parameters":
        return "parameters"
    blocks = blocks_of(layers, num_layers)
    bounds = parallel.stage_bounds() or parallel.uniform_stages(len(blocks))
    if bounds.num_layers != len(blocks):
        raise ConfigError(
            f"--stage-partition {bounds} deals {bounds.num_layers} layers, and {program} has {len(blocks)}: give the "
            f"bounds of {len(blocks)}"
        )
    return StagePartition((0, *(bound + blocks.start for bound in bounds.bounds[1:-1]), len(layers)))


def layers_in_words(layers: Sequence[Any], bounds: Sequence[int]) -> str:
    """Return the kinds of layers, first to last, and the first and the last one of each stage, in words."""
    names = [ForwardArguments.of_layer(number, each).owner.partition("(")[2][:-1] for number, each in enumerate(layers)]
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    listed = ", ".join(f"{number} x {name}" if number > 1 else name for name, number in runs)
    spans = [f"{first}-{end - 1}" if end - first > 1 else f"{first}" for first, end in pairwise(bounds)]
    return f"{listed}; stages of layers {', '.join(spans)}"


def check_divided_weights(module: TokenSlicePipelineModule, ranks: TensorParallelRanks) -> None:
    """Check the weights that tensor-parallel ranks divide, and give all others the values of the first rank.

    A weight is divided if its `partition_dim` is 0 or more. A collective operation of the tensor-parallel ranks.

    Raises:
        UserError: on every rank, if ranks cannot have divided a weight so, or begin with the same values of it.
    """
    own: dict[str, _Part] = {}
    for name, weight in module.named_parameters():
        dimension = getattr(weight, "partition_dim", -1)
        if dimension >= 0:
            weight.tensor_model_parallel = True  # Read by DeepSpeed to count norms, by the checkpoint to join parts.
        own[name] = _Part(tuple(weight.shape), max(dimension, -1), _digest(weight) if dimension >= 0 else "")
    every = [own]
    if ranks.size > 1:
        every = [{} for _ in range(ranks.size)]
        dist.all_gather_object(every, own, group=ranks.group)
    for name, weight in module.named_parameters():
        if module.expert_ranks.size > 1 and is_of_experts(weight):
            if EXPERTS not in name:
                raise UserError(
                    f"{_place(module, name)} has experts, which checkpoints find by {EXPERTS!r} in the name: let "
                    "the layer have an attribute mlp, and this an attribute experts with a row for each expert"
                )
            continue
        parts = [of_rank.get(name) for of_rank in every]
        if (fault := _fault(parts)) is not None:
            raise UserError(f"{_place(module, name)} {fault}")
        if ranks.size > 1 and own[name].dimension < 0:
            dist.broadcast(weight.data, dist.get_global_rank(ranks.group, 0), group=ranks.group)


class _Part(NamedTuple):
    """The part of a weight that a tensor-parallel rank has."""

    shape: tuple[int, ...]
    dimension: int
    """Dimension that is divided; -1 if the rank has the whole weight."""
    digest: str
    """Differs for other values; empty for a constant."""


def _fault(parts: Sequence[_Part | None]) -> str | None:
    """Return why one weight cannot have the parts of all ranks; None if it can."""
    shapes, dimensions = {each and each.shape for each in parts}, {each and each.dimension for each in parts}
    first = parts[0]
    if len(shapes) > 1 or len(dimensions) > 1 or first is None:
        return (
            f"differs on the tensor-parallel ranks, with shapes {', '.join(map(str, shapes))} and partition_dim "
            f"{', '.join(map(str, dimensions))}: divide it evenly, on all of them"
        )
    if first.dimension >= len(first.shape):
        return (
            f"has partition_dim {first.dimension}, and its shape is {first.shape}: give the number of the dimension "
            "that the ranks divide, from 0"
        )
    digests = [each.digest for each in parts if each is not None and each.digest]
    if len(set(digests)) < len(digests):
        return (
            f"is divided by {len(parts)} tensor-parallel ranks, and begins with the same random values on two of them, "
            "which would stay equal: draw the whole weight, and keep the part of ranks.tensor.rank"
        )
    return None


def _digest(weight: Tensor) -> str:
    """Return a text that differs for other values; empty for a constant."""
    values = weight.detach().flatten()
    if not len(values) or bool((values == values[0]).all()):
        return ""
    return blake2b(values.float().cpu().numpy().tobytes(), digest_size=8).hexdigest()


def _place(module: TokenSlicePipelineModule, name: str) -> str:
    number, _, rest = name.partition(".")
    return f"{rest} of {module.data_entries.name(int(number))}" if number.isdecimal() else name


_CHECKED_TOKENS = 64
"""Tokens on which a loss is checked."""


class CheckedLoss:
    """A loss of one's own, which is checked when it is first called."""

    def __init__(self, loss: Loss, program: str) -> None:
        self._loss, self._program, self._checked = loss, program, False

    def __call__(self, outputs: Any, labels: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss [] of the outputs [B, N, ...] of a token slice, and of its labels and loss mask [B, N]."""
        found = self._loss(outputs, labels)
        if not self._checked:
            self._check(found, outputs, labels)
            self._checked = True
        return found

    def _check(self, found: Any, outputs: Any, labels: tuple[Tensor, Tensor]) -> None:
        """Compare the losses of some tokens, of two copies of them, and of them beside tokens that do not count."""
        if not isinstance(found, Tensor) or found.numel() != 1:
            what = f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise UserError(f"the loss of {self._program} returns {what}: return the mean of the labelled tokens")
        targets, mask = labels
        tensors = list(tensors_in(outputs))
        if not tensors or any(each.shape[:2] != targets.shape for each in tensors):
            return
        with torch.no_grad():
            part = map_tensors(lambda each: each[:1, :_CHECKED_TOKENS].detach(), outputs)
            targets, ones = targets[:1, :_CHECKED_TOKENS], torch.ones_like(mask[:1, :_CHECKED_TOKENS])

            def loss_beside(others: Any, counts: Tensor) -> float:
                rows = map_tensors(lambda own, other: torch.cat((own, other)), part, others)
                return float(self._loss(rows, (targets.repeat(2, 1), torch.cat((ones, counts)))))

            alone = float(self._loss(part, (targets, ones)))
            twice = loss_beside(part, ones)
            others = map_tensors(lambda each: torch.flip(each, (1,)), part)
            beside_uncounted = loss_beside(others, torch.zeros_like(ones))
        tolerance = max(TOLERANCES.get(each.dtype, 0.02) for each in tensors) * (abs(alone) + 1e-6)
        if abs(twice - alone) > tolerance:
            raise UserError(
                f"the loss of {self._program} is {alone:.4g} for some tokens and {twice:.4g} for two copies of them: "
                "return the mean of the labelled tokens, and not their sum"
            )
        if abs(beside_uncounted - alone) > tolerance:
            raise UserError(
                f"the loss of {self._program} counts tokens whose loss mask is 0 ({beside_uncounted:.4g} with such "
                f"tokens, {alone:.4g} without): return (losses * loss_mask).sum() / loss_mask.sum()"
            )
