"""Files of a checkpoint, or of a model of Hugging Face, that are read before its tensors."""

import io
import json
import zipfile
from pathlib import Path

import torch
from torch import _weights_only_unpickler

from deepspeed_ext.runtime.topology import layer_file
from megatron_terapipe.checkpoint.directories import latest_checkpoint
from megatron_terapipe.checkpoint.manifest import FileFacts, Manifest
from megatron_terapipe.checkpoint.saved_weights import SavedWeights
from megatron_terapipe.huggingface.folder_weights import INDEX, SavedTensors
from megatron_terapipe.inference import WholeModel
from tests.faults.fuzzing.target import Target, in_file
from tests.inference.checkpoints import MODEL, checkpoint_info

FILES = {"run.json": FileFacts(900, "0" * 64), "layer_00-model_00-model_states.pt": FileFacts(4096, "a" * 64)}


HEADER = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
TENSORS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)


def _read_latest(data: bytes, folder: Path) -> None:
    (folder / "global_step5").mkdir(exist_ok=True)
    (folder / "latest").write_bytes(data)
    latest_checkpoint(folder)


def _read_index_of_theirs(data: bytes, folder: Path) -> None:
    (folder / INDEX).write_bytes(data)
    for name in ("1.safetensors", "2.safetensors"):
        (folder / name).write_bytes(TENSORS)
    tensors = SavedTensors(folder)
    for name in tensors.names:
        tensors.shape(name)


LAYER = WholeModel(MODEL).layers["3"]


def _entries(saved: object) -> dict[str, bytes]:
    """The entries of the archive that `torch.save` writes: inputs are the pickle in it."""
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


ENTRIES = _entries(LAYER.state_dict())
PICKLE = "archive/data.pkl"


def _read_layer(data: bytes, folder: Path) -> None:
    with zipfile.ZipFile(folder / layer_file(3, 0), "w") as changed:
        for name, content in {**ENTRIES, PICKLE: data}.items():
            changed.writestr(name, content)
    for weight in SavedWeights(folder, checkpoint_info()).whole(3, LAYER).values():
        weight.sum()


_RESULT = b"(K@K@tR"
"""Calls the function before it with two numbers."""


TARGETS = (
    Target(
        name="latest",
        read=_read_latest,
        seeds=(b"global_step5", b"global_step5\n"),
        found=(b"\xff\xfe", b"a" * 300, b"a" * 250, b"../..", b"\x00"),
        words=(b"../", b".replaced"),
    ),
    Target(
        name="tensors of a layer",
        read=_read_layer,
        seeds=(ENTRIES[PICKLE],),
        found=(_entries({None: torch.zeros(1)})[PICKLE],),
        words=tuple(
            f"c{name}\n".encode().replace(b" ", b"\n") + _RESULT
            for name in (
                *("__builtin__ bytearray", "torch Tensor", "torch FloatTensor", "torch UntypedStorage", "torch device"),
                *("torch Size", "collections Counter", "__builtin__ set", "torch.nn.parameter Parameter"),
                *(f"torch._utils {each.__name__}" for each in _weights_only_unpickler._tensor_rebuild_functions()),
            )
        ),
    ),
    Target(
        name="manifest.json",
        read=in_file("manifest.json", lambda path: Manifest.read(Path(path).parent)),
        seeds=(Manifest(FILES).text().encode(),),
    ),
    Target(
        name="index of Hugging Face",
        read=_read_index_of_theirs,
        seeds=(
            json.dumps({"metadata": {"total_size": 8}, "weight_map": {"a": "1.safetensors"}}).encode(),
            json.dumps({"metadata": {}, "weight_map": {}}, indent=2).encode(),
        ),
        found=(
            *(b'{"weight_map": [1]}', b'{"weight_map": {"a": 5}}', b'{"weight_map": {"a": {}}}', b"[" * 100_000),
            *(b'{"weight_map": {"a": "\\u0000"}}', b'{"weight_map": {"b": "2.safetensors"}}'),
        ),
        words=(b"1.safetensors", b"2.safetensors", b'"weight_map"', b'{"b": "2.safetensors"}', b'"."', b'".."'),
    ),
)
