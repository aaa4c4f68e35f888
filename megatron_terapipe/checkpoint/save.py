"""Saves a checkpoint; a directory with the name of a checkpoint is always whole.

begin_save       checks the room on the disk; DeepSpeed saves through `FileWriter`, to the disk or to memory
UnfinishedSave   writes the rest, `run.json`, `index.json` and the manifest; one rename, and `latest` last
BackgroundSaves  does the latter in a thread of each rank during training
"""

import io
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from shutil import disk_usage, rmtree
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from torch import Tensor

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.topology import any_rank
from megatron_terapipe.checkpoint.agreement import from_first_rank, in_daemon
from megatron_terapipe.checkpoint.directories import complete, experts_file, experts_state_file, remove_older
from megatron_terapipe.checkpoint.info import EXPERTS, RUN_FILE, CheckpointInfo
from megatron_terapipe.checkpoint.manifest import ASIDE, DurableFile, FileFacts
from megatron_terapipe.checkpoint.model_files import in_checkpoint
from megatron_terapipe.checkpoint.optimizer_state import (
    INDEX_FILE,
    PARAMETER_NAMES,
    Fragment,
    Place,
    index_text,
    is_partitioned,
    own_elements,
)
from megatron_terapipe.config.checkpoint import checkpoint_tag
from megatron_terapipe.errors import CheckpointError, SaveError, first_line

_BLOCK = 1 << 26
"""Bytes that are written at a time from memory."""


class FileWriter(CheckpointEngine):
    """DeepSpeed's plug-in that saves one checkpoint's files of this rank.

    A fault is stored and not raised: DeepSpeed would wait for this rank on the others.

    Args:
        in_memory: keep the files in memory until `write_buffers`. They hold the same bytes.
        leaves_out: tensors whose names contain it are not in the files that DeepSpeed saves; None for all.
    """

    def __init__(self, *, in_memory: bool, leaves_out: str | None = None) -> None:
        super().__init__()
        self._in_memory, self._leaves_out = in_memory, leaves_out
        self._buffers: list[tuple[Path, io.BytesIO]] = []
        self.facts: dict[str, FileFacts] = {}
        """Sizes and hashes of the files that are on the disk, by name."""
        self.fault: str | None = None

    def create(self, info: Any) -> None:
        """Do nothing."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory."""
        self._guarded(Path(path), lambda: os.makedirs(path, exist_ok=exist_ok))

    def save(self, state_dict: Any, path: str) -> None:
        """Save a file of DeepSpeed."""
        if self._leaves_out is not None:
            state_dict = {name: value for name, value in state_dict.items() if self._leaves_out not in name}
        self.add(state_dict, Path(path))

    def add(self, content: Any, path: Path) -> None:
        """Save a file."""
        if self._in_memory:
            # The bytes of the file are the copy: they are made as fast as tensors are copied.
            self._buffers.append((path, buffer := io.BytesIO()))
            self._guarded(path, lambda: torch.save(content, buffer))
        else:
            self._write(path, lambda file: torch.save(content, file))

    def write_buffers(self) -> None:
        """Write the files that are in memory, and free the memory."""
        while self._buffers:
            path, buffer = self._buffers.pop(0)
            self._write(path, partial(_copy, buffer))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Fail: checkpoints are not loaded with this class."""
        raise NotImplementedError

    def commit(self, info: Any) -> bool:
        """End: the checkpoint is done when all ranks' files are."""
        return True

    def _write(self, path: Path, fill: Callable[[Any], object]) -> None:
        def write() -> None:
            with DurableFile(path) as file:
                fill(file)
            self.facts[path.name] = file.facts

        self._guarded(path, write)

    def _guarded(self, path: Path, action: Callable[[], object]) -> None:
        """Act unless there is a fault; store an error of any kind, so that all ranks can raise the same one."""
        try:
            if self.fault is None:
                action()
        except Exception as error:
            strerror = error.strerror if isinstance(error, OSError) else None
            self.fault = f"host {socket.gethostname()}, {path.name}: {strerror or first_line(error)}"


