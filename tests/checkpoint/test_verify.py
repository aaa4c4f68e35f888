"""What a checkpoint says of its run, and which runs may go on from it."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.checkpoint.directories import existing_checkpoint, latest_checkpoint
from megatron_terapipe.checkpoint.info import CheckpointInfo
from megatron_terapipe.checkpoint.verify import find_checkpoint
from megatron_terapipe.config import CheckpointConfig
from megatron_terapipe.errors import CheckpointError
from tests.inference.checkpoints import MODEL, checkpoint_info, write_checkpoint

LAYOUT = ParallelLayout(pipeline_parallel_size=2, data_parallel_size=1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A whole checkpoint, with nothing in the optimizer's files."""
    directory = write_checkpoint(tmp_path)
    for stage in (0, 1):
        torch.save({}, directory / f"mp_rank_{stage:02d}_model_states.pt")
        torch.save({}, directory / f"zero_pp_rank_0_mp_rank_{stage:02d}_optim_states.pt")
    return directory


def refusal(directory: Path, model=MODEL, layout=LAYOUT, optimizer: str = "adam", **flags: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(CheckpointConfig(load=str(directory.parent), **flags), model, layout, optimizer)
    line = str(caught.value)
    assert "\n" not in line
    return line.replace(str(directory.parent), "CHECKPOINTS")


def test_run_json_says_what_was_written(tmp_path: Path) -> None:
    checkpoint_info().write(tmp_path / "tag")
    assert CheckpointInfo.read(tmp_path / "tag") == checkpoint_info()


def test_a_checkpoint_that_fits_is_found(directory: Path) -> None:
    found = find_checkpoint(CheckpointConfig(load=str(directory.parent)), MODEL, LAYOUT, "adam")
    assert found == (directory, checkpoint_info())


def test_bf16_optimizer_files_count(directory: Path) -> None:
    for path in directory.glob("zero_pp_rank_*"):
        path.rename(path.with_name("bf16_" + path.name))
    assert find_checkpoint(CheckpointConfig(load=str(directory.parent)), MODEL, LAYOUT, "adam") is not None


def test_nothing_to_load_is_a_fresh_start(tmp_path: Path) -> None:
    assert find_checkpoint(CheckpointConfig(), MODEL, LAYOUT, "adam") is None
    assert find_checkpoint(CheckpointConfig(load=str(tmp_path)), MODEL, LAYOUT, "adam") is None
    assert find_checkpoint(CheckpointConfig(load=str(tmp_path / "missing")), MODEL, LAYOUT, "adam") is None


@pytest.mark.parametrize("flag", ["exit_on_missing_checkpoint", "finetune"])
def test_nothing_to_load_where_there_must_be_something(tmp_path: Path, flag: str) -> None:
    line = refusal(tmp_path / "tag", **{flag: True})
    assert line == "--load CHECKPOINTS holds no checkpoint: give a directory that a run saved to"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("hidden_size", 64, "the checkpoint has --hidden-size 32, this run 64: set --hidden-size 32,"),
        ("num_layers", 3, "the checkpoint has --num-layers 2, this run 3: set --num-layers 2,"),
        ("num_key_value_heads", 4, "the checkpoint has --num-key-value-heads 2, this run 4:"),
        ("vocab_size", 300, "the checkpoint has --vocab-size 257, this run 300:"),
        ("max_position_embeddings", 32, "the checkpoint has --max-position-embeddings 40, this run 32:"),
        (
            "untie_embeddings_and_output_weights",
            False,
            "has --untie-embeddings-and-output-weights True, this run False",
        ),
        ("layernorm_epsilon", 1e-6, "the checkpoint has --layernorm-epsilon 1e-05, this run 1e-06:"),
    ],
)
def test_another_model_is_named(directory: Path, name: str, value: object, said: str) -> None:
    for flags in ({}, {"finetune": True}, {"no_load_optim": True}):
        assert said in refusal(directory, replace(MODEL, **{name: value}), **flags)


def test_what_shapes_no_weight_may_change(directory: Path) -> None:
    stds = {"init_method_std": 0.1, "output_layer_init_std": 0.2, "embedding_init_method_std": 0.3}
    model = replace(MODEL, seq_length=16, **stds)
    assert find_checkpoint(CheckpointConfig(load=str(directory.parent)), model, LAYOUT, "adam") is not None


