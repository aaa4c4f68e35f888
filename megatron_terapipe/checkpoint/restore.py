"""Loads a checkpoint into an engine, on every rank, whatever the layouts of both.

Every parameter is read as this rank's part of the whole, and copied to where DeepSpeed stores it: the
two layouts are independent. Of the optimizer's state only those elements are read that this rank's optimizer works on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from megatron_terapipe.checkpoint.agreement import from_first_rank
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.megatron_files import MegatronWeights, NamedWeights
from megatron_terapipe.checkpoint.optimizer_state import (
    ParameterState,
    SavedOptimizer,
    SavedRun,
    is_partitioned,
    joined,
    overlaps,
    own_elements,
    read_run,
)
from megatron_terapipe.checkpoint.saved_weights import SavedWeights, cut_dimension, weights_of
from megatron_terapipe.config import CheckpointConfig
from megatron_terapipe.errors import CheckpointError, UserError, first_line
from megatron_terapipe.huggingface.folder_weights import FolderWeights
from megatron_terapipe.model.gpt import vocabulary_parts


def saved_run(directory: Path, info: CheckpointInfo, *, weights_only: bool) -> SavedRun:
    """Read the facts that every rank needs on the first rank; every rank must call it at the same time."""

    def read() -> SavedRun:
        if weights_only:
            return SavedRun(places={}, counters={})
        weights = weights_of(directory, info)
        return weights.run() if isinstance(weights, MegatronWeights) else read_run(directory, info)

    return from_first_rank(read)


@contextmanager
def damage_in_one_line(directory: Path) -> Iterator[None]:
    """Report any error of the body as one of the files of a checkpoint: a damaged file may hold any objects."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        line = f"checkpoint {directory} cannot be loaded ({first_line(error)}): load another with --load-tag"
        raise CheckpointError(line) from error


def load_checkpoint(
    engine: TokenSlicePipelineEngine, directory: Path, info: CheckpointInfo, saved: SavedRun, config: CheckpointConfig
) -> None:
    """Load a checkpoint that `find_checkpoint` found into an engine, on every rank."""
    module = engine.module
    rank, size = engine.grid.get_slice_parallel_rank(), engine.grid.get_slice_parallel_world_size()
    own_parts = vocabulary_parts(module._layer_specs)
    weights = weights_of(directory, info)
    optimizer: SavedOptimizer | MegatronWeights | None = None
    if not config.weights_only:
        optimizer = weights if isinstance(weights, MegatronWeights) else SavedOptimizer(directory, info, saved)
    destination = Destination(engine)
    experts = module.topology().layout.expert_parallel_size
    parameters = dict(module.named_parameters())
    for name, value in module.state_dict().items():
        if name not in parameters:  # A buffer, which every rank has whole.
            value.copy_(_reader(weights, module, *_place(module, name))())
    for name, parameter in parameters.items():
        index, in_layer = _place(module, name)
        # Stages may share an output layer that one stage saved, or another number of stages.
        layer, stages = (own_parts[0], len(own_parts)) if index in own_parts else (index, 1)
        own_part, num_parts = (index - layer) * size + rank, stages * size
        cut, stride = cut_dimension(parameter), getattr(parameter, "partition_stride", 1)
        if info.deals(name, experts):
            own_part, num_parts, cut, stride = engine.global_rank % experts, experts, 0, 1
        share = _Share(info.num_parts(layer, name), own_part, num_parts, cut, stride)
        part = _reader(weights, module, layer, in_layer)
        weight, own = share.of(part), None
        if weight.shape != parameter.shape:
            raise CheckpointError(
                f"checkpoint {directory} has {name} as {tuple(weight.shape)}, and this run needs "
                f"{tuple(parameter.shape)}: load a checkpoint of the same model"
            )
        if optimizer is not None and parameter.requires_grad:
            saved_state = partial(_saved_state, optimizer, info, name, layer)
            state_of = partial(_state, saved_state, share, part)
            if elements := own_elements(engine, parameter):
                state = state_of(elements)
                destination.set_state(parameter, state.moments, state.step)
                # The optimizer's own weight has digits that the model's lost.
                own = state.weight
            if weight.dtype != parameter.dtype and len(elements) < parameter.numel():
                # And this parameter has room for them.
                exact = state_of(range(parameter.numel())).weight
                weight = weight if exact is None else exact.view(weight.shape)
        destination.set_weight(parameter, weight, own)
    destination.finish()
    if config.weights_only:
        # The masks of dropout depend on the step, so a continued run keeps counting.
        engine.global_steps = 0 if config.finetune else info.iteration
        return
    engine.global_steps, engine.skipped_steps = saved.counters["global_steps"], saved.counters["skipped_steps"]
    engine.global_samples = info.consumed_samples
    if engine.fp16_enabled():
        _restore_loss_scale(engine.optimizer.loss_scaler, saved.loss_scaler)


