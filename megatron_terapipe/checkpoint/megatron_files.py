"""Files of Megatron-LM's checkpoints, in its formats `torch` and `torch_dist`, read one tensor at a time.

CHECKPOINTS/latest_checkpointed_iteration.txt        iteration of the newest, or `release`
CHECKPOINTS/iter_0000100/mp_rank_TT[_PPP]/...pt      torch: all that a tensor-parallel rank of a pipeline rank has
CHECKPOINTS/iter_0000100/common.pt, .metadata        torch_dist: arguments; place of each chunk of each whole tensor
CHECKPOINTS/iter_0000100/__R_N.distcp                torch_dist: the chunks

Both give the same names: those of `GPTModel` in megatron-core with its own layers, where a transformer layer has its
number in the whole model, `decoder.layers.5.input_layernorm.weight`.
"""

import json
import re
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron_terapipe.checkpoint.foreign import MEGATRON_COMMON_FILE, MEGATRON_LATEST, MEGATRON_RANK_FILE
from megatron_terapipe.checkpoint.inert_pickles import InertUnpickler, pickled
from megatron_terapipe.checkpoint.megatron_model import common_file, unreadable
from megatron_terapipe.errors import CheckpointError, first_line

METADATA_FILE = ".metadata"
WEIGHT_OF_OPTIMIZER = "param"
"""Name here of an optimizer's own weight, in higher precision than the model's."""
_OWN_WEIGHTS = ("fp32_param", WEIGHT_OF_OPTIMIZER)
"""Its names in the files: of the optimizer that each replica has whole, and of the distributed one."""
LAYERS = "decoder.layers."
_MOST_LAYERS = 100_000
_IN_BUFFERS = (
    "it is in buffers of the distributed optimizer's ranks; --ckpt-format torch_dist with "
    "--dist-ckpt-optim-fully-reshardable saves it by weight"
)
_OUTPUT_CUT = ("linear_qkv", "linear_fc1", "word_embeddings", "output_layer")
"""Modules whose outputs are shared by tensor-parallel ranks."""
_WITH_EXTRA_STATE = tuple(f"{each}.weight" for each in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))
_INPUT_CUT = ("linear_proj.weight", "linear_fc2.weight")
"""Weights whose inputs are."""
_FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
"""Beginnings of the names of norms in layers of Transformer Engine, and in those of megatron-core."""


CONSTRUCTED: Mapping[str, Any] = {
    # Parameters, and tensors with attributes: only the tensor is kept.
    **dict.fromkeys(
        ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"), lambda data, *_: data
    ),
    "torch._tensor._rebuild_from_type_v2": lambda function, kind, arguments, state: function(*arguments),
    "torch._utils._rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
    **{
        f"{kind.__module__}.{kind.__qualname__}": kind
        for kind in (
            *(torch.Size, dcp.Metadata, dcp.TensorStorageMetadata, dcp.BytesStorageMetadata),
            *(dcp.ChunkStorageMetadata, dcp.MetadataIndex, _StorageInfo),
        )
    },
}
"""Classes and functions that a pickle of tensors may name; they hold values, and call nothing."""


class TensorUnpickler(InertUnpickler):
    """Unpickler that also constructs tensors and their places in files. torch adds their storages."""

    constructed = InertUnpickler.constructed | CONSTRUCTED


class InertPickle:
    """A module of pickles, for `torch.load`."""

    Unpickler = TensorUnpickler
    __name__ = "inert pickles"


def load_inert(file: Any) -> Any:
    """Return the objects of a file of `torch.save`. Tensors of a path are mapped, and read when they are used."""
    return torch.load(
        file, map_location="cpu", pickle_module=InertPickle, weights_only=False, mmap=isinstance(file, Path) or None
    )


class MegatronFiles(ABC):
    """The tensors and facts of one checkpoint, whatever its format and the number of ranks that saved it.

    Args:
        common: objects of the checkpoint other than its tensors.
    """

    def __init__(self, directory: Path, common: Mapping[str, Any]) -> None:
        self.directory = directory
        self.args: Namespace | None = common.get("args")
        """Arguments of the run; None if it did not save them."""
        self.iteration: int = common.get("iteration") or 0
        self.common = common

    names: frozenset[str]
    """Names of the tensors of the model, which are not all weights."""
    states: frozenset[str] = frozenset()
    """Names of the optimizer's tensors of each weight, such as `exp_avg`; none where they cannot be read."""
    no_states: str = "it was saved without"
    """Why there are none."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor, which is not read."""

    @abstractmethod
    def read(self, name: str, state: str | None = None) -> Tensor:
        """Return a whole tensor [...] of the model, or a state of the optimizer in the same shape."""

    @property
    def step(self) -> float | None:
        """Updates done by the optimizer; None if it does not count them."""
        return _step(self.common.get("optimizer"))