ROTATED = replace(MODEL, position_embedding_type="rope")
EXTENDED = {"rotary_scaling": "yarn", "rotary_scaling_factor": 4.0, "rotary_attention_factor": 1.14}


@pytest.mark.parametrize("change", [EXTENDED, {"rotary_base": 500_000.0}], ids=["yarn", "base"])
def test_rotations_change_only_where_positions_are_extended(directory: Path, change: dict[str, Any]) -> None:
    replace(checkpoint_info(), model=asdict(ROTATED)).write(directory)
    model, load = replace(ROTATED, **change), {"load": str(directory.parent)}
    name, value = next(iter(change.items()))
    flag, theirs = "--" + name.replace("_", "-"), getattr(ROTATED, name)
    for flags in ({}, {"finetune": True}, {"extend_positions": True}):
        assert refusal(directory, model, **flags) == (
            f"the checkpoint has {flag} {theirs}, this run {value}: set {flag} {theirs}, or train on for longer "
            "sequences with --extend-positions --finetune"
        )
    extended = CheckpointConfig(**load, finetune=True, extend_positions=True)
    assert find_checkpoint(extended, model, LAYOUT, "adam") is not None
    wider = replace(model, hidden_size=64)
    assert "--hidden-size 32" in refusal(directory, wider, finetune=True, extend_positions=True)


def test_what_a_checkpoint_does_not_name_it_does_not_have(directory: Path) -> None:
    """As one of a version in which models had no such parts."""
    info = checkpoint_info()
    new = ("qk_norm", "rotary_scaling", "rotary_scaling_factor", "rotary_original_length", "softmax_scale")
    replace(info, model={name: value for name, value in info.model.items() if name not in new}).write(directory)
    assert find_checkpoint(CheckpointConfig(load=str(directory.parent)), MODEL, LAYOUT, "adam") is not None
    assert "has --qk-norm none, this run head:" in refusal(directory, replace(MODEL, qk_norm="head"))
    assert "has --softmax-scale 0.35355339059327373, this run 0.5:" in refusal(
        directory, replace(MODEL, softmax_scale=0.5)
    )


@pytest.mark.parametrize(
    "layout",
    [
        replace(LAYOUT, pipeline_parallel_size=1),
        replace(LAYOUT, data_parallel_size=4),
        replace(LAYOUT, tensor_parallel_size=2),
        replace(LAYOUT, num_token_slices=8),
    ],
)
def test_another_layout_may_go_on(directory: Path, layout: ParallelLayout) -> None:
    assert find_checkpoint(CheckpointConfig(load=str(directory.parent)), MODEL, layout, "adam") is not None


def test_another_optimizer_may_load_the_weights_alone(directory: Path) -> None:
    line = refusal(directory, optimizer="sgd")
    assert line == (
        "the checkpoint has the state of --optimizer adam, this run uses sgd: set --optimizer adam, or load the "
        "weights alone with --no-load-optim"
    )
    config = CheckpointConfig(load=str(directory.parent), no_load_optim=True)
    assert find_checkpoint(config, MODEL, LAYOUT, "sgd") is not None


def test_a_checkpoint_without_optimizer_loads_its_weights_alone(directory: Path) -> None:
    replace(checkpoint_info(), optimizer=None).write(directory)
    assert refusal(directory).endswith("load the weights alone, with --no-load-optim or --finetune")
    for flags in ({"finetune": True}, {"no_load_optim": True}):
        config = CheckpointConfig(load=str(directory.parent), **flags)
        assert find_checkpoint(config, MODEL, LAYOUT, "adam") is not None


def test_a_vocabulary_that_is_padded_otherwise_is_refused(directory: Path) -> None:
    line = refusal(directory, layout=replace(LAYOUT, tensor_parallel_size=5))
    assert "vocabulary is padded to 384 for tensor parallel size 1, this run's to 640 for 5: use a tensor" in line


def test_learned_positions_alone_have_a_weight_each(directory: Path) -> None:
    rotary = replace(MODEL, position_embedding_type="rope")
    checkpoint_info(rotary).write(directory)
    longer = replace(rotary, max_position_embeddings=64)
    assert find_checkpoint(CheckpointConfig(load=str(directory.parent)), longer, LAYOUT, "adam") is not None


