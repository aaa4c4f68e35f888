"""The checkpoint from which a run continues, and the runs that may continue from it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.checkpoint.directories import existing_checkpoint, latest_checkpoint
from megatron_terapipe.checkpoint.verify import find_checkpoint
from megatron_terapipe.config import CheckpointConfig, ModelConfig
from megatron_terapipe.errors import CheckpointError
from tests.inference.checkpoints import MODEL, checkpoint_info, write_checkpoint, write_info, write_manifest

LAYOUT = ParallelLayout(pipeline_parallel_size=2, data_parallel_size=1)
ROTATED = replace(MODEL, position_embedding_type="rope")
EXTENDED = {"rotary_scaling": "yarn", "rotary_scaling_factor": 4.0, "rotary_attention_factor": 1.14}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A whole checkpoint, with empty files of the optimizer."""
    directory = write_checkpoint(tmp_path)
    for stage in (0, 1):
        torch.save({}, directory / f"mp_rank_{stage:02d}_model_states.pt")
        torch.save({}, directory / f"zero_pp_rank_0_mp_rank_{stage:02d}_optim_states.pt")
    write_manifest(directory)
    return directory


def find(
    load: Path, model: ModelConfig = MODEL, layout: ParallelLayout = LAYOUT, optimizer: str = "adam", **flags: Any
):
    return find_checkpoint(CheckpointConfig(load=str(load), **flags), model, layout, optimizer)


def refusal(load: Path, *run: Any, **flags: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        find(load, *run, **flags)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(load), "CHECKPOINTS")


def _prefix_of_bf16(directory: Path) -> None:
    for path in directory.glob("zero_pp_rank_*"):
        path.rename(path.with_name("bf16_" + path.name))
    write_manifest(directory)


def _no_optimizer_files(directory: Path) -> None:
    for path in directory.glob("zero_pp_rank_*"):
        path.unlink()


def _of_an_older_version(directory: Path) -> None:
    """In which models had no such parts."""
    new = ("qk_norm", "rotary_scaling", "rotary_scaling_factor", "rotary_original_length", "softmax_scale")
    info = checkpoint_info()
    write_info(replace(info, model={name: value for name, value in info.model.items() if name not in new}), directory)


STDS = {"init_method_std": 0.1, "output_layer_init_std": 0.2, "embedding_init_method_std": 0.3}
FITS: dict[str, tuple[Callable[[Path], object], tuple[Any, ...], dict[str, Any]]] = {
    "as it was saved": (lambda d: None, (), {}),
    "optimizer's files of bf16": (_prefix_of_bf16, (), {}),
    "settings that shape no weight": (lambda d: None, (replace(MODEL, seq_length=16, **STDS),), {}),
    "an older version": (_of_an_older_version, (), {}),
    "another layout": (lambda d: None, (MODEL, ParallelLayout(data_parallel_size=4, tensor_parallel_size=2)), {}),
    "another optimizer": (lambda d: None, (MODEL, LAYOUT, "sgd"), {"no_load_optim": True}),
    "no optimizer, only weights": (
        lambda d: write_info(replace(checkpoint_info(), optimizer=None), d),
        (),
        {"no_load_optim": True},
    ),
    "no optimizer's files, only weights": (_no_optimizer_files, (), {"finetune": True}),
    "longer, where positions have no weights": (
        lambda d: write_info(checkpoint_info(ROTATED), d),
        (replace(ROTATED, max_position_embeddings=64),),
        {},
    ),
    "extended positions": (
        lambda d: write_info(checkpoint_info(ROTATED), d),
        (replace(ROTATED, **EXTENDED),),
        {"finetune": True, "extend_positions": True},
    ),
}


@pytest.mark.parametrize(("change", "run", "flags"), FITS.values(), ids=FITS)
def test_a_checkpoint_that_fits_is_found(
    directory: Path, change: Callable[[Path], object], run: tuple[Any, ...], flags: dict[str, Any]
) -> None:
    change(directory)
    found = find(directory.parent, *run, **flags)
    assert found is not None
    assert found[0] == directory


