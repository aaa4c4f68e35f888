"""Checkpoints of Megatron-LM, in its formats `torch` and `torch_dist`: each tensor is read when it is used.

CHECKPOINTS/latest_checkpointed_iteration.txt        iteration of the newest, or `release`
CHECKPOINTS/iter_0000100/mp_rank_TT[_PPP]/...pt      torch: all that a tensor-parallel rank of a pipeline rank has
CHECKPOINTS/iter_0000100/common.pt, .metadata        torch_dist: arguments; place of each chunk of each whole tensor
CHECKPOINTS/iter_0000100/__R_N.distcp                torch_dist: the chunks

Both give the same names, as in `GPTModel` in megatron-core with its own layers, where a transformer layer has its
number in the whole model, `decoder.layers.5.input_layernorm.weight`. First the files, then `MegatronWeights`: the
checkpoint as one of one rank, so that a run of any layout takes its parts of it. Last the writer.
"""

import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron_terapipe.checkpoint.foreign import (
    MEGATRON_COMMON_FILE,
    MEGATRON_LATEST,
    MEGATRON_RANK_FILE,
    MEGATRON_RELEASE,
)
from megatron_terapipe.checkpoint.inert_pickles import InertUnpickler, pickled
from megatron_terapipe.checkpoint.megatron_model import MEGATRON, NAMES, common_file, iteration_of, unreadable
from megatron_terapipe.checkpoint.optimizer_state import PARAMETER_NAMES, ParameterState, SavedRun
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.errors import CheckpointError, first_line
from megatron_terapipe.huggingface.folder_weights import FolderWeights

METADATA_FILE = ".metadata"
WEIGHT_OF_OPTIMIZER = "param"
"""Name here of an optimizer's own weight, in higher precision than the model's."""
_OWN_WEIGHTS = ("fp32_param", WEIGHT_OF_OPTIMIZER)
"""Its names in the files: of the optimizer that each replica has whole, and of the distributed one."""
LAYERS = f"{NAMES.blocks}."
_OF_LAYER = re.compile(rf"{re.escape(LAYERS)}(\d+)\.")
"""Beginning of the name of a tensor of a transformer layer, with its number."""
_MOST_LAYERS = 100_000
_ENDS = ("embedding.", "output_layer.")
_IN_BUFFERS = (
    "it is in buffers of the distributed optimizer's ranks; --ckpt-format torch_dist with "
    "--dist-ckpt-optim-fully-reshardable saves it by weight"
)
_OUTPUT_CUT = (
    *("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_fc1", "eh_proj"),
    *("linear_q_down_proj", "linear_kv_down_proj", "core_attention", "word_embeddings", "output_layer"),
)
"""Modules whose outputs are shared by tensor-parallel ranks; those to latents in megatron-core's own layers only."""
_WITH_EXTRA_STATE = ("_proj.weight", "linear_qkv.weight", "linear_fc1.weight", "linear_fc2.weight")
_INPUT_CUT = ("linear_proj.weight", "linear_fc2.weight")
"""Weights whose inputs are."""
_FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
)
"""Beginnings of the names of norms in layers of Transformer Engine, and in megatron-core's own."""
_WRITTEN_NORMS = {False: _FUSED_NORMS[:2], True: _FUSED_NORMS[1:]}
"""These without and with latent attention, where the norm before attention has a name of its own."""
_OF_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(.+)|(linear_fc\d\.(?:weight|bias))(\d+))$")
"""Names of an expert's weights in `SequentialMLP` and in `TEGroupedMLP`; saved is one tensor of all experts."""


