"""DeepSpeed's settings: derived from flags, agreed with the user's file, whose values take the place of defaults."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_terapipe.arguments import Arguments, parse_arguments, read_arguments
from megatron_terapipe.config import Config
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.training.deepspeed_config import NEVER, deepspeed_config

REQUIRED = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 "
    "--global-batch-size 16 --train-iters 10 --lr 1e-3 --data-path corpus --pipeline-model-parallel-size 2 "
)


def parse(words: str = "") -> Config:
    return parse_arguments((REQUIRED + words).split())


def settings(words: str = "", world_size: int = 4) -> dict[str, Any]:
    config = parse(words)
    return deepspeed_config(config, config.parallel.layout(world_size))


def merged(directory: Path, file: object, words: str = "") -> dict[str, Any]:
    path = directory / "ds.json"
    path.write_text(json.dumps(file))
    return settings(f"{words} --deepspeed_config {path}")


def refusal(directory: Path, file: object, words: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        merged(directory, file, words)
    line = str(caught.value)
    assert "\n" not in line
    return line.replace(str(directory / "ds.json"), "FILE")


def test_plain_run() -> None:
    assert settings("--token-slices 72,56") == {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": 50_000_000,
            "allgather_bucket_size": 50_000_000,
            "contiguous_gradients": False,
        },
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "wall_clock_breakdown": False,
        "steps_per_print": NEVER,
        "pipeline": {
            "token_slices": [72, 56],
            "schedule": "1f1b",
            "pipe_partitioned": False,
            "grad_partitioned": False,
        },
    }


def test_a_file_may_say_how_many_ranks_share_sequences(tmp_path: Path) -> None:
    """And batch sizes count every sequence once. The engine tells DeepSpeed what it counts."""
    made = settings("--context-parallel-size 2", world_size=8)
    assert (made["train_batch_size"], made["gradient_accumulation_steps"]) == (16, 4)
    assert "sequence_parallel_size" not in made
    file = {"sequence_parallel_size": 2, "train_batch_size": 16}
    assert merged(tmp_path, file)["train_batch_size"] == 16
    assert parse(f"--deepspeed-config {tmp_path / 'ds.json'}").parallel.ds_sequence_parallel_size == 2
    assert refusal(tmp_path, file, "--context-parallel-size 1") == (
        "--deepspeed-config FILE sets sequence_parallel_size to 2, but --ds-sequence-parallel-size makes it 1: change "
        "the flag, or remove it from the file"
    )


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ("", "fp32"),
        ("--zero-stage 0", "fp32"),
        ("--bf16", "fp32"),
        ("--bf16 --accumulate-allreduce-grads-in-fp32", "fp32"),
        ("--bf16 --zero-stage 0", "bf16"),
        ("--fp16", "fp16"),
        ("--fp16 --accumulate-allreduce-grads-in-fp32 --untie-embeddings-and-output-weights", "fp32"),
    ],
)
def test_gradients_add_up_in_fp32_where_deepspeed_can(words: str, dtype: str) -> None:
    assert settings(words)["data_types"] == {"grad_accum_dtype": dtype}


def test_fp16() -> None:
    assert settings("--fp16 --initial-loss-scale 256 --loss-scale-window 100")["fp16"] == {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 8,
        "loss_scale_window": 100,
        "hysteresis": 2,
        "min_loss_scale": 1,
    }
    assert settings("--fp16 --loss-scale 128")["fp16"]["loss_scale"] == 128


def test_file_passes_through_where_we_have_no_opinion(tmp_path: Path) -> None:
    result = merged(
        tmp_path,
        {
            "comms_logger": {"enabled": True},
            "steps_per_print": 5,
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 7},
            "train_batch_size": "auto",
            "fp16": {"enabled": "auto", "loss_scale_window": 5},
            "gradient_clipping": 1,
        },
    )
    assert result["comms_logger"] == {"enabled": True}
    assert result["steps_per_print"] == 5
    assert result["zero_optimization"] == {
        "stage": 1,
        "reduce_bucket_size": 7,
        "allgather_bucket_size": 50_000_000,
        "contiguous_gradients": False,
    }
    assert result["train_batch_size"] == 16
    assert result["fp16"] == {"enabled": False, "loss_scale_window": 5}
    assert "reduce_bucket_size" not in settings("--zero-stage 0")["zero_optimization"]


def refusals() -> Iterator[tuple[str, object, list[str]]]:
    """Yield flags, a file, and parts of the line about it."""
    for row in Path(__file__).with_name("deepspeed_refusals.txt").read_text().splitlines()[2:]:
        given, _, parts = row.partition(" => ")
        words, _, file = given.rpartition("< ")
        yield words, json.loads(file), parts.split(" | ")


@pytest.mark.parametrize(("words", "file", "parts"), list(refusals()))
def test_a_file_is_refused_in_one_line(tmp_path: Path, words: str, file: object, parts: list[str]) -> None:
    line = refusal(tmp_path, file, words)
    assert all(part in line for part in (*parts, "--deepspeed-config FILE", ": ")), line


@pytest.mark.parametrize("words", ["--zero-contiguous-gradients", "--fp16 --accumulate-allreduce-grads-in-fp32"])
def test_gradients_of_experts_are_never_reduced_by_deepspeed(words: str) -> None:
    experts = "--num-experts 4 --expert-model-parallel-size 2"
    settings(f"{experts} --fp16"), settings(words)
    with pytest.raises(ConfigError, match=r"DeepSpeed would reduce gradients itself.*: drop the former") as caught:
        settings(f"{experts} {words}")
    assert "--expert-model-parallel-size 2" in str(caught.value)


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    file = {
        "train_batch_size": 32,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": False},
        "gradient_clippin": 1.0,
    }
    line = refusal(tmp_path, file, "--bf16 --zero-stage 1 --adam-beta2 0.999")
    named = ("gradient_clippin", "train_batch_size", "zero_optimization.stage")
    named += ("bf16.enabled", "optimizer.params.lr", "optimizer.params.betas")
    assert [line.index(f"sets {name}") for name in named] == sorted(line.index(f"sets {name}") for name in named)
    assert line.endswith(": change the flags, or remove them from the file")


# In the manner of Megatron-DeepSpeed's examples, of bigscience's, of NeoX's and of Hugging Face's.
MEGATRON_DEEPSPEED = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 10,
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
    "prescale_gradients": True,
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1},
    "wall_clock_breakdown": False,
}
BIGSCIENCE = {
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0},
    "bf16": {"enabled": True},
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
NEOX = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}},
    "zero_optimization": {
        "stage": 1,
        "allgather_partitions": True,
        "allgather_bucket_size": 500000000,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 500000000,
        "contiguous_gradients": True,
    },
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
    "fp16": {"enabled": False},
    "scheduler": None,
    "steps_per_print": 10,
    "flops_profiler": {"enabled": False},
    "wall_clock_breakdown": True,
}
HUGGING_FACE = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}, "reduce_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
}


@pytest.mark.parametrize(
    ("file", "words", "kept"),
    [
        (MEGATRON_DEEPSPEED, "--fp16 --loss-scale-window 500", {"prescale_gradients": True, "steps_per_print": 10}),
        (BIGSCIENCE, "--bf16 --zero-stage 0", {"steps_per_print": 2000}),
        (NEOX, "", {"wall_clock_breakdown": True}),
        (HUGGING_FACE, "--bf16", {}),
    ],
)
def test_files_of_other_projects(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: dict[str, Any], words: str, kept: dict[str, Any]
) -> None:
    result = merged(tmp_path, file, words)
    assert "optimizer" not in result and "scheduler" not in result
    assert {key: result[key] for key in kept} == kept
    for key, value in file["zero_optimization"].items():
        assert value in ("auto", {"device": "none"}) or result["zero_optimization"][key] == value
    monkeypatch.setenv("DS_ACCELERATOR", os.environ.get("DS_ACCELERATOR", "cpu"))
    accepted = pytest.importorskip("deepspeed.runtime.config").DeepSpeedConfig
    # One process: DeepSpeed divides the batch by the processes it sees.
    assert accepted(result | {"gradient_accumulation_steps": 8}).gradient_accumulation_steps == 8


def test_flags_of_megatron_deepspeed_about_zero(tmp_path: Path) -> None:
    words = (
        "--zero-reduce-bucket-size 7 --zero-allgather-bucket-size 8 --zero-reduce-scatter --zero-contigious-gradients"
    )
    expected = {
        "stage": 1,
        "reduce_bucket_size": 7,
        "allgather_bucket_size": 8,
        "reduce_scatter": True,
        "contiguous_gradients": True,
    }
    assert settings(words)["zero_optimization"] == expected
    assert merged(tmp_path, {"zero_optimization": {"reduce_bucket_size": 7}}, words)["zero_optimization"] == expected
    line = refusal(tmp_path, {"zero_optimization": {"reduce_bucket_size": 9, "reduce_scatter": False}}, words)
    assert "--zero-reduce-bucket-size makes it 7" in line
    assert "--zero-reduce-scatter makes it true" in line


@pytest.mark.parametrize("words", ["", "--zero-stage 0", "--bf16", "--bf16 --zero-stage 0", "--fp16"])
def test_deepspeed_accepts_the_settings(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", os.environ.get("DS_ACCELERATOR", "cpu"))
    accepted = pytest.importorskip("deepspeed.runtime.config").DeepSpeedConfig
    result = accepted(settings(f"{words} --global-batch-size 8 --num-token-slices 2 --clip-grad 0", world_size=2))
    assert result.gradient_accumulation_steps == 4
    assert result.pipeline["token_slices"] == [64, 64]
    assert result.zero_config.stage == (0 if "stage 0" in words else 1)
    assert result.float16_config.enabled == ("fp16" in words)
    assert result.bfloat16_config.enabled == ("bf16" in words)
    assert result.gradient_clipping == 0.0


BARE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --train-iters 10 --data-path corpus"


def read(directory: Path, file: object, words: str = "--lr 1 --micro-batch-size 2") -> Arguments:
    """A command line with a file, if it is not None, and without batch sizes."""
    path = directory / "ds.json"
    path.write_text(json.dumps(file))
    return read_arguments(f"{BARE} {words} {'' if file is None else f'--deepspeed_config {path}'}".split())


def test_a_value_of_the_file_wins_over_a_default(tmp_path: Path) -> None:
    file = {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 1},
        "fp16": {
            **{"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 11},
            "hysteresis": 4,
        },
        "optimizer": {"type": "Adam", "params": {"lr": 0.25, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0}},
    }
    config = read(tmp_path, file, "").config
    assert (config.batch.global_batch_size, config.batch.micro_batch_size) == (24, 3)
    assert config.precision.dtype == "fp16"
    assert (config.precision.loss_scale, config.precision.initial_loss_scale) == (None, 2048.0)
    assert (config.precision.loss_scale_window, config.precision.hysteresis) == (500, 4)
    optimizer = config.optimizer
    assert (optimizer.clip_grad, optimizer.lr, optimizer.adam_eps, optimizer.weight_decay) == (0.5, 0.25, 1e-6, 0.0)
    assert (optimizer.adam_beta1, optimizer.adam_beta2) == (0.8, 0.9)
    assert deepspeed_config(config, config.parallel.layout(2))["gradient_accumulation_steps"] == 4


def test_a_file_that_counts_micro_batches(tmp_path: Path) -> None:
    file = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5}
    config = read(tmp_path, file, "--lr 1").config
    assert [config.global_batch_size(ranks) for ranks in (1, 3)] == [10, 30]
    # A flag for the same thing decides, and is held against the file later.
    config = read(tmp_path, file, "--lr 1 --global-batch-size 8").config
    with pytest.raises(ConfigError, match="gradient_accumulation_steps to 5, but --global-batch-size makes it 4"):
        deepspeed_config(config, config.parallel.layout(1))


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "bf16": {"enabled": "auto"}}
    config = read(tmp_path, file, "--lr 1 --micro-batch-size 4 --bf16").config
    assert (config.batch.micro_batch_size, config.precision.bf16) == (4, True)


def test_settings_without_effect_are_listed_in_one_line(tmp_path: Path) -> None:
    file = {
        "activation_checkpointing": {"partition_activations": True, "profile": False, "number_checkpoints": 4},
        "flops_profiler": {"enabled": True},
    }
    arguments = read(tmp_path, file)
    (line,) = [line for line in arguments.notices if "settings" in line]
    named = ("partition_activations", "number_checkpoints")
    assert [part.split(" (")[0] for part in line.partition("here: ")[2].split("; ")] == [
        *("flops_profiler", *(f"activation_checkpointing.{name}" for name in named))
    ]
    deepspeed_config(arguments.config, arguments.config.parallel.layout(2))


Z3 = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}, "cpu_offload": True}
MORE_MEMORY = "ZeRO 1, which trains the same with more memory"


@pytest.mark.parametrize(
    ("words", "file", "scale", "lines"),
    [
        ("--zero-stage 3", {}, None, f"--zero-stage 3 is run as {MORE_MEMORY}"),
        ("", {"zero_optimization": {"stage": 2}}, None, f"zero_optimization.stage 2 (run as {MORE_MEMORY}"),
        (
            "--zero-stage 1 --cpu-optimizer --use-torch-fsdp2 --ds-sequence-parallel-fpdt-chunk-size 65536",
            {"zero_optimization": Z3, "zero_allow_untested_optimizer": False},
            None,
            "--cpu-optimizer, --use-torch-fsdp2, --ds-sequence-parallel-fpdt-chunk-size|zero_optimization.cpu_offload|"
            f"zero_optimization.offload_optimizer (weights and states|zero_optimization.stage 3 (run as {MORE_MEMORY}",
        ),
        (
            "--deepspeed --fp16 --loss-scale 12",
            {"fp16": {"enabled": True, "loss_scale": 0}},
            None,
            "--loss-scale 12 has no effect beside the fp16 section",
        ),
        ("--deepspeed --fp16 --loss-scale 12", {"fp16": {"enabled": True, "loss_scale": 64}}, 64.0, "--loss-scale 12 "),
        ("--deepspeed --fp16 --loss-scale 12", {"fp16": {"enabled": "auto"}}, 12.0, ""),
        ("--fp16 --loss-scale 12", {"fp16": {"enabled": True}}, 12.0, ""),
    ],
)
def test_scripts_of_megatron_deepspeed_train_the_same(
    tmp_path: Path, words: str, file: object, scale: float | None, lines: str
) -> None:
    arguments = read(tmp_path, file, f"--lr 1 --micro-batch-size 2 {words}")
    said = "\n".join(arguments.notices)
    assert all(line in said for line in lines.split("|"))
    assert ("--loss-scale" in lines) == ("--loss-scale" in said)
    assert (arguments.config.optimizer.zero_stage, arguments.config.precision.loss_scale) == (1, scale)
    # DeepSpeed gets what is run.
    settings = deepspeed_config(arguments.config, arguments.config.parallel.layout(2))
    assert settings["zero_optimization"]["stage"] == 1 and settings["zero_allow_untested_optimizer"] is True
    assert not any("offload" in name for name in settings["zero_optimization"])


FP16, OFF = "DeepSpeed needs it for fp16", {"zero_optimization": {"stage": 0}}


@pytest.mark.parametrize(
    ("words", "file", "line"),
    [
        ("--fp16 --zero-stage 0", None, FP16),
        ("--fp16", OFF, FP16),
        (
            "--bf16 --zero-stage 0",
            {**OFF, "data_types": {"grad_accum_dtype": "fp32"}},
            "bf16 with gradients that add up",
        ),
        ("--bf16 --zero-stage 0", None, ""),
        ("--zero-stage 0", None, ""),
    ],
)
def test_zero_0_is_run_as_zero_1_only_where_deepspeed_needs_it(
    tmp_path: Path, words: str, file: object, line: str
) -> None:
    arguments = read(tmp_path, file, f"--lr 1 --micro-batch-size 2 {words}")
    assert arguments.config.optimizer.zero_stage == bool(line)
    notices = [notice for notice in arguments.notices if "--zero-stage 0 is run as --zero-stage 1" in notice]
    assert len(notices) == bool(line) and line in "".join(notices)
    settings = deepspeed_config(arguments.config, arguments.config.parallel.layout(1))
    assert settings["zero_optimization"]["stage"] == bool(line)
