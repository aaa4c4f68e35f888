"""Damaged and foreign checkpoints of Megatron-LM are refused in one line, and none of them runs a program or hangs."""

import os
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe import convert
from megatron_terapipe.checkpoint.conversion import import_megatron
from megatron_terapipe.checkpoint.directories import readable_checkpoint
from megatron_terapipe.checkpoint.megatron_files import DistributedWriter
from megatron_terapipe.checkpoint.megatron_model import MEGATRON, megatron_info
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.huggingface.families.family import check_expressible
from megatron_terapipe.huggingface.families.settings import SettingsFile
from megatron_terapipe.huggingface.folder_weights import rules_of
from megatron_terapipe.huggingface.weight_rules import split_layer
from megatron_terapipe.model.gpt import gpt_layers, layers_with_weights
from tests.hostile_files import poison

MODEL = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=4, vocab_size=16, vocab_rows=16)
SEED, INPUTS = 26, 100


def write(directory: Path, *, torch_dist: bool) -> Path:
    """Write a checkpoint of one rank without megatron-core, and return its directory."""
    iteration = directory / "iter_0000005"
    iteration.mkdir(parents=True)
    args = Namespace(**MEGATRON.write(MODEL), padded_vocab_size=16, consumed_train_samples=20)
    tensors = {}
    writer = DistributedWriter(iteration, MODEL)
    for index in layers_with_weights(MODEL):
        layer = split_layer(rules_of(MODEL, MEGATRON, index), gpt_layers(MODEL)[index].build().state_dict())
        tensors |= layer
        writer.write(layer)
    writer.finish(args, 5)
    if not torch_dist:
        for path in iteration.iterdir():
            path.unlink()
        (iteration / "mp_rank_00").mkdir()
        rank = {"args": args, "iteration": 5, "checkpoint_version": 3.0, "model": tensors}
        torch.save(rank, iteration / "mp_rank_00" / "model_optim_rng.pt")
    return directory


def read(directory: Path) -> None:
    """Read all of a checkpoint, as a run and as a conversion do."""
    found = readable_checkpoint(directory, None, or_previous=False)
    assert found is not None and found[1].iteration == 5
    import_megatron(found[0], directory / "converted")


@pytest.mark.parametrize("torch_dist", [True, False])
def test_whole_ones_are_read(torch_dist: bool, tmp_path: Path) -> None:
    read(write(tmp_path / "whole", torch_dist=torch_dist))


def changed(file: str = "common.pt", **values: Any) -> Callable[[Path], object]:
    """Return a function that sets arguments of a checkpoint."""

    def change(checkpoint: Path) -> None:
        content = torch.load(checkpoint / file, weights_only=False)
        vars(content["args"]).update(values)
        torch.save(content, checkpoint / file)

    return change