class TensorUnpickler(InertUnpickler):
    """Unpickler that also constructs tensors and their places in files. torch adds their storages."""

    constructed: ClassVar[Mapping[str, Any]] = {
        **InertUnpickler.constructed,
        # Parameters, and tensors with attributes: only the tensor is kept.
        "torch._utils._rebuild_parameter": lambda data, *_: data,
        "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
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
    """Classes and functions that hold values, and call nothing."""


class InertPickle:
    """A module of pickles, for `torch.load`."""

    Unpickler = TensorUnpickler
    __name__ = "inert pickles"


def load_inert(file: Any) -> Any:
    """Return the objects of a file of `torch.save`. Tensors of a path are mapped, and read when they are used."""
    is_path = isinstance(file, Path)
    archive = torch._C.PyTorchFileReader(str(_regular(file)) if is_path else file)
    if "constants.pkl" in archive.get_all_records():  # torch would run it.
        raise ValueError("it is a program of TorchScript")
    if not is_path:
        file.seek(0)
    return torch.load(file, map_location="cpu", pickle_module=InertPickle, weights_only=False, mmap=is_path or None)


def _regular(path: Path) -> Path:
    """Return the path of a file; raise an `OSError` for others: a pipe would never be opened."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is not a file")
    return path


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that is saved in pieces, which are read when it is."""

    shape: tuple[int, ...]
    pieces: Sequence[tuple[Sequence[int], Callable[[], Tensor]]]
    """Offset of each piece, and a function that reads it."""

    def read(self) -> Tensor:
        """Return the tensor [...]; raise a `ValueError` if a piece is missing."""
        if len(self.pieces) == 1 and (only := self.pieces[0][1]()).shape == self.shape:
            return only
        whole, filled = None, 0
        for offset, load in self.pieces:
            piece = load()
            if whole is None:
                whole = torch.empty(self.shape, dtype=piece.dtype)
            whole[tuple(slice(start, start + size) for start, size in zip(offset, piece.shape, strict=True))] = piece
            filled += piece.numel()
        if whole is None or filled != whole.numel():
            raise ValueError(f"{filled} elements are there of a tensor {self.shape}")
        return whole


Tensors = dict[str, Whole]
_StatesOfRank = dict[tuple[str, str], dict[str, Tensor]]
"""The optimizer's tensors by the model chunk and the local name of their weight, and by their own name."""


class MegatronFiles:
    """The tensors and facts of one checkpoint, whatever its format and the number of ranks that saved it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.weights: Tensors = {}
        """The tensors of the model, which are not all weights."""
        self.states: dict[str, Tensors] = {}
        """The optimizer's tensors of each weight, by names such as `exp_avg`; none where they cannot be read."""
        self.no_states = "it was saved without"
        """Why there are none."""
        file = common_file(directory)
        try:
            self.common: Mapping[str, Any] = load_inert(file)
            """Objects of the checkpoint, or of its first rank."""
            self.iteration = iteration_of(directory, self.common)
            self.step = _step(self.common.get("optimizer"))
            """Updates done by the optimizer; None if it does not count them."""
            if file.name == MEGATRON_COMMON_FILE:
                self._add_chunks()
            else:
                self._add_ranks()
        except CheckpointError:
            raise
        except Exception as error:  # On a damaged file an unpickler may raise anything.
            raise unreadable(directory, error) from None

    def _add_chunks(self) -> None:
        """Add the tensors of format torch_dist: whole ones, of the layers one [layers, ...], in chunks by offset."""
        if not (self.directory / METADATA_FILE).is_file():
            raise CheckpointError(
                f"checkpoint {self.directory} of Megatron-LM has no {METADATA_FILE}: save it with --ckpt-format "
                "torch_dist"
            )
        with (self.directory / METADATA_FILE).open("rb") as file:
            found = TensorUnpickler(file).load()
        places = {(index.fqn, tuple(index.offset or ())): info for index, info in found.storage_data.items()}
        for key, tensor in found.state_dict_metadata.items():
            if not isinstance(tensor, dcp.TensorStorageMetadata):
                continue
            if "optimizer.distributed." in key:
                self.no_states = _IN_BUFFERS
            tensors, name = self.weights, key
            if match := re.match(r"(?:chained_\d+\.)?optimizer\.(?:state\.(\w+)\.)?", key):
                tensors, name = self._states_named(match[1] or ""), key[match.end() :]
            chunks = [(each, partial(self._chunk, places[key, tuple(each.offsets)])) for each in tensor.chunks]
            if not name.startswith(LAYERS) or name[len(LAYERS)].isdigit():
                pieces = [(chunk.offsets, load) for chunk, load in chunks]
                tensors[_in_own_layers(name)] = Whole(tuple(tensor.size), pieces)
                continue
            if tensor.size[0] > _MOST_LAYERS:
                raise ValueError(f"{key} has {tensor.size[0]} layers")
            rows: dict[int, list[Any]] = {layer: [] for layer in range(tensor.size[0])}
            for chunk, load in chunks:
                first, *offset = chunk.offsets
                for row in range(chunk.sizes[0]):
                    rows[first + row].append((offset, partial(_row, load, row)))
            for layer, of_layer in rows.items():
                own = _in_own_layers(f"{LAYERS}{layer}.{name[len(LAYERS) :]}")
                tensors[own] = Whole(tuple(tensor.size[1:]), of_layer)
        self.states.pop("", None)  # Buffers.

    def _states_named(self, state: str) -> Tensors:
        return self.states.setdefault(WEIGHT_OF_OPTIMIZER if state in _OWN_WEIGHTS else state, {})

    def _chunk(self, info: _StorageInfo) -> Tensor:
        if Path(info.relative_path).name != info.relative_path or getattr(info, "transform_descriptors", None):
            raise ValueError(f"{METADATA_FILE} names {info.relative_path}, which is not a file of plain tensors")
        with _regular(self.directory / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            found: Tensor = load_inert(BytesIO(file.read(info.length)))
        return found

    def _add_ranks(self) -> None:
        """Add the tensors of format torch: a file for each rank of one replica, with its layers counted from 0."""
        if getattr(self.common.get("args"), "num_experts", None):
            raise CheckpointError(
                f"checkpoint {self.directory} of Megatron-LM has experts in format torch, where ranks name their own: "
                "save it with --ckpt-format torch_dist, which is read here"
            )
        paths = {}
        for path in self.directory.glob(f"mp_rank_*/{MEGATRON_RANK_FILE}"):
            if match := re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?", path.parent.name):
                paths[int(match[1]), int(match[2] or 0)] = path
        num_ranks, num_stages = (len({place[axis] for place in paths}) for axis in (0, 1))
        if missing := {(rank, stage) for rank in range(num_ranks) for stage in range(num_stages)} - paths.keys():
            rank, stage = min(missing)
            raise CheckpointError(
                f"checkpoint {self.directory} of Megatron-LM lacks {MEGATRON_RANK_FILE} of tensor-parallel rank {rank} "
                f"and pipeline rank {stage}: copy the whole directory"
            )
        files = [[load_inert(paths[rank, stage]) for rank in range(num_ranks)] for stage in range(num_stages)]
        # The number of a rank's model chunk is the last of the key.
        keys = (key for key in self.common if re.fullmatch(r"model\d*", key))
        chunks = sorted(keys, key=lambda key: int(key[5:] or 0))
        states = self._states_of_ranks(files, chunks)
        args = self.common["args"]
        gated = any(getattr(args, name, False) for name in ("swiglu", "quick_geglu"))
        to_latents = {"linear_q_down_proj": getattr(args, "q_lora_rank", None)}
        if getattr(args, "multi_latent_attention", False):
            to_latents["linear_kv_down_proj"] = args.kv_lora_rank + args.qk_pos_emb_head_dim
        before = 0
        for chunk in chunks:
            for stage, ranks in enumerate(files):
                layers = 0
                for local, tensor in ranks[0][chunk].items():
                    name = local
                    if match := _OF_LAYER.match(local):
                        layers = max(layers, int(match[1]) + 1)
                        name = f"{LAYERS}{before + int(match[1])}.{local[match.end() :]}"
                    name = _in_own_layers(name)
                    if not isinstance(tensor, Tensor) or name in self.weights:
                        continue
                    self.weights[name] = _joined(name, [rank[chunk][local] for rank in ranks], gated, to_latents)
                    of_ranks = [each.get((chunk, local), {}) for each in states[stage]]
                    for state in of_ranks[0]:
                        self._states_named(state)[name] = _joined(
                            name, [each[state] for each in of_ranks], gated, to_latents
                        )
                before += layers

    def _states_of_ranks(self, files: Sequence[Sequence[Any]], chunks: Sequence[str]) -> list[list[_StatesOfRank]]:
        """Return the optimizer's tensors of each stage and rank, by model chunk and local name; empty if unknown."""
        if any(self.directory.glob("mp_rank_*/distrib_optim.pt")):
            self.no_states = _IN_BUFFERS
        elif "optimizer" in self.common:
            try:
                return [[dict(_states_by_name(rank, chunks)) for rank in ranks] for ranks in files]
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                self.no_states = f"its groups of weights are unknown, {first_line(error)}"
        return [[{} for _ in ranks] for ranks in files]


def _joined(name: str, parts: Sequence[Tensor], gated: bool, rows: Mapping[str, int | None]) -> Whole:
    """Return a tensor in the parts of tensor-parallel ranks.

    Args:
        rows: of some modules, by which the tensor of a rank is known to be whole.
    """
    shape = list(parts[0].shape)
    module = name.rpartition(".")[0]
    cut = 0 if module.endswith(_OUTPUT_CUT) else 1 if name.endswith(_INPUT_CUT) else None
    if cut is None or len(parts) == 1 or shape[0] == rows.get(module.rpartition(".")[2]):
        return Whole(tuple(shape), [([0] * len(shape), parts[0].detach)])
    shape[cut] *= len(parts)
    # Of each rank first its part of the gate, then its part of the other half.
    num_halves = 2 if gated and module.endswith("linear_fc1") else 1
    pieces = []
    for half in range(num_halves):
        for rank, part in enumerate(parts):
            piece = part.tensor_split(num_halves, dim=cut)[half]
            offset = [0] * len(shape)
            offset[cut] = (half * len(parts) + rank) * piece.shape[cut]
            pieces.append((offset, piece.detach))
    return Whole(tuple(shape), pieces)


def _row(load: Callable[[], Tensor], row: int) -> Tensor:
    return load()[row]


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


def _in_own_layers(name: str) -> str:
    """Return a name as megatron-core's own layers have it, from one of Transformer Engine's."""
    for fused, own in _FUSED_NORMS:
        name = name.replace(fused, own)
    return name


def _states_by_name(
    rank: Mapping[str, Any], chunks: Sequence[str]
) -> Iterator[tuple[tuple[str, str], dict[str, Tensor]]]:
    """Yield the model chunk and the local name of each weight of a rank, and its state by name.

    torch's optimizers number weights group by group, each in the order of the model. Megatron has groups with and
    without weight decay, and groups of another learning rate for embedding and output layer. Raises a `ValueError`
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
            if (tensor.dim() > 1 and not name.endswith(".bias"), decoupled and name.startswith(_ENDS)) == kind
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


class _Tensors:
    """Tensors as `FolderWeights` reads them: without the rows that pad the vocabulary."""

    def __init__(self, directory: Path, tensors: Tensors, model: ModelConfig) -> None:
        self._directory, self._tensors, self._words = directory, tensors, model.vocab_size
        self.names = frozenset(tensors)

    def read(self, name: str) -> Tensor:
        """Return a tensor [...]."""
        try:
            return self._tensors[name].read()[self._rows(name)]
        except Exception as error:  # On a damaged file an unpickler may raise anything.
            raise unreadable(self._directory, error) from None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which is not read."""
        first, *rest = self._tensors[name].shape
        return (len(range(first)[self._rows(name)]), *rest)

    def _rows(self, name: str) -> slice:
        return slice(self._words if name.startswith((NAMES.words, NAMES.output)) else None)


class MegatronWeights(FolderWeights):
    """The weights of a checkpoint, and the states of its optimizer.

    A weight is the optimizer's, in fp32, where that has one of its own: the model's is this, rounded.
    """

    def __init__(self, directory: Path, model: ModelConfig) -> None:
        self._files = files = MegatronFiles(directory)
        found = files.weights | files.states.get(WEIGHT_OF_OPTIMIZER, {})
        super().__init__(directory, MEGATRON, model, _Tensors(directory, found, model))
        moments = {state: tensors for state, tensors in files.states.items() if state != WEIGHT_OF_OPTIMIZER}
        self.no_states = None if moments else files.no_states
        """Why no state of the optimizer can be read; None if it can."""
        for state, tensors in moments.items():
            for name in self._spelled.values():
                if name.endswith(NAMES.router_bias):
                    continue  # No optimizer works on it.
                if name not in tensors or tensors[name].shape != found[name].shape:
                    self.no_states = f"{state} of {name} is missing or has another shape"
        self._moments = {
            state: FolderWeights(directory, MEGATRON, model, _Tensors(directory, tensors, model))
            for state, tensors in moments.items()
        }
        # A run reads one parameter several times, in parts and whole, before the next.
        self._weight = lru_cache(maxsize=1)(super().weight)
        self._state = lru_cache(maxsize=1)(self._read_state)

    def weight(self, index: int, name: str, tensor_parallel_rank: int = 0) -> Tensor:
        """Return a weight [...] of a pipeline layer, whole: the rank is always 0."""
        return self._weight(index, name)

    def of(self, name: str, tensor_parallel_rank: int, elements: range) -> ParameterState:
        """Return the optimizer's state of some elements of a parameter, by its name in the engine."""
        moments = {state: each.flatten()[elements.start : elements.stop] for state, each in self._state(name).items()}
        return ParameterState(weight=None, moments=moments, step=self._files.step)

    def _read_state(self, name: str) -> dict[str, Tensor]:
        """The states of a parameter by name, in its shape [...]."""
        first, _, rest = name.partition(".")
        # The only tied layers are the word embedding and the output layer.
        index, in_layer = (int(first), rest) if first.isdecimal() else (0, rest.partition(".")[2])
        return {state: weights.weight(index, in_layer) for state, weights in self._moments.items()}

    def run(self) -> SavedRun:
        """Return the counters of the run, and the loss scale if it was in fp16."""
        optimizer = self._files.common.get("optimizer")
        scaler = optimizer.get("grad_scaler") if isinstance(optimizer, Mapping) else None
        scale = scaler.get("scale") if isinstance(scaler, Mapping) else None
        restored = SimpleNamespace(cur_scale=float(scale)) if isinstance(scale, int | float | Tensor) else None
        return SavedRun(places={}, counters=self._counters, loss_scaler=restored)

    def state_of(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the content of a file of ours with the optimizer's state of some parameters."""
        step = {} if self._files.step is None else {"step": torch.tensor(self._files.step)}
        states = {number: self._state(name) | step for number, name in enumerate(names)}
        optimizer = {"param_groups": [{"params": list(states)}], "state": states}
        return {"optimizer": optimizer, PARAMETER_NAMES: [list(names)], **self._counters}

    @property
    def _counters(self) -> dict[str, int]:
        return {"global_steps": self._files.iteration, "skipped_steps": 0}

    def check_states(self) -> None:
        """Check that the optimizer's states can be read."""
        if self.no_states:
            raise CheckpointError(
                f"checkpoint {self._directory} of Megatron-LM has no state of the optimizer that can be read: "
                f"{self.no_states}; load only the weights, with --no-load-optim or --finetune"
            )


class NamedWeights:
    """The weights of a checkpoint by their names in it, for a program with layers of megatron-core."""

    def __init__(self, directory: Path, model: ModelConfig) -> None:
        files = MegatronFiles(directory)
        self._directory, self._rows = directory, model.padded_vocab_size()
        self._tensors = files.weights | files.states.get(WEIGHT_OF_OPTIMIZER, {})
        # Weights of experts, which have one tensor, follow one another.
        self._read = lru_cache(maxsize=2)(lambda name: self._tensors[name].read())

    def weight(self, name: str, tensor_parallel_rank: int = 0) -> Tensor:
        """Return a whole weight [...]; words have the rows of this run's vocabulary, those that pad it 0."""
        saved, of_expert = _in_own_layers(name), _OF_EXPERT.search(name)
        if of_expert is not None:
            saved = f"{name[: of_expert.start()]}mlp.experts.experts.{of_expert[2] or of_expert[3]}"
        if saved not in self._tensors:
            raise CheckpointError(
                f"checkpoint {self._directory} of Megatron-LM lacks {saved}: load a checkpoint of the same model"
            )
        try:
            weight: Tensor = self._read(saved)
        except Exception as error:  # On a damaged file an unpickler may raise anything.
            raise unreadable(self._directory, error) from None
        if of_expert is not None:
            return weight[int(of_expert[1] or of_expert[4])]
        if not name.startswith((NAMES.words, NAMES.output)):
            return weight
        return torch.nn.functional.pad(weight, (0, 0, 0, self._rows - len(weight)))


class DistributedWriter:
    """Writes the weights of a model in format `torch_dist`, a file for each pipeline layer."""

    def __init__(self, directory: Path, model: ModelConfig) -> None:
        self._directory, self._model = directory, model
        self._metadata = dcp.Metadata(state_dict_metadata={}, storage_data={}, version="1.0.0")
        self._num_files = 0

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors [...] of a pipeline layer; a transformer layer has rows of one tensor of all."""
        name_of_file = f"__{self._num_files}_0.distcp"
        with (self._directory / name_of_file).open("wb") as file:
            for name, tensor in tensors.items():
                for fused, own in _WRITTEN_NORMS[self._model.multi_latent_attention]:
                    name = name.replace(own, fused)
                key, offset, size = name, (0,) * tensor.dim(), tuple(tensor.shape)
                layer, layers = 0, 1
                if match := _OF_LAYER.match(name):
                    layer, layers = int(match[1]), self._model.num_layers
                    key, offset, tensor = LAYERS + name[match.end() :], (layer, *offset), tensor[None]
                    size = (layers, *size)
                if key.endswith(_WITH_EXTRA_STATE):
                    # Modules of Megatron have another object, without content here.
                    self._add(file, f"{key.removesuffix('weight')}_extra_state/shard_{layer}_{layers}", [None])
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
        (self._directory.parent / MEGATRON_LATEST).write_text(str(iteration or MEGATRON_RELEASE))
