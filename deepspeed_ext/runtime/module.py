"""A model as a sequence of layers in stages, computed one token slice at a time.

First the partition of the layers into stages, and the parts that are computed again; then `TokenSlicePipelineModule`,
which builds and runs a rank's stages.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.layout import ParallelLayout, StagePartition
from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.slicing import TokenSlices, parts_of_rank
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.channels import MessageSpec
from deepspeed_ext.runtime.first_batch_checks import StageLayer
from deepspeed_ext.runtime.live_batch import CountLossTokens, CutByDocuments
from deepspeed_ext.runtime.micro_batch import DataEntries, ForwardArguments, SplitBatch, split_along_sequence
from deepspeed_ext.runtime.shared_modules import ConnectedWeights, SharedModules, connect
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from deepspeed_ext.runtime.topology import (
    ExpertParallelRanks,
    SequenceParallelRanks,
    TokenSliceTopology,
    own_group,
    token_slice_grid,
)

__all__ = ["TokenSlicePipelineModule"]


def check_world(layout: ParallelLayout) -> None:
    """Refuse a layout for another number of ranks, or before the process group exists."""
    if not dist.is_initialized():
        raise UserError("there is no process group for the stages: call init_distributed() first")
    if (world_size := dist.get_world_size()) != layout.world_size:
        sequence = f"sequence {layout.sequence_parallel_size} x " if layout.sequence_parallel_size > 1 else ""
        raise UserError(
            f"the layout has {layout.world_size} ranks (data {layout.data_parallel_size} x {sequence}tensor "
            f"{layout.tensor_parallel_size} x pipeline {layout.pipeline_parallel_size}), and {world_size} processes "
            f"run: launch {layout.world_size}, or change the layout"
        )


def trainable_stages(partition: str | StagePartition, layers: Sequence[Any], pipeline: PipelineShape) -> StagePartition:
    """The stage partition of a setting, in which every rank has parameters to train."""
    weights = [_trainable_parameters(layer) for layer in layers]
    bounds = stage_partition(partition, weights, pipeline.num_stages)
    for rank in range(pipeline.num_ranks):
        stages = list(pipeline.stages_of(rank))
        if not sum(weights[layer] for stage in stages for layer in bounds.layers(stage)):
            raise UserError(
                f"stage {' and '.join(map(str, stages))} of the partition {bounds} has no parameters to train, which "
                "optimizers need: move a layer with parameters to it"
            )
    return bounds


def stage_partition(partition: str | StagePartition, weights: Sequence[float], num_stages: int) -> StagePartition:
    """The stage partition of a setting, for layers with these numbers of trainable parameters."""
    if partition == "uniform":
        return StagePartition.uniform(len(weights), num_stages)
    if partition == "parameters":
        return StagePartition.balanced(weights, num_stages)
    if isinstance(partition, str):
        partition = StagePartition.parse(partition)
    bounds = partition.covering(len(weights), num_stages)
    if not all(map(bounds.layers, range(num_stages))):
        raise UserError(f"the partition {bounds} has a stage without layers: give each stage one or more")
    return bounds


def _trainable_parameters(layer: Any) -> int:
    if isinstance(layer, LayerSpec):
        # DeepSpeed would build every layer on every rank to count; on the meta device that costs no memory.
        with torch.device("meta"):
            layer = layer.build()
    if not isinstance(layer, nn.Module):
        return 0
    return sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)


def takes_past(function: Callable[..., Any]) -> bool:
    """Whether a layer reads earlier token slices, by an argument named `past`."""
    forward = function.forward if isinstance(function, nn.Module) else function
    return ForwardArguments.of("a layer", forward).takes_past


@dataclass(frozen=True)
class Recomputation:
    """Parts of a stage that are computed again in the backward."""

    stages: bool = False
    """Whole stages. A stage then keeps the input of a token slice, and keys and values for later ones."""
    interval: int = 0
    """Layers, this many at a time; 0 for none."""
    choose: Callable[[range], Collection[int]] | None = None
    """Chooses, of the numbers of a stage's layers, the layers that are computed again instead, one by one."""
    keeps_random_state: bool = True
    """Whether the second computation draws the same random numbers, from the generators of torch."""

    def runs_of_layers(self, layers: range) -> Iterator[tuple[slice, bool]]:
        """Runs of a stage's layers, counted from its first, and whether each is computed again by itself."""
        if self.choose is None:
            step = self.interval or len(layers) or 1
            yield from ((slice(start, start + step), bool(self.interval)) for start in range(0, len(layers), step))
            return
        chosen = {number - layers.start for number in self.choose(layers)}
        ends = sorted({0, len(layers), *chosen, *(number + 1 for number in chosen)})
        yield from ((slice(start, end), start in chosen) for start, end in pairwise(ends))