def _step(optimizer: Any) -> float | None:
    """The updates in an optimizer's dictionary: Megatron has one number for all weights, in one of several places."""
    if isinstance(optimizer, Mapping):
        for key in ("common_step", "step"):
            if isinstance(found := optimizer.get(key), int | float | Tensor):
                return float(found)
        optimizer = [*optimizer.values()]
    if not isinstance(optimizer, Sequence) or isinstance(optimizer, str):
        return None
    return next((found for each in optimizer if (found := _step(each)) is not None), None)


def open_files(directory: Path) -> MegatronFiles:
    """Return the files of a checkpoint, `iter_*` or `release`."""
    kind = _DistributedFiles if common_file(directory).name == MEGATRON_COMMON_FILE else _RankFiles
    try:
        return kind(directory)
    except CheckpointError:
        raise
    except Exception as error:  # On a damaged file an unpickler may raise anything.
        raise unreadable(directory, error) from None


def _in_own_layers(name: str) -> str:
    """Return a name as megatron-core's own layers have it, from one of Transformer Engine's."""
    for fused, own in _FUSED_NORMS:
        name = name.replace(fused, own)
    return name


class _DistributedFiles(MegatronFiles):
    """`torch_dist`: whole tensors in chunks, those of one weight of all layers as one tensor [layers, ...]."""

    def __init__(self, directory: Path) -> None:
        if not (directory / METADATA_FILE).is_file():
            raise CheckpointError(
                f"checkpoint {directory} of Megatron-LM has no {METADATA_FILE}: save it with --ckpt-format torch_dist"
            )
        super().__init__(directory, load_inert(directory / MEGATRON_COMMON_FILE))
        with (directory / METADATA_FILE).open("rb") as file:
            found = TensorUnpickler(file).load()
        self._chunks = {(index.fqn, tuple(index.offset or ())): info for index, info in found.storage_data.items()}
        tensors = found.state_dict_metadata.items()
        self._tensors = {key: each for key, each in tensors if isinstance(each, dcp.TensorStorageMetadata)}
        # From the name of a tensor to its key, and its row there if it is one layer of several.
        self._places: dict[str, tuple[str, int | None]] = {}
        self._keys_of_states: dict[str, str] = {}
        for key, tensor in self._tensors.items():
            if match := re.match(r"((?:chained_\d+\.)?optimizer\.state\.(\w+)\.)[a-z]", key):
                state = WEIGHT_OF_OPTIMIZER if match[2] in _OWN_WEIGHTS else match[2]
                self._keys_of_states[state] = match[1]
            elif key.startswith(LAYERS) and not key[len(LAYERS)].isdigit():
                if tensor.size[0] > _MOST_LAYERS:
                    raise ValueError(f"{key} has {tensor.size[0]} layers")
                for layer in range(tensor.size[0]):
                    self._places[_in_own_layers(f"{LAYERS}{layer}.{key[len(LAYERS) :]}")] = key, layer
            elif not key.startswith("optimizer."):
                self._places[_in_own_layers(key)] = key, None
        self.names, self.states = frozenset(self._places), frozenset(self._keys_of_states)
        if any(key.startswith("optimizer.distributed.") for key in self._tensors):
            self.no_states = _IN_BUFFERS

    def shape(self, name: str) -> tuple[int, ...]:
        key, row = self._places[name]
        return tuple(self._tensors[key].size[row is not None :])

    def read(self, name: str, state: str | None = None) -> Tensor:
        key, row = self._places[name]
        key = key if state is None else self._keys_of_states[state] + key
        try:
            return self._assembled(key, row)
        except Exception as error:
            raise unreadable(self.directory, error) from None

    def _assembled(self, key: str, row: int | None) -> Tensor:
        """Return a tensor, or one row of it, from its chunks."""
        tensor = self._tensors[key]
        whole, filled = None, 0
        for chunk in tensor.chunks:
            start, size = chunk.offsets, chunk.sizes
            if row is not None and not start[0] <= row < start[0] + size[0]:
                continue
            part = self._chunk(self._chunks[key, tuple(start)])
            if row is not None:
                part, start, size = part[row - start[0]], start[1:], size[1:]
            if whole is None:
                whole = torch.empty(tensor.size[row is not None :], dtype=part.dtype)
            whole[tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))] = part
            filled += part.numel()
        if whole is None or filled != whole.numel():
            raise ValueError(f"{key} has not all its chunks")
        return whole

    def _chunk(self, info: _StorageInfo) -> Tensor:
        if Path(info.relative_path).name != info.relative_path or getattr(info, "transform_descriptors", None):
            raise ValueError(f"{METADATA_FILE} names {info.relative_path}, which is no file of plain tensors")
        with (self.directory / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            found: Tensor = load_inert(BytesIO(file.read(info.length)))
        return found


class _RankFiles(MegatronFiles):
    """`torch`: a file for each rank of one replica, with its layers counted from 0."""

    def __init__(self, directory: Path) -> None:
        paths = {}
        for path in directory.glob(f"mp_rank_*/{MEGATRON_RANK_FILE}"):
            if match := re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?", path.parent.name):
                paths[int(match[1]), int(match[2] or 0)] = path
        sizes = [len({place[axis] for place in paths}) for axis in (0, 1)]
        if missing := {(rank, stage) for rank in range(sizes[0]) for stage in range(sizes[1])} - paths.keys():
            rank, stage = min(missing)
            raise CheckpointError(
                f"checkpoint {directory} of Megatron-LM lacks {MEGATRON_RANK_FILE} of tensor-parallel rank {rank} and "
                f"pipeline rank {stage}: copy the whole directory"
            )
        self._num_tensor_ranks = sizes[0]
        self._rank: Callable[[int, int], Mapping[str, Any]] = cache(lambda *place: load_inert(paths[place]))
        first = self._rank(0, 0)
        super().__init__(directory, first)
        # The number of a rank's model chunk is the last of the key.
        chunks = sorted((key for key in first if re.fullmatch(r"model\d*", key)), key=lambda key: int(key[5:] or 0))
        # From the name of a tensor to the pipeline rank, the model chunk, and its name there.
        self._places: dict[str, tuple[int, str, str]] = {}
        before = 0
        for chunk in chunks:
            for stage in range(sizes[1]):
                before += self._add_stage(stage, chunk, before)
        self.names = frozenset(self._places)
        self._add_optimizer(range(sizes[1]), chunks)

    def _add_stage(self, stage: int, chunk: str, before: int) -> int:
        """Add the tensors of a stage after so many layers, and return the number of its layers."""
        tensors = self._rank(0, stage)[chunk]
        if "language_model" in tensors:
            raise CheckpointError(
                f"checkpoint {self.directory} is of Megatron-LM's legacy models: convert it there with "
                "tools/checkpoint/convert.py --saver core"
            )
        layers = 0
        for local, tensor in tensors.items():
            name = local
            if match := re.match(rf"{re.escape(LAYERS)}(\d+)\.", local):
                layers = max(layers, int(match[1]) + 1)
                name = f"{LAYERS}{before + int(match[1])}.{local[match.end() :]}"
            if isinstance(tensor, Tensor):
                self._places.setdefault(_in_own_layers(name), (stage, chunk, local))
        return layers

    def _add_optimizer(self, stages: range, chunks: Sequence[str]) -> None:
        """Find the optimizer's tensors of each weight of each rank, if its groups are known."""
        if any(self.directory.glob("mp_rank_*/distrib_optim.pt")):
            self.no_states = _IN_BUFFERS
            return
        if "optimizer" not in self.common:
            return
        ranks = range(self._num_tensor_ranks)
        try:
            self._states = {
                (rank, stage): dict(_states_by_name(self._rank(rank, stage), chunks))
                for rank in ranks
                for stage in stages
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            self.no_states = f"its groups of weights are unknown, {first_line(error)}"
            return
        of_rank = (frozenset(state) for states in self._states.values() for state in states.values())
        self.states = frozenset.intersection(*of_rank)

    def shape(self, name: str) -> tuple[int, ...]:
        stage, chunk, local = self._places[name]
        shape = list(self._rank(0, stage)[chunk][local].shape)
        if (cut := _cut(name)) is not None:
            shape[cut] *= self._num_tensor_ranks
        return tuple(shape)

    def read(self, name: str, state: str | None = None) -> Tensor:
        stage, chunk, local = self._places[name]
        parts = []
        for rank in range(self._num_tensor_ranks):
            found = self._rank(rank, stage)[chunk] if state is None else self._states[rank, stage][chunk, local]
            parts.append(found[local if state is None else state])
        cut = _cut(name)
        if cut is None or len(parts) == 1:
            return parts[0]
        if ".linear_fc1." in name and self.args is not None and getattr(self.args, "swiglu", False):
            # Of each rank first its part of the gate, then its part of the other half.
            halves = [part.unflatten(0, (2, -1)) for part in parts]
            return torch.cat(halves, dim=1).flatten(0, 1)
        return torch.cat(parts, dim=cut)


def _cut(name: str) -> int | None:
    """Dimension along which tensor-parallel ranks share a tensor; None if each holds the whole."""
    module = name.rpartition(".")[0]
    if module.endswith(_OUTPUT_CUT):
        return 0
    return 1 if name.endswith(_INPUT_CUT) else None


def _states_by_name(
    rank: Mapping[str, Any], chunks: Sequence[str]
) -> Iterator[tuple[tuple[str, str], dict[str, Tensor]]]:
    """Yield the model chunk and the local name of each weight of a rank, and its state by name.

    torch's optimizers number weights group by group, each in the order of the model. Megatron has groups with and
    without weight decay, and those of another learning rate for embedding and output layer. Raises a `ValueError`
    for other groups.
    """
    optimizer = rank["optimizer"]
    inner = optimizer.get("optimizer", optimizer)
    own_weights = optimizer.get("fp32_from_fp16_params")
    weights = [
        (chunk, name, tensor)
        for chunk in chunks
        for name, tensor in rank[chunk].items()
        if isinstance(tensor, Tensor) and not name.endswith("_extra_state")
    ]
    kinds = [(group.get("wd_mult", 1.0) > 0, bool(group.get("is_decoupled_lr"))) for group in inner["param_groups"]]
    decoupled = any(kind[1] for kind in kinds)
    for number, (group, kind) in enumerate(zip(inner["param_groups"], kinds, strict=True)):
        members = [
            (chunk, name, tensor)
            for chunk, name, tensor in weights
            if (tensor.dim() > 1 and not name.endswith(".bias"), decoupled and _is_end(name)) == kind
        ]
        if len(members) != len(group["params"]):
            raise ValueError(f"group {number} has {len(group['params'])} weights, not {len(members)}")
        for place, (key, (chunk, name, tensor)) in enumerate(zip(group["params"], members, strict=True)):
            state = {
                each: value
                for each, value in inner["state"].get(key, {}).items()
                if torch.is_tensor(value) and value.dim()
            }
            if own_weights is not None:
                state[WEIGHT_OF_OPTIMIZER] = own_weights[number][place]
            if any(value.shape != tensor.shape for value in state.values()):
                raise ValueError(f"the state of {name} has another shape")
            yield (chunk, name), state


def _is_end(name: str) -> bool:
    return name.startswith(("embedding.", "output_layer."))


class DistributedWriter:
    """Writes the weights of a model in format `torch_dist`, a file for each pipeline layer."""

    def __init__(self, directory: Path, num_layers: int) -> None:
        self._directory, self._num_layers = directory, num_layers
        self._metadata = dcp.Metadata(state_dict_metadata={}, storage_data={}, version="1.0.0")
        self._num_files = 0

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors [...] of a pipeline layer; those of a transformer layer are rows of one tensor of all."""
        name_of_file = f"__{self._num_files}_0.distcp"
        with (self._directory / name_of_file).open("wb") as file:
            for name, tensor in tensors.items():
                for fused, own in _FUSED_NORMS:
                    name = name.replace(own, fused)
                key, offset, size = name, (0,) * tensor.dim(), tuple(tensor.shape)
                if match := re.match(rf"{re.escape(LAYERS)}(\d+)\.", name):
                    layer = int(match[1])
                    key, offset, tensor = LAYERS + name[match.end() :], (layer, *offset), tensor[None]
                    size = (self._num_layers, *size)
                    if key.endswith(_WITH_EXTRA_STATE):
                        # Modules of Megatron have another object, without content here.
                        module = key.removesuffix("weight")
                        self._add(file, f"{module}_extra_state/shard_{layer}_{self._num_layers}", [None])
                properties = dcp.TensorProperties(dtype=tensor.dtype)
                whole = dcp.TensorStorageMetadata(properties=properties, size=torch.Size(size), chunks=[])
                whole = self._metadata.state_dict_metadata.setdefault(key, whole)
                whole.chunks.append(dcp.ChunkStorageMetadata(torch.Size(offset), tensor.shape))
                self._add(file, key, tensor.contiguous().clone(), offset)
        self._num_files += 1

    def _add(self, file: BinaryIO, key: str, content: Any, offset: tuple[int, ...] | None = None) -> None:
        start = file.tell()
        torch.save(content, file)
        if offset is None:
            self._metadata.state_dict_metadata[key] = dcp.BytesStorageMetadata()
        index = dcp.MetadataIndex(key, offset)
        self._metadata.storage_data[index] = _StorageInfo(Path(file.name).name, start, file.tell() - start)

    def finish(self, args: Namespace, iteration: int) -> None:
        """Write the files that describe the others, and the number of the newest checkpoint."""
        common = {"args": args, "checkpoint_version": 3.0, "iteration": iteration, "content_metadata": {}}
        torch.save(common, self._directory / MEGATRON_COMMON_FILE)
        (self._directory / METADATA_FILE).write_bytes(pickled(self._metadata))
        backend = {"sharded_backend": "torch_dist", "common_backend": "torch"}
        versions = {f"{each}_version": 1 for each in backend}
        (self._directory / "metadata.json").write_text(json.dumps(backend | versions))
        (self._directory.parent / MEGATRON_LATEST).write_text(str(iteration))