def pipe(name: str) -> Callable[[Path], object]:
    def replace(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        os.mkfifo(checkpoint / name)

    return replace


def rename(name: str, other: str) -> Callable[[Path], object]:
    return lambda checkpoint: (checkpoint / name).rename(checkpoint / other)


RANK_FILE = "mp_rank_00/model_optim_rng.pt"
FAULTS: dict[str, tuple[bool, Callable[[Path], object], str]] = {
    "a rank is missing": (
        False,
        rename("mp_rank_00", "mp_rank_01"),
        "lacks model_optim_rng.pt of tensor-parallel rank 0",
    ),
    "another format": (True, lambda checkpoint: (checkpoint / "common.pt").unlink(), "--ckpt-format torch_dist"),
    "no places": (True, lambda checkpoint: (checkpoint / ".metadata").unlink(), "has no .metadata"),
    "no tensors": (True, lambda checkpoint: (checkpoint / "__2_0.distcp").unlink(), "cannot be read"),
    "a pipe of tensors": (True, pipe("__2_0.distcp"), "__2_0.distcp is not a file"),
    "no number of rows": (True, changed(padded_vocab_size="many"), "invalid literal"),
    "an object of a foreign class": (True, changed(normalization=torch.nn.ReLU()), 'sets normalization to "an object"'),
    "a hostile file": (False, lambda checkpoint: poison(checkpoint / RANK_FILE, checkpoint / "hit"), "cannot be read"),
    "experts of ranks": (
        False,
        changed(RANK_FILE, num_experts=4, add_bias_linear=False),
        "has experts in format torch, where ranks name their own: save it with --ckpt-format torch_dist",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_one_line(name: str, tmp_path: Path) -> None:
    torch_dist, damage, words = FAULTS[name]
    directory = write(tmp_path / "saved", torch_dist=torch_dist)
    checkpoint = directory / "iter_0000005"
    damage(checkpoint)
    with pytest.raises(UserError) as caught:
        read(directory)
    assert words in str(caught.value) and str(checkpoint) in str(caught.value) and "\n" not in str(caught.value)
    assert not (checkpoint / "hit").exists()


def test_samples_that_are_not_counted_are_those_of_the_iterations(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "saved", torch_dist=True) / "iter_0000005"
    changed(consumed_train_samples=0, global_batch_size=4)(checkpoint)
    assert megatron_info(checkpoint).consumed_samples == 5 * 4


def test_incomplete_states_of_the_optimizer_are_not_loaded(tmp_path: Path) -> None:
    directory = write(tmp_path / "saved", torch_dist=False)
    file = directory / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt"
    rank = torch.load(file, weights_only=False)
    groups: list[dict[str, Any]] = [{"params": [], "wd_mult": 1.0}, {"params": [], "wd_mult": 0.0}]
    ordered = sorted(rank["model"].items(), key=lambda each: each[1].dim() == 1)
    for number, (_, weight) in enumerate(ordered):
        groups[weight.dim() == 1]["params"].append(number)
    states = {number: {"exp_avg": weight, "step": 5} for number, (_, weight) in enumerate(ordered)}
    rank["optimizer"] = {"optimizer": {"state": states, "param_groups": groups}}
    torch.save(rank, file)
    assert import_megatron(file.parents[1], tmp_path / "whole")[1] is None
    del states[len(states) - 1]
    torch.save(rank, file)
    missing = import_megatron(file.parents[1], tmp_path / "part")[1]
    assert missing == f"exp_avg of {ordered[-1][0]} is missing or has another shape"


def test_a_model_without_iterations_is_a_release(tmp_path: Path) -> None:
    directory = write(tmp_path / "saved", torch_dist=True)
    (directory / "iter_0000005").rename(directory / "release")
    (directory / "latest_checkpointed_iteration.txt").write_text("release")
    for command, load, output in (("from", "saved", "ours"), ("to", "ours", "back"), ("from", "back", "again")):
        words = [f"{command}-megatron", "--load", str(tmp_path / load), "--output", str(tmp_path / output)]
        assert convert.main(words) == 0
    assert {each.name for each in (tmp_path / "back").iterdir()} == {"release", "latest_checkpointed_iteration.txt"}
    assert (tmp_path / "back" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert (tmp_path / "again" / "global_step0").is_dir()


@pytest.mark.parametrize("number", [0, -5, 17])
def test_numbers_of_tokens_that_do_not_fit_the_rows_are_refused(number: int, tmp_path: Path) -> None:
    directory = write(tmp_path / "saved", torch_dist=True)
    with pytest.raises(UserError, match=f"--vocab-size {number} is not 1 to 16"):
        import_megatron(directory / "iter_0000005", tmp_path / "ours", vocab_size=number)


def test_random_damage_is_refused_or_read(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    files = [path for each in (True, False) for path in sorted(write(tmp_path / str(each), torch_dist=each).rglob("*"))]
    targets = [path for path in files if path.is_file() and path.name != "latest_checkpointed_iteration.txt"]
    refused = 0
    for _ in range(INPUTS):
        path = chance.choice(targets)
        whole = path.read_bytes()
        content = bytearray(whole)
        for _ in range(chance.choice((1, 4, 64))):
            content[chance.randrange(len(content))] = chance.randrange(256)
        path.write_bytes(content[: chance.choice((len(content), chance.randrange(len(content))))])
        try:
            read(tmp_path / path.relative_to(tmp_path).parts[0])
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
        path.write_bytes(whole)
    assert refused > INPUTS / 4


ROPE = {"position_embedding_type": "rope"}
LATENT = ROPE | {"multi_latent_attention": True, "rotary_interleaved": True, "disable_bias_linear": True}
EXPRESSED: list[dict[str, Any]] = [
    {},
    {"disable_bias_linear": True, "activation": "gelu"},
    {"position_embedding_type": "none", "activation": "squared-relu", "apply_layernorm_1p": True},
    ROPE | {"rotary_percent": 0.5, "rotary_interleaved": True, "sliding_window": 5, "window_attn_skip_freq": "2"},
    ROPE | {"rotary_scaling": "llama3", "activation": "swiglu", "normalization": "rmsnorm", "qk_norm": "head"},
    ROPE | {"rotary_scaling_factor": 2.0, "num_key_value_heads": 1, "disable_bias_linear": True, "add_qkv_bias": True},
    LATENT,
    LATENT | {"q_lora_rank": 8, "rotary_scaling_factor": 4.0, "mscale": 0.5, "mscale_all_dim": 0.7, "qk_norm": "head"},
    {"softmax_type": "learnable", "activation": "quick-geglu", "glu_linear_offset": 1.0, "num_experts": 4}
    | {"activation_func_clamp_value": 7.0, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0},
]
NOT_EXPRESSED: dict[str, dict[str, Any]] = {
    "--parallel-residual": {"parallel_residual": True},
    "--activation geglu": {"activation": "geglu"},
    "--norm-placement both": {"norm_placement": "both"},
    "--logit-softcap 30": {"logit_softcap": 30.0},
    "no --rotary-interleaved": LATENT | {"rotary_interleaved": False},
    "--latent-norm-epsilon 1e-06": LATENT | {"latent_norm_epsilon": 1e-6},
    "--softmax-scale 1.0": LATENT | {"softmax_scale": 1.0},
}


def model_with(settings: dict[str, Any]) -> ModelConfig:
    return ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=64, vocab_size=16, **settings)


@pytest.mark.parametrize("settings", EXPRESSED, ids=str)
def test_arguments_describe_the_model_that_wrote_them(settings: dict[str, Any]) -> None:
    assert MEGATRON.differences(model_with(settings)) == []


@pytest.mark.parametrize("setting", NOT_EXPRESSED)
def test_models_that_megatron_does_not_have_are_refused(setting: str) -> None:
    with pytest.raises(UserError, match=f"the model has {setting}.*, and Megatron-LM"):
        check_expressible(MEGATRON, model_with(NOT_EXPRESSED[setting]))


@pytest.mark.parametrize(
    ("name", "value", "model"),
    [
        ("moe_latent_size", 8, {}),
        ("window_size", (3, 3), {}),
        ("rotary_interleaved", True, LATENT),
        ("rope_type", "3d", LATENT),
    ],
)
def test_arguments_of_other_models_are_refused(name: str, value: Any, model: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"sets {name}"):
        MEGATRON.read(SettingsFile(MEGATRON.write(model_with(model)) | {name: value}, "a checkpoint"))
