"""The optimizer state of a checkpoint: the files with the state of each parameter, and their content.

Which parameters a file holds depends on the stages, and on how DeepSpeed partitioned the parameters of a stage over the
data-parallel ranks: `save` writes both into `index.json`.

DeepSpeed flattens the parameters of a group into one tensor and partitions it over the data-parallel ranks. The
fragments of a parameter, in the order of the ranks, are the parameter. A file is opened when it is first used.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed_ext.plan.text_files import bounded_text, parse_json
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.saved_files import UnsafeFileError, load_saved
from megatron_terapipe.checkpoint.directories import BF16_PREFIX, experts_state_file, optimizer_files, state_file
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.manifest import Manifest
from megatron_terapipe.errors import CheckpointError, first_line

INDEX_FILE = "index.json"
PARAMETER_NAMES = "parameter_names"
"""Key of a rank's state under which `save` puts the names of the optimizer's parameters, group by group."""


def is_partitioned(engine: TokenSlicePipelineEngine) -> bool:
    """Whether DeepSpeed deals flat groups of parameters to the data-parallel ranks: under ZeRO 1, and in bf16."""
    return not isinstance(engine.optimizer, torch.optim.Optimizer)


def own_elements(engine: TokenSlicePipelineEngine, parameter: nn.Parameter) -> range:
    """Return the elements of a flattened parameter that this rank's optimizer works on: all, a fragment, or none."""
    if not is_partitioned(engine):
        return range(parameter.numel())
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return range(0)
    address = mapping.lp_fragment_address
    return range(address.start, address.start + address.numel)


class Fragment(NamedTuple):
    """A run of a parameter's elements that one data-parallel rank saved."""

    replica: int
    """Number of the data-parallel rank; of experts that ranks share, of the copy of all experts."""
    length: int


class Place(NamedTuple):
    """Place of a parameter's state; the same for each tensor- or expert-parallel rank's part of it."""

    stage: int
    """That saved it, the first of several."""
    fragments: tuple[Fragment, ...] = ()
    """Fragments of which it consists, one after the other; none where a rank saved it in one piece."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRun:
    """Facts of a checkpoint that one rank reads for all."""

    places: Mapping[str, Place]
    """Places of the state of each parameter, by name; empty if only weights are loaded."""
    prefix: str = ""
    counters: Mapping[str, int]
    """Values other than tensors that DeepSpeed saved of the run."""
    loss_scaler: Any | None = None
    """Loss scaler of a run in fp16; None for other runs."""


def index_text(places: Iterable[tuple[str, Place]]) -> str:
    """Return the text of `index.json`, from the parameters that each rank saved, stage by stage, replica by replica.

    Each parameter has the fragments of the first stage that has it: tied weights are on several.
    """
    joined: dict[str, Place] = {}
    for name, place in places:
        first = joined.setdefault(name, Place(place.stage))
        if place.stage == first.stage:
            joined[name] = Place(first.stage, first.fragments + place.fragments)
    return json.dumps(joined)


def read_index(directory: Path) -> dict[str, Place]:
    """Return the place of the state of each parameter."""
    Manifest.read(directory).check_content(directory, [INDEX_FILE])
    found: Any = parse_json(bounded_text(directory / INDEX_FILE), INDEX_FILE)
    return {name: Place(stage, tuple(Fragment(*each) for each in rest)) for name, (stage, rest) in found.items()}


def read_run(directory: Path, info: CheckpointInfo) -> SavedRun:
    """Read the facts of a checkpoint of ours that every rank needs."""
    first = optimizer_files(0, 0, info.layout.tensor_parallel_size, 1)[0]
    prefix = BF16_PREFIX if (directory / f"{BF16_PREFIX}{first}").exists() else ""
    try:
        saved = load_saved(directory / state_file(0, 0, info.layout.tensor_parallel_size))
        return SavedRun(
            places=read_index(directory),
            prefix=prefix,
            counters={name: saved[name] for name in ("global_steps", "skipped_steps")},
            loss_scaler=load_saved(directory / f"{prefix}{first}")["optimizer_state_dict"].get("loss_scaler")
            if info.partitioned
            else None,
        )
    except CheckpointError:
        raise
    except UnsafeFileError as error:
        raise CheckpointError(str(error)) from None
    except Exception as error:  # On a damaged file an unpickler may raise anything.
        raise CheckpointError(
            f"checkpoint {directory} cannot be read ({first_line(error)}): load another, or only the weights with "
            "--no-load-optim"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterState:
    """Optimizer state of a run of elements of a parameter, in the order of memory."""

    weight: Tensor | None
    """[elements] in fp32; None where the optimizer works on the model's own weights."""
    moments: Mapping[str, Tensor]
    """Tensors by name, such as `exp_avg`: [elements]."""
    step: float | None
    """Updates done; None where the rule does not count them."""