def _copy(buffer: io.BytesIO, file: DurableFile) -> None:
    with buffer.getbuffer() as content:
        for start in range(0, len(content), _BLOCK):
            file.write(content[start : start + _BLOCK])


STATES_OF_ADAM = 2
"""Tensors that Adam has for each weight once it has stepped; other rules have fewer."""


def bytes_to_save(engine: TokenSlicePipelineEngine, optimizer: str | None) -> int:
    """Return the bytes of tensors that all ranks together save; every rank must call it at the same time.

    Without an optimizer, its state is not saved.
    """
    weights = engine.module.state_dict().items()
    mine = _bytes(weight for name, weight in weights if _copy_and_part(engine, name)[0] == 0)
    partitioned = is_partitioned(engine)
    if optimizer is not None:
        rule: Any = engine.optimizer.optimizer if partitioned else engine.optimizer
        # Where the state is dealt to replicas, each saves its own; else the first saves it for all.
        worked_on = [
            weight
            for group in rule.param_groups
            for weight in group["params"]
            if partitioned or _copy_and_part(engine, engine.param_names[weight])[0] == 0
        ]
        states = [rule.state[weight] for weight in worked_on if weight in rule.state]
        moments = [value for state in states for value in state.values() if torch.is_tensor(value)]
        expected = STATES_OF_ADAM * _bytes(worked_on) if optimizer.startswith("adam") else 0
        # Before the first step there is no state yet.
        mine += (_bytes(worked_on) if partitioned else 0) + (_bytes(moments) if moments else expected)
    total = torch.tensor(float(mine), dtype=torch.float64, device=engine.device)
    dist.all_reduce(total)
    return int(total.item())


def check_room(save: Path, size: int) -> None:
    """Refuse to save a checkpoint of more bytes than are free on the disk."""
    free = disk_usage(save).free
    if free < size:
        raise CheckpointError(
            f"a checkpoint of {_readable(size)} has no room in {save}, where {_readable(free)} are free: make room, or "
            "name another --save; checkpoints that are there are whole"
        )


def room_warning(save: Path, size: int, num_new: int, keep_last: int | None) -> str | None:
    """Return a line for the log if the disk will be full before the run ends; None if it will not, as far as is known.

    Args:
        keep_last: checkpoints that are kept; None for all.
    """
    free = disk_usage(save).free
    # One more than are kept is there while the oldest is still whole.
    needed = num_new if keep_last is None else min(num_new, keep_last + 1)
    fitting = free // size if size else needed
    if fitting >= needed:
        return None
    advice = "make room" if keep_last is not None else "make room, or keep fewer with --keep-last-n-checkpoints"
    return (
        f" warning: {save} has room for {fitting} checkpoints of {_readable(size)}, and this run needs {needed} at a "
        f"time: {advice}"
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _readable(size: int) -> str:
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if size >= unit), (1e3, "kB"))
    return f"{size / unit:.4g} {name}"


Part = tuple[dict[str, FileFacts], str | None, list[tuple[str, Place]]]
"""One rank's part of a checkpoint: facts of its files, its fault if it has one, and places of its parameters' state."""