class Destination:
    """The place where an engine keeps weights and the state of its optimizer.

    An optimizer of torch works on the parameters themselves. In DeepSpeed's flat groups this rank has a fragment of
    each parameter in fp32, or none.
    """

    def __init__(self, engine: TokenSlicePipelineEngine) -> None:
        self._engine, self._partitioned = engine, is_partitioned(engine)
        self._optimizer = engine.optimizer.optimizer if self._partitioned else engine.optimizer
        self._tensors = [tensor for group in self._optimizer.param_groups for tensor in group["params"]]
        self._numbers = {tensor: number for number, tensor in enumerate(self._tensors)}
        self._states: dict[int, dict[str, Any]] = {}

    def set_weight(self, parameter: nn.Parameter, weight: Tensor, own: Tensor | None) -> None:
        """Set a parameter, in the model's precision and in the optimizer's.

        Args:
            weight: [...], in the shape of the parameter.
            own: [elements] that the optimizer works on, in higher precision; None if `weight` is exact.
        """
        if not self._partitioned:
            parameter.data.copy_(weight if own is None else own.view(weight.shape))
            return
        parameter.data.copy_(weight)
        if elements := own_elements(self._engine, parameter):
            exact = weight.reshape(-1)[elements.start : elements.stop] if own is None else own
            parameter._hp_mapping.hp_fragment.data.copy_(exact)

    def set_state(self, parameter: nn.Parameter, moments: Mapping[str, Tensor], step: float | None) -> None:
        """Set the optimizer's state of the elements of a parameter that this rank's optimizer works on.

        Args:
            moments: tensors by name, such as `exp_avg`: [elements].
            step: updates done; None where the rule does not count them.
        """
        if not self._partitioned:
            # Cloned, because the optimizer would update the pages of the file.
            state = {key: moment.view(parameter.shape).clone() for key, moment in moments.items()}
            self._states[self._numbers[parameter]] = state | self._counted(step)
            return
        mapping = parameter._hp_mapping
        # A group has one flat tensor.
        group, address = mapping.param_group_index, mapping.get_hp_fragment_address()
        state = self._states.setdefault(group, self._counted(step))
        for key, moment in moments.items():
            if key not in state:
                state[key] = torch.zeros_like(self._tensors[group], requires_grad=False)
            state[key].narrow(0, address.start, address.numel).copy_(moment)

    def finish(self) -> None:
        """Hand the optimizer the states that were set. The settings of its groups are still the flags' ones."""
        groups = self._optimizer.state_dict()["param_groups"]
        for group in groups:
            numbers = (number for number in group["params"] if number in self._states)
            step = next((self._states[number].get("step") for number in numbers), None)
            if isinstance(step, int):  # fused optimizers count for the whole group
                group["step"] = step
        self._optimizer.load_state_dict({"state": dict(self._states), "param_groups": groups})

    def _counted(self, step: float | None) -> dict[str, Any]:
        """Return the updates done, as the optimizer counts them: torch's in tensors, all others in whole numbers."""
        if step is None:
            return {}
        rules = [rule for rule in type(self._optimizer).__mro__ if rule.__module__.startswith("torch.optim.")]
        # The last is torch's class of all optimizers.
        return {"step": torch.tensor(step) if len(rules) > 1 else int(step)}