def overlaps(lengths: Iterable[int], elements: range) -> Iterator[tuple[int, range]]:
    """Yield the number of each run, one after the other, that has some of the elements, and these, counted in it."""
    start = 0
    for number, length in enumerate(lengths):
        first, end = max(elements.start - start, 0), min(elements.stop - start, length)
        if first < end:
            yield number, range(first, end)
        start += length


def joined(states: Sequence[ParameterState]) -> ParameterState:
    """State of runs of elements, one after the other."""
    weights = [each.weight for each in states if each.weight is not None]
    return ParameterState(
        weight=torch.cat(weights) if weights else None,
        moments={key: torch.cat([each.moments[key] for each in states]) for key in states[0].moments},
        step=states[0].step,
    )


class SavedOptimizer:
    """The saved state of an optimizer, read from its files when used."""

    def __init__(self, directory: Path, info: CheckpointInfo, saved: SavedRun) -> None:
        self._directory, self._info, self._saved = directory, info, saved
        self._partition = cache(self._load_partition)
        self._named_states = cache(self._load_named_states)

    def of(self, name: str, part: int, elements: range) -> ParameterState:
        """State of some elements of a parameter, or of a tensor- or expert-parallel rank's part of it."""
        place = self._saved.places.get(name)
        if place is None:
            raise CheckpointError(
                f"checkpoint {self._directory} has no state of {name}: load only the weights with --no-load-optim"
            )
        if not place.fragments:
            group, state = self._named_states(place.stage, part, self._info.has_files_of_experts(name))[name]
            moments = {key: moment[elements.start : elements.stop] for key, moment in _moments(state).items()}
            return ParameterState(weight=None, moments=moments, step=_step(group, state))
        states = []
        for number, run in overlaps((fragment.length for fragment in place.fragments), elements):
            rank = place.fragments[number].replica * self._info.ranks_of_copy(name) + part
            partition = self._partition(place.stage, *divmod(rank, self._info.layout.tensor_parallel_size))
            states.append(_fragment(partition, name, run))
        return joined(states)

    def _load_partition(self, stage: int, replica: int, tensor_parallel_rank: int) -> Mapping[str, Any]:
        names = optimizer_files(stage, tensor_parallel_rank, self._info.layout.tensor_parallel_size, replica + 1)
        return load_saved(self._directory / f"{self._saved.prefix}{names[replica]}")["optimizer_state_dict"]

    def _load_named_states(
        self, stage: int, part: int, of_experts: bool
    ) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """For each parameter of a stage its group and its state, from torch's own state dictionary."""
        shared = state_file(stage, part, self._info.layout.tensor_parallel_size)
        saved = load_saved(self._directory / (experts_state_file(stage, part) if of_experts else shared))
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
    beside = (int, float, type(None))  # Any other object is a tensor, or the file is damaged.
    return {key: value.flatten() for key, value in state.items() if not isinstance(value, beside) and value.dim()}


def _step(group: Mapping[str, Any], state: Mapping[str, Any]) -> float | None:
    """Updates done: torch counts them for each parameter, fused optimizers of others for each group."""
    step = state.get("step", group.get("step"))
    return None if step is None else float(step)
