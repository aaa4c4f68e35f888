"""Reads the state of an optimizer as DeepSpeed saved it, parameter by parameter, whatever ranks it is spread over.

DeepSpeed flattens the parameters of a group into one tensor and deals that to the data-parallel ranks. A parameter's
fragments, in the order of the ranks, are the parameter again: beside them stands where each begins.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_terapipe.checkpoint.files import optimizer_files, state_file
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.errors import CheckpointError

PARAMETER_NAMES = "parameter_names"
"""Key of a rank's state under which `save` puts the names of the optimizer's parameters, group by group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterState:
    """What an optimizer knows of one parameter, or of a tensor-parallel rank's part of it.

    Attributes:
        weight: in fp32, flat; None where the optimizer works on the model's own weights.
        moments: such as `exp_avg`, flat.
        step: updates done; None where the rule does not count them.
    """

    weight: Tensor | None
    moments: Mapping[str, Tensor]
    step: float | None


class SavedOptimizer(Protocol):
    """The state of an optimizer, read where it lies."""

    def of(self, name: str, tensor_parallel_rank: int) -> ParameterState:
        """State of a parameter, as one tensor-parallel rank saved it. Stages do not matter.

        Raises:
            CheckpointError: if there is none.
        """


def saved_optimizer(directory: Path, info: CheckpointInfo) -> SavedOptimizer:
    """The state of the optimizer of a checkpoint."""
    return _PartitionedOptimizer(directory, info) if info.partitioned else _WholeOptimizer(directory, info)


def read_counters(directory: Path, info: CheckpointInfo) -> Mapping[str, Any]:
    """What DeepSpeed saved of a run beside tensors, as the first rank has it."""
    return _load(directory / state_file(0, 0, info.tensor_parallel_size))


def read_loss_scaler(directory: Path, info: CheckpointInfo) -> Any | None:
    """The loss scaler of a run in fp16; None for other runs."""
    if not info.partitioned:
        return None
    path = _partition_path(directory, optimizer_files(0, 0, info.tensor_parallel_size, info.num_replicas)[0])
    return _load(path)["optimizer_state_dict"].get("loss_scaler")


class _WholeOptimizer:
    """Torch's own state dictionary, one for each stage and tensor-parallel rank."""

    def __init__(self, directory: Path, info: CheckpointInfo) -> None:
        self._directory, self._info = directory, info
        self._stages = cache(self._load_stages)

    def of(self, name: str, tensor_parallel_rank: int) -> ParameterState:
        """State of a parameter; the weight is the model's own."""
        for by_name in self._stages(tensor_parallel_rank):
            if name in by_name:
                group, state = by_name[name]
                return ParameterState(weight=None, moments=_moments(state), step=_step(group, state))
        raise _lacking(self._directory, name)

    def _load_stages(self, tensor_parallel_rank: int) -> list[dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]]:
        """By stage: for each parameter its group and its state."""
        size = self._info.tensor_parallel_size
        files = [state_file(stage, tensor_parallel_rank, size) for stage in range(self._info.num_stages)]
        return [self._named(self._directory / file) for file in files]

    def _named(self, path: Path) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
        saved = _load(path)
        groups, states = saved["optimizer"]["param_groups"], saved["optimizer"]["state"]
        return {
            name: (group, states.get(number, {}))
            for group, names in zip(groups, saved[PARAMETER_NAMES], strict=True)
            for number, name in zip(group["params"], names, strict=True)
        }


class _PartitionedOptimizer:
    """DeepSpeed's flat groups, dealt to the data-parallel ranks."""

    def __init__(self, directory: Path, info: CheckpointInfo) -> None:
        self._directory, self._info = directory, info
        self._stages = cache(self._load_stages)

    def of(self, name: str, tensor_parallel_rank: int) -> ParameterState:
        """State of a parameter, its fragments put together."""
        for partitions in self._stages(tensor_parallel_rank):
            fragments = [fragment for partition in partitions for fragment in _fragments(partition, name)]
            if fragments:
                first = fragments[0]
                return ParameterState(
                    weight=torch.cat([each.weight for each in fragments if each.weight is not None]),
                    moments={key: torch.cat([each.moments[key] for each in fragments]) for key in first.moments},
                    step=first.step,
                )
        raise _lacking(self._directory, name)

    def _load_stages(self, tensor_parallel_rank: int) -> list[list[Mapping[str, Any]]]:
        """By stage and replica: what one rank saved."""
        size, replicas = self._info.tensor_parallel_size, self._info.num_replicas
        return [
            [
                _load(_partition_path(self._directory, name))["optimizer_state_dict"]
                for name in optimizer_files(stage, tensor_parallel_rank, size, replicas)
            ]
            for stage in range(self._info.num_stages)
        ]


def _fragments(partition: Mapping[str, Any], name: str) -> list[ParameterState]:
    """What one data-parallel rank has of a parameter: one fragment, or nothing."""
    base = partition["base_optimizer_state"]
    for group, addresses in enumerate(partition["param_slice_mappings"]):
        if name in addresses:
            start, length = addresses[name].start, addresses[name].numel
            state = base["state"].get(group, {})
            return [
                ParameterState(
                    weight=partition["single_partition_of_fp32_groups"][group].detach().narrow(0, start, length),
                    moments={key: moment.narrow(0, start, length) for key, moment in _moments(state).items()},
                    step=_step(base["param_groups"][group], state),
                )
            ]
    return []


def _moments(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value.flatten() for key, value in state.items() if torch.is_tensor(value) and value.dim()}


def _step(group: Mapping[str, Any], state: Mapping[str, Any]) -> float | None:
    """Updates done: torch counts them for each parameter, fused optimizers of others for each group."""
    step = state.get("step", group.get("step"))
    return None if step is None else float(step)


def _partition_path(directory: Path, name: str) -> Path:
    in_bf16 = directory / f"bf16_{name}"
    return in_bf16 if in_bf16.exists() else directory / name


def _load(path: Path) -> Mapping[str, Any]:
    # DeepSpeed saves objects of its own; tensors are mapped, and read only where they are used.
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)


def _lacking(directory: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {directory} has no state of {name}: load the weights alone with --no-load-optim"
    )