ActivationSpec = Callable[[int, int, torch.dtype], MessageSpec]
"""Shapes and types of the tensors between two stages, by micro-batch size, tokens of a token slice and dtype."""


class TokenSlicePipelineModule(PipelineModule):
    """DeepSpeed's `PipelineModule`, computed token slice by token slice.

    A layer takes the output of the previous layer. If its forward (or the `forward_fn` of a tied layer) has an argument
    named `past`, it also gets the `Past` of its token slice, for attention to earlier tokens. Other arguments get the
    entries of those names, if the data iterator yields dicts.

    Args:
        layers: layers, `LayerSpec`s, `TiedLayerSpec`s or functions, first to last.
        layout: the parallel layout; with as many ranks as the process group.
        token_slices: lengths of the token slices of every sequence; multiples of the sequence-parallel size.
        loss_fn: called with the last layer's output and the labels of a token slice, by name if they are a dict;
            returns the mean over its tokens. None if the last layer returns that.
        num_losses: losses [K] that it returns, which are minimised together and reported apart; None for one, [].
        output_fn: converts the last layer's output for callers, if the loss needs another form; None for no change.
        partition: `parameters`, `uniform`, bounds such as `0,5,12`, a JSON file of them, or a `StagePartition`.
        num_model_chunks: stages that each pipeline rank owns.
        placement: which stages a rank owns.
        split_batch: cuts one micro-batch of the data iterator. Sequence-parallel ranks read the same micro-batches, and
            call it with the lengths of their own parts of the token slices.
        loss_tokens: counts the tokens of a micro-batch with loss. The loss of a batch is then the mean over all of
            them on all replicas; with None, the mean of the micro-batches' losses.
        data_entries: names of the entries, if the data is a dict. Only needed if a layer takes one by an argument with
            a default, on a stage that would not read the data otherwise.
        documents: returns the starts of the documents of a micro-batch, which separates them in attention and
            positions; every stage then reads the data. None if every row is one document.
        cut_by_documents: gives each micro-batch lengths of its token slices, as many as `token_slices` has, by its
            documents; such as `DocumentCuts`. None for `token_slices` in all.
        activation_spec: shapes and types of tensors between stages, which are then not sent; None to send them once.
        activation_checkpoint_interval: recompute activations in backward, this many layers at a time; 0 for never.
        recomputed_layers: chooses, of the numbers of a stage's layers, the layers to recompute instead, one by one.
        recompute_stages: keep only the input, keys and values of a token slice on a stage, and compute the stage again
            in the backward; on the last stage, head and loss are computed only in the backward.
        preserve_rng_state: recomputed layers draw the same random numbers again, as `nn.Dropout` must. Saving and
            restoring the generators' states takes time at every checkpoint, and the head is computed twice; False if no
            layer draws from them.
        dynamic_shape: shapes between stages may change from one micro-batch to the next, and are sent with each.
        base_seed: layer i initialises with seed `base_seed + i`, on any stage.
        tensor_parallel_group: group of the ranks that share this rank's layers, if it exists already.
        expert_ranks: ranks that share the experts of this rank's layers, if their groups exist already.
        sequence_ranks: ranks that share the tokens of each token slice, if their group exists already.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        *,
        layout: ParallelLayout,
        token_slices: TokenSlices,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        num_losses: int | None = None,
        output_fn: Callable[[Any], Any] | None = None,
        partition: str | StagePartition = "parameters",
        num_model_chunks: int = 1,
        placement: Placement = Placement.LOOPED,
        split_batch: SplitBatch = split_along_sequence,
        loss_tokens: CountLossTokens | None = None,
        data_entries: Collection[str] | None = None,
        documents: Callable[[Any], Documents] | None = None,
        cut_by_documents: CutByDocuments | None = None,
        activation_spec: ActivationSpec | None = None,
        activation_checkpoint_interval: int = 0,
        recomputed_layers: Callable[[range], Collection[int]] | None = None,
        recompute_stages: bool = False,
        preserve_rng_state: bool = True,
        dynamic_shape: bool = False,
        base_seed: int = 1234,
        tensor_parallel_group: dist.ProcessGroup | None = None,
        expert_ranks: ExpertParallelRanks | None = None,
        sequence_ranks: SequenceParallelRanks | None = None,
    ) -> None:
        if len(token_slices) != layout.num_token_slices:
            raise UserError(
                f"the layout has {layout.num_token_slices} token slices, but the cut {token_slices} has "
                f"{len(token_slices)}: give the layout num_token_slices={len(token_slices)}"
            )
        if cut_by_documents is not None and documents is None:
            raise UserError("cut_by_documents is called with documents, and the module has none: give documents, too")
        # Refuses lengths that ranks cannot share, before any rank waits for another.
        parts_of_rank(token_slices, 0, layout.sequence_parallel_size)
        layers = list(layers)
        self.pipeline = PipelineShape(
            num_stages=layout.pipeline_parallel_size * num_model_chunks,
            num_micro_batches=1,
            num_token_slices=len(token_slices),
            num_model_chunks=num_model_chunks,
            placement=placement,
        )
        """Extent of the pipeline, of one micro-batch."""
        bounds = trainable_stages(partition, layers, self.pipeline)
        stages = [bounds.layers(stage) for stage in range(bounds.num_stages)]
        self.data_entries = DataEntries(layers, stages, loss_fn, data_entries)
        ends = {0, self.pipeline.last_stage}
        self.cutting_ranks = frozenset(
            self.pipeline.rank_of(stage)
            for stage in range(self.pipeline.num_stages)
            if stage in ends or self.data_entries.reader(stage)
        )
        """Pipeline ranks that cut micro-batches: with tokens, labels, or entries that layers take."""
        self.reading_ranks = self.cutting_ranks if documents is None else frozenset(range(self.pipeline.num_ranks))
        """Pipeline ranks that read the data iterator."""
        self._shares: list[SharedModules] = []
        self._connected: list[ConnectedWeights] = []
        self._has_token_slice_engine = False
        # Read by `_partition_layers` and `_build`, which DeepSpeed calls in its constructor.
        self._stage_partition = bounds
        self._layer_numbers: list[int] = []
        check_world(layout)
        with token_slice_grid(tensor_parallel_group):
            super().__init__(
                layers,
                topology=TokenSliceTopology(layout),
                loss_fn=loss_fn,
                seed_layers=True,
                base_seed=base_seed,
                activation_checkpoint_interval=activation_checkpoint_interval,
                dynamic_shape=dynamic_shape,
            )
        self.sequence_ranks = sequence_ranks or SequenceParallelRanks.of(layout)
        """Ranks that share the tokens of each token slice."""
        self.expert_ranks = expert_ranks or ExpertParallelRanks.of(layout)
        """Ranks that share the experts of each layer."""
        self.token_slices = token_slices
        self.split_batch, self.loss_tokens = split_batch, loss_tokens
        self.output_fn = output_fn
        self.loss_shape = () if num_losses is None else (num_losses,)
        """Shape of the loss."""
        self.documents, self.cut_by_documents = documents, cut_by_documents
        self.activation_spec = activation_spec
        self.recomputation = Recomputation(
            recompute_stages, activation_checkpoint_interval, recomputed_layers, preserve_rng_state
        )
        """Parts that are computed again in the backward."""
        self._takes_past = [takes_past(function) for function in self.forward_funcs]

    def _partition_layers(self, method: str = "") -> None:
        self.parts = list(self._stage_partition.bounds)

    def _build(self) -> None:
        # DeepSpeed builds one run of layers; a rank has one for each of its stages. Layers keep their numbers in the
        # model, by which they are seeded, named and saved.
        self._positions: dict[int, range] = {}
        for stage in self.pipeline.stages_of(self.stage_id):
            layers = self._stage_partition.layers(stage)
            self._set_bounds(layers.start, layers.stop)
            super()._build()
            self._positions[stage] = range(len(self._layer_numbers), len(self._layer_numbers) + len(layers))
            self._layer_numbers += layers

    def stage_owner(self, layer_idx: int) -> int:
        """Pipeline rank that has a layer."""
        stage = bisect_right(self._stage_partition.bounds, layer_idx) - 1
        return self.pipeline.rank_of(stage)

    # DeepSpeed gives the number of a layer among the layers of this rank, and names files by the number in the model.
    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """File that one of this rank's layers is saved to."""
        return super().ckpt_layer_path(ckpt_dir, self._layer_numbers[local_layer_idx] - self._local_start)

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """Files that one of this rank's layers was saved to."""
        return super().ckpt_layer_path_list(ckpt_dir, self._layer_numbers[local_layer_idx] - self._local_start)

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        # DeepSpeed makes a group for each tensor- and data-parallel rank in turn, by a call of all ranks.
        tied: dict[str, dict[str, Any]] = {}
        if self.pipeline.num_ranks == 1:
            return tied
        pipelines = self._topo.get_axis_comm_lists("pipe")
        holders: dict[str, set[int]] = defaultdict(set)
        for number, spec in enumerate(self._layer_specs):
            if isinstance(spec, TiedLayerSpec):
                holders[spec.key].add(self.stage_owner(number))
        for key, members in sorted(holders.items()):
            group = own_group([[ranks[member] for member in sorted(members)] for ranks in pipelines])
            if self.stage_id not in members:
                continue
            module, ranks = self.tied_modules[key], dist.get_process_group_ranks(group)
            tied[key] = {"ranks": ranks, "group": group, "weight_attr": self.tied_weight_attrs[key], "module": module}
            if self.global_rank != ranks[0]:
                for weight in module.parameters():
                    weight.ds_pipe_replicated = True  # DeepSpeed counts it once in the norm of gradients.
        return tied

    def _synchronize_tied_weights(self) -> None:
        # Without no_grad, autograd would record the broadcast of a weight as part of every later backward.
        with torch.no_grad():
            super()._synchronize_tied_weights()
        for connected in self._connected:
            connected.synchronize()

    def layer(self, number: int) -> Any:
        """A layer by its place in the model; None if another rank has it."""
        if number not in self._layer_numbers:
            return None
        spec = self._layer_specs[number]
        if isinstance(spec, TiedLayerSpec):
            return self.tied_modules[spec.key]
        return self.forward_funcs[self._layer_numbers.index(number)]

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return len(self._layer_specs)

    def numbered_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield the modules among this rank's layers, each with its number in the model."""
        for number, layer in zip(self._layer_numbers, self.forward_funcs, strict=True):
            if isinstance(layer, nn.Module):
                yield number, layer

    def share(self, pipeline_ranks: Iterable[int]) -> SharedModules:
        """Share weights of modules that each of some pipeline ranks registers; see `shared_modules`.

        Call it on each of them, before the optimizer is made. `initialize` connects the copies, which start equal to
        the first rank's.
        """
        members = tuple(dict.fromkeys(pipeline_ranks))
        for rank in members:
            if rank not in range(self.pipeline.num_ranks):
                raise UserError(
                    f"share({members}) names pipeline rank {rank} of {self.pipeline.num_ranks}: "
                    f"name some of 0 to {self.pipeline.num_ranks - 1}"
                )
        self._shares.append(SharedModules(members, self))
        return self._shares[-1]

    def share_layers(self, weights: Mapping[int, str | Sequence[str]]) -> SharedModules:
        """Share weights of layers, by number: `share_layers({0: "words.weight", 25: "projection.weight"})`.

        Copies start equal to the weights of the first named layer.
        """
        shared = self.share(self.stage_owner(number) for number in weights)
        for number, names in weights.items():
            if (layer := self.layer(number)) is not None:
                shared.register_module(layer, *([names] if isinstance(names, str) else names))
        return shared

    def connect_shared_modules(self) -> None:
        """Make the copies of shared weights equal. `initialize` does so on all ranks together."""
        self._has_token_slice_engine = True
        tied = {weight for weight, group in super().get_tied_weights_and_groups() if dist.get_world_size(group) > 1}
        self._connected = connect(self._shares, self.topology(), self.global_rank, tied=tied)

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        """Weights of which other pipeline ranks have copies, of tied layers and of shared modules, with the ranks."""
        shared = [(weight, connected.group) for connected in self._connected for weight in connected.weights]
        return super().get_tied_weights_and_groups() + shared

    def mpu(self) -> Any:
        """The process groups of this rank, for DeepSpeed's engines."""
        if not self._has_token_slice_engine:
            raise UserError(
                "deepspeed.initialize makes an engine that ignores token slices: call initialize of "
                "deepspeed_ext.runtime.initialize, with the same arguments"
            )
        return super().mpu()

    # ------------------------------------------------------------------ layers

    def layer_parameters(self, stage: int) -> list[tuple[int, list[nn.Parameter]]]:
        """The layers of one of this rank's stages, first to last: the place among this rank's, and the parameters."""
        layers = [(position, self.layer(self._layer_numbers[position])) for position in self._positions[stage]]
        return [
            (position, list(layer.parameters()) if isinstance(layer, nn.Module) else []) for position, layer in layers
        ]

    def parameters_of(self, stage: int) -> Iterator[nn.Parameter]:
        """The parameters of one of this rank's stages."""
        return (parameter for _, parameters in self.layer_parameters(stage) for parameter in parameters)

    def stage_layers(self, stage: int) -> list[StageLayer]:
        """The layers of one of this rank's stages, first to last."""
        return [
            StageLayer(
                self.data_entries.name(self._layer_numbers[position]),
                partial(self._run_layer, position),
                tuple(layer.modules()) if isinstance(layer := self.forward_funcs[position], nn.Module) else (),
            )
            for position in self._positions[stage]
        ]

    def _run_layer(
        self, position: int, hidden: Any, state: SequenceState, token_slice: int, entries: Mapping[str, Any]
    ) -> Any:
        number = self._layer_numbers[position]
        keywords = self.data_entries.given(number, entries)
        if self._takes_past[position]:
            keywords["past"] = state.past(number, token_slice)
        return self.forward_funcs[position](hidden, **keywords)

    def forward(
        self,
        inputs: Any,
        state: SequenceState | None = None,
        token_slice: int = 0,
        stage: int | None = None,
        entries: Mapping[str, Any] = MappingProxyType({}),
        entering: Callable[[int, Any], None] | None = None,
        *,
        up_to_past: bool = False,
    ) -> Any:
        """Run the layers of one of this rank's stages on one token slice, and return the output of the last.

        Args:
            inputs: tensor or tuple: the model's inputs on the first stage, else the output of the previous stage. On
                the first stage also a dict of entries.
            state: state of earlier token slices of the micro-batch on this stage; None for a whole sequence.
            stage: None for the first of this rank.
            entries: tensors that layers take by name.
            entering: called with each layer before it runs: its place among this rank's layers, and its inputs.
            up_to_past: stop after the last layer that takes a `Past`: later ones have no effect on later token slices.
        """
        if state is None:
            state = SequenceState(TokenSlices((self.token_slices.seq_length,)))
        positions = next(iter(self._positions.values())) if stage is None else self._positions[stage]
        if up_to_past:
            last = max((position for position in positions if self._takes_past[position]), default=positions.start - 1)
            positions = range(positions.start, last + 1)
        if isinstance(inputs, Mapping):
            entries, inputs = inputs, inputs[self.data_entries.first]

        def run(hidden: Any, positions: range) -> Any:
            for position in positions:
                if entering is not None:
                    entering(position, hidden)
                hidden = self._run_layer(position, hidden, state, token_slice, entries)
            return hidden

        if not torch.is_grad_enabled():
            return run(inputs, positions)
        again = self.recomputation
        first = self._layer_numbers[positions.start] if positions else 0
        for part, recomputed in again.runs_of_layers(range(first, first + len(positions))):
            if recomputed:
                # Not reentrant: that would drop the gradient of layers without a gradient of the input, as embeddings.
                keeps = again.keeps_random_state
                inputs = checkpoint(run, inputs, positions[part], use_reentrant=False, preserve_rng_state=keeps)
            else:
                inputs = run(inputs, positions[part])
        entering = None  # layers that are computed again are not entered again
        return inputs