@dataclass(frozen=True, slots=True)
class UnfinishedSave:
    """A checkpoint of which this rank has copied or written its part, and which has no name yet."""

    directory: Path
    info: CheckpointInfo
    writer: FileWriter
    places: list[tuple[str, Place]]
    keep_last: int | None
    """Checkpoints to keep, the newest; None for all."""
    model_files: Mapping[str, bytes] = field(default_factory=dict)
    """Files beside the weights by name; of the first rank."""

    def finish(self, group: dist.ProcessGroup | None = None) -> list[str]:
        """Write the remaining files, give the checkpoint its name, and return lines for the log.

        Every rank must call it. If one could not write its part, all raise a `SaveError`, and the files are gone.

        Args:
            group: of all ranks, not used by others meanwhile; None for the group of the run.
        """
        self.writer.write_buffers()
        parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        own: Part = self.writer.facts, self.writer.fault, self.places
        dist.gather_object(own, parts, dst=0, group=group)
        return from_first_rank(partial(self._complete, parts or []), group=group, error=SaveError)

    def _complete(self, parts: list[Part]) -> list[str]:
        partial = _aside(self.directory)
        try:
            for rank, (_, fault, _) in enumerate(parts):
                if fault is not None:
                    raise OSError(f"rank {rank}, {fault}")
            files = {name: facts for written, _, _ in parts for name, facts in written.items()}
            texts: dict[str, str | bytes] = {RUN_FILE: self.info.text(), **in_checkpoint(self.model_files)}
            # Ranks count stages slowest.
            if places := [place for _, _, places in parts for place in places]:
                texts[INDEX_FILE] = index_text(places)
            complete(partial, self.directory, files, texts)
        except OSError as error:
            rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {self.directory} was not saved ({error.strerror or error}): make room or fix "
                f"{self.directory.parent}, and continue from the one before, which is whole"
            ) from None
        lines = [f" saved checkpoint {self.directory}"]
        try:
            remove_older(self.directory.parent, self.info.iteration, self.keep_last)
        except OSError as error:
            lines.append(f" warning: older checkpoints in {self.directory.parent} could not be removed: {error}")
        return lines


def begin_save(
    engine: TokenSlicePipelineEngine,
    save: str | Path,
    info: CheckpointInfo,
    *,
    keep_last: int | None = None,
    in_memory: bool = False,
    model_files: Mapping[str, bytes] | None = None,
) -> UnfinishedSave:
    """Write this rank's part of a checkpoint, or copy it to memory, on every rank; `finish` then gives it its name.

    Without room on the disk, all ranks raise a `SaveError`.

    Args:
        info: facts of the run; without an optimizer, none is saved.
        keep_last: checkpoints to keep, the newest; None for all.
        in_memory: leave the disk to `UnfinishedSave.finish`, which another thread may call during training.
        model_files: files beside the weights by name, on the first rank; None for none.
    """
    directory = Path(save) / checkpoint_tag(info.iteration)
    with_optimizer = info.optimizer is not None
    size = bytes_to_save(engine, info.optimizer)
    from_first_rank(partial(_prepare, _aside(directory), size), error=SaveError)
    writer = FileWriter(in_memory=in_memory, leaves_out=EXPERTS if _shares(engine, EXPERTS) else None)
    _save_with_deepspeed(engine, _aside(directory), writer, with_optimizer=with_optimizer)
    if _shares(engine, EXPERTS):
        _save_experts(engine, _aside(directory), writer, with_optimizer=with_optimizer)
    places = _places(engine) if with_optimizer else []
    return UnfinishedSave(directory, info, writer, places, keep_last, model_files or {})


def _aside(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}{ASIDE}")


def _prepare(aside: Path, size: int) -> None:
    rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"--save {aside.parent} cannot be written ({error.strerror}): name another") from None
    try:
        check_room(aside.parent, size)
    except CheckpointError:
        aside.rmdir()
        raise


def _save_with_deepspeed(
    engine: TokenSlicePipelineEngine, directory: Path, writer: FileWriter, *, with_optimizer: bool
) -> None:
    state: dict[str, Any] = {"optimizer": None}  # DeepSpeed would save it a second time
    if with_optimizer and not is_partitioned(engine):
        state = _optimizer_state(engine, of_experts=False)
    saves_partition, own_writer = engine.save_zero_checkpoint, engine.checkpoint_engine
    engine.save_zero_checkpoint, engine.checkpoint_engine = saves_partition and with_optimizer, writer
    try:
        engine.save_checkpoint(str(directory.parent), tag=directory.name, client_state=state, save_latest=False)
    finally:
        engine.save_zero_checkpoint, engine.checkpoint_engine = saves_partition, own_writer


def _shares(engine: TokenSlicePipelineEngine, name: str) -> bool:
    """Whether expert-parallel ranks have different rows of a weight."""
    return EXPERTS in name and engine.module.topology().layout.expert_parallel_size > 1


