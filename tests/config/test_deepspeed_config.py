"""DeepSpeed's settings: derived from flags, agreed with the user's file, accepted by DeepSpeed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_terapipe.arguments import parse_arguments
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


def test_batch_that_cannot_be_dealt() -> None:
    with pytest.raises(ConfigError, match=r"--global-batch-size 16 is not a multiple of .* = 6: give a multiple"):
        settings(world_size=6)


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


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (
            {"train_batch_size": 32},
            "--deepspeed-config FILE sets train_batch_size to 32, but --global-batch-size makes it 16: "
            "change the flag, or remove it from the file",
        ),
        (
            {"zero_optimization": {"stage": 2}},
            "--deepspeed-config FILE sets zero_optimization.stage to 2, but --zero-stage makes it 1: "
            "change the flag, or remove it from the file",
        ),
        ({"bf16": {"enabled": True}}, "--deepspeed-config FILE sets bf16.enabled to true, but --bf16 makes it false: "),
        ({"bfloat16": {"enabled": True}}, "--deepspeed-config FILE sets bf16.enabled to true, but --bf16 makes it"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "--deepspeed-config FILE sets data_types.grad_accum_dtype to"),
        (
            {"pipeline": {"pipe_partitioned": True}},
            "--deepspeed-config FILE sets pipeline.pipe_partitioned to true, but it must be false: remove it from the "
            "file",
        ),
        (
            {"optimizer": {"type": "Adam"}},
            "--deepspeed-config FILE sets optimizer, but the optimizer is built from --optimizer, --lr and their like: "
            "remove it from the file",
        ),
        ({"scheduler": {}}, "--deepspeed-config FILE sets scheduler, but the learning rate is built from"),
        ({"data_parallel_size": 2}, "--deepspeed-config FILE sets data_parallel_size, but it follows from the world"),
        ([], "--deepspeed-config FILE is not a JSON object: write one"),
    ],
)
def test_file_that_contradicts_a_flag(tmp_path: Path, file: object, line: str) -> None:
    assert refusal(tmp_path, file).startswith(line)


def test_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"--deepspeed-config none.json cannot be read"):
        settings("--deepspeed-config none.json")


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
