"""The files that hold each parameter's optimizer state, which one rank finds for all.

A checkpoint of many ranks has many files, and no name of a file says which parameters are in it: that depends on the
stages, and on how DeepSpeed dealt a stage's parameters to the data-parallel ranks. `save` writes what the ranks know
into `index.json`; of a checkpoint without one, the first rank looks into the files.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_ext.plan.text.json_text import parse_json
from deepspeed_ext.runtime.saved_files import UnsafeFileError, load_saved
from megatron_terapipe.checkpoint.agreement import from_first_rank
from megatron_terapipe.checkpoint.file_names import BF16_PREFIX, optimizer_files, state_file
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.errors import CheckpointError

INDEX_FILE = "index.json"
PARAMETER_NAMES = "parameter_names"
"""Key of a rank's state under which `save` puts the names of the optimizer's parameters, group by group."""


class Fragment(NamedTuple):
    """A run of a parameter's elements that one data-parallel rank saved."""

    replica: int
    length: int


class Place(NamedTuple):
    """Place of a parameter's state; the same for each tensor-parallel rank's part of it."""

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
    """Prefix of the names of the optimizer's files."""
    counters: Mapping[str, int]
    """Values other than tensors that DeepSpeed saved of the run."""
    loss_scaler: Any | None = None
    """Loss scaler of a run in fp16; None for other runs."""


def saved_run(directory: Path, info: CheckpointInfo, *, weights_only: bool) -> SavedRun:
    """Read what every rank must know of a checkpoint that is whole; every rank must call it at the same time.

    The first rank alone touches files.

    Args:
        weights_only: whether the state of the optimizer stays unread.

    Raises:
        AgreedCheckpointError: on every rank alike, if a file cannot be read.
    """
    return from_first_rank(lambda: _weights_alone() if weights_only else _read(directory, info))


def index_text(places: Iterable[tuple[str, Place]]) -> str:
    """Return the places of the state of each parameter, as a file holds them.

    Args:
        places: parameters that each rank saved, by name, stage by stage and replica by replica.
    """
    return json.dumps(_joined(places))


def parse_index(path: Path, info: CheckpointInfo) -> dict[str, Place]:
    """Return the place of the state of each parameter, read from a file.

    Raises:
        CheckpointError: if it does not say places, or places that this run cannot have had.
    """
    try:
        found: Any = parse_json(path.read_text(encoding="utf-8"), INDEX_FILE)
        places = {name: Place(stage, tuple(Fragment(*each) for each in rest)) for name, (stage, rest) in found.items()}
        known = all(_is_known(place, info) for place in places.values())
    except (OSError, ValueError, TypeError, AttributeError):
        known = False
    if not known:
        raise CheckpointError(
            f"{path} does not say where the state of each parameter lies: put the file back, or remove it, and the "
            "places are looked up"
        )
    return places


def load_file(path: Path) -> Mapping[str, Any]:
    """Return the objects that one rank saved. Tensors are mapped into memory, and read only where they are used."""
    loaded: Mapping[str, Any] = load_saved(path)
    return loaded


def _is_known(place: Place, info: CheckpointInfo) -> bool:
    """Whether the run had the stage and the replicas of a place."""
    numbers = [place.stage, *(number for fragment in place.fragments for number in fragment)]
    return (
        all(type(number) is int for number in numbers)
        and 0 <= place.stage < info.num_stages
        and all(0 <= replica < info.num_replicas and length > 0 for replica, length in place.fragments)
    )


def _weights_alone() -> SavedRun:
    return SavedRun(places={}, counters={})


def _read(directory: Path, info: CheckpointInfo) -> SavedRun:
    first = optimizer_files(0, 0, info.tensor_parallel_size, 1)[0]
    prefix = BF16_PREFIX if (directory / f"{BF16_PREFIX}{first}").exists() else ""
    path = directory / INDEX_FILE
    try:
        saved = load_file(directory / state_file(0, 0, info.tensor_parallel_size))
        if path.exists():
            places = parse_index(path, info)
        else:
            places = _joined(_looked_up(directory, info, prefix) if info.partitioned else _listed(directory, info))
        return SavedRun(
            places=places,
            prefix=prefix,
            counters={name: saved[name] for name in ("global_steps", "skipped_steps")},
            loss_scaler=load_file(directory / f"{prefix}{first}")["optimizer_state_dict"].get("loss_scaler")
            if info.partitioned
            else None,
        )
    except CheckpointError:
        raise
    except UnsafeFileError as error:
        raise CheckpointError(str(error)) from None
    except Exception as error:  # On a damaged file an unpickler may raise anything.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"checkpoint {directory} cannot be read ({reason}): load another, or the weights alone with --no-load-optim"
        ) from error


def _joined(places: Iterable[tuple[str, Place]]) -> dict[str, Place]:
    """The fragments of each parameter put together, of the first stage that has it: tied weights are on several."""
    joined: dict[str, Place] = {}
    for name, place in places:
        known = joined.setdefault(name, Place(place.stage))
        if place.stage == known.stage:
            joined[name] = Place(known.stage, known.fragments + place.fragments)
    return joined


def _listed(directory: Path, info: CheckpointInfo) -> Iterator[tuple[str, Place]]:
    """Yield each parameter that a stage saved in one piece, with its place."""
    for stage in range(info.num_stages):
        groups = load_file(directory / state_file(stage, 0, info.tensor_parallel_size))[PARAMETER_NAMES]
        yield from ((name, Place(stage)) for names in groups for name in names)


def _looked_up(directory: Path, info: CheckpointInfo, prefix: str) -> Iterator[tuple[str, Place]]:
    """Yield each parameter of which a stage and replica saved a fragment, with its place."""
    for stage in range(info.num_stages):
        names = optimizer_files(stage, 0, info.tensor_parallel_size, info.num_replicas)
        for replica, name in enumerate(names):
            partition = load_file(directory / f"{prefix}{name}")["optimizer_state_dict"]
            for addresses in partition["param_slice_mappings"]:
                for parameter, address in addresses.items():
                    yield parameter, Place(stage, (Fragment(replica, address.numel),))