def _copy_and_part(engine: TokenSlicePipelineEngine, name: str) -> tuple[int, int]:
    """Number of this rank's copy of a weight on its stage, and its part of that copy."""
    layout: ParallelLayout = engine.module.topology().layout
    size = layout.expert_parallel_size if _shares(engine, name) else layout.tensor_parallel_size
    return divmod(engine.global_rank % layout.ranks_of_a_stage, size)


def _save_experts(
    engine: TokenSlicePipelineEngine, directory: Path, writer: FileWriter, *, with_optimizer: bool
) -> None:
    """Save this rank's experts, unless a rank before this one has the same."""
    module, (copy, part) = engine.module, _copy_and_part(engine, EXPERTS)
    if copy > 0:
        return
    for number in module._layer_numbers:
        weights = module.layer(number).state_dict()
        # Copied: the parameters of a flat group share a storage, which would be saved as a whole.
        experts = {name: weight.to("cpu", copy=True) for name, weight in weights.items() if EXPERTS in name}
        if experts:
            writer.add(experts, directory / experts_file(number, part))
    if with_optimizer and not is_partitioned(engine):
        path = directory / experts_state_file(engine.grid.get_stage_id(), part)
        writer.add(_optimizer_state(engine, of_experts=True), path)


def _optimizer_state(engine: TokenSlicePipelineEngine, *, of_experts: bool) -> dict[str, Any]:
    """State of an optimizer of torch: of the experts that ranks share, or of all other parameters."""
    saved, groups, names = engine.optimizer.state_dict(), [], []
    for group, own in zip(saved["param_groups"], engine.optimizer.param_groups, strict=True):
        named = zip(group["params"], (engine.param_names[weight] for weight in own["params"]), strict=True)
        kept = {number: name for number, name in named if _shares(engine, name) == of_experts}
        groups.append(group | {"params": list(kept)})
        names.append(list(kept.values()))
    numbers = {number for group in groups for number in group["params"]}
    states = {number: state for number, state in saved["state"].items() if number in numbers}
    return {"optimizer": {"state": states, "param_groups": groups}, PARAMETER_NAMES: names}


def _places(engine: TokenSlicePipelineEngine) -> list[tuple[str, Place]]:
    """Places of the state of this rank's parameters, if no other rank has the same."""
    found: list[tuple[str, Place]] = []
    in_fragments = is_partitioned(engine)
    for name, parameter in engine.module.named_parameters():
        copy, part = _copy_and_part(engine, name)
        # The parts of a copy have the same places, and without partitioning also the copies.
        if part == 0 and (in_fragments or copy == 0):
            if parameter.requires_grad and (elements := own_elements(engine, parameter)):
                fragments = (Fragment(copy, len(elements)),) if in_fragments else ()
                found.append((name, Place(engine.grid.get_stage_id(), fragments)))
    return found


_LONGEST_WRITE = timedelta(days=1)
"""Time that a rank waits for the others' files. The end of a rank is detected at once, and a hang by training."""


class BackgroundSaves:
    """Finishes a checkpoint in a thread of each rank; every rank must call each method at the same time.

    The threads agree in a process group of their own, over the network of the hosts, so that training does
    not wait for them. Hashing, writing and syncing release the lock of Python.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WRITE)
        self._lines: Future[list[str]] | None = None

    def start(self, unfinished: UnfinishedSave) -> None:
        """Finish a checkpoint in the background; there must be none in flight."""
        assert self._lines is None, "one at a time"
        # A run that fails for another reason does not wait for it: the checkpoint before stays the latest.
        self._lines = in_daemon("checkpoint", partial(unfinished.finish, self._group))

    def is_done(self) -> bool:
        """Whether all ranks have finished the checkpoint in flight; a collective while there is one."""
        return self._lines is not None and not any_rank(not self._lines.done())

    def finish(self) -> list[str]:
        """Wait for the checkpoint in flight, if there is one; return lines for the log, or raise its error."""
        lines, self._lines = self._lines, None
        return [] if lines is None else lines.result()
