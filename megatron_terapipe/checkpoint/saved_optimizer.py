"""Reads the state of an optimizer as DeepSpeed saved it, parameter by parameter, whatever ranks it is spread over.

DeepSpeed flattens the parameters of a group into one tensor and deals that to the data-parallel ranks. A parameter's
fragments, in the order of the ranks, are the parameter again: beside them stands where each begins. A file is opened
when something in it is wanted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_terapipe.checkpoint.file_names import optimizer_files, state_file
from megatron_terapipe.checkpoint.index import PARAMETER_NAMES, SavedRun, load_file
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterState:
    """Optimizer state of a run of elements of a parameter, in the order in which they lie in memory."""

    weight: Tensor | None
    """[elements] in fp32; None where the optimizer works on the model's own weights."""
    moments: Mapping[str, Tensor]
    """Tensors by name, such as `exp_avg`: [elements]."""
    step: float | None
    """Updates done; None where the rule does not count them."""


class SavedOptimizer:
    """The state of an optimizer, read where it lies.

    Args:
        saved: places of each parameter's state.
    """

    def __init__(self, directory: Path, info: CheckpointInfo, saved: SavedRun) -> None:
        self._directory, self._info, self._saved = directory, info, saved
        self._partition = cache(self._load_partition)
        self._named_states = cache(self._load_named_states)

    def of(self, name: str, tensor_parallel_rank: int, elements: range) -> ParameterState:
        """State of some elements of a parameter, or of a tensor-parallel rank's part of it.

        Args:
            elements: elements of the flattened part; at least one.

        Raises:
            CheckpointError: if there is none.
        """
        place = self._saved.places.get(name)
        if place is None:
            raise CheckpointError(
                f"checkpoint {self._directory} has no state of {name}: load the weights alone with --no-load-optim"
            )
        if not place.fragments:
            group, state = self._named_states(place.stage, tensor_parallel_rank)[name]
            moments = {key: moment[elements.start : elements.stop] for key, moment in _moments(state).items()}
            return ParameterState(weight=None, moments=moments, step=_step(group, state))
        states, start = [], 0
        for fragment in place.fragments:
            # Of this fragment, the elements that are wanted.
            first, end = max(elements.start - start, 0), min(elements.stop - start, fragment.length)
            if first < end:
                partition = self._partition(place.stage, tensor_parallel_rank, fragment.replica)
                states.append(_fragment(partition, name, range(first, end)))
            start += fragment.length
        return ParameterState(
            weight=torch.cat([each.weight for each in states if each.weight is not None]),
            moments={key: torch.cat([each.moments[key] for each in states]) for key in states[0].moments},
            step=states[0].step,
        )

    def _load_partition(self, stage: int, tensor_parallel_rank: int, replica: int) -> Mapping[str, Any]:
        """Return the optimizer state that one data-parallel rank saved."""
        names = optimizer_files(stage, tensor_parallel_rank, self._info.tensor_parallel_size, replica + 1)
        return load_file(self._directory / f"{self._saved.prefix}{names[replica]}")["optimizer_state_dict"]

    def _load_named_states(
        self, stage: int, tensor_parallel_rank: int
    ) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """For each parameter of a stage its group and its state, from torch's own state dictionary."""
        saved = load_file(self._directory / state_file(stage, tensor_parallel_rank, self._info.tensor_parallel_size))
        groups, states = saved["optimizer"]["param_groups"], saved["optimizer"]["state"]
        return {
            name: (group, states.get(number, {}))
            for group, names in zip(groups, saved[PARAMETER_NAMES], strict=True)
            for number, name in zip(group["params"], names, strict=True)
        }


def _fragment(partition: Mapping[str, Any], name: str, elements: range) -> ParameterState:
    """Some elements of the fragment that one data-parallel rank has of a parameter."""
    base = partition["base_optimizer_state"]
    mappings = partition["param_slice_mappings"]
    group = next(number for number, addresses in enumerate(mappings) if name in addresses)
    start, length = mappings[group][name].start + elements.start, len(elements)
    state = base["state"].get(group, {})
    return ParameterState(
        weight=partition["single_partition_of_fp32_groups"][group].detach().narrow(0, start, length),
        moments={key: moment.narrow(0, start, length) for key, moment in _moments(state).items()},
        step=_step(base["param_groups"][group], state),
    )


def _moments(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value.flatten() for key, value in state.items() if torch.is_tensor(value) and value.dim()}


def _step(group: Mapping[str, Any], state: Mapping[str, Any]) -> float | None:
    """Updates done: torch counts them for each parameter, fused optimizers of others for each group."""
    step = state.get("step", group.get("step"))
    return None if step is None else float(step)
