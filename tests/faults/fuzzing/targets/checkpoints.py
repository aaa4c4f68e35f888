"""Files of a checkpoint, or of a model of Hugging Face, that are read before its tensors."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.checkpoint.directories import latest_checkpoint
from megatron_terapipe.checkpoint.manifest import FileFacts, Manifest
from megatron_terapipe.checkpoint.optimizer_state import parse_index
from megatron_terapipe.checkpoint.verify import find_checkpoint
from megatron_terapipe.config import CheckpointConfig, ModelConfig
from megatron_terapipe.huggingface.folder_weights import INDEX, SavedTensors
from tests.faults.fuzzing.target import Target
from tests.inference.checkpoints import MODEL, checkpoint_info

FILES = {"run.json": FileFacts(900, "0" * 64), "layer_00-model_00-model_states.pt": FileFacts(4096, "a" * 64)}


HEADER = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
TENSORS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)


def _read_run(data: bytes, folder: Path) -> None:
    directory = folder / "global_step5"
    directory.mkdir(exist_ok=True)
    (directory / "run.json").write_bytes(data)
    (folder / "latest").write_text(directory.name)
    config = CheckpointConfig(load=str(folder), no_load_optim=True)
    find_checkpoint(config, MODEL, ParallelLayout(), "adam", checks_files=False)


def _read_latest(data: bytes, folder: Path) -> None:
    (folder / "global_step5").mkdir(exist_ok=True)
    (folder / "latest").write_bytes(data)
    latest_checkpoint(folder)


def _read_manifest(data: bytes, folder: Path) -> None:
    (folder / "manifest.json").write_bytes(data)
    Manifest.read(folder)


def _read_index(data: bytes, folder: Path) -> None:
    (folder / "index.json").write_bytes(data)
    parse_index(folder / "index.json", replace(checkpoint_info(), layout=asdict(ParallelLayout(data_parallel_size=2))))


def _read_index_of_theirs(data: bytes, folder: Path) -> None:
    (folder / INDEX).write_bytes(data)
    for name in ("1.safetensors", "2.safetensors"):
        (folder / name).write_bytes(TENSORS)
    tensors = SavedTensors(folder)
    for name in tensors.names:
        tensors.shape(name)


def _run(model: ModelConfig) -> bytes:
    return checkpoint_info(model).text().encode()


TARGETS = (
    Target(name="run.json", read=_read_run, seeds=(_run(MODEL),), words=(b"NaN", b"1e400", b"global_step6")),
    Target(
        name="latest",
        read=_read_latest,
        seeds=(b"global_step5", b"global_step5\n"),
        found=(b"\xff\xfe", b"a" * 300, b"a" * 250, b"../..", b"\x00"),
        words=(b"../", b".replaced"),
    ),
    Target(name="manifest.json", read=_read_manifest, seeds=(Manifest(FILES).text().encode(),)),
    Target(
        name="index.json",
        read=_read_index,
        seeds=(json.dumps({"0.weight": [0, [[0, 12], [1, 4]]], "tied.weight": [0, []]}).encode(),),
        found=(b"[]", b'{"a": 1}', b'{"a": [0, [[9, 1]]]}'),
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