@dataclass(frozen=True, slots=True)
class _Share:
    """Mapping from the saved parts of a tensor to the part of this rank."""

    num_parts: int
    """Parts that were saved: one for each tensor- or expert-parallel rank, and each part of the vocabulary."""
    rank: int
    size: int
    cut: int | None
    """Dimension that is cut; None if each rank holds the whole."""
    stride: int = 1
    """Blocks in that dimension, of each of which a part has its share: 2 for a gate and the product that it gates."""

    @property
    def source(self) -> int | None:
        """The one rank that saved this very part; None if it must be put together."""
        if self.num_parts == self.size:
            return self.rank
        return 0 if self.cut is None else None

    def of(self, part: Callable[[int], Tensor]) -> Tensor:
        """Return this rank's part [...], from a function from a rank to the part that it saved."""
        if self.source is not None:
            return part(self.source)
        blocks = zip(*(part(each).chunk(self.stride, self.cut) for each in range(self.num_parts)), strict=True)
        pieces = [
            shares[each].narrow(self.cut, run.start, len(run))
            for shares in blocks
            for each, run in self.runs([each.shape[self.cut] for each in shares])
        ]
        return torch.cat(pieces, dim=self.cut)

    def runs(self, lengths: Sequence[int], elements: range | None = None) -> Iterator[tuple[int, range]]:
        """Yield the number of each saved part with some elements of the part of this rank, and these, counted in it.

        Args:
            elements: of this rank's part; None for all.
        """
        own = sum(lengths) // self.size
        first, end = (0, own) if elements is None else (elements.start, elements.stop)
        return overlaps(lengths, range(self.rank * own + first, self.rank * own + end))


def _saved_state(
    optimizer: SavedOptimizer | MegatronWeights, info: CheckpointInfo, name: str, layer: int, part: int, elements: range
) -> ParameterState:
    saved_layer, rank = info.place(layer, part, name)
    first, _, rest = name.partition(".")
    saved_name = f"{saved_layer}.{rest}" if first.isdecimal() else name
    return optimizer.of(saved_name, rank, elements)


def _state(
    saved: Callable[[int, range], ParameterState], share: _Share, part: Callable[[int], Tensor], elements: range
) -> ParameterState:
    if share.source is not None:
        return saved(share.source, elements)
    parts = [part(each) for each in range(share.num_parts)]
    if share.cut == 0 and share.stride == 1:  # Only the parts with some of the elements are read.
        return joined([saved(number, run) for number, run in share.runs([each.numel() for each in parts], elements)])
    states = [saved(number, range(each.numel())) for number, each in enumerate(parts)]

    def reshared(flat: Callable[[ParameterState], Tensor]) -> Tensor:
        whole = share.of(lambda each: flat(states[each]).view(parts[each].shape))
        return whole.flatten()[elements.start : elements.stop]

    return ParameterState(
        weight=None if states[0].weight is None else reshared(lambda state: state.weight),
        moments={key: reshared(lambda state, key=key: state.moments[key]) for key in states[0].moments},
        step=states[0].step,
    )


def _reader(
    weights: SavedWeights | FolderWeights | NamedWeights, module: TokenSlicePipelineModule, index: int, name: str
) -> Callable[..., Tensor]:
    """Return the function that reads a weight of a layer, or the part of it that a rank saved."""
    if not isinstance(weights, NamedWeights):
        return partial(weights.weight, index, name)
    names = getattr(module.layer(index), "megatron_name", None)
    if names is None:
        raise CheckpointError(
            f"{module.data_entries.name(index)} has no names of a checkpoint of Megatron-LM: take its layers from "
            "gpt_model_layers, or load a checkpoint of this program"
        )
    return partial(weights.weight, names(name))


def _place(module: TokenSlicePipelineModule, name: str) -> tuple[int, str]:
    """Layer whose file has a parameter of a stage, and its name in it; for tied weights the first layer."""
    first, _, rest = name.partition(".")
    if first != "tied_modules":
        return int(first), rest
    key, _, rest = rest.partition(".")
    specs = enumerate(module._layer_specs)
    return next(index for index, spec in specs if isinstance(spec, TiedLayerSpec) and spec.key == key), rest


def _restore_loss_scale(ours: object, theirs: object | None) -> None:
    """Restore an adaptive loss scale; a fixed one is set by flags."""
    for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
        if getattr(ours, "dynamic", False) and hasattr(ours, name) and hasattr(theirs, name):
            setattr(ours, name, getattr(theirs, name))