@pytest.mark.parametrize("flags", [{"load_tag": "global_step3"}, {"ckpt_step": 3}])
def test_an_older_checkpoint_may_be_chosen(directory: Path, flags: dict[str, Any]) -> None:
    older = directory.with_name("global_step3")
    copytree(directory, older)
    checkpoint_info(iteration=3).write(older)
    config = CheckpointConfig(load=str(directory.parent), **flags)
    assert find_checkpoint(config, MODEL, LAYOUT, "adam") == (older, checkpoint_info(iteration=3))


def test_a_tag_that_is_not_there_is_refused(directory: Path) -> None:
    line = refusal(directory, ckpt_step=4)
    assert line == "there is no checkpoint global_step4 in CHECKPOINTS: name one that is there (global_step5)"


def test_a_missing_run_json(directory: Path) -> None:
    (directory / "run.json").unlink()
    line = refusal(directory)
    assert line.startswith("checkpoint CHECKPOINTS/global_step5 has no readable run.json (")
    assert line.endswith("): load one that this trainer saved whole")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b'{"iteration": 5}'], ids=str)
def test_a_broken_run_json(directory: Path, content: bytes) -> None:
    (directory / "run.json").write_bytes(content)
    assert refusal(directory).startswith("checkpoint CHECKPOINTS/global_step5 has no readable run.json (")


def test_a_run_json_of_an_older_version_lacks_a_field(directory: Path) -> None:
    path = directory / "run.json"
    found = json.loads(path.read_text())
    del found["partitioned"]
    path.write_text(json.dumps(found))
    assert "has no readable run.json (it lacks 'partitioned')" in refusal(directory)


def test_latest_names_a_missing_tag(directory: Path) -> None:
    (directory.parent / "latest").write_text("global_step9\n")
    line = refusal(directory)
    assert line == "CHECKPOINTS/latest names global_step9, which is not there: write an existing tag into it"
    (directory.parent / "latest").write_text("global_step5\n")
    assert latest_checkpoint(directory.parent) == directory


FILES = [
    "layer_03-model_00-model_states.pt",
    "layer_05-model_00-model_states.pt",
    "mp_rank_01_model_states.pt",
    "zero_pp_rank_0_mp_rank_01_optim_states.pt",
]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(directory: Path, name: str) -> None:
    """DeepSpeed goes on with a fresh optimizer when the optimizer's files are gone."""
    (directory / name).unlink()
    line = refusal(directory)
    assert line.startswith(f"checkpoint CHECKPOINTS/global_step5 lacks {name}: put the file back, or let ")


@pytest.mark.parametrize("keep", [0, 100, -1])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_cut_short_is_named(directory: Path, name: str, keep: int) -> None:
    """On the rank that reads it, it would be an error while the other ranks wait."""
    path = directory / name
    path.write_bytes(path.read_bytes()[:keep])
    line = refusal(directory)
    assert line.startswith(f"checkpoint CHECKPOINTS/global_step5 is damaged: {name} is not whole: put the file back, ")


def test_weights_alone_need_no_optimizer_files(directory: Path) -> None:
    for path in directory.glob("zero_pp_rank_*"):
        path.unlink()
    config = CheckpointConfig(load=str(directory.parent), finetune=True)
    assert find_checkpoint(config, MODEL, LAYOUT, "adam") is not None


def test_a_file_is_no_directory_of_checkpoints(tmp_path: Path) -> None:
    """Taken for one without checkpoints, training would start afresh."""
    (tmp_path / "corpus.jsonl").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"^--load \S+corpus.jsonl is a file: give the directory that a run saved to$"
    ):
        latest_checkpoint(tmp_path / "corpus.jsonl")


def test_who_names_one_checkpoint_is_told_how(directory: Path) -> None:
    remedy = rf"--load {directory} is one checkpoint: give --load {directory.parent} --load-tag {directory.name}$"
    for look in (
        lambda: existing_checkpoint(directory, None),
        lambda: find_checkpoint(CheckpointConfig(load=str(directory)), MODEL, LAYOUT, "adam"),
    ):
        with pytest.raises(CheckpointError, match=remedy):
            look()