def test_a_missing_checkpoint_is_a_fresh_start_unless_required(tmp_path: Path) -> None:
    assert find_checkpoint(CheckpointConfig(), MODEL, LAYOUT, "adam") is None
    for load in (tmp_path, tmp_path / "missing"):
        assert find(load) is None
        for flag in ("exit_on_missing_checkpoint", "finetune"):
            line = refusal(load, **{flag: True})
            assert line == "--load CHECKPOINTS holds no checkpoint: give a directory that a run saved to"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("hidden_size", 64, "--hidden-size 32, this run 64: set --hidden-size 32,"),
        ("num_layers", 3, "--num-layers 2, this run 3:"),
        ("num_key_value_heads", 4, "--num-key-value-heads 2, this run 4:"),
        ("vocab_size", 300, "--vocab-size 257, this run 300:"),
        ("max_position_embeddings", 32, "--max-position-embeddings 40, this run 32:"),
        ("untie_embeddings_and_output_weights", False, "--untie-embeddings-and-output-weights True, this run False"),
        ("layernorm_epsilon", 1e-6, "--layernorm-epsilon 1e-05, this run 1e-06:"),
        ("qk_norm", "head", "--qk-norm none, this run head:"),
        ("softmax_scale", 0.5, "--softmax-scale 0.35355339059327373, this run 0.5:"),
    ],
)
def test_another_model_is_named(directory: Path, name: str, value: object, said: str) -> None:
    if name in ("qk_norm", "softmax_scale"):
        _of_an_older_version(directory)
    for flags in ({}, {"finetune": True}, {"no_load_optim": True}):
        assert f"the checkpoint has {said}" in refusal(directory.parent, replace(MODEL, **{name: value}), **flags)


@pytest.mark.parametrize("change", [EXTENDED, {"rotary_base": 500_000.0}], ids=["yarn", "base"])
def test_rotations_change_only_where_positions_are_extended(directory: Path, change: dict[str, Any]) -> None:
    write_info(checkpoint_info(ROTATED), directory)
    model, (name, value) = replace(ROTATED, **change), next(iter(change.items()))
    flag, theirs = "--" + name.replace("_", "-"), getattr(ROTATED, name)
    for flags in ({}, {"finetune": True}, {"extend_positions": True}):
        assert refusal(directory.parent, model, **flags) == (
            f"the checkpoint has {flag} {theirs}, this run {value}: set {flag} {theirs}, or train on for longer "
            "sequences with --extend-positions --finetune"
        )
    wider = replace(model, hidden_size=64)
    assert "--hidden-size 32" in refusal(directory.parent, wider, finetune=True, extend_positions=True)


def test_an_unusable_optimizer_state_or_padding_is_named(directory: Path) -> None:
    assert "--optimizer adam, this run uses sgd: set --optimizer adam" in refusal(
        directory.parent, MODEL, LAYOUT, "sgd"
    )
    line = refusal(directory.parent, MODEL, replace(LAYOUT, tensor_parallel_size=5))
    assert "vocabulary is padded to 384 for tensor parallel size 1, this run's to 640 for 5" in line
    write_info(replace(checkpoint_info(), optimizer=None), directory)
    assert refusal(directory.parent).endswith("load only the weights, with --no-load-optim or --finetune")


def test_an_older_checkpoint_may_be_chosen(directory: Path) -> None:
    older = directory.with_name("global_step3")
    copytree(directory, older)
    write_info(checkpoint_info(iteration=3), older)
    for flags in ({"load_tag": "global_step3"}, {"ckpt_step": 3}):
        assert find(directory.parent, **flags) == (older, checkpoint_info(iteration=3))
    line = refusal(directory.parent, ckpt_step=4)
    assert line.startswith("there is no checkpoint global_step4 in CHECKPOINTS")
    assert line.endswith("(global_step3, global_step5)")


def test_latest_names_one_that_is_there(directory: Path) -> None:
    latest = directory.parent / "latest"
    latest.write_text("global_step9\n")
    assert refusal(directory.parent).startswith("CHECKPOINTS/latest names global_step9, which is not there")
    latest.write_text("global_step5\n")
    assert latest_checkpoint(directory.parent) == directory


FILES = [
    "layer_03-model_00-model_states.pt",
    "layer_05-model_00-model_states.pt",
    "mp_rank_01_model_states.pt",
    "zero_pp_rank_0_mp_rank_01_optim_states.pt",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [None, -1])
def test_a_file_that_is_missing_or_cut_short_is_named(directory: Path, name: str, keep: int | None) -> None:
    """DeepSpeed would continue with a fresh optimizer, or a rank would fail while the others wait for it."""
    path = directory / name
    content = path.read_bytes()
    path.unlink()
    if keep is not None:
        path.write_bytes(content[:keep])
    said = f"lacks {name}: put the" if keep is None else f"is damaged: {name} has {len(content) - 1} bytes,"
    assert refusal(directory.parent).startswith(f"checkpoint CHECKPOINTS/global_step5 {said}")


def test_a_path_that_is_no_directory_of_checkpoints_is_named(directory: Path) -> None:
    """Taken for one without checkpoints, training would start afresh."""
    file = directory / "run.json"
    with pytest.raises(CheckpointError, match=rf"^--load {file} is a file: give the directory that a run saved to$"):
        latest_checkpoint(file)
    remedy = rf"--load {directory} is one checkpoint: give --load {directory.parent} --load-tag {directory.name}$"
    for look in (lambda: existing_checkpoint(directory, None), lambda: find(directory)):
        with pytest.raises(CheckpointError, match=remedy):
            look()
