"""A checkpoint as the trainer writes it, of a model that was never trained."""

from dataclasses import asdict
from pathlib import Path

import torch

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.checkpoint.info import RUN_FILE, CheckpointInfo
from megatron_terapipe.checkpoint.manifest import MANIFEST_FILE, Manifest, facts_of
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.inference import WholeModel

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    seq_length=32,
    max_position_embeddings=40,
    vocab_size=257,
    # Large weights and an output of its own, so that the likeliest token depends on the whole text.
    init_method_std=0.3,
    untie_embeddings_and_output_weights=True,
)


def checkpoint_info(model: ModelConfig = MODEL, iteration: int = 5) -> CheckpointInfo:
    return CheckpointInfo(
        iteration=iteration,
        consumed_samples=8 * iteration,
        model=asdict(model),
        layout=ParallelLayout(pipeline_parallel_size=2),
        optimizer="adam",
        partitioned=True,
        tokenizer={"tokenizer_type": "byte", "vocab_file": None, "merge_file": None},
    )


def write_info(info: CheckpointInfo, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / RUN_FILE).write_text(info.text())
    write_manifest(directory)


def write_manifest(directory: Path) -> None:
    """Write the manifest of the files that are there."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST_FILE]
    facts = {str(path.relative_to(directory)): facts_of(path) for path in files}
    (directory / MANIFEST_FILE).write_text(Manifest(facts).text())


def write_checkpoint(checkpoints: Path, model: ModelConfig = MODEL) -> Path:
    """Write one and point `latest` at it; returns its directory."""
    directory = checkpoints / "global_step5"
    write_info(checkpoint_info(model), directory)
    for index, layer in WholeModel(model).layers.items():
        torch.save(layer.state_dict(), directory / f"layer_{int(index):02d}-model_00-model_states.pt")
    (checkpoints / "latest").write_text(directory.name)
    write_manifest(directory)
    return directory
